//! Matrix–matrix products. A lane is a row: sixteen rows are unpacked once into a panel, and a
//! token brings four activations in every lane, straight from memory into `vpdpbusd`. Nothing is
//! summed across lanes until the tree, which adds whole vectors.
//!
//! The tile is 16 rows × 12 tokens: a panel load serves twelve `vpdpbusd`, and with a sum of a run
//! and a sum of the block a token 12 + 12 + 2 of 32 registers are taken.

#![allow(clippy::needless_range_loop)] // t numbers a tile's values wherever they lie

use super::panel::{Sixteen, Unpacked, narrow, run};
use super::tile::{Counts, TILE, Tile, write_tile};
use crate::simd::avx2::ahead::Ahead;
use crate::simd::avx2::ints::Ints;
use crate::simd::{Product, Scratch};
use std::arch::x86_64::*;

/// Columns that are unpacked at a time: 16 rows of them, about 21 KiB, stay in the first cache.
const PIECE: usize = 1024;

/// The sums of sixteen rows and a token.
#[repr(C)]
struct Lanes {
    /// The eight float lanes of "One arithmetic", of a granule.
    eight: [__m512; 8],
    /// The sum of the granules before.
    sum: __m512,
}

/// # Safety
/// As [`Product`] says, on a processor with the features of this module; B is the matrix's type
/// and the number of rows is a multiple of sixteen.
pub(super) unsafe fn matmul<B: Sixteen>(product: Product, scratch: &mut Scratch) {
    for part in product.by_tokens(TILE) {
        // SAFETY: the caller's promises, for these tokens.
        unsafe { part_matmul::<B>(part, scratch) };
    }
    if product.streams() {
        // What went past the caches is not in the order of what says that it is there. The
        // intrinsic is safe in newer compilers only.
        #[allow(unused_unsafe)]
        // SAFETY: the processor has SSE.
        unsafe {
            _mm_sfence()
        };
    }
}

/// [`matmul`] of few enough tokens.
///
/// # Safety
/// As `matmul`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn part_matmul<B: Sixteen>(product: Product, scratch: &mut Scratch) {
    debug_assert_eq!(product.rows % 16, 0);
    let (blocks, tokens) = (product.mat.cols / B::LEN, product.acts.tokens());
    let piece = blocks.min(PIECE / B::LEN);
    let counts = Counts::new::<B>(product.mat.cols);
    let bytes = piece * size_of::<B::Unpacked>()
        + tokens * (size_of::<Lanes>() + counts.bytes() + size_of::<Tile>());
    let panel: *mut B::Unpacked = scratch.get(bytes).cast();
    // SAFETY: the scratch holds `piece` panel blocks, lanes for each token, at most as many tiles
    // and the tiles' numbers; each begins aligned as it must. Rows in range lie within `data`.
    unsafe {
        let lanes: *mut Lanes = panel.add(piece).cast();
        let tiles: *mut Tile = lanes.add(tokens).cast();
        let (mut room, mut n, mut t) = (tiles.add(tokens).cast::<i32>(), 0, 0);
        while t < tokens {
            let tile = write_tile::<B>(product.acts, t, room, counts);
            tiles.add(n).write(tile);
            (n, t) = (n + 1, t + tile.tokens);
            room = room.add(tile.tokens * counts.bytes() / 4);
        }
        let tiles = std::slice::from_raw_parts(tiles, n);
        let streams = product.streams();
        for r in (0..product.rows).step_by(16) {
            let mut rows = [product.row(r).cast::<B>(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = product.row(r + i).cast();
            }
            for first in (0..blocks).step_by(piece) {
                let piece = piece.min(blocks - first);
                for b in 0..piece {
                    B::unpack_sixteen(rows, &mut *panel.add(b));
                    for row in &mut rows {
                        *row = row.wrapping_add(1);
                    }
                }
                let panel = std::slice::from_raw_parts(panel, piece);
                let mut t = 0;
                for (k, tile) in tiles.iter().enumerate() {
                    let ahead = Ahead::of::<16>(product, r + 16, (k, n));
                    let sums = Sums { product, streams, r, t, lanes: lanes.add(t) };
                    match tile.tokens {
                        1 => sums.add_tile::<B, 1>(panel, first, tile, ahead),
                        2 => sums.add_tile::<B, 2>(panel, first, tile, ahead),
                        4 => sums.add_tile::<B, 4>(panel, first, tile, ahead),
                        8 => sums.add_tile::<B, 8>(panel, first, tile, ahead),
                        _ => sums.add_tile::<B, TILE>(panel, first, tile, ahead),
                    }
                    t += tile.tokens;
                }
            }
        }
    }
}

