//! Grouped-query attention over the KV cache, causal or not, by tiles with an online softmax
//! (arXiv 1805.02867; tiles as in FlashAttention, arXiv 2205.14135): no more memory than a few
//! tiles, however long the text.
//!
//! # One arithmetic
//!
//! A query's bits depend on what it sees and on nothing else: not on the queries beside it, the
//! cut of the prompt, the threads, or which of the two ways below computed it. Positions are cut
//! into tiles of `TILE` and splits of `SPLIT`, at multiples of these sizes wherever a window
//! begins. For one query and head, with (max, sum, acc) = (−∞, 0, 0) at the start of a split:
//!
//! - **Tile**, ascending, over the positions i of it that the query sees:
//!   `s_i = scale·dot(q, k_i)` by the float dot product of `quant`, rows of any type as f32 (those
//!   of blocks as it dequantises them); with a cap `s_i = cap·(2·σ(2·s_i/cap) − 1)`, each operation
//!   rounded; with a bias `s_i = scale·dot + bias`, two roundings.
//!   `max' = max(max, s_i…)`, `p_i = exp(s_i − max')`, `c = exp(max − max')`,
//!   `sum = sum·c + Σ p_i` (eight lanes by i from the first position seen, then the tree),
//!   `acc = acc·c`, then `acc = fma(p_i, v_i, acc)`, i ascending. Products and sums are
//!   rounded apart where no fma is written.
//! - **Split**, ascending, into totals (−∞, 0, 0): `max' = max(max_T, max)`,
//!   `a = exp(max_T − max')`, `b = exp(max − max')`, `sum_T = sum_T·a + sum·b`,
//!   `acc_T = acc_T·a + acc·b`. Splits of which the query sees nothing take no part.
//! - **End.** A sink is a score without a value: `max'` and `a` as above,
//!   `sum_T·a + exp(sink − max')`. `out = acc_T·(a / sum)`, a = 1 without a sink.
//!
//! Against plain softmax in f64 on the same rows the largest error met in the tests is 1.5·10⁻⁶ of
//! the largest value (`tests.rs`).
//!
//! # Two ways
//!
//! A unit of work is a block of queries that share a KV head: each tile of keys and values is
//! converted and read once for `ROWS` of them or more. Where that makes fewer units than keep the
//! threads busy (decode), a unit is one split of a block, in waves of a few splits a thread;
//! partial results meet in a buffer whose size the threads decide, not the text.

mod block;
pub mod index;
mod rows;
#[cfg(test)]
mod tests;

use super::{Cpu, SERIAL_WORK, SharedOut, ThreadScratch};
use crate::backend::ops::{DistanceBias, Rows};
use block::{Block, RECORD_TAIL, Workspace};
use std::ops::Range;

/// Positions whose keys, then values, lie in the first cache as f32.
const TILE: usize = 64;
/// Positions a thread takes on its own in decode.
const SPLIT: usize = 512;
/// Queries (tokens times heads) that read a tile together, if a token has no more.
const ROWS: usize = 128;
/// Queries for rows of at most [`SHORT`] elements, if each thread gets [`MANY_UNITS`] and more.
const MANY_ROWS: usize = 256;
const SHORT: usize = 128;
const MANY_UNITS: usize = 8;

/// One attention call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape<'a> {
    pub n_head: usize,
    pub n_head_kv: usize,
    /// Position of the first query; the query of token t sees positions up to first + t.
    pub first: usize,
    /// Unless each query sees as many positions as this, whatever its own.
    pub all: Option<usize>,
    /// The number of these that it sees, counted back from its own position.
    pub window: Option<usize>,
    /// Positions are cut into chunks of this many, and it sees those of its own chunk.
    pub chunk: Option<usize>,
    /// Factor on the scores, 1/√head_dim as a rule.
    pub scale: f32,
    /// A score a head that takes part in the softmax and has no value (attention sinks,
    /// arXiv 2309.17453, as learned by gpt-oss).
    pub sinks: Option<&'a [f32]>,
    /// Scores s, already scaled, become cap·tanh(s/cap).
    pub cap: Option<f32>,
    /// Added to the scores.
    pub bias: Option<&'a DistanceBias>,
}

impl AttentionShape<'_> {
    fn group(&self) -> usize {
        self.n_head / self.n_head_kv
    }

    /// Positions that the query of a token sees.
    fn seen(&self, token: usize) -> Range<usize> {
        let end = self.all.unwrap_or(self.first + token + 1);
        let of_chunk = self.chunk.map_or(0, |chunk| (end - 1) / chunk * chunk);
        end.saturating_sub(self.window.unwrap_or(end)).max(of_chunk)..end
    }
}

/// One call's operands.
#[derive(Clone, Copy)]
struct Call<'a> {
    shape: AttentionShape<'a>,
    tokens: usize,
    /// `ROWS` or `MANY_ROWS`
    rows: usize,
    q: &'a [f32],
    k: Rows<'a>,
    v: Rows<'a>,
}

impl<'a> Call<'a> {
    fn tokens_a_block(&self) -> usize {
        (self.rows / self.shape.group()).clamp(1, self.tokens.max(1))
    }

    fn units(&self) -> usize {
        self.tokens.div_ceil(self.tokens_a_block()) * self.shape.n_head_kv
    }

