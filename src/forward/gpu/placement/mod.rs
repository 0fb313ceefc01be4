//! Divides a layer's experts that are not in VRAM between the CPU and the link, and plans what the
//! link prefetches beside them: PreSched (PreScope, section 4.3), with the measured costs of this
//! machine. Pure: it reads no clock and moves nothing.
//!
//! With a policy of `placement=presched` the experts that are predicted for the next layers compete
//! for the link, and the plan of prefetches is kept. With others each layer is divided by itself,
//! and whatever is predicted queues behind all demand.

mod attention_timer;
mod cpu_timer;

pub use attention_timer::AttentionTimer;
pub use cpu_timer::CpuTimer;

use crate::policy::{Missing, Placement, PreSched, PredictedLayer, Schedule, Timer, View};

/// The experts that a layer misses in VRAM, what is predicted behind it, and the state of the link.
#[derive(Clone, Copy, Debug)]
pub struct PlacementInput<'a> {
    /// Distinct, in any order.
    pub missing: &'a [Missing],
    /// The MoE layers behind it, the nearest first.
    pub predicted: &'a [PredictedLayer],
    /// Nanoseconds to load one expert; `None` until it was measured.
    pub load_ns: Option<f64>,
    /// Granules of an expert: between two of them, demand overtakes prefetch.
    pub n_granules: usize,
    /// Nanoseconds until the transfers that are running are done.
    pub delay_ns: f64,
}

/// Places missing experts, layer by layer.
pub struct Placer {
    pub cpu: CpuTimer,
    pub attention: AttentionTimer,
    /// For tests: the share of experts that go to the CPU, from 0 to 1, at any costs.
    share: Option<f32>,
    presched: PreSched,
}

impl Placer {
    pub fn new(share: Option<f32>) -> Placer {
        assert!(share.is_none_or(|share| (0.0..=1.0).contains(&share)), "{share:?}");
        let (cpu, attention) = (CpuTimer::default(), AttentionTimer::default());
        Placer { cpu, attention, share, presched: PreSched::filling() }
    }

    /// Replaces the contents of `out`. Each missing expert is then in `upload` or in `cpu`. Returns
    /// whether costs have decided, so that prefetches are planned too.
    pub fn place(&mut self, input: &PlacementInput, out: &mut Schedule) -> bool {
        let PlacementInput { missing, predicted, load_ns, n_granules, delay_ns } = *input;
        if let Some(share) = self.share {
            split(missing, out, |m| on_cpu(m.expert, share));
            return false;
        }
        let (Some((a, b)), Some(load_ns)) = (self.cpu.fit(), load_ns) else {
            self.try_out(input, out);
            return false;
        };
        let timer = Timer {
            cpu_token_ns: a,
            cpu_start_ns: b,
            load_ns,
            granule_ns: load_ns / n_granules as f64,
            attention_ns: self.attention.ns().unwrap_or(0.0),
        };
        let view = View { timer, current: missing, predicted, delay_ns };
        self.presched.place(&view, out);
        true
    }

    /// Gives one expert to whichever of CPU and link has not been measured: the CPU gets the one
    /// with the fewest tokens, the link the one with the most. A single expert goes to the CPU.
    fn try_out(&self, input: &PlacementInput, out: &mut Schedule) {
        let PlacementInput { missing, load_ns, .. } = *input;
        let weight = |m: &&Missing| (m.n_tokens, std::cmp::Reverse(m.expert));
        let by_weight = |a: &&Missing, b: &&Missing| {
            weight(a).partial_cmp(&weight(b)).expect("tokens are numbers")
        };
        let heaviest = missing.iter().max_by(by_weight).map(|m| m.expert);
        let lightest = missing.iter().min_by(by_weight).map(|m| m.expert);
        match (self.cpu.fit(), load_ns) {
            (None, Some(_)) => split(missing, out, |m| Some(m.expert) == lightest),
            (None, None) if missing.len() < 2 => split(missing, out, |_| true),
            _ => split(missing, out, |m| Some(m.expert) != heaviest),
        }
    }
}

fn split(missing: &[Missing], out: &mut Schedule, on_cpu: impl Fn(&Missing) -> bool) {
    *out = Schedule::default();
    for m in missing {
        let list = if on_cpu(m) { &mut out.cpu } else { &mut out.upload };
        list.push(m.expert);
    }
}

