//! Eight blocks of the formats with a scale for each 32 of 256 codes.

use super::eight::*;
use crate::quant::{BlockIQ4XS, BlockQ4K, BlockQ5K, iq4_nl};
use crate::simd::avx2::ints::ActBlock;
use std::arch::x86_64::*;

/// Takes number 2c of the eight u16 in each quarter to the low half of the vector, and number 2c +
/// 1 to the high half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn spread(scales: __m512i, c: usize) -> __m512i {
    let places = |j: usize| (2 * j + 256 * (2 * j + 1)) as i16;
    _mm512_shuffle_epi8(scales, by_half(places(2 * c), places(2 * c + 1)))
}

/// Low halves of 32 bytes, then their high halves; above them anything.
///
/// # Safety
/// 32 bytes at `p` are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn nibbles(p: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    _mm512_srlv_epi16(unsafe { twice(p) }, by_half(0, 4))
}

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

/// Σ mins · sums of eight blocks.
///
/// # Safety
/// Each activation block has its eight sums.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw")]
unsafe fn imins<B>(both: [__m512i; 2], at: impl At<B>) -> __m256i {
    // SAFETY: eight i16 each.
    let sums = unsafe { quarters(|i| at(i).1.sums) };
    let mins = |k: usize| _mm512_unpackhi_epi8(both[k], _mm512_setzero_si512());
    sum_quarters(_mm512_madd_epi16(mins(0), sums[0]), _mm512_madd_epi16(mins(1), sums[1]))
}

/// A format whose blocks begin with d, dmin and the scales of `k_scales`.
trait Affine: Sized {
    /// Σ scales · (codes · activations), spread over the lanes.
    ///
    /// # Safety
    /// The pointers lead to whole blocks; the processor has this module's features.
    unsafe fn isum(w: *const Self, a: ActBlock, scales: __m512i) -> __m512i;
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
        let isum = |i: usize| {
            ask(i);
            B::isum(at(i).0, at(i).1, quarter(scales, i))
        };
        let isums = [isum(0), isum(1), isum(2), isum(3), isum(4), isum(5), isum(6), isum(7)];
        let d = word_of_quarters::<0>(heads);
        Integers {
            isums: sum8(isums),
            imins: Some(imins(both, at)),
            d: low_halves(d),
            dmin: high_halves(d),
        }
    }
}

impl Affine for BlockQ4K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn isum(w: *const Self, a: ActBlock, scales: __m512i) -> __m512i {
        let mut sum = _mm512_setzero_si512();
        // SAFETY: 4 × 32 bytes of codes and 4 × 64 of activations.
        unsafe {
            let codes: *const u8 = (&raw const (*w).qs).cast();
            for c in 0..4 {
                let codes = _mm512_and_si512(nibbles(codes.add(32 * c)), _mm512_set1_epi8(15));
                sum = add(sum, codes, a.qs.add(64 * c), spread(scales, c));
            }
        }
        sum
    }
}

impl Affine for BlockQ5K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn isum(w: *const Self, a: ActBlock, scales: __m512i) -> __m512i {
        let mut sum = _mm512_setzero_si512();
        // SAFETY: 4 × 32 bytes of codes, 32 of top bits and 4 × 64 of activations.
        unsafe {
            let tops = twice((&raw const (*w).qh).cast());
            let codes: *const u8 = (&raw const (*w).qs).cast();
            for c in 0..4 {
                let low = _mm512_and_si512(nibbles(codes.add(32 * c)), _mm512_set1_epi8(15));
                // low | (top & 16)
                let (top, bit) = (bits_to::<4>(tops, c), _mm512_set1_epi8(16));
                let codes = _mm512_ternarylogic_epi32::<0xf8>(low, top, bit);
                sum = add(sum, codes, a.qs.add(64 * c), spread(scales, c));
            }
        }
        sum
    }
}

macro_rules! affine {
    ($($block:ty),*) => {$(
        impl EightBlocks for $block {
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
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn integers(at: impl At<Self>, ask: impl Fn(usize)) -> Integers {
        // SAFETY: a block begins with 8 bytes of d and scales and goes on with codes.
        unsafe {
            let heads = quarters(|i| at(i).0);
            let scales = [iq4_xs_scales(heads[0]), iq4_xs_scales(heads[1])];
            let isum = |i: usize| {
                ask(i);
                iq4_xs_isum(at(i).0, at(i).1, quarter(scales, i))
            };
            let isums = [isum(0), isum(1), isum(2), isum(3), isum(4), isum(5), isum(6), isum(7)];
            let d = low_halves(word_of_quarters::<0>(heads));
            Integers { isums: sum8(isums), imins: None, d, dmin: _mm256_setzero_ps() }
        }
    }
}

/// Values are −127 to 113, so their signs move to the activations: the first eight are negative.
///
/// # Safety
/// As [`Affine::isum`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn iq4_xs_isum(w: *const BlockIQ4XS, a: ActBlock, scales: __m512i) -> __m512i {
    const { assert!(iq4_nl::VALUES[7] < 0 && iq4_nl::VALUES[8] > 0) };
    let mut sum = _mm512_setzero_si512();
    // SAFETY: a table of 16 bytes, 4 × 32 bytes of codes and 4 × 64 of activations.
    unsafe {
        let values = _mm_abs_epi8(_mm_loadu_si128(iq4_nl::VALUES.as_ptr().cast()));
        let values = _mm512_broadcast_i32x4(values);
        let codes: *const u8 = (&raw const (*w).qs).cast();
        for c in 0..4 {
            // 16 bytes twice, then the next 16: low halves, high halves.
            let both = _mm512_castsi256_si512(_mm256_loadu_si256(codes.add(32 * c).cast()));
            let both = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), both);
            let shifts = _mm512_broadcast_i64x4(_mm256_setr_epi64x(0, 0, FOURS, FOURS));
            let codes = _mm512_srlv_epi16(both, shifts);
            let negative = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(8));
            let codes = _mm512_and_si512(codes, _mm512_set1_epi8(15));
            let codes = _mm512_shuffle_epi8(values, codes);
            let acts = _mm512_loadu_si512(a.qs.add(64 * c).cast());
            let acts = _mm512_mask_sub_epi8(acts, negative, _mm512_setzero_si512(), acts);
            let pairs = _mm512_maddubs_epi16(codes, acts);
            sum = _mm512_dpwssd_epi32(sum, pairs, spread(scales, c));
        }
    }
    sum
}

const FOURS: i64 = 0x0004_0004_0004_0004;
