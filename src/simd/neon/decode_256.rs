//! The codes, integer scales and mins of the formats of 256 values that store integers.

use super::decode::Decode;
use super::decode_32::{look_up, nibbles};
use crate::quant::{BlockIQ4XS, BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K};
use crate::quant::{BlockTQ1_0, BlockTQ2_0, iq4_nl};
use std::arch::aarch64::*;

/// 32 bytes.
///
/// # Safety
/// 32 bytes at `p` are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load(p: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promise.
    unsafe { [vld1q_u8(p), vld1q_u8(p.add(16))] }
}

#[inline]
#[target_feature(enable = "neon")]
fn map(v: [uint8x16_t; 2], f: impl Fn(uint8x16_t) -> uint8x16_t) -> [uint8x16_t; 2] {
    [f(v[0]), f(v[1])]
}

#[inline]
#[target_feature(enable = "neon")]
fn signed(v: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    [vreinterpretq_s8_u8(v[0]), vreinterpretq_s8_u8(v[1])]
}

/// Sixteen bytes widened.
#[inline]
#[target_feature(enable = "neon")]
fn wide(bytes: int8x16_t) -> [int16x8_t; 2] {
    [vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)]
}

/// Eight small numbers, the lowest byte first.
#[inline]
#[target_feature(enable = "neon")]
fn eight(bytes: u64) -> [int16x8_t; 2] {
    [vmovl_s8(vcreate_s8(bytes)), vdupq_n_s16(0)]
}

/// The four words that the block begins with: d and dmin, then the 12 packed bytes of Q4_K and
/// Q5_K (see `quant::k_scales`), of which these are a, b and c.
///
/// # Safety
/// 16 bytes at `block` are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn packed<B>(block: *const B) -> [u32; 3] {
    // SAFETY: the caller's promise; unaligned by intent.
    let words = unsafe { block.cast::<[u32; 4]>().read_unaligned() };
    [words[1], words[2], words[3]]
}

const SIX_BITS: u32 = 0x3f3f_3f3f;
const FOUR_BITS: u32 = 0x0f0f_0f0f;

/// Four of six bits in the low half, four whose top bits are those of `low` in the high half.
#[inline]
#[target_feature(enable = "neon")]
fn joined(low: u32, rest: u32) -> u64 {
    let high = rest & FOUR_BITS | (low >> 2 & 0x3030_3030);
    (low & SIX_BITS) as u64 | (high as u64) << 32
}

/// The eight scales of Q4_K and Q5_K.
///
/// # Safety
/// As `packed`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn k_scales<B>(block: *const B) -> [int16x8_t; 2] {
    // SAFETY: the caller's promise.
    let [a, _, c] = unsafe { packed(block) };
    eight(joined(a, c))
}

/// The eight mins of Q4_K and Q5_K.
///
/// # Safety
/// As `packed`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn k_mins<B>(block: *const B) -> [int16x8_t; 2] {
    // SAFETY: the caller's promise.
    let [_, b, c] = unsafe { packed(block) };
    eight(joined(b, c >> 4))
}

/// Half j mod 2 of the bytes 32·(j / 2) to 32·(j / 2) + 31.
///
/// # Safety
/// 128 bytes at `qs` are readable and j is below 8.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn k_nibbles(qs: *const [u8; 128], j: usize) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promise.
    let both = unsafe { load(qs.cast::<u8>().add(32 * (j / 2))) };
    match j % 2 {
        0 => map(both, |v| vandq_u8(v, vdupq_n_u8(15))),
        _ => map(both, |v| vshrq_n_u8::<4>(v)),
    }
}

