//! Policies that know the future: bounds for all others, in a replay only. They know when each
//! expert will be used by a decode step and count the steps that they are told of.

use super::routing::Routing;
use crate::policy::{Event, Eviction, Expert, Phase, Prediction, Predictor};

/// When each expert is used: numbers of decode steps of layers, ascending.
struct Uses {
    /// The first expert of each layer in `of`.
    first: Vec<usize>,
    of: Vec<Vec<u32>>,
    /// Layer of each step.
    layers: Vec<u32>,
    /// What each step chose, best first.
    chosen: Vec<Vec<u32>>,
}

impl Uses {
    fn new(routing: &dyn Routing) -> Uses {
        let n_experts = routing.n_experts();
        let first = n_experts.iter().scan(0, |n, experts| {
            *n += experts;
            Some(*n - experts)
        });
        let mut uses = Uses {
            first: first.collect(),
            of: vec![Vec::new(); n_experts.iter().sum()],
            layers: Vec::new(),
            chosen: Vec::new(),
        };
        let passes = (0..routing.n_requests()).flat_map(|request| routing.passes(request));
        for pass in passes.filter(|pass| pass.phase() == Phase::Decode) {
            for layer in (0..n_experts.len()).filter(|layer| n_experts[*layer] > 0) {
                uses.push(routing, pass.tokens.start, layer);
            }
        }
        uses
    }

    fn push(&mut self, routing: &dyn Routing, token: usize, layer: usize) {
        let step = self.layers.len() as u32;
        let mut chosen = Vec::new();
        routing.chosen(token, layer, &mut chosen);
        let first = self.first[layer];
        chosen.iter().for_each(|expert| self.of[first + *expert as usize].push(step));
        self.layers.push(layer as u32);
        self.chosen.push(chosen);
    }

    /// The first use at step `now` or later.
    fn next(&self, expert: Expert, now: u32) -> Option<u32> {
        let uses = &self.of[self.first[expert.layer as usize] + expert.expert as usize];
        uses.get(uses.partition_point(|step| *step < now)).copied()
    }
}

/// Drops what will be used last (Belady, 1966).
pub struct Belady {
    uses: Uses,
    now: u32,
}

impl Belady {
    pub fn new(routing: &dyn Routing) -> Belady {
        Belady { uses: Uses::new(routing), now: 0 }
    }
}

impl Eviction for Belady {
    fn observe(&mut self, event: &Event<'_>) {
        self.now += u32::from(matches!(event, Event::Routed(_)));
    }

    fn priority(&self, expert: Expert) -> f64 {
        let next = self.uses.next(expert, self.now);
        next.map_or(f64::NEG_INFINITY, |step| -f64::from(step))
    }
}

/// Predicts exactly what the next steps will use, the nearest first.
pub struct Oracle {
    uses: Uses,
    /// Steps, each a MoE layer, that it looks ahead.
    depth: usize,
    now: usize,
}

impl Oracle {
    pub fn new(routing: &dyn Routing, depth: usize) -> Oracle {
        Oracle { uses: Uses::new(routing), depth, now: 0 }
    }
}

impl Predictor for Oracle {
    fn observe(&mut self, event: &Event<'_>) {
        self.now += usize::from(matches!(event, Event::Routed(_)));
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clear();
        let end = (self.now + self.depth).min(self.uses.layers.len());
        for step in self.now..end {
            let layer = self.uses.layers[step];
            for &expert in &self.uses.chosen[step] {
                let expert = Expert { layer, expert };
                // An expert of a far step may be one of a near step.
                if out.iter().all(|p| p.expert != expert) {
                    let priority = 1.0 / (step - self.now + 1) as f32;
                    out.push(Prediction { expert, priority });
                }
            }
        }
    }
}
