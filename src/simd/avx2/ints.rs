//! The exact integers of one block times one activation block, still spread over the lanes of a
//! vector: [`crate::quant::Block::int_dot`] before its horizontal sum.
//!
//! `maddubs` multiplies u8 by i8 and adds neighbours to i16; with activations in ±127 no format
//! saturates it (the largest is Q8_0: 128·127·2 = 32512). `madd` multiplies the i16 by the
//! sub-block's scale and adds neighbours to i32.

use crate::quant::{BlockQ4_0, BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0, IntBlock, Over, Stored};
use half::f16;
use std::arch::x86_64::*;

/// One activation block: values, and the sums that the format's `SUMS` asks for.
#[derive(Clone, Copy)]
pub(in crate::simd) struct ActBlock {
    pub qs: *const i8,
    pub sums: *const i16,
}

pub(in crate::simd) trait Ints: IntBlock<Stored: Scale> {
    /// Elements an activation sum that the format needs (16 or 32).
    const SUMS: usize;

    /// Eight int32 that add up to `isum`.
    ///
    /// # Safety
    /// The pointers lead to a whole block each; the processor has AVX2.
    unsafe fn isum(w: *const Self, a: ActBlock) -> __m256i;

    /// Four int32 that add up to `imins`; called for formats with mins only.
    ///
    /// # Safety
    /// As `isum`.
    unsafe fn imins(_w: *const Self, _a: ActBlock) -> __m128i {
        unreachable!("a format without mins")
    }
}

/// Scales that become f32 eight at a time.
pub(in crate::simd) trait Scale: Stored {
    /// # Safety
    /// The processor has AVX2 and F16C.
    unsafe fn eight(v: [Self; 8]) -> __m256;
}

impl Scale for f16 {
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn eight(v: [f16; 8]) -> __m256 {
        let h = v.map(|h| h.to_bits() as i16);
        _mm256_cvtph_ps(_mm_setr_epi16(h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]))
    }
}

impl Scale for f32 {
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn eight(v: [f32; 8]) -> __m256 {
        _mm256_setr_ps(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7])
    }
}

impl<const N: u32> Scale for Over<N> {
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn eight(v: [Self; 8]) -> __m256 {
        // SAFETY: AVX2 and F16C, the caller's promise.
        let d = unsafe { f16::eight(v.map(|h| h.0)) };
        _mm256_mul_ps(d, _mm256_set1_ps(1.0 / N as f32))
    }
}

/// # Safety
/// 32 bytes at `p` are readable.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load<T>(p: *const T) -> __m256i {
    // SAFETY: the caller's promise; the load takes any alignment.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

/// # Safety
/// 16 bytes at `p` are readable.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load_half<T>(p: *const T) -> __m128i {
    // SAFETY: the caller's promise; the load takes any alignment.
    unsafe { _mm_loadu_si128(p.cast()) }
}

/// i8 times i8: the sign of w moves to a.
#[inline]
#[target_feature(enable = "avx2")]
fn signed_pairs(w: __m256i, a: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
    _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
}

impl Ints for BlockQ8_0 {
    const SUMS: usize = 32;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn isum(w: *const Self, a: ActBlock) -> __m256i {
        // SAFETY: both blocks hold 32 bytes of values.
        unsafe { signed_pairs(load(&raw const (*w).qs), load(a.qs)) }
    }
}

impl Ints for BlockQ4_0 {
    const SUMS: usize = 32;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn isum(w: *const Self, a: ActBlock) -> __m256i {
        // SAFETY: 16 bytes of codes, 32 of activations.
        unsafe {
            let codes = load_half(&raw const (*w).qs);
            let codes = _mm256_set_m128i(_mm_srli_epi16::<4>(codes), codes);
            let codes = _mm256_and_si256(codes, _mm256_set1_epi8(15));
            signed_pairs(_mm256_sub_epi8(codes, _mm256_set1_epi8(8)), load(a.qs))
        }
    }
}

/// The 12 packed bytes of Q4_K and Q5_K as 16 i16: scales in the low half, mins in the high.
/// `block` leads to d and dmin, 4 bytes, behind which the packed bytes are (see `k_scales`).
/// Eight vector instructions; with scalar shifts and masks the Q4_K loop was 15 % slower.
///
/// # Safety
/// 16 bytes at `block` are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn scales_and_mins<B>(block: *const B) -> __m256i {
    // SAFETY: the caller's promise.
    let bytes = unsafe { load_half(block) };
    // Words a, c, b, c of the packed three; then those with the top bits: none, a, none, b.
    let low = _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    let top = _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11);
    let low = _mm_srlv_epi32(_mm_shuffle_epi8(bytes, low), _mm_setr_epi32(0, 0, 0, 4));
    let (six, four) = (0x3f3f_3f3f, 0x0f0f_0f0f);
    let low = _mm_and_si128(low, _mm_setr_epi32(six, four, six, four));
    let top = _mm_srli_epi16::<2>(_mm_shuffle_epi8(bytes, top));
    let top = _mm_and_si128(top, _mm_set1_epi8(0x30));
    _mm256_cvtepu8_epi16(_mm_or_si128(low, top))
}

/// Scale j of the eight in each half of `scales`, in every i16.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn spread(scales: __m256i, j: usize) -> __m256i {
    let bytes = (2 * j + 256 * (2 * j + 1)) as i16;
    _mm256_shuffle_epi8(scales, _mm256_set1_epi16(bytes))
}

/// The four products m_j·sum_j by pairs.
///
/// # Safety
/// Eight sums are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn mins_times_sums(scales: __m256i, sums32: *const i16) -> __m128i {
    // SAFETY: eight i16, the caller's promise.
    let sums = unsafe { load_half(sums32) };
    _mm_madd_epi16(_mm256_extracti128_si256::<1>(scales), sums)
}

