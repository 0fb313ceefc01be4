//! Norm, activation, softmax and the vector loops of attention; the same steps as `scalar`.
//! A tail shorter than eight goes through a zero-padded buffer and the same vector code.

use super::float::{F32, dot};
use super::reduce::tree8;
use crate::simd::exp::{HIGHEST, LN2_HI, LN2_LO, LOG2_E, LOWEST, Q, ROUNDER};
use std::arch::x86_64::*;

/// See `simd::exp`.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn exp8(x: __m256) -> __m256 {
    let x = _mm256_max_ps(_mm256_set1_ps(LOWEST), x);
    let x = _mm256_min_ps(_mm256_set1_ps(HIGHEST), x);
    let rounder = _mm256_set1_ps(ROUNDER);
    let shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(LOG2_E), rounder);
    let n = _mm256_sub_ps(shifted, rounder);
    let r = _mm256_fmadd_ps(n, _mm256_set1_ps(-LN2_HI), x);
    let r = _mm256_fmadd_ps(n, _mm256_set1_ps(-LN2_LO), r);
    let mut q = _mm256_set1_ps(Q[4]);
    for c in Q[..4].iter().rev() {
        q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(*c));
    }
    let p = _mm256_fmadd_ps(_mm256_mul_ps(r, r), q, r);
    let p = _mm256_add_ps(p, _mm256_set1_ps(1.0));
    let n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(rounder));
    let half = _mm256_srai_epi32::<1>(n);
    let power = |n| {
        let biased = _mm256_add_epi32(n, _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    };
    _mm256_mul_ps(_mm256_mul_ps(p, power(half)), power(_mm256_sub_epi32(n, half)))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn one_plus_exp_of_minus(x: __m256) -> __m256 {
    let minus = _mm256_xor_ps(x, _mm256_set1_ps(-0.0));
    _mm256_add_ps(_mm256_set1_ps(1.0), exp8(minus))
}

/// `x[i] = f(x[i])`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn map(x: &mut [f32], f: impl Fn(__m256) -> __m256) {
    let (whole, rest) = x.as_chunks_mut::<8>();
    for x in whole {
        // SAFETY: eight values.
        unsafe { _mm256_storeu_ps(x.as_mut_ptr(), f(_mm256_loadu_ps(x.as_ptr()))) };
    }
    if !rest.is_empty() {
        let mut x = [0f32; 8];
        x[..rest.len()].copy_from_slice(rest);
        // SAFETY: eight values.
        unsafe { _mm256_storeu_ps(x.as_mut_ptr(), f(_mm256_loadu_ps(x.as_ptr()))) };
        rest.copy_from_slice(&x[..rest.len()]);
    }
}

/// `out[i] = f(x[i], y[i])`; all three of one length.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn map2(x: &[f32], y: &[f32], out: &mut [f32], f: impl Fn(__m256, __m256) -> __m256) {
    let (xs, x_rest) = x.as_chunks::<8>();
    let (ys, y_rest) = y.as_chunks::<8>();
    let (outs, out_rest) = out.as_chunks_mut::<8>();
    for ((x, y), o) in xs.iter().zip(ys).zip(outs) {
        // SAFETY: eight values each.
        unsafe {
            let v = f(_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(y.as_ptr()));
            _mm256_storeu_ps(o.as_mut_ptr(), v);
        }
    }
    let n = out_rest.len();
    if n > 0 {
        let (mut x, mut y, mut o) = ([0f32; 8], [0f32; 8], [0f32; 8]);
        x[..n].copy_from_slice(x_rest);
        y[..n].copy_from_slice(y_rest);
        // SAFETY: eight values each.
        unsafe {
            let v = f(_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(y.as_ptr()));
            _mm256_storeu_ps(o.as_mut_ptr(), v);
        }
        out_rest.copy_from_slice(&o[..n]);
    }
}

/// # Safety
/// The processor has AVX2, FMA and F16C; the slices are of one length.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // SAFETY: x is as long as itself.
    let squares = unsafe { dot::<F32>(x.as_ptr().cast(), x) };
    let scale = _mm256_set1_ps(1.0 / (squares / x.len() as f32 + eps).sqrt());
    map2(x, weight, out, |x, w| _mm256_mul_ps(_mm256_mul_ps(x, scale), w));
}

