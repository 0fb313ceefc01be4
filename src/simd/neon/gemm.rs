//! Matrix–matrix products of quantised weights. A lane is a row: eight rows are unpacked once into
//! a panel whose vectors hold four neighbouring codes of each of four rows, and a token's sixteen
//! activations in a register serve four such vectors by their lane, so that nothing is summed
//! across lanes until the tree, which adds whole vectors.
//!
//! The tile is 8 rows × 4 tokens. In the loop over a sub-block eight vectors hold its sums, eight
//! those of the block, four the activations and two the codes: 22 of 32 registers, and a panel
//! load serves four dot products. For 32 codes of eight rows and one token that is 16 `sdot` and
//! two multiplications by integer scales.

use super::decode::{ActBlock, Decode, Scale, Token};
use super::dot::Dot;
use super::lanes::{F32x8, I32x8};
use crate::simd::{Product, Scratch};
use std::arch::aarch64::*;

const TILE: usize = 4;

/// Eight rows, unpacked: of block b, `codes` holds bytes 4g to 4g + 3 of each row for g ascending,
/// `scales` d of each row and then dmin, `subs` the integer scales of each row for each sub-block
/// and then the mins.
#[derive(Clone, Copy)]
struct Panel {
    codes: *mut i8,
    scales: *mut f32,
    subs: *mut i16,
}

impl Panel {
    /// Integer scales a row of a block.
    const fn subs<B: Decode>() -> usize {
        if B::LEN == 32 { 0 } else { B::LEN / B::SUB }
    }

    /// Bytes of a block in each of the three arrays, all multiples of 64.
    const fn sizes<B: Decode>() -> [usize; 3] {
        [8 * B::LEN, 64, 32 * Self::subs::<B>()]
    }

    /// # Safety
    /// `base` leads to `blocks` times the sum of `sizes`, aligned to 64.
    #[target_feature(enable = "neon")]
    unsafe fn new<B: Decode>(base: *mut u8, blocks: usize) -> Self {
        let [codes, scales, _] = Self::sizes::<B>();
        // SAFETY: within what the caller promises.
        unsafe {
            Panel {
                codes: base.cast(),
                scales: base.add(blocks * codes).cast(),
                subs: base.add(blocks * (codes + scales)).cast(),
            }
        }
    }

    /// # Safety
    /// The panel has more than `b` blocks.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn block<B: Decode>(self, b: usize) -> Self {
        let [codes, scales, subs] = Self::sizes::<B>();
        // SAFETY: within the panel.
        unsafe {
            Panel {
                codes: self.codes.add(b * codes),
                scales: self.scales.byte_add(b * scales),
                subs: self.subs.byte_add(b * subs),
            }
        }
    }
}

/// # Safety
/// As [`Product`] says, on a processor with what D needs; B is the matrix's type and the number of
/// rows is a multiple of eight.
#[target_feature(enable = "neon")]
pub(super) unsafe fn matmul<B: Decode, D: Dot>(product: Product, scratch: &mut Scratch) {
    for part in product.by_tokens(TILE) {
        // SAFETY: the caller's promises, for these tokens.
        unsafe { part_matmul::<B, D>(part, scratch) };
    }
}

/// [`matmul`] of few enough tokens.
///
/// # Safety
/// As `matmul`.
#[target_feature(enable = "neon")]
unsafe fn part_matmul<B: Decode, D: Dot>(product: Product, scratch: &mut Scratch) {
    let Product { mat, acts, .. } = product;
    let out_stride = product.out.stride;
    debug_assert_eq!(product.rows % 8, 0);
    let (blocks, tokens) = (mat.cols / B::LEN, acts.tokens());
    let panel_bytes = blocks * Panel::sizes::<B>().iter().sum::<usize>();
    let base = scratch.get(panel_bytes + tokens * size_of::<Token>());
    // SAFETY: the scratch holds the panel and then one `Token` a token; it begins on a cache line
    // and the panel is a multiple of 64 bytes. Rows in range lie within `data`.
    unsafe {
        let panel = Panel::new::<B>(base, blocks);
        let list: *mut Token = base.add(panel_bytes).cast();
        for t in 0..tokens {
            list.add(t).write(Token::new::<B>(acts, t));
        }
        for r in (0..product.rows).step_by(8) {
            let row = product.row(r);
            for b in 0..blocks {
                let mut blocks_b = [row.cast::<B>(); 8];
                for (i, block) in blocks_b.iter_mut().enumerate() {
                    *block = row.add(i * mat.row_stride).cast::<B>().add(b);
                }
                unpack(blocks_b, panel.block::<B>(b));
            }
            for t in (0..tokens).step_by(TILE) {
                let (list, out) = (list.add(t), product.place(t, r));
                match tokens - t {
                    1 => tile::<B, D, 1>(panel, blocks, list, out, out_stride),
                    2 => tile::<B, D, 2>(panel, blocks, list, out, out_stride),
                    3 => tile::<B, D, 3>(panel, blocks, list, out, out_stride),
                    _ => tile::<B, D, TILE>(panel, blocks, list, out, out_stride),
                }
            }
        }
    }
}

