//! Eight vectors of eight int32 to the vector of their eight sums, and the like.

use std::arch::x86_64::*;

/// Lane i is the sum of the lanes of `v[i]`. Seven `hadd` and two lane swaps: 23 micro-ops for
/// eight blocks.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn sum8(v: [__m256i; 8]) -> __m256i {
    let a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    let b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    let low = _mm256_permute2x128_si256::<0x20>(a, b);
    let high = _mm256_permute2x128_si256::<0x31>(a, b);
    _mm256_add_epi32(low, high)
}

/// Lane i is the sum of the four lanes of `v[i]`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn sum8_halves(v: [__m128i; 8]) -> __m256i {
    let pair = |i: usize| _mm256_set_m128i(v[i + 4], v[i]);
    _mm256_hadd_epi32(_mm256_hadd_epi32(pair(0), pair(1)), _mm256_hadd_epi32(pair(2), pair(3)))
}

/// The tree of "One arithmetic".
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::simd) fn tree8(v: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// Lane i is the [`tree8`] of lane i of each vector.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn tree_of_lanes(v: [__m256; 8]) -> __m256 {
    let four = |i: usize| _mm256_add_ps(v[i], v[i + 4]);
    _mm256_add_ps(_mm256_add_ps(four(0), four(2)), _mm256_add_ps(four(1), four(3)))
}

/// Lane i is the [`tree8`] of `v[i]`: 14 shuffles and 7 additions for eight.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::simd) fn trees8(v: [__m256; 8]) -> __m256 {
    let fours = |a, b| {
        let (low, high) =
            (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
        _mm256_add_ps(low, high)
    };
    let twos = |a, b| {
        let low = _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
        _mm256_add_ps(low, _mm256_shuffle_ps::<0b11_10_11_10>(a, b))
    };
    let ones = |a, b| {
        let even = _mm256_shuffle_ps::<0b10_00_10_00>(a, b);
        _mm256_add_ps(even, _mm256_shuffle_ps::<0b11_01_11_01>(a, b))
    };
    let low = twos(fours(v[0], v[4]), fours(v[1], v[5]));
    ones(low, twos(fours(v[2], v[6]), fours(v[3], v[7])))
}
