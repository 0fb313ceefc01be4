//! Matrix–vector products: the arrangements of the AVX2 loops, with what blocks have in common done
//! for all eight at once and 64 codes in a vector.

use super::eight::{EightBlocks, Integers, write_ordered};
use crate::simd::avx2::ahead::{Rows, follows};
use crate::simd::avx2::eight_rows::{EightRows, Values};
use crate::simd::avx2::long_rows::{dot_long_rows, long_rows};
use crate::simd::avx2::matvec::{arranged, ask_for_rest};
use crate::simd::avx2::reduce::tree8;
use crate::simd::avx2::token::Token;
use crate::simd::{ActView, Product, Scratch};
use std::arch::x86_64::*;
use std::ops::Range;

/// # Safety
/// As [`Product`] says, on a processor with the features of this module; B is the matrix's type.
pub(super) unsafe fn matmul<B: EightBlocks>(product: Product, scratch: &mut Scratch) {
    let token = ordered::<B>(product.acts, scratch);
    // SAFETY: the caller's promises.
    unsafe {
        match follows() {
            true => rows::<B, true>(product, token),
            false => rows::<B, false>(product, token),
        }
    }
}

/// Asks for weights ahead as FOLLOWS says.
///
/// # Safety
/// As `matmul`; `token` has the product's activations in B's order.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn rows<B: EightBlocks, const FOLLOWS: bool>(product: Product, token: Token) {
    let (n_eights, left) = long_rows(product, B::LEN, 1..=2, 8);
    let (n_pairs, _) = long_rows(product, B::LEN, 3..=4, 2);
    let n_long = n_eights.max(n_pairs);
    // SAFETY: the caller's promises, of the rows that they are handed.
    unsafe {
        if n_eights > 0 {
            rows_with_rest::<B, FOLLOWS>(product.rows(0, n_eights), left, token);
        } else if n_pairs > 0 {
            pairs_of_rows::<B, FOLLOWS>(product.rows(0, n_pairs), left, token);
        }
        arranged::<B>(
            product.rows(n_long, product.rows - n_long),
            token,
            |eight, row, token, ahead, out| {
                dot_eight_rows::<B, FOLLOWS>(eight, row, token, ahead, out)
            },
            |row, blocks, token, ahead| dot_row::<B, FOLLOWS>(row, blocks, token, ahead),
        )
    }
}

/// The token's activations in the order of B's codes.
fn ordered<B: EightBlocks>(acts: ActView, scratch: &mut Scratch) -> Token {
    let (token, qs) = (Token::new::<B>(acts, 0), acts.qs(0));
    let room = scratch.get(qs.len()).cast();
    // SAFETY: there is room for all of them.
    unsafe { write_ordered(qs.as_chunks().0, B::ORDER, room) };
    token.with_values(room)
}

/// Rows by eights, of whose blocks `left` are left behind the last whole eight.
///
/// # Safety
/// As `rows`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn rows_with_rest<B: EightBlocks, const FOLLOWS: bool>(
    product: Product,
    left: Range<usize>,
    token: Token,
) {
    let (ahead, row) = (Rows::begin(product), |r: usize| product.row(r).cast::<B>());
    for r in (0..product.rows).step_by(8) {
        // SAFETY: eight rows from `r` on, of `left.end` blocks.
        unsafe {
            let lanes = |r: usize| eights::<B, FOLLOWS>(row(r), left.end, token, ahead);
            dot_long_rows(product, r, left.clone(), lanes, |b, lanes| {
                let a = _mm256_set1_ps(*token.scales.add(b));
                let at = |i: usize| (row(r + i).add(b), token.block::<B>(b));
                add_eight(B::integers(at, |_| ()), 0xff, a, lanes)
            });
        }
    }
}

/// Rows by twos: their `left` blocks, three or four a row, are the halves of a vector.
///
/// # Safety
/// As `rows`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn pairs_of_rows<B: EightBlocks, const FOLLOWS: bool>(
    product: Product,
    left: Range<usize>,
    token: Token,
) {
    let (ahead, row) = (Rows::begin(product), |r: usize| product.row(r).cast::<B>());
    let (last, mask) = (left.len() - 1, (1 << left.len()) - 1);
    for r in (0..product.rows).step_by(2) {
        // SAFETY: two rows from `r` on, of `left.end` blocks; their places in `out` are the
        // caller's promise.
        unsafe {
            let lanes = [r, r + 1].map(|r| eights::<B, FOLLOWS>(row(r), left.end, token, ahead));
            let b = |i: usize| left.start + (i % 4).min(last);
            let at = |i: usize| (row(r + i / 4).add(b(i)), token.block::<B>(b(i)));
            let both = B::integers(at, |_| ());
            let a = _mm256_maskz_loadu_ps(mask, token.scales.add(left.start));
            let lanes = [
                add_eight(both, mask, a, lanes[0]),
                add_eight(both.with_halves_swapped(), mask, a, lanes[1]),
            ];
            for (i, lanes) in lanes.into_iter().enumerate() {
                let out = product.place(0, r + i);
                out.write(if product.adds { tree8(lanes) + out.read() } else { tree8(lanes) });
            }
        }
    }
}

