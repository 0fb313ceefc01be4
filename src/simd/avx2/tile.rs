//! Attention's loops; `simd::tile` says what each computes.

use super::decode_32::nibbles;
use super::decoded::Decode;
use super::ints::load;
use super::ops::exp8;
use super::reduce::{tree8, trees8};
use crate::gguf::TensorType;
use crate::quant::{
    self, BlockIQ4NL, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, IntBlock, blocks_of,
};
use crate::simd::tile::{self, SoftmaxStep, Tile, TileMut};
use half::f16;
use std::arch::x86_64::*;

/// Four keys pass over all pairs of queries, so keys are read once and queries stay near.
///
/// # Safety
/// As [`crate::simd::Kernels::tile_dot`] checks, on a processor with AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn tile_dot(q: Tile, k: Tile, mut out: TileMut) {
    let (rows, n) = (q.n_rows(), k.n_rows());
    let (stride, to) = (out.stride(), out.as_mut_ptr());
    let paired = rows / 2 * 2;
    // SAFETY: rows below the tiles' numbers of rows; `dots` writes `least` values of each row.
    unsafe {
        for i in (0..n).step_by(4).filter(|_| paired > 0) {
            for r in (0..paired).step_by(2) {
                let eight = dots::<2, 4>(q, r, k, i);
                let least = (n - i).min(4);
                for half in 0..2 {
                    let from = eight.as_ptr().add(4 * half);
                    std::ptr::copy_nonoverlapping(from, to.add((r + half) * stride + i), least);
                }
            }
        }
        for i in (0..n).step_by(8).filter(|_| paired < rows) {
            let eight = dots::<1, 8>(q, paired, k, i);
            let to = to.add(paired * stride + i);
            std::ptr::copy_nonoverlapping(eight.as_ptr(), to, (n - i).min(8));
        }
    }
}

/// R queries times P keys, R·P = 8; keys past the last are the last again.
///
/// # Safety
/// Queries r to r + R and key i exist; rows are of one length, a multiple of eight; the processor
/// has AVX2 and FMA.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn dots<const R: usize, const P: usize>(q: Tile, r: usize, k: Tile, i: usize) -> [f32; 8] {
    const { assert!(R * P == 8) };
    let last = k.n_rows() - 1;
    let q_at: [_; R] = std::array::from_fn(|a| q.as_ptr().wrapping_add((r + a) * q.stride()));
    let k_at: [_; P] =
        std::array::from_fn(|b| k.as_ptr().wrapping_add((i + b).min(last) * k.stride()));
    let mut lanes = [_mm256_setzero_ps(); 8];
    for d in (0..q.dim()).step_by(8) {
        // SAFETY: eight elements from d on exist in each row.
        unsafe {
            let q: [__m256; R] = std::array::from_fn(|a| _mm256_loadu_ps(q_at[a].add(d)));
            for b in 0..P {
                let k = _mm256_loadu_ps(k_at[b].add(d));
                for a in 0..R {
                    lanes[a * P + b] = _mm256_fmadd_ps(q[a], k, lanes[a * P + b]);
                }
            }
        }
    }
    let mut out = [0f32; 8];
    // SAFETY: eight places.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), trees8(lanes)) };
    out
}

/// Columns that pass over all rows before the next ones do: 64 positions of them are 16 KiB.
const COLUMNS: usize = 64;

/// # Safety
/// As [`crate::simd::Kernels::tile_axpy`] checks, on a processor with AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn tile_axpy(p: Tile, v: Tile, mut acc: TileMut) {
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
                    4.. => sums::<4, 2>(p, v, acc, stride, at),
                    2.. => sums::<2, 4>(p, v, acc, stride, at),
                    _ => sums::<1, 8>(p, v, acc, stride, at),
                }
            }
            r += match rows - r {
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
/// The rows exist in `p` and `acc`, the columns, a multiple of eight, in `v` and `acc`; the
/// processor has AVX2 and FMA.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn sums<const R: usize, const C: usize>(
    p: Tile,
    v: Tile,
    acc: *mut f32,
    stride: usize,
    (r, start, end): (usize, usize, usize),
) {
    let mut d = start;
    // SAFETY: the caller's promise; d + 8·C never passes `end`.
    unsafe {
        while d + 8 * C <= end {
            block::<R, C>(p, v, acc, stride, (r, d));
            d += 8 * C;
        }
        while d < end {
            block::<R, 1>(p, v, acc, stride, (r, d));
            d += 8;
        }
    }
}

