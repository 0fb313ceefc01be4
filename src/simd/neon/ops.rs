//! Norm, activation, softmax and the vector loops of attention; the same steps as `scalar`.
//! A tail shorter than eight goes through a zero-padded buffer and the same vector code.

use super::convert::narrow;
use super::float::{F32, dot};
use super::lanes::F32x8;
use crate::simd::exp::{HIGHEST, LN2_HI, LN2_LO, LOG2_E, LOWEST, Q, ROUNDER};
use std::arch::aarch64::*;

/// See `simd::exp`. FMAX and FMIN let a NaN pass, as the steps there do.
#[inline]
#[target_feature(enable = "neon")]
fn exp4(x: float32x4_t) -> float32x4_t {
    let x = vmaxq_f32(x, vdupq_n_f32(LOWEST));
    let x = vminq_f32(x, vdupq_n_f32(HIGHEST));
    let rounder = vdupq_n_f32(ROUNDER);
    let shifted = vfmaq_f32(rounder, x, vdupq_n_f32(LOG2_E));
    let n = vsubq_f32(shifted, rounder);
    let r = vfmaq_f32(x, n, vdupq_n_f32(-LN2_HI));
    let r = vfmaq_f32(r, n, vdupq_n_f32(-LN2_LO));
    let mut q = vdupq_n_f32(Q[4]);
    for c in Q[..4].iter().rev() {
        q = vfmaq_f32(vdupq_n_f32(*c), q, r);
    }
    let p = vaddq_f32(vfmaq_f32(r, vmulq_f32(r, r), q), vdupq_n_f32(1.0));
    let n = vsubq_s32(vreinterpretq_s32_f32(shifted), vreinterpretq_s32_f32(rounder));
    let half = vshrq_n_s32::<1>(n);
    let power = |n| {
        let biased = vaddq_s32(n, vdupq_n_s32(127));
        vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
    };
    vmulq_f32(vmulq_f32(p, power(half)), power(vsubq_s32(n, half)))
}

#[inline]
#[target_feature(enable = "neon")]
pub(super) fn exp8(x: F32x8) -> F32x8 {
    F32x8(exp4(x.0), exp4(x.1))
}

#[inline]
#[target_feature(enable = "neon")]
fn one_plus_exp_of_minus(x: F32x8) -> F32x8 {
    F32x8::splat(1.0).add(exp8(x.neg()))
}

/// `x[i] = f(x[i])`.
#[inline]
#[target_feature(enable = "neon")]
fn map(x: &mut [f32], f: impl Fn(F32x8) -> F32x8) {
    let (whole, rest) = x.as_chunks_mut::<8>();
    for x in whole {
        *x = f(F32x8::from_array(x)).to_array();
    }
    if !rest.is_empty() {
        let mut x = [0f32; 8];
        x[..rest.len()].copy_from_slice(rest);
        rest.copy_from_slice(&f(F32x8::from_array(&x)).to_array()[..rest.len()]);
    }
}

/// `out[i] = f(x[i], y[i])`; all three of one length.
#[inline]
#[target_feature(enable = "neon")]
fn map2(x: &[f32], y: &[f32], out: &mut [f32], f: impl Fn(F32x8, F32x8) -> F32x8) {
    let (xs, x_rest) = x.as_chunks::<8>();
    let (ys, y_rest) = y.as_chunks::<8>();
    let (outs, out_rest) = out.as_chunks_mut::<8>();
    for ((x, y), o) in xs.iter().zip(ys).zip(outs) {
        *o = f(F32x8::from_array(x), F32x8::from_array(y)).to_array();
    }
    let n = out_rest.len();
    if n > 0 {
        let (mut x, mut y) = ([0f32; 8], [0f32; 8]);
        x[..n].copy_from_slice(x_rest);
        y[..n].copy_from_slice(y_rest);
        let o = f(F32x8::from_array(&x), F32x8::from_array(&y)).to_array();
        out_rest.copy_from_slice(&o[..n]);
    }
}

