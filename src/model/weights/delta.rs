//! A linear-attention layer: gated delta rule (arXiv 2412.06464) behind a short convolution.

use super::Linear;
use super::binder::Binder;
use super::mixer::MixerWeights;
use super::recurrent::ConvWeights;
use super::residence::{Host, Residence};
use crate::Result;
use crate::backend::ops::{DEVICE_KEY_MAX, DeltaShape};

#[derive(Clone, Debug)]
pub struct DeltaWeights<R: Residence = Host> {
    pub shape: DeltaShape,
    /// q, k and v of the convolution: [channels, n_embd].
    pub qkv: R::Linear,
    /// Gate of the output: [n_v_heads · v_dim, n_embd].
    pub z: R::Linear,
    pub gates: Gates<R>,
    pub conv: R::Conv,
    /// log decay = a · softplus(alpha + dt): [n_v_heads] each.
    pub a: R::Vector,
    pub dt: R::Vector,
    /// RMSNorm over each value head: [v_dim].
    pub norm: R::Vector,
    /// The gate's function is the sigmoid, not SiLU.
    pub sigmoid_gate: bool,
    pub output: R::Linear,
}

/// The projections that give beta and alpha, [n_v_heads] each.
#[derive(Clone, Debug)]
pub enum Gates<R: Residence = Host> {
    /// By key head: its value heads' betas, then their alphas.
    Mixed(R::Linear),
    Apart {
        beta: R::Linear,
        alpha: R::Linear,
    },
}

impl MixerWeights for DeltaWeights {
    fn linears(&self) -> Vec<&Linear> {
        [&self.qkv, &self.z, &self.output].into_iter().chain(self.gates.linears()).collect()
    }

    fn other_macs(&self) -> usize {
        delta_macs(self.shape)
    }

    fn takes_adapters(&self) -> bool {
        true
    }

    fn has_kernels(&self) -> bool {
        self.shape.k_dim <= DEVICE_KEY_MAX
    }
}

/// The convolution; then, for each element of the state, what the key finds in it, what is put
/// there instead, and what the query finds.
pub(super) fn delta_macs(shape: DeltaShape) -> usize {
    shape.channels() * shape.kernel + 3 * shape.n_state()
}

impl Binder<'_> {
    pub fn delta(&self, l: usize, shape: DeltaShape) -> Result<DeltaWeights> {
        let (n_embd, heads, values) = (self.hyper.n_embd, shape.n_v_heads, shape.value_width());
        let vector = |role: &str, n| self.vector(self.require(role, l)?, n);
        let pair = |both: &str, roles, rows| self.pair(both, roles, l, rows, n_embd);
        let conv = self.require("ssm_conv1d", l)?;
        let [qkv, z] =
            pair("attn_qkv_gate", ["attn_qkv", "attn_gate"], [shape.channels(), values])?;
        Ok(DeltaWeights {
            shape,
            qkv,
            z,
            gates: match self.descriptor.tensors.contains_key("ssm_beta_alpha") {
                true => Gates::Mixed(self.linear("ssm_beta_alpha", l, 2 * heads, n_embd)?),
                false => {
                    let roles = ["ssm_beta", "ssm_alpha"];
                    let [beta, alpha] = pair("ssm_beta_then_alpha", roles, [heads; 2])?;
                    Gates::Apart { beta, alpha }
                }
            },
            conv: ConvWeights {
                shape: shape.conv(),
                weight: self.values(conv, &[shape.kernel, shape.channels()])?,
                bias: None,
                silu: true,
            },
            a: vector("ssm_a", heads)?,
            dt: vector("ssm_dt_bias", heads)?,
            norm: vector("ssm_norm", shape.v_dim)?,
            sigmoid_gate: self.descriptor.parts.sigmoid_delta_gate,
            output: self.linear("ssm_out", l, n_embd, values)?,
        })
    }
}

impl<R: Residence> Gates<R> {
    pub fn linears(&self) -> impl Iterator<Item = &R::Linear> {
        let (first, second) = match self {
            Gates::Mixed(both) => (both, None),
            Gates::Apart { beta, alpha } => (beta, Some(alpha)),
        };
        std::iter::once(first).chain(second)
    }
}
