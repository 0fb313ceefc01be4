//! Eight blocks of the formats with a scale for each 16 of 256 codes.

use super::eight::*;
use crate::quant::{BlockQ2K, BlockQ3K, BlockQ6K};
use std::arch::x86_64::*;

/// Sixteen numbers of each of eight blocks, as i16: the first eight, of which a quarter of a
/// vector is a block's, and the other eight.
#[derive(Clone, Copy)]
struct Numbers([[__m512i; 2]; 2]);

impl Numbers {
    /// From 16 signed bytes in each quarter.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn of(bytes: [__m512i; 2]) -> Numbers {
        let zero = _mm512_setzero_si512();
        let first = |v| _mm512_srai_epi16::<8>(_mm512_unpacklo_epi8(zero, v));
        let other = |v| _mm512_srai_epi16::<8>(_mm512_unpackhi_epi8(zero, v));
        Numbers([[first(bytes[0]), first(bytes[1])], [other(bytes[0]), other(bytes[1])]])
    }

    /// Σ numbers · sums of activations, of each block.
    ///
    /// # Safety
    /// Each activation block has its sixteen sums.
    #[inline]
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
    unsafe fn times_sums<B>(self, at: impl At<B>) -> __m256i {
        let Numbers([first, other]) = self;
        // SAFETY: sixteen i16 each.
        unsafe {
            let (sums, more) = (quarters(|i| at(i).1.sums), quarters(|i| at(i).1.sums.add(8)));
            let dots = |k: usize| {
                let dots = _mm512_madd_epi16(first[k], sums[k]);
                _mm512_dpwssd_epi32(dots, other[k], more[k])
            };
            sum_quarters(dots(0), dots(1))
        }
    }
}

/// A format of which 64 codes are found as u8, as they are or with something added to each.
trait Codes: Sized {
    /// The largest, with what is added.
    const LARGEST: usize;

    /// # Safety
    /// `w` leads to a whole block and c is below 4; the processor has this module's features.
    unsafe fn codes(w: *const Self, c: usize) -> __m512i;
}

/// Σ scales · (codes · activations) of each block.
///
/// # Safety
/// As [`EightBlocks::integers`].
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
unsafe fn isums<B: Codes>(at: impl At<B>, ask: impl Fn(usize), scales: Numbers) -> __m256i {
    const { assert!(4 * B::LARGEST * 127 <= i16::MAX as usize) };
    let pairs = |v: [__m512i; 2]| [four_apart(v[0]), four_apart(v[1])];
    let Numbers([first, other]) = scales;
    let scales = [pairs(first), pairs(other)];
    let isum = |i: usize| {
        ask(i);
        let (w, a) = at(i);
        // Sums of four products, of four sub-blocks a vector, those of two vectors as halves of
        // the lanes.
        let eight = |k: usize| {
            // SAFETY: the caller's promises; 4 × 64 activations.
            let dots = |c: usize| unsafe {
                let acts = _mm512_loadu_si512(a.qs.add(64 * c).cast());
                _mm512_dpbusd_epi32(_mm512_setzero_si512(), B::codes(w, c), acts)
            };
            let sums = both_halves::<16>(dots(2 * k), dots(2 * k + 1));
            _mm512_madd_epi16(sums, words_to_quarters(scales[k][i / 4], i % 4))
        };
        _mm512_add_epi32(eight(0), eight(1))
    };
    sum8([isum(0), isum(1), isum(2), isum(3), isum(4), isum(5), isum(6), isum(7)])
}

/// Numbers q and q + 4 of the eight in each quarter, as its word q.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn four_apart(v: __m512i) -> __m512i {
    _mm512_unpacklo_epi16(v, _mm512_bsrli_epi128::<8>(v))
}

/// 16 bytes from byte OFFSET of each of eight blocks.
///
/// # Safety
/// They lie within the blocks; the processor has this module's features.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn bytes<const OFFSET: usize, B>(at: impl At<B>) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    unsafe { quarters(|i| at(i).0.cast::<u8>().wrapping_add(OFFSET)) }
}

impl Codes for BlockQ6K {
    const LARGEST: usize = 63;

    /// Plus 32.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn codes(w: *const Self, c: usize) -> __m512i {
        // SAFETY: 2 × 64 bytes of low halves, 2 × 32 of top bits.
        unsafe {
            let ql = (&raw const (*w).ql).cast::<u8>().add(64 * (c / 2));
            let tops = twice((&raw const (*w).qh).cast::<u8>().add(32 * (c / 2)));
            let both = _mm512_loadu_si512(ql.cast());
            let (low, tops) = if c.is_multiple_of(2) {
                (both, _mm512_sllv_epi16(tops, by_half(4, 2)))
            } else {
                (_mm512_srli_epi16::<4>(both), _mm512_srlv_epi16(tops, by_half(0, 2)))
            };
            let low = _mm512_and_si512(low, _mm512_set1_epi8(15));
            // low | (tops & 0x30)
            _mm512_ternarylogic_epi32::<0xf8>(low, tops, _mm512_set1_epi8(0x30))
        }
    }
}

