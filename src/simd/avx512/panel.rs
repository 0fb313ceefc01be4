//! Sixteen rows of one block, unpacked for the matrix–matrix product.
//!
//! `codes[g]` holds codes 4g to 4g + 3 of each of the sixteen rows as u8: the code plus
//! [`Sixteen::OFFSET`]. `vpdpbusd` multiplies them by four activations and adds the four products
//! to an int32, exactly; what the offset adds is in the sum before it begins.

use crate::simd::avx2::panel::Panel;
use std::arch::x86_64::*;

/// A format that unpacks sixteen rows at a time.
pub(super) trait Sixteen: Panel {
    /// [`Narrow`] for 32 codes, [`Wide`] for 256.
    type Unpacked: Unpacked;
    /// Added to every code, so that it is a u8.
    const OFFSET: u8 = if Self::SIGNED { Self::LARGEST as u8 } else { 0 };

    /// # Safety
    /// Each pointer leads to a whole block; the processor has AVX-512 F and BW.
    unsafe fn unpack_sixteen(w: [*const Self; 16], panel: &mut Self::Unpacked);
}

/// Scale s is that of sub-block s, as an int32 whose upper half is 0 if [`narrow`] says so;
/// `mins[j]` are mins 2j and 2j + 1 as int16.
#[repr(C, align(64))]
pub(super) struct Rows<const CODES: usize, const SCALES: usize, const MINS: usize> {
    pub d: __m512,
    pub dmin: __m512,
    pub codes: [__m512i; CODES],
    pub scales: [__m512i; SCALES],
    pub mins: [__m512i; MINS],
}

pub(super) type Narrow = Rows<8, 0, 0>;
pub(super) type Wide = Rows<64, 16, 8>;

/// The parts that [`Narrow`] and [`Wide`] share.
pub(super) trait Unpacked {
    fn d(&self) -> __m512;
    fn dmin(&self) -> __m512;
    fn codes(&self) -> &[__m512i];
    fn scales(&self) -> &[__m512i];
    fn mins(&self) -> &[__m512i];
}

impl<const C: usize, const S: usize, const M: usize> Unpacked for Rows<C, S, M> {
    #[inline]
    fn d(&self) -> __m512 {
        self.d
    }

    #[inline]
    fn dmin(&self) -> __m512 {
        self.dmin
    }

    #[inline]
    fn codes(&self) -> &[__m512i] {
        &self.codes
    }

    #[inline]
    fn scales(&self) -> &[__m512i] {
        &self.scales
    }

    #[inline]
    fn mins(&self) -> &[__m512i] {
        &self.mins
    }
}

/// The largest number of groups of four codes, at most a sub-block, whose sum is an int16 always.
const fn narrow_run<B: Sixteen>() -> usize {
    let mut n = 1;
    while 2 * n <= B::SUB / 4 && 2 * n * 4 * 127 * B::LARGEST <= i16::MAX as usize {
        n *= 2;
    }
    n
}

/// Whether sums are short enough to be int16, so that `vpdpwssd` multiplies them by their scale
/// and adds them in one operation; else `vpmulld`, two operations, and an addition take a whole
/// sub-block.
pub(super) const fn narrow<B: Sixteen>() -> bool {
    B::LEN > 32 && B::SUB / 4 / narrow_run::<B>() <= 2
}

/// Groups of four codes that are added up before their scale is needed.
pub(super) const fn run<B: Sixteen>() -> usize {
    if narrow::<B>() { narrow_run::<B>() } else { B::SUB / 4 }
}

/// Words of the quarters: word i of quarter l of vector k is word k of quarter l of vector i.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn transpose([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
    let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(ab, cd),
        _mm512_unpackhi_epi64(ab, cd),
        _mm512_unpacklo_epi64(ab_high, cd_high),
        _mm512_unpackhi_epi64(ab_high, cd_high),
    ]
}