impl Ints for BlockQ4K {
    const SUMS: usize = 32;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn isum(w: *const Self, a: ActBlock) -> __m256i {
        // SAFETY: 4 × 32 bytes of codes and 8 × 32 of activations.
        unsafe {
            let scales = scales_and_mins(w);
            let scales = _mm256_permute2x128_si256::<0>(scales, scales);
            let codes: *const u8 = (&raw const (*w).qs).cast();
            let nibble = _mm256_set1_epi8(15);
            let mut sum = _mm256_setzero_si256();
            for c in 0..4 {
                let both = load(codes.add(32 * c));
                let low = _mm256_and_si256(both, nibble);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble);
                let low = _mm256_maddubs_epi16(low, load(a.qs.add(64 * c)));
                let high = _mm256_maddubs_epi16(high, load(a.qs.add(64 * c + 32)));
                let low = _mm256_madd_epi16(low, spread(scales, 2 * c));
                let high = _mm256_madd_epi16(high, spread(scales, 2 * c + 1));
                sum = _mm256_add_epi32(sum, _mm256_add_epi32(low, high));
            }
            sum
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn imins(w: *const Self, a: ActBlock) -> __m128i {
        // SAFETY: the caller's promises.
        unsafe { mins_times_sums(scales_and_mins(w), a.sums) }
    }
}

impl Ints for BlockQ5K {
    const SUMS: usize = 32;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn isum(w: *const Self, a: ActBlock) -> __m256i {
        // SAFETY: 4 × 32 bytes of codes, 32 of top bits and 8 × 32 of activations.
        unsafe {
            let scales = scales_and_mins(w);
            let scales = _mm256_permute2x128_si256::<0>(scales, scales);
            let codes: *const u8 = (&raw const (*w).qs).cast();
            let mut top = load(&raw const (*w).qh);
            let (nibble, one) = (_mm256_set1_epi8(15), _mm256_set1_epi8(1));
            let mut sum = _mm256_setzero_si256();
            for c in 0..4 {
                let both = load(codes.add(32 * c));
                let low = _mm256_and_si256(both, nibble);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble);
                // Bits 2c and 2c + 1 have been shifted down to bits 0 and 1.
                let low_top = _mm256_slli_epi16::<4>(_mm256_and_si256(top, one));
                let high_top = _mm256_and_si256(_mm256_srli_epi16::<1>(top), one);
                let high_top = _mm256_slli_epi16::<4>(high_top);
                top = _mm256_srli_epi16::<2>(top);
                let low = _mm256_or_si256(low, low_top);
                let high = _mm256_or_si256(high, high_top);
                let low = _mm256_maddubs_epi16(low, load(a.qs.add(64 * c)));
                let high = _mm256_maddubs_epi16(high, load(a.qs.add(64 * c + 32)));
                let low = _mm256_madd_epi16(low, spread(scales, 2 * c));
                let high = _mm256_madd_epi16(high, spread(scales, 2 * c + 1));
                sum = _mm256_add_epi32(sum, _mm256_add_epi32(low, high));
            }
            sum
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn imins(w: *const Self, a: ActBlock) -> __m128i {
        // SAFETY: the caller's promises.
        unsafe { mins_times_sums(scales_and_mins(w), a.sums) }
    }
}

impl Ints for BlockQ6K {
    const SUMS: usize = 16;

    /// The codes are taken as 0 to 63 and `32·Σ sc_j·sum_j` is subtracted: exact either way.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn isum(w: *const Self, a: ActBlock) -> __m256i {
        // SAFETY: 4 × 32 low bytes, 2 × 32 high bytes, 16 scales, 256 activations, 16 sums.
        unsafe {
            let scales8 = load_half(&raw const (*w).scales);
            let scales16 = _mm256_cvtepi8_epi16(scales8);
            let offset = _mm256_madd_epi16(scales16, load(a.sums));
            let mut sum = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32::<5>(offset));
            let (nibble, two_bits) = (_mm256_set1_epi8(15), _mm256_set1_epi8(3));
            for half in 0..2 {
                let low: *const u8 = (&raw const (*w).ql).cast::<u8>().add(64 * half);
                let (low0, low1) = (load(low), load(low.add(32)));
                let top = load((&raw const (*w).qh).cast::<u8>().add(32 * half));
                let with_top = |low: __m256i, top: __m256i| {
                    let top = _mm256_slli_epi16::<4>(_mm256_and_si256(top, two_bits));
                    _mm256_or_si256(_mm256_and_si256(low, nibble), top)
                };
                let codes = [
                    with_top(low0, top),
                    with_top(low1, _mm256_srli_epi16::<2>(top)),
                    with_top(_mm256_srli_epi16::<4>(low0), _mm256_srli_epi16::<4>(top)),
                    with_top(_mm256_srli_epi16::<4>(low1), _mm256_srli_epi16::<6>(top)),
                ];
                for (g, codes) in codes.into_iter().enumerate() {
                    let group = 4 * half + g;
                    let pairs = _mm256_maddubs_epi16(codes, load(a.qs.add(32 * group)));
                    // Scale 2·group for the low 16 bytes, the next for the high ones.
                    let two = _mm_shuffle_epi8(scales8, pair_mask(group));
                    let scales = _mm256_cvtepi8_epi16(two);
                    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scales));
                }
            }
            sum
        }
    }
}

/// Byte 2·group eight times, then byte 2·group + 1 eight times.
#[inline]
#[target_feature(enable = "avx2")]
fn pair_mask(group: usize) -> __m128i {
    let first = 0x0101_0101_0101_0101 * (2 * group as i64);
    _mm_set_epi64x(first + 0x0101_0101_0101_0101, first)
}
