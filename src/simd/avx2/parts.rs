//! Products of Q1_0 and Q2_0 with a few tokens: a part of 32 values is a block of "One arithmetic",
//! so eight parts, of two or four stored blocks, fill the eight lanes. Codes are taken as 0 to 3,
//! and the sums of the activations are subtracted.

use super::ahead::Rows;
use super::ints::load;
use super::reduce::{sum8, tree8};
use crate::quant::{BlockQ1_0, BlockQ2_0, Parts};
use crate::simd::avx2::decode_32::spread_bits;
use crate::simd::{Matmul, Product, Scratch, parts};
use std::arch::x86_64::*;

/// The codes of a part.
pub(in crate::simd) trait Codes: Parts {
    /// Each value over d, plus 1.
    ///
    /// # Safety
    /// `w` leads to a whole block and j is below `PARTS`; the processor has AVX2.
    unsafe fn codes(w: *const Self, j: usize) -> __m256i;
}

impl Codes for BlockQ1_0 {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: four times four bytes of bits.
        let set = unsafe { spread_bits((&raw const (*w).qs).cast::<u8>().add(4 * j)) };
        _mm256_and_si256(set, _mm256_set1_epi8(2))
    }
}

impl Codes for BlockQ2_0 {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn codes(w: *const Self, j: usize) -> __m256i {
        // SAFETY: two times eight bytes of codes.
        let bytes = unsafe { _mm_loadl_epi64((&raw const (*w).qs).cast::<u8>().add(8 * j).cast()) };
        // A byte in each word; then its halves in two bytes of it, and their halves in four.
        let four = _mm256_cvtepu8_epi32(bytes);
        let two = _mm256_or_si256(four, _mm256_slli_epi32::<12>(four));
        let two = _mm256_and_si256(two, _mm256_set1_epi32(0x000f_000f));
        let one = _mm256_or_si256(two, _mm256_slli_epi32::<6>(two));
        _mm256_and_si256(one, _mm256_set1_epi8(3))
    }
}

/// One token's activations from some part on.
#[derive(Clone, Copy)]
struct Token {
    qs: *const i8,
    scales: *const f32,
    sums: *const i16,
}

impl Token {
    /// From part `b` on, which the row has.
    ///
    /// # Safety
    /// The row has so many parts.
    #[inline]
    unsafe fn behind(self, b: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let Token { qs, scales, sums } = self;
            Token { qs: qs.add(32 * b), scales: scales.add(b), sums: sums.add(b) }
        }
    }
}

/// Many tokens go through `many`, which multiplies Q4_0.
///
/// # Safety
/// As [`Product`] says, on a processor with AVX2, FMA and F16C; B is the matrix's type, and `many`
/// may be called.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::simd) unsafe fn matmul<B: Codes>(
    product: Product,
    scratch: &mut Scratch,
    many: Matmul,
) {
    if product.acts.tokens() >= parts::FEWEST {
        // SAFETY: the caller's promises.
        return unsafe { parts::by_q4_0::<B>(product, scratch, many) };
    }
    let (cols, granule) = (product.mat.cols, product.granule.max(1));
    for t in 0..product.acts.tokens() {
        let acts = product.acts;
        let token = Token {
            qs: acts.qs(t).as_ptr(),
            scales: acts.scales(t).as_ptr(),
            sums: acts.sums32(t).as_ptr(),
        };
        let ahead = Rows::begin(product);
        for r in 0..product.rows {
            let (row, out) = (product.row(r).cast::<B>(), product.place(t, r));
            let dot = |first: usize| {
                let n = granule.min(cols - first) / 32;
                // SAFETY: a whole number of blocks, of the row and of the token.
                unsafe { dot_row(row.add(first / B::LEN), n, token.behind(first / 32), ahead) }
            };
            // SAFETY: the caller's promise.
            unsafe {
                let mut sum = dot(0);
                if product.adds {
                    sum += out.read();
                }
                (granule..cols).step_by(granule).for_each(|first| sum += dot(first));
                out.write(sum);
            }
        }
    }
}

/// # Safety
/// `row` leads to `n` parts and `token` to as many; the processor has AVX2, FMA and F16C.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_row<B: Codes>(row: *const B, n: usize, token: Token, ahead: Rows) -> f32 {
    let mut lanes = _mm256_setzero_ps();
    let (whole, rest) = (n / 8 * 8, n % 8);
    // SAFETY: parts below `n` exist; the copies are as long as eight parts.
    unsafe {
        let end = row.add(n / B::PARTS).cast();
        for b in (0..whole).step_by(8) {
            let group = row.add(b / B::PARTS);
            ahead.behind(group.cast(), end).ask_for::<[[u8; 18]; 4]>(0);
            lanes = add_eight(group, token.behind(b), lanes);
        }
        if rest > 0 {
            // Those left and some of zeros, whose lanes keep what they have: their scales are 0.
            let mut blocks = [[0u8; 18]; 4];
            let (mut qs, mut scales, mut sums) = ([0; 256], [0.0; 8], [0; 8]);
            let (from, token) = (row.add(whole / B::PARTS), token.behind(whole));
            from.copy_to_nonoverlapping(blocks.as_mut_ptr().cast(), rest / B::PARTS);
            token.qs.copy_to_nonoverlapping(qs.as_mut_ptr(), 32 * rest);
            token.scales.copy_to_nonoverlapping(scales.as_mut_ptr(), rest);
            token.sums.copy_to_nonoverlapping(sums.as_mut_ptr(), rest);
            let token = Token { qs: qs.as_ptr(), scales: scales.as_ptr(), sums: sums.as_ptr() };
            lanes = add_eight::<B>(blocks.as_ptr().cast(), token, lanes);
        }
    }
    tree8(lanes)
}

/// `lanes` plus eight parts from those at `w` on, one a lane.
///
/// # Safety
/// `w` and `token` lead to eight parts; the processor has AVX2, FMA and F16C.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_eight<B: Codes>(w: *const B, token: Token, lanes: __m256) -> __m256 {
    let mut dots = [_mm256_setzero_si256(); 8];
    let mut d = [0i16; 8];
    for i in 0..8 {
        // SAFETY: part i is there.
        unsafe {
            let block = w.add(i / B::PARTS);
            let a = load(token.qs.add(32 * i));
            let pairs = _mm256_maddubs_epi16(B::codes(block, i % B::PARTS), a);
            dots[i] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            d[i] = (*block).scale().to_f16().to_bits() as i16;
        }
    }
    let d = _mm256_cvtph_ps(_mm_setr_epi16(d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]));
    // SAFETY: eight sums and scales.
    let (sums, a) = unsafe { (_mm_loadu_si128(token.sums.cast()), _mm256_loadu_ps(token.scales)) };
    let isums = _mm256_sub_epi32(sum8(dots), _mm256_cvtepi16_epi32(sums));
    _mm256_fmadd_ps(_mm256_mul_ps(d, a), _mm256_cvtepi32_ps(isums), lanes)
}
