//! Divides a layer's experts that are not in VRAM between the CPU and the link, and plans what the
//! link prefetches beside them: PreSched (PreScope, section 4.3), with the measured costs of this
//! machine. Pure: it reads no clock and moves nothing.
//!
//! An expert for the link is loaded, or kernels read it in place, whichever takes the link less:
//! PreSched divides by that time. Loads and reads share the link's rate, so they are counted one
//! behind the other.
//!
//! With a policy of `placement=presched` the experts that are predicted for the next layers compete
//! for the link, and the plan of prefetches is kept. With others each layer is divided by itself,
//! and whatever is predicted queues behind all demand.

mod attention_timer;
mod cpu_timer;
mod in_place_timer;

pub use attention_timer::AttentionTimer;
pub use cpu_timer::CpuTimer;
pub use in_place_timer::InPlaceTimer;

use crate::backend::gpu::switch;
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
    /// The missing experts that kernels can read where they are.
    pub readable: &'a [u32],
    /// Bytes of an expert.
    pub expert_bytes: usize,
}

/// When kernels read experts in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InPlace {
    Never,
    /// If it is measured to be faster.
    IfFaster,
    /// Whenever they can, for tests.
    Always,
}

impl InPlace {
    /// The variable that says so: 0 or 1.
    pub const SWITCH: &str = "MOEBA_GPU_IN_PLACE";

    pub fn of_environment() -> InPlace {
        match switch(InPlace::SWITCH) {
            Some(false) => InPlace::Never,
            Some(true) => InPlace::Always,
            None => InPlace::IfFaster,
        }
    }
}

/// Places missing experts, layer by layer.
pub struct Placer {
    pub cpu: CpuTimer,
    pub attention: AttentionTimer,
    pub in_place: InPlaceTimer,
    /// For tests: the share of experts that go to the CPU, from 0 to 1, at any costs.
    share: Option<f32>,
    reads: InPlace,
    presched: PreSched,
    /// The experts that are divided between CPU and link.
    rest: Vec<Missing>,
}

impl Placer {
    pub fn new(share: Option<f32>, reads: InPlace) -> Placer {
        assert!(share.is_none_or(|share| (0.0..=1.0).contains(&share)), "{share:?}");
        Placer {
            cpu: CpuTimer::default(),
            attention: AttentionTimer::default(),
            in_place: InPlaceTimer::default(),
            share,
            reads,
            presched: PreSched::filling(),
            rest: Vec::new(),
        }
    }

    /// Whether experts may be read in place at all.
    pub fn may_read(&self) -> bool {
        match self.reads {
            InPlace::Never => false,
            InPlace::IfFaster => self.share.is_none(),
            InPlace::Always => true,
        }
    }

    /// Replaces the contents of `out`: each missing expert is in one of its lists then. Returns
    /// whether costs have decided, so that prefetches are planned too.
    pub fn place(&mut self, input: &PlacementInput, out: &mut Schedule) -> bool {
        let PlacementInput { missing, load_ns, readable, expert_bytes, .. } = *input;
        let is_readable = |m: &Missing| readable.contains(&m.expert);
        let read_ns = self.in_place.ns(expert_bytes);
        let mut rest = std::mem::take(&mut self.rest);
        rest.clear();
        rest.extend(missing);
        let mut reads = Vec::new();
        match (self.reads, read_ns, load_ns) {
            _ if !self.may_read() || readable.is_empty() => {}
            (InPlace::Always, ..) => reads = take(&mut rest, is_readable),
            // The link takes the lesser time.
            (_, Some(read_ns), Some(load_ns)) => {
                for m in rest.iter_mut().filter(|m| is_readable(m)) {
                    m.part = m.part.min(m.n_tokens * read_ns / load_ns);
                }
            }
            (_, None, Some(_)) if self.cpu.fit().is_some() => {
                let lightest = missing.iter().filter(|m| is_readable(m));
                let lightest = lightest.min_by(|a, b| a.n_tokens.total_cmp(&b.n_tokens));
                let tried = lightest.map(|m| m.expert);
                reads = take(&mut rest, |m| Some(m.expert) == tried);
            }
            _ => {}
        }
        let has_decided = self.divide(&PlacementInput { missing: &rest, ..*input }, out);
        // Those whose part is not that of a load.
        let is_read = |expert: &u32| {
            let part = |all: &[Missing]| all.iter().find(|m| m.expert == *expert).map(|m| m.part);
            part(&rest) != part(missing)
        };
        reads.extend(out.upload.iter().copied().filter(|expert| is_read(expert)));
        out.upload.retain(|expert| !is_read(expert));
        out.in_place = reads;
        self.rest = rest;
        has_decided
    }

