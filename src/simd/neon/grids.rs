//! The codes and integer scales of the grid formats (`quant::grids`): points are loaded from the
//! tables that the scalar code reads, four of eight bytes or eight of four for 32 codes, and get
//! their signs or shifts all at once.

use super::decode::Decode;
use crate::quant::{
    BlockIQ1M, BlockIQ1S, BlockIQ2S, BlockIQ2XS, BlockIQ2XXS, BlockIQ3S, BlockIQ3XXS,
};
use std::arch::aarch64::*;

/// Four points of eight values.
#[inline]
#[target_feature(enable = "neon")]
fn four(points: [&[i8; 8]; 4]) -> [int8x16_t; 2] {
    // SAFETY: eight values each.
    let load = |k: usize| unsafe { vld1_s8(points[k].as_ptr()) };
    [vcombine_s8(load(0), load(1)), vcombine_s8(load(2), load(3))]
}

/// Eight points of four values.
#[inline]
#[target_feature(enable = "neon")]
fn eight(points: [&[i8; 4]; 8]) -> [int8x16_t; 2] {
    let mut words = [0u32; 8];
    for (word, [a, b, c, d]) in words.iter_mut().zip(points) {
        *word = u32::from_le_bytes([*a as u8, *b as u8, *c as u8, *d as u8]);
    }
    // SAFETY: eight words.
    let (low, high) = unsafe { (vld1q_u32(words.as_ptr()), vld1q_u32(words.as_ptr().add(4))) };
    [vreinterpretq_s8_u32(low), vreinterpretq_s8_u32(high)]
}

/// Value i negated where bit i of `signs` is 1.
#[inline]
#[target_feature(enable = "neon")]
fn signed(values: [int8x16_t; 2], signs: u32) -> [int8x16_t; 2] {
    let byte = |i: u32| vdup_n_u8((signs >> (8 * i)) as u8);
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    let of = |values: int8x16_t, first: u32| {
        let minus = vtstq_u8(vcombine_u8(byte(first), byte(first + 1)), bit);
        vbslq_s8(minus, vnegq_s8(values), values)
    };
    [of(values[0], 0), of(values[1], 2)]
}

/// `8·value` of IQ1's points minus 1 where bit k of `down` is 1, plus 1 elsewhere.
#[inline]
#[target_feature(enable = "neon")]
fn shifted(values: [int8x16_t; 2], down: u8) -> [int8x16_t; 2] {
    let shift = |k: u8| vdup_n_s8(if down >> k & 1 == 1 { -1 } else { 1 });
    let of = |values: int8x16_t, first: u8| {
        vaddq_s8(vshlq_n_s8::<3>(values), vcombine_s8(shift(first), shift(first + 1)))
    };
    [of(values[0], 0), of(values[1], 2)]
}

/// `2s + 1` of sixteen bytes.
#[inline]
#[target_feature(enable = "neon")]
fn odd(s: uint8x16_t) -> [int16x8_t; 2] {
    let odd = vreinterpretq_s8_u8(vorrq_u8(vaddq_u8(s, s), vdupq_n_u8(1)));
    [vmovl_s8(vget_low_s8(odd)), vmovl_high_s8(odd)]
}

/// `2s + 1` of eight small numbers.
#[inline]
#[target_feature(enable = "neon")]
fn odd_of(s: [u8; 8]) -> [int16x8_t; 2] {
    // SAFETY: eight bytes.
    let s = unsafe { vld1_u8(s.as_ptr()) };
    odd(vcombine_u8(s, s))
}

/// `2s + 1` of the half bytes of eight bytes, low halves first.
///
/// # Safety
/// Eight bytes at `p` are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn odd_of_half_bytes(p: *const [u8; 8]) -> [int16x8_t; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { vld1_u8(p.cast()) };
    let (low, high) = (vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8::<4>(bytes));
    odd(vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)))
}

impl Decode for BlockIQ2XXS {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, signs) = unsafe { &*w }.points(j);
        signed(four(points), signs)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: eight groups of eight bytes, the scale in the top half of the last.
        let bytes = unsafe { (&raw const (*w).groups).cast::<[[u8; 8]; 8]>().read() };
        odd_of(bytes.map(|group| group[7] >> 4))
    }
}

impl Decode for BlockIQ2XS {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, signs) = unsafe { &*w }.points(j);
        signed(four(points), signs)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: within the block.
        unsafe { odd_of_half_bytes(&raw const (*w).scales) }
    }
}

impl Decode for BlockIQ2S {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, signs) = unsafe { &*w }.points(j);
        signed(four(points), signs)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: within the block.
        unsafe { odd_of_half_bytes(&raw const (*w).scales) }
    }
}

impl Decode for BlockIQ3XXS {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, signs) = unsafe { &*w }.points(j);
        signed(eight(points), signs)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: eight words, the scale in the top half of the last byte.
        let bytes = unsafe { (&raw const (*w).words).cast::<[[u8; 4]; 8]>().read() };
        odd_of(bytes.map(|word| word[3] >> 4))
    }
}

impl Decode for BlockIQ3S {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, signs) = unsafe { &*w }.points(j);
        signed(eight(points), signs)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: four bytes.
        let halves = unsafe { (&raw const (*w).scales).cast::<u32>().read_unaligned() };
        odd_of([0, 4, 8, 12, 16, 20, 24, 28].map(|shift| (halves >> shift) as u8 & 15))
    }
}

impl Decode for BlockIQ1S {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, down) = unsafe { &*w }.points(j);
        shifted(four(points), down)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: eight words of two bytes, the scale in bits 12 to 14.
        let bytes = unsafe { (&raw const (*w).qh).cast::<[[u8; 2]; 8]>().read() };
        odd_of(bytes.map(|word| word[1] >> 4 & 7))
    }
}

impl Decode for BlockIQ1M {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise; a block has no alignment.
        let (points, down) = unsafe { &*w }.points(j);
        shifted(four(points), down)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub_scales(w: *const Self) -> [int16x8_t; 2] {
        // SAFETY: four words of four scales.
        let words = unsafe { (&raw const (*w).scales).cast::<[[u8; 2]; 4]>().read() };
        let words = words.map(u16::from_le_bytes);
        let scales: [u8; 16] = std::array::from_fn(|j| (words[j / 4] >> (3 * (j % 4))) as u8 & 7);
        // SAFETY: sixteen bytes.
        odd(unsafe { vld1q_u8(scales.as_ptr()) })
    }
}
