//! Matrix–vector products of the formats of 32 codes without sub-blocks: eight blocks that lie one
//! after the other at a time, two to a vector. `vpdpbusd` multiplies u8 by i8, so each code has an
//! offset, whose share the activations' sums take off again.
//!
//! The vectors have 256 bits, as bringing four blocks that are 17 to 24 bytes apart together in 512
//! takes as many operations as the rest; an EPYC of family 25, model 17 was slower so. MXFP4,
//! weights in cache, GOP/s of one thread: 59 with codes of one block in a half, 75 with four blocks
//! in 512 bits, 96 with two in 256.
//!
//! Granules of fewer than eight blocks would leave lanes idle, so eight rows are taken at once
//! there, and the values of their blocks sorted by rows afterwards.

mod groups;
mod heads;

use crate::quant::{
    BlockIQ4NL, BlockMXFP4, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, e2m1, iq4_nl,
};
use crate::simd::avx2::ahead::{Rows, follows};
use crate::simd::avx2::eight_rows::add_up_eight_rows;
use crate::simd::avx2::ints::Ints;
use crate::simd::avx2::matvec::row_by_granules;
use crate::simd::avx2::reduce::tree8;
use crate::simd::{Product, Scratch};
use groups::Group;
use heads::{Heads, Places, places};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::{MaybeUninit, offset_of};

/// Blocks of a row whose granules have fewer than eight, up to which eight rows are taken at once.
const MOST: usize = 128;

/// A format whose blocks have 16 bytes of codes' low halves.
pub(super) trait Offset: Ints {
    /// Added to each value, so that it is a u8.
    const OFFSET: i32 = 0;
    /// Bytes from a block's begin to the codes.
    const CODES: usize;
    /// To four bytes of the codes' top bits.
    const TOPS: Option<usize> = None;
    /// To an f16 that is added to each value.
    const MIN: Option<usize> = None;
    /// The values that codes stand for.
    const TABLE: Option<&'static [i8; 16]> = None;

    const PLACES: Places = places(size_of::<Self>(), Self::MIN, Self::TOPS);

    /// The scales of eight blocks: the f16 that blocks begin with, or what a format says instead.
    ///
    /// # Safety
    /// The processor has this module's features.
    #[inline]
    #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
    unsafe fn eight_scales(heads: Heads) -> __m256 {
        _mm256_cvtph_ps(heads.first())
    }
}

impl Offset for BlockQ4_0 {
    const OFFSET: i32 = 8;
    const CODES: usize = offset_of!(Self, qs);
}

impl Offset for BlockQ4_1 {
    const CODES: usize = offset_of!(Self, qs);
    const MIN: Option<usize> = Some(offset_of!(Self, m));
}

impl Offset for BlockQ5_0 {
    const OFFSET: i32 = 16;
    const CODES: usize = offset_of!(Self, qs);
    const TOPS: Option<usize> = Some(offset_of!(Self, qh));
}

impl Offset for BlockQ5_1 {
    const CODES: usize = offset_of!(Self, qs);
    const TOPS: Option<usize> = Some(offset_of!(Self, qh));
    const MIN: Option<usize> = Some(offset_of!(Self, m));
}

impl Offset for BlockIQ4NL {
    const OFFSET: i32 = 127;
    const CODES: usize = offset_of!(Self, qs);
    const TABLE: Option<&'static [i8; 16]> = Some(&iq4_nl::VALUES);
}

impl Offset for BlockMXFP4 {
    const OFFSET: i32 = 12;
    const CODES: usize = offset_of!(Self, qs);
    const TABLE: Option<&'static [i8; 16]> = Some(&e2m1::DOUBLED);

    /// `mxfp4::half_power` of eight blocks. Blocks of 17 bytes begin in either half of a word.
    #[inline]
    #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
    unsafe fn eight_scales(heads: Heads) -> __m256 {
        let is_high = _mm_setr_epi16(0, 8, 0, 8, 0, 8, 0, 8);
        let e = _mm256_cvtepu16_epi32(_mm_srlv_epi16(heads.first(), is_high));
        let e = _mm256_and_si256(e, _mm256_set1_epi32(0xff));
        let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
        let subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
        let is_subnormal = _mm256_cmplt_epu32_mask(e, _mm256_set1_epi32(2));
        _mm256_castsi256_ps(_mm256_mask_mov_epi32(normal, is_subnormal, subnormal))
    }
}