/// Whether an expert goes to the CPU at this share: the same experts each time, and more of them at
/// a larger share. Multiples of the golden ratio fill the unit interval evenly.
fn on_cpu(expert: u32, share: f32) -> bool {
    const GOLDEN: u32 = 0x9e37_79b9;
    let at = f64::from(expert.wrapping_mul(GOLDEN)) / (1u64 << 32) as f64;
    at < f64::from(share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn missing(tokens: &[u32]) -> Vec<Missing> {
        let missing = |(expert, n): (usize, &u32)| Missing::whole(expert as u32, f64::from(*n));
        tokens.iter().enumerate().map(missing).collect()
    }

    fn input(missing: &[Missing], load_ns: Option<f64>) -> PlacementInput<'_> {
        PlacementInput { missing, predicted: &[], load_ns, n_granules: 1, delay_ns: 0.0 }
    }

    fn place(placer: &mut Placer, input: &PlacementInput) -> (Vec<u32>, Vec<u32>) {
        let mut out = Schedule { cpu: vec![99], upload: vec![99], prefetch: vec![(9, 9)] };
        placer.place(input, &mut out);
        // Nothing is predicted.
        assert_eq!(out.prefetch, []);
        (out.cpu, out.upload)
    }

    #[test]
    fn measured_costs_decide() {
        let mut placer = Placer::new(None);
        for n in [1, 2, 20, 30] {
            placer.cpu.observe(n, 10.0 * n as f64 + 20.0);
        }
        let missing = missing(&[1, 30, 2, 20]);
        // As in PreSched's own test: 100 < 610 and 200 < 290, but not 300 < 70.
        let (cpu, upload) = place(&mut placer, &input(&missing, Some(100.0)));
        assert_eq!((cpu, upload), (vec![2, 0], vec![1, 3]));
        // A slow link leaves all to the CPU, one that costs nothing takes all.
        let (cpu, _) = place(&mut placer, &input(&missing, Some(1e6)));
        assert_eq!(cpu.len(), 4);
        let (cpu, _) = place(&mut placer, &input(&missing, Some(0.001)));
        assert_eq!(cpu.len(), 0);
    }

    /// As in PreSched's own tests: what the next layer needs more takes the link's turn, and the
    /// measured attention makes room for it.
    #[test]
    fn predicted_experts_compete_for_the_link() {
        let mut placer = Placer::new(None);
        for n in [1, 2, 20, 30] {
            placer.cpu.observe(n, 10.0 * n as f64 + 20.0);
        }
        let mut place = |predicted: &[PredictedLayer]| {
            let missing = missing(&[9]);
            let mut out = Schedule::default();
            placer.place(&PlacementInput { predicted, ..input(&missing, Some(100.0)) }, &mut out);
            (out.cpu, out.upload, out.prefetch)
        };
        assert_eq!(place(&[]), (vec![], vec![0], vec![]));
        let next = [PredictedLayer { missing: missing(&[12]), p_hit: 0.9 }];
        assert_eq!(place(&next), (vec![0], vec![], vec![(1, 0)]));
    }

    #[test]
    fn what_is_not_known_is_tried_with_one_expert() {
        let mut placer = Placer::new(None);
        let three = missing(&[5, 7, 1]);
        assert_eq!(place(&mut placer, &input(&three, None)), (vec![0, 2], vec![1]));
        assert_eq!(place(&mut placer, &input(&three[..1], None)), (vec![0], vec![]));
        assert_eq!(place(&mut placer, &input(&three, Some(50.0))), (vec![2], vec![0, 1]));
        placer.cpu.observe(1, 10.0);
        assert_eq!(place(&mut placer, &input(&three, None)), (vec![0, 2], vec![1]));
        assert_eq!(place(&mut placer, &input(&three[..1], None)), (vec![], vec![0]));
        assert_eq!(place(&mut placer, &input(&[], None)), (vec![], vec![]));
    }

    #[test]
    fn a_share_is_kept_whatever_things_take() {
        let all = missing(&[1; 128]);
        let mut before: Vec<u32> = Vec::new();
        for share in [0.0, 0.1, 0.25, 0.5, 0.75, 1.0] {
            let mut placer = Placer::new(Some(share));
            placer.cpu.observe(1, 1.0);
            let (cpu, upload) = place(&mut placer, &input(&all, Some(1e9)));
            assert!((cpu.len() as f32 - 128.0 * share).abs() <= 2.0, "{share}: {}", cpu.len());
            assert_eq!(cpu.len() + upload.len(), 128);
            // By id, and no expert changes sides when the share grows.
            assert!(before.iter().all(|expert| cpu.contains(expert)));
            let (some, _) = place(&mut placer, &input(&all[5..9], None));
            assert!((5..9).all(|expert| some.contains(&expert) == cpu.contains(&expert)));
            before = cpu;
        }
    }

    proptest! {
        #[test]
        fn each_expert_goes_to_one_of_both(
            tokens in prop::collection::vec(1u32..40, 0..12),
            observed in prop::collection::vec((1usize..40, 0.0f64..1e6), 0..8),
            load_ns in prop::option::of(0.1f64..1e6),
            delay_ns in 0.0f64..1e6,
            share in prop::option::of(0.0f32..=1.0),
        ) {
            let missing = missing(&tokens);
            let mut placer = Placer::new(share);
            observed.iter().for_each(|(n, ns)| placer.cpu.observe(*n, *ns));
            let input = PlacementInput { delay_ns, ..input(&missing, load_ns) };
            let (cpu, upload) = place(&mut placer, &input);
            let mut all = [&cpu[..], &upload].concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..tokens.len() as u32).collect::<Vec<_>>());
            prop_assert_eq!((cpu, upload), place(&mut placer, &input));
        }
    }
}