/// R × C vectors of sums in registers while all positions pass.
///
/// # Safety
/// As `sums`, for 8·C columns from `d` on.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn block<const R: usize, const C: usize>(
    p: Tile,
    v: Tile,
    acc: *mut f32,
    stride: usize,
    (r, d): (usize, usize),
) {
    let acc = acc.wrapping_add(r * stride + d);
    let mut lanes = [[_mm256_setzero_ps(); C]; R];
    // SAFETY: rows r to r + R, positions below v's rows and 8·C columns from d on exist.
    unsafe {
        for a in 0..R {
            for c in 0..C {
                lanes[a][c] = _mm256_loadu_ps(acc.add(a * stride + 8 * c));
            }
        }
        for i in 0..v.n_rows() {
            let v = v.as_ptr().add(i * v.stride() + d);
            let v: [__m256; C] = std::array::from_fn(|c| _mm256_loadu_ps(v.add(8 * c)));
            for (a, lanes) in lanes.iter_mut().enumerate() {
                let p = _mm256_set1_ps(*p.as_ptr().add((r + a) * p.stride() + i));
                for c in 0..C {
                    lanes[c] = _mm256_fmadd_ps(p, v[c], lanes[c]);
                }
            }
        }
        for (a, lanes) in lanes.into_iter().enumerate() {
            for (c, lane) in lanes.into_iter().enumerate() {
                _mm256_storeu_ps(acc.add(a * stride + 8 * c), lane);
            }
        }
    }
}

/// # Safety
/// As [`crate::simd::Kernels::tile_softmax`] checks, on a processor with AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn tile_softmax(mut x: TileMut, scale: f32, steps: &mut [SoftmaxStep]) {
    for (r, step) in steps.iter_mut().enumerate() {
        *step = softmax_row(x.row(r), scale, step.max);
    }
}

#[target_feature(enable = "avx2,fma")]
fn softmax_row(x: &mut [f32], scale: f32, max: f32) -> SoftmaxStep {
    let factor = _mm256_set1_ps(scale);
    let mut maxima = _mm256_set1_ps(max);
    let (whole, rest) = x.as_chunks_mut::<8>();
    for x in &mut *whole {
        // SAFETY: eight values. The operand order keeps the maximum where x is NaN.
        unsafe {
            let scaled = _mm256_mul_ps(_mm256_loadu_ps(x.as_ptr()), factor);
            _mm256_storeu_ps(x.as_mut_ptr(), scaled);
            maxima = _mm256_max_ps(scaled, maxima);
        }
    }
    let mut eight = [0f32; 8];
    // SAFETY: eight places.
    unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), maxima) };
    rest.iter_mut().for_each(|x| *x *= scale);
    let larger = |m: f32, x: &f32| if *x > m { *x } else { m };
    let new = eight.iter().chain(&*rest).fold(max, larger);
    let shift = _mm256_set1_ps(tile::shift(new));
    let mut lanes = _mm256_setzero_ps();
    for x in whole {
        // SAFETY: eight values.
        unsafe {
            let e = exp8(_mm256_sub_ps(_mm256_loadu_ps(x.as_ptr()), shift));
            _mm256_storeu_ps(x.as_mut_ptr(), e);
            lanes = _mm256_add_ps(lanes, e);
        }
    }
    if !rest.is_empty() {
        let mut e = [f32::NEG_INFINITY; 8];
        e[..rest.len()].copy_from_slice(rest);
        // SAFETY: eight values; those behind the rest become 0.
        unsafe {
            let v = exp8(_mm256_sub_ps(_mm256_loadu_ps(e.as_ptr()), shift));
            _mm256_storeu_ps(e.as_mut_ptr(), v);
            e[rest.len()..].fill(0.0);
            lanes = _mm256_add_ps(lanes, _mm256_loadu_ps(e.as_ptr()));
        }
        rest.copy_from_slice(&e[..rest.len()]);
    }
    let factor = exp8(_mm256_sub_ps(_mm256_set1_ps(max), shift));
    SoftmaxStep { max: new, factor: _mm256_cvtss_f32(factor), sum: tree8(lanes) }
}

