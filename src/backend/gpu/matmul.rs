//! Matrix times the activations of many tokens (`kernels/matmul.cu`), for one matrix or for one an
//! expert; and the choice between that and `matvec`.

use super::acts::DeviceActs;
use super::mat::{DeviceMat, TypeKernels, block_types};
use super::matvec::{self, Matvec};
use super::{Args, Device, DeviceSlice, Launch, Stream};
use crate::Result;
use crate::gguf::TensorType;
use crate::simd::act_kind;

const THREADS: u32 = 256;
/// Rows of a tile.
const ROWS: usize = 64;

/// Tokens of a tile: eight sums an output, which blocks below 256 need, leave room for half.
fn tile_tokens(ty: TensorType) -> usize {
    if ty.block_len() == 256 { 64 } else { 32 }
}

/// Products of any number of tokens.
pub struct Products {
    matvec: Matvec,
    matmul: TypeKernels,
}

/// The matrices of a grouped product, and which tokens each of them has. All of it lies in device
/// memory, so that the device may have written it.
#[derive(Clone, Copy)]
pub struct Groups<'a> {
    pub ty: TensorType,
    pub rows: usize,
    pub cols: usize,
    pub n_items: usize,
    /// u64 [items]: the address of each item's granule; 0 leaves it out.
    pub matrices: DeviceSlice<'a>,
    /// Where in a granule the matrix begins.
    pub matrix_at: usize,
    /// u32 [items + 1]: item i has pairs `starts[i]..starts[i + 1]`.
    pub starts: DeviceSlice<'a>,
    /// u32 [pairs]: the token of a pair; without it pair i reads record i.
    pub tokens: Option<DeviceSlice<'a>>,
    /// Pairs of an item at most: what the grid is made for.
    pub max_pairs: usize,
    /// u32 [items] and f32 [experts, rows]: added to each product.
    pub bias: Option<(DeviceSlice<'a>, DeviceSlice<'a>)>,
    /// Adds to what `out` holds: granules of down after the first.
    pub accumulate: bool,
}

impl Products {
    pub fn load(gpu: &Device) -> Result<Products> {
        let matmul = TypeKernels::load(gpu, "matmul", block_types())?;
        Ok(Products { matvec: Matvec::load(gpu)?, matmul })
    }

    /// `out[t·out_stride + r] = mat[r] · x[t] (+ bias[r])`, however many tokens there are: the bits
    /// do not depend on it. F32, F16 and BF16 always go the way of few tokens.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn product(
        &self,
        stream: &Stream,
        mat: DeviceMat,
        x: DeviceActs,
        bias: Option<DeviceSlice>,
        out: DeviceSlice,
        out_stride: usize,
    ) -> Result<()> {
        let few = x.tokens <= matvec::MAX_TOKENS || mat.ty.block_len() == 1 || !mat.is_dense();
        if few {
            self.matvec.launch(stream, mat, x, bias, out, out_stride)
        } else {
            self.matmul(stream, mat, x, bias, out, out_stride)
        }
    }

    /// The way of many tokens.
    ///
    /// # Panics
    /// If sizes do not fit each other, rows have gaps, or the type has no blocks.
    pub fn matmul(
        &self,
        stream: &Stream,
        mat: DeviceMat,
        x: DeviceActs,
        bias: Option<DeviceSlice>,
        out: DeviceSlice,
        out_stride: usize,
    ) -> Result<()> {
        matvec::assert_fits(&mat, &x, bias, out, out_stride);
        assert!(mat.is_dense(), "rows without gaps");
        if mat.rows == 0 || x.tokens == 0 {
            return Ok(());
        }
        let args = Args::new().slice(mat.data).optional(None).u64(0).size(mat.rows).size(mat.cols);
        let args = args.slice(x.records).size(x.record_cols).size(x.first_col);
        let args = args.optional(None).optional(None).size(x.tokens);
        let args = args.optional(None).optional(bias).u32(0).slice(out).size(out_stride);
        let tiles = x.tokens.div_ceil(tile_tokens(mat.ty)) as u32;
        let grid = [mat.rows.div_ceil(ROWS) as u32, tiles, 1];
        let (kernel, block) = (self.matmul.get(mat.ty), [THREADS, 1, 1]);
        let launch = Launch { kernel, grid, block, shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's; matrix, activations, bias and results are there
        // (asserted above and where they were made).
        unsafe { stream.launch(&launch) }
    }

    /// `out[pair·out_stride + r] (+)= matrix of the pair's item[r] · x[token of the pair]`.
    ///
    /// # Panics
    /// If sizes do not fit each other, or the type has no blocks.
    ///
    /// # Safety
    /// When the launch runs, `matrices` holds 0 or addresses of device memory from which on, at
    /// `matrix_at`, a matrix of the type and shape lies, aligned to `mat::alignment`; `starts`
    /// ascends, to at most the pairs of `out` and of `tokens`; items have at most `max_pairs`;
    /// `tokens` (or pairs) are among those of `x`, and experts of a bias among its rows.
    pub unsafe fn grouped(
        &self,
        stream: &Stream,
        groups: Groups,
        x: DeviceActs,
        out: DeviceSlice,
        out_stride: usize,
    ) -> Result<()> {
        let Groups { ty, rows, cols, n_items, .. } = groups;
        assert_eq!((cols, act_kind(ty)), (x.cols, x.kind), "activations for {ty}");
        assert!(groups.matrices.holds::<u64>(n_items) && groups.starts.holds::<u32>(n_items + 1));
        assert!(rows <= out_stride, "{rows} rows in {out_stride}");
        if rows == 0 || n_items == 0 || groups.max_pairs == 0 {
            return Ok(());
        }
        let (experts, bias) = (groups.bias.map(|b| b.0), groups.bias.map(|b| b.1));
        assert!(experts.is_none_or(|experts| experts.holds::<u32>(n_items)), "an expert an item");
        let args = Args::new().optional(None).slice(groups.matrices).u64(groups.matrix_at as u64);
        let args = args.size(rows).size(cols);
        let args = args.slice(x.records).size(x.record_cols).size(x.first_col);
        let args = args.optional(groups.tokens).slice(groups.starts).u32(0);
        let args = args.optional(experts).optional(bias).u32(groups.accumulate.into());
        let args = args.slice(out).size(out_stride);
        let tiles = groups.max_pairs.div_ceil(tile_tokens(ty)) as u32;
        let grid = [rows.div_ceil(ROWS) as u32, tiles, n_items as u32];
        let (kernel, block) = (self.matmul.get(ty), [THREADS, 1, 1]);
        let launch = Launch { kernel, grid, block, shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's; the tables are as large as it reads, and what
        // they hold is the caller's promise.
        unsafe { stream.launch(&launch) }
    }
}
