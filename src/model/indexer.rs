//! Sparse attention by an indexer (DeepSeek-V3.2): small heads of their own score the positions,
//! and attention sees the best. From GGUF metadata.

use super::compressed::{INDEX_SOURCES, INDEXED, listed, ratios};
use super::descriptor::{Mixer, RopeRows};
use super::hyper::Keys;
use super::kv::PAGE;
use super::layers::{LayerKinds, is_dense};
use super::recurrent::Recurrent;
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
    /// ε of the norm of keys, and of what queries are made of.
    pub key_eps: f32,
    /// The first element of a head that rotates.
    pub rope_offset: usize,
    /// A block has one key, the mean of its positions', and all heads see the same blocks.
    pub means: bool,
    /// Each head of keys has blocks of its own, and an indexer's head for them.
    pub by_head: bool,
    /// By layer: whether it has an indexer. One without that sees a whole text sees what the last
    /// one with it chose.
    pub own: Vec<bool>,
    pub candidates: Option<Candidates>,
}

/// A choice in two levels: a layer chooses blocks of compressed rows, one of which is as good as
/// its best row, and indexers of later layers choose rows of these.
#[derive(Clone, Copy, Debug)]
pub struct Candidates {
    pub source: usize,
    /// Blocks that are chosen, the newest always among them.
    pub n: usize,
    /// Rows of a block.
    pub block: usize,
}

const TOP_K: &str = "attention.indexer.top_k";
const POOL: &str = "attention.indexer.kpool";
const LAYER_NORM_EPS: &str = "attention.layer_norm_epsilon";

/// ε of the norm of keys, as a rule whatever the model's.
const KEY_EPS: f32 = 1e-6;

/// Contexts from which on GLM files without `attention.indexer.types` share indexers.
const SHARED_CONTEXT: usize = 1 << 20;

impl IndexerParams {
    /// `None` if the architecture has none, or the file where it may have none. Attention's heads
    /// rotate `n_rot` elements.
    pub(super) fn read(
        keys: &Keys,
        kinds: &LayerKinds,
        recurrent: Option<&Recurrent>,
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
        let of_row = if parts.shares_compressed { 2 } else { INDEXED };
        if parts.mixer == Mixer::Compressed && !dim.is_multiple_of(of_row) {
            let expected = format!("a multiple of {of_row}");
            return Err(keys.bad("attention.indexer.key_length", expected, dim));
        }
        let recurs = |l: usize| recurrent.is_some_and(|recurrent| recurrent.layers[l]);
        if parts.indexer_means {
            return of_means(keys, kinds.n_layers(), dim, recurs);
        }
        let has_blocks = parts.mixer == Mixer::Attention;
        let mut own = own_indexers(keys, kinds.n_layers(), recurs)?;
        own.iter_mut().enumerate().for_each(|(l, own)| *own &= !kinds.slides(l) && !recurs(l));
        let pool = if parts.indexer_pools { Some(pool(keys, dim)?) } else { None };
        Ok(Some(IndexerParams {
            n_heads: keys.require("attention.indexer.head_count")?,
            dim,
            top_k: keys.require(TOP_K)? / pool.unwrap_or(1),
            block: match parts.mixer {
                Mixer::Attention => keys.require("attention.indexer.block_size")?,
                // The least of them where layers differ.
                Mixer::Compressed if parts.shares_compressed => 1,
                Mixer::Compressed => INDEXED,
                Mixer::Latent => pool.unwrap_or(1),
            },
            means: false,
            by_head: has_blocks,
            n_near: if has_blocks { keys.require("attention.indexer.local_blocks")? } else { 0 },
            key_eps: match (parts.indexer_eps_is_models, parts.indexer_pools) {
                (true, _) => keys.norm_eps()?,
                (_, true) => keys.factor(LAYER_NORM_EPS)?.unwrap_or(KEY_EPS),
                _ if parts.indexer_reads_input => {
                    keys.some(LAYER_NORM_EPS, keys.positive(LAYER_NORM_EPS)?)?
                }
                _ => KEY_EPS,
            },
            rope_offset: match parts.indexer_rope_rows {
                RopeRows::First => 0,
                RopeRows::Last => dim - n_rot,
            },
            candidates: candidates(keys, &own)?,
            own,
        }))
    }

    /// Whether attention in contexts of `n_ctx` positions sees fewer than all.
    pub fn chooses(&self, n_ctx: usize) -> bool {
        n_ctx > self.n_all()
    }

    /// Elements that a position has in the cache: blocks have one key for all of theirs.
    pub fn cached_dim(&self) -> usize {
        self.dim / self.block
    }

    /// Values that are kept until a block is whole, where keys are of blocks: a key and scores of
    /// each position.
    pub fn n_kept(&self) -> usize {
        if self.block > 1 { 2 * self.block * self.dim } else { 0 }
    }

    /// Positions of the longest text of which each token sees all.
    pub fn n_all(&self) -> usize {
        self.top_k.saturating_mul(self.block)
    }
}

