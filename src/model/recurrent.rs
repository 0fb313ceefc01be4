//! Layers with a recurrence instead of attention, and its sizes, from GGUF metadata.

use super::descriptor::RecurrenceKind;
use super::hyper::Keys;
use crate::Result;
use crate::backend::ops::{ConvShape, DeltaShape, HeadOrder, ScanShape, StateSize};

/// The recurrent layers of a model.
#[derive(Clone, Debug)]
pub struct Recurrent {
    /// By layer: whether it is one.
    pub layers: Vec<bool>,
    pub recurrence: Recurrence,
}

/// A recurrence and its sizes.
#[derive(Clone, Copy, Debug)]
pub enum Recurrence {
    Delta(DeltaShape),
    Kda(DeltaShape),
    ShortConv(ConvShape),
    Mamba(MambaShape),
    Mamba2(Mamba2Shape),
    Lightning(ScanShape),
}

/// Sizes of a selective scan.
#[derive(Clone, Copy, Debug)]
pub struct MambaShape {
    pub conv: ConvShape,
    /// States a channel.
    pub n_states: usize,
    /// Elements that steps are made of.
    pub rank: usize,
}

/// Sizes of a scan with one decay a head.
#[derive(Clone, Copy, Debug)]
pub struct Mamba2Shape {
    /// Its channels are heads' values, groups' inputs and groups' outputs.
    pub conv: ConvShape,
    pub scan: ScanShape,
}

impl Recurrence {
    pub fn state_size(self) -> StateSize {
        let (n_past, n_state) = match self {
            Recurrence::Delta(shape) | Recurrence::Kda(shape) => return shape.state_size(),
            Recurrence::ShortConv(conv) => (conv.n_past(), 0),
            Recurrence::Mamba(shape) => (shape.conv.n_past(), shape.n_states * shape.conv.channels),
            Recurrence::Mamba2(shape) => (shape.conv.n_past(), shape.scan.n_state()),
            Recurrence::Lightning(scan) => (0, scan.n_state()),
        };
        StateSize { n_past, n_state }
    }
}

impl Recurrent {
    /// `None` if the architecture has none. Attention has `n_head` heads of `head_dim` elements.
    pub(super) fn read(
        keys: &Keys,
        n_layers: usize,
        n_head: usize,
        head_dim: usize,
    ) -> Result<Option<Recurrent>> {
        let Some(kind) = keys.descriptor.parts.recurrence else { return Ok(None) };
        let layers = keys.recurrent_layers(n_layers, kind)?;
        let recurrence = match kind {
            RecurrenceKind::DeltaGrouped => Recurrence::Delta(keys.delta(HeadOrder::Grouped)?),
            RecurrenceKind::DeltaTiled => Recurrence::Delta(keys.delta(HeadOrder::Tiled)?),
            RecurrenceKind::Kda => {
                let dim = keys.require("kda.head_dim")?;
                Recurrence::Kda(DeltaShape {
                    n_k_heads: n_head,
                    n_v_heads: n_head,
                    k_dim: dim,
                    v_dim: dim,
                    kernel: keys.require("ssm.conv_kernel")?,
                    order: HeadOrder::Grouped,
                })
            }
            RecurrenceKind::ShortConv => Recurrence::ShortConv(ConvShape {
                channels: keys.require("embedding_length")?,
                kernel: keys.require("shortconv.l_cache")?,
            }),
            RecurrenceKind::Mamba => Recurrence::Mamba(MambaShape {
                conv: keys.conv(keys.require("ssm.inner_size")?)?,
                n_states: keys.require("ssm.state_size")?,
                rank: keys.require("ssm.time_step_rank")?,
            }),
            RecurrenceKind::Mamba2 => Recurrence::Mamba2(keys.mamba2()?),
            RecurrenceKind::Lightning => Recurrence::Lightning(ScanShape {
                n_heads: n_head,
                n_groups: n_head,
                k_dim: head_dim,
                v_dim: head_dim,
            }),
        };
        Ok(Some(Recurrent { layers, recurrence }))
    }
}

impl Keys<'_> {
    /// Layers without heads of keys, where the file lists heads and some have none; else those that
    /// it names; else all but one of each interval.
    fn recurrent_layers(&self, n: usize, kind: RecurrenceKind) -> Result<Vec<bool>> {
        let heads = self.heads_of_layers()?.unwrap_or_default();
        let headless: Vec<bool> = heads.iter().map(|heads| heads[1] == 0).collect();
        if headless.contains(&true) {
            return Ok(headless);
        }
        let key = "attention.recurrent_layers";
        if let Some(listed) = self.gguf.get(&self.descriptor.key(key)) {
            return self.flags(key, listed, n, self.require("block_count")?);
        }
        let plain = match kind {
            RecurrenceKind::DeltaGrouped | RecurrenceKind::DeltaTiled => 4,
            RecurrenceKind::Lightning => 8,
            // Files of these list the heads.
            _ => return Ok(vec![false; n]),
        };
        let interval = self.count("full_attention_interval")?;
        let layers: Vec<bool> = (0..n).map(|l| (l + 1) % interval.unwrap_or(plain) != 0).collect();
        let has_tensors = match (kind, interval) {
            (RecurrenceKind::Lightning, _) => self.have_tensor("attn_norm_2", &layers),
            (_, None) => self.have_tensor("ssm_conv1d", &layers),
            _ => true,
        };
        if has_tensors { Ok(layers) } else { self.some(key, None) }
    }

    fn conv(&self, channels: usize) -> Result<ConvShape> {
        Ok(ConvShape { channels, kernel: self.require("ssm.conv_kernel")? })
    }

    /// A number of parts that `whole`, the value of the key `of`, is cut into.
    fn divisor(&self, key: &str, of: &str, whole: usize) -> Result<usize> {
        let n = self.require(key)?;
        if whole.is_multiple_of(n) {
            return Ok(n);
        }
        Err(self.bad(key, format!("a divisor of {of} = {whole}"), n))
    }

    fn delta(&self, order: HeadOrder) -> Result<DeltaShape> {
        let (n_k_heads, n_v_heads) =
            (self.require("ssm.group_count")?, self.require("ssm.time_step_rank")?);
        let inner = self.require("ssm.inner_size")?;
        if n_v_heads % n_k_heads != 0 {
            let expected = format!("a multiple of ssm.group_count = {n_k_heads}");
            return Err(self.bad("ssm.time_step_rank", expected, n_v_heads));
        }
        if inner % n_v_heads != 0 {
            let expected = format!("a multiple of ssm.time_step_rank = {n_v_heads}");
            return Err(self.bad("ssm.inner_size", expected, inner));
        }
        Ok(DeltaShape {
            n_k_heads,
            n_v_heads,
            k_dim: self.require("ssm.state_size")?,
            v_dim: inner / n_v_heads,
            kernel: self.require("ssm.conv_kernel")?,
            order,
        })
    }

    fn mamba2(&self) -> Result<Mamba2Shape> {
        let (inner, k_dim) = (self.require("ssm.inner_size")?, self.require("ssm.state_size")?);
        let n_heads = self.divisor("ssm.time_step_rank", "ssm.inner_size", inner)?;
        let n_groups = self.divisor("ssm.group_count", "ssm.time_step_rank", n_heads)?;
        let scan = ScanShape { n_heads, n_groups, k_dim, v_dim: inner / n_heads };
        Ok(Mamba2Shape { conv: self.conv(inner + 2 * n_groups * k_dim)?, scan })
    }
}
