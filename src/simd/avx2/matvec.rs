//! Matrix–vector products of quantised weights: of one token, or of the few rows that a panel of
//! the matrix–matrix product leaves over.
//!
//! Two arrangements, the same bits: eight blocks of one row (long rows), or one block of each of
//! eight rows (rows of fewer than eight blocks, whose lanes would idle). Either gives eight exact
//! integers in a vector, and one fma adds them to lanes that "One arithmetic" names.

use super::ahead::Rows;
use super::ints::{ActBlock, Ints, Scale};
use super::reduce::{sum8, sum8_halves, tree8};
use crate::simd::{ActView, Product};
use std::arch::x86_64::*;

/// One token's activations.
#[derive(Clone, Copy)]
pub(in crate::simd) struct Token {
    qs: *const i8,
    pub scales: *const f32,
    sums: *const i16,
}

impl Token {
    pub fn new<B: Ints>(acts: ActView, t: usize) -> Self {
        let sums = if B::SUMS == 16 { acts.sums16(t) } else { acts.sums32(t) };
        Token { qs: acts.qs(t).as_ptr(), scales: acts.scales(t).as_ptr(), sums: sums.as_ptr() }
    }

    /// From block `b` on, which the row has or which would follow its last.
    pub fn behind<B: Ints>(self, b: usize) -> Self {
        Token {
            qs: self.qs.wrapping_add(b * B::LEN),
            scales: self.scales.wrapping_add(b),
            sums: self.sums.wrapping_add(b * (B::LEN / B::SUMS)),
        }
    }

    /// # Safety
    /// The row has more than `b` blocks.
    #[inline]
    pub unsafe fn block<B: Ints>(self, b: usize) -> ActBlock {
        // SAFETY: within the row.
        unsafe {
            ActBlock { qs: self.qs.add(b * B::LEN), sums: self.sums.add(b * (B::LEN / B::SUMS)) }
        }
    }
}

/// # Safety
/// As [`Product`] says, on a processor with AVX2, FMA and F16C; B is the matrix's type.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul<B: Ints>(product: Product) {
    let Product { mat, acts, rows, .. } = product;
    let (blocks, granule) = (mat.cols / B::LEN, (product.granule / B::LEN).max(1));
    for t in 0..acts.tokens() {
        let token = Token::new::<B>(acts, t);
        let ahead = Rows::begin(product);
        let mut r = 0;
        while r < rows {
            let by_rows = granule < 8 && rows - r >= 8;
            // SAFETY: rows below `mat.rows` lie within `data`; the places in `out` are the
            // caller's promise.
            unsafe {
                let (row, out) = (product.row(r), product.place(t, r));
                for b in (0..blocks.max(1)).step_by(granule) {
                    let row = row.add(b * size_of::<B>());
                    let (n, token) = (granule.min(blocks - b), token.behind::<B>(b));
                    if by_rows {
                        let dots = dot_eight_rows::<B>(row, mat.row_stride, n, token, ahead);
                        let sum = match b {
                            0 => dots,
                            _ => _mm256_add_ps(_mm256_loadu_ps(out), dots),
                        };
                        _mm256_storeu_ps(out, sum);
                    } else {
                        let dot = dot_row::<B>(row.cast(), n, token, ahead);
                        out.write(if b > 0 { out.read() + dot } else { dot });
                    }
                }
            }
            r += if by_rows { 8 } else { 1 };
        }
    }
}

/// # Safety
/// `row` leads to `blocks` blocks and `token` to as many.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_row<B: Ints>(row: *const B, blocks: usize, token: Token, ahead: Rows) -> f32 {
    let mut lanes = _mm256_setzero_ps();
    let whole = blocks / 8 * 8;
    for b in (0..whole).step_by(8) {
        // SAFETY: blocks b to b + 7 exist.
        unsafe {
            let a = _mm256_loadu_ps(token.scales.add(b));
            let next = ahead.behind(row.add(b).cast(), row.add(blocks).cast());
            if size_of::<B>() < 64 {
                next.ask_for::<[B; 8]>(0);
            }
            let at = |i: usize| {
                if size_of::<B>() >= 64 {
                    next.ask_for::<B>(i * size_of::<B>());
                }
                (row.add(b + i), token.block::<B>(b + i))
            };
            lanes = add_eight::<B>(at, 8, a, lanes);
        }
    }
    if whole < blocks {
        let mut scales = [0f32; 8];
        // SAFETY: the last blocks − whole scales exist; the array has room for eight.
        unsafe {
            let n = blocks - whole;
            std::ptr::copy_nonoverlapping(token.scales.add(whole), scales.as_mut_ptr(), n);
            let a = _mm256_loadu_ps(scales.as_ptr());
            let at = |i: usize| (row.add(whole + i), token.block::<B>(whole + i));
            lanes = add_eight::<B>(at, n, a, lanes);
        }
    }
    tree8(lanes)
}

/// The dot products of eight rows from `row` on.
///
/// # Safety
/// Eight rows of `blocks` blocks lie `stride` bytes apart, and `token` has as many blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_eight_rows<B: Ints>(
    row: *const u8,
    stride: usize,
    blocks: usize,
    token: Token,
    ahead: Rows,
) -> __m256 {
    let mut lanes = [_mm256_setzero_ps(); 8];
    for b in 0..blocks {
        let next = ahead.below(row.wrapping_add(b * size_of::<B>()), 8 * stride);
        // SAFETY: block b of each of eight rows, and of the token.
        unsafe {
            let a = _mm256_set1_ps(*token.scales.add(b));
            let act = token.block::<B>(b);
            let at = |i: usize| {
                next.ask_for::<B>(i * stride);
                (row.add(i * stride).cast::<B>().add(b), act)
            };
            lanes[b % 8] = add_eight::<B>(at, 8, a, lanes[b % 8]);
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    let (a, b) = (_mm256_add_ps(a, e), _mm256_add_ps(b, f));
    let (c, d) = (_mm256_add_ps(c, g), _mm256_add_ps(d, h));
    _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d))
}

/// `lanes` plus the first `n` (weight block, activation block) pairs that `at` names, one a lane.
/// The lanes from n on are untouched: their scales are 0, and x + 0 is x since a lane that began
/// at +0 is never −0.
///
/// # Safety
/// `at(i)` leads to whole blocks for i below n; n ≤ 8; lanes of `a` from n on are 0.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::simd) unsafe fn add_eight<B: Ints>(
    at: impl Fn(usize) -> (*const B, ActBlock),
    n: usize,
    a: __m256,
    lanes: __m256,
) -> __m256 {
    let mut isums = [_mm256_setzero_si256(); 8];
    let mut imins = [_mm_setzero_si128(); 8];
    let (mut d, mut dmin) = ([B::Scale::default(); 8], [B::Scale::default(); 8]);
    for i in 0..8 {
        if i < n {
            let (w, act) = at(i);
            // SAFETY: the caller's promise.
            unsafe {
                isums[i] = B::isum(w, act);
                if B::MINS {
                    imins[i] = B::imins(w, act);
                }
                (d[i], dmin[i]) = B::stored_scales(w);
            }
        }
    }
    // SAFETY: AVX2 and F16C, the caller's promise.
    let (d, dmin) = unsafe { (B::Scale::eight(d), B::Scale::eight(dmin)) };
    let scale = _mm256_mul_ps(d, a);
    let lanes = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sum8(isums)), lanes);
    if !B::MINS {
        return lanes;
    }
    let scale = _mm256_mul_ps(dmin, a);
    _mm256_fnmadd_ps(scale, _mm256_cvtepi32_ps(sum8_halves(imins)), lanes)
}
