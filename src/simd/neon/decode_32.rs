//! The codes of the formats of 32 values.

use super::decode::Decode;
use crate::quant::{BlockIQ4NL, BlockMXFP4, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1};
use crate::quant::{BlockQ8_0, BlockQ8_1, e2m1, iq4_nl};
use std::arch::aarch64::*;

/// 16 bytes' low halves, then their high halves.
///
/// # Safety
/// 16 bytes at `p` are readable.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn nibbles<T>(p: *const T) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { vld1q_u8(p.cast()) };
    [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)]
}

/// Entry i of a table for each of 32 indices i below 16.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn look_up(table: &[i8; 16], indices: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    // SAFETY: the table has 16 bytes.
    let table = unsafe { vld1q_s8(table.as_ptr()) };
    [vqtbl1q_s8(table, indices[0]), vqtbl1q_s8(table, indices[1])]
}

/// # Safety
/// 32 bytes at `p` are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn bytes<T>(p: *const T) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise.
    unsafe { [vld1q_s8(p.cast()), vld1q_s8(p.cast::<i8>().add(16))] }
}

#[inline]
#[target_feature(enable = "neon")]
pub(super) fn signed(v: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    [vreinterpretq_s8_u8(v[0]), vreinterpretq_s8_u8(v[1])]
}

/// Byte i is all ones if bit i of the little-endian word at `p` is set, else 0.
///
/// # Safety
/// Four bytes at `p` are readable.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn spread_bits<T>(p: *const T) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promise; unaligned by intent.
    let word = unsafe { p.cast::<u32>().read_unaligned() };
    // Byte i / 8 of the word at place i, then bit i mod 8 of it.
    let byte = |i: u32| vdup_n_u8((word >> (8 * i)) as u8);
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    [vtstq_u8(vcombine_u8(byte(0), byte(1)), bit), vtstq_u8(vcombine_u8(byte(2), byte(3)), bit)]
}

impl Decode for BlockQ8_0 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, _j: usize) -> [int8x16_t; 2] {
        // SAFETY: 32 bytes of codes.
        unsafe { bytes(&raw const (*w).qs) }
    }
}

impl Decode for BlockQ8_1 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, _j: usize) -> [int8x16_t; 2] {
        // SAFETY: 32 bytes of codes.
        unsafe { bytes(&raw const (*w).qs) }
    }
}

impl Decode for BlockQ4_0 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, _j: usize) -> [int8x16_t; 2] {
        // SAFETY: 16 bytes of codes.
        let codes = signed(unsafe { nibbles(&raw const (*w).qs) });
        let offset = vdupq_n_s8(8);
        [vsubq_s8(codes[0], offset), vsubq_s8(codes[1], offset)]
    }
}

impl Decode for BlockQ4_1 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, _j: usize) -> [int8x16_t; 2] {
        // SAFETY: 16 bytes of codes.
        signed(unsafe { nibbles(&raw const (*w).qs) })
    }
}

impl Decode for BlockQ5_0 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, _j: usize) -> [int8x16_t; 2] {
        // SAFETY: 16 bytes of low bits, four of top bits.
        let (low, top) = unsafe { (nibbles(&raw const (*w).qs), spread_bits(&raw const (*w).qh)) };
        // Without the top bit, low − 16 is low with all bits above it set.
        let above = vdupq_n_u8(0xf0);
        let of = |i: usize| vorrq_u8(low[i], vbicq_u8(above, top[i]));
        signed([of(0), of(1)])
    }
}

impl Decode for BlockQ5_1 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, _j: usize) -> [int8x16_t; 2] {
        // SAFETY: 16 bytes of low bits, four of top bits.
        let (low, top) = unsafe { (nibbles(&raw const (*w).qs), spread_bits(&raw const (*w).qh)) };
        let sixteen = vdupq_n_u8(16);
        let of = |i: usize| vorrq_u8(low[i], vandq_u8(top[i], sixteen));
        signed([of(0), of(1)])
    }
}

impl Decode for BlockMXFP4 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, _j: usize) -> [int8x16_t; 2] {
        // SAFETY: 16 bytes of codes.
        look_up(&e2m1::DOUBLED, unsafe { nibbles(&raw const (*w).qs) })
    }
}

impl Decode for BlockIQ4NL {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, _j: usize) -> [int8x16_t; 2] {
        // SAFETY: 16 bytes of codes.
        look_up(&iq4_nl::VALUES, unsafe { nibbles(&raw const (*w).qs) })
    }
}
