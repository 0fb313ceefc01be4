//! Products of plain floats with several tokens, in the order of `avx2::float`: a
//! vector holds the eight lanes of two rows.
//!
//! Eight rows are converted once, some columns at a time, to a panel in the first cache. The tile
//! is 8 rows × 6 tokens: 24 of 32 registers are sums, and ten loads serve 24 fma.

use crate::simd::avx2::ahead::Ahead;
use crate::simd::avx2::float::{self, Float};
use crate::simd::avx2::reduce::trees8;
use crate::simd::{Product, Scratch};
use std::arch::x86_64::*;

/// Rows of a panel.
const ROWS: usize = 8;
/// Vectors of two rows.
const PAIRS: usize = ROWS / 2;
/// The most tokens of a tile.
const TILE: usize = 6;
/// Columns of a panel: 16 KiB.
const PIECE: usize = 512;
/// Columns of a step.
const EIGHT: usize = 8;
/// Bytes of a line of memory.
const LINE: usize = 64;
/// The fewest tokens that pay for converting a panel.
const FEWEST: usize = 8;

/// The lanes of the rows of a panel for one token.
type Lanes = [__m512; PAIRS];
/// Eight columns of the rows.
type Step = [__m512; PAIRS];

/// # Safety
/// As [`Product`] says, on a processor with the features of this module; W is the matrix's type.
pub(super) unsafe fn matmul<W: Float>(product: Product, scratch: &mut Scratch) {
    let whole = product.acts.tokens() >= FEWEST && float::by_eights(product);
    let panels = if whole { product.rows / ROWS * ROWS } else { 0 };
    // SAFETY: the caller's promises, for the rows before and behind the cut.
    unsafe {
        for part in product.rows(0, panels).by_tokens(TILE) {
            part_matmul::<W>(part, scratch);
        }
        float::matmul::<W>(product.rows(panels, product.rows - panels));
    }
}

/// [`matmul`] of few enough tokens.
///
/// # Safety
/// As `matmul`, where rows are a multiple of [`ROWS`] and columns one of eight.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512dq,avx512vl")]
unsafe fn part_matmul<W: Float>(product: Product, scratch: &mut Scratch) {
    let (tokens, cols) = (product.acts.tokens(), product.mat.cols);
    let steps = PIECE / EIGHT;
    let n_tiles = tokens / TILE + (tokens % TILE).count_ones() as usize;
    let room = scratch.get(steps * size_of::<Step>() + tokens * size_of::<Lanes>());
    let panel: *mut Step = room.cast();
    // SAFETY: the scratch holds the panel and lanes for each token; rows and tokens in range exist.
    unsafe {
        let lanes: *mut Lanes = panel.add(steps).cast();
        for r in (0..product.rows).step_by(ROWS) {
            for (first, n, ends) in pieces(cols, product.granule, product.adds) {
                convert::<W>(product, r, first..first + n, panel);
                let panel = std::slice::from_raw_parts(panel, n / EIGHT);
                // The panel after this one begins in these rows or in the next eight.
                let behind = first + n;
                let next = if behind < cols { (r, behind) } else { (r + ROWS, 0) };
                let (mut t, mut k) = (0, 0);
                while t < tokens {
                    let ahead = Ahead::of::<ROWS>(product, next.0, (k, n_tiles));
                    let sums = Sums { product, r, t, column: first, lanes: lanes.add(t), ends };
                    t += match tokens - t {
                        TILE.. => sums.add::<W, TILE>(panel, ahead, next.1),
                        4.. => sums.add::<W, 4>(panel, ahead, next.1),
                        2.. => sums.add::<W, 2>(panel, ahead, next.1),
                        _ => sums.add::<W, 1>(panel, ahead, next.1),
                    };
                    k += 1;
                }
            }
        }
    }
}

