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

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(f: impl Fn(usize) -> i8) -> ([i32; 16], int8x16_t) {
        let bytes: [i8; 16] = std::array::from_fn(f);
        // SAFETY: sixteen bytes.
        (bytes.map(i32::from), unsafe { vld1q_s8(bytes.as_ptr()) })
    }

    fn lanes(v: int32x4_t) -> [i32; 4] {
        let mut out = [0; 4];
        // SAFETY: four places.
        unsafe { vst1q_s32(out.as_mut_ptr(), v) };
        out
    }

    /// Products of `a` with each of the four groups of `b`, lane by lane, and of all with all.
    fn check<D: Dot>((a, va): ([i32; 16], int8x16_t), (b, vb): ([i32; 16], int8x16_t)) {
        let start = [7, -9, 1 << 30, -(1 << 30)];
        // SAFETY: four numbers; the caller's processor has what D needs.
        let (all, by_lane) = unsafe {
            let sum = vld1q_s32(start.as_ptr());
            let by_lane = [
                D::dot_lane::<0>(sum, va, vb),
                D::dot_lane::<1>(sum, va, vb),
                D::dot_lane::<2>(sum, va, vb),
                D::dot_lane::<3>(sum, va, vb),
            ];
            (lanes(D::dot(sum, va, vb)), by_lane.map(lanes))
        };
        let products: i32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
        assert_eq!(all.iter().sum::<i32>(), start.iter().sum::<i32>() + products);
        for (group, got) in by_lane.into_iter().enumerate() {
            let want: [i32; 4] = std::array::from_fn(|lane| {
                start[lane] + (0..4).map(|k| a[4 * lane + k] * b[4 * group + k]).sum::<i32>()
            });
            assert_eq!(got, want, "group {group}");
        }
    }

    /// The largest magnitudes of either sign, in every neighbourhood, and numbers all different.
    #[test]
    fn both_ways_are_exact() {
        let weights: [fn(usize) -> i8; 4] =
            [|_| -128, |_| 127, |i| [-128, 127][i % 2], |i| (i * 37 % 251) as i8];
        let acts: [fn(usize) -> i8; 4] =
            [|_| -127, |_| 127, |i| [127, -127][i / 2 % 2], |i| (i * 29 % 127) as i8 - 63];
        for (w, a) in weights.into_iter().flat_map(|w| acts.map(|a| (w, a))) {
            check::<Smull>(vector(w), vector(a));
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                check::<Sdot>(vector(w), vector(a));
            }
        }
    }
}