/// Blocks of as many positions in all layers of attention that have any; the others see all.
fn of_means(
    keys: &Keys,
    n_layers: usize,
    dim: usize,
    recurs: impl Fn(usize) -> bool,
) -> Result<Option<IndexerParams>> {
    let key = "attention.compress_ratios";
    let list = keys.gguf.u32s(&keys.descriptor.key(key))?.unwrap_or_default();
    let block_of = |l: usize| if recurs(l) { 0 } else { list.get(l).map_or(0, |n| *n as usize) };
    let block = (0..n_layers).map(block_of).find(|n| *n > 0).unwrap_or(0);
    let own: Vec<bool> = (0..n_layers).map(|l| block_of(l) > 0).collect();
    let is_one = (0..n_layers).all(|l| block_of(l) == block || !own[l]);
    if list.len() < n_layers || !is_one {
        let expected = format!("one number, or 0, for each of {n_layers} layers");
        return Err(keys.bad(key, expected, format!("{list:?}")));
    }
    if block == 0 {
        return Ok(None);
    }
    if !PAGE.is_multiple_of(block) || !dim.is_multiple_of(block) {
        let expected = format!("a divisor of {PAGE} and of attention.indexer.key_length = {dim}");
        return Err(keys.bad(key, expected, block));
    }
    let top_k = keys.require(TOP_K)?;
    if !top_k.is_multiple_of(block) {
        return Err(keys.bad(TOP_K, format!("a multiple of {key} = {block}"), top_k));
    }
    Ok(Some(IndexerParams {
        n_heads: keys.require("attention.indexer.head_count")?,
        dim,
        top_k: top_k / block,
        block,
        n_near: 0,
        key_eps: keys.norm_eps()?,
        rope_offset: 0,
        means: true,
        by_head: false,
        own,
        candidates: None,
    }))
}

/// 0 or more is the layer that chooses them.
fn candidates(keys: &Keys, own: &[bool]) -> Result<Option<Candidates>> {
    let source = "attention.indexer.candidate_source_layer";
    let given = keys.gguf.get(&keys.descriptor.key(source));
    let is_known = keys.descriptor.parts.shares_compressed;
    let Some(value) = given.filter(|value| is_known && value.as_i64().is_none_or(|l| l >= 0))
    else {
        return Ok(None);
    };
    let layer = value.as_u64().filter(|l| own.get(*l as usize) == Some(&true));
    let Some(layer) = layer.map(|l| l as usize) else {
        return Err(keys.bad(source, format!("a layer of {INDEX_SOURCES}, or -1"), value));
    };
    let ratios = ratios(keys, own.len())?;
    if let Some(l) = (layer..own.len()).find(|l| own[*l] && ratios[*l] != ratios[layer]) {
        let expected = format!("a layer with the ratio of layer {l}, which chooses among its rows");
        return Err(keys.bad(source, expected, layer));
    }
    let (key, top_k) = ("attention.indexer.candidate_top_k_blocks", keys.require(TOP_K)?);
    let (n, block) = (keys.require(key)?, keys.require("attention.indexer.candidate_block_size")?);
    // The newest block may have one row.
    if (n - 1).saturating_mul(block) + 1 < top_k {
        let expected = format!("enough for {TOP_K} = {top_k} rows of blocks of {block}");
        return Err(keys.bad(key, expected, n));
    }
    Ok(Some(Candidates { source: layer, n, block }))
}

/// Positions that have a key together. Pages of a cache have whole blocks of them.
fn pool(keys: &Keys, dim: usize) -> Result<usize> {
    let (n, top_k) = (keys.require(POOL)?, keys.require(TOP_K)?);
    if n < 2 || !PAGE.is_multiple_of(n) || !dim.is_multiple_of(n) {
        let expected =
            format!("a divisor of {PAGE} and of attention.indexer.key_length = {dim}, above 1");
        return Err(keys.bad(POOL, expected, n));
    }
    if !top_k.is_multiple_of(n) {
        return Err(keys.bad(TOP_K, format!("a multiple of attention.indexer.kpool = {n}"), top_k));
    }
    let tail = "attention.indexer.kpool_select_tail";
    match keys.gguf.bool(&keys.descriptor.key(tail))? {
        Some(true) => Ok(n),
        other => {
            let expected = "true: a token sees the positions of its own block".into();
            Err(keys.bad(tail, expected, other.map_or("nothing".into(), |v| v.to_string())))
        }
    }
}

fn own_indexers(keys: &Keys, n: usize, recurs: impl Fn(usize) -> bool) -> Result<Vec<bool>> {
    let key = "attention.indexer.types";
    if keys.descriptor.parts.mixer == Mixer::Attention {
        // Leading dense layers have none.
        return Ok((0..n).map(|l| !is_dense(keys, l)).collect());
    }
    if keys.descriptor.parts.shares_compressed {
        return listed(keys, INDEX_SOURCES, &ratios(keys, n)?);
    }
    if keys.descriptor.parts.mixer == Mixer::Compressed {
        return Ok(ratios(keys, n)?.iter().map(|ratio| *ratio == INDEXED).collect());
    }
    if !keys.descriptor.parts.shares_indexers {
        return Ok(vec![true; n]);
    }
    let own = match keys.gguf.get(&keys.descriptor.key(key)) {
        Some(listed) => keys.flags(key, listed, n, keys.require("block_count")?)?,
        None if keys.descriptor.parts.indexer_pools => vec![true; n],
        None if keys.descriptor.parts.indexer_reads_input => vec![true; n],
        None if keys.require("context_length")? < SHARED_CONTEXT => vec![true; n],
        None => (0..n).map(|l| l < 2 || l % 4 == 2).collect(),
    };
    let attend: Vec<bool> = own.iter().enumerate().map(|(l, own)| *own && !recurs(l)).collect();
    if !keys.has(key) && !keys.have_tensor("indexer_k", &attend) {
        return keys.some(key, None);
    }
    match (0..n).find(|l| !recurs(*l)).map(|first| own[first]) {
        Some(false) => Err(keys.bad(key, "1 for the first layer of attention".into(), 0)),
        _ => Ok(own),
    }
}
