//! A model's numbers, from GGUF metadata: read once, checked once.

use super::descriptor::Descriptor;
use crate::gguf::Gguf;
use crate::{Error, Result};

/// Hyper-parameters. Counts are of the whole model unless said otherwise.
#[derive(Clone, Debug)]
pub struct HyperParams {
    pub n_layers: usize,
    /// Tokens of context the model was trained for.
    pub n_ctx_train: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    pub n_head: usize,
    pub n_head_kv: usize,
    /// Elements of one head of q and k.
    pub head_dim: usize,
    /// Elements of one head of v.
    pub head_dim_v: usize,
    /// Leading elements of a head that RoPE rotates.
    pub n_rot: usize,
    pub rope_base: f32,
    /// Positions are multiplied by this (linear scaling: 1 / factor).
    pub rope_scale: f32,
    pub norm_eps: f32,
    /// Routed experts a layer; 0 in a dense model.
    pub n_experts: usize,
    pub n_experts_used: usize,
    /// Chosen experts' weights are divided by their sum.
    pub normalize_weights: bool,
    /// Factor on the routed experts' weights.
    pub weights_scale: f32,
}

/// More than any model has; keeps products of counts far from overflow.
const MAX_COUNT: u64 = 1 << 24;

impl HyperParams {
    pub fn read(gguf: &Gguf, descriptor: &Descriptor) -> Result<HyperParams> {
        let keys = Keys { gguf, descriptor };
        let n_embd = keys.require("embedding_length")?;
        let heads = keys.heads(n_embd)?;
        let (n_experts, n_experts_used) = keys.experts()?;
        Ok(HyperParams {
            n_layers: keys.require("block_count")?,
            n_ctx_train: keys.require("context_length")?,
            n_embd,
            n_head: heads.n_head,
            n_head_kv: heads.n_head_kv,
            head_dim: heads.head_dim,
            head_dim_v: keys.count("attention.value_length")?.unwrap_or(heads.head_dim),
            n_rot: heads.n_rot,
            rope_base: keys.positive("rope.freq_base")?.unwrap_or(10000.0),
            rope_scale: rope_scale(gguf, descriptor)?,
            norm_eps: keys
                .positive("attention.layer_norm_rms_epsilon")?
                .ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?,
            n_experts,
            n_experts_used,
            normalize_weights: gguf
                .bool(&descriptor.key("expert_weights_norm"))?
                .unwrap_or(descriptor.router.normalize),
            weights_scale: keys.positive("expert_weights_scale")?.unwrap_or(1.0),
        })
    }
}

/// How attention divides the stream.
struct Heads {
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    n_rot: usize,
}

/// The model's keys, `{arch}.` left out.
struct Keys<'a> {
    gguf: &'a Gguf,
    descriptor: &'a Descriptor,
}

impl Keys<'_> {
    fn bad(&self, key: &str, expected: String, got: impl ToString) -> Error {
        Error::format(self.gguf.path(), self.descriptor.key(key), expected, got.to_string())
    }

    fn missing(&self, key: &str) -> Error {
        self.bad(key, "a value".into(), "nothing")
    }

    fn count(&self, key: &str) -> Result<Option<usize>> {
        match self.gguf.u32(&self.descriptor.key(key))? {
            None => Ok(None),
            Some(v) if (1..=MAX_COUNT).contains(&u64::from(v)) => Ok(Some(v as usize)),
            Some(v) => Err(self.bad(key, format!("1 to {MAX_COUNT}"), v)),
        }
    }

    fn require(&self, key: &str) -> Result<usize> {
        self.count(key)?.ok_or_else(|| self.missing(key))
    }

    fn positive(&self, key: &str) -> Result<Option<f32>> {
        match self.gguf.f32(&self.descriptor.key(key))? {
            Some(v) if !(v.is_finite() && v > 0.0) => {
                Err(self.bad(key, "a positive number".into(), v))
            }
            other => Ok(other),
        }
    }

    fn heads(&self, n_embd: usize) -> Result<Heads> {
        let n_head = self.require("attention.head_count")?;
        let n_head_kv = self.count("attention.head_count_kv")?.unwrap_or(n_head);
        if n_head % n_head_kv != 0 {
            let expected = format!("a divisor of attention.head_count = {n_head}");
            return Err(self.bad("attention.head_count_kv", expected, n_head_kv));
        }
        let head_dim = match self.count("attention.key_length")? {
            Some(v) => v,
            None if n_embd.is_multiple_of(n_head) => n_embd / n_head,
            None => {
                let expected = format!("a divisor of embedding_length = {n_embd}");
                return Err(self.bad("attention.head_count", expected, n_head));
            }
        };
        let n_rot = self.count("rope.dimension_count")?.unwrap_or(head_dim);
        if n_rot > head_dim || n_rot % 2 != 0 {
            let expected = format!("an even number of at most {head_dim}");
            return Err(self.bad("rope.dimension_count", expected, n_rot));
        }
        Ok(Heads { n_head, n_head_kv, head_dim, n_rot })
    }

    /// Routed experts and how many of them a token uses; zeros in a dense model.
    fn experts(&self) -> Result<(usize, usize)> {
        match self.gguf.u32(&self.descriptor.key("expert_count"))? {
            None | Some(0) => return Ok((0, 0)),
            Some(_) => (),
        }
        let n = self.require("expert_count")?;
        let used = self.require("expert_used_count")?;
        if used > n {
            let expected = format!("at most expert_count = {n}");
            return Err(self.bad("expert_used_count", expected, used));
        }
        Ok((n, used))
    }
}

/// Linear scaling divides positions by a factor. Others change frequencies in ways that this
/// engine would have to know; a file that asks for one is refused rather than run wrongly.
fn rope_scale(gguf: &Gguf, descriptor: &Descriptor) -> Result<f32> {
    let (ty, factor) = (descriptor.key("rope.scaling.type"), descriptor.key("rope.scaling.factor"));
    let bad = |k: &String, e: &str, got: String| Error::format(gguf.path(), k.clone(), e, got);
    match gguf.str(&ty)? {
        None | Some("none") => Ok(1.0),
        Some("linear") => match gguf.f32(&factor)? {
            Some(f) if f.is_finite() && f > 0.0 => Ok(1.0 / f),
            other => Err(bad(&factor, "a positive number", format!("{other:?}"))),
        },
        Some(other) => Err(bad(&ty, "\"none\" or \"linear\"", format!("{other:?}"))),
    }
}
