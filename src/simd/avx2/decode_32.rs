//! The codes of the formats of 32 values without kernels of their own.

use super::decoded::{Decode, Narrow};
use super::ints::{load, load_half};
use crate::quant::{BlockIQ4NL, BlockMXFP4, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_1};
use crate::quant::{e2m1, iq4_nl};
use std::arch::x86_64::*;

/// 16 bytes' low halves, then their high halves.
///
/// # Safety
/// 16 bytes at `p` are readable; the processor has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn nibbles<T>(p: *const T) -> __m256i {
    // SAFETY: the caller's promise.
    let bytes = unsafe { load_half(p) };
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// Entry i of a table for each of 32 indices i below 16.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn look_up(table: &[i8; 16], indices: __m256i) -> __m256i {
    // SAFETY: the table has 16 bytes.
    let table = unsafe { load_half(table) };
    _mm256_shuffle_epi8(_mm256_set_m128i(table, table), indices)
}

impl Decode for BlockQ4_1 {
    type Panel = Narrow;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, _j: usize) -> __m256i {
        // SAFETY: 16 bytes of codes.
        unsafe { nibbles(&raw const (*w).qs) }
    }
}

/// Byte i is all ones if bit i of the little-endian word at `p` is set, else 0.
///
/// # Safety
/// Four bytes at `p` are readable; the processor has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn spread_bits<T>(p: *const T) -> __m256i {
    // SAFETY: the caller's promise; unaligned by intent.
    let word = _mm256_set1_epi32(unsafe { p.cast::<i32>().read_unaligned() });
    // Byte i / 8 of the word at place i, then bit i mod 8 of it.
    let (one, two) = (0x0101_0101_0101_0101, 0x0202_0202_0202_0202);
    let bytes = _mm256_shuffle_epi8(word, _mm256_setr_epi64x(0, one, two, one + two));
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
    _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit)
}

impl Decode for BlockQ5_0 {
    type Panel = Narrow;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, _j: usize) -> __m256i {
        // SAFETY: 16 bytes of low bits, four of top bits.
        let (low, top) = unsafe { (nibbles(&raw const (*w).qs), spread_bits(&raw const (*w).qh)) };
        // Without the top bit, low − 16 is low with all bits above it set.
        _mm256_or_si256(low, _mm256_andnot_si256(top, _mm256_set1_epi8(-16)))
    }
}

impl Decode for BlockQ5_1 {
    type Panel = Narrow;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, _j: usize) -> __m256i {
        // SAFETY: 16 bytes of low bits, four of top bits.
        let (low, top) = unsafe { (nibbles(&raw const (*w).qs), spread_bits(&raw const (*w).qh)) };
        _mm256_or_si256(low, _mm256_and_si256(top, _mm256_set1_epi8(16)))
    }
}

impl Decode for BlockQ8_1 {
    type Panel = Narrow;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, _j: usize) -> __m256i {
        // SAFETY: 32 bytes of codes.
        unsafe { load(&raw const (*w).qs) }
    }
}

impl Decode for BlockMXFP4 {
    type Panel = Narrow;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, _j: usize) -> __m256i {
        // SAFETY: 16 bytes of codes.
        look_up(&e2m1::DOUBLED, unsafe { nibbles(&raw const (*w).qs) })
    }
}

impl Decode for BlockIQ4NL {
    type Panel = Narrow;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, _j: usize) -> __m256i {
        // SAFETY: 16 bytes of codes.
        look_up(&iq4_nl::VALUES, unsafe { nibbles(&raw const (*w).qs) })
    }
}
