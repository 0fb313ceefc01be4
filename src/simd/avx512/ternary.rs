//! Eight blocks of TQ1_0 and TQ2_0: 256 values −1, 0 and 1 with one scale. The codes are found as
//! 0, 1 and 2, so the sum of the activations is taken off their products.

use super::eight::*;
use crate::quant::{BlockTQ1_0, BlockTQ2_0};
use crate::simd::avx2::ints::Ints;
use std::arch::x86_64::*;
use std::mem::offset_of;

/// A format of which 64 codes are found, multiplied by 2^[`Codes::SHIFT`].
trait Codes: Ints {
    const SHIFT: u32;
    /// The place of the scale in a block.
    const SCALE_AT: usize;

    /// Four times 64 codes, in [`EightBlocks::ORDER`].
    ///
    /// # Safety
    /// `w` leads to a whole block; the processor has this module's features.
    unsafe fn codes(w: *const Self) -> [__m512i; 4];
}

/// Σ (codes − 1) · activations of each block, and its scale.
///
/// # Safety
/// As [`EightBlocks::integers`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn integers<B: Codes>(at: impl At<B>, ask: impl Fn(usize)) -> Integers {
    const { assert!(B::SUMS == 16, "sixteen sums a block") };
    let isum = |i: usize| {
        ask(i);
        let (w, a) = at(i);
        // SAFETY: the caller's promises.
        unsafe {
            let [c0, c1, c2, c3] = B::codes(w);
            _mm512_add_epi32(dot([c0, c1], a.qs, 0), dot([c2, c3], a.qs, 1))
        }
    };
    let products = sum8([isum(0), isum(1), isum(2), isum(3), isum(4), isum(5), isum(6), isum(7)]);
    // SAFETY: sixteen i16 each.
    let (sums, more) = unsafe { (quarters(|i| at(i).1.sums), quarters(|i| at(i).1.sums.add(8))) };
    let ones = _mm512_set1_epi16(1);
    let four = |k: usize| _mm512_dpwssd_epi32(_mm512_madd_epi16(sums[k], ones), more[k], ones);
    let shift = _mm_cvtsi32_si128(B::SHIFT as i32);
    let isums = _mm256_sub_epi32(_mm256_sra_epi32(products, shift), sum_quarters(four(0), four(1)));
    // SAFETY: the scale lies within the block.
    let d = unsafe { eight_f16(|i| at(i).0.cast::<u8>().add(B::SCALE_AT)) };
    Integers { isums, imins: None, d, dmin: _mm256_setzero_ps() }
}

impl Codes for BlockTQ2_0 {
    const SHIFT: u32 = 0;
    const SCALE_AT: usize = offset_of!(BlockTQ2_0, d);

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn codes(w: *const Self) -> [__m512i; 4] {
        // SAFETY: 64 bytes of codes.
        let bytes = unsafe { _mm512_loadu_si512((&raw const (*w).qs).cast()) };
        let two_bits = |v| _mm512_and_si512(v, _mm512_set1_epi8(3));
        [
            two_bits(bytes),
            two_bits(_mm512_srli_epi16::<2>(bytes)),
            two_bits(_mm512_srli_epi16::<4>(bytes)),
            two_bits(_mm512_srli_epi16::<6>(bytes)),
        ]
    }
}

impl EightBlocks for BlockTQ2_0 {
    /// Codes of equal shift, of the first 32 bytes and of the others.
    const ORDER: [u8; 16] = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn integers(at: impl At<Self>, ask: impl Fn(usize)) -> Integers {
        // SAFETY: the caller's promise.
        unsafe { integers(at, ask) }
    }
}

/// Each byte times three, without what does not fit.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn times_three(bytes: __m512i) -> __m512i {
    _mm512_add_epi8(bytes, _mm512_add_epi8(bytes, bytes))
}

/// Quarter Q of `from` as the last quarter of `v`.
#[inline]
#[target_feature(enable = "avx512f")]
fn with_last_quarter<const Q: i32>(v: __m512i, from: __m512i) -> __m512i {
    const { assert!(Q == 0 || Q == 1 || Q == 2) };
    // Q in each of the four places, of which the mask takes the last.
    match Q {
        0 => _mm512_mask_shuffle_i32x4::<0b00_00_00_00>(v, 0xf000, from, from),
        1 => _mm512_mask_shuffle_i32x4::<0b01_01_01_01>(v, 0xf000, from, from),
        _ => _mm512_mask_shuffle_i32x4::<0b10_10_10_10>(v, 0xf000, from, from),
    }
}

impl Codes for BlockTQ1_0 {
    const SHIFT: u32 = 6;
    const SCALE_AT: usize = offset_of!(BlockTQ1_0, d);

    /// A byte's next digit is the integer part of 3 · byte / 256, which its top two bits are after
    /// 3 · byte / 4.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn codes(w: *const Self) -> [__m512i; 4] {
        // SAFETY: 48 bytes of five digits, and four of four, which fill the last quarter.
        let p0 = unsafe {
            let last = (&raw const (*w).qh).cast::<i32>().read_unaligned();
            let bytes = _mm512_maskz_loadu_epi32(0x0fff, (&raw const (*w).qs).cast());
            _mm512_mask_set1_epi32(bytes, 0xf000, last)
        };
        let p1 = times_three(p0);
        let p2 = times_three(p1);
        let p3 = times_three(p2);
        let p4 = times_three(p3);
        // The fifth digits take the place of the last quarters, of which the fourth vector's has
        // digit n of the four bytes as word n.
        let last = _mm512_mask_mov_epi32(p3, 0x1000, p0);
        let last = _mm512_mask_mov_epi32(last, 0x2000, p1);
        let last = _mm512_mask_mov_epi32(last, 0x4000, p2);
        let first_digits = |p: __m512i| {
            // A mean is rounded up, so with one less in both it is cut off.
            let p = _mm512_subs_epu8(p, _mm512_set1_epi8(1));
            let half = _mm512_avg_epu8(p, _mm512_setzero_si512());
            _mm512_and_si512(_mm512_avg_epu8(p, half), _mm512_set1_epi8(0xc0_u8 as i8))
        };
        [
            first_digits(with_last_quarter::<0>(p0, p4)),
            first_digits(with_last_quarter::<1>(p1, p4)),
            first_digits(with_last_quarter::<2>(p2, p4)),
            first_digits(last),
        ]
    }
}

impl EightBlocks for BlockTQ1_0 {
    /// Digit n of the first 32 bytes, then of the next 16; the last quarters are those of `codes`.
    const ORDER: [u8; 16] = [0, 1, 10, 8, 2, 3, 11, 9, 4, 5, 12, 14, 6, 7, 13, 15];

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn integers(at: impl At<Self>, ask: impl Fn(usize)) -> Integers {
        // SAFETY: the caller's promise.
        unsafe { integers(at, ask) }
    }
}
