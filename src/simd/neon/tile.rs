//! Attention's loops; `simd::tile` says what each computes.

use super::convert::load_f16;
use super::decode::Decode;
use super::lanes::F32x8;
use super::ops::{exp_and_sum, exp8, largest};
use crate::gguf::TensorType;
use crate::quant::{
    self, BlockIQ4NL, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, blocks_of,
};
use crate::simd::tile::{self, SoftmaxStep, Tile, TileMut};
use half::f16;
use std::arch::aarch64::*;

/// Four keys pass over all pairs of queries, so keys are read once and queries stay near.
///
/// # Safety
/// As [`crate::simd::Kernels::tile_dot`] checks.
#[target_feature(enable = "neon")]
pub(super) unsafe fn tile_dot(q: Tile, k: Tile, mut out: TileMut) {
    let (rows, n) = (q.n_rows(), k.n_rows());
    let (stride, to) = (out.stride(), out.as_mut_ptr());
    let paired = rows / 2 * 2;
    // SAFETY: rows below the tiles' numbers of rows; `dots` gives what is copied, at most `n − i`
    // values of each row.
    unsafe {
        for i in (0..n).step_by(4).filter(|_| paired > 0) {
            for r in (0..paired).step_by(2) {
                let eight = dots::<2, 4>(q, r, k, i);
                let least = (n - i).min(4);
                for half in 0..2 {
                    let from = eight.as_ptr().add(4 * half);
                    std::ptr::copy_nonoverlapping(from, to.add((r + half) * stride + i), least);
                }
            }
        }
        for i in (0..n).step_by(8).filter(|_| paired < rows) {
            let eight = dots::<1, 8>(q, paired, k, i);
            let to = to.add(paired * stride + i);
            std::ptr::copy_nonoverlapping(eight.as_ptr(), to, (n - i).min(8));
        }
    }
}

/// R queries times P keys, R·P = 8; keys past the last are the last again.
///
/// # Safety
/// Queries r to r + R and key i exist; rows are of one length, a multiple of eight.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn dots<const R: usize, const P: usize>(q: Tile, r: usize, k: Tile, i: usize) -> [f32; 8] {
    const { assert!(R * P == 8) };
    let last = k.n_rows() - 1;
    let q_at: [_; R] = std::array::from_fn(|a| q.as_ptr().wrapping_add((r + a) * q.stride()));
    let k_at: [_; P] =
        std::array::from_fn(|b| k.as_ptr().wrapping_add((i + b).min(last) * k.stride()));
    let mut lanes = [F32x8::zero(); 8];
    for d in (0..q.dim()).step_by(8) {
        // SAFETY: eight elements from d on exist in each row.
        unsafe {
            let q: [F32x8; R] = std::array::from_fn(|a| F32x8::load(q_at[a].add(d)));
            for b in 0..P {
                let k = F32x8::load(k_at[b].add(d));
                for a in 0..R {
                    lanes[a * P + b] = lanes[a * P + b].fma(q[a], k);
                }
            }
        }
    }
    F32x8::trees(lanes).to_array()
}

/// Columns that pass over all rows before the next ones do: 64 positions of them are 16 KiB.
const COLUMNS: usize = 64;

/// # Safety
/// As [`crate::simd::Kernels::tile_axpy`] checks.
#[target_feature(enable = "neon")]
pub(super) unsafe fn tile_axpy(p: Tile, v: Tile, mut acc: TileMut) {
    let rows = p.n_rows();
    let (stride, acc) = (acc.stride(), acc.as_mut_ptr());
    for start in (0..v.dim()).step_by(COLUMNS) {
        let end = v.dim().min(start + COLUMNS);
        let mut r = 0;
        while r < rows {
            let at = (r, start, end);
            // SAFETY: the rows and columns exist in each tile.
            unsafe {
                match rows - r {
                    4.. => sums::<4, 2>(p, v, acc, stride, at),
                    2.. => sums::<2, 4>(p, v, acc, stride, at),
                    _ => sums::<1, 8>(p, v, acc, stride, at),
                }
            }
            r += match rows - r {
                4.. => 4,
                2.. => 2,
                _ => 1,
            };
        }
    }
}

/// R rows from `r` on, columns `start..end`, C times eight at a time.
///
/// # Safety
/// The rows exist in `p` and `acc`, the columns, a multiple of eight, in `v` and `acc`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn sums<const R: usize, const C: usize>(
    p: Tile,
    v: Tile,
    acc: *mut f32,
    stride: usize,
    (r, start, end): (usize, usize, usize),
) {
    let mut d = start;
    // SAFETY: the caller's promise; d + 8·C never passes `end`.
    unsafe {
        while d + 8 * C <= end {
            block::<R, C>(p, v, acc, stride, (r, d));
            d += 8 * C;
        }
        while d < end {
            block::<R, 1>(p, v, acc, stride, (r, d));
            d += 8;
        }
    }
}

