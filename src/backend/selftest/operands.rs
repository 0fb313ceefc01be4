//! Matrices, activations and rows of a KV cache in the CPU's form and in the device's.

use super::bench::{Bench, Mirror};
use crate::Result;
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::acts::{DeviceActs, records_of};
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::mat::DeviceMat;
use crate::backend::ops::{RowBytes, Rows, RowsMut, row_bytes};
use crate::gguf::TensorType::{self, BF16, F16, F32, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::simd::{ActKind, Activations, MatRef};

/// The types of a KV cache.
pub const CACHE_TYPES: [TensorType; 9] = [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL];

/// A dense matrix.
pub struct Mat {
    ty: TensorType,
    shape: [usize; 2],
    pub bytes: Mirror<u8>,
}

impl Mat {
    /// `shape`: rows and columns.
    pub fn new(bench: &Bench, ty: TensorType, shape: [usize; 2], bytes: &[u8]) -> Result<Mat> {
        Ok(Mat { ty, shape, bytes: bench.up(bytes.to_vec())? })
    }

    pub fn cpu(&self) -> MatRef<'_> {
        MatRef::dense(self.ty, &self.bytes, self.shape[0], self.shape[1])
    }

    pub fn gpu(&self) -> DeviceMat<'_> {
        DeviceMat::dense(self.ty, self.bytes.gpu(), self.shape[0], self.shape[1])
    }
}

/// Activations that the CPU has quantised.
pub struct Acts {
    pub cpu: Activations,
    records: Mirror<u8>,
}

impl Acts {
    pub fn new(bench: &Bench, kind: ActKind, x: &[f32], cols: usize) -> Result<Acts> {
        let cpu = quantized(bench, kind, x, cols);
        let records = bench.up(records_of(cpu.all()))?;
        Ok(Acts { cpu, records })
    }

    pub fn gpu(&self) -> DeviceActs<'_> {
        let acts = &self.cpu;
        DeviceActs::new(acts.kind(), acts.tokens(), acts.cols(), self.records.gpu())
    }
}

/// Rows of `cols` values.
pub fn quantized(bench: &Bench, kind: ActKind, x: &[f32], cols: usize) -> Activations {
    let (mut acts, tokens) = (Activations::new(), x.len() / cols);
    acts.resize(kind, tokens, cols);
    acts.quantize_rows(bench.cpu.kernels, 0..tokens, x, cols);
    acts
}

/// Rows of a KV cache that the CPU has stored.
pub struct Cached {
    pub ty: TensorType,
    pub heads: usize,
    pub n_ctx: usize,
    pub dim: usize,
    pub bytes: RowBytes,
}

impl Cached {
    /// Stores rows from position `first` on in a cache of zeros. `shape`: heads, positions and
    /// elements of a row.
    pub fn new(
        bench: &Bench,
        ty: TensorType,
        [heads, n_ctx, dim]: [usize; 3],
        x: &[f32],
        first: usize,
    ) -> Cached {
        let mut bytes = RowBytes::zeroed(row_bytes(ty, heads * n_ctx * dim));
        RowsMut { ty, data: &mut bytes, dim, n_ctx }.store(&bench.cpu, x, first);
        Cached { ty, heads, n_ctx, dim, bytes }
    }

    pub fn cpu(&self) -> Rows<'_> {
        let Cached { ty, n_ctx, dim, ref bytes, .. } = *self;
        Rows { ty, data: bytes, dim, stride: dim, n_ctx }
    }

    /// Rows of this shape in a buffer on the device.
    pub fn at<'a>(&self, buffer: &'a DeviceBuffer) -> DeviceRows<'a> {
        let Cached { ty, heads, n_ctx, dim, .. } = *self;
        DeviceRows { ty, data: buffer.all(), heads, dim, stride: dim, n_ctx }
    }
}