    /// Late tokens see more positions, so they come first: the last pieces are the short ones and
    /// no thread is left with a long one.
    fn block(&self, unit: usize) -> Block<'a> {
        let unit = self.units() - 1 - unit;
        let (block, head_kv) = (unit / self.shape.n_head_kv, unit % self.shape.n_head_kv);
        let first = block * self.tokens_a_block();
        let end = self.tokens.min(first + self.tokens_a_block());
        Block { call: *self, head_kv, tokens: first..end }
    }

    /// Floats of a query's partial result: acc, max, sum.
    fn record(&self) -> usize {
        self.v.dim.next_multiple_of(16) + RECORD_TAIL
    }

    /// Floats of the partial results of all queries of a block.
    fn partial(&self) -> usize {
        self.tokens_a_block() * self.shape.group() * self.record()
    }
}

/// The splits that hold some of `positions`.
fn splits(positions: &Range<usize>) -> Range<usize> {
    positions.start / SPLIT..positions.end.div_ceil(SPLIT)
}

impl Cpu {
    /// `q` [tokens, n_head, k dim] → `out` [tokens, n_head, v dim].
    pub fn attention(&self, shape: AttentionShape, q: &[f32], k: Rows, v: Rows, out: &mut [f32]) {
        let tokens = q.len() / (shape.n_head * k.dim);
        assert_eq!(q.len(), tokens * shape.n_head * k.dim);
        assert_eq!(out.len(), tokens * shape.n_head * v.dim);
        if tokens == 0 {
            return;
        }
        let mut call = Call { shape, tokens, rows: MANY_ROWS, q, k, v };
        if k.dim > SHORT || call.units() < MANY_UNITS * self.n_threads() {
            call.rows = ROWS;
        }
        let seen = shape.seen(0).start..shape.seen(tokens - 1).end;
        let work = tokens * shape.n_head * seen.len() * (k.dim + v.dim);
        let out = SharedOut::new(out);
        let busy = call.units() >= 2 * self.n_threads();
        if busy || splits(&seen).len() == 1 || self.n_threads() == 1 || work <= SERIAL_WORK {
            self.by_blocks(call, if work <= SERIAL_WORK { call.units() } else { 1 }, &out);
        } else {
            self.by_splits(call, splits(&seen), &out);
        }
    }

    /// A unit is a block, which passes over its splits.
    fn by_blocks(&self, call: Call, chunk: usize, out: &SharedOut) {
        self.chunks(call.units(), chunk, &|scratch, range| {
            for unit in range {
                let block = call.block(unit);
                let n = block.n_rows() * call.record();
                let (mut workspace, rest) = Workspace::new(scratch, &block, 2 * n);
                let (partial, totals) = rest.split_at_mut(n);
                block.load_queries(&mut workspace);
                block.clear(totals);
                for split in splits(&block.seen()) {
                    block.split(self.kernels, split, &mut workspace, partial);
                    block.fold(self.kernels, split, partial, 0..block.n_rows(), totals);
                }
                // SAFETY: each unit's tokens and heads are its own.
                unsafe { block.finish(self.kernels, totals, 0..block.n_rows(), out) };
            }
        });
    }

    /// A unit is a split of a block. Partial results of a wave of splits go to a buffer, then each
    /// query's are added up in order.
    fn by_splits(&self, call: Call, splits: Range<usize>, out: &SharedOut) {
        let (units, size) = (call.units(), call.partial());
        let most = (4 * self.n_threads()).div_ceil(units);
        let wave = most.min(splits.len());
        let mut buffer = self.partials.borrow_mut();
        let needed = (wave + 1) * units * size;
        if buffer.len() < needed {
            // For as many splits as a wave can have: a text that grows meets this once.
            buffer.resize((most + 1) * units * size, 0.0);
        }
        let (totals, partials) = buffer[..needed].split_at_mut(units * size);
        (0..units).for_each(|u| call.block(u).clear(&mut totals[u * size..][..size]));
        let (totals, partials) = (SharedOut::new(totals), SharedOut::new(partials));
        let rows = call.tokens_a_block() * call.shape.group();
        for first in splits.clone().step_by(wave) {
            let n = wave.min(splits.end - first);
            self.chunks(n * units, 1, &|scratch, range| {
                for i in range {
                    let block = call.block(i % units);
                    // SAFETY: piece i's place is its own.
                    let partial = unsafe { partials.slice(i * size, size) };
                    let (mut workspace, _) = Workspace::new(scratch, &block, 0);
                    block.load_queries(&mut workspace);
                    block.split(self.kernels, first + i / units, &mut workspace, partial);
                }
            });
            let end = first + n == splits.end;
            let row_chunk = self.row_chunk(units * rows, units * rows * n * call.record());
            self.chunks(units * rows, row_chunk, &|_, range| {
                for row in range {
                    let (u, row) = (row / rows, row % rows);
                    let block = call.block(u);
                    if row >= block.n_rows() {
                        continue;
                    }
                    // SAFETY: each row is in one piece, and no thread writes partials now.
                    unsafe {
                        let at = row * call.record();
                        let total = totals.slice(u * size + at, call.record());
                        for i in 0..n {
                            let at = (i * units + u) * size + at;
                            let partial = partials.slice(at, call.record());
                            block.fold(self.kernels, first + i, partial, row..row + 1, total);
                        }
                        if end {
                            block.finish(self.kernels, total, row..row + 1, out);
                        }
                    }
                }
            });
        }
    }
}
