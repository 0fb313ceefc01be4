//! Products of F32, F16, BF16 and F8_E4M3 weights with f32 activations: element i in lane i mod 8.

use super::reduce::tree8;
use super::{prefetch, prefetch_to_second};
use crate::quant::e4m3;
use crate::simd::Product;
use std::arch::x86_64::*;

/// A weight type that loads as f32.
pub(in crate::simd) trait Float {
    const BYTES: usize;

    /// # Safety
    /// Eight weights at `p` are readable; the processor has AVX2 and F16C.
    unsafe fn load8(p: *const u8) -> __m256;
}

pub(in crate::simd) struct F32;
pub(in crate::simd) struct F16;
pub(in crate::simd) struct Bf16;
pub(in crate::simd) struct E4m3;

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

impl Float for E4m3 {
    const BYTES: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load8(p: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        let bytes = _mm_cvtepi8_epi16(unsafe { _mm_loadl_epi64(p.cast()) });
        let nan = _mm_set1_epi16(0x7f);
        let nan = _mm_cmpeq_epi16(_mm_and_si128(bytes, nan), nan);
        // The sign fills the bits above the magnitude.
        let bits = _mm_and_si128(_mm_slli_epi16::<7>(bytes), _mm_set1_epi16(0xbf80u16 as i16));
        let halves = _mm256_cvtph_ps(_mm_or_si128(bits, nan));
        _mm256_mul_ps(halves, _mm256_set1_ps(e4m3::OVER_F16))
    }
}

/// Rows that pass over all tokens before the next ones do: with 2048 columns of f16 their 128 KiB
/// stay in the second cache, and four tokens in the first. Passing two rows over 512 tokens
/// instead ran at a quarter of the speed, since the tokens (4 MiB) came from the third.
const ROWS: usize = 32;

/// # Safety
/// As [`Product`] says, on a processor with AVX2, FMA and F16C; W is the matrix's type.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::simd) unsafe fn matmul<W: Float>(product: Product) {
    let tokens = product.acts.tokens();
    // Four tokens at once.
    let fours = if by_eights(product) { tokens / 4 * 4 } else { 0 };
    // SAFETY: the caller's promises, of some rows and tokens.
    unsafe {
        if fours > 0 {
            for first in (0..product.rows).step_by(ROWS) {
                let rows = product.rows(first, ROWS.min(product.rows - first));
                (0..fours).step_by(4).for_each(|t| four_tokens::<W>(rows, t));
            }
        }
        (fours..tokens).for_each(|t| one_token::<W>(product, t));
    }
}

/// Whether rows and granules are whole vectors.
pub(in crate::simd) fn by_eights(product: Product) -> bool {
    let Product { mat, granule, .. } = product;
    mat.cols > 0 && mat.cols.is_multiple_of(8) && granule.is_multiple_of(8)
}

/// Tokens t to t + 3.
///
/// # Safety
/// As [`matmul`]; the tokens exist and columns are a multiple of eight.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn four_tokens<W: Float>(product: Product, t: usize) {
    let x = [0, 1, 2, 3].map(|i| product.acts.f32s(t + i));
    let pairs = product.rows / 2 * 2;
    // SAFETY: the caller's promises.
    unsafe {
        for r in (0..pairs).step_by(2) {
            tile::<W, 2, 4>(product, r, x, t);
        }
        for r in pairs..product.rows {
            tile::<W, 1, 4>(product, r, x, t);
        }
    }
}

/// # Safety
/// As [`matmul`]; token `t` exists.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn one_token<W: Float>(product: Product, t: usize) {
    let x = product.acts.f32s(t);
    let threes = if by_eights(product) { product.rows / 3 * 3 } else { 0 };
    // SAFETY: the caller's promises.
    unsafe {
        for r in (0..threes).step_by(3) {
            tile::<W, 3, 1>(product, r, [x], t);
        }
        for r in threes..product.rows {
            one_row::<W>(product, r, x, product.place(t, r));
        }
    }
}

