//! Layers with a recurrence other than the gated delta rule of Qwen3-Next.

use super::Linear;
use super::binder::Binder;
use super::delta::delta_macs;
use super::mixer::{MixerWeights, vector_bytes};
use super::residence::{Host, Residence};
use crate::Result;
use crate::backend::ops::{
    ConvShape, DEVICE_KEY_MAX, DEVICE_STATES_MAX, DeltaShape, ScanShape, ShortConv,
};
use crate::model::recurrent::{Mamba2Shape, MambaShape};

/// A convolution's weights.
#[derive(Clone, Debug)]
pub struct ConvWeights {
    pub shape: ConvShape,
    /// [channels, kernel]
    pub weight: Vec<f32>,
    /// [channels]
    pub bias: Option<Vec<f32>>,
    pub silu: bool,
}

impl ConvWeights {
    pub fn form(&self) -> ShortConv<'_> {
        let ConvWeights { shape, silu, .. } = *self;
        ShortConv { shape, weight: &self.weight, bias: self.bias.as_deref(), silu }
    }

    fn macs(&self) -> usize {
        self.shape.channels * self.shape.kernel
    }
}

/// output · (c ⊙ conv(b ⊙ x)), with [b, c, x] = input · h.
#[derive(Clone, Debug)]
pub struct ShortConvWeights<R: Residence = Host> {
    pub input: R::Linear,
    pub conv: R::Conv,
    pub output: R::Linear,
}

/// A selective scan: [x, gate] = input · h; x is convolved; [steps, inputs, outputs] = scan · x.
#[derive(Clone, Debug)]
pub struct MambaWeights<R: Residence = Host> {
    pub shape: MambaShape,
    pub input: R::Linear,
    pub conv: R::Conv,
    pub scan: R::Linear,
    /// Norms of what steps are made of, of inputs and of outputs.
    pub norms: [R::Vector; 3],
    /// With a bias.
    pub steps: R::Linear,
    /// [states, channels]
    pub log_decay: R::Vector,
    /// [channels]
    pub skip: R::Vector,
    pub output: R::Linear,
}

/// A scan with one decay a head: [gate, x, inputs, outputs, steps] = input · h, of which those
/// between gate and steps are convolved.
#[derive(Clone, Debug)]
pub struct Mamba2Weights<R: Residence = Host> {
    pub shape: Mamba2Shape,
    pub input: R::Linear,
    pub conv: R::Conv,
    /// [n_heads] each.
    pub step_bias: R::Vector,
    pub log_decay: R::Vector,
    pub skip: R::Vector,
    /// RMSNorm of each group's values.
    pub norm: R::Vector,
    pub output: R::Linear,
}

/// Linear attention with a fixed decay: silu(qkv · h) has q, k and v of one head after the other.
#[derive(Clone, Debug)]
pub struct LightningWeights<R: Residence = Host> {
    pub shape: ScanShape,
    pub qkv: R::Linear,
    /// [n_heads]
    pub log_decay: R::Vector,
    /// RMSNorm over all heads.
    pub norm: R::Vector,
    pub gate: R::Linear,
    pub output: R::Linear,
}

impl LightningWeights {
    /// ε of `norm`, in every model: the key of the other norms' ε does not count for it.
    pub const NORM_EPS: f32 = 1e-6;
}

/// A matrix, or one in two parts: second · (first · x).
#[derive(Clone, Debug)]
pub struct Projection<R: Residence = Host> {
    pub first: R::Linear,
    pub second: Option<R::Linear>,
}

/// A gated delta rule with a decay for each element of a key.
#[derive(Clone, Debug)]
pub struct KdaWeights<R: Residence = Host> {
    pub shape: DeltaShape,
    /// q, k and v.
    pub qkv: [R::Linear; 3],
    pub conv: R::Conv,
    pub decay: Projection<R>,
    pub beta: R::Linear,
    /// log decay = a · softplus(decay + dt), or bound · sigmoid(a · (decay + dt)) if there is a
    /// bound: [n_heads] and [n_heads, k_dim].
    pub a: R::Vector,
    pub dt: R::Vector,
    pub bound: Option<f32>,
    pub gate: Projection<R>,
    /// RMSNorm over each head.
    pub norm: R::Vector,
    pub output: R::Linear,
}

