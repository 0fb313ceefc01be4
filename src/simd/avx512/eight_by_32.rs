//! Eight blocks of the formats with a scale for each 32 of 256 codes.

use super::eight::*;
use super::panel::nibbles;
use crate::quant::{BlockIQ4XS, BlockQ4K, BlockQ5K, iq4_nl};
use crate::simd::avx2::ints::ActBlock;
use std::arch::x86_64::*;

/// Eight scales and eight mins as bytes in each quarter, for Q4_K and Q5_K, whose blocks begin
/// alike (see `k_scales`).
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn scales_and_mins(heads: __m512i) -> __m512i {
    // Words a, c, b, c of the packed three; then those with the top bits: none, a, none, b.
    let low = _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    let top = _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11);
    let low = _mm512_shuffle_epi8(heads, _mm512_broadcast_i32x4(low));
    let low = _mm512_srlv_epi32(low, _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 0, 4)));
    let (six, four) = (0x3f3f_3f3f, 0x0f0f_0f0f);
    let low = _mm512_and_si512(low, _mm512_broadcast_i32x4(_mm_setr_epi32(six, four, six, four)));
    let top = _mm512_shuffle_epi8(heads, _mm512_broadcast_i32x4(top));
    let top = _mm512_and_si512(_mm512_srli_epi16::<2>(top), _mm512_set1_epi8(0x30));
    _mm512_or_si512(low, top)
}

/// Σ numbers · sums of eight blocks, eight numbers a block.
///
/// # Safety
/// Each activation block has its eight sums.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw")]
unsafe fn times_sums<B>(numbers: [__m512i; 2], at: impl At<B>) -> __m256i {
    // SAFETY: eight i16 each.
    let sums = unsafe { quarters(|i| at(i).1.sums) };
    sum_quarters(_mm512_madd_epi16(numbers[0], sums[0]), _mm512_madd_epi16(numbers[1], sums[1]))
}

/// The codes of Q4_K and Q5_K lie in 32 bytes for each two sub-blocks, whose low and high halves
/// they are. A vector takes sixteen of these bytes of each of the four pairs, and another the other
/// sixteen, so that two `vpdpbusd` add eight products of four sub-blocks in each lane, and those of
/// the four even sub-blocks and of the four odd ones fit the two halves of a lane: one `vpmaddwd`
/// multiplies all eight by their scales.
const BY_PAIRS: [u8; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

/// A format whose blocks begin with d, dmin and the scales of `k_scales`.
trait Affine: Sized {
    /// The sums of codes times activations of the even sub-blocks, in the low half of each lane of
    /// a quarter for each of them, and of the odd sub-blocks in the high half.
    ///
    /// # Safety
    /// The pointers lead to a whole block and to its activations in the order [`BY_PAIRS`]; the
    /// processor has this module's features.
    unsafe fn sums(w: *const Self, a: ActBlock) -> __m512i;
}

/// Sixteen of each 32 of 128 bytes, and the other sixteen.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn halves_of_pairs<T>(p: *const T) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    let (low, high) = unsafe {
        (_mm512_loadu_si512(p.cast()), _mm512_loadu_si512(p.cast::<u8>().add(64).cast()))
    };
    [
        _mm512_shuffle_i64x2::<0b10_00_10_00>(low, high),
        _mm512_shuffle_i64x2::<0b11_01_11_01>(low, high),
    ]
}

/// # Safety
/// As [`EightBlocks::integers`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn affine<B: Affine>(at: impl At<B>, ask: impl Fn(usize)) -> Integers {
    // SAFETY: a block begins with 16 bytes of d, dmin and scales; the rest is the caller's.
    unsafe {
        let heads = quarters(|i| at(i).0);
        let both = [scales_and_mins(heads[0]), scales_and_mins(heads[1])];
        let zero = _mm512_setzero_si512();
        let scales = [_mm512_unpacklo_epi8(both[0], zero), _mm512_unpacklo_epi8(both[1], zero)];
        let mins = [_mm512_unpackhi_epi8(both[0], zero), _mm512_unpackhi_epi8(both[1], zero)];
        let isum = |i: usize| {
            ask(i);
            let sums = B::sums(at(i).0, at(i).1);
            _mm512_madd_epi16(sums, words_to_quarters(scales[i / 4], i % 4))
        };
        let isums = [isum(0), isum(1), isum(2), isum(3), isum(4), isum(5), isum(6), isum(7)];
        let d = word_of_quarters::<0>(heads);
        Integers {
            isums: sum8(isums),
            imins: Some(times_sums(mins, at)),
            d: low_halves(d),
            dmin: high_halves(d),
        }
    }
}

impl Affine for BlockQ4K {
    /// The high halves of bytes stay where they are: sixteen times the codes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn sums(w: *const Self, a: ActBlock) -> __m512i {
        let low = |v| _mm512_and_si512(v, _mm512_set1_epi8(0x0f));
        let high = |v| _mm512_and_si512(v, _mm512_set1_epi8(0xf0u8 as i8));
        // SAFETY: 128 bytes of codes, 256 activations.
        unsafe {
            let [first, other] = halves_of_pairs(&raw const (*w).qs);
            let even = dot([low(first), low(other)], a.qs, 0);
            let odd = dot([high(first), high(other)], a.qs, 1);
            both_halves::<12>(even, odd)
        }
    }
}

