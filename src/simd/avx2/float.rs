//! Products of F32, F16 and BF16 weights with f32 activations: element i in lane i mod 8.

use super::reduce::tree8;
use crate::simd::{ActView, MatRef};
use std::arch::x86_64::*;
use std::ops::Range;

/// A weight type that loads as f32.
pub(super) trait Float {
    const BYTES: usize;

    /// # Safety
    /// Eight weights at `p` are readable; the processor has AVX2 and F16C.
    unsafe fn load8(p: *const u8) -> __m256;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load8(p: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(p.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load8(p: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load8(p: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        let halves = unsafe { _mm_loadu_si128(p.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
    }
}

/// # Safety
/// As [`crate::simd::Kernels::matmul`], on a processor with AVX2, FMA and F16C; W is the matrix's
/// type.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul<W: Float>(
    mat: MatRef,
    rows: Range<usize>,
    acts: ActView,
    out: *mut f32,
    out_stride: usize,
) {
    let tiles = if mat.cols.is_multiple_of(8) { acts.tokens() / 4 * 4 } else { 0 };
    let mut r = rows.start;
    while r < rows.end {
        let n = if rows.end - r >= 2 { 2 } else { 1 };
        // SAFETY: rows r and, if n is 2, r + 1 lie within `data` and have as many weights as a
        // token has values; the places in `out` are the caller's promise.
        unsafe {
            let row = mat.data.as_ptr().add(r * mat.row_stride);
            let out = out.add(r);
            for t in (0..tiles).step_by(4) {
                let x = [0, 1, 2, 3].map(|i| acts.f32s(t + i));
                let out = out.add(t * out_stride);
                match n {
                    2 => tile::<W, 2>(row, mat.row_stride, x, out, out_stride),
                    _ => tile::<W, 1>(row, mat.row_stride, x, out, out_stride),
                }
            }
            for t in tiles..acts.tokens() {
                for i in 0..n {
                    let dot = dot::<W>(row.add(i * mat.row_stride), acts.f32s(t));
                    out.add(t * out_stride + i).write(dot);
                }
            }
        }
        r += n;
    }
}

/// R rows times four tokens; R = 2 takes eight sums, as many as hide the latency of an fma, and a
/// load of weights serves four of them.
///
/// # Safety
/// R rows of `x[0].len()` weights lie `stride` bytes apart, a multiple of eight of them; the four
/// tokens are of one length; `out` takes R values at each of four multiples of `out_stride`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<W: Float, const R: usize>(
    w: *const u8,
    stride: usize,
    x: [&[f32]; 4],
    out: *mut f32,
    out_stride: usize,
) {
    let mut lanes = [[_mm256_setzero_ps(); 4]; R];
    let x_at = x.map(|x| x.as_ptr());
    for i in (0..x[0].len()).step_by(8) {
        for (r, lanes) in lanes.iter_mut().enumerate() {
            // SAFETY: eight elements from i on exist in each row and token.
            unsafe {
                let w = W::load8(w.add(r * stride + i * W::BYTES));
                for t in 0..4 {
                    lanes[t] = _mm256_fmadd_ps(_mm256_loadu_ps(x_at[t].add(i)), w, lanes[t]);
                }
            }
        }
    }
    for (r, lanes) in lanes.into_iter().enumerate() {
        for (t, lanes) in lanes.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { out.add(t * out_stride + r).write(tree8(lanes)) };
        }
    }
}

/// # Safety
/// `w` leads to `x.len()` weights; the processor has AVX2, FMA and F16C.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn dot<W: Float>(w: *const u8, x: &[f32]) -> f32 {
    let mut lanes = _mm256_setzero_ps();
    let whole = x.len() / 8 * 8;
    for i in (0..whole).step_by(8) {
        // SAFETY: eight elements from i on exist in both.
        unsafe {
            let w = W::load8(w.add(i * W::BYTES));
            lanes = _mm256_fmadd_ps(_mm256_loadu_ps(x.as_ptr().add(i)), w, lanes);
        }
    }
    let rest = x.len() - whole;
    if rest > 0 {
        let (mut w8, mut x8) = ([0u8; 32], [0f32; 8]);
        x8[..rest].copy_from_slice(&x[whole..]);
        // SAFETY: `rest` weights exist behind the whole ones; the buffers hold eight.
        unsafe {
            let from = w.add(whole * W::BYTES);
            std::ptr::copy_nonoverlapping(from, w8.as_mut_ptr(), rest * W::BYTES);
            lanes = _mm256_fmadd_ps(_mm256_loadu_ps(x8.as_ptr()), W::load8(w8.as_ptr()), lanes);
        }
    }
    tree8(lanes)
}
