//! Eight rows of one block, unpacked for the matrix–matrix product, and the exact integers of
//! such a block with T tokens, one row a lane.
//!
//! `codes[g]` holds codes 4g to 4g + 3 of each of the eight rows, as u8 (formats with signed codes
//! are offset, and what the offset adds is subtracted exactly, by the sums of the activations).
//! `maddubs` sums pairs in i16; how many of those can be added before `madd` widens them follows
//! from the largest code: 15·127·2·8 = 30480 for Q4, 31·127·2·4 = 31496 for Q5, 63·127·2·2 = 32004
//! for Q6. Micro-operations for 32 codes of eight rows and one token: Q4_K 17, Q5_K 18, Q6_K 20,
//! Q4_0 18, Q8_0 35 (its codes are split in two halves of four bits).

use super::ints::{ActBlock, Ints, Scale};
use crate::quant::{BlockQ4_0, BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0};
use std::arch::x86_64::*;

pub(in crate::simd) trait Panel: Ints {
    /// Eight rows of one block.
    type Eight;

    /// # Safety
    /// Each pointer leads to a whole block; the processor has AVX2 and F16C.
    unsafe fn unpack(w: [*const Self; 8], panel: &mut Self::Eight);

    /// (d, dmin) of the eight rows.
    ///
    /// # Safety
    /// The processor has AVX2.
    unsafe fn eight_scales(panel: &Self::Eight) -> (__m256, __m256);

    /// `isum` of the eight rows for each token.
    ///
    /// # Safety
    /// The activations are whole blocks; the processor has AVX2.
    unsafe fn eight_isums<const T: usize>(panel: &Self::Eight, a: [ActBlock; T]) -> [__m256i; T];

    /// `imins` likewise; called for formats with mins only.
    ///
    /// # Safety
    /// As `eight_isums`.
    unsafe fn eight_imins<const T: usize>(_panel: &Self::Eight, _a: [ActBlock; T]) -> [__m256i; T] {
        unreachable!("a format without mins")
    }
}

/// Q4_K and Q5_K. `scales[j]` is scale j of each row twice, `mins[j]` are mins 2j and 2j + 1.
#[repr(C, align(32))]
pub(in crate::simd) struct AffineEight {
    d: __m256,
    dmin: __m256,
    mins: [__m256i; 4],
    scales: [__m256i; 8],
    codes: [__m256i; 64],
}

/// Q6_K. `scales[j]` is scale j of each row twice, `pairs[j]` are scales 2j and 2j + 1.
#[repr(C, align(32))]
pub(in crate::simd) struct SixEight {
    d: __m256,
    pairs: [__m256i; 8],
    scales: [__m256i; 16],
    codes: [__m256i; 64],
}

#[repr(C, align(32))]
pub(in crate::simd) struct FourEight {
    d: __m256,
    codes: [__m256i; 8],
}

/// Q8_0: the code plus 128 is `16·high + low`.
#[repr(C, align(32))]
pub(in crate::simd) struct ByteEight {
    d: __m256,
    low: [__m256i; 8],
    high: [__m256i; 8],
}

/// Vector i of the result holds word i of each of the eight vectors.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::simd) fn transpose(v: [__m256i; 8]) -> [__m256i; 8] {
    let pair = |a, b| (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let ((a0, a1), (b0, b1)) = (pair(v[0], v[1]), pair(v[2], v[3]));
    let ((c0, c1), (d0, d1)) = (pair(v[4], v[5]), pair(v[6], v[7]));
    let four = |a, b| (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    let ((e0, e1), (e2, e3)) = (four(a0, b0), four(a1, b1));
    let ((f0, f1), (f2, f3)) = (four(c0, d0), four(c1, d1));
    let low = |a, b| _mm256_permute2x128_si256::<0x20>(a, b);
    let high = |a, b| _mm256_permute2x128_si256::<0x31>(a, b);
    [
        low(e0, f0),
        low(e1, f1),
        low(e2, f2),
        low(e3, f3),
        high(e0, f0),
        high(e1, f1),
        high(e2, f2),
        high(e3, f3),
    ]
}

/// 32 bytes from byte `offset` of each block, transposed by words.
///
/// # Safety
/// The bytes lie within the blocks.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn words<B>(w: [*const B; 8], offset: usize) -> [__m256i; 8] {
    let mut rows = [_mm256_setzero_si256(); 8];
    for (row, w) in rows.iter_mut().zip(w) {
        // SAFETY: the caller's promise.
        *row = unsafe { _mm256_loadu_si256(w.cast::<u8>().add(offset).cast()) };
    }
    transpose(rows)
}