/// The sums of the products of sixteen rows, from `r` on, and a tile, from token `t` on.
struct Sums<'a> {
    product: Product<'a>,
    /// Whether results go past the caches.
    streams: bool,
    r: usize,
    t: usize,
    /// The lanes of the tile's first token; the others' follow.
    lanes: *mut Lanes,
}

impl Sums<'_> {
    /// Adds the products of sixteen rows and T tokens to their lanes, and ends what is complete
    /// while it is in the first cache.
    ///
    /// # Safety
    /// The tile has T tokens, with blocks from `first` on as many as `panel` holds, and T lanes are
    /// at `lanes`; T tokens' places can be written. Calls for a tile come in the order of blocks.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn add_tile<B: Sixteen, const T: usize>(
        self,
        panel: &[B::Unpacked],
        first: usize,
        tile: &Tile,
        ahead: Ahead,
    ) {
        let (blocks, granule) = (self.product.mat.cols / B::LEN, self.product.granule / B::LEN);
        let end = first + panel.len();
        let mut at = first;
        while at < end {
            let start = at / granule * granule;
            let complete = blocks.min(start + granule);
            let until = complete.min(end);
            let panel = &panel[at - first..until - first];
            // SAFETY: the caller's promises; the first granule's sum is written before it is read.
            unsafe {
                add_blocks::<B, T>(panel, (at, start), tile, self.lanes, &ahead);
                if until == complete {
                    for t in 0..T {
                        let lanes = &mut *self.lanes.add(t);
                        let dots = tree(&lanes.eight, complete - start);
                        let sum = if start > 0 { _mm512_add_ps(lanes.sum, dots) } else { dots };
                        match complete == blocks {
                            true => self.write(t, sum),
                            false => lanes.sum = sum,
                        }
                    }
                }
            }
            at = until;
        }
    }

    /// The results of the tile's token `t`.
    ///
    /// # Safety
    /// Their place can be written.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn write(&self, t: usize, sum: __m512) {
        let place = self.product.place(self.t + t, self.r);
        // SAFETY: the caller's promise; places that are streamed to begin on cache lines.
        unsafe {
            match self.streams {
                true => _mm512_stream_ps(place, sum),
                false => _mm512_storeu_ps(place, sum),
            }
        }
    }
}

/// Adds the products of sixteen rows and T tokens to their lanes, which begin with block `start`.
///
/// # Safety
/// The tile has T tokens, with blocks from `first` on as many as `panel` holds, and T lanes are at
/// `lanes`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn add_blocks<B: Sixteen, const T: usize>(
    panel: &[B::Unpacked],
    (first, start): (usize, usize),
    tile: &Tile,
    lanes: *mut Lanes,
    ahead: &Ahead,
) {
    // SAFETY: the tile has T tokens, and each of them has block b.
    unsafe {
        let lanes = &mut *lanes.cast::<[Lanes; T]>();
        for (b, block) in (first..).zip(panel) {
            ahead.ask_for::<B>(b);
            let isums = isums::<B, T>(block, tile, b);
            let (i, is_first) = ((b - start) % 8, b - start < 8);
            for t in 0..T {
                let lane = &mut lanes[t].eight[i];
                let before = if is_first { _mm512_setzero_ps() } else { *lane };
                let scale = _mm512_mul_ps(block.d(), _mm512_set1_ps(*tile.scales.add(b * T + t)));
                *lane = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(isums[t]), before);
            }
            if B::MINS {
                let imins = imins::<B, T>(block, tile, b);
                for t in 0..T {
                    let lane = &mut lanes[t].eight[i];
                    let a = _mm512_set1_ps(*tile.scales.add(b * T + t));
                    let scale = _mm512_mul_ps(block.dmin(), a);
                    *lane = _mm512_fnmadd_ps(scale, _mm512_cvtepi32_ps(imins[t]), *lane);
                }
            }
        }
    }
}

