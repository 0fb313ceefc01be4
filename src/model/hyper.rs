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
        let key = |rest: &str| descriptor.key(rest);
        let bad = |rest: &str, expected: String, got: String| {
            Error::format(gguf.path(), key(rest), expected, got)
        };
        let count = |rest: &str, value: u32| match value as u64 {
            1..=MAX_COUNT => Ok(value as usize),
            _ => Err(bad(rest, format!("1 to {MAX_COUNT}"), value.to_string())),
        };
        let required = |rest: &str| count(rest, gguf.require_u32(&key(rest))?);
        let optional = |rest: &str, default: usize| match gguf.u32(&key(rest))? {
            Some(value) => count(rest, value),
            None => Ok(default),
        };
        let float = |rest: &str, default: f32| match gguf.f32(&key(rest))? {
            Some(v) if v.is_finite() && v > 0.0 => Ok(v),
            Some(v) => Err(bad(rest, "a positive number".into(), v.to_string())),
            None => Ok(default),
        };

        let n_embd = required("embedding_length")?;
        let n_head = required("attention.head_count")?;
        let n_head_kv = optional("attention.head_count_kv", n_head)?;
        if n_head % n_head_kv != 0 {
            let expected = format!("a divisor of attention.head_count = {n_head}");
            return Err(bad("attention.head_count_kv", expected, n_head_kv.to_string()));
        }
        let head_dim = match gguf.u32(&key("attention.key_length"))? {
            Some(v) => count("attention.key_length", v)?,
            None if n_embd % n_head == 0 => n_embd / n_head,
            None => {
                let expected = format!("a divisor of embedding_length = {n_embd}");
                return Err(bad("attention.head_count", expected, n_head.to_string()));
            }
        };
        let n_rot = optional("rope.dimension_count", head_dim)?;
        if n_rot > head_dim || n_rot % 2 != 0 {
            let expected = format!("an even number of at most {head_dim}");
            return Err(bad("rope.dimension_count", expected, n_rot.to_string()));
        }
        let n_experts = match gguf.u32(&key("expert_count"))? {
            None | Some(0) => 0,
            Some(v) => count("expert_count", v)?,
        };
        let n_experts_used = if n_experts == 0 { 0 } else { required("expert_used_count")? };
        if n_experts_used > n_experts {
            let expected = format!("at most expert_count = {n_experts}");
            return Err(bad("expert_used_count", expected, n_experts_used.to_string()));
        }
        Ok(HyperParams {
            n_layers: required("block_count")?,
            n_ctx_train: required("context_length")?,
            n_embd,
            n_head,
            n_head_kv,
            head_dim,
            head_dim_v: optional("attention.value_length", head_dim)?,
            n_rot,
            rope_base: float("rope.freq_base", 10000.0)?,
            rope_scale: rope_scale(gguf, descriptor)?,
            norm_eps: match gguf.f32(&key("attention.layer_norm_rms_epsilon"))? {
                Some(_) => float("attention.layer_norm_rms_epsilon", 0.0)?,
                None => {
                    let rest = "attention.layer_norm_rms_epsilon";
                    return Err(bad(rest, "a positive number".into(), "nothing".into()));
                }
            },
            n_experts,
            n_experts_used,
            normalize_weights: gguf
                .bool(&key("expert_weights_norm"))?
                .unwrap_or(descriptor.router.normalize),
            weights_scale: float("expert_weights_scale", 1.0)?,
        })
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
