//! Weights on their way from memory while others are computed.

use crate::simd::Product;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

/// A tile's part of the rows of the panel after its own. Each tile asks for some, as a core stands
/// still that asks for more lines than it can wait for: with all at once that was an eighth of a
/// prompt's products (Q4_K, 32 tokens an expert, AVX-512), and with none a tenth (Q6_K) and more.
pub(in crate::simd) struct Ahead<'a> {
    product: Product<'a>,
    rows: Range<usize>,
}

impl<'a> Ahead<'a> {
    /// For tile `k` of `n`, where the panel of ROWS rows begins with row `first`.
    pub fn of<const ROWS: usize>(
        product: Product<'a>,
        first: usize,
        (k, n): (usize, usize),
    ) -> Ahead<'a> {
        Ahead { product, rows: first + ROWS * k / n..first + ROWS * (k + 1) / n }
    }

    /// Block `b` of the rows, into the second cache. Behind the last row is memory like any other.
    #[inline]
    pub fn ask_for<B>(&self, b: usize) {
        for r in self.rows.clone() {
            let block = self.product.row(r).wrapping_add(b * size_of::<B>());
            for line in (0..size_of::<B>()).step_by(64) {
                // SAFETY: a hint, which reads nothing; any address is allowed.
                #[allow(unused_unsafe)] // the intrinsic is safe in newer compilers only
                unsafe {
                    _mm_prefetch::<_MM_HINT_T1>(block.wrapping_add(line).cast())
                };
            }
        }
    }
}