/// Eight rows of one block into `to`.
///
/// # Safety
/// Each pointer leads to a whole block, and `to` to room for a block of a panel.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn unpack<B: Decode>(w: [*const B; 8], to: Panel) {
    let zero = vdupq_n_s8(0);
    // SAFETY: the caller's promises.
    unsafe {
        let (mut d, mut dmin) = ([B::Stored::default(); 8], [B::Stored::default(); 8]);
        for i in 0..8 {
            (d[i], dmin[i]) = (*w[i]).stored();
        }
        B::Stored::eight(d).store(to.scales);
        B::Stored::eight(dmin).store(to.scales.add(8));
        for j in 0..B::LEN / 32 {
            for half in 0..2 {
                let mut codes = [[zero; 2]; 4];
                for i in 0..4 {
                    codes[i] = B::codes(w[4 * half + i], j);
                }
                for c in 0..2 {
                    let words = transpose4([codes[0][c], codes[1][c], codes[2][c], codes[3][c]]);
                    for (k, word) in words.into_iter().enumerate() {
                        let g = 8 * j + 4 * c + k;
                        vst1q_s8(to.codes.add(32 * g + 16 * half), word);
                    }
                }
            }
        }
        if B::LEN == 32 {
            return;
        }
        let n = Panel::subs::<B>();
        let mut subs = [[vdupq_n_s16(0); 2]; 8];
        for i in 0..8 {
            subs[i] = B::sub_scales(w[i]);
        }
        store_subs(subs, n, to.subs);
        if B::MINS {
            for i in 0..8 {
                subs[i] = B::sub_mins(w[i]);
            }
            store_subs(subs, n, to.subs.add(8 * n));
        }
    }
}

/// `n` numbers of each of eight rows, eight or sixteen, as `n` vectors of one number of each row.
///
/// # Safety
/// `8·n` numbers at `to` are writable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn store_subs(subs: [[int16x8_t; 2]; 8], n: usize, to: *mut i16) {
    for c in 0..n / 8 {
        let mut rows = [vdupq_n_s16(0); 8];
        for i in 0..8 {
            rows[i] = subs[i][c];
        }
        for (s, vector) in transpose8(rows).into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { vst1q_s16(to.add(64 * c + 8 * s), vector) };
        }
    }
}

/// Word k of each of four vectors, for each k.
#[inline]
#[target_feature(enable = "neon")]
fn transpose4(v: [int8x16_t; 4]) -> [int8x16_t; 4] {
    let pair = |i: usize| {
        let (a, b) = (vreinterpretq_s32_s8(v[i]), vreinterpretq_s32_s8(v[i + 1]));
        (vreinterpretq_s64_s32(vtrn1q_s32(a, b)), vreinterpretq_s64_s32(vtrn2q_s32(a, b)))
    };
    let ((ab_even, ab_odd), (cd_even, cd_odd)) = (pair(0), pair(2));
    [
        vreinterpretq_s8_s64(vtrn1q_s64(ab_even, cd_even)),
        vreinterpretq_s8_s64(vtrn1q_s64(ab_odd, cd_odd)),
        vreinterpretq_s8_s64(vtrn2q_s64(ab_even, cd_even)),
        vreinterpretq_s8_s64(vtrn2q_s64(ab_odd, cd_odd)),
    ]
}

/// Number s of each of eight vectors, for each s.
#[inline]
#[target_feature(enable = "neon")]
fn transpose8(v: [int16x8_t; 8]) -> [int16x8_t; 8] {
    let pair = |i: usize| {
        let (even, odd) = (vtrn1q_s16(v[i], v[i + 1]), vtrn2q_s16(v[i], v[i + 1]));
        [vreinterpretq_s32_s16(even), vreinterpretq_s32_s16(odd)]
    };
    let (a, b, c, d) = (pair(0), pair(2), pair(4), pair(6));
    let mut out = [vdupq_n_s16(0); 8];
    for parity in 0..2 {
        let fours = |x: [int32x4_t; 2], y: [int32x4_t; 2]| {
            let (x, y) = (x[parity], y[parity]);
            let (first, second) = (vtrn1q_s32(x, y), vtrn2q_s32(x, y));
            [vreinterpretq_s64_s32(first), vreinterpretq_s64_s32(second)]
        };
        let (low, high) = (fours(a, b), fours(c, d));
        for k in 0..2 {
            out[parity + 2 * k] = vreinterpretq_s16_s64(vtrn1q_s64(low[k], high[k]));
            out[parity + 2 * k + 4] = vreinterpretq_s16_s64(vtrn2q_s64(low[k], high[k]));
        }
    }
    out
}