/// The lanes of a row's whole eights. Asks for lines of its rest, too.
///
/// # Safety
/// `row` leads to `blocks` blocks and `token` to as many.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn eights<B: EightBlocks, const FOLLOWS: bool>(
    row: *const B,
    blocks: usize,
    token: Token,
    ahead: Rows,
) -> __m256 {
    let mut lanes = _mm256_setzero_ps();
    for first in (0..blocks / 8 * 8).step_by(8) {
        // SAFETY: eight blocks from `first` on.
        unsafe {
            let w = row.add(first);
            let next = ahead.behind(w.cast(), row.add(blocks).cast());
            let a = _mm256_loadu_ps(token.scales.add(first));
            let at = |i: usize| (w.add(i), token.block::<B>(first + i));
            lanes = add_eight(
                B::integers(at, |i| next.ask::<B, FOLLOWS>(i * size_of::<B>())),
                0xff,
                a,
                lanes,
            );
        }
    }
    // SAFETY: blocks of the row.
    unsafe { ask_for_rest(row, blocks, ahead) };
    lanes
}

/// # Safety
/// As `eights`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn dot_row<B: EightBlocks, const FOLLOWS: bool>(
    row: *const B,
    blocks: usize,
    token: Token,
    ahead: Rows,
) -> f32 {
    // SAFETY: the caller's promise.
    let mut lanes = unsafe { eights::<B, FOLLOWS>(row, blocks, token, ahead) };
    let whole = blocks / 8 * 8;
    if whole < blocks {
        let last = blocks - 1 - whole;
        let mask = 0xff >> (7 - last);
        // SAFETY: the last block stands in for those that are missing, and their scales, which
        // would lie behind the end, are not loaded.
        unsafe {
            let a = _mm256_maskz_loadu_ps(mask, token.scales.add(whole));
            let w = row.add(whole);
            let at = |i: usize| (w.add(i.min(last)), token.block::<B>(whole + i.min(last)));
            lanes = add_eight(B::integers(at, |_| ()), mask, a, lanes);
        }
    }
    tree8(lanes)
}

/// # Safety
/// The blocks of `eight` are at `row`, and `token` has as many; `out` has eight places.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn dot_eight_rows<B: EightBlocks, const FOLLOWS: bool>(
    eight: &EightRows,
    row: *const u8,
    token: Token,
    ahead: Rows,
    out: *mut f32,
) {
    let mut values = Values::new();
    for group in 0..eight.groups() {
        let next = eight.behind(row, group, ahead);
        // SAFETY: the caller's promise.
        unsafe {
            let at = |i: usize| eight.block::<B>(row, token, group, i);
            let integers = B::integers(at, |i| next.ask::<B, FOLLOWS>(i * size_of::<B>()));
            let zero = _mm256_setzero_ps();
            values.put(group, add_eight(integers, 0xff, eight.scales(group), zero));
        }
    }
    // SAFETY: the caller's promise.
    unsafe { eight.add_up(&values, out) }
}

/// `lanes` plus eight blocks, one a lane, for the lanes in `mask`: elsewhere the scales become 0,
/// and x + 0 is x since a lane that began at +0 is never −0.
#[inline]
#[target_feature(enable = "avx2,fma,avx512f,avx512vl")]
fn add_eight(integers: Integers, mask: u8, a: __m256, lanes: __m256) -> __m256 {
    let Integers { isums, imins, d, dmin } = integers;
    let scale = _mm256_maskz_mul_ps(mask, d, a);
    let lanes = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(isums), lanes);
    let Some(imins) = imins else { return lanes };
    let scale = _mm256_maskz_mul_ps(mask, dmin, a);
    _mm256_fnmadd_ps(scale, _mm256_cvtepi32_ps(imins), lanes)
}
