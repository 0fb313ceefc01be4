//! Recording a text's routing: what the layer loop hands to a recorder, and what it computes for
//! that alone.

use crate::backend::cpu::Cpu;
use crate::backend::ops::RouteRows;
use crate::forward::events::Routing;
use crate::forward::scratch::rows_of;
use crate::forward::{Batch, Outputs};
use crate::model::Model;
use crate::model::weights::Gate;

/// Records one text's passes, in the order of the layers.
pub trait Recorder {
    /// A pass begins. `embeddings`: the tokens' rows of the embedding table, [tokens, n_embd].
    fn pass(&mut self, _tokens: &[u32], _embeddings: &[f32]) {}

    /// A layer's routing of the pass's tokens; without probabilities in a dense layer. `hidden`:
    /// the router's input, [tokens, n_embd].
    fn routed(&mut self, layer: usize, route: RouteRows<'_>, hidden: &[f32]);

    /// The routers of how many following MoE layers shall be applied to each layer's activation.
    /// Only in passes of one token.
    fn n_ahead(&self) -> usize {
        0
    }

    /// The router `distance` MoE layers after `layer`, applied to this layer's activation:
    /// probabilities of its experts.
    fn ahead(&mut self, _layer: usize, _distance: usize, _probs: &[f32]) {}
}

impl Model {
    /// Hands the embeddings `x` to recorders.
    pub(super) fn record_start(&self, batch: &Batch, x: &[f32], outputs: &mut dyn Outputs) {
        for (rows, segment) in batch.segments() {
            if let Some(recorder) = outputs.recorder(segment.session) {
                let embeddings = rows_of(x, &rows, self.hyper.n_embd);
                recorder.pass(&batch.tokens()[rows], embeddings);
            }
        }
    }

    /// Hands the routing of layer `l` to recorders, and the later routers' that they ask for.
    pub(super) fn record_routed(
        &self,
        cpu: &Cpu,
        batch: &Batch,
        l: usize,
        routing: &mut Routing<'_>,
        outputs: &mut dyn Outputs,
    ) {
        for (rows, segment) in batch.segments() {
            let Some(recorder) = outputs.recorder(segment.session) else { continue };
            let hidden = rows_of(routing.h, &rows, self.hyper.n_embd);
            recorder.routed(l, routing.route.rows(&rows), hidden);
            if !self.has_router(l) || rows.len() > 1 {
                continue;
            }
            for distance in 1..=recorder.n_ahead() {
                let Some(target) = self.moe_layer_behind(l, distance) else { break };
                let x = rows_of(routing.x, &rows, self.hyper.n_embd);
                if self.look_ahead(cpu, target, x, routing.events) {
                    recorder.ahead(l, distance, &routing.events.ahead_probs);
                }
            }
        }
    }

    pub(super) fn has_router(&self, layer: usize) -> bool {
        let ffn = self.weights.layers[layer].ffn.as_ref();
        ffn.is_some_and(|ffn| matches!(ffn.gate, Gate::Router(_)))
    }

    /// The MoE layer `distance` MoE layers after layer `l`; one after the last is the next token's
    /// first.
    fn moe_layer_behind(&self, l: usize, distance: usize) -> Option<usize> {
        let n = self.hyper.n_layers;
        let behind = (l + 1..n).filter(|layer| self.has_router(*layer)).nth(distance - 1);
        let around = || (0..n).find(|layer| distance == 1 && self.has_router(*layer));
        behind.or_else(around)
    }
}