/// The word at byte `offset` of each block.
///
/// # Safety
/// The word lies within the blocks.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn word<B>(w: [*const B; 8], offset: usize) -> __m256i {
    let mut at = [0; 8];
    for (at, w) in at.iter_mut().zip(w) {
        // SAFETY: the caller's promise.
        *at = unsafe { w.cast::<u8>().add(offset).cast::<i32>().read_unaligned() };
    }
    _mm256_setr_epi32(at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7])
}

/// The low f16 of each word.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn low_halves(words: __m256i) -> __m256 {
    let low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    let packed = _mm256_packus_epi32(low, low);
    _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(packed)))
}

/// (d, dmin) of each block.
///
/// # Safety
/// The pointers lead to whole blocks; the processor has AVX2 and F16C.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn stored_scales_of<B: Ints>(w: [*const B; 8]) -> (__m256, __m256) {
    let (mut d, mut dmin) = ([B::Stored::default(); 8], [B::Stored::default(); 8]);
    // SAFETY: the caller's promise; a block has no alignment.
    unsafe {
        for i in 0..8 {
            (d[i], dmin[i]) = (*w[i]).stored();
        }
        (B::Stored::eight(d), B::Stored::eight(dmin))
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(v: __m256i) -> (__m256i, __m256i) {
    let mask = _mm256_set1_epi8(15);
    (_mm256_and_si256(v, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask))
}

/// Bytes i and k of each word, widened to the two i16 of the word.
#[inline]
#[target_feature(enable = "avx2")]
fn bytes_as_pair(words: __m256i, i: u8, k: u8) -> __m256i {
    let each = u32::from_le_bytes([i, 0x80, k, 0x80]) as i32;
    let first = _mm256_set1_epi32(each);
    let at =
        _mm256_setr_epi32(0, 0x04_0004, 0x08_0008, 0x0c_000c, 0, 0x04_0004, 0x08_0008, 0x0c_000c);
    _mm256_shuffle_epi8(words, _mm256_add_epi32(first, at))
}

/// `bytes_as_pair` of signed bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn signed_bytes_as_pair(words: __m256i, i: u8, k: u8) -> __m256i {
    _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes_as_pair(words, i, k)))
}

/// Four activations from `4·g` on, in every lane.
///
/// # Safety
/// They exist.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn four(a: ActBlock, g: usize) -> __m256i {
    // SAFETY: the caller's promise.
    _mm256_set1_epi32(unsafe { a.qs.add(4 * g).cast::<i32>().read_unaligned() })
}

/// `Σ_j scales_j·(sum 2j, sum 2j + 1)` for each token.
///
/// # Safety
/// 2·N sums exist for each token.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn times_sums<const N: usize, const T: usize>(
    scales: &[__m256i; N],
    a: [ActBlock; T],
) -> [__m256i; T] {
    let mut total = [_mm256_setzero_si256(); T];
    for (j, scales) in scales.iter().enumerate() {
        for t in 0..T {
            // SAFETY: the caller's promise.
            let sums = unsafe { a[t].sums.add(2 * j).cast::<i32>().read_unaligned() };
            let product = _mm256_madd_epi16(*scales, _mm256_set1_epi32(sums));
            total[t] = _mm256_add_epi32(total[t], product);
        }
    }
    total
}

/// i16 sums of `N` groups of codes from `codes` on with the activations from group `g` on.
///
/// # Safety
/// The activations exist.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn pairs<const N: usize, const T: usize>(
    codes: &[__m256i],
    a: [ActBlock; T],
    g: usize,
) -> [__m256i; T] {
    let mut sums = [_mm256_setzero_si256(); T];
    for n in 0..N {
        let codes = codes[g + n];
        for t in 0..T {
            // SAFETY: the caller's promise.
            let product = _mm256_maddubs_epi16(codes, unsafe { four(a[t], g + n) });
            sums[t] = if n == 0 { product } else { _mm256_add_epi16(sums[t], product) };
        }
    }
    sums
}

/// Scales, mins, d and dmin of Q4_K and Q5_K, whose blocks begin alike.
///
/// # Safety
/// The pointers lead to whole blocks; the processor has AVX2 and F16C.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn unpack_affine<B>(w: [*const B; 8], panel: &mut AffineEight) {
    // SAFETY: 16 bytes: d and dmin, then three words of packed scales (see `k_scales`).
    let (halves, a, b, c) = unsafe { (word(w, 0), word(w, 4), word(w, 8), word(w, 12)) };
    panel.d = low_halves(halves);
    panel.dmin = low_halves(_mm256_srli_epi32::<16>(halves));
    let six_bits = _mm256_set1_epi8(63);
    let top_bits = _mm256_set1_epi8(0x30);
    let top = |v| _mm256_and_si256(_mm256_srli_epi16::<2>(v), top_bits);
    let (scales_high, mins_high) = nibbles(c);
    let scales_low = _mm256_and_si256(a, six_bits);
    let mins_low = _mm256_and_si256(b, six_bits);
    let scales_high = _mm256_or_si256(scales_high, top(a));
    let mins_high = _mm256_or_si256(mins_high, top(b));
    for j in 0..4 {
        panel.scales[j] = bytes_as_pair(scales_low, j as u8, j as u8);
        panel.scales[j + 4] = bytes_as_pair(scales_high, j as u8, j as u8);
    }
    panel.mins = [
        bytes_as_pair(mins_low, 0, 1),
        bytes_as_pair(mins_low, 2, 3),
        bytes_as_pair(mins_high, 0, 1),
        bytes_as_pair(mins_high, 2, 3),
    ];
}

