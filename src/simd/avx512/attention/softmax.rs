//! A step of the online softmax, up to eight rows at a time: one row's maximum, exponentials and
//! sum wait for each other.

use super::{first, trees};
use crate::simd::avx2::reduce::trees8;
use crate::simd::exp::{HIGHEST, LN2_HI, LN2_LO, LOG2_E, LOWEST, Q, ROUNDER};
use crate::simd::tile::{SoftmaxStep, TileMut};
use std::arch::x86_64::*;

/// `x = e^x`, of any x.
///
/// # Safety
/// The processor has AVX-512 F.
#[target_feature(enable = "avx512f")]
pub(in crate::simd::avx512) unsafe fn exp(x: &mut [f32]) {
    for x in x.chunks_mut(16) {
        // SAFETY: as many values as the chunk has.
        unsafe {
            let bounded = _mm512_min_ps(_mm512_set1_ps(HIGHEST), load(x.as_ptr(), x.len()));
            store(x.as_mut_ptr(), x.len(), exp16(bounded));
        }
    }
}

/// # Safety
/// As [`crate::simd::Kernels::tile_softmax`] checks, on a processor with this module's features.
#[target_feature(enable = "avx2,fma,avx512f,avx512dq")]
pub(in crate::simd::avx512) unsafe fn tile_softmax(
    mut x: TileMut,
    scale: f32,
    steps: &mut [SoftmaxStep],
) {
    let (n, stride, mut x) = (x.dim(), x.stride(), x.as_mut_ptr());
    let mut steps = steps;
    while !steps.is_empty() {
        let rows = match steps.len() {
            8.. => 8,
            4.. => 4,
            2.. => 2,
            _ => 1,
        };
        let (some, rest) = steps.split_at_mut(rows);
        // SAFETY: as many rows of n are left as `steps`.
        unsafe {
            match rows {
                8 => step::<8>(x, n, stride, scale, some),
                4 => step::<4>(x, n, stride, scale, some),
                2 => step::<2>(x, n, stride, scale, some),
                _ => step::<1>(x, n, stride, scale, some),
            }
        }
        x = x.wrapping_add(rows * stride);
        steps = rest;
    }
}

/// # Safety
/// `x` leads to R rows of `n`, `stride` apart; there are R steps.
#[inline]
#[target_feature(enable = "avx2,fma,avx512f,avx512dq")]
unsafe fn step<const R: usize>(
    x: *mut f32,
    n: usize,
    stride: usize,
    scale: f32,
    steps: &mut [SoftmaxStep],
) {
    let minus_infinity = _mm512_set1_ps(f32::NEG_INFINITY);
    let scale = _mm512_set1_ps(scale);
    let mut former = [f32::NEG_INFINITY; 16];
    former.iter_mut().zip(&*steps).for_each(|(former, step)| *former = step.max);
    let mut maxima = [minus_infinity; 8];
    for i in (0..n).step_by(16) {
        for a in 0..R {
            let (at, left) = (x.wrapping_add(a * stride + i), n - i);
            // SAFETY: the row has `left` values from i on. The order of the operands keeps the
            // maximum where x is NaN.
            unsafe {
                let scaled = _mm512_mul_ps(load(at, left), scale);
                store(at, left, scaled);
                maxima[a] = match left {
                    16.. => _mm512_max_ps(scaled, maxima[a]),
                    _ => _mm512_mask_max_ps(maxima[a], first(left), scaled, maxima[a]),
                };
            }
        }
    }
    let halves = trees(maxima, |a, b| _mm512_max_ps(a, b));
    let mut shifts = [0f32; 16];
    let mut factors = [0f32; 16];
    let mut larger = [0f32; 16];
    // SAFETY: sixteen values each.
    unsafe {
        let former = _mm512_loadu_ps(former.as_ptr());
        let new = _mm512_max_ps(by_row(halves), former);
        let none = _mm512_cmpeq_ps_mask(new, minus_infinity);
        let shift = _mm512_mask_mov_ps(new, none, _mm512_setzero_ps());
        _mm512_storeu_ps(larger.as_mut_ptr(), new);
        _mm512_storeu_ps(shifts.as_mut_ptr(), shift);
        // Lanes that are no row's are 0 and cost nothing.
        let below = _mm512_maskz_sub_ps(first(R), former, shift);
        _mm512_storeu_ps(factors.as_mut_ptr(), exp16(below));
    }
    let mut lanes = [_mm256_setzero_ps(); 8];
    for i in (0..n).step_by(16) {
        for a in 0..R {
            let (at, left) = (x.wrapping_add(a * stride + i), n - i);
            // SAFETY: as above.
            unsafe {
                let mut e = exp16(_mm512_sub_ps(load(at, left), _mm512_set1_ps(shifts[a])));
                store(at, left, e);
                if left < 16 {
                    e = _mm512_maskz_mov_ps(first(left), e);
                }
                lanes[a] = _mm256_add_ps(lanes[a], _mm512_castps512_ps256(e));
                lanes[a] = _mm256_add_ps(lanes[a], _mm512_extractf32x8_ps::<1>(e));
            }
        }
    }
    let mut sums = [0f32; 8];
    // SAFETY: eight places.
    unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), trees8(lanes)) };
    for (a, step) in steps.iter_mut().enumerate() {
        *step = SoftmaxStep { max: larger[a], factor: factors[a], sum: sums[a] };
    }
}

/// The first `left` of sixteen values, or all. Masks only where they are needed: what a masked
/// store leaves a load waits for until it is in the cache.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(at: *const f32, left: usize) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        match left {
            16.. => _mm512_loadu_ps(at),
            _ => _mm512_maskz_loadu_ps(first(left), at),
        }
    }
}

/// # Safety
/// As `load`, to write.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(at: *mut f32, left: usize, x: __m512) {
    // SAFETY: the caller's promise.
    unsafe {
        match left {
            16.. => _mm512_storeu_ps(at, x),
            _ => _mm512_mask_storeu_ps(at, first(left), x),
        }
    }
}

/// The larger of each vector's two maxima, from the result of `trees` for eight vectors.
#[inline]
#[target_feature(enable = "avx512f")]
fn by_row(halves: __m512) -> __m512 {
    let first = _mm512_shuffle_f32x4::<0b10_00_10_00>(halves, halves);
    _mm512_max_ps(first, _mm512_shuffle_f32x4::<0b11_01_11_01>(halves, halves))
}

/// See `simd::exp`, whose bits these are: `scalef` rounds p·2ⁿ once, as the product with two powers
/// of two does; x is at most `HIGHEST` or NaN, as are scores less the largest; e^x of `LOWEST` and
/// less is 0, and set so: a result that underflows costs more than a hundred cycles.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp16(x: __m512) -> __m512 {
    let rounder = _mm512_set1_ps(ROUNDER);
    let shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(LOG2_E), rounder);
    let n = _mm512_sub_ps(shifted, rounder);
    let r = _mm512_fmadd_ps(n, _mm512_set1_ps(-LN2_HI), x);
    let r = _mm512_fmadd_ps(n, _mm512_set1_ps(-LN2_LO), r);
    let mut q = _mm512_set1_ps(Q[4]);
    for c in Q[..4].iter().rev() {
        q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(*c));
    }
    let p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), q, r);
    let p = _mm512_add_ps(p, _mm512_set1_ps(1.0));
    let some = _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(x, _mm512_set1_ps(LOWEST));
    _mm512_maskz_scalef_ps(some, p, n)
}
