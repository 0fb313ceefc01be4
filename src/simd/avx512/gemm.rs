//! Matrix–matrix products. A lane is a row: sixteen rows are unpacked once into a panel, and a
//! token brings four activations in every lane, straight from memory into `vpdpbusd`. Nothing is
//! summed across lanes until the tree, which adds whole vectors.
//!
//! The tile is 16 rows × 8 tokens: a panel load serves eight `vpdpbusd`, and with a sum of a run
//! and a sum of the block a token 8 + 8 + 2 of 32 registers are taken. The eight float lanes of
//! "One arithmetic" are eight vectors a token, 4 KiB for the tile.

use super::panel::{Sixteen, Unpacked, narrow, run};
use crate::simd::avx2::ints::Ints;
use crate::simd::{ActView, Product, Scratch};
use std::arch::x86_64::*;

const TILE: usize = 8;

/// Bytes of activations that pass over all panels before the next tokens do, so that they stay in
/// the second cache. A panel is unpacked anew for each such chunk, of 128 tokens at 2048 columns.
const CHUNK_BYTES: usize = 256 << 10;

/// One token's activations.
#[derive(Clone, Copy)]
struct Token {
    qs: *const i8,
    scales: *const f32,
    sums: *const i16,
    /// Where the sum of each run of codes starts: minus what the offset of the codes adds.
    starts: *const i32,
}

/// # Safety
/// As [`Product`] says, on a processor with the features of this module; B is the matrix's type
/// and the number of rows is a multiple of sixteen.
pub(super) unsafe fn matmul<B: Sixteen>(product: Product, scratch: &mut Scratch) {
    let tokens = product.acts.tokens();
    let chunk = (CHUNK_BYTES / product.mat.cols.max(1)).max(32);
    for t in (0..tokens).step_by(chunk) {
        // SAFETY: the caller's promises, for these tokens.
        unsafe { chunk_matmul::<B>(product.tokens(t..tokens.min(t + chunk)), scratch) };
    }
}

/// Writes where the sums of a token's runs start.
///
/// # Safety
/// A number for each run of the token can be written at `starts`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn write_starts<B: Sixteen>(qs: &[i8], starts: *mut i32) {
    for (i, qs) in qs.chunks_exact(4 * run::<B>()).enumerate() {
        let sum: i32 = qs.iter().map(|a| *a as i32).sum();
        // SAFETY: the caller's promise.
        unsafe { starts.add(i).write(-(B::OFFSET as i32) * sum) };
    }
}

/// The tokens of a product and their starts, which go to `starts`.
///
/// # Safety
/// `list` and `starts` take an entry for each token and for each run of each token.
unsafe fn write_tokens<B: Sixteen>(acts: ActView, list: *mut Token, starts: *mut i32) {
    let runs = acts.cols() / (4 * run::<B>());
    for t in 0..acts.tokens() {
        let starts = starts.wrapping_add(t * runs);
        let sums = if <B as Ints>::SUMS == 16 { acts.sums16(t) } else { acts.sums32(t) };
        let (qs, scales, sums) = (acts.qs(t), acts.scales(t).as_ptr(), sums.as_ptr());
        // SAFETY: the caller's promise.
        unsafe {
            if B::OFFSET > 0 {
                write_starts::<B>(qs, starts);
            }
            list.add(t).write(Token { qs: qs.as_ptr(), scales, sums, starts });
        }
    }
}

/// [`matmul`] of few enough tokens.
///
/// # Safety
/// As `matmul`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn chunk_matmul<B: Sixteen>(product: Product, scratch: &mut Scratch) {
    let Product { mat, acts, out_stride, .. } = product;
    debug_assert_eq!(product.rows % 16, 0);
    let (blocks, tokens) = (mat.cols / B::LEN, acts.tokens());
    let starts = if B::OFFSET > 0 { tokens * mat.cols / (4 * run::<B>()) } else { 0 };
    let bytes = blocks * size_of::<B::Unpacked>() + tokens * size_of::<Token>() + 4 * starts;
    let panel: *mut B::Unpacked = scratch.get(bytes).cast();
    // SAFETY: the scratch holds `blocks` panel blocks, then one `Token` a token, then the starts;
    // each begins aligned as it must. Rows in range lie within `data`.
    unsafe {
        let list: *mut Token = panel.add(blocks).cast();
        write_tokens::<B>(acts, list, list.add(tokens).cast());
        for r in (0..product.rows).step_by(16) {
            let mut rows = [product.row(r).cast::<B>(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = product.row(r + i).cast();
            }
            for b in 0..blocks {
                B::unpack_sixteen(rows, &mut *panel.add(b));
                rows.iter_mut().for_each(|row| *row = row.wrapping_add(1));
            }
            let mut t = 0;
            while t < tokens {
                let (list, out) = (list.add(t), product.place(t, r));
                t += match tokens - t {
                    1 => tile::<B, 1>(panel, blocks, list, out, out_stride),
                    2 | 3 => tile::<B, 2>(panel, blocks, list, out, out_stride),
                    4..TILE => tile::<B, 4>(panel, blocks, list, out, out_stride),
                    _ => tile::<B, TILE>(panel, blocks, list, out, out_stride),
                };
            }
        }
    }
}

