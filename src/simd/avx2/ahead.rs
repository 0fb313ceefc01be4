//! Weights on their way from memory while others are computed.
//!
//! A core has few requests to memory under way at once, and stands still at one more. So requests
//! are spread over the computation, as evenly as lines are used up.

use crate::simd::Product;
use std::arch::asm;
use std::arch::x86_64::{__cpuid, _MM_HINT_T1, _mm_prefetch};
use std::ops::Range;
use std::sync::OnceLock;

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
                // The intrinsic is safe in newer compilers only.
                #[allow(unused_unsafe)]
                // SAFETY: a hint, which reads nothing; any address is allowed.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T1>(block.wrapping_add(line).cast())
                };
            }
        }
    }
}

/// How far ahead of what it computes a matrix–vector loop asks for lines: into the first cache, and
/// into the second. On a Xeon of family 6, model 167, one thread, Q4_K from memory, rows of 1152
/// bytes, shares of what a plain loop reads (16 GB/s): 0.55 with a group's lines asked for at once,
/// 4096 bytes ahead, 0.70 without any request, 0.77 from 2304 bytes ahead into the first cache
/// only; 0.90 so from 1152 and 2304 bytes, and 0.96 from here.
const NEAR: usize = 1152;
const FAR: usize = 4608;
/// On processors that [`follows`]: further than they look ahead, into the second cache only.
const FAR_BEHIND: usize = 18432;

/// Whether this processor follows what is read one line after the other by itself. Requests for
/// what it would bring anyway then hold up others. On an EPYC of family 25, model 17, one thread,
/// Q6_K from memory, rows of 1680 bytes, where a plain loop reads 25 GB/s: 20 as above, 19 without
/// requests, 23 with those for the second cache alone, and 25 with these.
pub(in crate::simd) fn follows() -> bool {
    static FOLLOWS: OnceLock<bool> = OnceLock::new();
    *FOLLOWS.get_or_init(|| {
        let vendor = __cpuid(0);
        // AuthenticAMD
        (vendor.ebx, vendor.edx, vendor.ecx) == (0x6874_7541, 0x6974_6e65, 0x444d_4163)
    })
}

/// The rows that a matrix–vector loop reads, one after the other.
#[derive(Clone, Copy)]
pub(in crate::simd) struct Rows {
    /// The end of the matrix: a thread's next piece mostly follows its current one.
    end: *const u8,
    /// Bytes between the end of a row and the next.
    gap: usize,
    follows: bool,
}

/// Addresses that the loop reads soon.
#[derive(Clone, Copy)]
pub(in crate::simd) struct Next {
    near: *const u8,
    far: *const u8,
    follows: bool,
}

impl Rows {
    /// Asks for the first lines.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn begin(product: Product) -> Rows {
        let (first, follows) = (product.row(0), follows());
        if !follows {
            super::prefetch(first, (product.rows * product.mat.row_stride).min(NEAR));
        }
        let gap = product.mat.row_stride - product.mat.row_bytes();
        Rows { end: product.mat.data.as_ptr_range().end, gap, follows }
    }

    /// The addresses after `group`, blocks one after the other in a row that ends at `row_end`.
    #[inline]
    pub fn behind(self, group: *const u8, row_end: *const u8) -> Next {
        let at = |distance: usize| {
            let p = group.wrapping_add(distance);
            self.or(group, if p < row_end { p } else { p.wrapping_add(self.gap) })
        };
        let far = if self.follows { FAR_BEHIND } else { FAR };
        Next { near: at(NEAR), far: at(far), follows: self.follows }
    }

    /// The rows of which a strip of columns is read.
    #[inline]
    pub fn with_gap(self, gap: usize) -> Rows {
        Rows { gap, ..self }
    }

    /// Behind the last row is something else; `here` has its lines already.
    #[inline]
    fn or(self, here: *const u8, p: *const u8) -> *const u8 {
        if p < self.end { p } else { here }
    }
}

impl Next {
    /// The lines of a B that is `offset` bytes behind the first block.
    #[inline(always)]
    pub fn ask_for<B>(self, offset: usize) {
        match self.follows {
            true => self.ask::<B, true>(offset),
            false => self.ask::<B, false>(offset),
        }
    }

    /// Asks where the caller has chosen by [`follows`].
    #[inline(always)]
    pub fn ask<B, const FOLLOWS: bool>(self, offset: usize) {
        for line in (offset..offset + size_of::<B>()).step_by(64) {
            let (near, far) = (self.near.wrapping_add(line), self.far.wrapping_add(line));
            // In assembly because a compiler that knows what these are gathers all requests of a
            // turn at its end.
            // SAFETY: hints, which read nothing; any address is allowed.
            unsafe {
                if !FOLLOWS {
                    asm!("prefetcht0 [{}]", in(reg) near, options(nostack, preserves_flags));
                }
                asm!("prefetcht1 [{}]", in(reg) far, options(nostack, preserves_flags));
            }
        }
    }
}
