//! A linear-attention layer: gated delta rule (arXiv 2412.06464) behind a short convolution.

use super::binder::Binder;
use super::{Linear, Matrix};
use crate::Result;
use crate::backend::ops::{DeltaShape, ShortConv};

#[derive(Clone, Debug)]
pub struct DeltaWeights {
    pub shape: DeltaShape,
    /// q, k and v of the convolution: [channels, n_embd].
    pub qkv: Linear,
    /// Gate of the output: [n_v_heads · v_dim, n_embd].
    pub z: Linear,
    pub gates: Gates,
    /// [channels, kernel]
    pub conv: Vec<f32>,
    /// log decay = a · softplus(alpha + dt): [n_v_heads] each.
    pub a: Vec<f32>,
    pub dt: Vec<f32>,
    /// RMSNorm over each value head: [v_dim].
    pub norm: Vec<f32>,
    /// The gate's function is the sigmoid, not SiLU.
    pub sigmoid_gate: bool,
    pub output: Linear,
}

/// The projections that give beta and alpha, [n_v_heads] each.
#[derive(Clone, Debug)]
pub enum Gates {
    /// By key head: its value heads' betas, then their alphas.
    Mixed(Linear),
    Apart {
        beta: Linear,
        alpha: Linear,
    },
}

impl Binder<'_> {
    pub fn delta(&self, l: usize, shape: DeltaShape) -> Result<DeltaWeights> {
        let (n_embd, heads, values) = (self.hyper.n_embd, shape.n_v_heads, shape.value_width());
        let vector = |role: &str, n| self.vector(self.require(role, l)?, n);
        let conv = self.require("ssm_conv1d", l)?;
        Ok(DeltaWeights {
            shape,
            qkv: self.linear("attn_qkv", l, shape.channels(), n_embd)?,
            z: self.linear("attn_gate", l, values, n_embd)?,
            gates: match self.descriptor.tensors.contains_key("ssm_beta_alpha") {
                true => Gates::Mixed(self.linear("ssm_beta_alpha", l, 2 * heads, n_embd)?),
                false => Gates::Apart {
                    beta: self.linear("ssm_beta", l, heads, n_embd)?,
                    alpha: self.linear("ssm_alpha", l, heads, n_embd)?,
                },
            },
            conv: self.values(conv, &[shape.kernel, shape.channels()])?,
            a: vector("ssm_a", heads)?,
            dt: vector("ssm_dt_bias", heads)?,
            norm: vector("ssm_norm", shape.v_dim)?,
            sigmoid_gate: self.descriptor.parts.sigmoid_delta_gate,
            output: self.linear("ssm_out", l, n_embd, values)?,
        })
    }
}

impl DeltaWeights {
    pub fn conv_form(&self) -> ShortConv<'_> {
        ShortConv { shape: self.shape.conv(), weight: &self.conv, bias: None, silu: true }
    }
}

impl Gates {
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let (first, second) = match self {
            Gates::Mixed(both) => (both, None),
            Gates::Apart { beta, alpha } => (beta, Some(alpha)),
        };
        std::iter::once(first).chain(second).map(|linear| &linear.weight)
    }
}
