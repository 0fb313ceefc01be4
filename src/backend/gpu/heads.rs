//! A matrix a head times that head's activations (`kernels/heads.cu`). Twin:
//! `cpu::linear::Cpu::head_products`.

use super::acts::DeviceActs;
use super::mat::{DeviceMat, TypeKernels, types};
use super::matvec::{THREADS, lanes_a_row};
use super::{Args, Device, DeviceSlice, Launch, Stream};
use crate::Result;
use crate::simd::act_kind;

/// Tokens of a block of the kernel.
const HEAD_TOKENS: usize = 8;

pub struct Heads(TypeKernels);

/// A matrix a head, all in one: head h has `rows` rows from `first + h · step` on.
#[derive(Clone, Copy, Debug)]
pub struct DeviceHeadMats<'a> {
    pub all: DeviceMat<'a>,
    pub n_heads: usize,
    pub rows: usize,
    pub first: usize,
    pub step: usize,
}

impl Heads {
    pub fn load(gpu: &Device) -> Result<Heads> {
        Ok(Heads(TypeKernels::load(gpu, "head_products", types())?))
    }

    /// `out[t, h, r] = mats[h][r] · x[t, h]`: `x` has the heads of a token one after the other, and
    /// so has `out`, f32 [tokens, n_heads, rows].
    ///
    /// # Panics
    /// If sizes do not fit each other or `x` is a part of records' columns.
    pub fn launch(
        &self,
        stream: &Stream,
        mats: DeviceHeadMats,
        x: DeviceActs,
        out: DeviceSlice,
    ) -> Result<()> {
        let DeviceHeadMats { all, n_heads, rows, first, step } = mats;
        if n_heads == 0 || rows == 0 || x.tokens == 0 {
            return Ok(());
        }
        let tokens = x.tokens / n_heads;
        assert_eq!(x.tokens, tokens * n_heads, "records of {n_heads} heads");
        assert_eq!([x.first_col, x.cols, x.record_cols], [0, all.cols, all.cols], "whole rows");
        assert_eq!(act_kind(all.ty), x.kind, "activations for {}", all.ty);
        assert!(first + (n_heads - 1) * step + rows <= all.rows, "rows of {n_heads} heads");
        assert_eq!(out.count::<f32>(), x.tokens * rows);
        let lanes = lanes_a_row(all.ty, all.cols);
        let args = Args::new().slice(all.data).u64(all.row_stride as u64);
        let args = args.u64(first as u64).u64(step as u64).size(rows).size(all.cols).u32(lanes);
        let args = args.slice(x.records).size(tokens).slice(out);
        let blocks = (rows as u32).div_ceil(THREADS / lanes);
        let grid = [blocks, n_heads as u32, tokens.div_ceil(HEAD_TOKENS) as u32];
        let (kernel, block) = (self.0.get(all.ty), [THREADS, 1, 1]);
        let launch = Launch { kernel, grid, block, shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's; matrices, activations and results are there
        // (asserted above and where they were made).
        unsafe { stream.launch(&launch) }
    }
}
