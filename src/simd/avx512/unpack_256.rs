//! Sixteen rows of the formats of 256 values. Everything but the transposition is the same for
//! each byte of a vector.

use super::panel::{
    Sixteen, Wide, byte, byte_pair, halves, look_up, low_16_bits, low_halves, nibbles, words,
    words_behind,
};
use crate::quant::iq4_nl;
use crate::quant::{BlockIQ4XS, BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, BlockTQ2_0};
use std::arch::x86_64::*;

/// 32 bytes from byte `offset` of each block, transposed by words.
///
/// # Safety
/// The bytes lie within the blocks; the processor has AVX-512 F and BW.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn eight_words<B>(w: [*const B; 16], offset: usize) -> [__m512i; 8] {
    // SAFETY: the caller's promise.
    let ([a, b, c, d], [e, f, g, h]) = unsafe { (words(w, offset), words(w, offset + 16)) };
    [a, b, c, d, e, f, g, h]
}

/// Scales, mins, d and dmin of Q4_K and Q5_K, whose blocks begin alike (see `k_scales`).
///
/// # Safety
/// The pointers lead to whole blocks; the processor has AVX-512 F and BW.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn unpack_affine<B>(w: [*const B; 16], panel: &mut Wide) {
    // SAFETY: 16 bytes: d and dmin, then three words of packed scales.
    let [d, a, b, c] = unsafe { words(w, 0) };
    panel.d = low_halves(d);
    panel.dmin = low_halves(_mm512_srli_epi32::<16>(d));
    let (six_bits, top_bits) = (_mm512_set1_epi8(63), _mm512_set1_epi8(0x30));
    let top = |v| _mm512_and_si512(_mm512_srli_epi16::<2>(v), top_bits);
    let (scales, mins) = nibbles(c);
    let scales = [_mm512_and_si512(a, six_bits), _mm512_or_si512(scales, top(a))];
    let mins = [_mm512_and_si512(b, six_bits), _mm512_or_si512(mins, top(b))];
    for half in 0..2 {
        for k in 0..4 {
            panel.scales[4 * half + k] = byte(scales[half], k);
        }
        panel.mins[2 * half] = byte_pair(mins[half], 0);
        panel.mins[2 * half + 1] = byte_pair(mins[half], 2);
    }
}

impl Sixteen for BlockQ4K {
    type Unpacked = Wide;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Wide) {
        // SAFETY: the caller's promise; 4 × 32 bytes of codes behind 16 of scales.
        unsafe {
            unpack_affine(w, panel);
            for c in 0..4 {
                for (i, both) in eight_words(w, 16 + 32 * c).into_iter().enumerate() {
                    (panel.codes[16 * c + i], panel.codes[16 * c + 8 + i]) = nibbles(both);
                }
            }
        }
    }
}

impl Sixteen for BlockQ5K {
    type Unpacked = Wide;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Wide) {
        // SAFETY: the caller's promise; 32 bytes of top bits and 4 × 32 of codes.
        unsafe {
            unpack_affine(w, panel);
            let mut tops = eight_words(w, 16);
            let one = _mm512_set1_epi8(1);
            let fifth = |top| _mm512_slli_epi16::<4>(_mm512_and_si512(top, one));
            for c in 0..4 {
                for (i, both) in eight_words(w, 48 + 32 * c).into_iter().enumerate() {
                    let (low, high) = nibbles(both);
                    let next = _mm512_srli_epi16::<1>(tops[i]);
                    panel.codes[16 * c + i] = _mm512_or_si512(low, fifth(tops[i]));
                    panel.codes[16 * c + 8 + i] = _mm512_or_si512(high, fifth(next));
                    tops[i] = _mm512_srli_epi16::<1>(next);
                }
            }
        }
    }
}

impl Sixteen for BlockQ6K {
    type Unpacked = Wide;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Wide) {
        // SAFETY: 128 low bytes, 64 high ones from byte 128, 16 scales from byte 192, d.
        unsafe {
            panel.d = halves(w, 208);
            for (n, scales) in words(w, 192).into_iter().enumerate() {
                for k in 0..4 {
                    let signed = _mm512_slli_epi32::<24>(byte(scales, k));
                    panel.scales[4 * n + k] = low_16_bits(_mm512_srai_epi32::<24>(signed));
                }
            }
            let two_bits = _mm512_set1_epi8(0x30);
            for half in 0..2 {
                let tops = eight_words(w, 128 + 32 * half);
                for part in 0..2 {
                    let lows = eight_words(w, 64 * half + 32 * part);
                    for i in 0..8 {
                        // Part 0 takes bits 0–1 and 4–5 of the top byte, part 1 bits 2–3, 6–7.
                        let top = match part {
                            0 => tops[i],
                            _ => _mm512_srli_epi16::<2>(tops[i]),
                        };
                        let (low, high) = nibbles(lows[i]);
                        let low_top = _mm512_and_si512(_mm512_slli_epi16::<4>(top), two_bits);
                        let high_top = _mm512_and_si512(top, two_bits);
                        let at = 32 * half + 8 * part + i;
                        panel.codes[at] = _mm512_or_si512(low, low_top);
                        panel.codes[at + 16] = _mm512_or_si512(high, high_top);
                    }
                }
            }
        }
    }
}

