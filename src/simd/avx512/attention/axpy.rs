//! Sums of values.

use super::first;
use crate::simd::tile::{Tile, TileMut};
use std::arch::x86_64::*;

/// Columns that pass over all rows before the next ones do: 64 positions of them are 32 KiB.
const COLUMNS: usize = 128;

/// # Safety
/// As [`crate::simd::Kernels::tile_axpy`] checks, on a processor with this module's features.
#[target_feature(enable = "avx512f")]
pub(in crate::simd::avx512) unsafe fn tile_axpy(p: Tile, v: Tile, mut acc: TileMut) {
    let rows = p.n_rows();
    let (stride, acc) = (acc.stride(), acc.as_mut_ptr());
    for start in (0..v.dim()).step_by(COLUMNS) {
        let end = v.dim().min(start + COLUMNS);
        let mut r = 0;
        while r < rows {
            let at = (r, start, end);
            // SAFETY: the rows and columns exist in each tile.
            unsafe {
                match rows - r {
                    6 | 7 | 9.. => sums::<6, 4>(p, v, acc, stride, at),
                    4.. => sums::<4, 4>(p, v, acc, stride, at),
                    2.. => sums::<2, 4>(p, v, acc, stride, at),
                    _ => sums::<1, 8>(p, v, acc, stride, at),
                }
            }
            r += match rows - r {
                6 | 7 | 9.. => 6,
                4.. => 4,
                2.. => 2,
                _ => 1,
            };
        }
    }
}

/// R rows from `r` on, columns `start..end`, C vectors at a time.
///
/// # Safety
/// The rows exist in `p` and `acc`, the columns in `v` and `acc`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn sums<const R: usize, const C: usize>(
    p: Tile,
    v: Tile,
    acc: *mut f32,
    stride: usize,
    (r, start, end): (usize, usize, usize),
) {
    let mut d = start;
    // SAFETY: the caller's promise; neither d + 16·C nor d and what the mask says pass `end`.
    unsafe {
        while d + 16 * C <= end {
            block::<R, C>(p, v, acc, stride, (r, d), u16::MAX);
            d += 16 * C;
        }
        while d < end {
            block::<R, 1>(p, v, acc, stride, (r, d), first(end - d));
            d += 16;
        }
    }
}

/// R × C vectors of sums in registers while all positions pass; the mask is of each vector.
///
/// # Safety
/// As `sums`, for the columns from `d` on that are in the mask.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn block<const R: usize, const C: usize>(
    p: Tile,
    v: Tile,
    acc: *mut f32,
    stride: usize,
    (r, d): (usize, usize),
    mask: u16,
) {
    let acc = acc.wrapping_add(r * stride + d);
    let p_at: [_; R] = std::array::from_fn(|a| p.as_ptr().wrapping_add((r + a) * p.stride()));
    let mut lanes = [[_mm512_setzero_ps(); C]; R];
    // SAFETY: rows r to r + R, positions below v's rows and the columns exist.
    unsafe {
        for a in 0..R {
            for c in 0..C {
                lanes[a][c] = _mm512_maskz_loadu_ps(mask, acc.add(a * stride + 16 * c));
            }
        }
        for i in 0..v.n_rows() {
            let v = v.as_ptr().add(i * v.stride() + d);
            let v: [__m512; C] =
                std::array::from_fn(|c| _mm512_maskz_loadu_ps(mask, v.add(16 * c)));
            for (a, lanes) in lanes.iter_mut().enumerate() {
                let p = _mm512_set1_ps(*p_at[a].add(i));
                for c in 0..C {
                    lanes[c] = _mm512_fmadd_ps(p, v[c], lanes[c]);
                }
            }
        }
        for (a, lanes) in lanes.into_iter().enumerate() {
            for (c, lane) in lanes.into_iter().enumerate() {
                _mm512_mask_storeu_ps(acc.add(a * stride + 16 * c), mask, lane);
            }
        }
    }
}