impl Decode for BlockQ4K {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise.
        signed(unsafe { k_nibbles(&raw const (*w).qs, j) })
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: the caller's promise.
        unsafe { k_scales(w) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_mins(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: the caller's promise.
        unsafe { k_mins(w) }
    }
}

impl Decode for BlockQ5K {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: 128 bytes of low bits, 32 of top bits.
        let (low, top) =
            unsafe { (k_nibbles(&raw const (*w).qs, j), load((&raw const (*w).qh).cast())) };
        let bit = vdupq_n_u8(1 << j);
        let top = map(top, |v| vandq_u8(vtstq_u8(v, bit), vdupq_n_u8(16)));
        signed([vorrq_u8(low[0], top[0]), vorrq_u8(low[1], top[1])])
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: the caller's promise.
        unsafe { k_scales(w) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_mins(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: the caller's promise.
        unsafe { k_mins(w) }
    }
}

impl Decode for BlockQ6K {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        let (half, g) = (j / 4, j % 4);
        // SAFETY: 128 bytes of low bits, 64 of top bits.
        let (low, top) = unsafe {
            let low = (&raw const (*w).ql).cast::<u8>().add(64 * half + 32 * (g % 2));
            (load(low), load((&raw const (*w).qh).cast::<u8>().add(32 * half)))
        };
        let low = match g / 2 {
            0 => map(low, |v| vandq_u8(v, vdupq_n_u8(15))),
            _ => map(low, |v| vshrq_n_u8::<4>(v)),
        };
        // Bits 2g and 2g + 1 to bits 4 and 5.
        let shift = vdupq_n_s8(4 - 2 * g as i8);
        let top = map(top, |v| vandq_u8(vshlq_u8(v, shift), vdupq_n_u8(0x30)));
        let codes = signed([vorrq_u8(low[0], top[0]), vorrq_u8(low[1], top[1])]);
        let offset = vdupq_n_s8(32);
        [vsubq_s8(codes[0], offset), vsubq_s8(codes[1], offset)]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: 16 bytes of scales.
        wide(unsafe { vld1q_s8((&raw const (*w).scales).cast()) })
    }
}

/// Group j of codes of two bits at `qs`, see `quant::packing::two_bits`.
///
/// # Safety
/// 64 bytes at `qs` are readable and j is below 8.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn two_bits(qs: *const [u8; 64], j: usize) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promise.
    let four = unsafe { load(qs.cast::<u8>().add(32 * (j / 4))) };
    let shift = vdupq_n_s8(-2 * (j % 4) as i8);
    map(four, |v| vandq_u8(vshlq_u8(v, shift), vdupq_n_u8(3)))
}

impl Decode for BlockQ2K {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise.
        signed(unsafe { two_bits(&raw const (*w).qs, j) })
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: 16 bytes of scales and mins.
        let both = unsafe { vld1q_u8((&raw const (*w).scales).cast()) };
        wide(vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_mins(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: 16 bytes of scales and mins.
        let both = unsafe { vld1q_u8((&raw const (*w).scales).cast()) };
        wide(vreinterpretq_s8_u8(vshrq_n_u8::<4>(both)))
    }
}

impl Decode for BlockQ3K {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: 64 bytes of low bits, 32 of top bits.
        let (low, top) =
            unsafe { (two_bits(&raw const (*w).qs, j), load((&raw const (*w).hmask).cast())) };
        // Without the top bit, low − 4 is low with all bits above it set.
        let (bit, above) = (vdupq_n_u8(1 << j), vdupq_n_u8(0xfc));
        let top = map(top, |v| vbicq_u8(above, vtstq_u8(v, bit)));
        signed([vorrq_u8(low[0], top[0]), vorrq_u8(low[1], top[1])])
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: 12 bytes of scales: eight of low halves, four of top bits.
        let (low, top) = unsafe {
            let scales = (&raw const (*w).scales).cast::<u8>();
            (vld1_u8(scales), scales.add(8).cast::<u32>().read_unaligned() as u64)
        };
        let low = vcombine_u8(vand_u8(low, vdup_n_u8(15)), vshr_n_u8::<4>(low));
        // Scales 0 to 3 have bits 0 and 1 of the four bytes, 4 to 7 bits 2 and 3, and so on.
        let tops = top | (top >> 2) << 32;
        let tops = vcombine_u8(vcreate_u8(tops), vcreate_u8(tops >> 4));
        let tops = vshlq_n_u8::<4>(vandq_u8(tops, vdupq_n_u8(3)));
        let scales = vreinterpretq_s8_u8(vorrq_u8(low, tops));
        wide(vsubq_s8(scales, vdupq_n_s8(32)))
    }
}