/// # Safety
/// The processor has AVX2 and FMA; the slices are of one length.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
    map2(gate, up, out, |g, u| _mm256_mul_ps(_mm256_div_ps(g, one_plus_exp_of_minus(g)), u));
}

/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn exp(x: &mut [f32]) {
    map(x, |x| exp8(x));
}

/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn sigmoid(x: &mut [f32]) {
    map(x, |x| _mm256_div_ps(_mm256_set1_ps(1.0), one_plus_exp_of_minus(x)));
}

/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn softmax(x: &mut [f32]) {
    let mut max = f32::NEG_INFINITY;
    let (whole, rest) = x.as_chunks::<8>();
    let mut maxima = _mm256_set1_ps(max);
    for x in whole {
        // SAFETY: eight values. The operand order keeps the maximum where x is NaN.
        maxima = unsafe { _mm256_max_ps(_mm256_loadu_ps(x.as_ptr()), maxima) };
    }
    let mut eight = [0f32; 8];
    // SAFETY: eight places.
    unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), maxima) };
    for x in eight.iter().chain(rest) {
        max = if *x > max { *x } else { max };
    }
    let max = _mm256_set1_ps(max);
    let mut lanes = _mm256_setzero_ps();
    let (whole, rest) = x.as_chunks_mut::<8>();
    for x in whole {
        // SAFETY: eight values.
        unsafe {
            let e = exp8(_mm256_sub_ps(_mm256_loadu_ps(x.as_ptr()), max));
            _mm256_storeu_ps(x.as_mut_ptr(), e);
            lanes = _mm256_add_ps(lanes, e);
        }
    }
    if !rest.is_empty() {
        let mut e = [0f32; 8];
        e[..rest.len()].copy_from_slice(rest);
        // SAFETY: eight values; those behind the rest are set to 0 before they are summed.
        unsafe {
            let v = exp8(_mm256_sub_ps(_mm256_loadu_ps(e.as_ptr()), max));
            _mm256_storeu_ps(e.as_mut_ptr(), v);
            e[rest.len()..].fill(0.0);
            lanes = _mm256_add_ps(lanes, _mm256_loadu_ps(e.as_ptr()));
        }
        rest.copy_from_slice(&e[..rest.len()]);
    }
    let inverse = _mm256_set1_ps(1.0 / tree8(lanes));
    map(x, |x| _mm256_mul_ps(x, inverse));
}

/// # Safety
/// The processor has AVX2; the slices are of one length.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn add(acc: &mut [f32], x: &[f32]) {
    acc.iter_mut().zip(x).for_each(|(acc, x)| *acc += x);
}

/// # Safety
/// The processor has AVX2 and FMA; the slices are of one length.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn axpy(acc: &mut [f32], a: f32, x: &[f32]) {
    // One fma an element, which the compiler turns into vectors here, where FMA is enabled.
    acc.iter_mut().zip(x).for_each(|(acc, x)| *acc = a.mul_add(*x, *acc));
}

/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

/// # Safety
/// The processor has AVX2; the slices are of one length.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn blend(acc: &mut [f32], a: f32, x: &[f32], b: f32) {
    acc.iter_mut().zip(x).for_each(|(acc, x)| *acc = *acc * a + *x * b);
}

/// # Safety
/// The processor has AVX2, FMA and F16C; the slices are of one length.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn dot_f32(x: &[f32], y: &[f32]) -> f32 {
    // SAFETY: one length.
    unsafe { dot::<F32>(y.as_ptr().cast(), x) }
}

/// # Safety
/// The processor has AVX2 and F16C; the slices are of one length.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn f32_to_f16(x: &[f32], out: &mut [u16]) {
    let (xs, x_rest) = x.as_chunks::<8>();
    let (outs, out_rest) = out.as_chunks_mut::<8>();
    for (x, o) in xs.iter().zip(outs) {
        // SAFETY: eight values each.
        unsafe {
            let h = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(x.as_ptr()));
            _mm_storeu_si128(o.as_mut_ptr().cast(), h);
        }
    }
    for (x, o) in x_rest.iter().zip(out_rest) {
        *o = half::f16::from_f32(*x).to_bits();
    }
}
