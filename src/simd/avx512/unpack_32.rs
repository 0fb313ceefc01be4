//! Sixteen rows of the formats of 32 values.

use super::panel::{Narrow, Sixteen, halves, look_up, nibbles, words};
use crate::quant::{BlockMXFP4, BlockQ4_0, BlockQ8_0, e2m1, mxfp4};
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
