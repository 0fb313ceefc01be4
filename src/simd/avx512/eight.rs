//! The exact integers of eight blocks of 256 codes: `isum` and `imins` of "One arithmetic".
//!
//! 64 codes as u8 times 64 activations: `vpdpbusd` adds four products in an int32, twice if the
//! codes of a sub-block are in two vectors. Where such a sum is an int16, two vectors' sums become
//! the halves of one vector's lanes, and one `vpmaddwd` multiplies them by their scales and adds
//! them. With 256 codes in four vectors that is some fifteen operations, so what surrounds them
//! counts: scales and mins of four blocks are unpacked at once, one block to a quarter of a vector,
//! and eight blocks' sums are made in one transposition. The formats are in `eight_by_32` and
//! `eight_by_16`.
//!
//! Which codes share a vector is a matter of how a format packs them, so each format says in which
//! order it takes the activations ([`EightBlocks::ORDER`]), and a product begins by bringing them
//! into it.

use crate::simd::avx2::ints::{ActBlock, Ints};
use std::arch::asm;
use std::arch::x86_64::*;

/// The decoded integers of eight blocks, one a lane.
#[derive(Clone, Copy)]
pub(super) struct Integers {
    pub isums: __m256i,
    /// For formats with mins.
    pub imins: Option<__m256i>,
    pub d: __m256,
    pub dmin: __m256,
}

impl Integers {
    /// The integers of blocks 4 to 7, then those of 0 to 3.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn with_halves_swapped(self) -> Integers {
        let words = |v| _mm256_permute2x128_si256::<1>(v, v);
        let floats = |v| _mm256_permute2f128_ps::<1>(v, v);
        Integers {
            isums: words(self.isums),
            // `map` would be compiled without the closure's instructions.
            #[allow(clippy::manual_map)]
            imins: match self.imins {
                Some(imins) => Some(words(imins)),
                None => None,
            },
            d: floats(self.d),
            dmin: floats(self.dmin),
        }
    }
}

pub(super) trait EightBlocks: Ints {
    /// Sixteens of a block's activations in the order in which `integers` finds them.
    const ORDER: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    /// `at(i)` is block i of the eight and its activations, in [`EightBlocks::ORDER`]; `ask(i)` is
    /// called once for each, between the computation of the others.
    ///
    /// # Safety
    /// Each pointer leads to a whole block; the processor has this module's features.
    unsafe fn integers(at: impl At<Self>, ask: impl Fn(usize)) -> Integers;
}

/// The addresses of the eight blocks. A type of its own for each caller, so that each has a copy of
/// the kernel and none of them calls it: with the pointers in memory Q4_K was a tenth slower.
pub(super) trait At<B>: Fn(usize) -> (*const B, ActBlock) + Copy {}

impl<B, F: Fn(usize) -> (*const B, ActBlock) + Copy> At<B> for F {}

/// The order of activations for codes of two sixteens a byte: those of the low halves of 64 bytes,
/// then those of the high halves.
pub(super) const BY_HALVES: [u8; 16] = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15];

/// Writes activations with the sixteens of each 256 in this order.
///
/// # Safety
/// There is room for as many at `room`.
pub(super) unsafe fn write_ordered(values: &[[i8; 256]], order: [u8; 16], room: *mut i8) {
    // SAFETY: the caller's promise; any bytes are i8.
    let room = unsafe { std::slice::from_raw_parts_mut(room.cast::<[i8; 256]>(), values.len()) };
    for (block, ordered) in values.iter().zip(room) {
        for (i, sixteen) in order.into_iter().enumerate() {
            let from = 16 * sixteen as usize;
            ordered[16 * i..16 * (i + 1)].copy_from_slice(&block[from..from + 16]);
        }
    }
}

/// 16 bytes from each of eight places, one to a quarter.
///
/// # Safety
/// They are readable; the processor has AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn quarters<T>(p: impl Fn(usize) -> *const T) -> [__m512i; 2] {
    // SAFETY: the caller's promise; the loads take any alignment.
    unsafe {
        let four = |i: usize| {
            let v = _mm512_castsi128_si512(_mm_loadu_si128(p(i).cast()));
            let v = _mm512_inserti32x4::<1>(v, _mm_loadu_si128(p(i + 1).cast()));
            let v = _mm512_inserti32x4::<2>(v, _mm_loadu_si128(p(i + 2).cast()));
            _mm512_inserti32x4::<3>(v, _mm_loadu_si128(p(i + 3).cast()))
        };
        [four(0), four(4)]
    }
}

/// Two vectors of codes times two of activations, from number 2k on, added up.
///
/// # Safety
/// 256 activations are readable; k is 0 or 1.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub(super) unsafe fn dot(codes: [__m512i; 2], a: *const i8, k: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let acts = |i: usize| _mm512_loadu_si512(a.add(128 * k + 64 * i).cast());
        let sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes[0], acts(0));
        _mm512_dpbusd_epi32(sum, codes[1], acts(1))
    }
}

