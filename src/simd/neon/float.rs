//! Products of F32, F16, BF16 and F8_E4M3 weights with f32 activations: element i in lane i mod 8.

use super::convert::{load_bf16, load_e4m3, load_f16};
use super::lanes::F32x8;
use crate::simd::Product;

/// A weight type that loads as f32.
pub(super) trait Float {
    const BYTES: usize;

    /// # Safety
    /// Eight weights at `p` are readable.
    unsafe fn load8(p: *const u8) -> F32x8;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;
pub(super) struct E4m3;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load8(p: *const u8) -> F32x8 {
        // SAFETY: the caller's promise; the load takes any alignment.
        unsafe { F32x8::load(p.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load8(p: *const u8) -> F32x8 {
        // SAFETY: the caller's promise; the load takes any alignment.
        unsafe { load_f16(p.cast()) }
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load8(p: *const u8) -> F32x8 {
        // SAFETY: the caller's promise; the load takes any alignment.
        unsafe { load_bf16(p.cast()) }
    }
}

impl Float for E4m3 {
    const BYTES: usize = 1;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load8(p: *const u8) -> F32x8 {
        // SAFETY: the caller's promise.
        unsafe { load_e4m3(p) }
    }
}

/// Rows that pass over all tokens before the next ones do, so that they stay in the second cache
/// and four tokens in the first, as in the AVX2 version.
const ROWS: usize = 32;

/// # Safety
/// As [`Product`] says; W is the matrix's type.
#[target_feature(enable = "neon")]
pub(super) unsafe fn matmul<W: Float>(product: Product) {
    let Product { mat, acts, .. } = product;
    let out_stride = product.out.stride;
    let (tokens, rows) = (acts.tokens(), product.first..product.first + product.rows);
    for first in rows.clone().step_by(ROWS) {
        let end = rows.end.min(first + ROWS);
        let mut t = 0;
        while t < tokens {
            // SAFETY: rows below `mat.rows` lie within `data` and are as long as a token; the
            // places in `out` are the caller's promise.
            unsafe {
                let (w, out) = (mat.data.as_ptr(), product.out.at.add(t * out_stride));
                if tokens - t >= 4 && mat.cols.is_multiple_of(8) {
                    let x = [0, 1, 2, 3].map(|i| acts.f32s(t + i));
                    let cut = first + (end - first) / 2 * 2;
                    for r in (first..cut).step_by(2) {
                        tile::<W, 2, 4>(w, mat.row_stride, r, x, out, out_stride);
                    }
                    for r in cut..end {
                        tile::<W, 1, 4>(w, mat.row_stride, r, x, out, out_stride);
                    }
                    t += 4;
                } else {
                    let x = [acts.f32s(t)];
                    let four = if mat.cols.is_multiple_of(8) { (end - first) / 4 * 4 } else { 0 };
                    for r in (first..first + four).step_by(4) {
                        tile::<W, 4, 1>(w, mat.row_stride, r, x, out, out_stride);
                    }
                    for r in first + four..end {
                        out.add(r).write(dot::<W>(w.add(r * mat.row_stride), x[0]));
                    }
                    t += 1;
                }
            }
        }
    }
}

/// Rows r to r + R times T tokens. 2 × 4 has sixteen vectors of sums, and a load of weights serves
/// four of them; 4 × 1 is for one token, whose weights come from memory.
///
/// # Safety
/// R rows of `x[0].len()` weights, a multiple of eight, lie `stride` bytes apart from row r of `w`
/// on; the tokens are of one length; `out` takes R values from r on at T multiples of `out_stride`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn tile<W: Float, const R: usize, const T: usize>(
    w: *const u8,
    stride: usize,
    r: usize,
    x: [&[f32]; T],
    out: *mut f32,
    out_stride: usize,
) {
    let mut lanes = [[F32x8::zero(); T]; R];
    let x_at = x.map(|x| x.as_ptr());
    let w = w.wrapping_add(r * stride);
    for i in (0..x[0].len()).step_by(8) {
        for (k, lanes) in lanes.iter_mut().enumerate() {
            // SAFETY: eight elements from i on exist in each row and token.
            unsafe {
                let w = W::load8(w.add(k * stride + i * W::BYTES));
                for t in 0..T {
                    lanes[t] = lanes[t].fma(F32x8::load(x_at[t].add(i)), w);
                }
            }
        }
    }
    for (k, lanes) in lanes.into_iter().enumerate() {
        for (t, lanes) in lanes.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { out.add(t * out_stride + r + k).write(lanes.tree()) };
        }
    }
}

/// # Safety
/// `w` leads to `x.len()` weights.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn dot<W: Float>(w: *const u8, x: &[f32]) -> f32 {
    let mut lanes = F32x8::zero();
    let whole = x.len() / 8 * 8;
    for i in (0..whole).step_by(8) {
        // SAFETY: eight elements from i on exist in both.
        unsafe {
            let w = W::load8(w.add(i * W::BYTES));
            lanes = lanes.fma(F32x8::load(x.as_ptr().add(i)), w);
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
            lanes = lanes.fma(F32x8::from_array(&x8), W::load8(w8.as_ptr()));
        }
    }
    lanes.tree()
}
