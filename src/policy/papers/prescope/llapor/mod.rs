//! LLaPor, PreScope's learnable layer-aware predictor (sections 3.1 and 4.2): a small network for
//! each MoE layer says from what the router before it saw and chose which of its experts come
//! next, and a second one says it from the router before that, for links that need more time and
//! for PreSched, which looks two layers ahead. Inference and online updates are here;
//! `crate::train` makes the weights.
//!
//! For a layer with J experts that follows one with I:
//!
//! ```text
//! z = C h + c                 h: what the earlier router saw; C: its principal components
//! x = (z, a, w)               a: one-hot of the I experts' chosen; w: their weights, Σ w = 1
//! y = GELU(A x)
//! y ← y + σ(G z) ⊙ GELU(B₁ GELU(B₀ y))      in the middle group only
//! p = σ(O y)                  of each of the J experts that it is chosen
//! ```
//!
//! Biases left out. Before the first layer of a token stands the last layer of the one before. The
//! paper's predictor looks one layer ahead; the second networks are of the same form.

mod held_out;
mod loss;
mod model;
mod persist;
mod predictor;

pub use held_out::{HELD_OUT_SECTION, restore_held_out, save_held_out};
pub use loss::{Loss, sigmoid};
pub use model::{LayerModel, Linear, LlaporModel, Residual, Workspace};
pub use model::{gelu, gelu_slope, push_choice};
pub use predictor::LlaPor;

/// The group of a layer. Near the two ends, routing follows the earlier layers' choices, between
/// them their activations (PreScope, section 3.1), so that networks and training differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// The input and the output group.
    Outer,
    Middle,
}

/// Each end has one of so many parts of the layers. The paper gives no bounds; in its Figure 2, of
/// 32 layers, some five at each end stand out.
const PARTS: usize = 6;

impl Group {
    /// The group of the `at`th of `n` MoE layers.
    pub fn of(at: usize, n: usize) -> Group {
        let outer = n.div_ceil(PARTS);
        if at < outer || at + outer >= n { Group::Outer } else { Group::Middle }
    }
}

#[cfg(test)]
mod tests;