impl Panel for BlockQ4K {
    type Eight = AffineEight;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn unpack(w: [*const Self; 8], panel: &mut AffineEight) {
        // SAFETY: the caller's promise; 4 × 32 bytes of codes behind 16 of scales.
        unsafe {
            unpack_affine(w, panel);
            for c in 0..4 {
                for (i, both) in words(w, 16 + 32 * c).into_iter().enumerate() {
                    let (low, high) = nibbles(both);
                    panel.codes[16 * c + i] = low;
                    panel.codes[16 * c + 8 + i] = high;
                }
            }
        }
    }

    #[inline]
    unsafe fn eight_scales(panel: &AffineEight) -> (__m256, __m256) {
        (panel.d, panel.dmin)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_isums<const T: usize>(panel: &AffineEight, a: [ActBlock; T]) -> [__m256i; T] {
        let mut total = [_mm256_setzero_si256(); T];
        for (j, scale) in panel.scales.iter().enumerate() {
            // SAFETY: eight groups of 32.
            let pairs = unsafe { pairs::<8, T>(&panel.codes, a, 8 * j) };
            for t in 0..T {
                total[t] = _mm256_add_epi32(total[t], _mm256_madd_epi16(pairs[t], *scale));
            }
        }
        total
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_imins<const T: usize>(panel: &AffineEight, a: [ActBlock; T]) -> [__m256i; T] {
        // SAFETY: eight sums by 32.
        unsafe { times_sums(&panel.mins, a) }
    }
}

impl Panel for BlockQ5K {
    type Eight = AffineEight;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn unpack(w: [*const Self; 8], panel: &mut AffineEight) {
        // SAFETY: the caller's promise; 32 bytes of top bits and 4 × 32 of codes.
        unsafe {
            unpack_affine(w, panel);
            let mut tops = words(w, 16);
            let one = _mm256_set1_epi8(1);
            let fifth = |top| _mm256_slli_epi16::<4>(_mm256_and_si256(top, one));
            for c in 0..4 {
                for (i, both) in words(w, 48 + 32 * c).into_iter().enumerate() {
                    let (low, high) = nibbles(both);
                    let next = _mm256_srli_epi16::<1>(tops[i]);
                    panel.codes[16 * c + i] = _mm256_or_si256(low, fifth(tops[i]));
                    panel.codes[16 * c + 8 + i] = _mm256_or_si256(high, fifth(next));
                    tops[i] = _mm256_srli_epi16::<1>(next);
                }
            }
        }
    }

    #[inline]
    unsafe fn eight_scales(panel: &AffineEight) -> (__m256, __m256) {
        (panel.d, panel.dmin)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_isums<const T: usize>(panel: &AffineEight, a: [ActBlock; T]) -> [__m256i; T] {
        let mut total = [_mm256_setzero_si256(); T];
        for (j, scale) in panel.scales.iter().enumerate() {
            for half in 0..2 {
                // SAFETY: four groups of 32.
                let pairs = unsafe { pairs::<4, T>(&panel.codes, a, 8 * j + 4 * half) };
                for t in 0..T {
                    total[t] = _mm256_add_epi32(total[t], _mm256_madd_epi16(pairs[t], *scale));
                }
            }
        }
        total
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_imins<const T: usize>(panel: &AffineEight, a: [ActBlock; T]) -> [__m256i; T] {
        // SAFETY: eight sums by 32.
        unsafe { times_sums(&panel.mins, a) }
    }
}

impl Panel for BlockQ6K {
    type Eight = SixEight;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn unpack(w: [*const Self; 8], panel: &mut SixEight) {
        // SAFETY: 128 low bytes, 64 high ones from byte 128, 16 scales from byte 192.
        unsafe {
            panel.d = stored_scales_of(w).0;
            for n in 0..4 {
                let scales = word(w, 192 + 4 * n);
                for k in 0..4 {
                    panel.scales[4 * n + k] = signed_bytes_as_pair(scales, k as u8, k as u8);
                }
                panel.pairs[2 * n] = signed_bytes_as_pair(scales, 0, 1);
                panel.pairs[2 * n + 1] = signed_bytes_as_pair(scales, 2, 3);
            }
            let two_bits = _mm256_set1_epi8(0x30);
            for half in 0..2 {
                let tops = words(w, 128 + 32 * half);
                for part in 0..2 {
                    let lows = words(w, 64 * half + 32 * part);
                    for i in 0..8 {
                        // Part 0 takes bits 0–1 and 4–5 of the top byte, part 1 bits 2–3, 6–7.
                        let top = match part {
                            0 => tops[i],
                            _ => _mm256_srli_epi16::<2>(tops[i]),
                        };
                        let (low, high) = nibbles(lows[i]);
                        let low_top = _mm256_and_si256(_mm256_slli_epi16::<4>(top), two_bits);
                        let high_top = _mm256_and_si256(top, two_bits);
                        let at = 32 * half + 8 * part + i;
                        panel.codes[at] = _mm256_or_si256(low, low_top);
                        panel.codes[at + 16] = _mm256_or_si256(high, high_top);
                    }
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_scales(panel: &SixEight) -> (__m256, __m256) {
        (panel.d, _mm256_setzero_ps())
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_isums<const T: usize>(panel: &SixEight, a: [ActBlock; T]) -> [__m256i; T] {
        // SAFETY: sixteen sums by 16.
        let offsets = unsafe { times_sums(&panel.pairs, a) };
        let mut total = [_mm256_setzero_si256(); T];
        for t in 0..T {
            total[t] = _mm256_sub_epi32(total[t], _mm256_slli_epi32::<5>(offsets[t]));
        }
        for (j, scale) in panel.scales.iter().enumerate() {
            for half in 0..2 {
                // SAFETY: two groups of the four.
                let pairs = unsafe { pairs::<2, T>(&panel.codes, a, 4 * j + 2 * half) };
                for t in 0..T {
                    total[t] = _mm256_add_epi32(total[t], _mm256_madd_epi16(pairs[t], *scale));
                }
            }
        }
        total
    }
}

impl Panel for BlockQ4_0 {
    type Eight = FourEight;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn unpack(w: [*const Self; 8], panel: &mut FourEight) {
        // SAFETY: 16 bytes of codes from byte 2; four words of each row.
        unsafe {
            panel.d = stored_scales_of(w).0;
            for i in 0..4 {
                let (low, high) = nibbles(word(w, 2 + 4 * i));
                (panel.codes[i], panel.codes[i + 4]) = (low, high);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_scales(panel: &FourEight) -> (__m256, __m256) {
        (panel.d, _mm256_setzero_ps())
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_isums<const T: usize>(panel: &FourEight, a: [ActBlock; T]) -> [__m256i; T] {
        // SAFETY: eight groups of 32, one sum.
        unsafe {
            let mut sums = pairs::<8, T>(&panel.codes, a, 0);
            for t in 0..T {
                let sum = _mm256_madd_epi16(sums[t], _mm256_set1_epi16(1));
                sums[t] = _mm256_sub_epi32(sum, _mm256_set1_epi32(8 * *a[t].sums as i32));
            }
            sums
        }
    }
}

impl Panel for BlockQ8_0 {
    type Eight = ByteEight;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn unpack(w: [*const Self; 8], panel: &mut ByteEight) {
        // SAFETY: 32 bytes of codes from byte 2.
        unsafe {
            panel.d = stored_scales_of(w).0;
            let sign = _mm256_set1_epi8(i8::MIN);
            for (i, codes) in words(w, 2).into_iter().enumerate() {
                (panel.low[i], panel.high[i]) = nibbles(_mm256_xor_si256(codes, sign));
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_scales(panel: &ByteEight) -> (__m256, __m256) {
        (panel.d, _mm256_setzero_ps())
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_isums<const T: usize>(panel: &ByteEight, a: [ActBlock; T]) -> [__m256i; T] {
        let mut low = [_mm256_setzero_si256(); T];
        let mut high = [_mm256_setzero_si256(); T];
        for g in 0..8 {
            for t in 0..T {
                // SAFETY: eight groups of 32.
                let a = unsafe { four(a[t], g) };
                low[t] = _mm256_add_epi16(low[t], _mm256_maddubs_epi16(panel.low[g], a));
                high[t] = _mm256_add_epi16(high[t], _mm256_maddubs_epi16(panel.high[g], a));
            }
        }
        for t in 0..T {
            let one = _mm256_madd_epi16(low[t], _mm256_set1_epi16(1));
            let sixteen = _mm256_madd_epi16(high[t], _mm256_set1_epi16(16));
            // SAFETY: one sum.
            let offset = _mm256_set1_epi32(128 * unsafe { *a[t].sums as i32 });
            low[t] = _mm256_sub_epi32(_mm256_add_epi32(one, sixteen), offset);
        }
        low
    }
}
