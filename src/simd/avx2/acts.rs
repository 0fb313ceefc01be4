//! Quantising activations; see `quant::q8_0` and `quant::q8_k` for what is computed.

use crate::quant::{q8_0, q8_k};
use std::arch::x86_64::*;

/// The largest of eight non-negative floats, compared as integers (NaN is above infinity).
#[inline]
#[target_feature(enable = "avx2")]
fn largest_of(bits: __m256i) -> f32 {
    let m = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits));
    let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
    let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m));
    f32::from_bits(_mm_cvtsi128_si32(m) as u32)
}

/// # Safety
/// `x` leads to `n` values, n a multiple of 8; the processor has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn largest_magnitude(x: *const f32, n: usize) -> f32 {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    let mut largest = _mm256_setzero_si256();
    for i in (0..n).step_by(8) {
        // SAFETY: eight values from i on exist.
        let v = unsafe { _mm256_loadu_si256(x.add(i).cast()) };
        largest = _mm256_max_epi32(largest, _mm256_and_si256(v, magnitude));
    }
    largest_of(largest)
}

/// 32 values times `inverse`, rounded, as 32 i8 and their two sums by 16.
///
/// # Safety
/// 32 values at `x` are readable, 32 bytes at `qs` writable; the processor has AVX2. An `inverse`
/// of 0 means zeros, whatever x holds.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn round32(x: *const f32, inverse: f32, qs: *mut i8) -> (i16, i16) {
    if inverse == 0.0 {
        // SAFETY: the caller's promise.
        unsafe { qs.write_bytes(0, 32) };
        return (0, 0);
    }
    let inverse = _mm256_set1_ps(inverse);
    // SAFETY: four times eight values.
    let at = |i: usize| unsafe {
        _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x.add(8 * i)), inverse))
    };
    // The packs work within 128-bit halves, so the eight groups of four come out in the order
    // 0 2 4 6 1 3 5 7, and the permutation puts them right.
    let low = _mm256_packs_epi32(at(0), at(1));
    let high = _mm256_packs_epi32(at(2), at(3));
    let bytes = _mm256_packs_epi16(low, high);
    let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: 32 bytes, the caller's promise.
    unsafe { _mm256_storeu_si256(qs.cast(), bytes) };
    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    let twos = _mm256_add_epi32(fours, _mm256_shuffle_epi32::<0b01_00_11_10>(fours));
    let ones = _mm256_add_epi32(twos, _mm256_shuffle_epi32::<0b10_11_00_01>(twos));
    let first = _mm_cvtsi128_si32(_mm256_castsi256_si128(ones)) as i16;
    (first, _mm_cvtsi128_si32(_mm256_extracti128_si256::<1>(ones)) as i16)
}

/// # Safety
/// The processor has AVX2; `qs` is as long as `x`, `scales` and `sums32` have one place for each
/// 32 values.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn quantize_q8_0(
    x: &[f32],
    qs: &mut [i8],
    scales: &mut [f32],
    sums32: &mut [i16],
) {
    for b in 0..x.len() / 32 {
        // SAFETY: block b lies within both slices.
        unsafe {
            let x = x.as_ptr().add(32 * b);
            let (scale, inverse) = q8_0::activation_scale(largest_magnitude(x, 32));
            let (first, second) = round32(x, inverse, qs.as_mut_ptr().add(32 * b));
            (scales[b], sums32[b]) = (scale, first + second);
        }
    }
}

/// # Safety
/// The processor has AVX2; `qs` is as long as `x`, the other slices have one place for each 256,
/// 32 and 16 values.
#[target_feature(enable = "avx2")]
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
            let x = x.as_ptr().add(256 * b);
            let qs = qs.as_mut_ptr().add(256 * b);
            let (scale, inverse) = q8_k::activation_scale(largest_magnitude(x, 256));
            scales[b] = scale;
            for j in 0..8 {
                let (first, second) = round32(x.add(32 * j), inverse, qs.add(32 * j));
                let at = 8 * b + j;
                (sums16[2 * at], sums16[2 * at + 1]) = (first, second);
                sums32[at] = first + second;
            }
        }
    }
}
