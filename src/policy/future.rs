//! What a run will have asked for: known when a trace is replayed, and then the bounds of what
//! prefetching and caching can do. The events must be those of the trace, or there is no such
//! bound: that is asserted.

use super::{Event, Eviction, Expert, PerExpert, Prediction, Predictor, Shape};
use std::sync::Arc;

/// All decode routings of a run, in the order of its `Routed` events, of all requests.
#[derive(Clone, Debug, Default)]
pub struct Future {
    /// A layer, and where its experts end in `chosen`.
    steps: Vec<(u32, usize)>,
    chosen: Vec<u32>,
}

impl Future {
    /// The routing that comes after all others.
    pub fn push(&mut self, layer: u32, chosen: &[u32]) {
        self.chosen.extend(chosen);
        self.steps.push((layer, self.chosen.len()));
    }

    pub fn len(&self) -> usize {
        self.steps.len()
    }

    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Where the step's experts are in `chosen`.
    fn range(&self, step: usize) -> std::ops::Range<usize> {
        let start = step.checked_sub(1).map_or(0, |before| self.steps[before].1);
        start..self.steps[step].1
    }

    fn experts(&self, step: usize) -> impl Iterator<Item = Expert> {
        let layer = self.steps[step].0;
        self.chosen[self.range(step)].iter().map(move |&expert| Expert { layer, expert })
    }

    /// Advances `now`, the steps that are past, if one has gone on.
    fn follow(&self, now: &mut usize, event: &Event<'_>) {
        let Event::Routed(routed) = event else { return };
        assert!(*now < self.len(), "the run is longer than the trace");
        let expected = (self.steps[*now].0, &self.chosen[self.range(*now)]);
        assert_eq!((routed.layer, routed.chosen), expected, "step {now} is not the trace's");
        *now += 1;
    }
}

/// Predicts what the next `n` layers will choose, around the end of a token, each expert once.
/// All of it is certain, so nearness alone makes the priority: 1 for the next layer, down to 1/n.
#[derive(Clone, Debug)]
pub struct Oracle {
    future: Arc<Future>,
    n: usize,
    now: usize,
    /// Number of the prediction that each expert was last part of.
    seen: PerExpert<u64>,
    n_predictions: u64,
}

impl Oracle {
    pub fn new(shape: &Shape, future: Arc<Future>, n: usize) -> Self {
        Self { future, n, now: 0, seen: PerExpert::new(shape), n_predictions: 0 }
    }
}

impl Predictor for Oracle {
    fn observe(&mut self, event: &Event<'_>) {
        self.future.follow(&mut self.now, event);
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clear();
        self.n_predictions += 1;
        let end = self.future.len().min(self.now + self.n);
        for step in self.now..end {
            let priority = 1.0 - (step - self.now) as f32 / self.n as f32;
            for expert in self.future.experts(step) {
                if std::mem::replace(&mut self.seen[expert], self.n_predictions)
                    != self.n_predictions
                {
                    out.push(Prediction { expert, priority });
                }
            }
        }
    }
}

/// Drops what will be used last (Belady, 1966): no eviction has fewer misses where all experts
/// are of one size and each must be brought when it is used.
#[derive(Clone, Debug)]
pub struct Belady {
    future: Arc<Future>,
    now: usize,
    /// For each entry of the future's `chosen` the step that uses the expert after that.
    after: Vec<usize>,
    /// The step that uses each expert next.
    next: PerExpert<Use>,
}

/// A step.
#[derive(Clone, Copy, Debug)]
struct Use(usize);

const NEVER: usize = usize::MAX;

impl Default for Use {
    fn default() -> Self {
        Use(NEVER)
    }
}

impl Belady {
    pub fn new(shape: &Shape, future: Arc<Future>) -> Self {
        let mut next = PerExpert::<Use>::new(shape);
        let mut after = vec![NEVER; future.chosen.len()];
        for step in (0..future.len()).rev() {
            for (at, expert) in future.range(step).zip(future.experts(step)) {
                after[at] = std::mem::replace(&mut next[expert], Use(step)).0;
            }
        }
        Self { future, now: 0, after, next }
    }
}

impl Eviction for Belady {
    fn observe(&mut self, event: &Event<'_>) {
        let step = self.now;
        self.future.follow(&mut self.now, event);
        if self.now > step {
            for (at, expert) in self.future.range(step).zip(self.future.experts(step)) {
                self.next[expert] = Use(self.after[at]);
            }
        }
    }

