//! Products of NVFP4. Each sub-block of 16 is a block of "One arithmetic", so two stored blocks
//! fill the eight lanes: their eight integers come out of the horizontal sums in two vectors, in
//! order, and two fmas add them. Up to four tokens share the unpacking.

use super::decode_32::look_up;
use super::dot::Dot;
use super::lanes::{F32x8, I32x8};
use crate::quant::nvfp4::half_e4m3;
use crate::quant::{BlockNVFP4, e2m1};
use crate::simd::{ActView, Product};
use std::arch::aarch64::*;

const TILE: usize = 4;

/// One token's activations.
#[derive(Clone, Copy)]
struct Token {
    qs: *const i8,
    scales: *const f32,
}

/// Two stored blocks: the codes of the eight sub-blocks and their scales.
struct Pair {
    codes: [int8x16_t; 8],
    d: F32x8,
}

/// # Safety
/// As [`Product`] says, on a processor with what D needs; the matrix is NVFP4.
#[target_feature(enable = "neon")]
pub(super) unsafe fn matmul<D: Dot>(product: Product) {
    let Product { mat, acts, .. } = product;
    let out_stride = product.out.stride;
    let blocks = mat.cols / 64;
    for r in 0..product.rows {
        // SAFETY: rows below `mat.rows` lie within `data`; the places in `out` are the caller's
        // promise.
        unsafe {
            let row = product.row(r).cast();
            for t in (0..acts.tokens()).step_by(TILE) {
                let out = product.place(t, r);
                match acts.tokens() - t {
                    1 => tile::<D, 1>(row, blocks, acts, t, out, out_stride),
                    2 => tile::<D, 2>(row, blocks, acts, t, out, out_stride),
                    3 => tile::<D, 3>(row, blocks, acts, t, out, out_stride),
                    _ => tile::<D, TILE>(row, blocks, acts, t, out, out_stride),
                }
            }
        }
    }
}

/// One row times tokens `t` to `t + T − 1`.
///
/// # Safety
/// `row` leads to `blocks` blocks, the tokens exist and have as many columns, `out` takes a value
/// at each of T multiples of `out_stride`; the processor has what D needs.
#[target_feature(enable = "neon")]
unsafe fn tile<D: Dot, const T: usize>(
    row: *const BlockNVFP4,
    blocks: usize,
    acts: ActView,
    t: usize,
    out: *mut f32,
    out_stride: usize,
) {
    let tokens: [Token; T] = std::array::from_fn(|i| Token {
        qs: acts.qs(t + i).as_ptr(),
        scales: acts.scales(t + i).as_ptr(),
    });
    let mut lanes = [F32x8::zero(); T];
    for b in (0..blocks / 2 * 2).step_by(2) {
        // SAFETY: blocks b and b + 1 exist in the row and in each token.
        unsafe {
            let pair = unpack(row.add(b), row.add(b + 1));
            for i in 0..T {
                let token = tokens[i];
                let token = Token { qs: token.qs.add(64 * b), scales: token.scales.add(2 * b) };
                lanes[i] = add_pair::<D>(&pair, token, lanes[i]);
            }
        }
    }
    if blocks % 2 == 1 {
        // The last block and one of zeros, whose lanes keep what they have: their scales are 0.
        let zeros = BlockNVFP4 { d: [0; 4], qs: [0; 32] };
        let b = blocks - 1;
        // SAFETY: block b exists, and the copies are as long as two blocks.
        unsafe {
            let pair = unpack(row.add(b), &zeros);
            for i in 0..T {
                let (mut qs, mut scales) = ([0i8; 128], [0f32; 4]);
                std::ptr::copy_nonoverlapping(tokens[i].qs.add(64 * b), qs.as_mut_ptr(), 64);
                let from = tokens[i].scales.add(2 * b);
                std::ptr::copy_nonoverlapping(from, scales.as_mut_ptr(), 2);
                let token = Token { qs: qs.as_ptr(), scales: scales.as_ptr() };
                lanes[i] = add_pair::<D>(&pair, token, lanes[i]);
            }
        }
    }
    for (i, lanes) in lanes.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { out.add(i * out_stride).write(lanes.tree()) };
    }
}

/// # Safety
/// Both pointers lead to whole blocks.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn unpack(first: *const BlockNVFP4, second: *const BlockNVFP4) -> Pair {
    // SAFETY: 32 bytes of codes and four of scales in each block.
    unsafe {
        let codes = |w: *const BlockNVFP4| {
            let qs = (&raw const (*w).qs).cast::<u8>();
            // Eight low and eight high codes make a sub-block.
            let two = |bytes: uint8x16_t| {
                let low = vandq_u8(bytes, vdupq_n_u8(15));
                let high = vshrq_n_u8::<4>(bytes);
                let (low, high) = (vreinterpretq_u64_u8(low), vreinterpretq_u64_u8(high));
                let front = vreinterpretq_u8_u64(vzip1q_u64(low, high));
                look_up(&e2m1::DOUBLED, [front, vreinterpretq_u8_u64(vzip2q_u64(low, high))])
            };
            let ([a, b], [c, d]) = (two(vld1q_u8(qs)), two(vld1q_u8(qs.add(16))));
            [a, b, c, d]
        };
        let ([a, b, c, d], [e, f, g, h]) = (codes(first), codes(second));
        let [i, j, k, l] = (*first).d.map(half_e4m3);
        let [m, n, o, p] = (*second).d.map(half_e4m3);
        let d_w = F32x8::from_array(&[i, j, k, l, m, n, o, p]);
        Pair { codes: [a, b, c, d, e, f, g, h], d: d_w }
    }
}

/// # Safety
/// 128 values and four scales of the token are readable; the processor has what D needs.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn add_pair<D: Dot>(pair: &Pair, token: Token, lanes: F32x8) -> F32x8 {
    let zero = vdupq_n_s32(0);
    let mut sums = [zero; 8];
    for (i, codes) in pair.codes.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        sums[i] = unsafe { D::dot(zero, codes, vld1q_s8(token.qs.add(16 * i))) };
    }
    // SAFETY: four scales, each for two sub-blocks.
    let scales = unsafe { vld1q_f32(token.scales) };
    let scales = F32x8(vzip1q_f32(scales, scales), vzip2q_f32(scales, scales));
    lanes.fma(pair.d.mul(scales), I32x8::sums(sums).to_f32())
}
