//! Matrix–matrix products. A lane is a row: sixteen rows are unpacked once into a panel, and a
//! token brings four activations in every lane, straight from memory into `vpdpbusd`. Nothing is
//! summed across lanes until the tree, which adds whole vectors.
//!
//! The tile is 16 rows × 8 tokens: a panel load serves eight `vpdpbusd`, and with a sum of a run
//! and a sum of the block a token 8 + 8 + 2 of 32 registers are taken.

use super::panel::{Sixteen, Unpacked, narrow, run};
use crate::simd::avx2::ints::Ints;
use crate::simd::{ActView, Product, Scratch};
use std::arch::x86_64::*;

const TILE: usize = 8;

/// Bytes of activations that pass over all panels before the next tokens do, so that they stay in
/// the second cache. A panel is unpacked anew for each such chunk, of 128 tokens at 2048 columns.
const CHUNK_BYTES: usize = 256 << 10;

/// Columns that are unpacked at a time: 16 rows of them, about 21 KiB, stay in the first cache.
const PIECE: usize = 1024;

/// The eight float lanes of "One arithmetic" for sixteen rows and a token.
type Lanes = [__m512; 8];

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
    debug_assert_eq!(product.rows % 16, 0);
    let (blocks, tokens) = (product.mat.cols / B::LEN, product.acts.tokens());
    let piece = blocks.min(PIECE / B::LEN);
    let starts = if B::OFFSET > 0 { tokens * product.mat.cols / (4 * run::<B>()) } else { 0 };
    let bytes = piece * size_of::<B::Unpacked>()
        + tokens * (size_of::<Lanes>() + size_of::<Token>())
        + starts * size_of::<i32>();
    let panel: *mut B::Unpacked = scratch.get(bytes).cast();
    // SAFETY: the scratch holds `piece` panel blocks, then lanes and then a `Token` for each token,
    // then the starts; each begins aligned as it must. Rows in range lie within `data`.
    unsafe {
        let lanes: *mut Lanes = panel.add(piece).cast();
        let list: *mut Token = lanes.add(tokens).cast();
        write_tokens::<B>(product.acts, list, list.add(tokens).cast());
        for r in (0..product.rows).step_by(16) {
            let mut rows = [product.row(r).cast::<B>(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = product.row(r + i).cast();
            }
            lanes.write_bytes(0, tokens);
            for first in (0..blocks).step_by(piece) {
                let piece = piece.min(blocks - first);
                for b in 0..piece {
                    B::unpack_sixteen(rows, &mut *panel.add(b));
                    rows.iter_mut().for_each(|row| *row = row.wrapping_add(1));
                }
                let panel = std::slice::from_raw_parts(panel, piece);
                let mut t = 0;
                while t < tokens {
                    let (list, lanes) = (list.add(t), lanes.add(t));
                    t += match tokens - t {
                        1 => tile::<B, 1>(panel, first, list, lanes),
                        2 | 3 => tile::<B, 2>(panel, first, list, lanes),
                        4..TILE => tile::<B, 4>(panel, first, list, lanes),
                        _ => tile::<B, TILE>(panel, first, list, lanes),
                    };
                }
            }
            for t in 0..tokens {
                _mm512_storeu_ps(product.place(t, r), tree(&*lanes.add(t)));
            }
        }
    }
}

/// Adds the products of sixteen rows and T tokens to their lanes; returns T.
///
/// # Safety
/// T tokens are at `tokens`, with blocks from `first` on as many as `panel` holds, and T lanes at
/// `lanes`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn tile<B: Sixteen, const T: usize>(
    panel: &[B::Unpacked],
    first: usize,
    tokens: *const Token,
    lanes: *mut Lanes,
) -> usize {
    // SAFETY: T tokens are there, and each of them has block b.
    unsafe {
        let tokens: [Token; T] = tokens.cast::<[Token; T]>().read();
        let lanes = &mut *lanes.cast::<[Lanes; T]>();
        for (b, block) in (first..).zip(panel) {
            let isums = isums::<B, T>(block, &tokens, b);
            for t in 0..T {
                let lane = &mut lanes[t][b % 8];
                let scale = _mm512_mul_ps(block.d(), _mm512_set1_ps(*tokens[t].scales.add(b)));
                *lane = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(isums[t]), *lane);
            }
            if B::MINS {
                let imins = imins::<B, T>(block, &tokens, b);
                for t in 0..T {
                    let lane = &mut lanes[t][b % 8];
                    let a = _mm512_set1_ps(*tokens[t].scales.add(b));
                    let scale = _mm512_mul_ps(block.dmin(), a);
                    *lane = _mm512_fnmadd_ps(scale, _mm512_cvtepi32_ps(imins[t]), *lane);
                }
            }
        }
    }
    T
}

/// The end of sixteen dot products.
#[inline]
#[target_feature(enable = "avx512f")]
fn tree(lanes: &Lanes) -> __m512 {
    let [a, b, c, d, e, f, g, h] = *lanes;
    let (a, b) = (_mm512_add_ps(a, e), _mm512_add_ps(b, f));
    let (c, d) = (_mm512_add_ps(c, g), _mm512_add_ps(d, h));
    _mm512_add_ps(_mm512_add_ps(a, c), _mm512_add_ps(b, d))
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
