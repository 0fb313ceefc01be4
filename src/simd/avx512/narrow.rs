//! Matrix–vector products of the formats of 32 codes without sub-blocks: eight blocks of a row at a
//! time, two to a vector. `vpdpbusd` multiplies u8 by i8, so each code has an offset, whose share
//! the activations' sums take off again.
//!
//! The vectors have 256 bits, as bringing four blocks that are 17 to 24 bytes apart together in 512
//! takes as many operations as the rest; an EPYC of family 25, model 17 was slower so. MXFP4,
//! weights in cache, GOP/s of one thread: 59 with codes of one block in a half, 75 with four blocks
//! in 512 bits, 96 as it is.

use super::eight::{eight_f16, scalar, write_ordered};
use crate::quant::{
    BlockIQ4NL, BlockMXFP4, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, e2m1, iq4_nl,
};
use crate::simd::avx2::ahead::Rows;
use crate::simd::avx2::ints::Ints;
use crate::simd::avx2::matvec::{Token, ask_for_all_of, row_by_granules};
use crate::simd::avx2::reduce::tree8;
use crate::simd::{Product, Scratch};
use std::arch::x86_64::*;
use std::mem::offset_of;

/// Sixteens of the activations of eight blocks: the first of blocks k and k + 4, then the others of
/// these two, for each k below 4.
const BY_TWO: [u8; 16] = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15];

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

    /// The scales of the eight blocks that `at` names: f16 that blocks begin with, or what a format
    /// says instead.
    ///
    /// # Safety
    /// They can be read; the processor has this module's features.
    #[inline]
    #[target_feature(enable = "avx2,f16c,avx512f,avx512vl")]
    unsafe fn eight_scales(at: impl Fn(usize) -> *const Self) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { eight_f16(|i| at(i).cast()) }
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

    /// As `mxfp4::half_power`.
    #[inline]
    #[target_feature(enable = "avx2,f16c,avx512f,avx512vl")]
    unsafe fn eight_scales(at: impl Fn(usize) -> *const Self) -> __m256 {
        // SAFETY: the caller's promise.
        let e = |i: usize| unsafe { (*at(i)).e } as u64;
        let e = scalar((0..8).fold(0, |all, i| all | e(i) << (8 * i)));
        let e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(e));
        let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
        let subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
        let is_subnormal = _mm256_cmplt_epu32_mask(e, _mm256_set1_epi32(2));
        _mm256_castsi256_ps(_mm256_mask_mov_epi32(normal, is_subnormal, subnormal))
    }
}

/// # Safety
/// As [`Product`] says, on a processor with the features of this module; B is the matrix's type.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn matmul<B: Offset>(product: Product, scratch: &mut Scratch) {
    let token = Token::new::<B>(product.acts, 0);
    let values = ordered::<B>(product, scratch);
    let granule = (product.granule / B::LEN).max(1);
    // SAFETY: rows below `mat.rows` lie within `data`; the places in `out` are the caller's
    // promise.
    unsafe {
        let ahead = Rows::begin(product);
        for r in 0..product.rows {
            row_by_granules::<B>(product, 0, r, |b, n| {
                let values = values.add(b / granule * padded(granule));
                let token = token.behind::<B>(b).with_values(values);
                dot_row::<B>(product.row(r).cast::<B>().add(b), n, token, ahead)
            });
        }
    }
}

/// The bytes of ordered activations for so many blocks.
fn padded(blocks: usize) -> usize {
    (32 * blocks).next_multiple_of(256)
}

/// The token's activations, those of each eight blocks of a granule [`BY_TWO`], with zeros for
/// blocks that its last eight lack.
fn ordered<B: Offset>(product: Product, scratch: &mut Scratch) -> *const i8 {
    let (qs, granule) = (product.acts.qs(0), product.granule.max(B::LEN));
    let bytes = padded(granule / B::LEN);
    let room = scratch.get(qs.len().div_ceil(granule) * bytes).cast::<i8>();
    for (i, granule) in qs.chunks(granule).enumerate() {
        let (eights, rest) = granule.as_chunks::<256>();
        let mut last = [0; 256];
        last[..rest.len()].copy_from_slice(rest);
        // SAFETY: there is room for all values and for what they are filled up with.
        unsafe {
            let room = room.add(i * bytes);
            write_ordered(eights, BY_TWO, room);
            if !rest.is_empty() {
                write_ordered(&[last], BY_TWO, room.add(256 * eights.len()));
            }
        }
    }
    room
}

