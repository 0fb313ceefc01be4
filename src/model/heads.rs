//! Numbers and sizes of attention heads, from GGUF metadata.

use super::descriptor::{Form, Mixer, RopeLayers};
use super::hyper::Keys;
use crate::Result;

/// Numbers and sizes of attention heads.
pub(super) struct Heads {
    pub n_head: usize,
    pub n_head_kv: usize,
    pub of_layers: Option<Vec<[usize; 2]>>,
    pub head_dim: usize,
    pub head_dim_v: usize,
    pub kv_rank: usize,
    pub n_rot: usize,
}

/// Sizes of latent attention.
#[derive(Clone, Copy, Debug)]
pub struct LatentShape {
    pub n_head: usize,
    /// Elements of one head of q and k, of which the last `n_rot` rotate.
    pub head_dim: usize,
    pub head_dim_v: usize,
    /// Elements of compressed keys and values.
    pub rank: usize,
    pub n_rot: usize,
}

impl Keys<'_> {
    pub(super) fn heads(&self, n_embd: usize) -> Result<Heads> {
        let of_layers = self.heads_of_layers()?;
        let most = |i: usize| of_layers.iter().flatten().map(|heads| heads[i]).max();
        let [n_head, n_head_kv] = match (most(0), most(1)) {
            (Some(n_head), Some(n_head_kv)) if n_head > 0 && n_head_kv > 0 => [n_head, n_head_kv],
            _ => {
                let n_head = self.require("attention.head_count")?;
                let n_head_kv = self.count("attention.head_count_kv")?.unwrap_or(n_head);
                self.check_heads([n_head, n_head_kv])?
            }
        };
        let latent = self.descriptor.parts.mixer == Mixer::Latent;
        // Files whose keys and values are split by head give the compressed widths under the
        // plain names and the heads' own under these; 0 is none given.
        let own = |key: &str| {
            let key = format!("{key}_mla");
            match latent && self.gguf.u32(&self.descriptor.key(&key))? != Some(0) {
                true => self.count(&key),
                false => Ok(None),
            }
        };
        let plain = self.count("attention.key_length")?;
        let head_dim = match own("attention.key_length")?.or(plain) {
            Some(v) => v,
            None if n_embd.is_multiple_of(n_head) => n_embd / n_head,
            None => {
                let expected = format!("a divisor of embedding_length = {n_embd}");
                return Err(self.bad("attention.head_count", expected, n_head));
            }
        };
        let plain = self.count("attention.value_length")?.unwrap_or(head_dim);
        let head_dim_v = own("attention.value_length")?.unwrap_or(plain);
        let kv_rank = if latent { self.require("attention.kv_lora_rank")? } else { 0 };
        let turns = self.descriptor.parts.rope_layers != RopeLayers::None;
        let n_rot = match (turns, self.number("rope.dimension_count")?) {
            (false, 0) => 0,
            _ => self.count("rope.dimension_count")?.unwrap_or(head_dim),
        };
        let most = if latent { head_dim - 1 } else { head_dim };
        if n_rot > most || n_rot % 2 != 0 {
            let expected = format!("an even number of at most {most}");
            return Err(self.bad("rope.dimension_count", expected, n_rot));
        }
        let n_rot = if self.descriptor.parts.half_of_full_rope { n_rot / 4 * 2 } else { n_rot };
        Ok(Heads { n_head, n_head_kv, of_layers, head_dim, head_dim_v, kv_rank, n_rot })
    }

    /// Sizes of latent attention in layers that slide, if the architecture lets them have others.
    pub(super) fn sliding_latent(&self, full: &Heads) -> Result<Option<LatentShape>> {
        if !self.descriptor.parts.sliding_heads_differ || full.kv_rank == 0 {
            return Ok(None);
        }
        let shape = LatentShape {
            n_head: full.n_head,
            head_dim: self.require("attention.key_length_mla_swa")?,
            head_dim_v: self.require("attention.value_length_mla_swa")?,
            rank: self.require("attention.kv_lora_rank_swa")?,
            n_rot: full.n_rot,
        };
        if shape.head_dim <= full.n_rot {
            let expected = format!("more than rope.dimension_count = {}", full.n_rot);
            return Err(self.bad("attention.key_length_mla_swa", expected, shape.head_dim));
        }
        Ok(Some(shape))
    }

    /// Elements of a head in layers that slide, if the architecture lets them have others.
    pub(super) fn sliding_head_dim(&self, k_dim: usize, v_dim: usize) -> Result<Option<usize>> {
        let is_latent = self.descriptor.parts.mixer == Mixer::Latent;
        if !self.descriptor.parts.sliding_heads_differ || is_latent {
            return Ok(None);
        }
        if k_dim != v_dim {
            let expected = format!("attention.key_length = {k_dim}");
            return Err(self.bad("attention.value_length", expected, v_dim));
        }
        let of = |key: &str| Ok(self.count(key)?.unwrap_or(k_dim));
        let (k, v) = (of("attention.key_length_swa")?, of("attention.value_length_swa")?);
        match k == v && k <= k_dim {
            true => Ok(Some(k)),
            false => {
                let expected = format!("attention.key_length_swa = {k} of at most {k_dim}");
                Err(self.bad("attention.value_length_swa", expected, v))
            }
        }
    }

    fn check_heads(&self, [n_head, n_head_kv]: [usize; 2]) -> Result<[usize; 2]> {
        if !n_head.is_multiple_of(n_head_kv) {
            let expected = format!("a divisor of attention.head_count = {n_head}");
            return Err(self.bad("attention.head_count_kv", expected, n_head_kv));
        }
        Ok([n_head, n_head_kv])
    }

    /// Heads of each layer, if the file lists them.
    pub(super) fn heads_of_layers(&self) -> Result<Option<Vec<[usize; 2]>>> {
        const COUNTS: [&str; 2] = ["attention.head_count", "attention.head_count_kv"];
        let is_list = |key: &str| {
            let value = self.gguf.get(&self.descriptor.key(key));
            value.is_some_and(|value| value.as_array().is_some())
        };
        if self.descriptor.parts.form != Form::Decoder || !COUNTS.iter().any(|key| is_list(key)) {
            return Ok(None);
        }
        let n = self.layers()?;
        let list = |key: &str| -> Result<Vec<usize>> {
            if !is_list(key) {
                return Ok(vec![self.require(key)?; n]);
            }
            let list = self.gguf.u32s(&self.descriptor.key(key))?.unwrap_or_default();
            // Layers with a recurrence have no heads of keys.
            let has_zeros = self.descriptor.parts.recurrence.is_some();
            let of_layers = list.get(..n).filter(|list| has_zeros || !list.contains(&0));
            let of_layers = of_layers.ok_or_else(|| {
                let expected = format!("a number above 0 for each of {n} layers");
                self.bad(key, expected, format!("{list:?}"))
            })?;
            Ok(of_layers.iter().map(|n| *n as usize).collect())
        };
        let (heads, heads_kv) = (list(COUNTS[0])?, list(COUNTS[1])?);
        let both = heads.into_iter().zip(heads_kv);
        let both = both.map(|(n, kv)| if kv == 0 { Ok([n, 0]) } else { self.check_heads([n, kv]) });
        both.collect::<Result<_>>().map(Some)
    }
}
