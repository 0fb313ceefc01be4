//! Products of Q1_0 and Q2_0 with a few tokens: a part of 32 values is a block of "One arithmetic",
//! so eight parts, of two or four stored blocks, fill the eight lanes.

use super::decode_32::{signed, spread_bits};
use super::dot::Dot;
use super::lanes::{F32x8, I32x8};
use crate::quant::{BlockQ1_0, BlockQ2_0, Parts};
use crate::simd::{Matmul, Product, Scratch, parts};
use std::arch::aarch64::*;

/// The codes of a part.
pub(super) trait Codes: Parts {
    /// Each value over d.
    ///
    /// # Safety
    /// `w` leads to a whole block and j is below `PARTS`.
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2];
}

/// Codes less 1.
#[inline]
#[target_feature(enable = "neon")]
fn less_one(codes: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    let one = vdupq_n_u8(1);
    signed([vsubq_u8(codes[0], one), vsubq_u8(codes[1], one)])
}

impl Codes for BlockQ1_0 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: four times four bytes of bits.
        let set = unsafe { spread_bits((&raw const (*w).qs).cast::<u8>().add(4 * j)) };
        let two = vdupq_n_u8(2);
        less_one([vandq_u8(set[0], two), vandq_u8(set[1], two)])
    }
}

impl Codes for BlockQ2_0 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(w: *const Self, j: usize) -> [int8x16_t; 2] {
        // SAFETY: two times eight bytes of codes.
        let bytes = unsafe { vld1_u8((&raw const (*w).qs).cast::<u8>().add(8 * j)) };
        // Each byte four times, shifted down by 0, 2, 4 and 6 bits.
        let twice = vzip1q_u8(vcombine_u8(bytes, bytes), vcombine_u8(bytes, bytes));
        let shifts = vreinterpretq_s8_u32(vdupq_n_u32(u32::from_le_bytes([0, 254, 252, 250])));
        let of = |four| vandq_u8(vshlq_u8(four, shifts), vdupq_n_u8(3));
        less_one([of(vzip1q_u8(twice, twice)), of(vzip2q_u8(twice, twice))])
    }
}

/// One token's activations from some part on.
#[derive(Clone, Copy)]
struct Token {
    qs: *const i8,
    scales: *const f32,
}

/// Many tokens go through `many`, which multiplies Q4_0.
///
/// # Safety
/// As [`Product`] says, on a processor with what D needs; B is the matrix's type, and `many` may be
/// called.
#[target_feature(enable = "neon")]
pub(super) unsafe fn matmul<B: Codes, D: Dot>(
    product: Product,
    scratch: &mut Scratch,
    many: Matmul,
) {
    let acts = product.acts;
    if acts.tokens() >= parts::FEWEST {
        // SAFETY: the caller's promises.
        return unsafe { parts::by_q4_0::<B>(product, scratch, many) };
    }
    for t in 0..acts.tokens() {
        let token = Token { qs: acts.qs(t).as_ptr(), scales: acts.scales(t).as_ptr() };
        for r in 0..product.rows {
            // SAFETY: rows below `mat.rows` lie within `data`; the places in `out` are the
            // caller's promise.
            unsafe {
                let dot = dot_row::<B, D>(product.row(r).cast(), product.mat.cols / 32, token);
                product.place(t, r).write(dot);
            }
        }
    }
}

/// # Safety
/// `row` leads to `n` parts and `token` to as many; the processor has what D needs.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn dot_row<B: Codes, D: Dot>(row: *const B, n: usize, token: Token) -> f32 {
    let mut lanes = F32x8::zero();
    let (whole, rest) = (n / 8 * 8, n % 8);
    // SAFETY: parts below `n` exist; the copies are as long as eight parts.
    unsafe {
        let behind = |b: usize| Token { qs: token.qs.add(32 * b), scales: token.scales.add(b) };
        for b in (0..whole).step_by(8) {
            lanes = add_eight::<B, D>(row.add(b / B::PARTS), behind(b), lanes);
        }
        if rest > 0 {
            // Those left and some of zeros, whose lanes keep what they have: their scales are 0.
            let mut blocks = [[0u8; 18]; 4];
            let (mut qs, mut scales) = ([0; 256], [0.0; 8]);
            let (from, token) = (row.add(whole / B::PARTS), behind(whole));
            from.copy_to_nonoverlapping(blocks.as_mut_ptr().cast(), rest / B::PARTS);
            token.qs.copy_to_nonoverlapping(qs.as_mut_ptr(), 32 * rest);
            token.scales.copy_to_nonoverlapping(scales.as_mut_ptr(), rest);
            let token = Token { qs: qs.as_ptr(), scales: scales.as_ptr() };
            lanes = add_eight::<B, D>(blocks.as_ptr().cast(), token, lanes);
        }
    }
    lanes.tree()
}

/// `lanes` plus eight parts from those at `w` on, one a lane.
///
/// # Safety
/// `w` and `token` lead to eight parts; the processor has what D needs.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn add_eight<B: Codes, D: Dot>(w: *const B, token: Token, lanes: F32x8) -> F32x8 {
    let zero = vdupq_n_s32(0);
    let (mut sums, mut d) = ([zero; 8], [0.0; 8]);
    for i in 0..8 {
        // SAFETY: part i is there.
        unsafe {
            let (block, a) = (w.add(i / B::PARTS), token.qs.add(32 * i));
            let codes = B::codes(block, i % B::PARTS);
            let half = D::dot(zero, codes[0], vld1q_s8(a));
            sums[i] = D::dot(half, codes[1], vld1q_s8(a.add(16)));
            d[i] = (*block).scale().get();
        }
    }
    // SAFETY: eight scales.
    let a = unsafe { F32x8::load(token.scales) };
    lanes.fma(F32x8::from_array(&d).mul(a), I32x8::sums(sums).to_f32())
}
