//! Dense weights on the device, in one buffer: matrices in the file's format, vectors as f32, each
//! aligned to 256 bytes.

use crate::Result;
use crate::backend::gpu::conv::DeviceConv;
use crate::backend::gpu::mat::DeviceMat;
use crate::backend::gpu::{Device, DeviceBuffer, DeviceSlice, Event, Pinned, PinnedKind, Stream};
use crate::backend::ops::ConvShape;
use crate::gguf::TensorType;
use crate::interrupt;
use crate::model::Model;
use crate::model::weights::{Linear, Matrix};
use std::borrow::Cow;
use std::ops::Range;

/// The alignment of parts of the buffer.
const ALIGN: usize = 256;
/// Bytes of one copy.
const STAGING: usize = 8 << 20;

/// A matrix in the buffer.
#[derive(Clone, Debug)]
pub struct GpuMatrix {
    place: Range<usize>,
    pub ty: TensorType,
    pub rows: usize,
    pub cols: usize,
}

/// f32s in the buffer, or u32s where said.
#[derive(Clone, Debug)]
pub struct GpuVector(pub(super) Range<usize>);

impl GpuVector {
    /// The number of values.
    pub fn n(&self) -> usize {
        self.0.len() / 4
    }
}

#[derive(Clone, Debug)]
pub struct GpuLinear {
    pub weight: GpuMatrix,
    pub bias: Option<GpuVector>,
    pub scale: f32,
}

/// A matrix for each head, see `HeadMatrices`.
#[derive(Clone, Debug)]
pub struct GpuHeads {
    pub all: GpuMatrix,
    pub n_heads: usize,
    pub rows: usize,
    pub first: usize,
    pub step: usize,
}

/// A convolution, see `DeviceConv`.
#[derive(Clone, Debug)]
pub struct GpuConv {
    pub(super) shape: ConvShape,
    pub(super) weight: GpuVector,
    pub(super) bias: Option<GpuVector>,
    pub(super) silu: bool,
}

/// Bytes to upload.
enum Bytes<'a> {
    Of(&'a [u8]),
    /// The number of bytes, which are made when they are uploaded.
    Made(usize, Box<dyn Fn() -> Vec<u8> + 'a>),
}

impl Bytes<'_> {
    fn len(&self) -> usize {
        match self {
            Bytes::Of(bytes) => bytes.len(),
            Bytes::Made(len, _) => *len,
        }
    }
}

/// Collects the weights that a device will hold, before any of its memory is allocated.
pub struct Packer<'a> {
    pub(super) model: &'a Model,
    parts: Vec<(usize, Bytes<'a>)>,
    end: usize,
    /// The largest micro-batch, and the end of the tables of experts that every token goes to.
    n_tokens: usize,
    tables_end: usize,
    /// Whether indexers choose positions.
    pub(super) chooses: bool,
}

