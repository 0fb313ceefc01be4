//! Products of F16 and BF16 matrices with the activations of prompts, on tensor cores
//! (`kernels/matmul_halves.cu`): not to the bit those of `Products`.

use super::acts::DeviceActs;
use super::mat::DeviceMat;
use super::matvec::ProductOut;
use super::{Device, DevicePtr, DeviceSlice, GRID_MAX, Grid, Kernel, Stream, Version};
use super::{kernel_params, u32_of};
use crate::Result;
use crate::gguf::TensorType;
use crate::simd::ActKind;

const THREADS: u32 = 256;
/// Rows and tokens of a block.
const ROWS: u32 = 128;
const TOKENS: usize = 128;

kernel_params! {
    pub struct StoreHalvesParams[40] {
        x: DevicePtr,
        out: DevicePtr,
        scales: DevicePtr,
        stride: u32,
        cols: u32,
        is_bf16: u32,
        unused: u32,
    }
}

kernel_params! {
    pub struct MatmulHalvesParams[64] {
        weights: DevicePtr,
        x: DevicePtr,
        scales: DevicePtr,
        bias: DevicePtr,
        out: DevicePtr,
        n_rows: u32,
        n_cols: u32,
        n_tokens: u32,
        out_stride: u32,
        scale: f32,
        is_bf16: u32,
    }
}

/// Activations rounded to F16 or BF16.
#[derive(Clone, Copy, Debug)]
pub struct DeviceHalves<'a> {
    pub ty: TensorType,
    pub tokens: usize,
    pub cols: usize,
    /// [tokens, cols]
    values: DeviceSlice<'a>,
    /// f32 [tokens]: the factors that undo the scaling of F16.
    scales: DeviceSlice<'a>,
}

pub struct Halves {
    store: Kernel<StoreHalvesParams>,
    matmul: Kernel<MatmulHalvesParams>,
    has_f16: bool,
    has_bf16: bool,
}

/// Bytes of rounded activations.
pub fn halves_bytes(tokens: usize, cols: usize) -> usize {
    (2 * tokens * cols).next_multiple_of(64) + 4 * tokens
}

impl Halves {
    /// For models with matrices of these types: those without blocks, whose prompts would be slow.
    /// In a file of blocks the few halves keep the CPU's bits.
    pub fn load(gpu: &Device, types: &[TensorType]) -> Result<Halves> {
        Ok(Halves {
            store: Kernel::find(gpu, "store_halves")?,
            matmul: Kernel::find(gpu, "matmul_halves")?,
            has_f16: types.iter().all(|ty| ty.block_len() == 1),
            // Turing multiplies halves of F16 only.
            has_bf16: gpu.info().compute >= Version::new(8, 0),
        })
    }

    /// Whether rows of `cols` columns of this type are multiplied.
    pub fn take(&self, ty: TensorType, cols: usize) -> bool {
        let is_half = ty == TensorType::F16 || ty == TensorType::BF16 && self.has_bf16;
        self.has_f16 && is_half && cols > 0 && cols.is_multiple_of(8)
    }

    /// Rounds activations to the type, in memory that begins on a line and has [`halves_bytes`].
    ///
    /// # Panics
    /// If they are not f32, are a part of records' columns, or do not fit.
    pub fn store<'a>(
        &self,
        stream: &Stream,
        ty: TensorType,
        x: DeviceActs,
        memory: DeviceSlice<'a>,
    ) -> Result<DeviceHalves<'a>> {
        let DeviceActs { tokens, cols, .. } = x;
        assert!(x.kind == ActKind::F32 && x.first_col == 0 && x.record_cols == cols);
        assert!(self.take(ty, cols), "{cols} columns of {ty}");
        assert!(memory.address().is_multiple_of(64) && memory.len() >= halves_bytes(tokens, cols));
        let scales = (2 * tokens * cols).next_multiple_of(64);
        let halves = DeviceHalves {
            ty,
            tokens,
            cols,
            values: memory.slice(0..2 * tokens * cols),
            scales: memory.slice(scales..scales + 4 * tokens),
        };
        let params = StoreHalvesParams {
            x: x.records.into(),
            out: halves.values.into(),
            scales: halves.scales.into(),
            stride: u32_of(super::acts::record_bytes(x.kind, cols) / 4),
            cols: u32_of(cols),
            is_bf16: (ty == TensorType::BF16).into(),
            unused: 0,
        };
        if tokens > 0 {
            let grid = Grid::new([u32_of(tokens), 1, 1], THREADS);
            // SAFETY: the records are there, and the memory fits (asserted).
            unsafe { stream.launch(self.store, grid, &params)? };
        }
        Ok(halves)
    }

    /// As `Products::product`, or `Products::add_product` where there is a scale, however many
    /// tokens there are.
    ///
    /// # Panics
    /// If sizes or types do not fit each other, or the scale is 0.
    pub fn product(
        &self,
        stream: &Stream,
        mat: DeviceMat,
        x: DeviceHalves,
        bias: Option<DeviceSlice>,
        out: ProductOut,
    ) -> Result<()> {
        assert_eq!((mat.ty, mat.cols), (x.ty, x.cols), "the matrix and its activations");
        assert!(mat.is_dense() && mat.data.address().is_multiple_of(16), "rows without gaps");
        assert!(bias.is_none_or(|bias| bias.holds::<f32>(mat.rows)), "a bias a row");
        assert!(mat.rows <= out.stride && out.scale != Some(0.0));
        if mat.rows == 0 || x.tokens == 0 {
            return Ok(());
        }
        assert!(out.data.holds::<f32>((x.tokens - 1) * out.stride + mat.rows), "the results");
        let tiles = x.tokens.div_ceil(TOKENS);
        assert!(tiles <= GRID_MAX, "{} tokens", x.tokens);
        let params = MatmulHalvesParams {
            weights: mat.data.into(),
            x: x.values.into(),
            scales: x.scales.into(),
            bias: bias.into(),
            out: out.data.into(),
            n_rows: u32_of(mat.rows),
            n_cols: u32_of(mat.cols),
            n_tokens: u32_of(x.tokens),
            out_stride: u32_of(out.stride),
            scale: out.scale.unwrap_or(0.0),
            is_bf16: (mat.ty == TensorType::BF16).into(),
        };
        let grid = Grid::new([params.n_rows.div_ceil(ROWS), u32_of(tiles), 1], THREADS);
        // SAFETY: matrix, activations, bias and results are there (asserted above and where they
        // were made).
        unsafe { stream.launch(self.matmul, grid, &params) }
    }
}