/// Row r times `x`, to `out`.
///
/// # Safety
/// As [`matmul`]; the row exists, `x` has its columns.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn one_row<W: Float>(product: Product, r: usize, x: &[f32], out: *mut f32) {
    let mut adds = product.adds;
    for start in (0..x.len().max(1)).step_by(product.granule.max(1)) {
        let x = &x[start..x.len().min(start + product.granule)];
        // SAFETY: the caller's promises.
        unsafe {
            let dot = dot::<W>(product.row(r).add(start * W::BYTES), x);
            out.write(if adds { out.read() + dot } else { dot });
        }
        adds = true;
    }
}

/// Rows r to r + R times T tokens from `t` on. 2 × 4 has eight sums, as many as hide the latency of
/// an fma, and a load of weights serves four of them. 3 × 1 is for one token, whose weights come
/// from memory: the three rows after these are asked for in the order in which they lie, as a
/// processor follows one run of lines better than several. On an EPYC of family 25, model 17, F16,
/// one thread, of the 28 GB/s that a plain loop reads: 0.95 so, 0.9 by twos and fours, 0.7 without
/// requests, 0.57 with lines asked for four rows ahead of each row, 0.6 one row at a time.
///
/// # Safety
/// The rows and tokens exist; the tokens are `x`; rows and granules are whole vectors.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<W: Float, const R: usize, const T: usize>(
    product: Product,
    r: usize,
    x: [&[f32]; T],
    t: usize,
) {
    let x_at = x.map(|x| x.as_ptr());
    let (w, stride) = (product.row(r), product.mat.row_stride);
    let mut next = Next::new::<R>(product, r + R);
    for start in (0..x[0].len()).step_by(product.granule) {
        let mut lanes = [[_mm256_setzero_ps(); T]; R];
        for i in (start..x[0].len().min(start + product.granule)).step_by(8) {
            if T == 1 && i % 32 == 0 {
                next.ask_for(R * 32 * W::BYTES);
            }
            for (k, lanes) in lanes.iter_mut().enumerate() {
                // SAFETY: eight elements from i on exist in each row and token.
                unsafe {
                    let w = W::load8(w.add(k * stride + i * W::BYTES));
                    for t in 0..T {
                        lanes[t] = _mm256_fmadd_ps(_mm256_loadu_ps(x_at[t].add(i)), w, lanes[t]);
                    }
                }
            }
        }
        let adds = product.adds || start > 0;
        for (k, lanes) in lanes.into_iter().enumerate() {
            for (i, lanes) in lanes.into_iter().enumerate() {
                let (out, dot) = (product.place(t + i, r + k), tree8(lanes));
                // SAFETY: the caller's promise.
                unsafe { out.write(if adds { out.read() + dot } else { dot }) };
            }
        }
    }
}

/// Bytes that are asked for into the first cache; more would displace each other before they are
/// used. Best of 31 rounds, GB/s from the first cache and from the second: three rows of 1.5 KiB 26
/// and 20, of 4 KiB 29.5 and 31, of 8 KiB 15 and 27, where a plain loop reads 30 to 31.
const NEAR: usize = 8 << 10;

/// The bytes of the rows from one on, in order.
struct Next {
    at: *const u8,
    left: usize,
    row: usize,
    gap: usize,
    is_near: bool,
}

impl Next {
    /// From row `r` on, which may be behind the last, R of them.
    #[inline]
    fn new<const R: usize>(product: Product, r: usize) -> Self {
        let row = product.mat.row_bytes();
        let gap = product.mat.row_stride - row;
        Next { at: product.row(r), left: row, row, gap, is_near: R * row <= NEAR }
    }

    /// The next `n` bytes, or as many as the row has.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn ask_for(&mut self, n: usize) {
        match self.is_near {
            true => prefetch(self.at, n),
            false => prefetch_to_second(self.at, n),
        }
        self.at = self.at.wrapping_add(n);
        self.left = self.left.saturating_sub(n);
        if self.left == 0 {
            (self.at, self.left) = (self.at.wrapping_add(self.gap), self.row);
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
