//! Some tokens' queries of the heads that share a KV head, against one split of the positions.

use super::{Call, DistanceBias, SPLIT, SharedOut, TILE, ThreadScratch};
use crate::simd::Kernels;
use crate::simd::tile::{SoftmaxStep, Tile, TileMut, shift};
use std::ops::Range;

pub(super) struct Block<'a> {
    pub call: Call<'a>,
    pub head_kv: usize,
    /// Tokens of the call.
    pub tokens: Range<usize>,
}

/// Floats after a record's `acc`: max, sum, padding to a cache line.
pub(super) const RECORD_TAIL: usize = 16;

/// Rows that make a step of the softmax together.
const STEPS: usize = 16;

/// A thread's scratch memory.
pub(super) struct Workspace<'a> {
    /// [rows, k dim] padded
    q: &'a mut [f32],
    /// [rows, TILE]
    scores: &'a mut [f32],
    /// Keys, then values.
    tile: &'a mut [f32],
}

impl<'a> Workspace<'a> {
    /// With `extra` floats beside it.
    pub fn new(
        scratch: &'a mut ThreadScratch,
        block: &Block,
        extra: usize,
    ) -> (Self, &'a mut [f32]) {
        const LINE: usize = 16;
        let Call { k, v, .. } = block.call;
        let sizes = [
            block.n_rows() * k.dim.next_multiple_of(8),
            block.n_rows() * TILE,
            k.tile_floats(TILE).max(v.tile_floats(TILE)),
            extra,
        ];
        let sizes = sizes.map(|n| n.next_multiple_of(LINE));
        let (_, floats) = scratch.split(sizes.iter().sum::<usize>() + LINE);
        let floats = {
            let start = floats.as_ptr().align_offset(4 * LINE).min(LINE);
            &mut floats[start..]
        };
        let (q, floats) = floats.split_at_mut(sizes[0]);
        let (scores, floats) = floats.split_at_mut(sizes[1]);
        let (tile, floats) = floats.split_at_mut(sizes[2]);
        (Workspace { q, scores, tile }, &mut floats[..extra])
    }
}

fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// acc, max and sum of a query's record.
fn parts(record: &mut [f32]) -> (&mut [f32], &mut f32, &mut f32) {
    let (acc, tail) = record.split_at_mut(record.len() - RECORD_TAIL);
    let (max, tail) = tail.split_at_mut(1);
    (acc, &mut max[0], &mut tail[0])
}

