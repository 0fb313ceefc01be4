//! Matrix times the activations of a few tokens (`kernels/matvec.cu`).

use super::acts::DeviceActs;
use super::mat::{DeviceMat, TypeKernels, unit_len};
use super::{Device, DevicePtr, DeviceSlice, GRID_MAX, Grid, Stream, kernel_params, u32_of};
use crate::Result;
use crate::gguf::TensorType;
use crate::simd::act_kind;

/// Threads of a block.
pub(super) const THREADS: u32 = 256;
/// Tokens of a block at most.
pub const MAX_TOKENS: usize = 8;
/// Threads of a row of floats, of one token.
const FLOAT_LANES: u32 = 64;

kernel_params! {
    pub struct MatvecParams[72] {
        weights: DevicePtr,
        row_stride: u64,
        n_rows: u32,
        n_cols: u32,
        lanes: u32,
        scale: f32,
        x: DevicePtr,
        x_cols: u32,
        first_col: u32,
        bias: DevicePtr,
        out: DevicePtr,
        n_tokens: u32,
        out_stride: u32,
    }
}

pub struct Matvec {
    one: TypeKernels<MatvecParams>,
    eight: TypeKernels<MatvecParams>,
}

/// The number of threads that share a row of `cols` columns. Each takes a part of a block; eight
/// groups of them are the eight lanes in which "One arithmetic" adds.
pub fn lanes_a_row(ty: TensorType, cols: usize) -> u32 {
    match unit_len(ty) {
        1 => 8,
        256 => 4 * (cols / 256).next_power_of_two().clamp(1, 8) as u32,
        unit => (cols / unit).next_power_of_two().clamp(8, 32) as u32,
    }
}

/// The memory that gets a product's rows: f32 [tokens, stride].
#[derive(Clone, Copy)]
pub struct ProductOut<'a> {
    pub data: DeviceSlice<'a>,
    pub stride: usize,
    /// The product is added to what is there, multiplied by this; it is stored if there is none.
    pub scale: Option<f32>,
}

/// Asserts that the matrix and its activations fit each other, that a bias has a number for each
/// row, and that `out`, f32 [tokens, stride], holds the results.
pub(super) fn assert_fits(
    mat: &DeviceMat,
    x: &DeviceActs,
    bias: Option<DeviceSlice>,
    out: DeviceSlice,
    stride: usize,
) {
    assert_eq!(mat.cols, x.cols, "columns of the matrix and of the activations");
    assert_eq!(act_kind(mat.ty), x.kind, "activations for {}", mat.ty);
    assert!(mat.rows <= stride, "{} rows in {stride}", mat.rows);
    assert!(bias.is_none_or(|bias| bias.holds::<f32>(mat.rows)), "a bias a row");
    if x.tokens > 0 {
        assert!(out.holds::<f32>((x.tokens - 1) * stride + mat.rows), "room for the results");
    }
}

impl Matvec {
    /// For matrices of these types.
    pub fn load(gpu: &Device, types: &[TensorType]) -> Result<Matvec> {
        Ok(Matvec {
            one: TypeKernels::load(gpu, "matvec", types)?,
            eight: TypeKernels::load(gpu, "matvec8", types)?,
        })
    }

    /// `out[t·stride + r] (+)= mat[r] · x[t] (+ bias[r])`, eight tokens a block.
    ///
    /// # Panics
    /// If sizes do not fit each other, or the scale is 0.
    pub fn launch(
        &self,
        stream: &Stream,
        mat: DeviceMat,
        x: DeviceActs,
        bias: Option<DeviceSlice>,
        out: ProductOut,
    ) -> Result<()> {
        assert_fits(&mat, &x, bias, out.data, out.stride);
        assert!(out.scale != Some(0.0), "0 is the kernels' number for none");
        if mat.rows == 0 {
            return Ok(());
        }
        // A grid has room for so many tokens along y.
        for first in (0..x.tokens).step_by(MAX_TOKENS * GRID_MAX) {
            let x = x.token_range(first..x.tokens.min(first + MAX_TOKENS * GRID_MAX));
            let data = out.data.slice(4 * first * out.stride..out.data.len());
            self.part(stream, &mat, &x, bias, ProductOut { data, ..out })?;
        }
        Ok(())
    }

    fn part(
        &self,
        stream: &Stream,
        mat: &DeviceMat,
        x: &DeviceActs,
        bias: Option<DeviceSlice>,
        out: ProductOut,
    ) -> Result<()> {
        let lanes = match (x.tokens, mat.ty.block_len()) {
            (1, 1) => FLOAT_LANES,
            _ => lanes_a_row(mat.ty, mat.cols),
        };
        let params = MatvecParams {
            weights: mat.data.into(),
            row_stride: mat.row_stride as u64,
            n_rows: u32_of(mat.rows),
            n_cols: u32_of(mat.cols),
            lanes,
            scale: out.scale.unwrap_or(0.0),
            x: x.records.into(),
            x_cols: u32_of(x.record_cols),
            first_col: u32_of(x.first_col),
            bias: bias.into(),
            out: out.data.into(),
            n_tokens: u32_of(x.tokens),
            out_stride: u32_of(out.stride),
        };
        let kernels = if x.tokens == 1 { &self.one } else { &self.eight };
        let blocks =
            [params.n_rows.div_ceil(THREADS / lanes), u32_of(x.tokens.div_ceil(MAX_TOKENS)), 1];
        let grid = Grid::new(blocks, THREADS);
        // SAFETY: matrix, activations, bias and results are there (asserted by the caller and where
        // they were made).
        unsafe { stream.launch(kernels.get(mat.ty), grid, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_a_thread_for_each_part_up_to_a_warp() {
        use TensorType::*;
        let lanes = |ty, cols| lanes_a_row(ty, cols);
        assert_eq!([256, 512, 768, 2048, 4096].map(|cols| lanes(Q4_K, cols)), [4, 8, 16, 32, 32]);
        assert_eq!([32, 256, 288, 544, 4096].map(|cols| lanes(Q8_0, cols)), [8, 8, 16, 32, 32]);
        assert_eq!([64, 128, 192, 512].map(|cols| lanes(NVFP4, cols)), [8, 8, 16, 32]);
        assert_eq!([128, 512, 1024].map(|cols| lanes(Q1_0, cols)), [8, 16, 32]);
        assert_eq!([64, 512, 1024].map(|cols| lanes(Q2_0, cols)), [8, 16, 32]);
        assert_eq!(lanes(F16, 7), 8);
    }
}
