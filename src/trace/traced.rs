//! A trace as routing.

use super::format::{Trace, UNKNOWN_TOKEN};
use super::routing::{Pass, Routing};
use crate::experts::{LayerNeeds, Needs};

/// A trace does not say in which parts its prompts were computed; `n_ubatch` does.
pub struct Traced<'a> {
    trace: &'a Trace,
    n_experts: Vec<usize>,
    n_ubatch: usize,
}

impl<'a> Traced<'a> {
    /// `n_ubatch`: tokens of a prompt that are computed at once.
    pub fn new(trace: &'a Trace, n_ubatch: usize) -> Traced<'a> {
        assert!(n_ubatch > 0);
        let n_experts = trace.header().layers.iter().map(|layer| layer.n_experts).collect();
        Traced { trace, n_experts, n_ubatch }
    }

    /// The needs of the traced model's own experts.
    pub fn needs(&self) -> Needs {
        let header = self.trace.header();
        let layers = header.layers.iter().map(|layer| {
            (layer.n_experts > 0).then(|| LayerNeeds {
                n_experts: layer.n_experts,
                n_granules: layer.n_granules,
                k: header.k.min(layer.n_experts),
                slot_bytes: layer.slot_bytes as usize,
                staging_bytes: 0,
            })
        });
        Needs(layers.collect())
    }
}

impl Routing for Traced<'_> {
    fn n_experts(&self) -> &[usize] {
        &self.n_experts
    }

    fn k(&self) -> usize {
        self.trace.header().k
    }

    fn n_requests(&self) -> usize {
        self.trace.requests().len()
    }

    fn passes(&self, request: usize) -> Vec<Pass> {
        let request = &self.trace.requests()[request];
        let (start, end) = (request.tokens.start, request.tokens.end);
        let decode = start + request.n_prompt;
        let part = |at: usize| at..(at + self.n_ubatch).min(decode);
        let prompt = (start..decode).step_by(self.n_ubatch).map(part);
        let prompt = prompt.map(|tokens| Pass { tokens, is_prompt: true });
        let steps = (decode..end).map(|t| Pass { tokens: t..t + 1, is_prompt: false });
        prompt.chain(steps).collect()
    }

    fn id(&self, token: usize) -> Option<u32> {
        Some(self.trace.token_id(token)).filter(|id| *id != UNKNOWN_TOKEN)
    }

    fn embedding(&self, token: usize, out: &mut Vec<f32>) {
        out.clear();
        out.extend(self.trace.embedding(token));
    }

    fn chosen(&self, token: usize, layer: usize, out: &mut Vec<u32>) {
        out.clear();
        out.extend(self.trace.chosen(token, layer));
    }

    fn probs(&self, token: usize, layer: usize, out: &mut Vec<f32>) {
        self.trace.probs(token, layer, out);
    }

    fn ahead(&self, token: usize, layer: usize, distance: usize, out: &mut Vec<f32>) {
        self.trace.ahead(token, layer, distance, out);
    }

    fn hidden(&self, token: usize, layer: usize, out: &mut Vec<f32>) {
        self.trace.hidden(token, layer, out);
    }
}
