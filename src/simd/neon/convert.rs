//! Eight f16, bf16 or e4m3 to f32, and f16 back. Every AArch64 processor has the conversions of
//! f16; they are in assembly because their intrinsics are not stable in the Rust that Cargo.toml
//! asks for.

use super::lanes::F32x8;
use crate::quant::e4m3;
use std::arch::aarch64::*;
use std::arch::asm;

/// Exact; a signalling NaN becomes a quiet one.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn widen(h: uint16x8_t) -> F32x8 {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: registers only. It may set a floating-point status bit (which is never read), so it
    // does not claim to preserve flags.
    unsafe {
        asm!(
            "fcvtl {0:v}.4s, {2:v}.4h",
            "fcvtl2 {1:v}.4s, {2:v}.8h",
            out(vreg) low, lateout(vreg) high, in(vreg) h,
            options(pure, nomem, nostack),
        );
    }
    F32x8(low, high)
}

/// Rounds to nearest, ties to even.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn narrow(x: F32x8) -> uint16x8_t {
    let mut h: uint16x8_t;
    // SAFETY: as above.
    unsafe {
        asm!(
            "fcvtn {0:v}.4h, {1:v}.4s",
            "fcvtn2 {0:v}.8h, {2:v}.4s",
            out(vreg) h, in(vreg) x.0, in(vreg) x.1,
            options(pure, nomem, nostack),
        );
    }
    h
}

/// # Safety
/// Eight f16 at `p` are readable.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn load_f16(p: *const u16) -> F32x8 {
    // SAFETY: the caller's promise.
    widen(unsafe { vld1q_u16(p) })
}

/// # Safety
/// Eight bf16 at `p` are readable.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn load_bf16(p: *const u16) -> F32x8 {
    // SAFETY: the caller's promise.
    let h = unsafe { vld1q_u16(p) };
    let zero = vdupq_n_u16(0);
    // A bf16 is the upper half of an f32.
    let (low, high) = (vzip1q_u16(zero, h), vzip2q_u16(zero, h));
    F32x8(vreinterpretq_f32_u16(low), vreinterpretq_f32_u16(high))
}

/// # Safety
/// Eight bytes at `p` are readable.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn load_e4m3(p: *const u8) -> F32x8 {
    // SAFETY: the caller's promise.
    let bytes = vmovl_s8(unsafe { vld1_s8(p.cast()) });
    let nan = vdupq_n_s16(0x7f);
    let nan = vceqq_s16(vandq_s16(bytes, nan), nan);
    // The sign fills the bits above the magnitude.
    let bits = vandq_u16(vreinterpretq_u16_s16(vshlq_n_s16::<7>(bytes)), vdupq_n_u16(0xbf80));
    widen(vorrq_u16(bits, nan)).mul(F32x8::splat(e4m3::OVER_F16))
}