impl MixerWeights for ShortConvWeights {
    fn linears(&self) -> Vec<&Linear> {
        vec![&self.input, &self.output]
    }

    fn other_macs(&self) -> usize {
        self.conv.macs()
    }
}

impl MixerWeights for MambaWeights {
    fn linears(&self) -> Vec<&Linear> {
        vec![&self.input, &self.scan, &self.steps, &self.output]
    }

    fn other_macs(&self) -> usize {
        self.conv.macs() + 2 * self.shape.n_states * self.shape.conv.channels
    }

    fn has_kernels(&self) -> bool {
        self.shape.n_states <= DEVICE_STATES_MAX
    }
}

impl MixerWeights for Mamba2Weights {
    fn linears(&self) -> Vec<&Linear> {
        vec![&self.input, &self.output]
    }

    fn other_macs(&self) -> usize {
        self.conv.macs() + 2 * self.shape.scan.n_state()
    }

    fn has_kernels(&self) -> bool {
        self.shape.scan.k_dim <= DEVICE_KEY_MAX
    }
}

impl MixerWeights for LightningWeights {
    fn linears(&self) -> Vec<&Linear> {
        vec![&self.qkv, &self.gate, &self.output]
    }

    fn other_macs(&self) -> usize {
        2 * self.shape.n_state()
    }

    fn has_kernels(&self) -> bool {
        self.shape.k_dim <= DEVICE_KEY_MAX
    }

    /// Decays are in no file.
    fn unpacked_bytes(&self) -> usize {
        vector_bytes(self.log_decay.len())
    }
}