impl Affine for BlockQ5K {
    /// Codes of odd sub-blocks are doubled, so that one shift brings the top bits of both to their
    /// places: 31 · 127 · 8 is an i16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn sums(w: *const Self, a: ActBlock) -> __m512i {
        // Bits 2q and 2q + 1 to 4 and 5 in quarter q; what crosses from byte to byte is not used.
        let left = _mm512_setr_epi32(4, 4, 4, 4, 2, 2, 2, 2, 0, 0, 0, 0, 30, 30, 30, 30);
        let even = |v, top| {
            let low = _mm512_and_si512(v, _mm512_set1_epi8(0x0f));
            // low | (top & 16)
            _mm512_ternarylogic_epi32::<0xf8>(low, top, _mm512_set1_epi8(0x10))
        };
        let odd = |v, top| {
            let high = _mm512_and_si512(_mm512_srli_epi16::<3>(v), _mm512_set1_epi8(0x1e));
            _mm512_ternarylogic_epi32::<0xf8>(high, top, _mm512_set1_epi8(0x20))
        };
        // SAFETY: 128 bytes of codes, 32 of top bits, 256 activations.
        unsafe {
            let [first, other] = halves_of_pairs(&raw const (*w).qs);
            let tops: *const __m128i = (&raw const (*w).qh).cast();
            let tops = |i: usize| {
                let tops = _mm512_broadcast_i32x4(_mm_loadu_si128(tops.add(i)));
                _mm512_rolv_epi32(tops, left)
            };
            let (top, other_top) = (tops(0), tops(1));
            let evens = dot([even(first, top), even(other, other_top)], a.qs, 0);
            let odds = dot([odd(first, top), odd(other, other_top)], a.qs, 1);
            both_halves::<15>(evens, odds)
        }
    }
}

macro_rules! affine {
    ($($block:ty),*) => {$(
        impl EightBlocks for $block {
            const ORDER: [u8; 16] = BY_PAIRS;

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
            unsafe fn integers(at: impl At<Self>, ask: impl Fn(usize)) -> Integers {
                // SAFETY: the caller's promises are the same.
                unsafe { affine(at, ask) }
            }
        }
    )*};
}

affine!(BlockQ4K, BlockQ5K);

/// The eight scales of IQ4_XS in each quarter.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn iq4_xs_scales(heads: __m512i) -> __m512i {
    // Four low bits: a half of bytes 4 to 7 each. Two top bits: of bytes 2 and 3.
    let low = _mm_setr_epi8(4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1);
    let low = _mm512_shuffle_epi8(heads, _mm512_broadcast_i32x4(low));
    let low = _mm512_srlv_epi16(low, _mm512_set1_epi32(4 << 16));
    let low = _mm512_and_si512(low, _mm512_set1_epi16(15));
    let top = _mm512_shuffle_epi8(heads, _mm512_set1_epi16(0x0302));
    let shifts = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14));
    let top = _mm512_slli_epi16::<4>(_mm512_srlv_epi16(top, shifts));
    let both = _mm512_or_si512(low, _mm512_and_si512(top, _mm512_set1_epi16(0x30)));
    _mm512_sub_epi16(both, _mm512_set1_epi16(32))
}

impl EightBlocks for BlockIQ4XS {
    const ORDER: [u8; 16] = BY_HALVES;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn integers(at: impl At<Self>, ask: impl Fn(usize)) -> Integers {
        // SAFETY: a block begins with 8 bytes of d and scales and goes on with codes.
        unsafe {
            let heads = quarters(|i| at(i).0);
            let scales = [iq4_xs_scales(heads[0]), iq4_xs_scales(heads[1])];
            let offset = times_sums(scales, at);
            let offset = _mm256_sub_epi32(_mm256_slli_epi32::<7>(offset), offset);
            // Two blocks' as i32 in each vector.
            let wide = |k: usize| {
                let (low, high) =
                    (_mm512_castsi512_si256(scales[k]), _mm512_extracti64x4_epi64::<1>(scales[k]));
                [_mm512_cvtepi16_epi32(low), _mm512_cvtepi16_epi32(high)]
            };
            let scales = [wide(0), wide(1)];
            let isum = |i: usize| {
                ask(i);
                iq4_xs_isum(at(i).0, at(i).1, scales[i / 4][i / 2 % 2], i % 2)
            };
            let isums = [isum(0), isum(1), isum(2), isum(3), isum(4), isum(5), isum(6), isum(7)];
            let d = low_halves(word_of_quarters::<0>(heads));
            let isums = _mm256_sub_epi32(sum8(isums), offset);
            Integers { isums, imins: None, d, dmin: _mm256_setzero_ps() }
        }
    }
}

/// Values are −127 to 113: plus 127 they are u8. Their sums need an int32 for each sub-block.
///
/// # Safety
/// As [`Affine::sums`], with the activations in the order [`BY_HALVES`]; half k of `scales` is the
/// block's.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn iq4_xs_isum(w: *const BlockIQ4XS, a: ActBlock, scales: __m512i, k: usize) -> __m512i {
    const { assert!(iq4_nl::VALUES[0] == -127) };
    // SAFETY: a table of 16 bytes, 2 × 64 bytes of codes and 256 activations.
    unsafe {
        let values = _mm_loadu_si128(iq4_nl::VALUES.as_ptr().cast());
        let values = _mm512_broadcast_i32x4(_mm_add_epi8(values, _mm_set1_epi8(127)));
        let codes: *const u8 = (&raw const (*w).qs).cast();
        let four = |j: usize| {
            let (low, high) = nibbles(_mm512_loadu_si512(codes.add(64 * j).cast()));
            let codes = [_mm512_shuffle_epi8(values, low), _mm512_shuffle_epi8(values, high)];
            let scales = words_to_quarters(scales, 2 * k + j);
            _mm512_mullo_epi32(dot(codes, a.qs, j), scales)
        };
        _mm512_add_epi32(four(0), four(1))
    }
}