impl Block<'_> {
    fn group(&self) -> usize {
        self.call.shape.group()
    }

    pub fn n_rows(&self) -> usize {
        self.tokens.len() * self.group()
    }

    /// Positions that any of the queries sees.
    pub fn seen(&self) -> Range<usize> {
        let shape = &self.call.shape;
        shape.seen(self.tokens.start).start..shape.seen(self.tokens.end - 1).end
    }

    /// Positions that each of the queries sees.
    fn seen_by_all(&self) -> Range<usize> {
        let shape = &self.call.shape;
        let start = shape.seen(self.tokens.end - 1).start;
        start..shape.seen(self.tokens.start).end.max(start)
    }

    /// The rows of one of the block's tokens.
    fn rows_of(&self, token: usize) -> Range<usize> {
        let first = (token - self.tokens.start) * self.group();
        first..first + self.group()
    }

    /// The rows of the tokens that see part of a tile. They are adjacent: the range that a token
    /// sees begins and ends later from one token to the next.
    fn rows_seeing(&self, tile: &Range<usize>) -> Range<usize> {
        let seeing = |token: &usize| !common(&self.call.shape.seen(*token), tile).is_empty();
        match (self.tokens.clone().find(seeing), self.tokens.clone().rfind(seeing)) {
            (Some(first), Some(last)) => self.rows_of(first).start..self.rows_of(last).end,
            _ => 0..0,
        }
    }

    /// The index of a row's token and head among all.
    fn place(&self, row: usize) -> usize {
        let (token, g) = (self.tokens.start + row / self.group(), row % self.group());
        token * self.call.shape.n_head + self.head_kv * self.group() + g
    }

    pub fn load_queries(&self, workspace: &mut Workspace) {
        let dim = self.call.k.dim;
        for (row, to) in workspace.q.chunks_exact_mut(dim.next_multiple_of(8)).enumerate() {
            if row == self.n_rows() {
                break;
            }
            to[..dim].copy_from_slice(&self.call.q[self.place(row) * dim..][..dim]);
            to[dim..].fill(0.0);
        }
    }

    /// Records of queries that have met nothing.
    pub fn clear(&self, records: &mut [f32]) {
        for record in records.chunks_exact_mut(self.call.record()) {
            record.fill(0.0);
            *parts(record).1 = f32::NEG_INFINITY;
        }
    }

    /// The queries' records over the positions of one split.
    pub fn split(
        &self,
        kernels: &Kernels,
        split: usize,
        workspace: &mut Workspace,
        records: &mut [f32],
    ) {
        let head = self.head_kv;
        self.clear(records);
        let seen = common(&self.seen(), &(split * SPLIT..(split + 1) * SPLIT));
        for start in (split * SPLIT..(split + 1) * SPLIT).step_by(TILE) {
            let tile = common(&(start..start + TILE), &seen);
            if tile.is_empty() {
                continue;
            }
            let keys = self.call.k.tile(kernels, head, tile.clone(), workspace.tile);
            let (rows, dim) = (self.rows_seeing(&tile), keys.dim());
            let q = Tile::new(&workspace.q[rows.start * dim..], rows.len(), dim, dim);
            let scores = &mut workspace.scores[rows.start * TILE..];
            kernels.tile_dot(q, keys, TileMut::new(scores, rows.len(), tile.len(), TILE));
            self.softmax(kernels, &tile, workspace.scores, records);
            let values = self.call.v.tile(kernels, head, tile.clone(), workspace.tile);
            self.add_values(kernels, &tile, workspace.scores, values, records);
        }
    }

    /// Scores → exponentials, at the places of positions that each token sees; tokens that see the
    /// same ones together.
    fn softmax(
        &self,
        kernels: &Kernels,
        tile: &Range<usize>,
        scores: &mut [f32],
        records: &mut [f32],
    ) {
        let shape = &self.call.shape;
        let seen_by = |token| common(&shape.seen(token), tile);
        let mut first = self.tokens.start;
        while first < self.tokens.end {
            let seen = seen_by(first);
            let others = (first..self.tokens.end).find(|token| seen_by(*token) != seen);
            let end = others.unwrap_or(self.tokens.end);
            if !seen.is_empty() {
                let rows = self.rows_of(first).start..self.rows_of(end - 1).end;
                let scores = &mut scores[seen.start - tile.start..];
                let mut scale = shape.scale;
                if let Some(cap) = shape.cap {
                    for row in rows.clone() {
                        let scores = &mut scores[row * TILE..][..seen.len()];
                        scores.iter_mut().for_each(|score| *score *= shape.scale);
                        kernels.soft_cap(scores, cap);
                    }
                    scale = 1.0;
                }
                if let Some(bias) = shape.bias {
                    self.add_bias(bias, scale, rows.clone(), &seen, scores);
                    scale = 1.0;
                }
                self.step(kernels, rows, seen.len(), scale, scores, records);
            }
            first = end;
        }
    }

    /// Scores of rows `rows`, scaled, plus the bias.
    fn add_bias(
        &self,
        bias: &DistanceBias,
        scale: f32,
        rows: Range<usize>,
        seen: &Range<usize>,
        scores: &mut [f32],
    ) {
        let shape = &self.call.shape;
        for row in rows {
            let (head, token) = (self.place(row) % shape.n_head, row / self.group());
            let query = shape.first + self.tokens.start + token;
            for (score, key) in scores[row * TILE..].iter_mut().zip(seen.clone()) {
                *score = scale * *score + bias.at(head, key, query);
            }
        }
    }

    /// The step of the softmax that `n` scores of each of `rows` make.
    fn step(
        &self,
        kernels: &Kernels,
        rows: Range<usize>,
        n: usize,
        scale: f32,
        scores: &mut [f32],
        records: &mut [f32],
    ) {
        let mut steps = [SoftmaxStep::after(f32::NEG_INFINITY); STEPS];
        let records = &mut records[rows.start * self.call.record()..rows.end * self.call.record()];
        let records_of_steps = records.chunks_mut(STEPS * self.call.record());
        for (first, records) in rows.clone().step_by(STEPS).zip(records_of_steps) {
            let steps = &mut steps[..STEPS.min(rows.end - first)];
            for (step, record) in steps.iter_mut().zip(records.chunks_exact_mut(self.call.record()))
            {
                *step = SoftmaxStep::after(*parts(record).1);
            }
            let scores = TileMut::new(&mut scores[first * TILE..], steps.len(), n, TILE);
            kernels.tile_softmax(scores, scale, steps);
            for (step, record) in steps.iter().zip(records.chunks_exact_mut(self.call.record())) {
                let (acc, max, sum) = parts(record);
                *max = step.max;
                *sum = *sum * step.factor + step.sum;
                if step.factor != 1.0 {
                    kernels.scale(acc, step.factor);
                }
            }
        }
    }

    /// Values that a token does not see are not read: they may be NaN.
    fn add_values(
        &self,
        kernels: &Kernels,
        tile: &Range<usize>,
        scores: &[f32],
        values: Tile,
        records: &mut [f32],
    ) {
        let n = self.call.record();
        let mut add = |rows: Range<usize>, positions: Range<usize>| {
            let (from, len) = (positions.start - tile.start, positions.len());
            let p = Tile::new(&scores[rows.start * TILE + from..], rows.len(), len, TILE);
            let acc = &mut records[rows.start * n..rows.end * n];
            let acc = TileMut::new(acc, rows.len(), values.dim(), n);
            kernels.tile_axpy(p, values.rows_from(from, len), acc);
        };
        let shared = common(&self.seen_by_all(), tile);
        let of = |token| common(&self.call.shape.seen(token), tile);
        if shared.is_empty() {
            let seeing = self.tokens.clone().filter(|token| !of(*token).is_empty());
            seeing.for_each(|token| add(self.rows_of(token), of(token)));
            return;
        }
        for token in self.tokens.clone().filter(|token| of(*token).start < shared.start) {
            add(self.rows_of(token), of(token).start..shared.start);
        }
        add(0..self.n_rows(), shared.clone());
        for token in self.tokens.clone().filter(|token| of(*token).end > shared.end) {
            add(self.rows_of(token), shared.end..of(token).end);
        }
    }

    /// Adds records of a split to the totals, both of rows `rows`.
    pub fn fold(
        &self,
        kernels: &Kernels,
        split: usize,
        records: &mut [f32],
        rows: Range<usize>,
        totals: &mut [f32],
    ) {
        let n = self.call.record();
        let split = split * SPLIT..(split + 1) * SPLIT;
        let mut factors = [[0f32; 2]; STEPS];
        let chunks = records.chunks_mut(STEPS * n).zip(totals.chunks_mut(STEPS * n));
        for (first, (records, totals)) in rows.step_by(STEPS).zip(chunks) {
            let factors = &mut factors[..records.len() / n];
            let pairs = records.chunks_exact_mut(n).zip(totals.chunks_exact_mut(n));
            for ((record, total), factors) in pairs.zip(&mut *factors) {
                let (max, max_total) = (*parts(record).1, parts(total).1);
                let larger = if max > *max_total { max } else { *max_total };
                *factors = [*max_total, max].map(|x| x - shift(larger));
                *max_total = larger;
            }
            kernels.exp(factors.as_flattened_mut());
            let pairs = records.chunks_exact_mut(n).zip(totals.chunks_exact_mut(n));
            for (row, ((record, total), [a, b])) in (first..).zip(pairs.zip(&*factors)) {
                let token = self.tokens.start + row / self.group();
                if common(&self.call.shape.seen(token), &split).is_empty() {
                    continue;
                }
                let (acc, _, sum) = parts(record);
                let (acc_total, _, sum_total) = parts(total);
                *sum_total = *sum_total * a + *sum * b;
                kernels.blend(acc_total, *a, acc, *b);
            }
        }
    }

    /// Totals of rows `rows` → their places in `out`.
    ///
    /// # Safety
    /// Nothing else uses these results meanwhile.
    pub unsafe fn finish(
        &self,
        kernels: &Kernels,
        totals: &mut [f32],
        rows: Range<usize>,
        out: &SharedOut,
    ) {
        let (n, dim) = (self.call.record(), self.call.v.dim);
        for (row, total) in rows.zip(totals.chunks_exact_mut(n)) {
            let place = self.place(row);
            let (acc, max, sum) = parts(total);
            let mut factor = 1.0;
            if let Some(sinks) = self.call.shape.sinks {
                let sink = sinks[place % self.call.shape.n_head];
                let larger = if sink > *max { sink } else { *max };
                let mut factors = [*max - shift(larger), sink - shift(larger)];
                kernels.exp(&mut factors);
                factor = factors[0];
                *sum = *sum * factor + factors[1];
            }
            let inverse = factor / *sum;
            // SAFETY: the caller's promise.
            let out = unsafe { out.slice(place * dim, dim) };
            out.iter_mut().zip(acc).for_each(|(out, acc)| *out = *acc * inverse);
        }
    }
}