/// Eight rows times T tokens.
///
/// # Safety
/// `panel` holds `blocks` blocks and each of the T tokens at `tokens` as many; `out` takes eight
/// values at each of T multiples of `out_stride`; the processor has what D needs.
#[target_feature(enable = "neon")]
unsafe fn tile<B: Decode, D: Dot, const T: usize>(
    panel: Panel,
    blocks: usize,
    tokens: *const Token,
    out: *mut f32,
    out_stride: usize,
) {
    let mut lanes = [[F32x8::zero(); T]; 8];
    // SAFETY: T tokens are there.
    let tokens: [Token; T] = std::array::from_fn(|t| unsafe { *tokens.add(t) });
    for b in 0..blocks {
        let lane = &mut lanes[b % 8];
        // SAFETY: block b exists in the panel and in each token.
        unsafe {
            let block = panel.block::<B>(b);
            let mut acts = [tokens[0].block::<B>(b); T];
            for t in 1..T {
                acts[t] = tokens[t].block::<B>(b);
            }
            let isums = isums::<B, D, T>(block, acts);
            let d = F32x8::load(block.scales);
            for t in 0..T {
                let scale = d.mul(F32x8::splat(*tokens[t].scales.add(b)));
                lane[t] = lane[t].fma(scale, isums[t].to_f32());
            }
            if B::MINS {
                let imins = imins::<B, T>(block, acts);
                let dmin = F32x8::load(block.scales.add(8));
                for t in 0..T {
                    let scale = dmin.mul(F32x8::splat(*tokens[t].scales.add(b)));
                    lane[t] = lane[t].fms(scale, imins[t].to_f32());
                }
            }
        }
    }
    for t in 0..T {
        let mut of_token = [F32x8::zero(); 8];
        for i in 0..8 {
            of_token[i] = lanes[i][t];
        }
        let dots = F32x8::tree_of(of_token);
        // SAFETY: the caller's promise.
        unsafe { dots.store(out.add(t * out_stride)) };
    }
}

/// Eight numbers as int32.
///
/// # Safety
/// Eight numbers at `p` are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn widened(p: *const i16) -> I32x8 {
    // SAFETY: the caller's promise.
    let v = unsafe { vld1q_s16(p) };
    I32x8(vmovl_s16(vget_low_s16(v)), vmovl_high_s16(v))
}

/// `isum` of the eight rows for each token.
///
/// # Safety
/// A block of a panel and T whole activation blocks; the processor has what D needs.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn isums<B: Decode, D: Dot, const T: usize>(block: Panel, a: [ActBlock; T]) -> [I32x8; T] {
    let mut total = [I32x8::splat(0); T];
    for start in (0..B::LEN).step_by(B::SUB) {
        let mut sums = [I32x8::splat(0); T];
        // SAFETY: within the block; the sub-block has a scale.
        unsafe {
            for i in (start..start + B::SUB).step_by(16) {
                add_sixteen::<D, T>(block.codes.add(8 * i), a, i, &mut sums);
            }
            if B::LEN == 32 {
                return sums;
            }
            let scale = widened(block.subs.add(8 * (start / B::SUB)));
            for t in 0..T {
                total[t].0 = vmlaq_s32(total[t].0, sums[t].0, scale.0);
                total[t].1 = vmlaq_s32(total[t].1, sums[t].1, scale.1);
            }
        }
    }
    total
}

/// Sixteen codes of eight rows times activations i to i + 15 of each token.
///
/// # Safety
/// 128 codes, 16 activations; the processor has what D needs.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn add_sixteen<D: Dot, const T: usize>(
    codes: *const i8,
    a: [ActBlock; T],
    i: usize,
    sums: &mut [I32x8; T],
) {
    let mut values = [vdupq_n_s8(0); T];
    // SAFETY: the caller's promise.
    unsafe {
        for t in 0..T {
            values[t] = vld1q_s8(a[t].qs.add(i));
        }
        add_four::<D, T, 0>(codes, &values, sums);
        add_four::<D, T, 1>(codes.add(32), &values, sums);
        add_four::<D, T, 2>(codes.add(64), &values, sums);
        add_four::<D, T, 3>(codes.add(96), &values, sums);
    }
}

/// # Safety
/// 32 codes are readable; the processor has what D needs.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn add_four<D: Dot, const T: usize, const LANE: i32>(
    codes: *const i8,
    values: &[int8x16_t; T],
    sums: &mut [I32x8; T],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = (vld1q_s8(codes), vld1q_s8(codes.add(16)));
        for t in 0..T {
            sums[t].0 = D::dot_lane::<LANE>(sums[t].0, low, values[t]);
            sums[t].1 = D::dot_lane::<LANE>(sums[t].1, high, values[t]);
        }
    }
}

/// `imins` of the eight rows for each token.
///
/// # Safety
/// A block of a panel and T whole activation blocks.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn imins<B: Decode, const T: usize>(block: Panel, a: [ActBlock; T]) -> [I32x8; T] {
    let mut total = [I32x8::splat(0); T];
    // SAFETY: one sum, or as many as there are mins.
    unsafe {
        if B::LEN == 32 {
            for t in 0..T {
                total[t] = I32x8::splat(*a[t].sums as i32);
            }
            return total;
        }
        let n = Panel::subs::<B>();
        for s in 0..n {
            let mins = vld1q_s16(block.subs.add(8 * (n + s)));
            for t in 0..T {
                let sum = *a[t].sums.add(s);
                total[t].0 = vmlal_n_s16(total[t].0, vget_low_s16(mins), sum);
                total[t].1 = vmlal_high_n_s16(total[t].1, mins, sum);
            }
        }
    }
    total
}
