//! Eight f32 or int32 lanes as two vectors of four, and the sums across them.

use std::arch::aarch64::*;

/// Lanes 0 to 3, then 4 to 7.
#[derive(Clone, Copy)]
pub(super) struct F32x8(pub float32x4_t, pub float32x4_t);

#[derive(Clone, Copy)]
pub(super) struct I32x8(pub int32x4_t, pub int32x4_t);

impl F32x8 {
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn splat(x: f32) -> Self {
        F32x8(vdupq_n_f32(x), vdupq_n_f32(x))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    pub fn zero() -> Self {
        Self::splat(0.0)
    }

    /// # Safety
    /// Eight values at `p` are readable.
    #[inline]
    #[target_feature(enable = "neon")]
    pub unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { F32x8(vld1q_f32(p), vld1q_f32(p.add(4))) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    pub fn from_array(x: &[f32; 8]) -> Self {
        // SAFETY: eight values.
        unsafe { Self::load(x.as_ptr()) }
    }

    /// # Safety
    /// Eight places at `p` are writable.
    #[inline]
    #[target_feature(enable = "neon")]
    pub unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            vst1q_f32(p, self.0);
            vst1q_f32(p.add(4), self.1);
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    pub fn to_array(self) -> [f32; 8] {
        let mut out = [0f32; 8];
        // SAFETY: eight places.
        unsafe { self.store(out.as_mut_ptr()) };
        out
    }

    #[inline]
    #[target_feature(enable = "neon")]
    pub fn add(self, x: Self) -> Self {
        F32x8(vaddq_f32(self.0, x.0), vaddq_f32(self.1, x.1))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    pub fn sub(self, x: Self) -> Self {
        F32x8(vsubq_f32(self.0, x.0), vsubq_f32(self.1, x.1))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    pub fn mul(self, x: Self) -> Self {
        F32x8(vmulq_f32(self.0, x.0), vmulq_f32(self.1, x.1))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    pub fn div(self, x: Self) -> Self {
        F32x8(vdivq_f32(self.0, x.0), vdivq_f32(self.1, x.1))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    pub fn neg(self) -> Self {
        F32x8(vnegq_f32(self.0), vnegq_f32(self.1))
    }

    /// `self + x·y`, rounded once.
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn fma(self, x: Self, y: Self) -> Self {
        F32x8(vfmaq_f32(self.0, x.0, y.0), vfmaq_f32(self.1, x.1, y.1))
    }

    /// `self − x·y`, rounded once.
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn fms(self, x: Self, y: Self) -> Self {
        F32x8(vfmsq_f32(self.0, x.0, y.0), vfmsq_f32(self.1, x.1, y.1))
    }

    /// x where it is larger, else what was there: a NaN in x never counts. FMAX would give NaN.
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn larger(self, x: Self) -> Self {
        let each = |old, x| vbslq_f32(vcgtq_f32(x, old), x, old);
        F32x8(each(self.0, x.0), each(self.1, x.1))
    }

    /// The tree of "One arithmetic".
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn tree(self) -> f32 {
        let four = vaddq_f32(self.0, self.1);
        let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        vpadds_f32(two)
    }

    /// Lane i is the [`F32x8::tree`] of `v[i]`.
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn trees(v: [Self; 8]) -> Self {
        let twos = |i: usize| {
            let (x, y) = (vaddq_f32(v[i].0, v[i].1), vaddq_f32(v[i + 1].0, v[i + 1].1));
            let (x, y) = (vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y));
            let low = vreinterpretq_f32_f64(vzip1q_f64(x, y));
            vaddq_f32(low, vreinterpretq_f32_f64(vzip2q_f64(x, y)))
        };
        F32x8(vpaddq_f32(twos(0), twos(2)), vpaddq_f32(twos(4), twos(6)))
    }

    /// The tree of `tree`, where `v[i]` is lane i of eight dot products, one a place.
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn tree_of(v: [Self; 8]) -> Self {
        let [a, b, c, d, e, f, g, h] = v;
        let (a, b, c, d) = (a.add(e), b.add(f), c.add(g), d.add(h));
        a.add(c).add(b.add(d))
    }
}

impl I32x8 {
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn splat(x: i32) -> Self {
        I32x8(vdupq_n_s32(x), vdupq_n_s32(x))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    pub fn to_f32(self) -> F32x8 {
        F32x8(vcvtq_f32_s32(self.0), vcvtq_f32_s32(self.1))
    }

    /// Lane i is the sum of the four lanes of `v[i]`.
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn sums(v: [int32x4_t; 8]) -> Self {
        let [a, b, c, d, e, f, g, h] = v;
        I32x8(sums4([a, b, c, d]), sums4([e, f, g, h]))
    }
}

/// Lane i is the sum of the lanes of `v[i]`.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn sums4(v: [int32x4_t; 4]) -> int32x4_t {
    vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]))
}
