//! Rows and granules of fewer than eight blocks, whose lanes would idle: eight rows at once, their
//! blocks eight after eight as they lie, across the ends of rows, and sorted by rows afterwards.
//! Block b of each of eight rows at a time needs no sorting, but reads here and there: 0.74 of what
//! a plain loop reads (Q4_K, rows of 432 bytes, a Xeon of family 6, model 167) against 0.89.

use super::ahead::{Next, Rows};
use super::ints::{ActBlock, Ints};
use super::matvec::Token;
use crate::simd::Product;
use std::arch::x86_64::*;
use std::ops::Range;

/// Blocks of a row that are taken at once. A longer row is several strips, which are read one after
/// the other, here and there in memory.
const MOST: usize = 64;
/// Blocks of a row up to which permutations sort faster than loads do.
const FEW: usize = 16;

/// The blocks of eight rows of a strip of columns, as they lie, in groups of eight.
pub(in crate::simd) struct EightRows {
    strip: Range<usize>,
    granule: usize,
    /// Whether the first granule is added to what is there.
    adds: bool,
    /// Bytes between the end of a row of the strip and the next.
    gap: usize,
    /// Bytes from the first block to the end of the row in which each group begins.
    ends: [u32; MOST],
    /// Bytes from the first block on.
    offsets: [u32; 8 * MOST],
    /// Which of the token's blocks each meets.
    columns: [u32; 8 * MOST],
    /// That one's scale.
    scales: [f32; 8 * MOST],
}

/// The values of the blocks, eight a group.
pub(in crate::simd) struct Values([__m256; MOST]);

/// The strips of rows of `blocks` blocks; none cuts a granule, which has fewer than eight.
pub(in crate::simd) fn strips(blocks: usize, granule: usize) -> impl Iterator<Item = Range<usize>> {
    let width = (MOST / granule).max(1) * granule;
    (0..blocks).step_by(width).map(move |start| start..blocks.min(start + width))
}

impl EightRows {
    /// A strip of the product's rows, whose granules have `granule` blocks.
    ///
    /// # Safety
    /// `token` has the strip's blocks.
    #[inline]
    pub unsafe fn new<B: Ints>(
        product: Product,
        strip: Range<usize>,
        granule: usize,
        token: Token,
    ) -> Self {
        let stride = product.mat.row_stride;
        let (mut offsets, mut columns) = ([0; 8 * MOST], [0; 8 * MOST]);
        let (mut scales, mut ends) = ([0.0; 8 * MOST], [0; MOST]);
        let bytes = strip.len() * size_of::<B>();
        assert!(8 * stride <= u32::MAX as usize, "rows of {stride} bytes");
        let mut i = 0;
        for row in 0..8 {
            for (b, column) in strip.clone().enumerate() {
                let offset = row * stride + b * size_of::<B>();
                (offsets[i], columns[i]) = (offset as u32, column as u32);
                // SAFETY: the caller's promise.
                scales[i] = unsafe { *token.scales.add(column) };
                if i % 8 == 0 {
                    ends[i / 8] = (row * stride + bytes) as u32;
                }
                i += 1;
            }
        }
        let gap = stride - bytes;
        EightRows { strip, granule, adds: product.adds, gap, ends, offsets, columns, scales }
    }

    /// How many groups eight rows are: a block of one is eight blocks of all.
    pub fn groups(&self) -> usize {
        self.strip.len()
    }

    /// Block `i` of a group of the rows from `row` on, and what it meets.
    ///
    /// # Safety
    /// The blocks are there, the token's as well.
    #[inline(always)]
    pub unsafe fn block<B: Ints>(
        &self,
        row: *const u8,
        token: Token,
        group: usize,
        i: usize,
    ) -> (*const B, ActBlock) {
        let i = 8 * group + i;
        // SAFETY: the caller's promise.
        unsafe {
            (row.add(self.offsets[i] as usize).cast(), token.block::<B>(self.columns[i] as usize))
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn scales(&self, group: usize) -> __m256 {
        let scales: &[f32; 8] = self.scales[8 * group..].first_chunk().expect("a group is eight");
        // SAFETY: eight of them.
        unsafe { _mm256_loadu_ps(scales.as_ptr()) }
    }

    /// The addresses that are read some time after a group of the rows from `row` on.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn behind(&self, row: *const u8, group: usize, ahead: Rows) -> Next {
        let first = row.wrapping_add(self.offsets[8 * group] as usize);
        ahead.with_gap(self.gap).behind(first, row.wrapping_add(self.ends[group] as usize))
    }

    /// The eight dot products, granules' sums added in order, behind those of earlier strips.
    ///
    /// # Safety
    /// `out` has eight places.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub unsafe fn add_up(&self, values: &Values, out: *mut f32) {
        let n = self.strip.len();
        let rows = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let places = _mm256_mullo_epi32(rows, _mm256_set1_epi32(n as i32));
        for start in (0..n).step_by(self.granule) {
            let mut lanes = [_mm256_setzero_ps(); 8];
            for (b, lane) in (start..n.min(start + self.granule)).zip(&mut lanes) {
                *lane = match n <= FEW {
                    true => {
                        let at = _mm256_add_epi32(places, _mm256_set1_epi32(b as i32));
                        sorted(&values.0[..n], at)
                    }
                    false => values.loaded(b, n),
                };
            }
            let [a, b, c, d, e, f, g, h] = lanes;
            let (a, b) = (_mm256_add_ps(a, e), _mm256_add_ps(b, f));
            let (c, d) = (_mm256_add_ps(c, g), _mm256_add_ps(d, h));
            let dots = _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d));
            // SAFETY: the caller's promise.
            unsafe {
                let sums = match self.adds || self.strip.start + start > 0 {
                    true => _mm256_add_ps(_mm256_loadu_ps(out), dots),
                    false => dots,
                };
                _mm256_storeu_ps(out, sums);
            }
        }
    }
}

impl Values {
    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn new() -> Self {
        Values([_mm256_setzero_ps(); MOST])
    }

    /// Value `b` of each of eight rows of `n`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn loaded(&self, b: usize, n: usize) -> __m256 {
        let values: &[f32] = bytemuck::cast_slice(&self.0);
        let at = |row: usize| values[row * n + b];
        _mm256_setr_ps(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7))
    }

    #[inline]
    pub fn put(&mut self, group: usize, values: __m256) {
        self.0[group] = values;
    }
}

/// The values at these places.
#[inline]
#[target_feature(enable = "avx2")]
fn sorted(values: &[__m256], places: __m256i) -> __m256 {
    let vectors = _mm256_srli_epi32::<3>(places);
    let mut sorted = _mm256_setzero_ps();
    for (k, v) in values.iter().enumerate() {
        let is_here = _mm256_cmpeq_epi32(vectors, _mm256_set1_epi32(k as i32));
        let here = _mm256_permutevar8x32_ps(*v, places);
        sorted = _mm256_blendv_ps(sorted, here, _mm256_castsi256_ps(is_here));
    }
    sorted
}
