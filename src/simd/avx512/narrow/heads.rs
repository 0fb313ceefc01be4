//! Scales, mins and top bits of eight blocks that lie one after the other. Two or three loads
//! and one or two permutations bring all of it together; block by block it was half of the work.

use std::arch::asm;
use std::arch::x86_64::*;

/// The words' places in loads of 64 bytes from the first block on.
pub(in crate::simd::avx512) struct Places {
    /// Bytes from the first block to each load.
    loads: [usize; 3],
    /// The word's place in the first two loads, as one permutation takes them.
    of_two: [u16; 32],
    of_third: [u16; 32],
    from_third: u32,
}

/// Words 0 to 7 are the eight blocks' scales, 8 to 15 their mins, 16 to 31 two words of top bits of
/// each block.
#[derive(Clone, Copy)]
pub(in crate::simd::avx512) struct Heads(__m512i);

/// The places in blocks of `size` bytes that begin with a scale and have a min and four bytes of
/// top bits so many bytes behind their begin.
pub(super) const fn places(size: usize, min: Option<usize>, tops: Option<usize>) -> Places {
    let head = match (min, tops) {
        (_, Some(tops)) => tops + 4,
        (Some(min), None) => min + 2,
        (None, None) => 2,
    };
    let is_two = 3 * size + head <= 64;
    let loads = if is_two { [0, 4 * size, 4 * size] } else { [0, 64, 8 * size - 64] };
    let (mut of_two, mut of_third, mut from_third) = ([0; 32], [0; 32], 0);
    let mut word = 0;
    while word < 32 {
        let at = match (word, min, tops) {
            (0..8, _, _) => word * size,
            (8..16, Some(min), _) => (word - 8) * size + min,
            (16.., _, Some(tops)) => (word - 16) / 2 * size + tops + word % 2 * 2,
            _ => 0,
        };
        if at + 2 <= loads[0] + 64 {
            of_two[word] = (at / 2) as u16;
        } else if loads[1] <= at && at + 2 <= loads[1] + 64 {
            of_two[word] = (32 + (at - loads[1]) / 2) as u16;
        } else {
            of_third[word] = ((at - loads[2]) / 2) as u16;
            from_third |= 1 << word;
        }
        word += 1;
    }
    Places { loads, of_two, of_third, from_third }
}

impl Heads {
    /// # Safety
    /// Eight blocks are at `blocks`; the processor has this module's features.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn new(blocks: *const u8, places: &'static Places) -> Self {
        // SAFETY: no load ends behind the eighth block.
        unsafe {
            let load = |i: usize| load(blocks.add(places.loads[i]));
            let at = |places: &[u16; 32]| _mm512_loadu_si512(places.as_ptr().cast());
            let words = _mm512_permutex2var_epi16(load(0), at(&places.of_two), load(1));
            if places.from_third == 0 {
                return Heads(words);
            }
            let third = at(&places.of_third);
            Heads(_mm512_mask_permutexvar_epi16(words, places.from_third, third, load(2)))
        }
    }

    /// The words that blocks begin with.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn first(self) -> __m128i {
        _mm512_castsi512_si128(self.0)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn mins(self) -> __m128i {
        _mm512_extracti32x4_epi32::<1>(self.0)
    }

    /// Four blocks' top bits in either half.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn tops(self) -> __m256i {
        _mm512_extracti64x4_epi64::<1>(self.0)
    }
}

/// 64 bytes. In assembly because a compiler that sees codes among them takes these from here, by
/// permutations, instead of loading them.
///
/// # Safety
/// They can be read; the processor has AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(at: *const u8) -> __m512i {
    let bytes: __m512i;
    // SAFETY: the caller's promise; the load takes any alignment.
    unsafe {
        asm!("vmovdqu64 {bytes}, zmmword ptr [{at}]", bytes = out(zmm_reg) bytes, at = in(reg) at,
            options(pure, readonly, nostack, preserves_flags));
    }
    bytes
}
