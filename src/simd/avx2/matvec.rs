//! Matrix–vector products of quantised weights: of one token, or of the few rows that a panel of
//! the matrix–matrix product leaves over.
//!
//! Two arrangements, the same bits: eight blocks of one row (long rows), or eight blocks one after
//! the other in rows of fewer than eight. Either gives eight exact integers in a vector, and one
//! fma adds them to lanes that "One arithmetic" names.

use super::ahead::{Next, Rows};
use super::eight_rows::{EightRows, Values, strips};
use super::ints::{ActBlock, Ints, Scale};
use super::long_rows::{dot_long_rows, long_rows};
use super::reduce::{sum8, sum8_halves, tree8};
use super::token::Token;
use crate::simd::Product;
use std::arch::x86_64::*;
use std::ops::Range;

/// # Safety
/// As [`Product`] says, on a processor with AVX2, FMA and F16C; B is the matrix's type.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul<B: Ints>(product: Product) {
    // SAFETY: the caller's promises, of the rows that they are handed.
    unsafe {
        for t in 0..product.acts.tokens() {
            let (product, token) = (product.tokens(t..t + 1), Token::new::<B>(product.acts, t));
            let (n_long, left) = long_rows(product, B::LEN, 1..=2, 8);
            if n_long > 0 {
                rows_with_rest::<B>(product.rows(0, n_long), left, token);
            }
            arranged::<B>(
                product.rows(n_long, product.rows - n_long),
                token,
                |eight, row, token, ahead, out| dot_eight_rows::<B>(eight, row, token, ahead, out),
                |row, blocks, token, ahead| dot_row::<B>(row, blocks, token, ahead),
            )
        }
    }
}

/// The product's one token, `token`, times each row by the arrangement for its length; the loops
/// are those of a vector unit.
///
/// # Safety
/// As [`Product`] says, on a processor with AVX2; B is the matrix's type. The loops may be called
/// for its rows and `token`.
#[inline(always)]
pub(in crate::simd) unsafe fn arranged<B: Ints>(
    product: Product,
    token: Token,
    dot_eight_rows: impl Fn(&EightRows, *const u8, Token, Rows, *mut f32),
    dot_row: impl Fn(*const B, usize, Token, Rows) -> f32,
) {
    let Product { mat, rows, .. } = product;
    let (blocks, granule) = (mat.cols / B::LEN, (product.granule / B::LEN).max(1));
    let by_eights = if granule < 8 && blocks > 0 { rows / 8 * 8 } else { 0 };
    // SAFETY: rows below `mat.rows` lie within `data`; the places in `out` are the caller's
    // promise.
    unsafe {
        let ahead = Rows::begin(product);
        for strip in strips(if by_eights > 0 { blocks } else { 0 }, granule) {
            let first = strip.start * size_of::<B>();
            let eight = EightRows::new::<B>(product, strip, granule, token);
            for r in (0..by_eights).step_by(8) {
                let row = product.row(r).add(first);
                dot_eight_rows(&eight, row, token, ahead, product.place(0, r));
            }
        }
        for r in by_eights..rows {
            row_by_granules::<B>(product, 0, r, |b, n| {
                dot_row(product.row(r).cast::<B>().add(b), n, token.behind::<B>(b), ahead)
            });
        }
    }
}

/// Row `r` times token `t`, granule by granule: `dot(b, n)` is of its n blocks from number b on.
///
/// # Safety
/// The place in `out` can be written, and read if the product `adds`; B is the matrix's type.
#[inline(always)]
pub(in crate::simd) unsafe fn row_by_granules<B: Ints>(
    product: Product,
    t: usize,
    r: usize,
    dot: impl Fn(usize, usize) -> f32,
) {
    let (blocks, granule) = (product.mat.cols / B::LEN, (product.granule / B::LEN).max(1));
    let out = product.place(t, r);
    let mut sum = dot(0, granule.min(blocks));
    if product.adds {
        // SAFETY: the caller's promise.
        sum += unsafe { out.read() };
    }
    for b in (granule..blocks).step_by(granule) {
        sum += dot(b, granule.min(blocks - b));
    }
    // SAFETY: the caller's promise.
    unsafe { out.write(sum) };
}

/// The lanes of a row's whole eights. Asks for lines of its rest, too.
///
/// # Safety
/// `row` leads to `blocks` blocks and `token` to as many.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn eights<B: Ints>(row: *const B, blocks: usize, token: Token, ahead: Rows) -> __m256 {
    let mut lanes = _mm256_setzero_ps();
    for b in (0..blocks / 8 * 8).step_by(8) {
        // SAFETY: blocks b to b + 7 exist.
        unsafe {
            let a = _mm256_loadu_ps(token.scales.add(b));
            let next = ahead.behind(row.add(b).cast(), row.add(blocks).cast());
            ask_for_all::<B>(next);
            let at = |i: usize| {
                ask_for_one::<B>(next, i);
                (row.add(b + i), token.block::<B>(b + i))
            };
            lanes = add_eight::<B>(at, _mm256_set1_epi32(-1), a, lanes);
        }
    }
    // SAFETY: blocks of the row.
    unsafe { ask_for_rest(row, blocks, ahead) };
    lanes
}