/// # Safety
/// The slices are of one length.
#[target_feature(enable = "neon")]
pub(super) unsafe fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // SAFETY: x is as long as itself.
    let squares = unsafe { dot::<F32>(x.as_ptr().cast(), x) };
    let scale = F32x8::splat(1.0 / (squares / x.len() as f32 + eps).sqrt());
    map2(x, weight, out, |x, w| x.mul(scale).mul(w));
}

#[target_feature(enable = "neon")]
pub(super) fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
    map2(gate, up, out, |g, u| g.div(one_plus_exp_of_minus(g)).mul(u));
}

#[target_feature(enable = "neon")]
pub(super) fn exp(x: &mut [f32]) {
    map(x, |x| exp8(x));
}

#[target_feature(enable = "neon")]
pub(super) fn sigmoid(x: &mut [f32]) {
    map(x, |x| F32x8::splat(1.0).div(one_plus_exp_of_minus(x)));
}

/// The largest of `max` and the values; a NaN never counts.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn largest(x: &[f32], max: f32) -> f32 {
    let (whole, rest) = x.as_chunks::<8>();
    let mut maxima = F32x8::splat(max);
    for x in whole {
        maxima = maxima.larger(F32x8::from_array(x));
    }
    maxima.to_array().iter().chain(rest).fold(max, |m, x| if *x > m { *x } else { m })
}

/// `x = e^(x − shift)`; returns the sum, in eight lanes and a tree.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn exp_and_sum(x: &mut [f32], shift: f32) -> f32 {
    let shift = F32x8::splat(shift);
    let mut lanes = F32x8::zero();
    let (whole, rest) = x.as_chunks_mut::<8>();
    for x in whole {
        let e = exp8(F32x8::from_array(x).sub(shift));
        *x = e.to_array();
        lanes = lanes.add(e);
    }
    if !rest.is_empty() {
        let mut e = [0f32; 8];
        e[..rest.len()].copy_from_slice(rest);
        e = exp8(F32x8::from_array(&e).sub(shift)).to_array();
        e[rest.len()..].fill(0.0);
        lanes = lanes.add(F32x8::from_array(&e));
        rest.copy_from_slice(&e[..rest.len()]);
    }
    lanes.tree()
}

#[target_feature(enable = "neon")]
pub(super) fn softmax(x: &mut [f32]) {
    let max = largest(x, f32::NEG_INFINITY);
    let inverse = F32x8::splat(1.0 / exp_and_sum(x, max));
    map(x, |x| x.mul(inverse));
}

/// One addition an element, which the compiler turns into vectors: NEON is always enabled.
#[target_feature(enable = "neon")]
pub(super) fn add(acc: &mut [f32], x: &[f32]) {
    acc.iter_mut().zip(x).for_each(|(acc, x)| *acc += x);
}

/// One fma an element, likewise.
#[target_feature(enable = "neon")]
pub(super) fn axpy(acc: &mut [f32], a: f32, x: &[f32]) {
    acc.iter_mut().zip(x).for_each(|(acc, x)| *acc = a.mul_add(*x, *acc));
}

/// One product an element, likewise.
#[target_feature(enable = "neon")]
pub(super) fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

/// Two products and a sum, likewise.
#[target_feature(enable = "neon")]
pub(super) fn blend(acc: &mut [f32], a: f32, x: &[f32], b: f32) {
    acc.iter_mut().zip(x).for_each(|(acc, x)| *acc = *acc * a + *x * b);
}

/// # Safety
/// The slices are of one length.
#[target_feature(enable = "neon")]
pub(super) unsafe fn dot_f32(x: &[f32], y: &[f32]) -> f32 {
    // SAFETY: one length.
    unsafe { dot::<F32>(y.as_ptr().cast(), x) }
}

#[target_feature(enable = "neon")]
pub(super) fn f32_to_f16(x: &[f32], out: &mut [u16]) {
    let (xs, x_rest) = x.as_chunks::<8>();
    let (outs, out_rest) = out.as_chunks_mut::<8>();
    for (x, o) in xs.iter().zip(outs) {
        // SAFETY: eight places.
        unsafe { vst1q_u16(o.as_mut_ptr(), narrow(F32x8::from_array(x))) };
    }
    for (x, o) in x_rest.iter().zip(out_rest) {
        *o = half::f16::from_f32(*x).to_bits();
    }
}
