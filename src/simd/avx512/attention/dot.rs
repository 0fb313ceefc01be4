//! Products of queries and keys, four keys in a vector: four of their eight lanes each.

use super::{first, in_fours};
use crate::simd::avx2;
use crate::simd::tile::{Tile, TileMut};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Keys that pass over all queries together.
const KEYS: usize = 16;

/// Elements of the longest row that has room; latent attention, the longest known, has 576.
const MOST: usize = 1024;

/// Sixteen keys by fours: four elements of the keys of each four, then the next four elements.
#[repr(align(64))]
struct Fours(MaybeUninit<[f32; KEYS * MOST]>);

/// # Safety
/// As [`crate::simd::Kernels::tile_dot`] checks, on a processor with this module's features.
#[target_feature(enable = "avx2,fma,avx512f,avx512dq")]
pub(in crate::simd::avx512) unsafe fn tile_dot(q: Tile, k: Tile, out: TileMut) {
    // SAFETY: the caller's promises are the same.
    unsafe {
        match q.n_rows() {
            2.. if q.dim() <= MOST => by_fours(q, k, out),
            _ => (avx2::TABLE.tile_dot)(q, k, out),
        }
    }
}

/// # Safety
/// As `tile_dot`, for rows of at most [`MOST`] elements.
#[inline(never)]
#[target_feature(enable = "avx2,fma,avx512f,avx512dq")]
unsafe fn by_fours(q: Tile, k: Tile, mut out: TileMut) {
    let (rows, n) = (q.n_rows(), k.n_rows());
    let (stride, to) = (out.stride(), out.as_mut_ptr());
    let mut fours = Fours(MaybeUninit::uninit());
    let fours = fours.0.as_mut_ptr().cast();
    for i in (0..n).step_by(KEYS) {
        let mut r = 0;
        // SAFETY: key i exists and `fours` has room for sixteen keys of this length; the rows
        // exist in `q` and `out`, and as many places of each row as `first` says.
        unsafe {
            four(k, i, fours);
            let at = |r| (to.add(r * stride + i), stride, first(n - i));
            while r < rows {
                match rows - r {
                    3 | 5.. => dots::<3>(q, r, fours, at(r)),
                    2 | 4 => dots::<2>(q, r, fours, at(r)),
                    _ => dots::<1>(q, r, fours, at(r)),
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

/// Keys from `i` on, as [`Fours`] says; past the last are the last again. Four j has keys j, j + 4,
/// j + 8 and j + 12: so `trees` leaves all in order.
///
/// # Safety
/// Key i exists; there is room for sixteen rows of a multiple of eight elements.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn four(k: Tile, i: usize, fours: *mut f32) {
    let last = k.n_rows() - 1;
    let key = |a: usize| k.as_ptr().wrapping_add((i + a).min(last) * k.stride());
    for j in 0..4 {
        let keys = [0, 4, 8, 12].map(|a| key(a + j));
        for d in (0..k.dim()).step_by(4) {
            // SAFETY: four elements of each, sixteen places.
            unsafe {
                let [a, b, c, e] = keys.map(|key| _mm_loadu_ps(key.add(d)));
                let v = _mm512_insertf32x4::<1>(_mm512_castps128_ps512(a), b);
                let v = _mm512_insertf32x4::<3>(_mm512_insertf32x4::<2>(v, c), e);
                _mm512_store_ps(fours.add(16 * (d + j)), v);
            }
        }
    }
}

/// R queries times sixteen keys, to the places in `mask` of rows `stride` apart.
///
/// # Safety
/// Queries r to r + R exist; `fours` holds keys as long as they; the places exist.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn dots<const R: usize>(
    q: Tile,
    r: usize,
    fours: *const f32,
    (to, stride, mask): (*mut f32, usize, u16),
) {
    let q_at: [_; R] = std::array::from_fn(|a| q.as_ptr().wrapping_add((r + a) * q.stride()));
    let mut lanes = [[[_mm512_setzero_ps(); 4]; 2]; R];
    // SAFETY: eight elements from d on exist in each row, and two halves of four fours behind them.
    unsafe {
        for d in (0..q.dim()).step_by(8) {
            for half in 0..2 {
                let d = d + 4 * half;
                let q: [__m512; R] =
                    std::array::from_fn(|a| _mm512_broadcast_f32x4(_mm_loadu_ps(q_at[a].add(d))));
                for j in 0..4 {
                    let k = _mm512_load_ps(fours.add(16 * (d + j)));
                    for a in 0..R {
                        lanes[a][half][j] = _mm512_fmadd_ps(q[a], k, lanes[a][half][j]);
                    }
                }
            }
        }
        for (a, lanes) in lanes.into_iter().enumerate() {
            _mm512_mask_storeu_ps(to.add(a * stride), mask, trees(lanes));
        }
    }
}

/// The tree of "One arithmetic" of sixteen keys.
#[inline]
#[target_feature(enable = "avx512f")]
fn trees([low, high]: [[__m512; 4]; 2]) -> __m512 {
    let fours: [__m512; 4] = std::array::from_fn(|j| _mm512_add_ps(low[j], high[j]));
    in_fours(fours, |a, b| _mm512_add_ps(a, b))
}
