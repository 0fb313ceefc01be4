//! Rows of some eights of blocks and one or two more, eight rows at a time: what is left of each
//! behind its last eight is computed for all of them at once, block b of every row in one vector.
//! One row alone fills a vector with one or two blocks. The bits are the same.
//!
//! Rows of nine blocks (Kimi Linear, EPYC of family 25, model 17, a thread): 29 → 39 tokens/s. Rows
//! of twelve lose so, 29 → 26: a third of each is read apart from the rest, and the processor's own
//! prefetching follows whole rows. AVX-512 takes these by twos: 28 → 32.

use super::panel::transpose;
use super::reduce::tree_of_lanes;
use crate::simd::Product;
use std::arch::x86_64::*;
use std::array;
use std::ops::{Range, RangeInclusive};

/// How many of the product's rows are taken `n` at a time because they have one of `counts` blocks
/// behind their last eight, and these blocks.
pub(in crate::simd) fn long_rows(
    product: Product,
    block_len: usize,
    counts: RangeInclusive<usize>,
    n: usize,
) -> (usize, Range<usize>) {
    let blocks = product.mat.cols / block_len;
    let left = blocks / 8 * 8..blocks;
    let is_whole = block_len == 256 && product.granule >= product.mat.cols;
    let is_long = is_whole && blocks > 8 && counts.contains(&left.len());
    (if is_long { product.rows / n * n } else { 0 }, left)
}

/// Rows `r` to `r + 7` times the product's one token. `lanes(r)` are those of a row's whole eights;
/// `add(b, lanes)` is `lanes` plus block b of the eight rows, one a lane.
///
/// # Safety
/// The rows exist and their places in `out` can be written, and read if the product `adds`; the
/// processor has AVX2.
#[inline(always)]
pub(in crate::simd) unsafe fn dot_long_rows(
    product: Product,
    r: usize,
    left: Range<usize>,
    lanes: impl Fn(usize) -> __m256,
    add: impl Fn(usize, __m256) -> __m256,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let rows: [__m256i; 8] = array::from_fn(|i| _mm256_castps_si256(lanes(r + i)));
        let mut lanes = transpose(rows).map(|lane| _mm256_castsi256_ps(lane));
        for (lane, b) in lanes.iter_mut().zip(left) {
            *lane = add(b, *lane);
        }
        let (sums, out) = (tree_of_lanes(lanes), product.place(0, r));
        let sums = if product.adds { _mm256_add_ps(sums, _mm256_loadu_ps(out)) } else { sums };
        _mm256_storeu_ps(out, sums);
    }
}