    /// Divides the missing experts between CPU and link.
    fn divide(&mut self, input: &PlacementInput, out: &mut Schedule) -> bool {
        let PlacementInput { missing, predicted, load_ns, n_granules, delay_ns, .. } = *input;
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

/// Takes some experts out of a list.
fn take(from: &mut Vec<Missing>, is_taken: impl Fn(&Missing) -> bool) -> Vec<u32> {
    let taken = from.iter().filter(|m| is_taken(m)).map(|m| m.expert).collect();
    from.retain(|m| !is_taken(m));
    taken
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
        PlacementInput {
            missing,
            predicted: &[],
            load_ns,
            n_granules: 1,
            delay_ns: 0.0,
            readable: &[],
            expert_bytes: 100,
        }
    }

    fn placer(share: Option<f32>) -> Placer {
        Placer::new(share, InPlace::IfFaster)
    }

    fn place(placer: &mut Placer, input: &PlacementInput) -> (Vec<u32>, Vec<u32>) {
        let (cpu, upload, in_place) = place_three(placer, input);
        assert!(in_place.is_empty());
        (cpu, upload)
    }

    fn place_three(placer: &mut Placer, input: &PlacementInput) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
        let (cpu, upload, in_place) = (vec![99], vec![99], vec![99]);
        let mut out = Schedule { cpu, upload, in_place, prefetch: vec![(9, 9)] };
        placer.place(input, &mut out);
        // Nothing is predicted.
        assert_eq!(out.prefetch, []);
        (out.cpu, out.upload, out.in_place)
    }

    /// A placer that has measured a CPU's expert, and an expert of 100 bytes read in place.
    fn measured(cpu_ns: f64, read_ns: f64) -> Placer {
        let mut placer = placer(None);
        placer.cpu.observe(1, cpu_ns);
        (0..4).for_each(|_| placer.in_place.observe(100, read_ns));
        placer
    }

    /// One expert goes the way that takes the least time; one in place is never slower than both.
    #[test]
    fn the_fastest_way_wins() {
        let one = missing(&[1]);
        for cpu_ns in [100.0, 250.0, 400.0] {
            for load_ns in [90.0, 240.0, 390.0] {
                for read_ns in [80.0, 230.0, 380.0, 500.0] {
                    let input = PlacementInput { readable: &[0], ..input(&one, Some(load_ns)) };
                    let placed = place_three(&mut measured(cpu_ns, read_ns), &input);
                    let least = cpu_ns.min(load_ns).min(read_ns);
                    let expected = match least {
                        ns if ns == cpu_ns => (vec![0], vec![], vec![]),
                        ns if ns == load_ns => (vec![], vec![0], vec![]),
                        _ => (vec![], vec![], vec![0]),
                    };
                    assert_eq!(placed, expected, "CPU {cpu_ns}, load {load_ns}, read {read_ns}");
                }
            }
        }
    }

    /// Several are divided between the CPU and the link. On the link a row more costs a read more,
    /// and no load; a part of an expert in VRAM helps a load alone; and a transfer that runs holds
    /// up both.
    #[test]
    fn reads_share_the_link_and_count_by_rows() {
        let mut four = missing(&[1, 1, 1, 1]);
        let place = |missing: &[Missing], readable: &[u32], delay_ns| {
            let input = PlacementInput { readable, delay_ns, ..input(missing, Some(100.0)) };
            place_three(&mut measured(100.0, 50.0), &input)
        };
        // Three on the link take 150 and one on the CPU 100, where two and two take 200.
        assert_eq!(place(&four, &[0, 1, 2, 3], 0.0), (vec![3], vec![], vec![0, 1, 2]));
        assert_eq!(place(&four, &[0, 1, 2, 3], 1e6), (vec![0, 1, 2, 3], vec![], vec![]));
        assert!(place(&four, &[], 0.0).2.is_empty());
        four[2].part = 0.25;
        let (_, upload, in_place) = place(&four, &[0, 1, 2, 3], 0.0);
        assert!(upload == [2] && !in_place.is_empty() && !in_place.contains(&2));
        let three_rows = missing(&[3]);
        assert_eq!(place(&three_rows, &[0], 0.0), (vec![0], vec![], vec![]));
    }

    #[test]
    fn it_is_tried_until_it_is_measured_and_can_be_forced_or_forbidden() {
        let two = missing(&[4, 1]);
        let input = |load_ns| PlacementInput { readable: &[0, 1], ..input(&two, load_ns) };
        let mut placer = measured(1e9, 1.0);
        placer.in_place = InPlaceTimer::default();
        // CPU and link come first.
        assert!(place_three(&mut placer, &input(None)).2.is_empty());
        assert_eq!(place_three(&mut placer, &input(Some(1.0))), (vec![], vec![0], vec![1]));
        (0..4).for_each(|_| placer.in_place.observe(100, 1e6));
        assert_eq!(place_three(&mut placer, &input(Some(1.0))), (vec![], vec![0, 1], vec![]));
        let all = (vec![], vec![], vec![0, 1]);
        for share in [None, Some(0.0), Some(1.0)] {
            let mut forced = Placer::new(share, InPlace::Always);
            assert_eq!(place_three(&mut forced, &input(None)), all);
            let mut never = Placer::new(share, InPlace::Never);
            assert!(!never.may_read());
            never.in_place = measured(1.0, 1e-9).in_place;
            never.cpu.observe(1, 1e9);
            assert!(place_three(&mut never, &input(Some(1e9))).2.is_empty());
        }
    }

    #[test]
    fn measured_costs_decide() {
        let mut placer = placer(None);
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

    /// After PreSched's own tests: an expert that the next layer needs more takes the link's turn,
    /// and the measured attention makes room for it.
    #[test]
    fn predicted_experts_compete_for_the_link() {
        let mut placer = placer(None);
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
        let mut placer = placer(None);
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
            let mut placer = placer(Some(share));
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
            let mut placer = placer(share);
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
