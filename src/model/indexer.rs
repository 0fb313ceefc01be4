//! Sparse attention by an indexer (DeepSeek-V3.2): small heads of their own score the positions,
//! and attention sees the best. From GGUF metadata.

use super::hyper::Keys;
use crate::Result;

#[derive(Clone, Debug)]
pub struct IndexerParams {
    pub n_heads: usize,
    /// Elements of a head, and of a position's one key.
    pub dim: usize,
    /// Positions that attention sees.
    pub top_k: usize,
    /// By layer: whether it has an indexer. One without sees what the last one with it chose.
    pub own: Vec<bool>,
}

/// Contexts from which on GLM files without `attention.indexer.types` share indexers.
const SHARED_CONTEXT: usize = 1 << 20;

impl IndexerParams {
    /// `None` if the architecture has none.
    pub(super) fn read(keys: &Keys, n: usize) -> Result<Option<IndexerParams>> {
        if keys.descriptor.parts.indexer.is_none() {
            return Ok(None);
        }
        let dim = keys.require("attention.indexer.key_length")?;
        let n_rot = keys.require("rope.dimension_count")?;
        if dim < n_rot {
            let expected = format!("at least rope.dimension_count = {n_rot}");
            return Err(keys.bad("attention.indexer.key_length", expected, dim));
        }
        Ok(Some(IndexerParams {
            n_heads: keys.require("attention.indexer.head_count")?,
            dim,
            top_k: keys.require("attention.indexer.top_k")?,
            own: own_indexers(keys, n)?,
        }))
    }

    /// Whether attention in contexts of `n_ctx` positions sees fewer than all.
    pub fn chooses(&self, n_ctx: usize) -> bool {
        n_ctx > self.top_k
    }
}

fn own_indexers(keys: &Keys, n: usize) -> Result<Vec<bool>> {
    let key = "attention.indexer.types";
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
