//! The codes and integer scales of the grid formats (`quant::grids`): points are loaded from the
//! tables that the scalar code reads, four of eight bytes or eight of four for 32 codes, and get
//! their signs or shifts all at once.

use super::decoded::{Decode, Wide};
use super::ints::{load, load_half};
use crate::quant::{
    BlockIQ1M, BlockIQ1S, BlockIQ2S, BlockIQ2XS, BlockIQ2XXS, BlockIQ3S, BlockIQ3XXS,
};
use std::arch::x86_64::*;

/// Four points of eight values.
#[inline]
#[target_feature(enable = "avx2")]
fn four(points: [&[i8; 8]; 4]) -> __m256i {
    let [a, b, c, d] = points.map(|p| i64::from_le_bytes(p.map(|v| v as u8)));
    _mm256_setr_epi64x(a, b, c, d)
}

/// Eight points of four values.
#[inline]
#[target_feature(enable = "avx2")]
fn eight(points: [&[i8; 4]; 8]) -> __m256i {
    let [a, b, c, d, e, f, g, h] = points.map(|p| i32::from_le_bytes(p.map(|v| v as u8)));
    _mm256_setr_epi32(a, b, c, d, e, f, g, h)
}

/// Value i negated where bit i of `signs` is 1.
#[inline]
#[target_feature(enable = "avx2")]
fn signed(values: __m256i, signs: u32) -> __m256i {
    let (first, second) = (0x0101_0101_0101_0101, 0x0303_0303_0303_0303);
    let byte = _mm256_setr_epi64x(0, first, 2 * first, second);
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(signs as i32), byte);
    let minus = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
    _mm256_sub_epi8(_mm256_xor_si256(values, minus), minus)
}

/// `8·value` of IQ1's points minus 1 where bit k of `down` is 1, plus 1 elsewhere.
#[inline]
#[target_feature(enable = "avx2")]
fn shifted(values: __m256i, down: u8) -> __m256i {
    let point = _mm256_setr_epi64x(1, 2, 4, 8);
    let minus = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(down.into()), point), point);
    let shift = _mm256_or_si256(minus, _mm256_set1_epi8(1));
    let two = _mm256_add_epi8(values, values);
    let four = _mm256_add_epi8(two, two);
    _mm256_add_epi8(_mm256_add_epi8(four, four), shift)
}

/// `2s + 1`.
#[inline]
#[target_feature(enable = "avx2")]
fn odd(s: __m256i) -> __m256i {
    _mm256_add_epi16(_mm256_add_epi16(s, s), _mm256_set1_epi16(1))
}

/// `2s + 1` of eight i16, one a group.
#[inline]
#[target_feature(enable = "avx2")]
fn odd_of_groups(s: __m128i) -> __m256i {
    odd(_mm256_set_m128i(s, s))
}

/// `2s + 1` of the sixteen half bytes of eight bytes, low halves for the first 16 values.
///
/// # Safety
/// Eight bytes at `p` are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn odd_of_half_bytes(p: *const [u8; 8]) -> __m256i {
    // SAFETY: the caller's promise.
    let bytes = _mm_cvtepu8_epi16(unsafe { _mm_loadl_epi64(p.cast()) });
    let low = _mm_and_si128(bytes, _mm_set1_epi16(15));
    odd(_mm256_set_m128i(_mm_srli_epi16::<4>(bytes), low))
}

impl Decode for BlockIQ2XXS {
    type Panel = Wide;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, signs) = unsafe { &*w }.points(j);
        signed(four(points), signs)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(w: *const Self) -> __m256i {
        // SAFETY: 64 bytes of groups.
        let (low, high) = unsafe {
            let groups = (&raw const (*w).groups).cast::<u8>();
            (load(groups), load(groups.add(32)))
        };
        // Scales 0, 1, 4, 5 and 2, 3, 6, 7 as i16, then the pairs in order.
        let (low, high) = (_mm256_srli_epi64::<60>(low), _mm256_srli_epi64::<60>(high));
        let words = _mm256_packus_epi32(low, high);
        let halves = _mm256_packus_epi32(words, words);
        let (even, odd) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
        odd_of_groups(_mm_unpacklo_epi32(even, odd))
    }
}

impl Decode for BlockIQ2XS {
    type Panel = Wide;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, signs) = unsafe { &*w }.points(j);
        signed(four(points), signs)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(w: *const Self) -> __m256i {
        // SAFETY: within the block.
        unsafe { odd_of_half_bytes(&raw const (*w).scales) }
    }
}

impl Decode for BlockIQ2S {
    type Panel = Wide;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, signs) = unsafe { &*w }.points(j);
        signed(four(points), signs)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(w: *const Self) -> __m256i {
        // SAFETY: within the block.
        unsafe { odd_of_half_bytes(&raw const (*w).scales) }
    }
}

impl Decode for BlockIQ3XXS {
    type Panel = Wide;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, signs) = unsafe { &*w }.points(j);
        signed(eight(points), signs)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(w: *const Self) -> __m256i {
        // SAFETY: eight words.
        let words = _mm256_srli_epi32::<28>(unsafe { load(&raw const (*w).words) });
        let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
        odd_of_groups(_mm_packus_epi32(low, high))
    }
}

impl Decode for BlockIQ3S {
    type Panel = Wide;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, signs) = unsafe { &*w }.points(j);
        signed(eight(points), signs)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(w: *const Self) -> __m256i {
        // SAFETY: four bytes.
        let halves = unsafe { (&raw const (*w).scales).cast::<i32>().read_unaligned() };
        let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
        let words = _mm256_srlv_epi32(_mm256_set1_epi32(halves), shifts);
        let words = _mm256_and_si256(words, _mm256_set1_epi32(15));
        let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
        odd_of_groups(_mm_packus_epi32(low, high))
    }
}

impl Decode for BlockIQ1S {
    type Panel = Wide;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, down) = unsafe { &*w }.points(j);
        shifted(four(points), down)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(w: *const Self) -> __m256i {
        // SAFETY: eight words.
        let words = unsafe { load_half(&raw const (*w).qh) };
        odd_of_groups(_mm_and_si128(_mm_srli_epi16::<12>(words), _mm_set1_epi16(7)))
    }
}

impl Decode for BlockIQ1M {
    type Panel = Wide;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, down) = unsafe { &*w }.points(j);
        shifted(four(points), down)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub_scales(w: *const Self) -> __m256i {
        // SAFETY: four words of four scales.
        let words = unsafe { _mm_loadl_epi64((&raw const (*w).scales).cast()) };
        let words = _mm256_cvtepu16_epi32(_mm_unpacklo_epi16(words, words));
        let first = _mm256_srlv_epi32(words, _mm256_setr_epi32(0, 6, 0, 6, 0, 6, 0, 6));
        let second = _mm256_srlv_epi32(words, _mm256_setr_epi32(3, 9, 3, 9, 3, 9, 3, 9));
        let three_bits = _mm256_set1_epi32(7);
        let (first, second) =
            (_mm256_and_si256(first, three_bits), _mm256_and_si256(second, three_bits));
        let scales = _mm256_packus_epi32(first, second);
        odd(_mm256_permute4x64_epi64::<0b11_01_10_00>(scales))
    }
}
