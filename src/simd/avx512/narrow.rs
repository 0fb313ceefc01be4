//! Matrix–vector products of the formats of 32 codes without sub-blocks: eight blocks of a row at a
//! time, four to a vector, a quarter each. `vpdpbusd` multiplies u8 by i8, so each code has an offset, whose share
//! the activations' sums take off again.

use super::eight::{BY_HALVES, dot, nibbles, quarters, sum_quarters, write_ordered};
use crate::quant::{BlockMXFP4, BlockQ4_0, e2m1};
use crate::simd::avx2::ahead::{Rows, asks};
use crate::simd::avx2::ints::Ints;
use crate::simd::avx2::matvec::{Token, add_eight, row_by_granules};
use crate::simd::avx2::reduce::tree8;
use crate::simd::{Product, Scratch};
use std::arch::x86_64::*;

pub(super) trait Offset: Ints {
    const OFFSET: i32;

    /// The 16 bytes of a block's codes; only the address is computed.
    fn codes(w: *const Self) -> *const u8;

    /// The values of codes, plus the offset.
    ///
    /// # Safety
    /// The processor has this module's features.
    unsafe fn values(codes: __m512i) -> __m512i;

    /// The scales of eight blocks that follow each other.
    ///
    /// # Safety
    /// They can be read; the processor has this module's features.
    unsafe fn eight_scales(w: *const Self) -> __m256;
}

/// # Safety
/// As [`Product`] says, on a processor with the features of this module; B is the matrix's type.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn matmul<B: Offset>(product: Product, scratch: &mut Scratch) {
    // SAFETY: rows below `mat.rows` lie within `data`; the places in `out` are the caller's
    // promise.
    unsafe {
        let token = ordered::<B>(product, scratch);
        let ahead = Rows::begin(product);
        for r in 0..product.rows {
            row_by_granules::<B>(product, 0, r, |b, n| {
                dot_row::<B>(product.row(r).cast::<B>().add(b), n, token.behind::<B>(b), ahead)
            });
        }
    }
}

/// The token's activations, those of each eight blocks of a granule [`BY_HALVES`].
///
/// # Safety
/// The processor has this module's features.
#[target_feature(enable = "avx512f")]
unsafe fn ordered<B: Offset>(product: Product, scratch: &mut Scratch) -> Token {
    let qs = product.acts.qs(0);
    let room = scratch.get(qs.len());
    // SAFETY: there is room for all values; granules are whole blocks.
    unsafe {
        for start in (0..qs.len()).step_by(product.granule.max(B::LEN)) {
            let granule = &qs[start..qs.len().min(start + product.granule)];
            write_ordered(granule, BY_HALVES, room.add(start).cast());
        }
    }
    Token::new::<B>(product.acts, 0).with_values(room.cast())
}

/// # Safety
/// `row` leads to `blocks` blocks and `token` to as many.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn dot_row<B: Offset>(row: *const B, blocks: usize, token: Token, ahead: Rows) -> f32 {
    let mut lanes = _mm256_setzero_ps();
    let whole = blocks / 8 * 8;
    for first in (0..whole).step_by(8) {
        // SAFETY: eight blocks from `first` on, with their 256 activations and eight sums.
        unsafe {
            let w = row.add(first);
            let next = ahead.behind(w.cast(), row.add(blocks).cast());
            if asks() {
                next.ask_for::<[B; 8]>(0);
            }
            let act = token.block::<B>(first);
            let codes = quarters(|i| B::codes(w.add(i)));
            let dots = |k: usize| {
                let (low, high) = nibbles(codes[k]);
                dot([B::values(low), B::values(high)], act.qs, k)
            };
            let isums = sum_quarters(dots(0), dots(1));
            let known = _mm256_cvtepi16_epi32(_mm_loadu_si128(act.sums.cast()));
            let offset = _mm256_mullo_epi32(known, _mm256_set1_epi32(B::OFFSET));
            let scale = _mm256_mul_ps(B::eight_scales(w), _mm256_loadu_ps(token.scales.add(first)));
            let isums = _mm256_cvtepi32_ps(_mm256_sub_epi32(isums, offset));
            lanes = _mm256_fmadd_ps(scale, isums, lanes);
        }
    }
    if whole < blocks {
        let n = blocks - whole;
        let mask = 0xff >> (8 - n);
        // SAFETY: the last n blocks.
        unsafe {
            let a = _mm256_maskz_loadu_ps(mask, token.scales.add(whole));
            let at = |i: usize| (row.add(whole + i), token.block::<B>(whole + i));
            lanes = add_eight::<B>(at, n, a, lanes);
        }
    }
    tree8(lanes)
}

impl Offset for BlockQ4_0 {
    const OFFSET: i32 = 8;

    #[inline]
    fn codes(w: *const Self) -> *const u8 {
        w.cast::<u8>().wrapping_add(std::mem::offset_of!(Self, qs))
    }

    #[inline]
    unsafe fn values(codes: __m512i) -> __m512i {
        codes
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn eight_scales(w: *const Self) -> __m256 {
        // SAFETY: within the blocks; unaligned by intent.
        let d = |i: usize| unsafe { (&raw const (*w.add(i)).d).cast::<u16>().read_unaligned() };
        // Brought together by the scalar units, which have nothing else to do.
        let four = |i: usize| (0..4).fold(0, |all, k| all | (d(i + k) as u64) << (16 * k)) as i64;
        _mm256_cvtph_ps(_mm_set_epi64x(four(4), four(0)))
    }
}

impl Offset for BlockMXFP4 {
    const OFFSET: i32 = 12;

    #[inline]
    fn codes(w: *const Self) -> *const u8 {
        w.cast::<u8>().wrapping_add(std::mem::offset_of!(Self, qs))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn values(codes: __m512i) -> __m512i {
        // SAFETY: a table of 16 bytes.
        let values = unsafe { _mm_loadu_si128(e2m1::DOUBLED.as_ptr().cast()) };
        let values = _mm_add_epi8(values, _mm_set1_epi8(Self::OFFSET as i8));
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), codes)
    }

    /// As `mxfp4::half_power`.
    #[inline]
    #[target_feature(enable = "avx2,avx512f,avx512vl")]
    unsafe fn eight_scales(w: *const Self) -> __m256 {
        // SAFETY: within the blocks.
        let e = |i: usize| unsafe { (*w.add(i)).e } as u64;
        let e = (0..8).fold(0, |all, i| all | e(i) << (8 * i)) as i64;
        let e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(e));
        let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
        let subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
        let is_subnormal = _mm256_cmplt_epu32_mask(e, _mm256_set1_epi32(2));
        _mm256_castsi256_ps(_mm256_mask_mov_epi32(normal, is_subnormal, subnormal))
    }
}
