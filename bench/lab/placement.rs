//! Placements that PreScope is compared with: Fiddler's and HybriMoE's.

use moeba::policy::placement::sort_ascending;
use moeba::policy::{Placement, Schedule, View};

/// Every missing expert on the CPU: Fiddler, whose GPU holds a fixed set.
#[derive(Clone, Debug, Default)]
pub struct AllOnCpu;

impl Placement for AllOnCpu {
    fn place(&mut self, view: &View, out: &mut Schedule) {
        let mut current = view.current.to_vec();
        sort_ascending(&mut current);
        out.clear();
        out.split(&current, 0);
    }
}

/// Prefetches of a greedy placement, the experts with most tokens first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefetching {
    Nothing,
    /// As much as can begin before the next layer.
    WhileIdle,
    /// So many experts of the next layer.
    Fixed(usize),
}

/// HybriMoE's strategy as PreScope describes it (2.2, 6.2.2). Each layer by itself: the number of
/// uploads that minimises the longer of the link's and the CPU's time, and then prefetch without
/// regard to its gain or delays.
#[derive(Clone, Debug)]
pub struct Greedy {
    pub prefetching: Prefetching,
}

impl Placement for Greedy {
    fn place(&mut self, view: &View, out: &mut Schedule) {
        let timer = &view.timer;
        let mut current = view.current.to_vec();
        sort_ascending(&mut current);
        let n = current.len();
        let link_ns = |uploads: usize| match uploads {
            0 => 0.0,
            uploads => view.delay_ns + uploads as f64 * timer.load_ns,
        };
        let cpu_ns = |uploads: usize| -> f64 {
            current[..n - uploads].iter().map(|m| timer.cpu_ns(m.n_tokens)).sum()
        };
        let longer = |uploads: &usize| link_ns(*uploads).max(cpu_ns(*uploads));
        let best = (0..=n).min_by(|a, b| longer(a).total_cmp(&longer(b))).unwrap_or(0);
        out.clear();
        out.split(&current, best);
        let busy_ns = view.delay_ns + best as f64 * timer.load_ns;
        let idle_ns = longer(&best) - busy_ns + timer.attention_ns;
        let most = match self.prefetching {
            Prefetching::Nothing => 0,
            Prefetching::WhileIdle => (idle_ns / timer.load_ns).ceil().max(0.0) as usize,
            Prefetching::Fixed(n) => n,
        };
        let mut next = view.predicted.first().cloned().unwrap_or_default().missing;
        sort_ascending(&mut next);
        out.prefetch.extend(next.iter().rev().take(most).map(|m| (1, m.expert)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moeba::policy::{Missing, PredictedLayer, Timer};
    use proptest::prelude::*;

    const TIMER: Timer = Timer {
        cpu_token_ns: 10.0,
        cpu_start_ns: 20.0,
        load_ns: 100.0,
        granule_ns: 100.0,
        attention_ns: 30.0,
    };

    fn missing(tokens: &[u32]) -> Vec<Missing> {
        let missing = |(expert, n): (usize, &u32)| Missing::whole(expert as u32, f64::from(*n));
        tokens.iter().enumerate().map(missing).collect()
    }

    fn place(placement: &mut dyn Placement, view: &View) -> Schedule {
        let mut out = Schedule {
            cpu: vec![99],
            upload: vec![99],
            in_place: vec![99],
            prefetch: vec![(9, 9)],
        };
        placement.place(view, &mut out);
        out
    }

    fn layer_of(tokens: &[u32]) -> PredictedLayer {
        PredictedLayer { missing: missing(tokens), p_hit: 0.9 }
    }

    fn view<'a>(current: &'a [Missing], predicted: &'a [PredictedLayer]) -> View<'a> {
        View { timer: TIMER, current, predicted, delay_ns: 0.0 }
    }

    proptest! {
        /// Each expert is placed once, the heaviest on the GPU, and none makes the layer slower
        /// than the CPU alone would.
        #[test]
        fn schedules_are_sound(
            current in prop::collection::vec(1u32..40, 0..12),
            next in prop::collection::vec(1u32..40, 0..12),
            delay_ns in 0.0f64..150.0,
            load_ns in 10.0f64..500.0,
        ) {
            let (current, predicted) = (missing(&current), [layer_of(&next)]);
            let timer = Timer { load_ns, granule_ns: load_ns, ..TIMER };
            let view = View { timer, delay_ns, ..view(&current, &predicted) };
            let n_tokens = |expert: &u32| current[*expert as usize].n_tokens;
            let cpu_ns = |experts: &[u32]| -> f64 {
                experts.iter().map(|expert| timer.cpu_ns(n_tokens(expert))).sum()
            };
            let all_on_cpu = cpu_ns(&place(&mut AllOnCpu, &view).cpu);
            let placements: [Box<dyn Placement>; 3] = [
                Box::new(AllOnCpu),
                Box::new(Greedy { prefetching: Prefetching::WhileIdle }),
                Box::new(Greedy { prefetching: Prefetching::Fixed(3) }),
            ];
            for mut placement in placements {
                let schedule = place(&mut *placement, &view);
                let mut experts = [&schedule.upload[..], &schedule.cpu].concat();
                prop_assert!(experts.iter().map(n_tokens).is_sorted_by(|a, b| a >= b));
                experts.sort_unstable();
                prop_assert_eq!(experts, (0..current.len() as u32).collect::<Vec<_>>());
                let link_ns = match schedule.upload.len() {
                    0 => 0.0,
                    n => delay_ns + n as f64 * load_ns,
                };
                prop_assert!(cpu_ns(&schedule.cpu).max(link_ns) <= all_on_cpu);
                let prefetched = schedule.prefetch.iter().map(|(_, e)| next[*e as usize]);
                prop_assert!(prefetched.is_sorted_by(|a, b| a >= b));
                prop_assert!(schedule.prefetch.iter().all(|(distance, _)| *distance == 1));
            }
        }
    }

    /// By each layer for itself, one load goes beside the CPU's 30 + 40 + 220.
    #[test]
    fn greedy_balances_and_fills_what_is_idle() {
        let current = missing(&[1, 30, 2, 20]);
        let predicted = [layer_of(&[3, 5, 4])];
        let mut greedy = Greedy { prefetching: Prefetching::WhileIdle };
        let schedule = place(&mut greedy, &view(&current, &predicted));
        // 200 on the link against 70 on the CPU beats 100 against 290.
        assert_eq!((schedule.upload, schedule.cpu), (vec![1, 3], vec![2, 0]));
        // Nothing is idle but the attention's 30, in which one more begins.
        assert_eq!(schedule.prefetch, [(1, 1)]);
        let mut fixed = Greedy { prefetching: Prefetching::Fixed(2) };
        assert_eq!(place(&mut fixed, &view(&current, &predicted)).prefetch, [(1, 1), (1, 2)]);
        let mut nothing = Greedy { prefetching: Prefetching::Nothing };
        assert_eq!(place(&mut nothing, &view(&current, &predicted)).prefetch, []);
    }
}
