//! Router inputs and choices, token by token, as read from a trace.

use crate::policy::Shape;

/// Rows are tokens of decode steps, the same in each layer.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    pub n_embd: usize,
    /// For each token: whether its predecessor here is its predecessor in the text.
    pub follows: Vec<bool>,
    /// The MoE layers in order.
    pub layers: Vec<LayerSamples>,
}

/// One MoE layer. Rows in turn.
#[derive(Clone, Debug, Default)]
pub struct LayerSamples {
    /// The router's input: [n, n_embd].
    pub hidden: Vec<f32>,
    /// Probabilities of all J experts: [n, J].
    pub probs: Vec<f32>,
    /// Best first: [n, k].
    pub chosen: Vec<u32>,
    /// If it was recorded, what the router of the next MoE layer makes of this one's activation,
    /// to compare with: [n, experts of that layer].
    pub ahead: Option<Vec<f32>>,
}

impl Samples {
    pub fn n_tokens(&self) -> usize {
        self.follows.len()
    }

    /// Returns the reason as a clause, for use after a colon.
    pub fn check(&self, shape: &Shape) -> Result<(), String> {
        let n = self.n_tokens();
        let moe: Vec<usize> = shape.moe_layers().collect();
        if self.n_embd == 0 || shape.k == 0 || moe.is_empty() || self.layers.len() != moe.len() {
            let layers = self.layers.len();
            return Err(format!("{layers} layers, the model has {} with experts", moe.len()));
        }
        for (at, (samples, &layer)) in self.layers.iter().zip(&moe).enumerate() {
            let n_experts = shape.n_experts[layer];
            let after = shape.n_experts[moe[(at + 1) % moe.len()]];
            let whole = samples.hidden.len() == n * self.n_embd
                && samples.probs.len() == n * n_experts
                && samples.chosen.len() == n * shape.k
                && samples.ahead.as_ref().is_none_or(|ahead| ahead.len() == n * after);
            if !whole {
                return Err(format!("layer {layer} does not have {n} tokens of the model's sizes"));
            }
            if samples.chosen.iter().any(|expert| *expert as usize >= n_experts) {
                return Err(format!("layer {layer} chooses among more than {n_experts} experts"));
            }
            let numbers = [&samples.hidden, &samples.probs].into_iter().chain(&samples.ahead);
            if !numbers.flatten().all(|x| x.is_finite()) {
                return Err(format!("layer {layer} has values that are not finite"));
            }
        }
        Ok(())
    }
}
