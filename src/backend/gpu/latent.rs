//! Keys and values of the heads of latent attention, made of cached rows on tensor cores
//! (`kernels/latent.cu`).

use super::cache::DeviceRows;
use super::heads::DeviceHeadMats;
use super::{DevicePtr, Grid, Kernel, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::gguf::TensorType;
use std::ops::Range;

const THREADS: u32 = 256;
/// Positions and columns of a block.
const ROWS: usize = 128;
const COLS: usize = 128;

kernel_params! {
    pub struct ExpandParams[64] {
        rows: DevicePtr,
        weights: DevicePtr,
        out: DevicePtr,
        row_type: u32,
        row_bytes: u32,
        rank: u32,
        n_rot: u32,
        first: u32,
        step: u32,
        n_rows: u32,
        n_cols: u32,
        n_ctx: u32,
        stride: u32,
    }
}

kernels! {
    pub struct Expand {
        keys: ExpandParams = "expand_keys",
        values: ExpandParams = "expand_values",
    }
}

/// Rows of a cache, each of a compressed part of `rank` elements and one that is rotated.
#[derive(Clone, Copy, Debug)]
pub struct LatentRows<'a> {
    pub rows: DeviceRows<'a>,
    pub rank: usize,
}

/// A kernel, and how many elements of a row it makes of the compressed part.
struct Made {
    kernel: Kernel<ExpandParams>,
    n_cols: usize,
}

impl LatentRows<'_> {
    /// Whether heads of `n_cols` keys or values can be made of them.
    pub fn have_kernels(&self, n_cols: usize) -> bool {
        let parts = [self.rank, self.rows.dim - self.rank, n_cols];
        self.rows.can_load_eight() && parts.iter().all(|n| n.is_multiple_of(8))
    }
}

impl Expand {
    /// `out[h, i] = [mats[h]ᵀ · c, r]` with the compressed part c and the rotated part r of the
    /// `i`th row of `range`. The matrices are f32, [rank, keys' elements] a head; `out` is halves.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn keys(
        &self,
        stream: &Stream,
        from: LatentRows,
        range: Range<usize>,
        mats: DeviceHeadMats,
        out: DeviceRows,
    ) -> Result<()> {
        assert_eq!(mats.rows, from.rank, "rows of a head's matrix");
        assert_eq!(mats.all.cols + from.rows.dim - from.rank, out.dim, "both parts of a key");
        let n_cols = mats.all.cols;
        self.launch(stream, Made { kernel: self.keys, n_cols }, from, range, mats, out)
    }

    /// `out[h, i] = mats[h] · c`, with matrices of [values' elements, rank] a head.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn values(
        &self,
        stream: &Stream,
        from: LatentRows,
        range: Range<usize>,
        mats: DeviceHeadMats,
        out: DeviceRows,
    ) -> Result<()> {
        assert_eq!([mats.all.cols, mats.rows], [from.rank, out.dim], "a head's matrix");
        let n_cols = mats.rows;
        self.launch(stream, Made { kernel: self.values, n_cols }, from, range, mats, out)
    }

    fn launch(
        &self,
        stream: &Stream,
        made: Made,
        from: LatentRows,
        range: Range<usize>,
        mats: DeviceHeadMats,
        out: DeviceRows,
    ) -> Result<()> {
        let (LatentRows { rows, rank }, n, Made { kernel, n_cols }) = (from, range.len(), made);
        let DeviceHeadMats { all, n_heads, first, step, .. } = mats;
        rows.assert_whole();
        out.assert_whole();
        assert!(rows.heads == 1 && range.end <= rows.n_ctx && from.have_kernels(n_cols));
        assert!(all.ty == TensorType::F32 && all.is_dense() && all.data.address() % 16 == 0);
        assert!(first + (n_heads - 1) * step + mats.rows <= all.rows, "rows of {n_heads} heads");
        assert!(out.ty == TensorType::F16 && out.can_load_eight(), "rows of halves");
        assert!(out.heads == n_heads && n <= out.n_ctx, "{n} rows of {n_heads} heads");
        if n == 0 {
            return Ok(());
        }
        let params = ExpandParams {
            rows: rows.data.slice(range.start * rows.row_bytes()..rows.data.len()).into(),
            weights: all.data.into(),
            out: out.data.into(),
            row_type: rows.type_code(),
            row_bytes: u32_of(rows.row_bytes()),
            rank: u32_of(rank),
            n_rot: u32_of(rows.dim - rank),
            first: u32_of(first),
            step: u32_of(step),
            n_rows: u32_of(n),
            n_cols: u32_of(n_cols),
            n_ctx: u32_of(out.n_ctx),
            stride: u32_of(out.stride),
        };
        let blocks = [n.div_ceil(ROWS), n_heads, n_cols.div_ceil(COLS)].map(u32_of);
        // SAFETY: it reads n rows from the range's first on and the heads' rows of the matrices,
        // and writes n rows of each head: all asserted.
        unsafe { stream.launch(kernel, Grid::new(blocks, THREADS), &params) }
    }
}
