//! Experts: activation function, sizes, biases.

use super::AdaptedExperts;
use crate::gguf::TensorType;
use serde::Deserialize;

/// The combination of an expert's gate and up projections.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// silu(gate) ⊙ up
    Silu,
    /// gate' = min(gate, 7), up' = clamp(up, ±7): gate'·σ(1.702·gate') ⊙ (up' + 1)
    SiluClamped,
    /// max(up, 0), without a gate
    Relu,
    /// max(up, 0)², without a gate
    ReluSquared,
    /// max(gate, 0) ⊙ up
    ReluGated,
    /// up·(1 + erf(up/√2))/2, without a gate
    GeluPlain,
    /// silu(up), without a gate; CPU only
    SiluPlain,
    /// gelu(gate) ⊙ up, by the tanh form: gate·σ(√(8/π)·(gate + 0.044715·gate³)) ⊙ up
    Gelu,
    /// gate' = min(gate, limit), up' = clamp(up, ±limit): silu(gate') ⊙ up'
    SiluLimited,
    /// min(silu(gate), limit) ⊙ clamp(up, ±limit)
    SiluCapped,
    /// cap(gate)·σ(gate) ⊙ cap'(up), where cap(x) = limit·tanh(x / limit), and cap' has a limit of
    /// its own or is none
    Situ,
}

impl Activation {
    pub fn is_gated(self) -> bool {
        use Activation::{GeluPlain, Relu, ReluSquared, SiluPlain};
        !matches!(self, Relu | ReluSquared | GeluPlain | SiluPlain)
    }

    /// Whether devices have kernels for it.
    pub fn has_kernels(self) -> bool {
        !matches!(self, Activation::GeluPlain | Activation::SiluPlain)
    }

    /// Whether it needs `ExpertShape::limit`, and is `Silu` without.
    pub fn is_limited(self) -> bool {
        matches!(self, Activation::SiluLimited | Activation::SiluCapped)
    }
}

/// Types and widths of one expert: routed, shared, or a dense FFN seen as one expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpertShape {
    /// `None` if the activation has no gate.
    pub gate: Option<TensorType>,
    pub up: TensorType,
    pub down: TensorType,
    pub n_embd: usize,
    pub n_ff: usize,
    pub activation: Activation,
    /// The limit of activations that have one; 0 for others.
    pub limit: f32,
    /// The limit of up of activations that have two; 0 if there is none.
    pub up_limit: f32,
}

impl ExpertShape {
    /// Types of the matrices that read an expert's input.
    pub fn inputs(&self) -> impl Iterator<Item = TensorType> + use<> {
        self.gate.into_iter().chain([self.up])
    }

    /// The form of experts of this shape without biases.
    pub fn form(&self) -> ExpertForm<'static> {
        ExpertForm {
            activation: self.activation,
            limit: self.limit,
            up_limit: self.up_limit,
            biases: None,
            scales: None,
            adapted: None,
        }
    }
}

/// The parts of an expert besides its matrix products.
#[derive(Clone, Copy, Debug)]
pub struct ExpertForm<'a> {
    pub activation: Activation,
    /// See [`ExpertShape`].
    pub limit: f32,
    pub up_limit: f32,
    pub biases: Option<&'a ExpertBiases>,
    pub scales: Option<&'a ExpertScales>,
    /// Adapters of low rank, on the CPU alone.
    pub adapted: Option<AdaptedExperts<'a>>,
}

/// Factors on each expert's products of gate and up, before biases are added.
#[derive(Clone, Debug)]
pub struct ExpertScales {
    /// `[experts]`; empty without a gate.
    pub gate: Vec<f32>,
    /// `[experts]`
    pub up: Vec<f32>,
}

/// Added to the products of each expert, down's before the router's weight is applied.
#[derive(Clone, Debug)]
pub struct ExpertBiases {
    /// [experts, n_ff]; empty without a gate.
    pub gate: Vec<f32>,
    /// [experts, n_ff]
    pub up: Vec<f32>,
    /// [experts, n_embd]
    pub down: Vec<f32>,
}
