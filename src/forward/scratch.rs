//! Buffers of a forward pass; shapes stand beside the names.

use crate::forward::attention::MixerBuffers;
use crate::forward::batch::LogitRow;
use crate::forward::events::EventBuffers;
use crate::forward::layer_inputs::InputBuffers;
use crate::forward::moe::FfnBuffers;
use crate::forward::ngrams::NgramBuffers;
use crate::forward::streams::StreamBuffers;
use crate::model::Bound;
use crate::simd::Floats;
use std::ops::Range;

impl Bound {
    /// Bytes of the CPU's buffers for `n` tokens that a device has not: of what layers read beside
    /// the stream.
    pub fn host_buffer_bytes(&self, n: usize) -> usize {
        let hyper = &self.hyper;
        n * (hyper.n_layers + 2) * hyper.layer_input * size_of::<f32>()
    }
}

/// Buffers of one pass at a time; they grow to the largest batch and stay.
#[derive(Default)]
pub struct Buffers {
    pub(super) x: Vec<f32>, // [rows, n_embd], the residual stream, or what a part reads
    pub(super) before: Vec<f32>, // [rows, n_embd], as it was before attention
    pub(super) h: Vec<f32>, // [rows, n_embd], normalised
    pub(super) branch: Floats, // [rows, n_embd], what joins the experts' sum
    pub(super) y: Floats,   // [rows, n_embd], what a stage adds to x
    pub(super) streams: StreamBuffers,
    pub(super) ngrams: NgramBuffers,
    pub(super) inputs: InputBuffers,
    pub(super) mixer: MixerBuffers,
    pub(super) ffn: FfnBuffers,
    pub(super) events: EventBuffers,
    pub(super) logit_rows: Vec<LogitRow>,
    pub(super) logits: Vec<f32>, // [tokens, n_vocab]
    pub(super) best_ids: Vec<u32>,
}

/// Some rows of a buffer of rows of `width` elements.
pub(super) fn rows_of<'a>(all: &'a [f32], rows: &Range<usize>, width: usize) -> &'a [f32] {
    &all[rows.start * width..rows.end * width]
}

pub(super) fn rows_of_mut<'a>(
    all: &'a mut [f32],
    rows: &Range<usize>,
    width: usize,
) -> &'a mut [f32] {
    &mut all[rows.start * width..rows.end * width]
}
