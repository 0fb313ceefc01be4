//! Matrix–vector products of the formats of 32 codes without sub-blocks: eight blocks of a row at a
//! time, two to a vector. `vpdpbusd` multiplies u8 by i8, so each code has an offset, whose share
//! the activations' sums take off again.

use crate::quant::{BlockMXFP4, BlockQ4_0, e2m1};
use crate::simd::Product;
use crate::simd::avx2::ahead::Rows;
use crate::simd::avx2::ints::Ints;
use crate::simd::avx2::matvec::{Token, add_eight, row_by_granules};
use crate::simd::avx2::reduce::tree8;
use std::arch::x86_64::*;

pub(super) trait Offset: Ints {
    const OFFSET: i32;

    /// The codes of two blocks, plus the offset.
    ///
    /// # Safety
    /// The pointers lead to whole blocks; the processor has this module's features.
    unsafe fn two(w: [*const Self; 2]) -> __m512i;

    /// The scales of eight blocks that follow each other.
    ///
    /// # Safety
    /// As `two`.
    unsafe fn eight_scales(w: *const Self) -> __m256;
}

/// # Safety
/// As [`Product`] says, on a processor with the features of this module; B is the matrix's type.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn matmul<B: Offset>(product: Product) {
    for t in 0..product.acts.tokens() {
        let token = Token::new::<B>(product.acts, t);
        let ahead = Rows::begin(product);
        for r in 0..product.rows {
            // SAFETY: rows below `mat.rows` lie within `data`; the places in `out` are the
            // caller's promise.
            unsafe {
                row_by_granules::<B>(product, t, r, |b, n| {
                    dot_row::<B>(product.row(r).cast::<B>().add(b), n, token.behind::<B>(b), ahead)
                });
            }
        }
    }
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
            next.ask_for::<[B; 8]>(0);
            let act = token.block::<B>(first);
            // Blocks k and k + 4 make a vector, so that `sum8` finds them in order.
            let sums = |k: usize| {
                let low = _mm256_loadu_si256(act.qs.add(32 * k).cast());
                let high = _mm256_loadu_si256(act.qs.add(32 * (k + 4)).cast());
                let acts = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                let codes = B::two([w.add(k), w.add(k + 4)]);
                _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, acts)
            };
            let isums = sum8([sums(0), sums(1), sums(2), sums(3)]);
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

/// Lane i is the sum of half `i / 4` of `v[i % 4]`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn sum8(v: [__m512i; 4]) -> __m256i {
    let pairs = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (a, b) = (pairs(v[0], v[1]), pairs(v[2], v[3]));
    let sum = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    let other = _mm512_shuffle_i32x4::<0b10_11_00_01>(sum, sum);
    let sum = _mm512_add_epi32(sum, other);
    _mm512_castsi512_si256(_mm512_shuffle_i32x4::<0b00_00_10_00>(sum, sum))
}

/// Low halves of 16 bytes of one block, their high halves, and the same of another block.
///
/// # Safety
/// 16 bytes are readable at each place.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn nibbles(p: [*const u8; 2]) -> __m512i {
    // SAFETY: the caller's promise; the loads take any alignment.
    let both = unsafe {
        let low = _mm512_broadcast_i32x4(_mm_loadu_si128(p[0].cast()));
        _mm512_mask_broadcast_i32x4(low, 0xff00, _mm_loadu_si128(p[1].cast()))
    };
    let shifts = _mm512_broadcast_i64x4(_mm256_setr_epi64x(0, 0, FOURS, FOURS));
    _mm512_and_si512(_mm512_srlv_epi16(both, shifts), _mm512_set1_epi8(15))
}

const FOURS: i64 = 0x0004_0004_0004_0004;

impl Offset for BlockQ4_0 {
    const OFFSET: i32 = 8;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn two(w: [*const Self; 2]) -> __m512i {
        // SAFETY: 16 bytes of codes each.
        unsafe { nibbles(w.map(|w| (&raw const (*w).qs).cast())) }
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
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn two(w: [*const Self; 2]) -> __m512i {
        // SAFETY: 16 bytes of codes each, and of the table.
        unsafe {
            let codes = nibbles(w.map(|w| (&raw const (*w).qs).cast()));
            let values = _mm_loadu_si128(e2m1::DOUBLED.as_ptr().cast());
            let values = _mm_add_epi8(values, _mm_set1_epi8(Self::OFFSET as i8));
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), codes)
        }
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
