//! Rows and granules of fewer than eight blocks, whose lanes would idle: eight rows at once, their
//! blocks eight after eight as they lie, across the ends of rows, and their values sorted by rows
//! afterwards: a load of a granule of each row, and the tree of eight rows at once.
//! Block b of each of eight rows at a time needs no sorting, but reads here and there: 0.74 of what
//! a plain loop reads (Q4_K, rows of 432 bytes, a Xeon of family 6, model 167) against 0.89.

use super::ahead::{Next, Rows};
use super::ints::{ActBlock, Ints};
use super::reduce::trees8;
use super::token::Token;
use crate::simd::Product;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Blocks of a row that are taken at once. A longer row is several strips, which are read one after
/// the other, here and there in memory.
const MOST: usize = 64;

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

/// The values of the blocks, eight a group, and room that loads of eight reach into.
pub(in crate::simd) struct Values([MaybeUninit<f32>; 8 * MOST + 8]);

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

    /// The eight dot products, behind those of earlier strips.
    ///
    /// # Safety
    /// `out` has eight places, and `values` those of all groups.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub unsafe fn add_up(&self, values: &Values, out: *mut f32) {
        let (blocks, adds) = (self.strip.len(), self.adds || self.strip.start > 0);
        // SAFETY: the caller's promise.
        unsafe { add_up_eight_rows(values.0.as_ptr().cast(), blocks, self.granule, adds, out) }
    }
}

impl Values {
    #[inline]
    pub fn new() -> Self {
        Values([MaybeUninit::uninit(); 8 * MOST + 8])
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn put(&mut self, group: usize, values: __m256) {
        let places = &mut self.0[8 * group..][..8];
        // SAFETY: eight places.
        unsafe { _mm256_storeu_ps(places.as_mut_ptr().cast(), values) };
    }
}

/// The dot products of eight rows of `blocks` values, one row after the other, granules' sums added
/// in order and, if it `adds`, behind what `out` has.
///
/// # Safety
/// Eight more floats are readable behind the values; granules have at most eight; `out` has eight
/// places.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::simd) unsafe fn add_up_eight_rows(
    values: *const f32,
    blocks: usize,
    granule: usize,
    adds: bool,
    out: *mut f32,
) {
    let numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    // SAFETY: the caller's promise; masks let no value behind the granule through.
    unsafe {
        let mut sums = if adds { Some(_mm256_loadu_ps(out)) } else { None };
        for start in (0..blocks).step_by(granule) {
            let n = granule.min(blocks - start) as i32;
            let is_there = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), numbers);
            let row = |r: usize| _mm256_maskload_ps(values.add(r * blocks + start), is_there);
            let dots = trees8([row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)]);
            sums = Some(sums.map_or(dots, |sums| _mm256_add_ps(sums, dots)));
        }
        if let Some(sums) = sums {
            _mm256_storeu_ps(out, sums);
        }
    }
}
