//! Bytes of weights that a test's tokens touch: what memory, a disk or a link has to deliver.

use crate::engine::{Engine, Experts};
use std::collections::HashSet;

/// Bytes a token, on average over a test; an expert that serves several tokens of a prompt at once
/// is counted once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traffic {
    pub expert_bytes: Option<f64>,
    /// Experts and all that every token needs: attention, norms, shared experts, output.
    pub decode_bytes: Option<f64>,
}

impl Traffic {
    /// Nothing was counted.
    pub fn none() -> Self {
        Self::default()
    }

    /// Traffic of a test whose first `n_prompt` tokens were computed together and the others one by
    /// one.
    pub fn of(engine: &Engine, chosen: &Experts, n_prompt: usize) -> Self {
        if chosen.tokens == 0 {
            return Self::none();
        }
        let mut touched = 0.0;
        for layer in 0..chosen.layers {
            let ids = &chosen.ids[layer * chosen.tokens * chosen.k..][..chosen.tokens * chosen.k];
            let (prompt, decode) = ids.split_at(n_prompt.min(chosen.tokens) * chosen.k);
            let prompt: HashSet<i32> = prompt.iter().copied().filter(|&id| id >= 0).collect();
            let decode = decode.iter().filter(|&&id| id >= 0).count();
            touched += (prompt.len() + decode) as f64 * expert_bytes(engine, layer);
        }
        let expert_bytes = touched / chosen.tokens as f64;
        let decode =
            (n_prompt == 0).then(|| expert_bytes + engine.plan().dense_bytes_per_token as f64);
        Self { expert_bytes: Some(expert_bytes), decode_bytes: decode }
    }
}

/// One routed expert of a layer.
fn expert_bytes(engine: &Engine, layer: usize) -> f64 {
    engine.model().routed_experts(layer).map_or(0.0, |experts| experts.expert_bytes() as f64)
}