/// # Safety
/// As `eights`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_row<B: Ints>(row: *const B, blocks: usize, token: Token, ahead: Rows) -> f32 {
    // SAFETY: the caller's promise.
    let mut lanes = unsafe { eights(row, blocks, token, ahead) };
    let whole = blocks / 8 * 8;
    if whole < blocks {
        let last = blocks - 1 - whole;
        // SAFETY: the last block stands in for those that are missing, whose scales are not loaded.
        unsafe {
            let numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let is_missing = _mm256_cmpgt_epi32(numbers, _mm256_set1_epi32(last as i32));
            let is_there = _mm256_xor_si256(is_missing, _mm256_set1_epi32(-1));
            let a = _mm256_maskload_ps(token.scales.add(whole), is_there);
            let b = |i: usize| whole + i.min(last);
            let at = |i: usize| (row.add(b(i)), token.block::<B>(b(i)));
            lanes = add_eight::<B>(at, is_there, a, lanes);
        }
    }
    tree8(lanes)
}

/// Rows by eights, of whose blocks `left` are left behind the last whole eight.
///
/// # Safety
/// As `matmul`, of a token.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows_with_rest<B: Ints>(product: Product, left: Range<usize>, token: Token) {
    let (ahead, row) = (Rows::begin(product), |r: usize| product.row(r).cast::<B>());
    for r in (0..product.rows).step_by(8) {
        // SAFETY: eight rows from `r` on, of `left.end` blocks.
        unsafe {
            let lanes = |r: usize| eights(row(r), left.end, token, ahead);
            dot_long_rows(product, r, left.clone(), lanes, |b, lanes| {
                let a = _mm256_set1_ps(*token.scales.add(b));
                let at = |i: usize| (row(r + i).add(b), token.block::<B>(b));
                add_eight::<B>(at, _mm256_set1_epi32(-1), a, lanes)
            });
        }
    }
}

/// # Safety
/// The blocks of `eight` are at `row`, and `token` has as many; `out` has eight places.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_eight_rows<B: Ints>(
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
            let at = |i: usize| {
                ask_for_one::<B>(next, i);
                eight.block::<B>(row, token, group, i)
            };
            ask_for_all::<B>(next);
            let zero = _mm256_setzero_ps();
            let all = _mm256_set1_epi32(-1);
            values.put(group, add_eight::<B>(at, all, eight.scales(group), zero));
        }
    }
    // SAFETY: the caller's promise.
    unsafe { eight.add_up(&values, out) }
}

/// Blocks of a line and more are asked for between the computation of others, one after the other.
#[inline(always)]
fn ask_for_one<B>(next: Next, i: usize) {
    if size_of::<B>() >= 64 {
        next.ask_for::<B>(i * size_of::<B>());
    }
}

/// Asks for the lines behind the blocks that are left of a row after its last whole eight: a line
/// that is not asked for costs more than lines that are asked for twice.
///
/// # Safety
/// `row` leads to `blocks` blocks.
#[inline(always)]
pub(in crate::simd) unsafe fn ask_for_rest<B>(row: *const B, blocks: usize, ahead: Rows) {
    let whole = blocks / 8 * 8;
    // SAFETY: the caller's promise.
    let (rest, end) = unsafe { (row.add(whole), row.add(blocks)) };
    let next = ahead.behind(rest.cast(), end.cast());
    (0..blocks - whole).for_each(|i| next.ask_for::<B>(i * size_of::<B>()));
}

/// Smaller ones at once.
#[inline(always)]
fn ask_for_all<B>(next: Next) {
    if size_of::<B>() < 64 {
        next.ask_for::<[B; 8]>(0);
    }
}

/// `lanes` plus eight (weight block, activation block) pairs that `at` names, one a lane. Where
/// `is_there` is 0, scales become 0, and x + 0 is x since a lane that began at +0 is never −0.
///
/// # Safety
/// `at(i)` leads to whole blocks; each lane of `is_there` is 0 or −1.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_eight<B: Ints>(
    at: impl Fn(usize) -> (*const B, ActBlock),
    is_there: __m256i,
    a: __m256,
    lanes: __m256,
) -> __m256 {
    let mut isums = [_mm256_setzero_si256(); 8];
    let mut imins = [_mm_setzero_si128(); 8];
    let (mut d, mut dmin) = ([B::Stored::default(); 8], [B::Stored::default(); 8]);
    for i in 0..8 {
        let (w, act) = at(i);
        // SAFETY: the caller's promise.
        unsafe {
            isums[i] = B::isum(w, act);
            if B::MINS {
                imins[i] = B::imins(w, act);
            }
            (d[i], dmin[i]) = (*w).stored();
        }
    }
    // SAFETY: AVX2 and F16C, the caller's promise.
    let (d, dmin) = unsafe { (B::Stored::eight(d), B::Stored::eight(dmin)) };
    let scale = |d| _mm256_and_ps(_mm256_mul_ps(d, a), _mm256_castsi256_ps(is_there));
    let lanes = _mm256_fmadd_ps(scale(d), _mm256_cvtepi32_ps(sum8(isums)), lanes);
    if !B::MINS {
        return lanes;
    }
    _mm256_fnmadd_ps(scale(dmin), _mm256_cvtepi32_ps(sum8_halves(imins)), lanes)
}
