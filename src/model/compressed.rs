//! Attention to a window and to compressed rows of what is before it (DeepSeek-V4), from GGUF
//! metadata.

use super::descriptor::Mixer;
use super::heads::Heads;
use super::hyper::Keys;
use super::kv::{LayerShape, PAGE};
use crate::Result;
use crate::backend::ops::StateSize;

#[derive(Clone, Debug)]
pub struct CompressedParams {
    /// By layer: positions that make one compressed row; 0 in layers that see the window alone.
    pub ratios: Vec<usize>,
    /// Positions that attention sees as they are, counted back from a token's own.
    pub window: usize,
    /// Groups of heads with an output matrix of their own, and the rows of each.
    pub n_groups: usize,
    pub group_rank: usize,
}

/// Layers of this ratio have rows that overlap, of which an indexer chooses.
pub const INDEXED: usize = 4;
/// All ratios of layers with compressed rows.
pub const RATIOS: [usize; 2] = [INDEXED, 128];
const KEY: &str = "attention.compress_ratios";

impl CompressedParams {
    /// `None` if the architecture has none.
    pub(super) fn read(keys: &Keys, n: usize, heads: &Heads) -> Result<Option<CompressedParams>> {
        if keys.descriptor.parts.mixer != Mixer::Compressed {
            return Ok(None);
        }
        let n_groups = keys.require("attention.output_group_count")?;
        if !heads.n_head.is_multiple_of(n_groups) {
            let expected = format!("a divisor of attention.head_count = {}", heads.n_head);
            return Err(keys.bad("attention.output_group_count", expected, n_groups));
        }
        if !heads.head_dim.is_multiple_of(PAGE) {
            let expected = format!("a multiple of {PAGE}");
            return Err(keys.bad("attention.key_length", expected, heads.head_dim));
        }
        Ok(Some(CompressedParams {
            ratios: ratios(keys, n)?,
            window: keys.require("attention.sliding_window")?,
            n_groups,
            group_rank: keys.require("attention.output_lora_rank")?,
        }))
    }

    /// The caches of all layers: rows as they are, then what makes the next compressed row, then
    /// compressed rows, each cut into parts for its last positions, no more than a page of them:
    /// pages before it serve texts that go on otherwise. Rows have `dim` elements, an indexer's
    /// keys `index`.
    pub fn cache_shapes(&self, dim: usize, index: usize) -> Vec<LayerShape> {
        let plain = self.ratios.iter().map(|_| LayerShape::Latent { dim, index: 0, kept: 0 });
        let state = self.ratios.iter().map(|ratio| match *ratio {
            0 => LayerShape::ELSEWHERE,
            // Values and scores of two rows of each, for this block's and for the next one's.
            INDEXED => LayerShape::State(StateSize {
                n_past: 2 * INDEXED * 2 * 2 * (dim + index),
                n_state: 0,
            }),
            ratio => LayerShape::State(StateSize { n_past: ratio * 2 * dim, n_state: 0 }),
        });
        let packed = self.ratios.iter().map(|ratio| match *ratio {
            0 => LayerShape::ELSEWHERE,
            INDEXED => {
                let (k_dim, v_dim) = (dim / INDEXED, index / INDEXED);
                LayerShape::Heads { n_head_kv: 1, k_dim, v_dim }
            }
            ratio => LayerShape::Heads { n_head_kv: 1, k_dim: dim / ratio.min(PAGE), v_dim: 0 },
        });
        plain.chain(state).chain(packed).collect()
    }
}

/// Which of the rows in a cache is a block's.
pub fn row_of_block(ratio: usize, block: usize) -> usize {
    (block + 1) * ratio.div_ceil(PAGE) - 1
}

/// The ratios of `n` layers; a file may have more.
pub(super) fn ratios(keys: &Keys, n: usize) -> Result<Vec<usize>> {
    let list = keys.gguf.u32s(&keys.descriptor.key(KEY))?.unwrap_or_default();
    match list.get(..n) {
        Some(list)
            if list.iter().all(|ratio| *ratio == 0 || RATIOS.contains(&(*ratio as usize))) =>
        {
            Ok(list.iter().map(|ratio| *ratio as usize).collect())
        }
        _ => Err(keys.bad(KEY, format!("0, 4 or 128 for each of {n} layers"), format!("{list:?}"))),
    }
}