/// The end of sixteen dot products of so many blocks. Lanes without a block would be 0, and x + 0
/// is x since a lane that began at +0 is never −0: they are left out.
#[inline]
#[target_feature(enable = "avx512f")]
fn tree(lanes: &[__m512; 8], blocks: usize) -> __m512 {
    let pair = |i: usize| match i + 4 < blocks {
        true => _mm512_add_ps(lanes[i], lanes[i + 4]),
        false => lanes[i],
    };
    let even = if blocks > 2 { _mm512_add_ps(pair(0), pair(2)) } else { pair(0) };
    match blocks {
        1 => even,
        2 | 3 => _mm512_add_ps(even, pair(1)),
        _ => _mm512_add_ps(even, _mm512_add_ps(pair(1), pair(3))),
    }
}

/// `isum` of the sixteen rows for block b of each token.
///
/// # Safety
/// The block exists in each token; the processor has AVX-512 and VNNI.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn isums<B: Sixteen, const T: usize>(
    block: &B::Unpacked,
    tile: &Tile,
    b: usize,
) -> [__m512i; T] {
    let (codes, scales) = (block.codes(), block.scales());
    let runs = B::LEN / (4 * run::<B>());
    let mut total = [_mm512_setzero_si512(); T];
    for i in 0..runs {
        let mut sums = [_mm512_setzero_si512(); T];
        if B::OFFSET > 0 {
            for t in 0..T {
                // SAFETY: each run of the token has a start.
                sums[t] = _mm512_set1_epi32(unsafe { *tile.starts.add((b * runs + i) * T + t) });
            }
        }
        for g in i * run::<B>()..(i + 1) * run::<B>() {
            let codes = codes[g];
            for t in 0..T {
                // SAFETY: LEN / 4 groups of activations.
                let a = unsafe { *tile.words.add((b * (B::LEN / 4) + g) * T + t) };
                let a = _mm512_set1_epi32(a);
                sums[t] = _mm512_dpbusd_epi32(sums[t], codes, a);
            }
        }
        for t in 0..T {
            total[t] = if B::LEN == 32 {
                sums[t]
            } else if narrow::<B>() {
                _mm512_dpwssd_epi32(total[t], sums[t], scales[4 * i * run::<B>() / B::SUB])
            } else {
                let scale = scales[4 * i * run::<B>() / B::SUB];
                _mm512_add_epi32(total[t], _mm512_mullo_epi32(sums[t], scale))
            };
        }
    }
    total
}

/// `imins` likewise.
///
/// # Safety
/// As `isums`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn imins<B: Sixteen, const T: usize>(
    block: &B::Unpacked,
    tile: &Tile,
    b: usize,
) -> [__m512i; T] {
    let mut total = [_mm512_setzero_si512(); T];
    if B::LEN == 32 {
        for t in 0..T {
            // SAFETY: one sum a block.
            total[t] = _mm512_set1_epi32(unsafe { *tile.sums.add(b * T + t) });
        }
        return total;
    }
    let pairs = B::LEN / (2 * <B as Ints>::SUMS);
    for (j, mins) in block.mins().iter().take(pairs).enumerate() {
        for t in 0..T {
            // SAFETY: so many pairs of sums a block.
            let pair = _mm512_set1_epi32(unsafe { *tile.sums.add((b * pairs + j) * T + t) });
            total[t] = _mm512_dpwssd_epi32(total[t], *mins, pair);
        }
    }
    total
}
