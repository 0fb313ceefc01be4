//! Products of NVFP4. Each sub-block of 16 is a block of "One arithmetic", so two stored blocks
//! fill the eight lanes: their eight integers come out of the horizontal sums in one vector, in
//! order, and one fma adds them. Up to four tokens share the unpacking.

use super::ints::load;
use crate::quant::{BlockNVFP4, e2m1};
use crate::simd::{ActView, Product};
use std::arch::x86_64::*;

const TILE: usize = 4;

/// One token's activations.
#[derive(Clone, Copy)]
struct Token {
    qs: *const i8,
    scales: *const f32,
}

/// Two stored blocks: in `codes`, of each block, sub-blocks 0 and 1, then 2 and 3; the eight
/// scales.
struct Pair {
    codes: [__m256i; 4],
    d: __m256,
}

/// # Safety
/// As [`Product`] says, on a processor with AVX2, FMA and F16C; the matrix is NVFP4.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul(product: Product) {
    let Product { mat, acts, .. } = product;
    let out_stride = product.out.stride;
    let blocks = mat.cols / 64;
    for r in 0..product.rows {
        // SAFETY: rows below `mat.rows` lie within `data`; the places in `out` are the caller's
        // promise.
        unsafe {
            let row = product.row(r).cast();
            for t in (0..acts.tokens()).step_by(TILE) {
                let out = product.place(t, r);
                match acts.tokens() - t {
                    1 => tile::<1>(row, blocks, acts, t, out, out_stride),
                    2 => tile::<2>(row, blocks, acts, t, out, out_stride),
                    3 => tile::<3>(row, blocks, acts, t, out, out_stride),
                    _ => tile::<TILE>(row, blocks, acts, t, out, out_stride),
                }
            }
        }
    }
}

/// One row times tokens `t` to `t + T − 1`.
///
/// # Safety
/// `row` leads to `blocks` blocks, the tokens exist and have as many columns, `out` takes a value
/// at each of T multiples of `out_stride`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const T: usize>(
    row: *const BlockNVFP4,
    blocks: usize,
    acts: ActView,
    t: usize,
    out: *mut f32,
    out_stride: usize,
) {
    let tokens: [Token; T] = std::array::from_fn(|i| Token {
        qs: acts.qs(t + i).as_ptr(),
        scales: acts.scales(t + i).as_ptr(),
    });
    let mut lanes = [_mm256_setzero_ps(); T];
    for b in (0..blocks / 2 * 2).step_by(2) {
        // SAFETY: blocks b and b + 1 exist in the row and in each token.
        unsafe {
            let pair = unpack(row.add(b), row.add(b + 1));
            for i in 0..T {
                let token = tokens[i];
                let token = Token { qs: token.qs.add(64 * b), scales: token.scales.add(2 * b) };
                lanes[i] = add_pair(&pair, token, lanes[i]);
            }
        }
    }
    if blocks % 2 == 1 {
        // The last block and one of zeros, whose lanes keep what they have: their scales are 0.
        let zeros = BlockNVFP4 { d: [0; 4], qs: [0; 32] };
        let b = blocks - 1;
        // SAFETY: block b exists, and the copies are as long as two blocks.
        unsafe {
            let pair = unpack(row.add(b), &zeros);
            for i in 0..T {
                let (mut qs, mut scales) = ([0i8; 128], [0f32; 4]);
                std::ptr::copy_nonoverlapping(tokens[i].qs.add(64 * b), qs.as_mut_ptr(), 64);
                let from = tokens[i].scales.add(2 * b);
                std::ptr::copy_nonoverlapping(from, scales.as_mut_ptr(), 2);
                let token = Token { qs: qs.as_ptr(), scales: scales.as_ptr() };
                lanes[i] = add_pair(&pair, token, lanes[i]);
            }
        }
    }
    for (i, lanes) in lanes.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { out.add(i * out_stride).write(super::reduce::tree8(lanes)) };
    }
}

/// # Safety
/// Both pointers lead to whole blocks; the processor has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn unpack(first: *const BlockNVFP4, second: *const BlockNVFP4) -> Pair {
    // SAFETY: 32 bytes of codes and four of scales in each block; a table of 16 bytes.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(e2m1::DOUBLED.as_ptr().cast()));
        let codes = |w: *const BlockNVFP4| {
            let both = load(&raw const (*w).qs);
            let nibble = _mm256_set1_epi8(15);
            let low = _mm256_and_si256(both, nibble);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble);
            // Eight low and eight high codes make a sub-block: 0 and 2, then 1 and 3.
            let even = _mm256_shuffle_epi8(table, _mm256_unpacklo_epi64(low, high));
            let odd = _mm256_shuffle_epi8(table, _mm256_unpackhi_epi64(low, high));
            let (front, back) = (
                _mm256_permute2x128_si256::<0x20>(even, odd),
                _mm256_permute2x128_si256::<0x31>(even, odd),
            );
            (front, back)
        };
        let ((a, b), (c, d)) = (codes(first), codes(second));
        let scales = [first, second].map(|w| (&raw const (*w).d).cast::<i32>().read_unaligned());
        let scales = half_e4m3(_mm_setr_epi32(scales[0], scales[1], 0, 0));
        Pair { codes: [a, b, c, d], d: scales }
    }
}

/// See `quant::nvfp4::half_e4m3`, of the low eight bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn half_e4m3(bytes: __m128i) -> __m256 {
    let x = _mm256_cvtepu8_epi32(bytes);
    let nan = _mm256_cmpeq_epi32(x, _mm256_set1_epi32(0x7f));
    // Exponent and mantissa where an f32 has them, 119 short of its bias: 2^119 puts that right,
    // for subnormal numbers too.
    let bits = _mm256_slli_epi32::<20>(_mm256_and_si256(x, _mm256_set1_epi32(0x7f)));
    let bits = _mm256_andnot_si256(nan, bits);
    let shift = _mm256_set1_ps(f32::from_bits((127 + 119) << 23));
    _mm256_mul_ps(_mm256_castsi256_ps(bits), shift)
}

/// # Safety
/// 128 values and four scales of the token are readable; the processor has AVX2 and FMA.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_pair(pair: &Pair, token: Token, lanes: __m256) -> __m256 {
    let mut sums = [_mm256_setzero_si256(); 4];
    for (i, codes) in pair.codes.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        let a = unsafe { load(token.qs.add(32 * i)) };
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(a, codes));
        sums[i] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    // Sub-blocks 0 2 | 1 3 of a block, by halves; then 0 2 0 2 | 1 3 1 3 of both blocks.
    let (a, b) = (_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let isums = _mm256_permutevar8x32_epi32(_mm256_hadd_epi32(a, b), order);
    // SAFETY: four scales.
    let scales = _mm256_castps128_ps256(unsafe { _mm_loadu_ps(token.scales) });
    let scales = _mm256_permutevar8x32_ps(scales, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
    _mm256_fmadd_ps(_mm256_mul_ps(pair.d, scales), _mm256_cvtepi32_ps(isums), lanes)
}
