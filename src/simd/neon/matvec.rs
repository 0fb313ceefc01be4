//! Matrix–vector products of quantised weights: each token passes over each row, whose bytes come
//! from memory once and stay in the first cache for the next token.
//!
//! Two arrangements, the same bits: eight blocks of one row (long rows), or one block of each of
//! eight rows (rows of fewer than eight blocks, whose lanes would idle). Either gives eight exact
//! integers in two vectors, and two fmas add them to lanes that "One arithmetic" names.

use super::decode::{ActBlock, Decode, Scale, Token, imins, isum};
use super::dot::Dot;
use super::lanes::{F32x8, I32x8};
use crate::simd::Product;
use std::arch::aarch64::*;

/// # Safety
/// As [`Product`] says, on a processor with what D needs; B is the matrix's type.
#[target_feature(enable = "neon")]
pub(super) unsafe fn matmul<B: Decode, D: Dot>(product: Product) {
    let Product { mat, acts, rows, .. } = product;
    let blocks = mat.cols / B::LEN;
    let mut r = 0;
    while r < rows {
        let by_rows = blocks < 8 && rows - r >= 8;
        for t in 0..acts.tokens() {
            let token = Token::new::<B>(acts, t);
            // SAFETY: rows below `mat.rows` lie within `data`; the places in `out` are the
            // caller's promise.
            unsafe {
                let (row, out) = (product.row(r), product.place(t, r));
                if by_rows {
                    dot_eight_rows::<B, D>(row, mat.row_stride, blocks, token).store(out);
                } else {
                    out.write(dot_row::<B, D>(row.cast(), blocks, token));
                }
            }
        }
        r += if by_rows { 8 } else { 1 };
    }
}

/// # Safety
/// `row` leads to `blocks` blocks and `token` to as many; the processor has what D needs.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn dot_row<B: Decode, D: Dot>(row: *const B, blocks: usize, token: Token) -> f32 {
    let mut lanes = F32x8::zero();
    let whole = blocks / 8 * 8;
    for b in (0..whole).step_by(8) {
        // SAFETY: blocks b to b + 7 exist.
        unsafe {
            let a = F32x8::load(token.scales.add(b));
            let at = |i: usize| (row.add(b + i), token.block::<B>(b + i));
            lanes = add_eight::<B, D>(at, 8, a, lanes);
        }
    }
    if whole < blocks {
        let mut scales = [0f32; 8];
        // SAFETY: the last blocks − whole scales exist; the array has room for eight.
        unsafe {
            let n = blocks - whole;
            std::ptr::copy_nonoverlapping(token.scales.add(whole), scales.as_mut_ptr(), n);
            let at = |i: usize| (row.add(whole + i), token.block::<B>(whole + i));
            lanes = add_eight::<B, D>(at, n, F32x8::from_array(&scales), lanes);
        }
    }
    lanes.tree()
}

/// The dot products of eight rows from `row` on.
///
/// # Safety
/// Eight rows of `blocks` blocks lie `stride` bytes apart, and `token` has as many blocks; the
/// processor has what D needs.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn dot_eight_rows<B: Decode, D: Dot>(
    row: *const u8,
    stride: usize,
    blocks: usize,
    token: Token,
) -> F32x8 {
    let mut lanes = [F32x8::zero(); 8];
    for b in 0..blocks {
        // SAFETY: block b of each of eight rows, and of the token.
        unsafe {
            let a = F32x8::splat(*token.scales.add(b));
            let act = token.block::<B>(b);
            let at = |i: usize| (row.add(i * stride).cast::<B>().add(b), act);
            lanes[b % 8] = add_eight::<B, D>(at, 8, a, lanes[b % 8]);
        }
    }
    F32x8::tree_of(lanes)
}

/// `lanes` plus the first `n` (weight block, activation block) pairs that `at` names, one a lane.
/// The lanes from n on are untouched: their scales are 0, and x + 0 is x since a lane that began
/// at +0 is never −0.
///
/// # Safety
/// `at(i)` leads to whole blocks for i below n; n ≤ 8; lanes of `a` from n on are 0; the processor
/// has what D needs.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn add_eight<B: Decode, D: Dot>(
    at: impl Fn(usize) -> (*const B, ActBlock),
    n: usize,
    a: F32x8,
    lanes: F32x8,
) -> F32x8 {
    let mut isums = [vdupq_n_s32(0); 8];
    let mut all_imins = [vdupq_n_s32(0); 8];
    let (mut d, mut dmin) = ([B::Stored::default(); 8], [B::Stored::default(); 8]);
    for i in 0..n {
        let (w, act) = at(i);
        // SAFETY: the caller's promise.
        unsafe {
            isums[i] = isum::<B, D>(w, act);
            if B::MINS {
                all_imins[i] = imins::<B>(w, act);
            }
            (d[i], dmin[i]) = (*w).stored();
        }
    }
    // SAFETY: NEON, the caller's promise.
    let (d, dmin) = unsafe { (B::Stored::eight(d), B::Stored::eight(dmin)) };
    let scale = d.mul(a);
    let lanes = lanes.fma(scale, I32x8::sums(isums).to_f32());
    if !B::MINS {
        return lanes;
    }
    let scale = dmin.mul(a);
    lanes.fms(scale, I32x8::sums(all_imins).to_f32())
}
