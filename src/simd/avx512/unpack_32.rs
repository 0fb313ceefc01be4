//! Sixteen rows of the formats of 32 values.

use super::panel::{Narrow, Sixteen, halves, look_up, low_halves, nibbles, word, words};
use crate::quant::{BlockIQ4NL, BlockMXFP4, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};
use crate::quant::{e2m1, iq4_nl, mxfp4};
use std::arch::x86_64::*;

impl Sixteen for BlockQ4_0 {
    type Unpacked = Narrow;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Narrow) {
        // SAFETY: a scale and, from byte 2, 16 bytes of codes.
        unsafe {
            panel.d = halves(w, 0);
            for (i, both) in words(w, 2).into_iter().enumerate() {
                (panel.codes[i], panel.codes[i + 4]) = nibbles(both);
            }
        }
    }
}

impl Sixteen for BlockQ8_0 {
    type Unpacked = Narrow;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Narrow) {
        // SAFETY: a scale and, from byte 2, 32 bytes of codes.
        unsafe {
            panel.d = halves(w, 0);
            let sign = _mm512_set1_epi8(i8::MIN);
            for part in 0..2 {
                for (i, codes) in words(w, 2 + 16 * part).into_iter().enumerate() {
                    panel.codes[4 * part + i] = _mm512_xor_si512(codes, sign);
                }
            }
        }
    }
}

impl Sixteen for BlockMXFP4 {
    type Unpacked = Narrow;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Narrow) {
        // SAFETY: an exponent and, from byte 1, 16 bytes of codes; the array has 64 bytes.
        unsafe {
            let mut d = [0f32; 16];
            for (d, w) in d.iter_mut().zip(w) {
                *d = mxfp4::half_power((*w).e);
            }
            panel.d = _mm512_loadu_ps(d.as_ptr());
            for (i, both) in words(w, 1).into_iter().enumerate() {
                let (low, high) = nibbles(both);
                panel.codes[i] = look_up(&e2m1::DOUBLED, Self::OFFSET, low);
                panel.codes[i + 4] = look_up(&e2m1::DOUBLED, Self::OFFSET, high);
            }
        }
    }
}

impl Sixteen for BlockIQ4NL {
    type Unpacked = Narrow;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Narrow) {
        // SAFETY: a scale and, from byte 2, 16 bytes of codes.
        unsafe {
            panel.d = halves(w, 0);
            for (i, both) in words(w, 2).into_iter().enumerate() {
                let (low, high) = nibbles(both);
                panel.codes[i] = look_up(&iq4_nl::VALUES, Self::OFFSET, low);
                panel.codes[i + 4] = look_up(&iq4_nl::VALUES, Self::OFFSET, high);
            }
        }
    }
}

impl Sixteen for BlockQ4_1 {
    type Unpacked = Narrow;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Narrow) {
        // SAFETY: a scale, a min and, from byte 4, 16 bytes of codes.
        unsafe {
            (panel.d, panel.dmin) = scale_and_min(word(w, 0));
            for (i, both) in words(w, 4).into_iter().enumerate() {
                (panel.codes[i], panel.codes[i + 4]) = nibbles(both);
            }
        }
    }
}

/// A code of 5 bits with nothing subtracted is the code plus 16.
impl Sixteen for BlockQ5_0 {
    type Unpacked = Narrow;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Narrow) {
        // SAFETY: a scale, from byte 2 a word of top bits and from byte 6 16 bytes of codes.
        unsafe {
            panel.d = halves(w, 0);
            five_bits(word(w, 2), words(w, 6), &mut panel.codes);
        }
    }
}

impl Sixteen for BlockQ5_1 {
    type Unpacked = Narrow;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Narrow) {
        // SAFETY: a scale, a min, from byte 4 a word of top bits and from byte 8 16 bytes of codes.
        unsafe {
            (panel.d, panel.dmin) = scale_and_min(word(w, 0));
            five_bits(word(w, 4), words(w, 8), &mut panel.codes);
        }
    }
}

/// Each word's low half, and minus its high half: the sign that [`crate::quant::IntBlock`] gives
/// to a min that is added.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn scale_and_min(both: __m512i) -> (__m512, __m512) {
    let negative = _mm512_xor_si512(both, _mm512_set1_epi32(i32::MIN));
    (low_halves(both), low_halves(_mm512_srli_epi32::<16>(negative)))
}

/// The 32 codes of each row, whose fifth bits are those of its word in `tops`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn five_bits(tops: __m512i, low: [__m512i; 4], codes: &mut [__m512i; 8]) {
    let sixteen = _mm512_set1_epi8(16);
    let fifth = |g: usize, codes: __m512i| {
        // Byte g / 2 of the word has the bits of two groups.
        let in_word = _mm512_set4_epi32(0x0c0c_0c0c, 0x0808_0808, 0x0404_0404, 0);
        let byte = _mm512_add_epi8(in_word, _mm512_set1_epi8((g / 2) as i8));
        let bits = _mm512_set1_epi32(if g.is_multiple_of(2) {
            0x0804_0201
        } else {
            0x8040_2010_u32 as i32
        });
        let is_set = _mm512_test_epi8_mask(_mm512_shuffle_epi8(tops, byte), bits);
        _mm512_mask_add_epi8(codes, is_set, codes, sixteen)
    };
    for (i, both) in low.into_iter().enumerate() {
        let (low, high) = nibbles(both);
        (codes[i], codes[i + 4]) = (fifth(i, low), fifth(i + 4, high));
    }
}
