//! Matrix–matrix products of quantised weights. A lane is a row: eight rows are unpacked once into
//! a panel whose vectors hold four neighbouring codes of each row, and a token brings four
//! activations in every lane, so that nothing is summed across lanes until the tree, which adds
//! whole vectors. Unpacking costs what 2 to 3 tokens cost; from the second token on this beats
//! the matrix–vector loop.
//!
//! The tile is 8 rows × 4 tokens: a panel load serves four `maddubs`, and with an int16 and an
//! int32 sum a token 4 + 4 + 2 of 16 registers are taken. The eight float lanes of "One
//! arithmetic" are eight vectors a token in the first cache, 1 KiB for the tile.

use super::ahead::Ahead;
use super::panel::Panel;
use super::token::Token;
use crate::simd::{Product, Scratch};
use std::arch::x86_64::*;

const TILE: usize = 4;

/// # Safety
/// As [`Product`] says, on a processor with AVX2, FMA and F16C; B is the matrix's type and the
/// number of rows is a multiple of eight.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul<B: Panel>(product: Product, scratch: &mut Scratch) {
    for part in product.by_tokens(TILE) {
        // SAFETY: the caller's promises, for these tokens.
        unsafe { part_matmul::<B>(part, scratch) };
    }
}

/// [`matmul`] of few enough tokens.
///
/// # Safety
/// As `matmul`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn part_matmul<B: Panel>(product: Product, scratch: &mut Scratch) {
    let Product { mat, acts, .. } = product;
    debug_assert_eq!(product.rows % 8, 0);
    let (blocks, tokens) = (mat.cols / B::LEN, acts.tokens());
    let panel_bytes = blocks * size_of::<B::Eight>();
    let panel: *mut B::Eight = scratch.get(panel_bytes + tokens * size_of::<Token>()).cast();
    // SAFETY: the scratch holds `blocks` panel blocks and then one `Token` a token; both begin on
    // multiples of 32 bytes. Rows in range lie within `data`.
    unsafe {
        let list: *mut Token = panel.add(blocks).cast();
        for t in 0..tokens {
            list.add(t).write(Token::new::<B>(acts, t));
        }
        for r in (0..product.rows).step_by(8) {
            let row = product.row(r);
            for b in 0..blocks {
                let block = |i: usize| row.add(i * mat.row_stride).cast::<B>().add(b);
                B::unpack([0, 1, 2, 3, 4, 5, 6, 7].map(block), &mut *panel.add(b));
            }
            for t in (0..tokens).step_by(TILE) {
                let ahead = Ahead::of::<8>(product, r + 8, (t / TILE, tokens.div_ceil(TILE)));
                let (panel, list) = (std::slice::from_raw_parts(panel, blocks), list.add(t));
                match tokens - t {
                    1 => tile::<B, 1>(product, (t, r), panel, list, ahead),
                    2 => tile::<B, 2>(product, (t, r), panel, list, ahead),
                    3 => tile::<B, 3>(product, (t, r), panel, list, ahead),
                    _ => tile::<B, TILE>(product, (t, r), panel, list, ahead),
                }
            }
        }
    }
}

/// Eight rows from `r` on times T tokens from `t` on, granule by granule.
///
/// # Safety
/// `panel` is the rows, each of the T tokens at `tokens` has as many blocks, and their places in
/// the product can be written.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<B: Panel, const T: usize>(
    product: Product,
    (t, r): (usize, usize),
    panel: &[B::Eight],
    tokens: *const Token,
    ahead: Ahead,
) {
    // SAFETY: T tokens are there.
    let tokens: [Token; T] = std::array::from_fn(|t| unsafe { *tokens.add(t) });
    let granule = (product.granule / B::LEN).max(1);
    for first in (0..panel.len().max(1)).step_by(granule) {
        let end = panel.len().min(first + granule);
        // SAFETY: the caller's promises; the first granule writes what the next ones read.
        unsafe {
            let dots = dots::<B, T>(&panel[first..end], first, &tokens, &ahead);
            for (i, dots) in dots.into_iter().enumerate() {
                let place = product.place(t + i, r);
                let sums = match first {
                    0 => dots,
                    _ => _mm256_add_ps(_mm256_loadu_ps(place), dots),
                };
                _mm256_storeu_ps(place, sums);
            }
        }
    }
}

/// Eight rows times T tokens.
///
/// # Safety
/// `panel` are the rows' blocks from `first` on, and the tokens have as many.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots<B: Panel, const T: usize>(
    panel: &[B::Eight],
    first: usize,
    tokens: &[Token; T],
    ahead: &Ahead,
) -> [__m256; T] {
    let mut lanes = [[_mm256_setzero_ps(); T]; 8];
    for (i, block) in panel.iter().enumerate() {
        let b = first + i;
        ahead.ask_for::<B>(b);
        let lane = &mut lanes[i % 8];
        // SAFETY: block b exists in each token.
        unsafe {
            let mut acts = [tokens[0].block::<B>(b); T];
            for t in 1..T {
                acts[t] = tokens[t].block::<B>(b);
            }
            let isums = B::eight_isums(block, acts);
            let (d, dmin) = B::eight_scales(block);
            for t in 0..T {
                let scale = _mm256_mul_ps(d, _mm256_set1_ps(*tokens[t].scales.add(b)));
                lane[t] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(isums[t]), lane[t]);
            }
            if B::MINS {
                let imins = B::eight_imins(block, acts);
                for t in 0..T {
                    let scale = _mm256_mul_ps(dmin, _mm256_set1_ps(*tokens[t].scales.add(b)));
                    lane[t] = _mm256_fnmadd_ps(scale, _mm256_cvtepi32_ps(imins[t]), lane[t]);
                }
            }
        }
    }
    std::array::from_fn(|t| {
        let at = |i: usize| lanes[i][t];
        let (a, b) = (_mm256_add_ps(at(0), at(4)), _mm256_add_ps(at(1), at(5)));
        let (c, d) = (_mm256_add_ps(at(2), at(6)), _mm256_add_ps(at(3), at(7)));
        _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d))
    })
}
