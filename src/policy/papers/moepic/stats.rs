//! Counts for MoEpic's three probabilities (section 3.4.2): the ranks of activated and predicted
//! experts in their layer's LCP order when a token came. Counting ranks instead of hits serves all
//! cache sizes at once: an expert of rank r is in every cache that holds more than r experts.
//!
//! An event costs one increment for each activated and each predicted expert, besides keeping the
//! LCP order and sorting the best of a prediction: some 4 µs for 8 of 128 experts.

use super::order::LcpOrder;
use super::pending::Pending;
use crate::policy::{Event, LookAhead, Routed, Shape};

/// Predicted experts that are counted, in numbers of experts that a token uses. No window is long
/// enough to prefetch more, and if it is, what is further down is hardly ever used.
const DEPTH: usize = 4;

#[derive(Clone, Debug)]
pub(super) struct Stats {
    pub layers: Vec<LayerCounts>,
    order: LcpOrder,
    pending: Pending,
}

/// All counts are at most `tokens`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LayerCounts {
    /// q
    pub tokens: u32,
    /// Activations of experts by their rank: `[n_experts]`.
    pub activations: Vec<u32>,
    /// Tokens that activated the expert of the y-th highest score: `[depth]`.
    pub correct: Vec<u32>,
    /// Tokens for which the expert of the y-th highest score had a rank: `[depth][n_experts]`.
    pub predictions: Vec<u32>,
}

impl LayerCounts {
    pub fn new(n_experts: usize, k: usize) -> LayerCounts {
        let depth = n_experts.min(DEPTH * k);
        LayerCounts {
            tokens: 0,
            activations: vec![0; n_experts],
            correct: vec![0; depth],
            predictions: vec![0; depth * n_experts],
        }
    }

    pub fn n_experts(&self) -> usize {
        self.activations.len()
    }

    pub fn depth(&self) -> usize {
        self.correct.len()
    }

    pub fn all(&self) -> impl Iterator<Item = &u32> {
        let tokens = std::iter::once(&self.tokens);
        tokens.chain(&self.activations).chain(&self.correct).chain(&self.predictions)
    }

    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut u32> {
        let tokens = std::iter::once(&mut self.tokens);
        let counts = self.activations.iter_mut().chain(&mut self.correct);
        tokens.chain(counts).chain(&mut self.predictions)
    }

    /// `ranks` are those before the token, by expert; `predicted` has the best first.
    fn count(&mut self, ranks: &[u32], chosen: &[u32], predicted: &[u32]) {
        if self.tokens == u32::MAX {
            self.halve();
        }
        self.tokens += 1;
        for &expert in chosen {
            self.activations[ranks[expert as usize] as usize] += 1;
        }
        let n = self.n_experts();
        for (y, expert) in predicted.iter().enumerate() {
            self.correct[y] += u32::from(chosen.contains(expert));
            self.predictions[y * n + ranks[*expert as usize] as usize] += 1;
        }
    }

    fn halve(&mut self) {
        self.all_mut().for_each(|count| *count /= 2);
    }
}

impl Stats {
    pub fn new(shape: &Shape) -> Stats {
        let layers = shape.n_experts.iter().map(|n| LayerCounts::new(*n, shape.k)).collect();
        Stats { layers, order: LcpOrder::new(shape), pending: Pending::default() }
    }

    /// Tokens that the MoE layer with the fewest has counted.
    pub fn tokens(&self) -> u32 {
        let moe = self.layers.iter().filter(|layer| layer.n_experts() > 0);
        moe.map(|layer| layer.tokens).min().unwrap_or(0)
    }

    pub fn observe(&mut self, event: &Event<'_>) {
        match *event {
            Event::Routed(Routed { request, layer, chosen, ahead, .. }) => {
                let predicted = self.pending.take(request, layer).unwrap_or_default();
                let ranks = self.order.ranks(layer);
                self.layers[layer as usize].count(ranks, chosen, predicted);
                self.order.observe(event);
                if let Some(ahead) = ahead.filter(|ahead| self.is_whole(ahead)) {
                    let depth = self.layers[ahead.layer as usize].depth();
                    self.pending.put(request, &ahead, depth);
                }
            }
            Event::RequestStart { request } | Event::RequestEnd { request } => {
                self.pending.forget(request);
            }
            _ => {}
        }
    }

    fn is_whole(&self, ahead: &LookAhead<'_>) -> bool {
        let layer = self.layers.get(ahead.layer as usize);
        layer.is_some_and(|layer| layer.n_experts() == ahead.probs.len())
    }

    /// Makes what comes later weigh more than what has been.
    pub fn forget_half(&mut self) {
        self.layers.iter_mut().for_each(LayerCounts::halve);
    }
}