impl MixerWeights for KdaWeights {
    fn linears(&self) -> Vec<&Linear> {
        let projections = self.decay.parts().chain(self.gate.parts());
        self.qkv.iter().chain(projections).chain([&self.beta, &self.output]).collect()
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

impl Binder<'_> {
    pub fn short_conv(&self, l: usize, shape: ConvShape) -> Result<ShortConvWeights> {
        let n_embd = self.hyper.n_embd;
        Ok(ShortConvWeights {
            input: self.linear("shortconv_in", l, 3 * n_embd, n_embd)?,
            conv: self.conv("shortconv", l, shape, false)?,
            output: self.linear("shortconv_out", l, n_embd, n_embd)?,
        })
    }

    pub fn mamba(&self, l: usize, shape: MambaShape) -> Result<MambaWeights> {
        let (n_embd, channels) = (self.hyper.n_embd, shape.conv.channels);
        let MambaShape { n_states, rank, .. } = shape;
        let vector = |role: &str, n| self.vector(self.require(role, l)?, n);
        let by_channel = self.values(self.require("ssm_a", l)?, &[n_states, channels])?;
        let by_state = (0..n_states * channels)
            .map(|i| by_channel[i % channels * n_states + i / channels])
            .collect();
        Ok(MambaWeights {
            shape,
            input: self.linear("ssm_in", l, 2 * channels, n_embd)?,
            conv: self.conv("ssm_conv1d", l, shape.conv, true)?,
            scan: self.linear("ssm_x", l, rank + 2 * n_states, channels)?,
            norms: [
                vector("ssm_dt_norm", rank)?,
                vector("ssm_b_norm", n_states)?,
                vector("ssm_c_norm", n_states)?,
            ],
            steps: self.linear("ssm_dt", l, channels, rank)?,
            log_decay: by_state,
            skip: vector("ssm_d", channels)?,
            output: self.linear("ssm_out", l, n_embd, channels)?,
        })
    }

    pub fn mamba2(&self, l: usize, shape: Mamba2Shape) -> Result<Mamba2Weights> {
        let (n_embd, scan) = (self.hyper.n_embd, shape.scan);
        let (inner, heads) = (scan.width(), scan.n_heads);
        let of_heads = |role: &str| self.values(self.require(role, l)?, &[1, heads]);
        let norm = [inner / scan.n_groups, scan.n_groups];
        Ok(Mamba2Weights {
            shape,
            input: self.linear("ssm_in", l, inner + shape.conv.channels + heads, n_embd)?,
            conv: self.conv("ssm_conv1d", l, shape.conv, true)?,
            step_bias: self.vector(self.require("ssm_dt_bias", l)?, heads)?,
            log_decay: of_heads("ssm_a")?,
            skip: of_heads("ssm_d")?,
            norm: self.values(self.require("ssm_norm", l)?, &norm)?,
            output: self.linear("ssm_out", l, n_embd, inner)?,
        })
    }

    pub fn lightning(&self, l: usize, shape: ScanShape) -> Result<LightningWeights> {
        let (n_embd, width) = (self.hyper.n_embd, shape.width());
        // Slopes as of ALiBi; those of later layers are flatter.
        let (n, n_layers) = (shape.n_heads as f32, self.hyper.n_layers);
        let ratio = (-(3.0 - n.log2()).exp2()).exp2();
        let part = l as f32 / (n_layers - 1).max(1) as f32;
        let slope = |h: usize| ratio.powi(h as i32 + 1) * (1.0 - part + 1e-5);
        Ok(LightningWeights {
            shape,
            qkv: self.linear("attn_qkv", l, 3 * width, n_embd)?,
            log_decay: (0..shape.n_heads).map(|h| -slope(h)).collect(),
            norm: self.vector(self.require("attn_norm_2", l)?, width)?,
            gate: self.linear("attn_gate", l, width, n_embd)?,
            output: self.linear("lightning_output", l, n_embd, width)?,
        })
    }

    pub fn kda(&self, l: usize, shape: DeltaShape) -> Result<KdaWeights> {
        let (n_embd, rank, width) = (self.hyper.n_embd, shape.k_dim, shape.key_width());
        let projection = |role: &str| {
            let [first, second] = ["a", "b"].map(|part| format!("{role}_{part}"));
            let has_two = self.descriptor.tensors.contains_key(&second);
            let rows = if has_two { rank } else { width };
            let first = self.linear(&first, l, rows, n_embd)?;
            let second = has_two.then(|| self.linear(&second, l, width, rank)).transpose()?;
            Ok(Projection { first, second })
        };
        let of = ["q", "k", "v"];
        let [q, k, v] = of.map(|part| self.linear(&format!("attn_{part}"), l, width, n_embd));
        let conv = |part: &str| {
            let index = self.require(&format!("ssm_conv1d_{part}"), l)?;
            self.values(index, &[shape.kernel, 1, width])
        };
        let [q_conv, k_conv, v_conv] = of.map(conv);
        let weight = [q_conv?, k_conv?, v_conv?].concat();
        let mut a = self.head_decays(l, shape.n_v_heads)?;
        if self.descriptor.parts.decay_factors_are_negative {
            a.iter_mut().for_each(|a| *a = -*a);
        }
        Ok(KdaWeights {
            shape,
            qkv: [q?, k?, v?],
            conv: ConvWeights { shape: shape.conv(), weight, bias: None, silu: true },
            decay: projection("ssm_f")?,
            beta: self.linear("ssm_beta", l, shape.n_v_heads, n_embd)?,
            a,
            dt: self.vector(self.require("ssm_dt_bias", l)?, width)?,
            bound: self.hyper.decay_bound,
            gate: projection("ssm_g")?,
            norm: self.vector(self.require("ssm_norm", l)?, shape.v_dim)?,
            output: self.linear("kda_output", l, n_embd, width)?,
        })
    }

    /// A number a head, as a row or as a column.
    fn head_decays(&self, l: usize, n: usize) -> Result<Vec<f32>> {
        let index = self.require("ssm_a", l)?;
        let is_row = self.tensor(index).dims.len() < 2;
        self.values(index, &if is_row { [n, 1] } else { [1, n] })
    }

    fn conv(&self, role: &str, l: usize, shape: ConvShape, silu: bool) -> Result<ConvWeights> {
        let weight = self.values(self.require(role, l)?, &[shape.kernel, shape.channels])?;
        let bias = self.optional_vector(&format!("{role}_bias"), l, shape.channels)?;
        Ok(ConvWeights { shape, weight, bias, silu })
    }
}

impl<R: Residence> Projection<R> {
    pub fn parts(&self) -> impl Iterator<Item = &R::Linear> {
        std::iter::once(&self.first).chain(&self.second)
    }
}
