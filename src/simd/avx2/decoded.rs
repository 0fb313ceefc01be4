//! Any format from one small function: "the 32 codes of group j as signed bytes". What a block
//! needs beyond that (its integer scales and mins) it states in the same way, and both products,
//! matrix–vector ([`Ints`]) and matrix–matrix ([`Panel`]), follow. Formats whose products have
//! kernels of their own implement those two traits instead.
//!
//! `maddubs` takes u8 by i8, so the sign of a code moves to the activation, which is −127 to 127.
//! A pair is at most 2·128·127 = 32512: no i16 saturates.

use super::ints::{ActBlock, Ints, Scale, load, spread};
use super::panel::{Panel, four, stored_scales_of, times_sums, transpose};
use crate::quant::IntBlock;
use std::arch::x86_64::*;

/// A block of 32 codes without sub-blocks, for Q8_0 activations, or of 256 codes with integer
/// scales, for Q8_K activations.
pub(in crate::simd) trait Decode: IntBlock<Stored: Scale> {
    /// [`Narrow`] for 32 codes, [`Wide`] for 256.
    type Panel: Unpacked;

    /// See [`Ints::SUMS`].
    const SUMS: usize = if Self::LEN == 32 { 32 } else { 16 };

    /// Codes 32j to 32j + 31.
    ///
    /// # Safety
    /// `w` leads to a whole block and j is below `LEN / 32`; the processor has AVX2.
    unsafe fn codes(w: *const Self, j: usize) -> __m256i;

    /// The integer scales as i16, for 256 codes only: number j of the low half is for the first
    /// 16 codes of group j, number j of the high half for the other 16.
    ///
    /// # Safety
    /// `w` leads to a whole block; the processor has AVX2.
    unsafe fn sub_scales(_w: *const Self) -> __m256i {
        unreachable!("a format without integer scales")
    }

    /// The mins of 256 codes in the same arrangement; for formats with mins only.
    ///
    /// # Safety
    /// As `sub_scales`.
    unsafe fn sub_mins(_w: *const Self) -> __m256i {
        unreachable!("a format without mins")
    }
}

/// Codes times activations, added by pairs.
#[inline]
#[target_feature(enable = "avx2")]
fn pairs<B: Decode>(codes: __m256i, a: __m256i) -> __m256i {
    if B::SIGNED {
        _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(a, codes))
    } else {
        _mm256_maddubs_epi16(codes, a)
    }
}

/// Sixteen i16 in the arrangement of [`Decode::sub_scales`], put in the order of the sub-blocks.
#[inline]
#[target_feature(enable = "avx2")]
fn in_order(halves: __m256i) -> __m256i {
    let (even, odd) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
    _mm256_set_m128i(_mm_unpackhi_epi16(even, odd), _mm_unpacklo_epi16(even, odd))
}

impl<B: Decode> Ints for B {
    const SUMS: usize = <B as Decode>::SUMS;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn isum(w: *const Self, a: ActBlock) -> __m256i {
        // SAFETY: the block has LEN / 32 groups of codes and of activations.
        unsafe {
            if B::LEN == 32 {
                let pairs = pairs::<B>(B::codes(w, 0), load(a.qs));
                return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            }
            let scales = B::sub_scales(w);
            let mut sum = _mm256_setzero_si256();
            for j in 0..B::LEN / 32 {
                let pairs = pairs::<B>(B::codes(w, j), load(a.qs.add(32 * j)));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, spread(scales, j)));
            }
            sum
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn imins(w: *const Self, a: ActBlock) -> __m128i {
        // SAFETY: one sum by 32, or sixteen by 16.
        unsafe {
            if B::LEN == 32 {
                return _mm_cvtsi32_si128(*a.sums as i32);
            }
            let products = _mm256_madd_epi16(in_order(B::sub_mins(w)), load(a.sums));
            let high = _mm256_extracti128_si256::<1>(products);
            _mm_add_epi32(_mm256_castsi256_si128(products), high)
        }
    }
}

/// Eight rows of one block: `codes[g]` holds codes 4g to 4g + 3 of each row, `scales[s]` the scale
/// of sub-block s of each row twice, `mins[j]` mins 2j and 2j + 1.
#[repr(C, align(32))]
pub(in crate::simd) struct Eight<const CODES: usize, const SCALES: usize, const MINS: usize> {
    d: __m256,
    dmin: __m256,
    codes: [__m256i; CODES],
    scales: [__m256i; SCALES],
    mins: [__m256i; MINS],
}

pub(in crate::simd) type Narrow = Eight<8, 0, 0>;
pub(in crate::simd) type Wide = Eight<64, 16, 8>;

/// The parts that [`Narrow`] and [`Wide`] share.
pub(in crate::simd) trait Unpacked {
    fn set_scales(&mut self, scales: (__m256, __m256));
    fn scales(&self) -> (__m256, __m256);
    fn codes(&self) -> &[__m256i];
    fn codes_mut(&mut self) -> &mut [__m256i];
    fn sub_scales(&self) -> &[__m256i];
    fn sub_scales_mut(&mut self) -> &mut [__m256i];
    fn mins(&self) -> &[__m256i];
    fn mins_mut(&mut self) -> &mut [__m256i];
}