/// # Safety
/// `row` leads to `blocks` blocks and `token` to as many, with values as [`ordered`] has them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn dot_row<B: Offset>(row: *const B, blocks: usize, token: Token, ahead: Rows) -> f32 {
    let mut lanes = _mm256_setzero_ps();
    let whole = blocks / 8 * 8;
    for first in (0..whole).step_by(8) {
        // SAFETY: eight blocks from `first` on.
        unsafe {
            let w = row.add(first);
            ahead.behind(w.cast(), row.add(blocks).cast()).ask_for::<[B; 8]>(0);
            lanes = add_eight::<B>(|i| w.add(i), token.behind::<B>(first), 0xff, lanes);
        }
    }
    if whole < blocks {
        let last = blocks - 1 - whole;
        // SAFETY: the last block stands in for those that are missing; their scales and sums are
        // not loaded, and their values are zeros.
        unsafe {
            ask_for_all_of::<B>(ahead.behind(row.add(whole).cast(), row.add(blocks).cast()), last);
            let at = |i: usize| row.add(whole + i.min(last));
            lanes = add_eight::<B>(at, token.behind::<B>(whole), 0xff >> (7 - last), lanes);
        }
    }
    tree8(lanes)
}

/// `lanes` plus eight blocks, one a lane, for the lanes in `mask`: elsewhere the scales become 0,
/// and x + 0 is x since a lane that began at +0 is never −0.
///
/// # Safety
/// `at(i)` leads to whole blocks; `token` has 256 values, and a scale and a sum for each lane in
/// `mask`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn add_eight<B: Offset>(
    at: impl Fn(usize) -> *const B + Copy,
    token: Token,
    mask: u8,
    lanes: __m256,
) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let act = token.block::<B>(0);
        let two = |k: usize| two_blocks([at(k), at(k + 4)], act.qs.add(64 * k));
        let isums = sums_of_twos([two(0), two(1), two(2), two(3)]);
        let sums = _mm256_cvtepi16_epi32(_mm_maskz_loadu_epi16(mask, act.sums));
        let offset = _mm256_mullo_epi32(sums, _mm256_set1_epi32(B::OFFSET));
        let isums = _mm256_cvtepi32_ps(_mm256_sub_epi32(isums, offset));
        let a = _mm256_maskz_loadu_ps(mask, token.scales);
        let scale = _mm256_maskz_mul_ps(mask, B::eight_scales(at), a);
        let lanes = _mm256_fmadd_ps(scale, isums, lanes);
        let Some(offset) = B::MIN else { return lanes };
        let min = eight_f16(|i| at(i).cast::<u8>().add(offset));
        let scale = _mm256_maskz_mul_ps(mask, min, a);
        _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sums), lanes)
    }
}

/// The products of two blocks, a half of four lanes each.
///
/// # Safety
/// The pointers lead to whole blocks and to their 64 activations, both first sixteens before the
/// others; the processor has this module's features.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn two_blocks<B: Offset>(w: [*const B; 2], a: *const i8) -> __m256i {
    // SAFETY: the caller's promise. Of the bytes before the second block's codes none is read. A
    // masked load does not take the units that shuffle, which an insertion would.
    unsafe {
        let [first, other] = w.map(|w| w.cast::<u8>().wrapping_add(B::CODES));
        let first = _mm256_castsi128_si256(_mm_loadu_si128(first.cast()));
        let both = _mm256_mask_loadu_epi64(first, 0b1100, other.wrapping_sub(16).cast());
        let nibble = _mm256_set1_epi8(15);
        let low = values(_mm256_and_si256(both, nibble), w, 0);
        let high = values(_mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble), w, 1);
        let acts = |i: usize| _mm256_loadu_si256(a.add(32 * i).cast());
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

/// The values, plus the offset, of two blocks' first sixteen codes, or of the others if `k` is 1;
/// `low` has the codes' low halves.
///
/// # Safety
/// The pointers lead to whole blocks; the processor has this module's features.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
unsafe fn values<B: Offset>(low: __m256i, w: [*const B; 2], k: usize) -> __m256i {
    if let Some(table) = B::TABLE {
        // SAFETY: a table of 16 bytes.
        let values = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
        let values = _mm_add_epi8(values, _mm_set1_epi8(B::OFFSET as i8));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), low);
    }
    let Some(tops) = B::TOPS else { return low };
    // SAFETY: two bytes of bits for each sixteen codes; unaligned by intent.
    let [first, other] = w
        .map(|w| unsafe { w.cast::<u8>().add(tops + 2 * k).cast::<u16>().read_unaligned() as u32 });
    _mm256_mask_add_epi8(low, first | other << 16, low, _mm256_set1_epi8(16))
}
