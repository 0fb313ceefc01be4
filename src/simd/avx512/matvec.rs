//! Matrix–vector products: the arrangements of the AVX2 loops (eight blocks of one row, or a block
//! of each of eight rows), with what blocks have in common done for all eight at once and 64 codes
//! in a vector.

use super::eight::{EightBlocks, Integers};
use crate::simd::Product;
use crate::simd::avx2::ahead::Rows;
use crate::simd::avx2::matvec::Token;
use crate::simd::avx2::reduce::tree8;
use std::arch::x86_64::*;

/// # Safety
/// As [`Product`] says, on a processor with the features of this module; B is the matrix's type.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn matmul<B: EightBlocks>(product: Product) {
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
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn dot_row<B: EightBlocks>(row: *const B, blocks: usize, token: Token, ahead: Rows) -> f32 {
    let mut lanes = _mm256_setzero_ps();
    let whole = blocks / 8 * 8;
    for first in (0..whole).step_by(8) {
        // SAFETY: eight blocks from `first` on.
        unsafe {
            let w = row.add(first);
            let next = ahead.behind(w.cast(), row.add(blocks).cast());
            let a = _mm256_loadu_ps(token.scales.add(first));
            let at = |i: usize| (w.add(i), token.block::<B>(first + i));
            lanes = add_eight(
                B::integers(at, |i| next.ask_for::<B>(i * size_of::<B>())),
                0xff,
                a,
                lanes,
            );
        }
    }
    if whole < blocks {
        let last = blocks - 1 - whole;
        let mask = 0xff >> (7 - last);
        // SAFETY: the last block stands in for those that are missing, and their scales, which
        // would lie behind the end, are not loaded.
        unsafe {
            let a = _mm256_maskz_loadu_ps(mask, token.scales.add(whole));
            let w = row.add(whole);
            let at = |i: usize| (w.add(i.min(last)), token.block::<B>(whole + i.min(last)));
            lanes = add_eight(B::integers(at, |_| ()), mask, a, lanes);
        }
    }
    tree8(lanes)
}

/// The dot products of eight rows from `row` on.
///
/// # Safety
/// Eight rows of `blocks` blocks lie `stride` bytes apart, and `token` has as many blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn dot_eight_rows<B: EightBlocks>(
    row: *const u8,
    stride: usize,
    blocks: usize,
    token: Token,
    ahead: Rows,
) -> __m256 {
    let mut lanes = [_mm256_setzero_ps(); 8];
    for b in 0..blocks {
        // SAFETY: block b of each of eight rows, and of the token.
        unsafe {
            let a = _mm256_set1_ps(*token.scales.add(b));
            let act = token.block::<B>(b);
            let first = row.cast::<B>().add(b).cast::<u8>();
            let next = ahead.below(first, 8 * stride);
            let at = |i: usize| (first.add(i * stride).cast::<B>(), act);
            lanes[b % 8] = add_eight(
                B::integers(at, |i| next.ask_for::<B>(i * stride)),
                0xff,
                a,
                lanes[b % 8],
            );
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    let (a, b) = (_mm256_add_ps(a, e), _mm256_add_ps(b, f));
    let (c, d) = (_mm256_add_ps(c, g), _mm256_add_ps(d, h));
    _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d))
}

/// `lanes` plus eight blocks, one a lane, for the lanes in `mask`: elsewhere the scales become 0,
/// and x + 0 is x since a lane that began at +0 is never −0.
#[inline]
#[target_feature(enable = "avx2,fma,avx512f,avx512vl")]
fn add_eight(integers: Integers, mask: u8, a: __m256, lanes: __m256) -> __m256 {
    let Integers { isums, imins, d, dmin } = integers;
    let scale = _mm256_maskz_mul_ps(mask, d, a);
    let lanes = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(isums), lanes);
    let Some(imins) = imins else { return lanes };
    let scale = _mm256_maskz_mul_ps(mask, dmin, a);
    _mm256_fnmadd_ps(scale, _mm256_cvtepi32_ps(imins), lanes)
}