/// # Safety
/// The processor has AVX2 and F16C; the slices are of one length.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn f16_to_f32(x: &[u16], out: &mut [f32]) {
    let (xs, x_rest) = x.as_chunks::<8>();
    let (outs, out_rest) = out.as_chunks_mut::<8>();
    for (x, o) in xs.iter().zip(outs) {
        // SAFETY: eight values each.
        unsafe {
            let v = _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast()));
            _mm256_storeu_ps(o.as_mut_ptr(), v);
        }
    }
    tile::f16_to_f32(x_rest, out_rest);
}

/// # Safety
/// The processor has AVX2; the slices are of one length.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn bf16_to_f32(x: &[u16], out: &mut [f32]) {
    // A shift an element, which the compiler turns into vectors here, where AVX2 is enabled.
    out.iter_mut().zip(x).for_each(|(o, x)| *o = f32::from_bits((*x as u32) << 16));
}

/// # Safety
/// The processor has AVX2 and F16C; `out` has a place for each value of `x`.
#[target_feature(enable = "avx2,f16c")]
pub(in crate::simd) unsafe fn dequantize(ty: TensorType, x: &[u8], out: &mut [f32]) {
    // SAFETY: the caller's promise; the closures get whole blocks.
    unsafe {
        match ty {
            TensorType::Q8_0 => blocks::<BlockQ8_0>(x, out, |w| load(&raw const (*w).qs)),
            TensorType::Q4_0 => blocks::<BlockQ4_0>(x, out, |w| {
                _mm256_sub_epi8(nibbles(&raw const (*w).qs), _mm256_set1_epi8(8))
            }),
            TensorType::Q4_1 => decoded::<BlockQ4_1>(x, out),
            TensorType::Q5_0 => decoded::<BlockQ5_0>(x, out),
            TensorType::Q5_1 => decoded::<BlockQ5_1>(x, out),
            TensorType::IQ4_NL => decoded::<BlockIQ4NL>(x, out),
            _ => quant::dequantize(ty, x, out),
        }
    }
}

/// # Safety
/// As [`dequantize`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn decoded<B: Decode<Stored = f16>>(x: &[u8], out: &mut [f32]) {
    // SAFETY: the caller's promise; the closure gets whole blocks.
    unsafe { blocks::<B>(x, out, |w| B::codes(w, 0)) }
}

/// `d·q − min`; `codes` gives a block's 32 codes, signed or below 128. A min of 0 changes no bit.
///
/// # Safety
/// As [`dequantize`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn blocks<B: IntBlock<Stored = f16>>(
    x: &[u8],
    out: &mut [f32],
    codes: impl Fn(*const B) -> __m256i,
) {
    for (block, out) in blocks_of::<B>(x).iter().zip(out.as_chunks_mut::<32>().0) {
        let (codes, (d, min)) = (codes(block), block.stored());
        let [d, min] = [d, min].map(|half| _mm256_cvtph_ps(_mm_set1_epi16(half.to_bits() as i16)));
        let (low, high) = (_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes));
        let eights = [low, _mm_srli_si128::<8>(low), high, _mm_srli_si128::<8>(high)];
        for (eight, out) in eights.into_iter().zip(out.as_chunks_mut::<8>().0) {
            let q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
            // SAFETY: eight places.
            unsafe {
                _mm256_storeu_ps(out.as_mut_ptr(), _mm256_sub_ps(_mm256_mul_ps(q, d), min));
            }
        }
    }
}
