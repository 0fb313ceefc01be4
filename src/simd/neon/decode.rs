//! Any format from one small function: "the 32 codes of group j as signed bytes". What a block
//! needs beyond that (its integer scales and mins) it states in the same way, and both products,
//! matrix–vector (`matvec`) and matrix–matrix (`gemm`), follow. Signed by signed is what the dot
//! products of NEON multiply, so no format needs an offset.

use super::convert::widen;
use super::dot::Dot;
use super::lanes::{F32x8, sums4};
use crate::quant::{IntBlock, Over, Stored};
use crate::simd::ActView;
use half::f16;
use std::arch::aarch64::*;

/// A block of 32 codes without sub-blocks, for Q8_0 activations, or of 256 codes with integer
/// scales, for Q8_K activations.
pub(super) trait Decode: IntBlock<Stored: Scale> {
    /// Codes 32j to 32j + 31.
    ///
    /// # Safety
    /// `w` leads to a whole block and j is below `LEN / 32`.
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2];

    /// The integer scales of 256 codes in order; the second vector counts if there are sixteen.
    ///
    /// # Safety
    /// `w` leads to a whole block.
    unsafe fn sub_scales(_w: *const Self) -> [int16x8_t; 2] {
        unreachable!("a format without integer scales")
    }

    /// The mins of 256 codes likewise; for formats with mins only.
    ///
    /// # Safety
    /// As `sub_scales`.
    unsafe fn sub_mins(_w: *const Self) -> [int16x8_t; 2] {
        unreachable!("a format without mins")
    }
}

/// Scales that become f32 eight at a time.
pub(super) trait Scale: Stored {
    /// # Safety
    /// The processor has NEON.
    unsafe fn eight(v: [Self; 8]) -> F32x8;
}

impl Scale for f16 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn eight(v: [f16; 8]) -> F32x8 {
        // SAFETY: eight values.
        widen(unsafe { vld1q_u16(v.as_ptr().cast()) })
    }
}

impl Scale for f32 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn eight(v: [f32; 8]) -> F32x8 {
        F32x8::from_array(&v)
    }
}

impl<const N: u32> Scale for Over<N> {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn eight(v: [Self; 8]) -> F32x8 {
        // SAFETY: NEON, the caller's promise.
        let d = unsafe { f16::eight(v.map(|h| h.0)) };
        d.mul(F32x8::splat(1.0 / N as f32))
    }
}

/// Elements an activation sum that the format's mins ask for.
pub(super) const fn sums_of<B: Decode>() -> usize {
    if B::LEN == 32 { 32 } else { B::SUB }
}

/// One token's activations.
#[derive(Clone, Copy)]
pub(super) struct Token {
    qs: *const i8,
    pub scales: *const f32,
    sums: *const i16,
}

/// One activation block: values, and sums of [`sums_of`] elements.
#[derive(Clone, Copy)]
pub(super) struct ActBlock {
    pub qs: *const i8,
    pub sums: *const i16,
}

impl Token {
    pub fn new<B: Decode>(acts: ActView, t: usize) -> Self {
        let sums = if sums_of::<B>() == 16 { acts.sums16(t) } else { acts.sums32(t) };
        Token { qs: acts.qs(t).as_ptr(), scales: acts.scales(t).as_ptr(), sums: sums.as_ptr() }
    }

    /// # Safety
    /// The row has more than `b` blocks.
    #[inline]
    #[target_feature(enable = "neon")]
    pub unsafe fn block<B: Decode>(self, b: usize) -> ActBlock {
        // SAFETY: within the row.
        unsafe {
            let sums = self.sums.add(b * (B::LEN / sums_of::<B>()));
            ActBlock { qs: self.qs.add(b * B::LEN), sums }
        }
    }
}

/// Scales 4k to 4k + 3 of a block.
#[inline]
#[target_feature(enable = "neon")]
fn four(scales: [int16x8_t; 2], k: usize) -> int32x4_t {
    let eight = scales[k / 2];
    if k % 2 == 0 { vmovl_s16(vget_low_s16(eight)) } else { vmovl_high_s16(eight) }
}

/// Four int32 that add up to `isum`.
///
/// # Safety
/// The pointers lead to a whole block each; the processor has what D needs.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn isum<B: Decode, D: Dot>(w: *const B, a: ActBlock) -> int32x4_t {
    let zero = vdupq_n_s32(0);
    // SAFETY: the block has LEN / 32 groups of codes and of activations.
    unsafe {
        let group = |j: usize| {
            let a = a.qs.add(32 * j);
            (B::codes(w, j), [vld1q_s8(a), vld1q_s8(a.add(16))])
        };
        if B::LEN == 32 {
            let (codes, a) = group(0);
            return D::dot(D::dot(zero, codes[0], a[0]), codes[1], a[1]);
        }
        let scales = B::sub_scales(w);
        let mut total = zero;
        for k in 0..B::LEN / B::SUB / 4 {
            // Four sub-blocks: their sums to the lanes of one vector, where the scales are.
            let mut sums = [zero; 4];
            if B::SUB == 32 {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let (codes, a) = group(4 * k + i);
                    *sum = D::dot(D::dot(zero, codes[0], a[0]), codes[1], a[1]);
                }
            } else {
                for i in 0..2 {
                    let (codes, a) = group(2 * k + i);
                    sums[2 * i] = D::dot(zero, codes[0], a[0]);
                    sums[2 * i + 1] = D::dot(zero, codes[1], a[1]);
                }
            }
            total = vmlaq_s32(total, sums4(sums), four(scales, k));
        }
        total
    }
}

/// Four int32 that add up to `imins`.
///
/// # Safety
/// The pointers lead to a whole block each.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn imins<B: Decode>(w: *const B, a: ActBlock) -> int32x4_t {
    // SAFETY: LEN / `sums_of` sums, which are one, eight or sixteen.
    unsafe {
        if B::LEN == 32 {
            return vsetq_lane_s32::<0>(*a.sums as i32, vdupq_n_s32(0));
        }
        let mins = B::sub_mins(w);
        let mut total = vdupq_n_s32(0);
        for k in 0..B::LEN / B::SUB / 8 {
            let sums = vld1q_s16(a.sums.add(8 * k));
            total = vmlal_s16(total, vget_low_s16(mins[k]), vget_low_s16(sums));
            total = vmlal_high_s16(total, mins[k], sums);
        }
        total
    }
}