/// # Safety
/// As [`Product`] says, on a processor with the features of this module; B is the matrix's type.
pub(super) unsafe fn matmul<B: Offset>(product: Product, scratch: &mut Scratch) {
    // SAFETY: the caller's promises.
    unsafe {
        match follows() {
            true => arranged::<B, true>(product, scratch),
            false => arranged::<B, false>(product, scratch),
        }
    }
}

/// Eight rows at once, their blocks eight after eight across the ends of rows, where granules have
/// fewer than eight and no gap is between rows; else row by row.
///
/// # Safety
/// As `matmul`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn arranged<B: Offset, const FOLLOWS: bool>(product: Product, scratch: &mut Scratch) {
    let Product { mat, rows, acts, .. } = product;
    let (blocks, granule) = (mat.cols / B::LEN, (product.granule / B::LEN).max(1));
    let is_dense = mat.row_stride == mat.row_bytes();
    let by_eights =
        if granule < 8 && is_dense && (1..=MOST).contains(&blocks) { rows / 8 * 8 } else { 0 };
    // SAFETY: rows below `mat.rows` lie within `data`; the places in `out` are the caller's
    // promise.
    unsafe {
        let ahead = Rows::begin(product);
        if by_eights > 0 {
            let groups = groups::of_rows::<B>(acts, blocks, scratch);
            let mut values = [MaybeUninit::uninit(); 8 * MOST + 8];
            for r in (0..by_eights).step_by(8) {
                let row = product.row(r).cast::<B>();
                dot_eight_rows::<B, FOLLOWS>(row, groups, ahead, &mut values[..8 * blocks]);
                let out = product.place(0, r);
                let values = values.as_ptr().cast();
                add_up_eight_rows(values, blocks, granule, product.adds, out);
            }
        }
        if by_eights < rows {
            let groups = groups::of_granules::<B>(acts, granule, scratch);
            let (a_granule, end) = (granule.div_ceil(8), mat.data.as_ptr_range().end);
            for r in by_eights..rows {
                row_by_granules::<B>(product, 0, r, |b, n| {
                    let groups = &groups[b / granule * a_granule..][..n.div_ceil(8)];
                    let row = product.row(r).cast::<B>().add(b);
                    dot_row::<B, FOLLOWS>(row, n, groups, ahead, end)
                });
            }
        }
    }
}

/// The values of the blocks of eight rows, as they lie.
///
/// # Safety
/// `row` leads to as many blocks as `values` has places, and `groups` are theirs, the first again
/// after the last.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn dot_eight_rows<B: Offset, const FOLLOWS: bool>(
    row: *const B,
    groups: &[Group],
    ahead: Rows,
    values: &mut [MaybeUninit<f32>],
) {
    let mut g = 0;
    for (i, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let w = row.wrapping_add(8 * i);
        ahead.behind(w.cast(), w.cast()).ask::<[B; 8], FOLLOWS>(0);
        // SAFETY: eight blocks, and eight places for their values.
        unsafe {
            let dots = add_eight(w, &groups[g], 0xff, _mm256_setzero_ps());
            _mm256_storeu_ps(values.as_mut_ptr().cast(), dots);
        }
        g = if g + 1 < groups.len() { g + 1 } else { 0 };
    }
}

/// # Safety
/// `row` leads to `blocks` blocks of a matrix that ends at `end`; `groups` are theirs.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn dot_row<B: Offset, const FOLLOWS: bool>(
    row: *const B,
    blocks: usize,
    groups: &[Group],
    ahead: Rows,
    end: *const u8,
) -> f32 {
    let mut lanes = _mm256_setzero_ps();
    let rest = blocks % 8;
    for (g, group) in groups.iter().enumerate() {
        let w = row.wrapping_add(8 * g);
        ahead.behind(w.cast(), row.wrapping_add(blocks).cast()).ask::<[B; 8], FOLLOWS>(0);
        // SAFETY: eight blocks, the last ones of the matrix as a copy that zeros fill up. Values
        // and scales of those that are not the row's become 0.
        unsafe {
            if g < blocks / 8 {
                lanes = add_eight(w, group, 0xff, lanes);
                continue;
            }
            let mask = 0xff >> (8 - rest);
            if w.wrapping_add(8).cast() <= end {
                lanes = add_eight(w, group, mask, lanes);
                continue;
            }
            let mut eight = MaybeUninit::<[B; 8]>::zeroed();
            eight.as_mut_ptr().cast::<B>().copy_from_nonoverlapping(w, rest);
            lanes = add_eight(eight.as_ptr().cast::<B>(), group, mask, lanes);
        }
    }
    tree8(lanes)
}