/// Eight rows from `r` on as f32, two to a vector.
///
/// # Safety
/// They exist, with the columns; there is room for a step for each eight columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512dq,avx512vl")]
unsafe fn convert<W: Float>(
    product: Product,
    r: usize,
    columns: std::ops::Range<usize>,
    panel: *mut Step,
) {
    for pair in 0..PAIRS {
        let rows = [product.row(r + 2 * pair), product.row(r + 2 * pair + 1)];
        for (step, i) in columns.clone().step_by(EIGHT).enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let [low, high] = rows.map(|row| W::load8(row.add(i * W::BYTES)));
                let both = _mm512_insertf32x8::<1>(_mm512_castps256_ps512(low), high);
                (*panel.add(step))[pair] = both;
            }
        }
    }
}

/// Whether a piece is the first or the last of its granule, and whether the granule's sums are
/// added to what is there.
#[derive(Clone, Copy)]
struct Ends {
    first: bool,
    last: bool,
    adds: bool,
}

/// The first column of each piece and how many it has.
fn pieces(cols: usize, granule: usize, adds: bool) -> impl Iterator<Item = (usize, usize, Ends)> {
    (0..cols).step_by(granule).flat_map(move |start| {
        let end = cols.min(start + granule);
        (start..end).step_by(PIECE).map(move |first| {
            let n = PIECE.min(end - first);
            let (is_first, is_last) = (first == start, first + n == end);
            (first, n, Ends { first: is_first, last: is_last, adds: adds || start > 0 })
        })
    })
}

/// The sums of eight rows, from `r` on, and a tile, from token `t` on, for the columns of a panel.
struct Sums<'a> {
    product: Product<'a>,
    r: usize,
    t: usize,
    column: usize,
    /// The lanes of the tile's first token; the others' follow.
    lanes: *mut Lanes,
    ends: Ends,
}

impl Sums<'_> {
    /// Adds the products of T tokens to their lanes, or writes the results after the last piece.
    /// Asks for as many columns of the rows `ahead`, from `column_ahead` on. Returns T.
    ///
    /// # Safety
    /// T tokens exist, with the panel's columns from `column` on, and lanes for them; their places
    /// can be written. Calls for a tile come in the order of columns.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512dq,avx512vl")]
    unsafe fn add<W: Float, const T: usize>(
        self,
        panel: &[Step],
        ahead: Ahead,
        column_ahead: usize,
    ) -> usize {
        let mut x = [std::ptr::null(); T];
        for (t, x) in x.iter_mut().enumerate() {
            *x = self.product.acts.f32s(self.t + t)[self.column..].as_ptr();
        }
        // SAFETY: the caller's promises.
        unsafe {
            let at: *mut [Lanes; T] = self.lanes.cast();
            let zero = [[_mm512_setzero_ps(); PAIRS]; T];
            let mut lanes = if self.ends.first { zero } else { at.read() };
            for (i, step) in panel.iter().enumerate() {
                if (EIGHT * i).is_multiple_of(LINE / W::BYTES) {
                    ahead.ask_for::<[u8; LINE]>((column_ahead + EIGHT * i) * W::BYTES / LINE);
                }
                for t in 0..T {
                    let x = _mm512_broadcast_f32x8(_mm256_loadu_ps(x[t].add(EIGHT * i)));
                    for pair in 0..PAIRS {
                        lanes[t][pair] = _mm512_fmadd_ps(x, step[pair], lanes[t][pair]);
                    }
                }
            }
            if !self.ends.last {
                at.write(lanes);
                return T;
            }
            for (t, lanes) in lanes.into_iter().enumerate() {
                let row = |i: usize| match i % 2 {
                    0 => _mm512_castps512_ps256(lanes[i / 2]),
                    _ => _mm512_extractf32x8_ps::<1>(lanes[i / 2]),
                };
                let dots = trees8([row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)]);
                let out = self.product.place(self.t + t, self.r);
                let adds = self.ends.adds;
                let dots = if adds { _mm256_add_ps(_mm256_loadu_ps(out), dots) } else { dots };
                _mm256_storeu_ps(out, dots);
            }
        }
        T
    }
}
