//! Activations as the matrix–matrix product takes them: those of up to twelve tokens, interleaved.

use super::panel::{Sixteen, run};
use crate::simd::ActView;
use crate::simd::avx2::ints::Ints;
use crate::simd::avx2::panel::transpose;
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// The most tokens of a tile.
pub(super) const TILE: usize = 12;

/// The activations of some tokens, interleaved: a value for each token, then the next for each.
/// One pointer and constants reach them all.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub tokens: usize,
    /// Four values each.
    pub words: *mut i32,
    pub scales: *mut f32,
    /// The first summand of each run of codes: minus the sum that the offset of the codes adds.
    pub starts: *mut i32,
    /// For mins: two sums each, or one where a block has no more.
    pub sums: *mut i32,
}

/// The number of each that a token has.
#[derive(Clone, Copy)]
pub(super) struct Counts {
    words: usize,
    scales: usize,
    starts: usize,
    sums: usize,
}

impl Counts {
    pub const fn new<B: Sixteen>(cols: usize) -> Self {
        Counts {
            words: cols / 4,
            scales: cols / B::LEN,
            starts: if B::OFFSET > 0 { cols / (4 * run::<B>()) } else { 0 },
            sums: match (B::MINS, B::LEN) {
                (false, _) => 0,
                (true, 32) => cols / 32,
                _ => cols / (2 * <B as Ints>::SUMS),
            },
        }
    }

    /// Bytes a token.
    pub fn bytes(&self) -> usize {
        4 * (self.words + self.scales + self.starts + self.sums)
    }
}

/// The next tile's tokens if `left` are left.
fn tile_of(left: usize) -> usize {
    match left {
        TILE.. => TILE,
        8.. => 8,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Interleaves the tokens from `t` on that make a tile, from `to` on.
///
/// # Safety
/// `to` takes [`Counts::bytes`] for each of them.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn write_tile<B: Sixteen>(
    acts: ActView,
    t: usize,
    to: *mut i32,
    counts: Counts,
) -> Tile {
    let tokens = tile_of(acts.tokens() - t);
    let sums_of = |by_16: bool, i: usize| -> *const u8 {
        let sums = if by_16 { acts.sums16(t + i) } else { acts.sums32(t + i) };
        sums.as_ptr().cast()
    };
    let qs_of = |i: usize| acts.qs(t + i).as_ptr().cast();
    // SAFETY: within the room that the caller promises; each token has as many numbers.
    unsafe {
        let scales = to.add(tokens * counts.words);
        let starts = scales.add(tokens * counts.scales);
        let sums = starts.add(tokens * counts.starts);
        interleave::<Words>(qs_of, tokens, counts.words, to);
        let scales_of = |i: usize| acts.scales(t + i).as_ptr().cast();
        interleave::<Words>(scales_of, tokens, counts.scales, scales);
        if B::OFFSET > 0 {
            match 4 * run::<B>() {
                8 => interleave::<Starts8<B>>(qs_of, tokens, counts.starts, starts),
                n => {
                    interleave::<Starts<B>>(|i| sums_of(n == 16, i), tokens, counts.starts, starts)
                }
            }
        }
        if B::MINS {
            let by_16 = <B as Ints>::SUMS == 16;
            match B::LEN {
                32 => interleave::<Sums>(|i| sums_of(by_16, i), tokens, counts.sums, sums),
                _ => interleave::<Words>(|i| sums_of(by_16, i), tokens, counts.sums, sums),
            }
        }
        Tile { tokens, words: to, scales: scales.cast(), starts, sums }
    }
}

/// A source of a token's numbers.
trait Numbers {
    /// Bytes behind which the next eight are.
    const BYTES: usize;

    /// The numbers in `mask`, which are the first of eight.
    ///
    /// # Safety
    /// The source is readable; the processor has this module's features.
    unsafe fn eight(from: *const u8, mask: u8) -> __m256i;
}

/// Words as they are: four activations, two sums (i16) that follow each other, or a scale.
struct Words;

impl Numbers for Words {
    const BYTES: usize = 32;

    #[inline]
    #[target_feature(enable = "avx2,avx512f,avx512vl")]
    unsafe fn eight(from: *const u8, mask: u8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_maskz_loadu_epi32(mask, from.cast()) }
    }
}

/// Sums of 32 activations, widened.
struct Sums;

impl Numbers for Sums {
    const BYTES: usize = 16;

    #[inline]
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
    unsafe fn eight(from: *const u8, mask: u8) -> __m256i {
        // SAFETY: the caller's promise.
        _mm256_cvtepi16_epi32(unsafe { _mm_maskz_loadu_epi16(mask, from.cast()) })
    }
}

/// The sums that the offset of the codes adds, from sums of 16 or 32 activations.
struct Starts<B>(PhantomData<B>);

impl<B: Sixteen> Numbers for Starts<B> {
    const BYTES: usize = 16;

    #[inline]
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
    unsafe fn eight(from: *const u8, mask: u8) -> __m256i {
        // SAFETY: the caller's promise.
        minus_offset::<B>(unsafe { Sums::eight(from, mask) })
    }
}

/// Starts of runs of 8 activations.
struct Starts8<B>(PhantomData<B>);

impl<B: Sixteen> Numbers for Starts8<B> {
    const BYTES: usize = 64;

    #[inline]
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn eight(from: *const u8, mask: u8) -> __m256i {
        debug_assert_eq!(mask, 0xff, "whole blocks of 256");
        // SAFETY: the caller's promise.
        let a = unsafe { _mm512_loadu_si512(from.cast()) };
        let fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), a);
        let eights = _mm512_add_epi32(fours, _mm512_srli_epi64::<32>(fours));
        minus_offset::<B>(_mm512_cvtepi64_epi32(eights))
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn minus_offset<B: Sixteen>(sums: __m256i) -> __m256i {
    _mm256_mullo_epi32(sums, _mm256_set1_epi32(-(B::OFFSET as i32)))
}

/// Writes number k of token i to `to[k·tokens + i]`.
///
/// # Safety
/// `count` numbers of token i come from `from(i)`; they all fit behind `to`.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn interleave<N: Numbers>(
    from: impl Fn(usize) -> *const u8,
    tokens: usize,
    count: usize,
    to: *mut i32,
) {
    let mask_of = |n: usize| 0xffu8 >> (8 - n.min(8));
    for first in (0..tokens).step_by(8) {
        let n = tokens - first;
        let mut at = [from(first); 8];
        for (i, at) in at.iter_mut().enumerate() {
            *at = from(first + i.min(n - 1));
        }
        for k in (0..count).step_by(8) {
            let mut numbers = [_mm256_setzero_si256(); 8];
            for (numbers, at) in numbers.iter_mut().zip(&mut at) {
                // SAFETY: as many numbers of the token are left as the mask says, up to eight.
                *numbers = unsafe { N::eight(*at, mask_of(count - k)) };
                *at = at.wrapping_add(N::BYTES);
            }
            for (j, of_all) in transpose(numbers).into_iter().enumerate().take(count - k) {
                // SAFETY: places of number k + j, from token `first` on, of the tokens left.
                unsafe {
                    let place = to.add((k + j) * tokens + first);
                    _mm256_mask_storeu_epi32(place, mask_of(n), of_all);
                }
            }
        }
    }
}