/// Codes of two bits from byte `offset` on (see `quant::packing::two_bits`), in order.
///
/// # Safety
/// 64 bytes lie within the blocks there; the processor has AVX-512 F and BW.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn two_bits<B>(w: [*const B; 16], offset: usize, codes: &mut [__m512i; 64]) {
    let three = _mm512_set1_epi8(3);
    for half in 0..2 {
        // SAFETY: the caller's promise.
        for (i, four) in unsafe { eight_words(w, offset + 32 * half) }.into_iter().enumerate() {
            let at = 32 * half + i;
            codes[at] = _mm512_and_si512(four, three);
            codes[at + 8] = _mm512_and_si512(_mm512_srli_epi16::<2>(four), three);
            codes[at + 16] = _mm512_and_si512(_mm512_srli_epi16::<4>(four), three);
            codes[at + 24] = _mm512_and_si512(_mm512_srli_epi16::<6>(four), three);
        }
    }
}

impl Sixteen for BlockQ2K {
    type Unpacked = Wide;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Wide) {
        // SAFETY: 16 bytes of scales and mins, 64 of codes, d and dmin from byte 80.
        unsafe {
            (panel.d, panel.dmin) = (halves(w, 80), halves(w, 82));
            for (n, both) in words(w, 0).into_iter().enumerate() {
                let (scales, mins) = nibbles(both);
                for k in 0..4 {
                    panel.scales[4 * n + k] = byte(scales, k);
                }
                panel.mins[2 * n] = byte_pair(mins, 0);
                panel.mins[2 * n + 1] = byte_pair(mins, 2);
            }
            two_bits(w, 16, &mut panel.codes);
        }
    }
}

impl Sixteen for BlockQ3K {
    type Unpacked = Wide;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Wide) {
        // SAFETY: 32 bytes of top bits, 64 of low ones, 12 of scales from byte 96, d at byte 108.
        unsafe {
            panel.d = halves(w, 108);
            let [first, second, tops, _] = words_behind::<_, 2>(w, 94);
            let ((a, c), (b, d)) = (nibbles(first), nibbles(second));
            for (n, low) in [a, b, c, d].into_iter().enumerate() {
                let top = _mm512_srl_epi16(tops, _mm_cvtsi32_si128(2 * n as i32));
                let top = _mm512_slli_epi16::<4>(_mm512_and_si512(top, _mm512_set1_epi8(3)));
                let scales = _mm512_or_si512(low, top);
                for k in 0..4 {
                    let scale = _mm512_sub_epi32(byte(scales, k), _mm512_set1_epi32(32));
                    panel.scales[4 * n + k] = low_16_bits(scale);
                }
            }
            two_bits(w, 32, &mut panel.codes);
            let four = _mm512_set1_epi8(4);
            for (i, tops) in eight_words(w, 0).into_iter().enumerate() {
                // Bit j of a byte becomes bit 2 of its code in group j.
                for j in 0..8 {
                    let top = match j {
                        0 => _mm512_slli_epi16::<2>(tops),
                        1 => _mm512_slli_epi16::<1>(tops),
                        _ => _mm512_srl_epi16(tops, _mm_cvtsi32_si128(j as i32 - 2)),
                    };
                    let codes = &mut panel.codes[8 * j + i];
                    *codes = _mm512_or_si512(*codes, _mm512_and_si512(top, four));
                }
            }
        }
    }
}

impl Sixteen for BlockIQ4XS {
    type Unpacked = Wide;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Wide) {
        // SAFETY: d, two bytes of top bits of scales, four of low ones, 128 of codes.
        unsafe {
            let [head, low, ..] = words(w, 0);
            panel.d = low_halves(head);
            let top = _mm512_srli_epi32::<16>(head);
            for j in 0..8 {
                let shift = |v, bits: usize| _mm512_srl_epi32(v, _mm_cvtsi32_si128(bits as i32));
                let low = _mm512_and_si512(shift(low, 4 * j), _mm512_set1_epi32(15));
                let top = _mm512_and_si512(shift(top, 2 * j), _mm512_set1_epi32(3));
                let scale = _mm512_or_si512(low, _mm512_slli_epi32::<4>(top));
                panel.scales[j] = _mm512_sub_epi32(scale, _mm512_set1_epi32(32));
                for (i, both) in words(w, 8 + 16 * j).into_iter().enumerate() {
                    let (low, high) = nibbles(both);
                    panel.codes[8 * j + i] = look_up(&iq4_nl::VALUES, Self::OFFSET, low);
                    panel.codes[8 * j + 4 + i] = look_up(&iq4_nl::VALUES, Self::OFFSET, high);
                }
            }
        }
    }
}

impl Sixteen for BlockTQ2_0 {
    type Unpacked = Wide;
    /// A code is the value plus 1 as it is.
    const OFFSET: u8 = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Wide) {
        // SAFETY: 64 bytes of codes, then d.
        unsafe {
            panel.d = halves(w, 64);
            panel.scales = [_mm512_set1_epi32(1); 16];
            let two_bits = _mm512_set1_epi8(3);
            for half in 0..2 {
                for (i, mut four) in eight_words(w, 32 * half).into_iter().enumerate() {
                    for j in 0..4 {
                        panel.codes[32 * half + 8 * j + i] = _mm512_and_si512(four, two_bits);
                        four = _mm512_srli_epi16::<2>(four);
                    }
                }
            }
        }
    }
}