/// 16 bytes from byte `offset` of each block, transposed by words.
///
/// # Safety
/// The bytes lie within the blocks; the processor has AVX-512 F and BW.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn words<B>(w: [*const B; 16], offset: usize) -> [__m512i; 4] {
    // SAFETY: the caller's promise.
    unsafe { words_behind::<B, 0>(w, offset) }
}

/// [`words`] of the last `16 − SKIP` bytes of the 16 and then zeros.
///
/// # Safety
/// As `words`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn words_behind<B, const SKIP: i32>(
    w: [*const B; 16],
    offset: usize,
) -> [__m512i; 4] {
    let row = |i: usize| {
        // SAFETY: the caller's promise; the load takes any alignment.
        let row = unsafe { _mm_loadu_si128(w[i].cast::<u8>().add(offset).cast()) };
        _mm_srli_si128::<SKIP>(row)
    };
    // Row k + 4l in quarter l of vector k, straight from memory: an array of rows is stored to be
    // loaded again two by two, for which a core waits until the stores are through.
    let four = |k: usize| {
        let v = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(row(k)), row(k + 4));
        _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(v, row(k + 8)), row(k + 12))
    };
    transpose([four(0), four(1), four(2), four(3)])
}

/// The f16 at byte `offset` of each block.
///
/// # Safety
/// It lies within the blocks; the processor has AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn halves<B>(w: [*const B; 16], offset: usize) -> __m512 {
    let mut halves = [0u16; 16];
    // SAFETY: the caller's promise; the array has 32 bytes.
    unsafe {
        for (half, w) in halves.iter_mut().zip(w) {
            *half = w.cast::<u8>().add(offset).cast::<u16>().read_unaligned();
        }
        _mm512_cvtph_ps(_mm256_loadu_si256(halves.as_ptr().cast()))
    }
}

/// The word at byte `offset` of each block.
///
/// # Safety
/// It lies within the blocks; the processor has AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn word<B>(w: [*const B; 16], offset: usize) -> __m512i {
    let mut words = [0u32; 16];
    // SAFETY: the caller's promise; the array has 64 bytes.
    unsafe {
        for (word, w) in words.iter_mut().zip(w) {
            *word = w.cast::<u8>().add(offset).cast::<u32>().read_unaligned();
        }
        _mm512_loadu_si512(words.as_ptr().cast())
    }
}

/// The low f16 of each word.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn low_halves(words: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words))
}

/// The low and the high half of each byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn nibbles(v: __m512i) -> (__m512i, __m512i) {
    let mask = _mm512_set1_epi8(15);
    (_mm512_and_si512(v, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(v), mask))
}

/// Entry i of a table, plus `offset`, for each index i below 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn look_up(table: &[i8; 16], offset: u8, indices: __m512i) -> __m512i {
    // SAFETY: the table has 16 bytes.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    let table = _mm512_broadcast_i32x4(_mm_add_epi8(table, _mm_set1_epi8(offset as i8)));
    _mm512_shuffle_epi8(table, indices)
}

/// Picks the bytes with these numbers from each word; 0x80 is a zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pick(words: __m512i, bytes: [u8; 4]) -> __m512i {
    let in_first = _mm512_set1_epi32(i32::from_le_bytes(bytes));
    let word = _mm512_set4_epi32(0x0c0c_0c0c, 0x0808_0808, 0x0404_0404, 0);
    _mm512_shuffle_epi8(words, _mm512_add_epi8(in_first, word))
}

/// Byte k of each word, widened.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn byte(words: __m512i, k: usize) -> __m512i {
    pick(words, [k as u8, 0x80, 0x80, 0x80])
}

/// Bytes k and k + 1 of each word, widened to the two int16 of the word.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn byte_pair(words: __m512i, k: usize) -> __m512i {
    pick(words, [k as u8, 0x80, k as u8 + 1, 0x80])
}

/// Each word's low 16 bits, with zeros above: how [`narrow`] wants a negative scale.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn low_16_bits(words: __m512i) -> __m512i {
    _mm512_and_si512(words, _mm512_set1_epi32(0xffff))
}