    /// How soon it will be used, in steps, negative; −∞ if never again.
    fn priority(&self, expert: Expert) -> f64 {
        match self.next[expert].0 {
            NEVER => f64::NEG_INFINITY,
            step => -(step as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Routed;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Layer 1 is dense.
    const N_EXPERTS: [usize; 3] = [5, 0, 3];

    type Step = (u32, Vec<u32>);

    fn shape() -> Shape {
        Shape::of_model(N_EXPERTS.to_vec(), 2)
    }

    fn steps(max: usize) -> impl Strategy<Value = Vec<Step>> {
        let step = (any::<bool>(), 0u32..15, 1u32..3).prop_map(|(is_first, at, by)| {
            let layer = if is_first { 0 } else { 2 };
            let n = N_EXPERTS[layer as usize] as u32;
            (layer, vec![at % n, (at + by) % n])
        });
        prop::collection::vec(step, 0..max)
    }

    fn future(steps: &[Step]) -> Arc<Future> {
        let mut future = Future::default();
        steps.iter().for_each(|(layer, chosen)| future.push(*layer, chosen));
        Arc::new(future)
    }

    fn routed((layer, chosen): &Step) -> Event<'_> {
        let (probs, hidden) = (&[][..], &[][..]);
        Event::Routed(Routed { request: 0, layer: *layer, chosen, probs, hidden, ahead: None })
    }

    fn experts((layer, chosen): &Step) -> impl Iterator<Item = Expert> + '_ {
        chosen.iter().map(|&expert| Expert { layer: *layer, expert })
    }

    fn everyone() -> impl Iterator<Item = Expert> {
        let layers = [(0, 5), (2, 3)].into_iter();
        layers.flat_map(|(layer, n)| (0..n).map(move |expert| Expert { layer, expert }))
    }

    /// Misses with room for so many experts, of steps that use one each.
    fn misses(steps: &[Expert], room: usize, victim: impl Fn(usize, &[Expert]) -> usize) -> usize {
        let mut resident: Vec<Expert> = Vec::new();
        let mut misses = 0;
        for (now, expert) in steps.iter().enumerate() {
            if !resident.contains(expert) {
                misses += 1;
                if resident.len() == room {
                    resident.remove(victim(now, &resident));
                }
                resident.push(*expert);
            }
        }
        misses
    }

    /// The fewest possible, by trying every victim.
    fn fewest(steps: &[Expert], room: usize, resident: &BTreeSet<Expert>) -> usize {
        let Some((expert, rest)) = steps.split_first() else { return 0 };
        let with = |victim: Option<&Expert>| {
            let mut resident = resident.clone();
            victim.map(|victim| resident.remove(victim));
            resident.insert(*expert);
            fewest(rest, room, &resident)
        };
        if resident.contains(expert) {
            with(None)
        } else if resident.len() < room {
            1 + with(None)
        } else {
            1 + resident.iter().map(|victim| with(Some(victim))).min().unwrap()
        }
    }

    proptest! {
        #[test]
        fn oracle_and_belady_know_what_comes(steps in steps(40), n in 0usize..6) {
            let future = future(&steps);
            let mut oracle = Oracle::new(&shape(), future.clone(), n);
            let mut belady = Belady::new(&shape(), future);
            let mut out = Vec::new();
            for past in 0..=steps.len() {
                oracle.predict(&mut out);
                let mut expected: Vec<Prediction> = Vec::new();
                for (ahead, step) in steps[past..].iter().take(n).enumerate() {
                    for expert in experts(step) {
                        if expected.iter().all(|p| p.expert != expert) {
                            let priority = 1.0 - ahead as f32 / n as f32;
                            expected.push(Prediction { expert, priority });
                        }
                    }
                }
                prop_assert_eq!(&out, &expected);
                for expert in everyone() {
                    let uses = |step: &Step| experts(step).any(|used| used == expert);
                    let next = steps[past..].iter().position(uses);
                    let expected = next.map_or(f64::NEG_INFINITY, |next| -((past + next) as f64));
                    prop_assert_eq!(belady.priority(expert), expected);
                }
                if let Some(step) = steps.get(past) {
                    oracle.observe(&routed(step));
                    belady.observe(&routed(step));
                }
            }
        }

        #[test]
        fn nobody_has_fewer_misses_than_belady(steps in steps(9), room in 1usize..4) {
            // One expert a step: several of one step would not leave each other.
            let steps: Vec<Step> = steps.into_iter().map(|(l, c)| (l, vec![c[0]])).collect();
            let uses: Vec<Expert> = steps.iter().flat_map(experts).collect();
            let future = future(&steps);
            let priorities: Vec<Belady> = (0..steps.len()).map(|now| {
                let mut belady = Belady::new(&shape(), future.clone());
                steps[..=now].iter().for_each(|step| belady.observe(&routed(step)));
                belady
            }).collect();
            let found = misses(&uses, room, |now, resident| {
                let p = |at: &usize| priorities[now].priority(resident[*at]);
                (0..resident.len()).min_by(|a, b| p(a).total_cmp(&p(b))).unwrap()
            });
            prop_assert_eq!(found, fewest(&uses, room, &BTreeSet::new()));
        }
    }

    #[test]
    #[should_panic(expected = "not the trace's")]
    fn another_run_is_refused() {
        let mut belady = Belady::new(&shape(), future(&[(0, vec![1, 2])]));
        belady.observe(&routed(&(0, vec![1, 3])));
    }
}
