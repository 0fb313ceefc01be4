//! Products of queries and keys, two keys in a vector: their eight lanes each.

use super::{first, trees};
use crate::simd::avx2;
use crate::simd::tile::{Tile, TileMut};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Keys that pass over all queries together.
const KEYS: usize = 16;

/// Elements of the longest row that has room; latent attention, the longest known, has 576.
const MOST: usize = 1024;

/// Sixteen keys by twos: eight elements of both, for each of the eight pairs, then the next eight.
#[repr(align(64))]
struct Pairs(MaybeUninit<[f32; KEYS * MOST]>);

/// # Safety
/// As [`crate::simd::Kernels::tile_dot`] checks, on a processor with this module's features.
#[target_feature(enable = "avx2,fma,avx512f,avx512dq")]
pub(in crate::simd::avx512) unsafe fn tile_dot(q: Tile, k: Tile, out: TileMut) {
    // SAFETY: the caller's promises are the same.
    unsafe {
        match q.n_rows() {
            2.. if q.dim() <= MOST => by_pairs(q, k, out),
            _ => (avx2::TABLE.tile_dot)(q, k, out),
        }
    }
}

/// # Safety
/// As `tile_dot`, for rows of at most [`MOST`] elements.
#[inline(never)]
#[target_feature(enable = "avx2,fma,avx512f,avx512dq")]
unsafe fn by_pairs(q: Tile, k: Tile, mut out: TileMut) {
    let (rows, n) = (q.n_rows(), k.n_rows());
    let (stride, to) = (out.stride(), out.as_mut_ptr());
    let mut pairs = Pairs(MaybeUninit::uninit());
    let pairs = pairs.0.as_mut_ptr().cast();
    for i in (0..n).step_by(KEYS) {
        let mut r = 0;
        // SAFETY: key i exists and `pairs` has room for sixteen keys of this length; the rows
        // exist in `q` and `out`, and as many places of each row as `first` says.
        unsafe {
            pair(k, i, pairs);
            let at = |r| (to.add(r * stride + i), stride, first(n - i));
            while r < rows {
                match rows - r {
                    3 | 5.. => dots::<3>(q, r, pairs, at(r)),
                    2 | 4 => dots::<2>(q, r, pairs, at(r)),
                    _ => dots::<1>(q, r, pairs, at(r)),
                }
                r += match rows - r {
                    3 | 5.. => 3,
                    2 | 4 => 2,
                    _ => 1,
                };
            }
        }
    }
}

/// Keys from `i` on, as [`Pairs`] says; past the last are the last again. Pair j has keys
/// j and j + 4 of the first eight, or of the others: so `trees` leaves all in order.
///
/// # Safety
/// Key i exists; there is room for sixteen rows of a multiple of eight elements.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512dq")]
unsafe fn pair(k: Tile, i: usize, pairs: *mut f32) {
    let last = k.n_rows() - 1;
    let key = |a: usize| k.as_ptr().wrapping_add((i + a).min(last) * k.stride());
    for j in 0..8 {
        let (a, b) = (key(j + j / 4 * 4), key(j + j / 4 * 4 + 4));
        for d in (0..k.dim()).step_by(8) {
            // SAFETY: eight elements of each, sixteen places.
            unsafe {
                let low = _mm512_castps256_ps512(_mm256_loadu_ps(a.add(d)));
                let both = _mm512_insertf32x8::<1>(low, _mm256_loadu_ps(b.add(d)));
                _mm512_store_ps(pairs.add(16 * (d + j)), both);
            }
        }
    }
}

/// R queries times sixteen keys, to the places in `mask` of rows `stride` apart.
///
/// # Safety
/// Queries r to r + R exist; `pairs` holds keys as long as they; the places exist.
#[inline]
#[target_feature(enable = "avx2,fma,avx512f,avx512dq")]
unsafe fn dots<const R: usize>(
    q: Tile,
    r: usize,
    pairs: *const f32,
    (to, stride, mask): (*mut f32, usize, u16),
) {
    let q_at: [_; R] = std::array::from_fn(|a| q.as_ptr().wrapping_add((r + a) * q.stride()));
    let mut lanes = [[_mm512_setzero_ps(); 8]; R];
    // SAFETY: eight elements from d on exist in each row, and eight pairs of eight behind them.
    unsafe {
        for d in (0..q.dim()).step_by(8) {
            let q: [__m512; R] =
                std::array::from_fn(|a| _mm512_broadcast_f32x8(_mm256_loadu_ps(q_at[a].add(d))));
            for j in 0..8 {
                let k = _mm512_load_ps(pairs.add(16 * (d + j)));
                for a in 0..R {
                    lanes[a][j] = _mm512_fmadd_ps(q[a], k, lanes[a][j]);
                }
            }
        }
        for (a, lanes) in lanes.into_iter().enumerate() {
            _mm512_mask_storeu_ps(
                to.add(a * stride),
                mask,
                trees(lanes, |a, b| _mm512_add_ps(a, b)),
            );
        }
    }
}