impl<'a> Packer<'a> {
    /// For micro-batches of up to `n_tokens` in contexts of `n_ctx`.
    pub fn new(model: &'a Model, n_tokens: usize, n_ctx: usize) -> Packer<'a> {
        let chooses = model.hyper.choosing_indexer(n_ctx).is_some();
        Packer { model, parts: Vec::new(), end: 0, n_tokens, tables_end: 0, chooses }
    }

    /// The largest micro-batch.
    pub(super) fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// A range for a table of `n` addresses.
    pub(super) fn table(&mut self, n: usize) -> Range<usize> {
        let start = self.tables_end.next_multiple_of(ALIGN);
        self.tables_end = start + 8 * n;
        start..self.tables_end
    }

    pub fn table_bytes(&self) -> usize {
        self.tables_end
    }

    fn put(&mut self, bytes: Bytes<'a>) -> Range<usize> {
        let start = self.end.next_multiple_of(ALIGN);
        self.end = start + bytes.len();
        self.parts.push((start, bytes));
        start..self.end
    }

    pub fn matrix(&mut self, matrix: &'a Matrix) -> GpuMatrix {
        let Matrix { ty, rows, cols, .. } = *matrix;
        let mat = matrix.mat(&self.model.gguf);
        let data = &mat.data[..mat.rows * mat.row_bytes()];
        GpuMatrix { place: self.put(Bytes::Of(data)), ty, rows, cols }
    }

    /// Matrices that read the same input. Runs of them that have one type lie so that they are one
    /// matrix each, whose rows are theirs, one after the other.
    pub fn stack(&mut self, linears: &[&'a Linear]) -> Vec<GpuLinear> {
        let is_one = |a: &&Linear, b: &&Linear| {
            let shape = |linear: &Linear| (linear.weight.ty, linear.weight.cols);
            let is_plain = a.scale == 1.0 && b.scale == 1.0;
            is_plain && shape(a) == shape(b) && a.bias.is_some() == b.bias.is_some()
        };
        linears.chunk_by(is_one).map(|run| self.run(run)).collect()
    }

    fn run(&mut self, run: &[&'a Linear]) -> GpuLinear {
        let Matrix { ty, cols, .. } = run[0].weight;
        let biases: Vec<&'a [f32]> = run.iter().flat_map(|linear| linear.bias.as_deref()).collect();
        let n_bytes = 4 * biases.iter().map(|bias| bias.len()).sum::<usize>();
        let bytes = move || -> Vec<u8> {
            biases.iter().copied().flatten().flat_map(|v| v.to_le_bytes()).collect()
        };
        let bias = (n_bytes > 0).then(|| GpuVector(self.made(n_bytes, bytes)));
        let start = self.end.next_multiple_of(ALIGN);
        self.end = start;
        for linear in run {
            let mat = linear.weight.mat(&self.model.gguf);
            let data = &mat.data[..mat.rows * mat.row_bytes()];
            self.parts.push((self.end, Bytes::Of(data)));
            self.end += data.len();
        }
        let rows = run.iter().map(|linear| linear.weight.rows).sum();
        let weight = GpuMatrix { place: start..self.end, ty, rows, cols };
        GpuLinear { weight, bias, scale: run[0].scale }
    }

    pub fn vector(&mut self, values: &'a [f32]) -> GpuVector {
        let bytes = || values.iter().flat_map(|v| v.to_le_bytes()).collect();
        GpuVector(self.put(Bytes::Made(4 * values.len(), Box::new(bytes))))
    }

    /// `len` bytes that `make` makes when they are uploaded.
    pub fn made(&mut self, len: usize, make: impl Fn() -> Vec<u8> + 'a) -> Range<usize> {
        self.put(Bytes::Made(len, Box::new(make)))
    }

    /// Allocates the memory and fills it, through two staging buffers in turn.
    pub fn upload(self, gpu: &Device) -> Result<GpuWeights> {
        let buffer = DeviceBuffer::of(gpu, self.end.max(ALIGN), "dense weights", "-ngl")?;
        let stream = Stream::new(gpu)?;
        let staging =
            Pinned::of(gpu, 2 * STAGING, PinnedKind::WriteCombined, "weights on their way")?;
        let events = [Event::new(gpu)?, Event::new(gpu)?];
        let mut turn = 0;
        for (start, bytes) in &self.parts {
            let made = match bytes {
                Bytes::Of(bytes) => Cow::Borrowed(*bytes),
                Bytes::Made(len, make) => {
                    let made = make();
                    assert_eq!(made.len(), *len);
                    Cow::Owned(made)
                }
            };
            for (i, part) in made.chunks(STAGING).enumerate() {
                interrupt::check()?;
                let (at, place) = (start + i * STAGING, turn * STAGING);
                events[turn].synchronize()?;
                // SAFETY: the last copy out of this half has been waited for, and no one else has
                // the buffer. It is not filled again before the copy queued here is done.
                unsafe {
                    let half = staging.bytes_mut(place..place + part.len());
                    half.copy_from_slice(part);
                    stream.upload(buffer.slice(at..at + part.len()), half)?;
                }
                stream.record(&events[turn])?;
                turn = 1 - turn;
            }
        }
        stream.synchronize()?;
        Ok(GpuWeights { buffer })
    }
}

/// The memory of a device's dense weights.
pub struct GpuWeights {
    buffer: DeviceBuffer,
}

impl GpuWeights {
    pub fn mat(&self, matrix: &GpuMatrix) -> DeviceMat<'_> {
        let GpuMatrix { ty, rows, cols, .. } = *matrix;
        DeviceMat::dense(ty, self.buffer.slice(matrix.place.clone()), rows, cols)
    }

    pub fn vector(&self, vector: &GpuVector) -> DeviceSlice<'_> {
        self.buffer.slice(vector.0.clone())
    }

    pub fn bias(&self, linear: &GpuLinear) -> Option<DeviceSlice<'_>> {
        linear.bias.as_ref().map(|bias| self.vector(bias))
    }

    /// Without parts of rows that become unit vectors.
    pub fn conv(&self, conv: &GpuConv) -> DeviceConv<'_> {
        let GpuConv { shape, silu, .. } = *conv;
        let bias = conv.bias.as_ref().map(|bias| self.vector(bias));
        DeviceConv { shape, weight: self.vector(&conv.weight), bias, silu, units: None }
    }

    pub fn slice(&self, place: Range<usize>) -> DeviceSlice<'_> {
        self.buffer.slice(place)
    }
}
