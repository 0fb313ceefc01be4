//! Bytes of weights that a test's tokens touch: what memory, a disk or a link has to deliver.

use crate::engine::{Engine, Experts};
use std::collections::HashSet;
use std::ops::Range;

/// Bytes a token, on average over a test; an expert that serves several tokens of a pass is counted
/// once.
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

    /// Traffic of a test. The first `n_prompt` tokens of each text were computed together, and of
    /// the others one of every text in a pass.
    pub fn of(engine: &Engine, texts: &[Experts], n_prompt: usize) -> Self {
        let n_tokens: usize = texts.iter().map(|text| text.tokens).sum();
        let Some(longest) = texts.iter().max_by_key(|text| text.tokens).filter(|_| n_tokens > 0)
        else {
            return Self::none();
        };
        let mut touched = 0.0;
        for layer in 0..longest.layers {
            let prompts = texts.iter().map(|text| n_experts([text], layer, 0..n_prompt));
            let steps = n_prompt..longest.tokens;
            let steps = steps.map(|step| n_experts(texts, layer, step..step + 1));
            let n: usize = prompts.chain(steps).sum();
            touched += n as f64 * expert_bytes(engine, layer);
        }
        let expert_bytes = touched / n_tokens as f64;
        let dense_bytes = engine.plan().dense_bytes_per_token as f64 / texts.len() as f64;
        let decode_bytes = (n_prompt == 0).then_some(expert_bytes + dense_bytes);
        Self { expert_bytes: Some(expert_bytes), decode_bytes }
    }
}

/// The experts of a layer that any of these tokens of the texts has chosen.
fn n_experts<'a>(
    texts: impl IntoIterator<Item = &'a Experts>,
    layer: usize,
    tokens: Range<usize>,
) -> usize {
    let chosen = texts.into_iter().flat_map(|text| {
        let tokens = tokens.start.min(text.tokens)..tokens.end.min(text.tokens);
        let first = layer * text.tokens;
        &text.ids[(first + tokens.start) * text.k..(first + tokens.end) * text.k]
    });
    chosen.filter(|&&id| id >= 0).collect::<HashSet<_>>().len()
}

/// One routed expert of a layer.
fn expert_bytes(engine: &Engine, layer: usize) -> f64 {
    engine.model().routed_experts(layer).map_or(0.0, |experts| experts.expert_bytes() as f64)
}
