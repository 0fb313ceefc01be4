//! The future of a run, which is known when a trace is replayed: evictions and a predictor that use
//! it bound what caching and prefetching can do. They assert that the events are the trace's.

mod bound;

pub use bound::{Bound, Known};

use super::Routing;
use crate::policy::{Event, Eviction, Expert, Phase, Prediction, Predictor};
use std::collections::{HashMap, HashSet};
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

    /// The step's range in `chosen`.
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

/// The routing of every decode step.
pub fn future(routing: &dyn Routing) -> Arc<Future> {
    let n_experts = routing.n_experts();
    let (mut future, mut chosen) = (Future::default(), Vec::new());
    let passes = (0..routing.n_requests()).flat_map(|request| routing.passes(request));
    for pass in passes.filter(|pass| pass.phase() == Phase::Decode) {
        for layer in (0..n_experts.len()).filter(|layer| n_experts[*layer] > 0) {
            routing.chosen(pass.tokens.start, layer, &mut chosen);
            future.push(layer as u32, &chosen);
        }
    }
    Arc::new(future)
}

/// Predicts what the next `n` layers will choose, around the end of a token, each expert once.
/// All of it is certain, so nearness alone makes the priority: 1 for the next layer, down to 1/n.
#[derive(Clone, Debug)]
pub struct Oracle {
    future: Arc<Future>,
    n: usize,
    now: usize,
    /// Experts of the present prediction.
    seen: HashSet<Expert>,
}

impl Oracle {
    pub fn new(future: Arc<Future>, n: usize) -> Self {
        Self { future, n, now: 0, seen: HashSet::new() }
    }
}

impl Predictor for Oracle {
    fn observe(&mut self, event: &Event<'_>) {
        self.future.follow(&mut self.now, event);
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clear();
        self.seen.clear();
        let end = self.future.len().min(self.now + self.n);
        for step in self.now..end {
            let priority = 1.0 - (step - self.now) as f32 / self.n as f32;
            for expert in self.future.experts(step) {
                if self.seen.insert(expert) {
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
    /// The step that uses each expert next; none for those that are not used again.
    next: HashMap<Expert, usize>,
}

const NEVER: usize = usize::MAX;

impl Belady {
    /// Knows all of the future.
    pub fn new(future: Arc<Future>) -> Self {
        let mut next = HashMap::new();
        let mut after = vec![NEVER; future.chosen.len()];
        for step in (0..future.len()).rev() {
            for (at, expert) in future.range(step).zip(future.experts(step)) {
                after[at] = next.insert(expert, step).unwrap_or(NEVER);
            }
        }
        Self { future, now: 0, after, next }
    }

    /// The step that uses an expert next.
    fn next_use(&self, expert: Expert) -> Option<usize> {
        self.next.get(&expert).copied().filter(|step| *step != NEVER)
    }
}

impl Eviction for Belady {
    fn observe(&mut self, event: &Event<'_>) {
        let step = self.now;
        self.future.follow(&mut self.now, event);
        if self.now > step {
            for (at, expert) in self.future.range(step).zip(self.future.experts(step)) {
                self.next.insert(expert, self.after[at]);
            }
        }
    }

    /// How soon it will be used, in steps, negative; −∞ if never again.
    fn priority(&self, expert: Expert) -> f64 {
        self.next_use(expert).map_or(f64::NEG_INFINITY, |step| -(step as f64))
    }
}

#[cfg(test)]
mod tests;
