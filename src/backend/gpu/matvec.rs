//! Matrix times the activations of a few tokens (`kernels/matvec.cu`).

use super::acts::DeviceActs;
use super::mat::{DeviceMat, TypeKernels, types};
use super::{Args, Device, DeviceSlice, Launch, Stream};
use crate::Result;
use crate::gguf::TensorType;
use crate::simd::act_kind;

/// Threads of a block.
pub(super) const THREADS: u32 = 256;
/// Tokens of a launch at most.
pub const MAX_TOKENS: usize = 8;

pub struct Matvec {
    one: TypeKernels,
    eight: TypeKernels,
}

/// Threads that share a row of `cols` columns: so many that each has a part of a block, in blocks
/// of eight, which are the lanes of the order in which sums are made.
pub fn lanes_a_row(ty: TensorType, cols: usize) -> u32 {
    match ty.block_len() {
        1 => 8,
        256 => 4 * (cols / 256).next_power_of_two().clamp(1, 8) as u32,
        // Of NVFP4 each sixteen values are a unit.
        len => {
            (cols / len.min(32) * if len == 64 { 2 } else { 1 }).next_power_of_two().clamp(8, 32)
                as u32
        }
    }
}

/// Asserts that `out` is f32 [tokens, stride] with a place for each of `rows`, that the matrix and
/// its activations fit each other and that a bias has a number a row.
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
    pub fn load(gpu: &Device) -> Result<Matvec> {
        Ok(Matvec {
            one: TypeKernels::load(gpu, "matvec", types())?,
            eight: TypeKernels::load(gpu, "matvec8", types())?,
        })
    }

    /// `out[t·out_stride + r] = mat[r] · x[t] (+ bias[r])`, eight tokens a launch.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn launch(
        &self,
        stream: &Stream,
        mat: DeviceMat,
        x: DeviceActs,
        bias: Option<DeviceSlice>,
        out: DeviceSlice,
        out_stride: usize,
    ) -> Result<()> {
        assert_fits(&mat, &x, bias, out, out_stride);
        if mat.rows == 0 {
            return Ok(());
        }
        for first in (0..x.tokens).step_by(MAX_TOKENS) {
            let x = x.token_range(first..x.tokens.min(first + MAX_TOKENS));
            let out = out.slice(4 * first * out_stride..out.len());
            self.few(stream, &mat, &x, bias, out, out_stride)?;
        }
        Ok(())
    }

    fn few(
        &self,
        stream: &Stream,
        mat: &DeviceMat,
        x: &DeviceActs,
        bias: Option<DeviceSlice>,
        out: DeviceSlice,
        out_stride: usize,
    ) -> Result<()> {
        let lanes = lanes_a_row(mat.ty, mat.cols);
        let args = Args::new().slice(mat.data).u64(mat.row_stride as u64);
        let args = args.size(mat.rows).size(mat.cols).u32(lanes);
        let args = args.slice(x.records).size(x.record_cols).size(x.first_col);
        let (kernel, args) = if x.tokens == 1 {
            (self.one.get(mat.ty), args.optional(bias).slice(out))
        } else {
            let args = args.size(x.tokens).optional(bias).slice(out).size(out_stride);
            (self.eight.get(mat.ty), args)
        };
        let grid = [(mat.rows as u32).div_ceil(THREADS / lanes), 1, 1];
        let launch = Launch { kernel, grid, block: [THREADS, 1, 1], shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's; matrix, activations, bias and results are there
        // (asserted by the caller and where they were made).
        unsafe { stream.launch(&launch) }
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
        assert_eq!(lanes(F16, 7), 8);
    }
}
