//! Weights and buffers of attention to a window and to compressed rows on a device; see
//! `model::weights::CompressedWeights`.

use crate::backend::gpu::compress::DeviceCompressor;
use crate::forward::gpu::bump::{BumpLayout, ByteRange};
use crate::forward::gpu::mixer_layout::{DeviceSizes, MixerSizes, raise};
use crate::forward::gpu::pack::{OnDevice, Pack, pack};
use crate::forward::gpu::weights::{GpuWeights, Packer};
use crate::model::compressed::INDEXED;
use crate::model::hyper::HyperParams;
use crate::model::weights::{Chooser, CompressedWeights, Compressor, Mixer, RowKeys, Weights};

impl Compressor<OnDevice> {
    pub fn on<'a>(&self, weights: &'a GpuWeights, eps: f32) -> DeviceCompressor<'a> {
        let Compressor { dim, ratio, overlaps, .. } = *self;
        let (places, norm) = (weights.vector(&self.places), weights.vector(&self.norm));
        DeviceCompressor { dim, ratio, overlaps, places, norm, eps }
    }
}

impl<'a> Pack<'a> for CompressedWeights {
    type Packed = CompressedWeights<OnDevice>;

    fn pack(&'a self, packer: &mut Packer<'a>) -> CompressedWeights<OnDevice> {
        CompressedWeights {
            n_head: self.n_head,
            head_dim: self.head_dim,
            n_rot: self.n_rot,
            window: self.window,
            q_a: self.q_a.pack(packer),
            q_a_norm: self.q_a_norm.pack(packer),
            q_b: self.q_b.pack(packer),
            ones: self.ones.pack(packer),
            row: self.row.pack(packer),
            row_norm: self.row_norm.pack(packer),
            sinks: self.sinks.pack(packer),
            output_a: self.output_a.pack(packer),
            output_b: self.output_b.pack(packer),
            slides: self.slides,
            ratio: self.ratio,
            source: self.source,
            sees_chosen: self.sees_chosen,
            compressors: self.compressors.iter().map(|own| own.pack(packer)).collect(),
            keys: self.keys.pack(packer),
            chooser: if packer.chooses { self.chooser.pack(packer) } else { None },
        }
    }
}

pack! {
    Compressor { dim, ratio, overlaps, values, scores, places, norm }
    Chooser { q, weights }
    RowKeys { weight, norm }
}

/// The most rows that a token of a text of `n` positions sees: of its window, and one a block.
pub fn n_rows_seen(window: usize, ratio: usize, hyper: &HyperParams, n: usize) -> usize {
    let most = hyper.indexer.as_ref().filter(|_| ratio <= INDEXED).map(|indexer| indexer.top_k);
    window.min(n) + (n / ratio).min(most.unwrap_or(usize::MAX))
}

impl DeviceSizes for CompressedWeights {
    fn raise(&self, sizes: &mut MixerSizes) {
        let (n, rank, groups) = (sizes.n, self.q_a.weight.rows, self.output_a.n_heads);
        raise(&mut sizes.low_rank, rank);
        sizes.raise_acts(n, rank);
        sizes.raise_acts(n * groups, self.output_a.all.cols);
        sizes.raise_acts(n, self.output_b.weight.cols);
        if let Some(compressor) = self.compressors.first() {
            let n_rows = n_rows_seen(self.window, compressor.ratio, sizes.hyper, sizes.n_ctx);
            raise(&mut sizes.n_seen, n_rows);
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
            let Some(own) = w.compressors.first() else { continue };
            for (made, width) in w.compressors.iter().zip(&mut widths) {
                *width = made.width().max(*width);
                dim = dim.max(made.dim);
            }
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
