//! Attention's loops; `simd::tile` says what each computes.

mod axpy;
mod convert;
mod dot;
mod softmax;

use std::arch::x86_64::*;

pub(super) use axpy::tile_axpy;
pub(super) use convert::{bf16_to_f32, dequantize, f16_to_f32};
pub(super) use dot::tile_dot;
pub(super) use softmax::{exp, tile_softmax};

/// The first `n` lanes of sixteen, or all.
#[inline]
fn first(n: usize) -> u16 {
    u16::MAX >> (16 - n.min(16))
}

/// The tree of "One arithmetic", with any operation, of the two halves of eight vectors: those of
/// the first four vectors in the first half of the result, low halves before high ones, then those
/// of the others.
#[inline]
#[target_feature(enable = "avx512f")]
fn trees(v: [__m512; 8], op: impl Fn(__m512, __m512) -> __m512) -> __m512 {
    let fours = |a, b| {
        let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        op(low, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
    };
    in_fours([fours(v[0], v[4]), fours(v[1], v[5]), fours(v[2], v[6]), fours(v[3], v[7])], op)
}

/// The rest of the tree in each four lanes of four vectors: the sums of the vectors' first four
/// lanes, then those of the next.
#[inline]
#[target_feature(enable = "avx512f")]
fn in_fours(v: [__m512; 4], op: impl Fn(__m512, __m512) -> __m512) -> __m512 {
    let twos = |a, b| {
        let low = _mm512_shuffle_ps::<0b01_00_01_00>(a, b);
        op(low, _mm512_shuffle_ps::<0b11_10_11_10>(a, b))
    };
    let ones = |a, b| {
        let even = _mm512_shuffle_ps::<0b10_00_10_00>(a, b);
        op(even, _mm512_shuffle_ps::<0b11_01_11_01>(a, b))
    };
    ones(twos(v[0], v[1]), twos(v[2], v[3]))
}
