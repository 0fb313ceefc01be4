//! What the layer loop tells whoever writes down a model's routing, and what it computes for that
//! alone.

use crate::backend::cpu::Cpu;
use crate::backend::ops::Route;
use crate::forward::{Buffers, Observer};
use crate::model::Model;
use crate::model::weights::Gate;

/// Hears of every forward pass in the order of the layers.
pub trait Recorder {
    /// A pass begins. `embeddings`: the tokens' rows of the embedding table, [tokens, n_embd].
    fn pass(&mut self, _tokens: &[u32], _embeddings: &[f32]) {}

    /// A layer's routing; of a dense layer there are no probabilities. `hidden`: what the router
    /// saw, [tokens, n_embd].
    fn routed(&mut self, layer: usize, route: &Route, hidden: &[f32]);

    /// How many of the MoE layers that come next shall look at each layer's activation. Passes of
    /// one token only.
    fn n_ahead(&self) -> usize {
        0
    }

    /// What the router `distance` MoE layers behind `layer` makes of that one's activation:
    /// probabilities of its experts.
    fn ahead(&mut self, _layer: usize, _distance: usize, _probs: &[f32]) {}
}

impl Model {
    /// The embeddings are in `b.x`.
    pub(super) fn record_start(&self, b: &Buffers, tokens: &[u32], observer: &mut dyn Observer) {
        if let Some(recorder) = observer.recorder() {
            recorder.pass(tokens, &b.x);
        }
    }

    /// The layer's routing is in `b.route`, what the router saw in `b.h`, where it comes from in
    /// `b.x`.
    pub(super) fn record_routed(
        &self,
        cpu: &Cpu,
        b: &mut Buffers,
        l: usize,
        observer: &mut dyn Observer,
    ) {
        let Some(recorder) = observer.recorder() else { return };
        recorder.routed(l, &b.route, &b.h);
        let one_token = b.x.len() == self.hyper.n_embd;
        if !self.has_router(l) || !one_token {
            return;
        }
        for distance in 1..=recorder.n_ahead() {
            let Some(target) = self.moe_layer_behind(l, distance) else { break };
            if self.look_ahead(cpu, b, target) {
                recorder.ahead(l, distance, &b.published.ahead_probs);
            }
        }
    }

    pub(super) fn has_router(&self, layer: usize) -> bool {
        matches!(self.weights.layers[layer].ffn.gate, Gate::Router(_))
    }

    /// The MoE layer `distance` MoE layers behind layer `l`; behind the last one the next token's
    /// first, and nothing farther.
    fn moe_layer_behind(&self, l: usize, distance: usize) -> Option<usize> {
        let n = self.hyper.n_layers;
        let behind = (l + 1..n).filter(|layer| self.has_router(*layer)).nth(distance - 1);
        let around = || (0..n).find(|layer| distance == 1 && self.has_router(*layer));
        behind.or_else(around)
    }
}
