//! Weights and buffers of attention to a window and to compressed rows on a device; see
//! `model::weights::CompressedWeights`.

use crate::backend::gpu::compress::DeviceCompressor;
use crate::forward::gpu::acts::acts_bytes;
use crate::forward::gpu::bump::{BumpLayout, ByteRange};
use crate::forward::gpu::weights::{GpuHeads, GpuLinear, GpuVector, GpuWeights, Packer};
use crate::model::compressed::INDEXED;
use crate::model::hyper::HyperParams;
use crate::model::weights::{CompressedWeights, Compressor, Mixer, Weights};

pub struct GpuCompressed {
    pub n_head: usize,
    pub head_dim: usize,
    pub window: usize,
    pub q_a: GpuLinear,
    pub q_a_norm: GpuVector,
    pub q_b: GpuLinear,
    pub ones: GpuVector,
    pub row: GpuLinear,
    pub row_norm: GpuVector,
    pub sinks: GpuVector,
    pub output_a: GpuHeads,
    pub output_b: GpuLinear,
    pub slides: bool,
    /// Attention's and its indexer's, as far as there are any.
    pub compressors: Vec<GpuCompressor>,
    /// An indexer's, if it chooses in the context.
    pub chooses: Option<GpuChooser>,
}

/// The products of an indexer that chooses among blocks; see `CompressedIndexer`.
pub struct GpuChooser {
    pub q: GpuLinear,
    pub weights: GpuLinear,
}

pub struct GpuCompressor {
    dim: usize,
    pub ratio: usize,
    overlaps: bool,
    pub values: GpuLinear,
    pub scores: GpuLinear,
    places: GpuVector,
    norm: GpuVector,
}

impl GpuCompressor {
    pub fn on<'a>(&self, weights: &'a GpuWeights, eps: f32) -> DeviceCompressor<'a> {
        let GpuCompressor { dim, ratio, overlaps, .. } = *self;
        let (places, norm) = (weights.vector(&self.places), weights.vector(&self.norm));
        DeviceCompressor { dim, ratio, overlaps, places, norm, eps }
    }
}

impl<'a> Packer<'a> {
    pub fn compressed(&mut self, w: &'a CompressedWeights) -> GpuCompressed {
        let indexer = w.indexer.as_ref().map(|indexer| &indexer.compressor);
        let compressors = w.compressor.iter().chain(indexer);
        let chooses = w.indexer.as_ref().filter(|_| self.chooses);
        GpuCompressed {
            n_head: w.n_head,
            head_dim: w.head_dim,
            window: w.window,
            q_a: self.linear(&w.q_a),
            q_a_norm: self.vector(&w.q_a_norm),
            q_b: self.linear(&w.q_b),
            ones: self.vector(&w.ones),
            row: self.linear(&w.row),
            row_norm: self.vector(&w.row_norm),
            sinks: self.vector(&w.sinks),
            output_a: self.heads(&w.output_a),
            output_b: self.linear(&w.output_b),
            slides: w.slides,
            compressors: compressors.map(|compressor| self.compressor(compressor)).collect(),
            chooses: chooses.map(|indexer| GpuChooser {
                q: self.linear(&indexer.q),
                weights: self.linear(&indexer.weights),
            }),
        }
    }

    fn compressor(&mut self, compressor: &'a Compressor) -> GpuCompressor {
        GpuCompressor {
            dim: compressor.dim,
            ratio: compressor.ratio,
            overlaps: compressor.overlaps,
            values: self.linear(&compressor.values),
            scores: self.linear(&compressor.scores),
            places: self.vector(&compressor.places),
            norm: self.vector(&compressor.norm),
        }
    }
}

/// The most rows that a token of a text of `n` positions sees: of its window, and one a block.
pub fn n_rows_seen(window: usize, ratio: usize, hyper: &HyperParams, n: usize) -> usize {
    let most = hyper.indexer.as_ref().filter(|_| ratio == INDEXED).map(|indexer| indexer.top_k);
    window.min(n) + (n / ratio).min(most.unwrap_or(usize::MAX))
}

/// The largest sizes that such layers need of buffers that others have too.
#[derive(Default)]
pub struct CompressedSizes {
    /// Elements of the row of low rank that queries are made of.
    pub ranks: usize,
    pub acts: usize,
    /// Rows that a token sees.
    pub n_rows: usize,
}

impl CompressedSizes {
    pub fn raise_to(&mut self, w: &CompressedWeights, h: &HyperParams, n: usize, n_ctx: usize) {
        let (rank, groups) = (w.q_a.weight.rows, w.output_a.n_heads);
        let acts = [
            acts_bytes(n, rank),
            acts_bytes(n * groups, w.output_a.all.cols),
            acts_bytes(n, w.output_b.weight.cols),
        ];
        self.ranks = self.ranks.max(rank);
        self.acts = acts.into_iter().fold(self.acts, usize::max);
        if let Some(compressor) = &w.compressor {
            self.n_rows = self.n_rows.max(n_rows_seen(w.window, compressor.ratio, h, n_ctx));
        }
    }
}

/// The most memory for rows side by side, unless one token needs more.
const SEEN_BYTES: usize = 64 << 20;

/// Buffers of such layers.
#[derive(Clone, Default)]
pub struct CompressedLayout {
    /// f32 [tokens, width] each, attention's and its indexer's
    pub values: [ByteRange; 2],
    pub scores: [ByteRange; 2],
    /// f32 [blocks, dim]: compressed rows before they are stored
    pub rows: ByteRange,
    /// Rows that tokens see side by side, of the cache's type, of as many tokens as there is room
    /// for.
    pub seen: ByteRange,
    /// u32 [tokens]: the number of the last of them
    pub last: ByteRange,
    /// f32 [tokens, groups, rank]
    pub grouped: ByteRange,
}

impl CompressedLayout {
    /// For micro-batches of up to `n` tokens in contexts of `n_ctx`.
    pub fn new(
        weights: &Weights,
        hyper: &HyperParams,
        n: usize,
        n_ctx: usize,
        bump: &mut BumpLayout,
    ) -> CompressedLayout {
        let (mut widths, mut dim, mut grouped, mut seen) = ([0; 2], 0, 0, 0);
        for layer in &weights.layers {
            let Mixer::Compressed(w) = &layer.mixer else { continue };
            grouped = grouped.max(w.output_b.weight.cols);
            let Some(own) = &w.compressor else { continue };
            let indexer = w.indexer.as_ref().map(|indexer| &indexer.compressor);
            let of_indexer = indexer.map_or(0, Compressor::width);
            widths = [widths[0].max(own.width()), widths[1].max(of_indexer)];
            dim = dim.max(own.dim).max(indexer.map_or(0, |indexer| indexer.dim));
            // Of the largest type.
            seen = seen.max(4 * own.dim * n_rows_seen(w.window, own.ratio, hyper, n_ctx));
        }
        let n_seen = SEEN_BYTES.checked_div(seen).map_or(0, |most| n.clamp(1, most.max(1)));
        CompressedLayout {
            values: widths.map(|width| bump.words(n * width)),
            scores: widths.map(|width| bump.words(n * width)),
            rows: bump.words(n.div_ceil(INDEXED) * dim),
            seen: bump.bytes(n_seen * seen),
            last: bump.words(n_seen),
            grouped: bump.words(n * grouped),
        }
    }
}
