//! The codes, integer scales and mins of the formats of 256 values without kernels of their own.

use super::decode_32::{look_up, nibbles};
use super::decoded::{Decode, Wide};
use super::ints::{load, load_half};
use crate::quant::{BlockIQ4XS, BlockQ2K, BlockQ3K, BlockTQ1_0, BlockTQ2_0, iq4_nl};
use std::arch::x86_64::*;

/// Group j of codes of two bits at `qs`, see `quant::packing::two_bits`.
///
/// # Safety
/// 64 bytes at `qs` are readable and j is below 8; the processor has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn two_bits(qs: *const [u8; 64], j: usize) -> __m256i {
    // SAFETY: the caller's promise.
    let four = unsafe { load(qs.cast::<u8>().add(32 * (j / 4))) };
    let shifted = _mm256_srl_epi16(four, _mm_cvtsi32_si128(2 * (j % 4) as i32));
    _mm256_and_si256(shifted, _mm256_set1_epi8(3))
}

/// The bytes with even numbers, then those with odd numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn evens_then_odds(bytes: __m128i) -> __m128i {
    let order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    _mm_shuffle_epi8(bytes, order)
}

impl Decode for BlockQ2K {
    type Panel = Wide;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { two_bits(&raw const (*w).qs, j) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(w: *const Self) -> __m256i {
        // SAFETY: 16 bytes of scales and mins.
        let bytes = evens_then_odds(unsafe { load_half(&raw const (*w).scales) });
        _mm256_cvtepu8_epi16(_mm_and_si128(bytes, _mm_set1_epi8(15)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_mins(w: *const Self) -> __m256i {
        // SAFETY: 16 bytes of scales and mins.
        let bytes = evens_then_odds(unsafe { load_half(&raw const (*w).scales) });
        _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15)))
    }
}

impl Decode for BlockQ3K {
    type Panel = Wide;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: 64 bytes of low bits, 32 of top bits.
        let (low, top) = unsafe { (two_bits(&raw const (*w).qs, j), load(&raw const (*w).hmask)) };
        // Without the top bit, low − 4 is low with all bits above it set.
        let bit = _mm256_set1_epi8((1u8 << j) as i8);
        let unset = _mm256_cmpeq_epi8(_mm256_and_si256(top, bit), _mm256_setzero_si256());
        _mm256_or_si256(low, _mm256_and_si256(unset, _mm256_set1_epi8(-4)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(w: *const Self) -> __m256i {
        // SAFETY: 12 bytes of scales: eight of low halves, four of top bits.
        let (low, top) = unsafe {
            let scales = (&raw const (*w).scales).cast::<u8>();
            (scales.cast::<i64>().read_unaligned(), scales.add(8).cast::<i32>().read_unaligned())
        };
        let low = _mm_set_epi64x(low >> 4, low);
        let top = _mm_srlv_epi32(_mm_set1_epi32(top), _mm_setr_epi32(0, 2, 4, 6));
        let low = _mm_and_si128(low, _mm_set1_epi8(15));
        let top = _mm_slli_epi16::<4>(_mm_and_si128(top, _mm_set1_epi8(3)));
        let scales = _mm_sub_epi8(_mm_or_si128(low, top), _mm_set1_epi8(32));
        _mm256_cvtepi8_epi16(evens_then_odds(scales))
    }
}

impl Decode for BlockIQ4XS {
    type Panel = Wide;
    const SUMS: usize = 32;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: eight times 16 bytes of codes.
        unsafe {
            let codes = (&raw const (*w).qs).cast::<u8>().add(16 * j);
            look_up(&iq4_nl::VALUES, nibbles(codes))
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(w: *const Self) -> __m256i {
        // SAFETY: two bytes of top bits and four of low ones.
        let (top, low) = unsafe {
            let low = (&raw const (*w).scales_l).cast::<i32>().read_unaligned();
            (u16::from_le_bytes((*w).scales_h), low)
        };
        // Words of one scale each: its bits shifted to the bottom.
        let low = _mm256_srlv_epi32(
            _mm256_set1_epi32(low),
            _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28),
        );
        let top = _mm256_srlv_epi32(
            _mm256_set1_epi32(top as i32),
            _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14),
        );
        let low = _mm256_and_si256(low, _mm256_set1_epi32(15));
        let top = _mm256_slli_epi32::<4>(_mm256_and_si256(top, _mm256_set1_epi32(3)));
        let scales = _mm256_sub_epi32(_mm256_or_si256(low, top), _mm256_set1_epi32(32));
        let packed = _mm256_packs_epi32(scales, scales);
        _mm256_permute4x64_epi64::<0b10_00_10_00>(packed)
    }
}

/// Each byte times three, modulo 256.
#[inline]
#[target_feature(enable = "avx2")]
fn times_three(bytes: __m256i) -> __m256i {
    _mm256_add_epi8(bytes, _mm256_add_epi8(bytes, bytes))
}

/// The first base-3 digit of each byte as a fraction of 256, minus 1: `(3·byte >> 8) − 1`.
#[inline]
#[target_feature(enable = "avx2")]
fn first_trit(bytes: __m256i) -> __m256i {
    let at_least = |n: i8| {
        let n = _mm256_set1_epi8(n);
        _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, n), bytes)
    };
    // 3·86 = 258 and 3·171 = 513; a comparison that holds is −1.
    let digit = _mm256_add_epi8(at_least(86), at_least(171u8 as i8));
    _mm256_sub_epi8(_mm256_set1_epi8(-1), digit)
}

impl Decode for BlockTQ1_0 {
    type Panel = Wide;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: 48 bytes of five digits and four of four.
        let bytes = unsafe {
            let qs = (&raw const (*w).qs).cast::<u8>();
            match j {
                0..5 => (0..j).fold(load(qs), |bytes, _| times_three(bytes)),
                5..7 => {
                    // Digits 2j − 10 and 2j − 9 of 16 bytes.
                    let bytes = load_half(qs.add(32));
                    let bytes = _mm256_set_m128i(bytes, bytes);
                    let bytes = (0..2 * (j - 5)).fold(bytes, |bytes, _| times_three(bytes));
                    _mm256_blend_epi32::<0xf0>(bytes, times_three(bytes))
                }
                _ => {
                    // Digit 4 of 16 bytes, then digits 0 to 3 of the last four.
                    let last = (&raw const (*w).qh).cast::<i32>().read_unaligned();
                    let first = _mm256_castsi128_si256(load_half(qs.add(32)));
                    let p0 = _mm256_blend_epi32::<0xf0>(first, _mm256_set1_epi32(last));
                    let p1 = times_three(p0);
                    let p2 = times_three(p1);
                    let p3 = times_three(p2);
                    let p4 = times_three(p3);
                    let bytes = _mm256_blend_epi32::<0x10>(p4, p0);
                    let bytes = _mm256_blend_epi32::<0x20>(bytes, p1);
                    let bytes = _mm256_blend_epi32::<0x40>(bytes, p2);
                    _mm256_blend_epi32::<0x80>(bytes, p3)
                }
            }
        };
        first_trit(bytes)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(_w: *const Self) -> __m256i {
        _mm256_set1_epi16(1)
    }
}

impl Decode for BlockTQ2_0 {
    type Panel = Wide;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: the caller's promise.
        let codes = unsafe { two_bits(&raw const (*w).qs, j) };
        _mm256_sub_epi8(codes, _mm256_set1_epi8(1))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(_w: *const Self) -> __m256i {
        _mm256_set1_epi16(1)
    }
}
