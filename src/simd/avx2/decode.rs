//! The codes, integer scales and mins of the formats without kernels of their own.

use super::decoded::{Decode, Narrow, Wide};
use super::ints::load_half;
use crate::quant::{BlockIQ4NL, BlockIQ4XS, BlockQ4_1, iq4_nl};
use std::arch::x86_64::*;

/// 16 bytes' low halves, then their high halves.
///
/// # Safety
/// 16 bytes at `p` are readable; the processor has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn nibbles<T>(p: *const T) -> __m256i {
    // SAFETY: the caller's promise.
    let bytes = unsafe { load_half(p) };
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// Entry i of a table for each of 32 indices i below 16.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up(table: &[i8; 16], indices: __m256i) -> __m256i {
    // SAFETY: the table has 16 bytes.
    let table = unsafe { load_half(table) };
    _mm256_shuffle_epi8(_mm256_set_m128i(table, table), indices)
}

/// The f16 at `p`.
///
/// # Safety
/// Two bytes at `p` are readable.
#[inline]
unsafe fn half<T>(p: *const T) -> u16 {
    // SAFETY: the caller's promise; unaligned by intent.
    unsafe { p.cast::<u16>().read_unaligned() }
}

impl Decode for BlockQ4_1 {
    type Panel = Narrow;
    type Stored = u16;
    const SUB: usize = 32;
    const LARGEST: usize = 15;
    const SIGNED: bool = false;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, _j: usize) -> __m256i {
        // SAFETY: 16 bytes of codes.
        unsafe { nibbles(&raw const (*w).qs) }
    }

    #[inline]
    unsafe fn stored(w: *const Self) -> (u16, u16) {
        // SAFETY: within the block. The min is the offset with its sign bit flipped.
        unsafe { (half(&raw const (*w).d), half(&raw const (*w).m) ^ 0x8000) }
    }
}

impl Decode for BlockIQ4NL {
    type Panel = Narrow;
    type Stored = u16;
    const SUB: usize = 32;
    const LARGEST: usize = 127;
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, _j: usize) -> __m256i {
        // SAFETY: 16 bytes of codes.
        look_up(&iq4_nl::VALUES, unsafe { nibbles(&raw const (*w).qs) })
    }

    #[inline]
    unsafe fn stored(w: *const Self) -> (u16, u16) {
        // SAFETY: within the block.
        unsafe { (half(&raw const (*w).d), 0) }
    }
}

impl Decode for BlockIQ4XS {
    type Panel = Wide;
    type Stored = u16;
    const SUB: usize = 32;
    const LARGEST: usize = 127;
    const SIGNED: bool = true;

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
            (half(&raw const (*w).scales_h), low)
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
        let eight = _mm256_permute4x64_epi64::<0b10_00_10_00>(packed);
        eight
    }

    #[inline]
    unsafe fn stored(w: *const Self) -> (u16, u16) {
        // SAFETY: within the block.
        unsafe { (half(&raw const (*w).d), 0) }
    }
}