/// Sixteen rows times T tokens; returns T.
///
/// # Safety
/// `panel` holds `blocks` blocks and each of the T tokens at `tokens` as many; `out` takes sixteen
/// values at each of T multiples of `out_stride`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn tile<B: Sixteen, const T: usize>(
    panel: *const B::Unpacked,
    blocks: usize,
    tokens: *const Token,
    out: *mut f32,
    out_stride: usize,
) -> usize {
    let mut lanes = [[_mm512_setzero_ps(); T]; 8];
    // SAFETY: T tokens are there.
    let tokens: [Token; T] = std::array::from_fn(|t| unsafe { *tokens.add(t) });
    for b in 0..blocks {
        let lane = &mut lanes[b % 8];
        // SAFETY: block b exists in the panel and in each token.
        unsafe {
            let block = &*panel.add(b);
            let isums = isums::<B, T>(block, &tokens, b);
            for t in 0..T {
                let scale = _mm512_mul_ps(block.d(), _mm512_set1_ps(*tokens[t].scales.add(b)));
                lane[t] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(isums[t]), lane[t]);
            }
            if B::MINS {
                let imins = imins::<B, T>(block, &tokens, b);
                for t in 0..T {
                    let a = _mm512_set1_ps(*tokens[t].scales.add(b));
                    let scale = _mm512_mul_ps(block.dmin(), a);
                    lane[t] = _mm512_fnmadd_ps(scale, _mm512_cvtepi32_ps(imins[t]), lane[t]);
                }
            }
        }
    }
    for t in 0..T {
        let at = |i: usize| lanes[i][t];
        let (a, b) = (_mm512_add_ps(at(0), at(4)), _mm512_add_ps(at(1), at(5)));
        let (c, d) = (_mm512_add_ps(at(2), at(6)), _mm512_add_ps(at(3), at(7)));
        let dots = _mm512_add_ps(_mm512_add_ps(a, c), _mm512_add_ps(b, d));
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(out.add(t * out_stride), dots) };
    }
    T
}

/// `isum` of the sixteen rows for block b of each token.
///
/// # Safety
/// The block exists in each token; the processor has AVX-512 and VNNI.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn isums<B: Sixteen, const T: usize>(
    block: &B::Unpacked,
    tokens: &[Token; T],
    b: usize,
) -> [__m512i; T] {
    let (codes, scales) = (block.codes(), block.scales());
    let runs = B::LEN / (4 * run::<B>());
    let mut total = [_mm512_setzero_si512(); T];
    for i in 0..runs {
        let mut sums = [_mm512_setzero_si512(); T];
        if B::OFFSET > 0 {
            for t in 0..T {
                // SAFETY: each run of the token has a start.
                sums[t] = _mm512_set1_epi32(unsafe { *tokens[t].starts.add(b * runs + i) });
            }
        }
        for g in i * run::<B>()..(i + 1) * run::<B>() {
            let codes = codes[g];
            for t in 0..T {
                // SAFETY: LEN / 4 groups of activations.
                let a = unsafe { tokens[t].qs.add(b * B::LEN + 4 * g).cast::<i32>() };
                // SAFETY: as above; unaligned by intent.
                let a = _mm512_set1_epi32(unsafe { a.read_unaligned() });
                sums[t] = _mm512_dpbusd_epi32(sums[t], codes, a);
            }
        }
        for t in 0..T {
            total[t] = if B::LEN == 32 {
                sums[t]
            } else if narrow::<B>() {
                _mm512_dpwssd_epi32(total[t], sums[t], scales[4 * i * run::<B>() / B::SUB])
            } else {
                let scale = scales[4 * i * run::<B>() / B::SUB];
                _mm512_add_epi32(total[t], _mm512_mullo_epi32(sums[t], scale))
            };
        }
    }
    total
}

/// `imins` likewise.
///
/// # Safety
/// As `isums`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn imins<B: Sixteen, const T: usize>(
    block: &B::Unpacked,
    tokens: &[Token; T],
    b: usize,
) -> [__m512i; T] {
    let sums = B::LEN / <B as Ints>::SUMS;
    let mut total = [_mm512_setzero_si512(); T];
    for (j, mins) in block.mins().iter().take(sums / 2).enumerate() {
        for t in 0..T {
            // SAFETY: so many sums a block; unaligned by intent.
            let pair = unsafe { tokens[t].sums.add(b * sums + 2 * j).cast::<i32>() };
            // SAFETY: as above.
            let pair = _mm512_set1_epi32(unsafe { pair.read_unaligned() });
            total[t] = _mm512_dpwssd_epi32(total[t], *mins, pair);
        }
    }
    total
}