/// R × C times eight sums in registers while all positions pass.
///
/// # Safety
/// As `sums`, for 8·C columns from `d` on.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn block<const R: usize, const C: usize>(
    p: Tile,
    v: Tile,
    acc: *mut f32,
    stride: usize,
    (r, d): (usize, usize),
) {
    let acc = acc.wrapping_add(r * stride + d);
    let mut lanes = [[F32x8::zero(); C]; R];
    // SAFETY: rows r to r + R, positions below v's rows and 8·C columns from d on exist.
    unsafe {
        for a in 0..R {
            for c in 0..C {
                lanes[a][c] = F32x8::load(acc.add(a * stride + 8 * c));
            }
        }
        for i in 0..v.n_rows() {
            let v = v.as_ptr().add(i * v.stride() + d);
            let v: [F32x8; C] = std::array::from_fn(|c| F32x8::load(v.add(8 * c)));
            for (a, lanes) in lanes.iter_mut().enumerate() {
                let p = F32x8::splat(*p.as_ptr().add((r + a) * p.stride() + i));
                for c in 0..C {
                    lanes[c] = lanes[c].fma(p, v[c]);
                }
            }
        }
        for (a, lanes) in lanes.into_iter().enumerate() {
            for (c, lane) in lanes.into_iter().enumerate() {
                lane.store(acc.add(a * stride + 8 * c));
            }
        }
    }
}

#[target_feature(enable = "neon")]
pub(super) fn tile_softmax(mut x: TileMut, scale: f32, steps: &mut [SoftmaxStep]) {
    for (r, step) in steps.iter_mut().enumerate() {
        *step = softmax_row(x.row(r), scale, step.max);
    }
}

#[target_feature(enable = "neon")]
fn softmax_row(x: &mut [f32], scale: f32, max: f32) -> SoftmaxStep {
    x.iter_mut().for_each(|x| *x *= scale);
    let new = largest(x, max);
    let shift = tile::shift(new);
    let sum = exp_and_sum(x, shift);
    let [factor, ..] = exp8(F32x8::splat(max - shift)).to_array();
    SoftmaxStep { max: new, factor, sum }
}

#[target_feature(enable = "neon")]
pub(super) fn f16_to_f32(x: &[u16], out: &mut [f32]) {
    let (xs, x_rest) = x.as_chunks::<8>();
    let (outs, out_rest) = out.as_chunks_mut::<8>();
    for (x, o) in xs.iter().zip(outs) {
        // SAFETY: eight values.
        *o = unsafe { load_f16(x.as_ptr()) }.to_array();
    }
    tile::f16_to_f32(x_rest, out_rest);
}

/// # Safety
/// `out` has a place for each value of `x`.
#[target_feature(enable = "neon")]
pub(super) unsafe fn dequantize(ty: TensorType, x: &[u8], out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match ty {
            TensorType::Q8_0 => decoded::<BlockQ8_0>(x, out),
            TensorType::Q4_0 => decoded::<BlockQ4_0>(x, out),
            TensorType::Q4_1 => decoded::<BlockQ4_1>(x, out),
            TensorType::Q5_0 => decoded::<BlockQ5_0>(x, out),
            TensorType::Q5_1 => decoded::<BlockQ5_1>(x, out),
            TensorType::IQ4_NL => decoded::<BlockIQ4NL>(x, out),
            _ => quant::dequantize(ty, x, out),
        }
    }
}

/// `d·q − min`; a min of 0 changes no bit.
///
/// # Safety
/// As [`dequantize`].
#[target_feature(enable = "neon")]
unsafe fn decoded<B: Decode<Stored = f16>>(x: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_of::<B>(x).iter().zip(out.as_chunks_mut::<32>().0) {
        // SAFETY: a whole block.
        let ((d, min), codes) = unsafe { ((*block).stored(), B::codes(block, 0)) };
        let [d, min] = [d, min].map(|half| vdupq_n_f32(half.to_f32()));
        let eights = codes.map(|q| [vmovl_s8(vget_low_s8(q)), vmovl_high_s8(q)]);
        for (q, out) in eights.as_flattened().iter().zip(out.as_chunks_mut::<8>().0) {
            let low = vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(*q))), d);
            let high = vmulq_f32(vcvtq_f32_s32(vmovl_high_s16(*q)), d);
            // SAFETY: eight places.
            unsafe { F32x8(vsubq_f32(low, min), vsubq_f32(high, min)).store(out.as_mut_ptr()) };
        }
    }
}
