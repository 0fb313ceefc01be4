//! One matrix for each head, times that head's activations (`kernels/heads.cu`). Twin:
//! `cpu::linear::Cpu::head_products`.

use super::acts::DeviceActs;
use super::mat::{DeviceMat, TypeKernels};
use super::matvec::{THREADS, lanes_a_row};
use super::{Device, DevicePtr, DeviceSlice, Grid, Stream, kernel_params, u32_of};
use crate::Result;
use crate::gguf::TensorType;
use crate::simd::act_kind;

/// Tokens of a block of the kernel.
const HEAD_TOKENS: usize = 8;

kernel_params! {
    pub struct HeadProductsParams[64] {
        weights: DevicePtr,
        x: DevicePtr,
        out: DevicePtr,
        row_stride: u64,
        first: u64,
        step: u64,
        n_rows: u32,
        n_cols: u32,
        lanes: u32,
        n_tokens: u32,
    }
}

pub struct Heads(TypeKernels<HeadProductsParams>);

/// The matrices of all heads in one: head h has `rows` rows from `first + h · step` on.
#[derive(Clone, Copy, Debug)]
pub struct DeviceHeadMats<'a> {
    pub all: DeviceMat<'a>,
    pub n_heads: usize,
    pub rows: usize,
    pub first: usize,
    pub step: usize,
}

impl Heads {
    /// For matrices of these types.
    pub fn load(gpu: &Device, types: &[TensorType]) -> Result<Heads> {
        Ok(Heads(TypeKernels::load(gpu, "head_products", types)?))
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
        let params = HeadProductsParams {
            weights: all.data.into(),
            x: x.records.into(),
            out: out.into(),
            row_stride: all.row_stride as u64,
            first: first as u64,
            step: step as u64,
            n_rows: u32_of(rows),
            n_cols: u32_of(all.cols),
            lanes,
            n_tokens: u32_of(tokens),
        };
        let rows = params.n_rows.div_ceil(THREADS / lanes);
        let blocks = [rows, u32_of(n_heads), u32_of(tokens.div_ceil(HEAD_TOKENS))];
        // SAFETY: matrices, activations and results are there (asserted above and where they were
        // made).
        unsafe { stream.launch(self.0.get(all.ty), Grid::new(blocks, THREADS), &params) }
    }
}
