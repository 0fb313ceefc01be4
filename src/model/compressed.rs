//! Attention to a window and to compressed rows of what is before it (DeepSeek-V4 and V4.1), from
//! GGUF metadata.

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
    /// By layer: the layer whose compressed rows it sees, itself as a rule.
    pub sources: Vec<usize>,
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
/// The largest ratio of layers that share compressed rows.
const MOST_SHARED: usize = 2;
const KEY: &str = "attention.compress_ratios";
const ROW_SOURCES: &str = "attention.kv_source_layers";
pub(super) const INDEX_SOURCES: &str = "attention.indexer.source_layers";

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
        let ratios = ratios(keys, n)?;
        let sources = match keys.descriptor.parts.shares_compressed {
            true => shared_sources(keys, &ratios)?,
            false => (0..n).collect(),
        };
        Ok(Some(CompressedParams {
            ratios,
            sources,
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
        let of_source = |(l, ratio): (usize, &usize)| if self.sources[l] == l { *ratio } else { 0 };
        let own = self.ratios.iter().enumerate().map(of_source);
        let state = own.clone().map(|ratio| match ratio {
            0 => LayerShape::ELSEWHERE,
            // Values and scores of two rows of each, for this block's and for the next one's.
            INDEXED => LayerShape::State(StateSize {
                n_past: 2 * INDEXED * 2 * 2 * (dim + index),
                n_state: 0,
            }),
            ratio => LayerShape::State(StateSize { n_past: ratio * 2 * dim, n_state: 0 }),
        });
        let packed = own.map(|ratio| match ratio {
            0 => LayerShape::ELSEWHERE,
            ratio if ratio <= INDEXED => {
                let (k_dim, v_dim) = (dim / ratio, index / ratio);
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
    let (is_known, known): (fn(usize) -> bool, _) = match keys.descriptor.parts.shares_compressed {
        true => (|ratio| ratio <= MOST_SHARED, "0, 1 or 2"),
        false => (|ratio| ratio == 0 || RATIOS.contains(&ratio), "0, 4 or 128"),
    };
    match list.get(..n) {
        Some(list) if list.iter().all(|ratio| is_known(*ratio as usize)) => {
            Ok(list.iter().map(|ratio| *ratio as usize).collect())
        }
        _ => Err(keys.bad(KEY, format!("{known} for each of {n} layers"), format!("{list:?}"))),
    }
}

/// Which layers a list names: of those with compressed rows.
pub(super) fn listed(keys: &Keys, key: &str, ratios: &[usize]) -> Result<Vec<bool>> {
    let list = keys.some(key, keys.gguf.u32s(&keys.descriptor.key(key))?)?;
    let mut is_listed = vec![false; ratios.len()];
    for l in &list {
        match ratios.get(*l as usize) {
            Some(ratio) if *ratio > 0 => is_listed[*l as usize] = true,
            _ => {
                let expected = format!("layers with a ratio above 0 in {KEY}");
                return Err(keys.bad(key, expected, l));
            }
        }
    }
    Ok(is_listed)
}

/// The layer whose compressed rows each layer sees: the last that the file names, which has the
/// layer's own ratio and a choice among them behind it.
fn shared_sources(keys: &Keys, ratios: &[usize]) -> Result<Vec<usize>> {
    let has_rows = listed(keys, ROW_SOURCES, ratios)?;
    let chooses = listed(keys, INDEX_SOURCES, ratios)?;
    let mut sources = Vec::with_capacity(ratios.len());
    for (l, ratio) in ratios.iter().enumerate() {
        let last = |is: &[bool]| (0..=l).rev().find(|l| is[*l] && *ratio > 0);
        let (rows, choice) = (last(&has_rows), last(&chooses));
        let is_alike = |of: Option<usize>| of.is_none_or(|of| ratios[of] == *ratio);
        for (key, is_right) in [
            (ROW_SOURCES, *ratio == 0 || rows.is_some() && is_alike(rows)),
            (INDEX_SOURCES, *ratio == 0 || choice >= rows && is_alike(choice)),
        ] {
            if !is_right {
                let expected = format!("a layer of ratio {ratio} before layer {l}, or that layer");
                let got = rows.filter(|_| key == ROW_SOURCES).or(choice);
                let got = got.map_or("none".into(), |l| format!("{l}, of ratio {}", ratios[l]));
                return Err(keys.bad(key, expected, got));
            }
        }
        sources.push(rows.unwrap_or(l));
    }
    Ok(sources)
}
