//! Activations on the device in the form that products read: one record for each token
//! (`kernels/quant/acts.cuh`), the arrays of `simd::Activations` one after the other, each on a
//! boundary of 64 bytes.

use super::{DevicePtr, DeviceSlice, GRID_MAX, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::simd::{ActKind, ActView};
use std::ops::Range;

/// Threads of a block of `kernels/quantize.cu`, and values that one takes.
const THREADS: usize = 128;
const VALUES: usize = 8;

/// Bytes of the record of `cols` columns.
pub fn record_bytes(kind: ActKind, cols: usize) -> usize {
    arrays(kind, cols).into_iter().map(|bytes| bytes.next_multiple_of(64)).sum()
}

/// Bytes of a record's arrays: values, scales, sums by 32, sums by 16.
fn arrays(kind: ActKind, cols: usize) -> [usize; 4] {
    match kind {
        ActKind::F32 => [4 * cols, 0, 0, 0],
        ActKind::Q8_0 => [cols, 4 * (cols / 32), 2 * (cols / 32), 0],
        ActKind::Q8_K => [cols, 4 * (cols / 256), 2 * (cols / 32), 2 * (cols / 16)],
    }
}

/// The records of activations that the host has quantised.
pub fn records_of(acts: ActView) -> Vec<u8> {
    fn put<const N: usize>(out: &mut Vec<u8>, numbers: impl Iterator<Item = [u8; N]>) {
        out.extend(numbers.flatten());
        out.resize(out.len().next_multiple_of(64), 0);
    }
    let mut out = Vec::with_capacity(acts.tokens() * record_bytes(acts.kind(), acts.cols()));
    for t in 0..acts.tokens() {
        if acts.kind() == ActKind::F32 {
            put(&mut out, acts.f32s(t).iter().map(|x| x.to_le_bytes()));
            continue;
        }
        put(&mut out, acts.qs(t).iter().map(|q| q.to_le_bytes()));
        put(&mut out, acts.scales(t).iter().map(|x| x.to_le_bytes()));
        put(&mut out, acts.sums32(t).iter().map(|x| x.to_le_bytes()));
        if acts.kind() == ActKind::Q8_K {
            put(&mut out, acts.sums16(t).iter().map(|x| x.to_le_bytes()));
        }
    }
    out
}

/// Some columns of the records of some tokens.
#[derive(Clone, Copy, Debug)]
pub struct DeviceActs<'a> {
    pub kind: ActKind,
    pub tokens: usize,
    /// The columns of a record.
    pub record_cols: usize,
    /// The first of the columns meant, and their number.
    pub first_col: usize,
    pub cols: usize,
    pub records: DeviceSlice<'a>,
}

impl<'a> DeviceActs<'a> {
    /// # Panics
    /// If the columns are no whole blocks or the slice does not hold so many records.
    pub fn new(kind: ActKind, tokens: usize, cols: usize, records: DeviceSlice<'a>) -> Self {
        assert!(cols.is_multiple_of(kind.block_len()), "{cols} columns as {kind:?}");
        let bytes = tokens * record_bytes(kind, cols);
        assert!(records.holds::<u8>(bytes), "{tokens} records in {} bytes", records.len());
        assert!(records.address().is_multiple_of(64), "records lie on lines of 64 bytes");
        DeviceActs { kind, tokens, record_cols: cols, first_col: 0, cols, records }
    }

    pub fn token_range(self, tokens: Range<usize>) -> Self {
        assert!(tokens.start <= tokens.end && tokens.end <= self.tokens);
        let bytes = record_bytes(self.kind, self.record_cols);
        let records = self.records.slice(bytes * tokens.start..bytes * tokens.end);
        DeviceActs { tokens: tokens.len(), records, ..self }
    }

    /// Both ends on block boundaries.
    pub fn column_range(self, cols: Range<usize>) -> Self {
        let len = self.kind.block_len();
        assert!(cols.start <= cols.end && cols.end <= self.cols, "{cols:?} of {}", self.cols);
        assert!(
            cols.start.is_multiple_of(len) && cols.end.is_multiple_of(len),
            "{cols:?} cuts a block of {len}"
        );
        DeviceActs { first_col: self.first_col + cols.start, cols: cols.len(), ..self }
    }
}

kernel_params! {
    pub struct QuantizeParams[24] {
        x: DevicePtr,
        out: DevicePtr,
        x_stride: u32,
        cols: u32,
    }
}

kernels! {
    /// Makes records on the device.
    pub struct Quantize {
        f32s: QuantizeParams = "quantize_f32",
        q8_0: QuantizeParams = "quantize_q8_0",
        q8_k: QuantizeParams = "quantize_q8_k",
    }
}

impl Quantize {
    /// Stores `x`, f32 [out.tokens, stride], of whose rows it takes the first `out.cols`.
    ///
    /// # Panics
    /// If `out` is a part of records' columns or `x` is too small.
    pub fn store(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        stride: usize,
        out: DeviceActs,
    ) -> Result<()> {
        let (tokens, cols) = (out.tokens, out.cols);
        assert_eq!(cols, out.record_cols, "whole records are stored");
        assert!(cols <= stride);
        if tokens == 0 {
            return Ok(());
        }
        assert!(x.holds::<f32>((tokens - 1) * stride + cols), "{tokens} rows of {stride}");
        let (kernel, each) = match out.kind {
            ActKind::F32 => (self.f32s, 1),
            ActKind::Q8_0 => (self.q8_0, VALUES),
            ActKind::Q8_K => (self.q8_k, VALUES),
        };
        for first in (0..tokens).step_by(GRID_MAX) {
            let n = GRID_MAX.min(tokens - first);
            let params = QuantizeParams {
                x: x.slice(4 * stride * first..x.len()).into(),
                out: out.token_range(first..first + n).records.into(),
                x_stride: u32_of(stride),
                cols: u32_of(cols),
            };
            let blocks = [u32_of(cols.div_ceil(THREADS * each)), u32_of(n), 1];
            // SAFETY: it reads n rows of `x` and writes n records of `out`, which are there
            // (asserted above and in `DeviceActs::new`).
            unsafe { stream.launch(kernel, Grid::new(blocks, THREADS as u32), &params)? };
        }
        Ok(())
    }
}
