//! Quantising activations; see `quant::q8_0` and `quant::q8_k` for what is computed.

use crate::quant::{q8_0, q8_k};
use std::arch::aarch64::*;

/// The largest magnitude, compared as integers (NaN is above infinity).
///
/// # Safety
/// `x` leads to `n` values, n a multiple of 8.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn largest_magnitude(x: *const f32, n: usize) -> f32 {
    let magnitude = vdupq_n_u32(0x7fff_ffff);
    let mut largest = [vdupq_n_u32(0); 2];
    for i in (0..n).step_by(8) {
        for (half, largest) in largest.iter_mut().enumerate() {
            // SAFETY: eight values from i on exist.
            let v = unsafe { vld1q_u32(x.add(i + 4 * half).cast()) };
            *largest = vmaxq_u32(*largest, vandq_u32(v, magnitude));
        }
    }
    f32::from_bits(vmaxvq_u32(vmaxq_u32(largest[0], largest[1])))
}

/// 16 values times `inverse`, rounded to the nearest, ties to even, as i8, and their sum.
///
/// # Safety
/// 16 values at `x` are readable, 16 bytes at `qs` writable. An `inverse` of 0 means zeros,
/// whatever x holds.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn round16(x: *const f32, inverse: f32, qs: *mut i8) -> i16 {
    if inverse == 0.0 {
        // SAFETY: the caller's promise.
        unsafe { qs.write_bytes(0, 16) };
        return 0;
    }
    // SAFETY: four times four values.
    let at = |i: usize| unsafe { vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x.add(4 * i)), inverse)) };
    let low = vqmovn_high_s32(vqmovn_s32(at(0)), at(1));
    let high = vqmovn_high_s32(vqmovn_s32(at(2)), at(3));
    let bytes = vqmovn_high_s16(vqmovn_s16(low), high);
    // SAFETY: 16 bytes, the caller's promise.
    unsafe { vst1q_s8(qs, bytes) };
    vaddlvq_s8(bytes)
}

/// # Safety
/// `qs` is as long as `x`, `scales` and `sums32` have one place for each 32 values.
#[target_feature(enable = "neon")]
pub(super) unsafe fn quantize_q8_0(
    x: &[f32],
    qs: &mut [i8],
    scales: &mut [f32],
    sums32: &mut [i16],
) {
    for b in 0..x.len() / 32 {
        // SAFETY: block b lies within both slices.
        unsafe {
            let (x, qs) = (x.as_ptr().add(32 * b), qs.as_mut_ptr().add(32 * b));
            let (scale, inverse) = q8_0::activation_scale(largest_magnitude(x, 32));
            scales[b] = scale;
            sums32[b] = round16(x, inverse, qs) + round16(x.add(16), inverse, qs.add(16));
        }
    }
}

/// # Safety
/// `qs` is as long as `x`, the other slices have one place for each 256, 32 and 16 values.
#[target_feature(enable = "neon")]
pub(super) unsafe fn quantize_q8_k(
    x: &[f32],
    qs: &mut [i8],
    scales: &mut [f32],
    sums32: &mut [i16],
    sums16: &mut [i16],
) {
    for b in 0..x.len() / 256 {
        // SAFETY: block b lies within both slices.
        unsafe {
            let (x, qs) = (x.as_ptr().add(256 * b), qs.as_mut_ptr().add(256 * b));
            let (scale, inverse) = q8_k::activation_scale(largest_magnitude(x, 256));
            scales[b] = scale;
            for j in 0..16 {
                sums16[16 * b + j] = round16(x.add(16 * j), inverse, qs.add(16 * j));
            }
        }
        let pairs = sums16[16 * b..][..16].as_chunks::<2>().0;
        for (sum, pair) in sums32[8 * b..][..8].iter_mut().zip(pairs) {
            *sum = pair[0] + pair[1];
        }
    }
}
