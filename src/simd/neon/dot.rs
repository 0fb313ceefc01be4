//! Products of signed bytes, added to int32 lanes, in two ways with the same sums.

use std::arch::aarch64::*;
use std::arch::asm;

pub(super) trait Dot: Default {
    /// Lanes that add up to those of `sum` plus the sixteen products; which product goes to which
    /// lane is each way's to choose. `b` is in ±127.
    ///
    /// # Safety
    /// The processor has what this way needs.
    unsafe fn dot(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t;

    /// Lane i plus the four products of bytes 4i to 4i + 3 of `a` with bytes 4·LANE to
    /// 4·LANE + 3 of `b`, which are in ±127.
    ///
    /// # Safety
    /// The processor has what this way needs.
    unsafe fn dot_lane<const LANE: i32>(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t;
}

/// One instruction of the dot product extension (FEAT_DotProd). In assembly, as the intrinsics are
/// not in stable Rust; the extension is switched on for that line only, so that the compiler
/// uses it nowhere else.
#[derive(Default)]
pub(super) struct Sdot;

impl Dot for Sdot {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn dot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: registers only; the processor has the extension, the caller's promise.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
                inout(vreg) sum, in(vreg) a, in(vreg) b,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sum
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn dot_lane<const LANE: i32>(
        mut sum: int32x4_t,
        a: int8x16_t,
        b: int8x16_t,
    ) -> int32x4_t {
        // SAFETY: as above.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {0:v}.4s, {1:v}.16b, {2:v}.4b[{lane}]",
                inout(vreg) sum, in(vreg) a, in(vreg) b, lane = const LANE,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sum
    }
}

/// Without the extension: products to int16, neighbours added to int32. A sum of two products fits
/// an int16, as activations are in ±127 and codes in ±128: 2·128·127 = 32512.
#[derive(Default)]
pub(super) struct Smull;

impl Dot for Smull {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn dot(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        let pairs = vmlal_high_s8(vmull_s8(vget_low_s8(a), vget_low_s8(b)), a, b);
        vpadalq_s16(sum, pairs)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn dot_lane<const LANE: i32>(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        let b = vreinterpretq_s8_s32(vdupq_laneq_s32::<LANE>(vreinterpretq_s32_s8(b)));
        let (low, high) = (vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
        vpadalq_s16(sum, vpaddq_s16(low, high))
    }
}