impl<const C: usize, const S: usize, const M: usize> Unpacked for Eight<C, S, M> {
    #[inline]
    fn set_scales(&mut self, scales: (__m256, __m256)) {
        (self.d, self.dmin) = scales;
    }

    #[inline]
    fn scales(&self) -> (__m256, __m256) {
        (self.d, self.dmin)
    }

    #[inline]
    fn codes(&self) -> &[__m256i] {
        &self.codes
    }

    #[inline]
    fn codes_mut(&mut self) -> &mut [__m256i] {
        &mut self.codes
    }

    #[inline]
    fn sub_scales(&self) -> &[__m256i] {
        &self.scales
    }

    #[inline]
    fn sub_scales_mut(&mut self) -> &mut [__m256i] {
        &mut self.scales
    }

    #[inline]
    fn mins(&self) -> &[__m256i] {
        &self.mins
    }

    #[inline]
    fn mins_mut(&mut self) -> &mut [__m256i] {
        &mut self.mins
    }
}

/// How many groups of four codes can be added as i16 before `madd` widens them: a power of two, at
/// most a sub-block.
const fn run<B: Decode>() -> usize {
    let mut n = 1;
    while 2 * n <= B::SUB / 4 && 2 * n * 2 * 127 * B::LARGEST <= i16::MAX as usize {
        n *= 2;
    }
    n
}

/// The scales of sub-blocks 2k and 2k + 1, as pairs, each twice.
#[inline]
#[target_feature(enable = "avx2")]
fn twice(pairs: __m256i) -> (__m256i, __m256i) {
    let low = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff));
    let high = _mm256_andnot_si256(_mm256_set1_epi32(0xffff), pairs);
    (
        _mm256_or_si256(low, _mm256_slli_epi32::<16>(low)),
        _mm256_or_si256(high, _mm256_srli_epi32::<16>(high)),
    )
}

impl<B: Decode> Panel for B {
    type Eight = B::Panel;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn unpack(w: [*const Self; 8], panel: &mut B::Panel) {
        // SAFETY: each pointer leads to a whole block, the caller's promise.
        unsafe {
            panel.set_scales(stored_scales_of(w));
            for j in 0..B::LEN / 32 {
                let mut codes = [_mm256_setzero_si256(); 8];
                for i in 0..8 {
                    codes[i] = B::codes(w[i], j);
                }
                panel.codes_mut()[8 * j..][..8].copy_from_slice(&transpose(codes));
            }
            if B::LEN == 32 {
                return;
            }
            let mut scales = [_mm256_setzero_si256(); 8];
            for i in 0..8 {
                scales[i] = in_order(B::sub_scales(w[i]));
            }
            for (k, pair) in transpose(scales).into_iter().enumerate() {
                if B::SUB == 32 {
                    // Both halves of a group have the same scale.
                    panel.sub_scales_mut()[k] = pair;
                } else {
                    let (first, second) = twice(pair);
                    panel.sub_scales_mut()[2 * k] = first;
                    panel.sub_scales_mut()[2 * k + 1] = second;
                }
            }
            if B::MINS {
                let mut mins = [_mm256_setzero_si256(); 8];
                for i in 0..8 {
                    mins[i] = in_order(B::sub_mins(w[i]));
                }
                panel.mins_mut().copy_from_slice(&transpose(mins));
            }
        }
    }

    #[inline]
    unsafe fn eight_scales(panel: &B::Panel) -> (__m256, __m256) {
        panel.scales()
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_isums<const T: usize>(panel: &B::Panel, a: [ActBlock; T]) -> [__m256i; T] {
        let (codes, scales) = (panel.codes(), panel.sub_scales());
        let mut total = [_mm256_setzero_si256(); T];
        for start in (0..B::LEN / 4).step_by(run::<B>()) {
            let mut sums = [_mm256_setzero_si256(); T];
            for g in start..start + run::<B>() {
                let codes = codes[g];
                for t in 0..T {
                    // SAFETY: LEN / 4 groups of activations.
                    let product = pairs::<B>(codes, unsafe { four(a[t], g) });
                    sums[t] = _mm256_add_epi16(sums[t], product);
                }
            }
            let scale = match B::LEN {
                32 => _mm256_set1_epi16(1),
                _ => scales[4 * start / B::SUB],
            };
            for t in 0..T {
                total[t] = _mm256_add_epi32(total[t], _mm256_madd_epi16(sums[t], scale));
            }
        }
        total
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_imins<const T: usize>(panel: &B::Panel, a: [ActBlock; T]) -> [__m256i; T] {
        if B::LEN == 32 {
            let mut sums = [_mm256_setzero_si256(); T];
            for t in 0..T {
                // SAFETY: one sum by 32.
                sums[t] = _mm256_set1_epi32(unsafe { *a[t].sums as i32 });
            }
            return sums;
        }
        let mins: &[__m256i; 8] = panel.mins().try_into().expect("eight pairs of mins");
        // SAFETY: sixteen sums by 16.
        unsafe { times_sums(mins, a) }
    }
}