/// Word q of quarter `i` in all of quarter q.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn words_to_quarters(v: __m512i, i: usize) -> __m512i {
    let words = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    _mm512_permutexvar_epi32(_mm512_add_epi32(words, _mm512_set1_epi32(4 * i as i32)), v)
}

/// Lane i is the sum of the sixteen lanes of `v[i]`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn sum8(v: [__m512i; 8]) -> __m256i {
    let pairs = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let fours = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    let low = fours(pairs(v[0], v[1]), pairs(v[2], v[3]));
    let high = fours(pairs(v[4], v[5]), pairs(v[6], v[7]));
    // Four quarters of blocks 0 to 3 each, and four of blocks 4 to 7.
    let a = _mm512_shuffle_i32x4::<0b10_00_10_00>(low, high);
    let b = _mm512_shuffle_i32x4::<0b11_01_11_01>(low, high);
    let sum = _mm512_add_epi32(a, b);
    let sum = _mm512_add_epi32(sum, _mm512_shuffle_i32x4::<0b10_11_00_01>(sum, sum));
    _mm512_castsi512_si256(_mm512_shuffle_i32x4::<0b00_00_10_00>(sum, sum))
}

/// Lane i is the sum of quarter i of the two vectors' eight.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn sum_quarters(low: __m512i, high: __m512i) -> __m256i {
    let twos = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    // A quarter: two words of block i, two of block i + 4.
    let sum = _mm512_add_epi32(twos, _mm512_srli_epi64::<32>(twos));
    let places = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm512_castsi512_si256(_mm512_permutexvar_epi32(places, sum))
}

/// Word K of each quarter.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn word_of_quarters<const K: i32>(v: [__m512i; 2]) -> __m256i {
    let places = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
    let places = _mm512_add_epi32(places, _mm512_set1_epi32(K));
    _mm512_castsi512_si256(_mm512_permutex2var_epi32(v[0], places, v[1]))
}

/// The f16 in the low half of each word.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,f16c")]
pub(super) fn low_halves(words: __m256i) -> __m256 {
    _mm256_cvtph_ps(_mm256_cvtepi32_epi16(words))
}

/// The f16 in the high half of each word.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512vl,f16c")]
pub(super) fn high_halves(words: __m256i) -> __m256 {
    low_halves(_mm256_srli_epi32::<16>(words))
}

/// Hides from the compiler where a number comes from. It would make up vectors of scales byte by
/// byte in the units that shuffle, where the scalar units have nothing else to do.
#[inline(always)]
pub(super) fn scalar(mut x: u64) -> i64 {
    // SAFETY: no instruction at all.
    unsafe { asm!("/* {0} */", inout(reg) x, options(pure, nomem, nostack, preserves_flags)) };
    x as i64
}

/// f16 from eight places.
///
/// # Safety
/// They can be read; the processor has F16C.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn eight_f16(p: impl Fn(usize) -> *const u8) -> __m256 {
    // SAFETY: the caller's promise; unaligned by intent.
    let bits = |i: usize| unsafe { p(i).cast::<u16>().read_unaligned() } as u64;
    let four = |i: usize| scalar((0..4).fold(0, |all, k| all | bits(i + k) << (16 * k)));
    _mm256_cvtph_ps(_mm_set_epi64x(four(4), four(0)))
}

/// `low` in the low half of the vector, `high` in the other.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn by_half(low: i16, high: i16) -> __m512i {
    let low = _mm512_castsi256_si512(_mm256_set1_epi16(low));
    _mm512_inserti64x4::<1>(low, _mm256_set1_epi16(high))
}

/// Twice the same 32 bytes.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn twice(p: *const u8) -> __m512i {
    // SAFETY: the caller's promise; the load takes any alignment.
    unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast())) }
}

/// Bit BIT of each byte of the result is, in the low half of the vector, bit 2c of the bytes, in
/// the high half bit 2c + 1; other bits are anything.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn bits_to<const BIT: i32>(bytes: __m512i, c: usize) -> __m512i {
    let left = |from: i32| _mm256_set1_epi32((BIT - from) & 31);
    let low = _mm512_castsi256_si512(left(2 * c as i32));
    // A rotation shifts to the right as well; what crosses from byte to byte is no bit wanted.
    _mm512_rolv_epi32(bytes, _mm512_inserti64x4::<1>(low, left(2 * c as i32 + 1)))
}

/// The low halves of `even`'s lanes, and those of `odd` after a shift to the left as high halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn both_halves<const LEFT: u32>(even: __m512i, odd: __m512i) -> __m512i {
    _mm512_mask_blend_epi16(0xaaaa_aaaa, even, _mm512_slli_epi32::<LEFT>(odd))
}