/// `lanes` plus eight blocks, one a lane, for the lanes in `mask`: elsewhere the scales become 0,
/// and x + 0 is x since a lane that began at +0 is never −0.
///
/// # Safety
/// Eight blocks are at `w`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn add_eight<B: Offset>(w: *const B, group: &Group, mask: u8, lanes: __m256) -> __m256 {
    // SAFETY: the caller's promise; a group's vectors are aligned.
    unsafe {
        let heads = Heads::new(w.cast(), const { &B::PLACES });
        let tops = B::TOPS.map(|_| heads.tops());
        let a = group.values.as_ptr();
        let isums = sums_of_twos([
            two_blocks::<B, 0>(w, tops, a),
            two_blocks::<B, 1>(w, tops, a),
            two_blocks::<B, 2>(w, tops, a),
            two_blocks::<B, 3>(w, tops, a),
        ]);
        let sums = _mm256_load_si256(group.sums.as_ptr().cast());
        let a = _mm256_load_ps(group.scales.as_ptr());
        let scale = _mm256_maskz_mul_ps(mask, B::eight_scales(heads), a);
        if B::MIN.is_none() {
            let isums = _mm256_cvtepi32_ps(_mm256_sub_epi32(isums, sums));
            return _mm256_fmadd_ps(scale, isums, lanes);
        }
        let lanes = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(isums), lanes);
        let scale = _mm256_maskz_mul_ps(mask, _mm256_cvtph_ps(heads.mins()), a);
        _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sums), lanes)
    }
}

/// The products of blocks K and K + 4, a half of four lanes each.
///
/// # Safety
/// `w` leads to eight whole blocks and `a` to their activations, as a [`Group`] has them; `tops`
/// are the blocks' if the format has any. The processor has this module's features.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn two_blocks<B: Offset, const K: usize>(
    w: *const B,
    tops: Option<__m256i>,
    a: *const i8,
) -> __m256i {
    // SAFETY: the caller's promise. Of the bytes before the second block's codes none is read. A
    // masked load does not take the units that shuffle, which an insertion would.
    unsafe {
        let first = w.add(K).cast::<u8>().add(B::CODES);
        let other = w.add(K + 4).cast::<u8>().add(B::CODES).wrapping_sub(16);
        let first = _mm256_castsi128_si256(_mm_loadu_si128(first.cast()));
        let both = _mm256_mask_loadu_epi64(first, 0b1100, other.cast());
        let nibble = _mm256_set1_epi8(15);
        let low = _mm256_and_si256(both, nibble);
        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble);
        let (low, high) = match tops {
            Some(tops) => (with(low, tops, 2 * K), with(high, tops, 2 * K + 1)),
            None => (values::<B>(low), values::<B>(high)),
        };
        let acts = |i: usize| _mm256_load_si256(a.add(64 * K + 32 * i).cast());
        let sum = _mm256_dpbusd_epi32(_mm256_setzero_si256(), low, acts(0));
        _mm256_dpbusd_epi32(sum, high, acts(1))
    }
}

/// Lane i is the sum of half `i / 4` of `v[i % 4]`.
#[inline]
#[target_feature(enable = "avx2")]
fn sums_of_twos(v: [__m256i; 4]) -> __m256i {
    let pairs = |a, b| _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (a, b) = (pairs(v[0], v[1]), pairs(v[2], v[3]));
    _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
}

/// The values, plus the offset, of codes of four bits.
#[inline]
#[target_feature(enable = "avx2")]
fn values<B: Offset>(codes: __m256i) -> __m256i {
    let Some(table) = B::TABLE else { return codes };
    // SAFETY: a table of 16 bytes.
    let values = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    let values = _mm_add_epi8(values, _mm_set1_epi8(B::OFFSET as i8));
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), codes)
}

/// Codes of two blocks with their fifth bits, which are word `i` of each half of `tops`. The
/// addition is in assembly because a compiler makes two instructions of it.
#[inline]
#[target_feature(enable = "avx2,avx512bw,avx512vl")]
fn with(mut codes: __m256i, tops: __m256i, i: usize) -> __m256i {
    let byte = |k: usize| _mm_set1_epi8((2 * i + k) as i8);
    let bytes = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(byte(0), byte(1)));
    let bits = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let is_top = _mm256_test_epi8_mask(_mm256_shuffle_epi8(tops, bytes), bits);
    // SAFETY: registers alone.
    unsafe {
        asm!("vpaddb {codes} {{{is_top}}}, {codes}, {sixteen}", codes = inout(ymm_reg) codes,
            is_top = in(kreg) is_top, sixteen = in(ymm_reg) _mm256_set1_epi8(16),
            options(pure, nomem, nostack, preserves_flags));
    }
    codes
}