impl EightBlocks for BlockQ6K {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn integers(at: impl At<Self>, ask: impl Fn(usize)) -> Integers {
        // SAFETY: 16 scales from byte 192, then d; the rest is the caller's promise.
        unsafe {
            let scales = Numbers::of(bytes::<192, _>(at));
            let offset = _mm256_slli_epi32::<5>(scales.times_sums(at));
            let isums = _mm256_sub_epi32(isums(at, ask, scales), offset);
            let d = eight_f16(|i| (&raw const (*at(i).0).d).cast());
            Integers { isums, imins: None, d, dmin: _mm256_setzero_ps() }
        }
    }
}

/// Two bits of each of 32 bytes, then the next two: codes 64c on of Q2_K and Q3_K; above them
/// anything.
///
/// # Safety
/// 64 bytes at `p` are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn two_bits(p: *const u8, c: usize) -> __m512i {
    let shift = 4 * (c % 2) as i16;
    // SAFETY: the caller's promise.
    _mm512_srlv_epi16(unsafe { twice(p.add(32 * (c / 2))) }, by_half(shift, shift + 2))
}

impl Codes for BlockQ2K {
    const LARGEST: usize = 3;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn codes(w: *const Self, c: usize) -> __m512i {
        // SAFETY: 64 bytes of codes.
        let codes = unsafe { two_bits((&raw const (*w).qs).cast(), c) };
        _mm512_and_si512(codes, _mm512_set1_epi8(3))
    }
}

impl EightBlocks for BlockQ2K {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn integers(at: impl At<Self>, ask: impl Fn(usize)) -> Integers {
        // SAFETY: 16 bytes of scales and mins; d and dmin.
        unsafe {
            let both = bytes::<0, _>(at);
            let low = |v| _mm512_and_si512(v, _mm512_set1_epi8(15));
            let high = |v| low(_mm512_srli_epi16::<4>(v));
            let scales = Numbers::of([low(both[0]), low(both[1])]);
            let mins = Numbers::of([high(both[0]), high(both[1])]);
            Integers {
                isums: isums(at, ask, scales),
                imins: Some(mins.times_sums(at)),
                d: eight_f16(|i| (&raw const (*at(i).0).d).cast()),
                dmin: eight_f16(|i| (&raw const (*at(i).0).dmin).cast()),
            }
        }
    }
}

impl Codes for BlockQ3K {
    const LARGEST: usize = 7;

    /// Plus 4.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn codes(w: *const Self, c: usize) -> __m512i {
        // SAFETY: 64 bytes of low bits, 32 of top bits.
        let (low, tops) = unsafe {
            (two_bits((&raw const (*w).qs).cast(), c), twice((&raw const (*w).hmask).cast()))
        };
        let low = _mm512_and_si512(low, _mm512_set1_epi8(3));
        // low | (top & 4)
        _mm512_ternarylogic_epi32::<0xf8>(low, bits_to::<2>(tops, c), _mm512_set1_epi8(4))
    }
}

/// The sixteen scales of Q3_K (see `q3_k`) from bytes 2 to 13 of each quarter.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn q3_k_scales(heads: __m512i) -> __m512i {
    let low = _mm_setr_epi8(2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 6, 7, 8, 9);
    let low = _mm512_shuffle_epi8(heads, _mm512_broadcast_i32x4(low));
    let low = _mm512_srlv_epi64(low, _mm512_broadcast_i32x4(_mm_set_epi64x(4, 0)));
    let low = _mm512_and_si512(low, _mm512_set1_epi8(15));
    let top = _mm512_shuffle_epi8(heads, _mm512_set1_epi32(0x0d0c_0b0a));
    let top = _mm512_srlv_epi32(top, _mm512_broadcast_i32x4(_mm_setr_epi32(0, 2, 4, 6)));
    let top = _mm512_and_si512(_mm512_slli_epi32::<4>(top), _mm512_set1_epi8(0x30));
    _mm512_sub_epi8(_mm512_or_si512(low, top), _mm512_set1_epi8(32))
}

impl EightBlocks for BlockQ3K {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn integers(at: impl At<Self>, ask: impl Fn(usize)) -> Integers {
        // SAFETY: the last 16 of a block's 110 bytes: two of codes, 12 of scales, d.
        unsafe {
            let heads = bytes::<94, _>(at);
            let scales = Numbers::of([q3_k_scales(heads[0]), q3_k_scales(heads[1])]);
            let offset = _mm256_slli_epi32::<2>(scales.times_sums(at));
            let isums = _mm256_sub_epi32(isums(at, ask, scales), offset);
            let d = high_halves(word_of_quarters::<3>(heads));
            Integers { isums, imins: None, d, dmin: _mm256_setzero_ps() }
        }
    }
}
