//! Sparse attention by an indexer (DeepSeek-V3.2): small heads of their own score the positions,
//! and attention sees the best. From GGUF metadata.

use super::compressed::{INDEXED, ratios};
use super::descriptor::{Mixer, RopeRows};
use super::hyper::Keys;
use super::layers::{LayerKinds, is_dense};
use crate::Result;

#[derive(Clone, Debug)]
pub struct IndexerParams {
    pub n_heads: usize,
    /// Elements of a head, and of a position's one key.
    pub dim: usize,
    /// Positions that attention sees, or blocks of them.
    pub top_k: usize,
    /// Positions of a block; 1 where each is chosen by itself.
    pub block: usize,
    /// Blocks up to a token's own that it sees whatever their scores.
    pub n_near: usize,
    /// The first element of a head that rotates.
    pub rope_offset: usize,
    /// By layer: whether it has an indexer. One without that sees a whole text sees what the last
    /// one with it chose.
    pub own: Vec<bool>,
}

const TOP_K: &str = "attention.indexer.top_k";

/// Contexts from which on GLM files without `attention.indexer.types` share indexers.
const SHARED_CONTEXT: usize = 1 << 20;

impl IndexerParams {
    /// `None` if the architecture has none, or the file where it may have none. Attention's heads
    /// rotate `n_rot` elements.
    pub(super) fn read(
        keys: &Keys,
        kinds: &LayerKinds,
        n_rot: usize,
    ) -> Result<Option<IndexerParams>> {
        let parts = &keys.descriptor.parts;
        let is_optional = !keys.descriptor.requires.iter().any(|key| key == TOP_K);
        let is_left_out =
            || Ok(keys.number(TOP_K)? == 0 && !keys.have_tensor("indexer_k", &[true]));
        if parts.indexer.is_none() || is_optional && is_left_out()? {
            return Ok(None);
        }
        let dim = keys.require("attention.indexer.key_length")?;
        if dim < n_rot {
            let expected = format!("at least rope.dimension_count = {n_rot}");
            return Err(keys.bad("attention.indexer.key_length", expected, dim));
        }
        if parts.mixer == Mixer::Compressed && !dim.is_multiple_of(INDEXED) {
            let expected = format!("a multiple of {INDEXED}");
            return Err(keys.bad("attention.indexer.key_length", expected, dim));
        }
        let has_blocks = parts.mixer == Mixer::Attention;
        let mut own = own_indexers(keys, kinds.n_layers())?;
        own.iter_mut().enumerate().for_each(|(l, own)| *own &= !kinds.slides(l));
        Ok(Some(IndexerParams {
            n_heads: keys.require("attention.indexer.head_count")?,
            dim,
            top_k: keys.require(TOP_K)?,
            block: match parts.mixer {
                Mixer::Attention => keys.require("attention.indexer.block_size")?,
                Mixer::Compressed => INDEXED,
                Mixer::Latent => 1,
            },
            n_near: if has_blocks { keys.require("attention.indexer.local_blocks")? } else { 0 },
            rope_offset: match parts.indexer_rope_rows {
                RopeRows::First => 0,
                RopeRows::Last => dim - n_rot,
            },
            own,
        }))
    }

    /// Whether attention in contexts of `n_ctx` positions sees fewer than all.
    pub fn chooses(&self, n_ctx: usize) -> bool {
        n_ctx > self.n_all()
    }

    /// Positions of the longest text of which each token sees all.
    pub fn n_all(&self) -> usize {
        self.top_k.saturating_mul(self.block)
    }
}

fn own_indexers(keys: &Keys, n: usize) -> Result<Vec<bool>> {
    let key = "attention.indexer.types";
    if keys.descriptor.parts.mixer == Mixer::Attention {
        // Leading dense layers have none.
        return Ok((0..n).map(|l| !is_dense(keys, l)).collect());
    }
    if keys.descriptor.parts.mixer == Mixer::Compressed {
        return Ok(ratios(keys, n)?.iter().map(|ratio| *ratio == INDEXED).collect());
    }
    if !keys.descriptor.parts.shares_indexers {
        return Ok(vec![true; n]);
    }
    let own = match keys.gguf.get(&keys.descriptor.key(key)) {
        Some(listed) => keys.flags(key, listed, n, keys.require("block_count")?)?,
        None if keys.require("context_length")? < SHARED_CONTEXT => vec![true; n],
        None => (0..n).map(|l| l < 2 || l % 4 == 2).collect(),
    };
    if !keys.has(key) && !keys.have_tensor("indexer_k", &own) {
        return keys.some(key, None);
    }
    match own.first() {
        Some(false) => Err(keys.bad(key, "1 for the first layer".into(), 0)),
        _ => Ok(own),
    }
}