impl Decode for BlockIQ4XS {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: eight times 16 bytes of codes.
        unsafe { look_up(&iq4_nl::VALUES, nibbles((&raw const (*w).qs).cast::<u8>().add(16 * j))) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: two bytes of top bits and four of low ones.
        let (top, low) = unsafe {
            let low = (&raw const (*w).scales_l).cast::<u32>().read_unaligned();
            (u16::from_le_bytes((*w).scales_h), low)
        };
        // Bytes of half bytes to bytes: the even ones, then the odd ones between them.
        let (even, odd) = (vcreate_u8((low & FOUR_BITS) as u64), low >> 4 & FOUR_BITS);
        let low = vmovl_u8(vzip1_u8(even, vcreate_u8(odd as u64)));
        // SAFETY: eight numbers.
        let shifts = unsafe { vld1q_s16([0, -2, -4, -6, -8, -10, -12, -14].as_ptr()) };
        let top = vandq_u16(vshlq_u16(vdupq_n_u16(top), shifts), vdupq_n_u16(3));
        let scales = vorrq_u16(low, vshlq_n_u16::<4>(top));
        let scales = vsubq_s16(vreinterpretq_s16_u16(scales), vdupq_n_s16(32));
        [scales, vdupq_n_s16(0)]
    }
}

/// Each byte times three, modulo 256.
#[inline]
#[target_feature(enable = "neon")]
fn times_three(bytes: uint8x16_t) -> uint8x16_t {
    vaddq_u8(bytes, vaddq_u8(bytes, bytes))
}

/// The first base-3 digit of each byte as a fraction of 256, minus 1: `(3·byte >> 8) − 1`.
#[inline]
#[target_feature(enable = "neon")]
fn first_trit(bytes: uint8x16_t) -> int8x16_t {
    // 3·86 = 258 and 3·171 = 513; a comparison that holds is −1.
    let at_least = |n| vreinterpretq_s8_u8(vcgeq_u8(bytes, vdupq_n_u8(n)));
    vsubq_s8(vsubq_s8(vdupq_n_s8(-1), at_least(86)), at_least(171))
}

/// `n` times [`times_three`], by the power of three modulo 256.
#[inline]
#[target_feature(enable = "neon")]
fn shifted_trits(bytes: uint8x16_t, n: usize) -> uint8x16_t {
    vmulq_u8(bytes, vdupq_n_u8([1, 3, 9, 27, 81][n]))
}

impl Decode for BlockTQ1_0 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: 48 bytes of five digits and four of four.
        let bytes = unsafe {
            let qs = (&raw const (*w).qs).cast::<u8>();
            match j {
                0..5 => map(load(qs), |v| shifted_trits(v, j)),
                5..7 => {
                    // Digits 2j − 10 and 2j − 9 of 16 bytes.
                    let first = shifted_trits(vld1q_u8(qs.add(32)), 2 * (j - 5));
                    [first, times_three(first)]
                }
                _ => {
                    // Digit 4 of 16 bytes, then digits 0 to 3 of the last four.
                    let last = (&raw const (*w).qh).cast::<u32>().read_unaligned();
                    let powers = [1u8, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27];
                    let last = vreinterpretq_u8_u32(vdupq_n_u32(last));
                    let last = vmulq_u8(last, vld1q_u8(powers.as_ptr()));
                    [shifted_trits(vld1q_u8(qs.add(32)), 4), last]
                }
            }
        };
        [first_trit(bytes[0]), first_trit(bytes[1])]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(_w: *const Self) -> [int16x8_t; 2] {
        [vdupq_n_s16(1); 2]
    }
}

impl Decode for BlockTQ2_0 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise.
        let codes = signed(unsafe { two_bits(&raw const (*w).qs, j) });
        let one = vdupq_n_s8(1);
        [vsubq_s8(codes[0], one), vsubq_s8(codes[1], one)]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(_w: *const Self) -> [int16x8_t; 2] {
        [vdupq_n_s16(1); 2]
    }
}
