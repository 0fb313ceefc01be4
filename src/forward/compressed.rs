//! Attention to a window and to compressed rows of what is before it (DeepSeek-V4). A position has
//! one row, which is key and value of all heads; what heads make of it is turned back by the
//! token's own position. A block's positions make one more row, of which an indexer may choose.
//! Layers may share these rows and the choice (DeepSeek-V4.1).

use crate::Result;
use crate::backend::cpu::acts::Kinds;
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::cpu::attention::index::best;
use crate::backend::cpu::compress::ScoredRow;
use crate::backend::cpu::rope::RopeTable;
use crate::backend::ops::{RopeShape, RowBytes, Rows, RowsMut, row_bytes};
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::mixer::CpuMixer;
use crate::forward::parts;
use crate::forward::scratch::{rows_of, rows_of_mut};
use crate::model::compressed::row_of_block;
use crate::model::indexer::Candidates;
use crate::model::kv::KvCache;
use crate::model::weights::{CompressedWeights, Compressor};
use crate::simd::Floats;
use std::ops::Range;

#[derive(Default)]
pub struct CompressedBuffers {
    ranks: Floats, // [rows, rank]
    /// Attention's and its indexer's: [rows, width] each.
    values: [Floats; 2],
    scores: [Floats; 2],
    index_q: Floats, // [rows, heads, dim]
    weights: Floats, // [rows, heads]
    room: Vec<f32>,
    row: Vec<f32>,  // a compressed row
    rows: Vec<f32>, // [blocks, dim], before they turn
    keys: Floats,   // [blocks, dim], an indexer's of these
    turn: RopeTable,
    back: RopeTable,
    merits: Vec<f32>,
    ids: Vec<u32>,
    blocks: Vec<u32>,
    /// Blocks that rows of the batch see, if they do not see all: [rows, chosen].
    chosen: Vec<u32>,
    merits_of_candidates: Vec<f32>,
    candidates: Vec<u32>, // [rows, candidates]
    seen: RowBytes,
    grouped: Floats, // [rows, groups, rank]
}

/// Compressed rows among a layer's cached ones.
pub(super) fn unpacked(packed: Rows<'_>, dim: usize) -> Rows<'_> {
    let n_ctx = packed.n_ctx * packed.dim / dim;
    Rows {
        dim,
        stride: dim,
        n_ctx,
        data: &packed.data[..n_ctx * row_bytes(packed.ty, dim)],
        ..packed
    }
}

pub(super) fn unpacked_mut(packed: RowsMut<'_>, dim: usize) -> RowsMut<'_> {
    let n_ctx = packed.n_ctx * packed.dim / dim;
    let data = &mut packed.data[..n_ctx * row_bytes(packed.ty, dim)];
    RowsMut { dim, n_ctx, data, ty: packed.ty }
}

impl CpuMixer for CompressedWeights {
    /// y = attention(h)
    fn mix(
        &self,
        pass: &mut CpuPass,
        l: usize,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (model, cpu, n) = (pass.model, pass.cpu, pass.batch.n_rows());
        let (eps, dim) = (model.hyper.norm_eps, self.head_dim);
        let shape = model.rope_shape(dim, dim - self.n_rot);
        // queries, rows
        let c = &mut m.compressed;
        pass.product(&self.q_a, h, &mut m.acts, &mut c.ranks);
        cpu.rms_norm_heads(&mut c.ranks, &self.q_a_norm, eps);
        pass.product(&self.q_b, &c.ranks, &mut m.acts, &mut m.q);
        if let Some(ones) = &self.ones {
            cpu.rms_norm_heads(&mut m.q, ones, eps);
        }
        pass.product(&self.row, h, &mut m.acts, &mut m.k);
        cpu.rms_norm_heads(&mut m.k, &self.row_norm, eps);
        let table = m.ropes.of_layer(self.slides);
        cpu.rope(&mut m.q, shape, table);
        cpu.rope(&mut m.k, shape, table);
        c.back.fill_back(table);
        // cache: rows, then what they make
        for (rows, segment) in pass.batch.segments() {
            let (cached, _) = pass.caches[segment.session].rows_mut(l);
            cached.store(cpu, rows_of(&m.k, &rows, dim), segment.past);
        }
        pass.compress(l, self, h, m);
        pass.store_row_keys(l, self, m);
        // attention, each text over its own cache
        m.attended.resize(n * self.n_head * dim);
        pass.attend_compressed(l, self, m)?;
        // back by the token's position, output
        let c = &mut m.compressed;
        cpu.rope(&mut m.attended, shape, &c.back);
        let mats = self.output_a.mats(&model.gguf);
        m.acts.fill(cpu, Kinds::of([mats.all.ty]), n * mats.n_heads, mats.all.cols, &m.attended);
        c.grouped.resize(n * mats.n_heads * mats.rows);
        pass.head_products(&self.output_a, &m.acts, &mut c.grouped);
        std::mem::swap(&mut c.grouped, &mut m.attended);
        pass.attention_output(&self.output_b, m, y);
        Ok(())
    }
}

impl CpuPass<'_, '_> {
    /// Values and scores of the rows, and the compressed rows of blocks that they complete; what an
    /// indexer reads.
    fn compress(&mut self, l: usize, w: &CompressedWeights, h: &[f32], m: &mut MixerBuffers) {
        let c = &mut m.compressed;
        c.rows.clear();
        if let Some(chooser) = &w.chooser {
            self.product(&chooser.q, &c.ranks, &mut m.acts, &mut c.index_q);
            self.product(&chooser.weights, h, &mut m.acts, &mut c.weights);
            let dim = chooser.q.weight.rows / chooser.weights.weight.rows;
            let shape = self.model.rope_shape(dim, dim - w.n_rot);
            self.cpu.rope(&mut c.index_q, shape, &m.ropes.main);
        }
        for (i, compressor) in w.compressors.iter().enumerate() {
            self.product(&compressor.values, h, &mut m.acts, &mut c.values[i]);
            match &compressor.scores {
                Some(scores) => self.product(scores, h, &mut m.acts, &mut c.scores[i]),
                None => {
                    c.scores[i].resize(c.values[i].len());
                    c.scores[i].fill(0.0);
                }
            }
        }
        if w.compressors.is_empty() {
            return;
        }
        let (model, cpu, n_layers) = (self.model, self.cpu, self.model.hyper.n_layers);
        self.over_parts(|rows, cache, n| {
            for row in rows.clone() {
                let position = n - rows.len() + row - rows.start;
                let mut first = 0;
                for (i, compressor) in w.compressors.iter().enumerate() {
                    let width = compressor.width();
                    let size = 2 * width * compressor.n_kept();
                    let past = &mut cache.state_mut(n_layers + l).past[first..first + size];
                    first += size;
                    let own = row..row + 1;
                    let own = ScoredRow {
                        values: rows_of(&c.values[i], &own, width),
                        scores: rows_of(&c.scores[i], &own, width),
                    };
                    let place = &compressor.places[position % compressor.ratio * width..][..width];
                    let (values, scores) = keep(past, position % compressor.n_kept(), own, place);
                    if !(position + 1).is_multiple_of(compressor.ratio) {
                        continue;
                    }
                    c.row.resize(compressor.dim, 0.0);
                    let kept = kept_rows(compressor, position + 1, values, scores);
                    cpu.compress_rows(kept, &mut c.room, &mut c.row);
                    cpu.rms_norm_heads(&mut c.row, &compressor.norm, model.hyper.norm_eps);
                    if w.keys.is_some() {
                        c.rows.extend_from_slice(&c.row);
                    }
                    let begin = position + 1 - compressor.ratio;
                    c.turn.fill(model.frequencies(cache.n_ctx()), begin, 1);
                    let offset = compressor.dim - w.n_rot;
                    let shape: RopeShape = model.rope_shape(compressor.dim, offset);
                    cpu.rope(&mut c.row, shape, &c.turn);
                    let (keys, index) = cache.rows_mut(2 * n_layers + l);
                    let packed = if i == 0 { keys } else { index };
                    let at = row_of_block(compressor.ratio, begin / compressor.ratio);
                    unpacked_mut(packed, compressor.dim).store(cpu, &c.row, at);
                }
            }
            cache.note_state(n_layers + l, n);
        });
    }

    /// Keys of an indexer that are made of the compressed rows.
    fn store_row_keys(&mut self, l: usize, w: &CompressedWeights, m: &mut MixerBuffers) {
        let (c, model, cpu) = (&mut m.compressed, self.model, self.cpu);
        let Some((keys, params)) = w.keys.as_ref().zip(model.hyper.indexer.as_ref()) else {
            return;
        };
        let (n, dim, slot) = (c.rows.len() / w.head_dim, params.dim, 2 * model.hyper.n_layers + l);
        if n == 0 {
            return;
        }
        let weight = &keys.weight;
        m.acts.fill(cpu, Kinds::of([weight.weight.ty]), n, w.head_dim, &c.rows);
        cpu.products([model.linear(weight, &m.acts, &mut c.keys, n)]);
        cpu.rms_norm_heads(&mut c.keys, &keys.norm, params.key_eps);
        let made = |rows: &Range<usize>, past: usize| past / w.ratio..(past + rows.len()) / w.ratio;
        c.turn.clear();
        for (rows, segment) in self.batch.segments() {
            let n_ctx = self.caches[segment.session].n_ctx();
            for block in made(&rows, segment.past) {
                c.turn.push(model.frequencies(n_ctx), block * w.ratio, 1);
            }
        }
        cpu.rope(&mut c.keys, model.rope_shape(dim, params.rope_offset), &c.turn);
        let mut at = 0;
        for (rows, segment) in self.batch.segments() {
            let blocks = made(&rows, segment.past);
            let (_, packed) = self.caches[segment.session].rows_mut(slot);
            let own = rows_of(&c.keys, &(at..at + blocks.len()), dim);
            at += blocks.len();
            if !blocks.is_empty() {
                let first = row_of_block(w.ratio, blocks.start);
                unpacked_mut(packed, dim).store(cpu, own, first);
            }
        }
    }

    fn attend_compressed(
        &mut self,
        l: usize,
        w: &CompressedWeights,
        m: &mut MixerBuffers,
    ) -> Result<()> {
        let (cpu, width) = (self.cpu, w.n_head * w.head_dim);
        for (rows, segment) in self.batch.segments() {
            let shape = AttentionShape {
                n_head: w.n_head,
                n_head_kv: 1,
                first: segment.past,
                all: None,
                window: Some(w.window),
                chunk: None,
                cap: None,
                scale: self.model.hyper.attention_scale,
                sinks: Some(&w.sinks),
                bias: None,
            };
            let cache = &*self.caches[segment.session];
            if w.ratio == 0 {
                let (own, _) = cache.rows(l);
                let (q, out) =
                    (rows_of(&m.q, &rows, width), rows_of_mut(&mut m.attended, &rows, width));
                parts::attend(cpu, self.rests, shape, q, [own, own], out)?;
                continue;
            }
            for row in rows.clone() {
                self.rests.rest()?;
                let n_seen = segment.past + row - rows.start + 1;
                let n_blocks = n_seen / w.ratio;
                self.choose_blocks(l, segment.session, w, row, n_blocks, m);
                let cache = &*self.caches[segment.session];
                let c = &mut m.compressed;
                let window = n_seen.saturating_sub(w.window)..n_seen;
                let slots = [l, 2 * self.model.hyper.n_layers + w.source];
                let seen = gathered(cache, slots, w, &window, &c.blocks, &mut c.seen);
                let shape =
                    AttentionShape { first: 0, all: Some(seen.n_ctx), window: None, ..shape };
                let (q, out) = (
                    rows_of(&m.q, &(row..row + 1), width),
                    rows_of_mut(&mut m.attended, &(row..row + 1), width),
                );
                cpu.attention(shape, q, seen, seen, out);
            }
        }
        Ok(())
    }

    /// `blocks`: those that a row sees of the first `n`.
    fn choose_blocks(
        &self,
        l: usize,
        session: usize,
        w: &CompressedWeights,
        row: usize,
        n: usize,
        m: &mut MixerBuffers,
    ) {
        let c = &mut m.compressed;
        let params = self.model.hyper.indexer.as_ref();
        let Some(params) = params.filter(|params| w.sees_chosen && n > params.top_k) else {
            c.blocks.clear();
            return c.blocks.extend(0..n as u32);
        };
        let own = row * params.top_k..(row + 1) * params.top_k;
        c.blocks.resize(params.top_k, 0);
        if w.chooser.is_none() {
            return c.blocks.copy_from_slice(&c.chosen[own]);
        }
        let (_, packed) = self.caches[session].rows(2 * self.model.hyper.n_layers + w.source);
        let keys = unpacked(packed, params.dim);
        let q = rows_of(&c.index_q, &(row..row + 1), params.n_heads * params.dim);
        let weights = rows_of(&c.weights, &(row..row + 1), params.n_heads);
        c.merits.resize(n, 0.0);
        self.cpu.index_scores(q, weights, keys, &mut c.merits);
        if let Some(candidates) = params.candidates.filter(|candidates| l >= candidates.source) {
            c.candidates.resize(self.batch.n_rows() * candidates.n, 0);
            c.keep_candidates(l, row, &candidates);
        }
        best(&c.merits, &mut c.ids, &mut c.blocks);
        c.chosen.resize(self.batch.n_rows() * params.top_k, 0);
        c.chosen[own].copy_from_slice(&c.blocks);
    }
}

impl CompressedBuffers {
    /// Candidates for a row of the batch, if there are more blocks of rows than it takes: they are
    /// chosen in layer `l`, or they are all that has merits.
    fn keep_candidates(&mut self, l: usize, row: usize, params: &Candidates) {
        let n = self.merits.len().div_ceil(params.block);
        if n <= params.n {
            return;
        }
        let chosen = &mut self.candidates[row * params.n..(row + 1) * params.n];
        let mut blocks = self.merits.chunks_mut(params.block);
        if l > params.source {
            let outside = blocks.enumerate().filter(|(b, _)| !chosen.contains(&(*b as u32)));
            return outside.for_each(|(_, merits)| merits.fill(f32::NEG_INFINITY));
        }
        let of_best = |merits: &mut [f32]| merits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let all = &mut self.merits_of_candidates;
        all.clear();
        all.extend(blocks.by_ref().map(of_best));
        all[n - 1] = f32::INFINITY;
        best(all, &mut self.ids, chosen);
    }
}

/// Keeps a row as number `at` of its kind, its scores with those of its place. Returns the values
/// and the scores of all.
pub(super) fn keep<'a>(
    past: &'a mut [f32],
    at: usize,
    row: ScoredRow<'_>,
    place: &[f32],
) -> (&'a [f32], &'a [f32]) {
    let (values, scores) = past.split_at_mut(past.len() / 2);
    let own = at * place.len()..(at + 1) * place.len();
    values[own.clone()].copy_from_slice(row.values);
    let sums = scores[own].iter_mut().zip(row.scores).zip(place);
    sums.for_each(|((to, score), place)| *to = score + place);
    (values, scores)
}

/// The rows that make the compressed one of the block that ends before position `end`.
fn kept_rows<'a>(
    compressor: &'a Compressor,
    end: usize,
    values: &'a [f32],
    scores: &'a [f32],
) -> impl Iterator<Item = ScoredRow<'a>> + Clone {
    let Compressor { dim, ratio, overlaps, .. } = *compressor;
    let (width, n_kept) = (compressor.width(), compressor.n_kept());
    let row = move |position: usize, first: usize| {
        let at = position % n_kept * width + first;
        ScoredRow { values: &values[at..at + dim], scores: &scores[at..at + dim] }
    };
    let begin = end - ratio;
    let before = if overlaps && begin > 0 { begin - ratio..begin } else { 0..0 };
    let own = if overlaps { dim } else { 0 };
    before.map(move |p| row(p, 0)).chain((begin..end).map(move |p| row(p, own)))
}

/// A window's rows and those of chosen blocks, one behind the other, from two places of the cache.
fn gathered<'a>(
    cache: &KvCache,
    [own, packed]: [usize; 2],
    w: &CompressedWeights,
    window: &Range<usize>,
    blocks: &[u32],
    to: &'a mut RowBytes,
) -> Rows<'a> {
    let (dim, ratio) = (w.head_dim, w.ratio);
    let (own, _) = cache.rows(own);
    let (packed, _) = cache.rows(packed);
    let compressed = unpacked(packed, dim);
    let (n, bytes) = (window.len() + blocks.len(), row_bytes(own.ty, dim));
    if to.len() < n * bytes {
        *to = RowBytes::zeroed((n * bytes).next_power_of_two());
    }
    let (near, far) = to[..n * bytes].split_at_mut(window.len() * bytes);
    near.copy_from_slice(&own.data[window.start * bytes..window.end * bytes]);
    for (to, block) in far.chunks_exact_mut(bytes).zip(blocks) {
        let row = row_of_block(ratio, *block as usize);
        to.copy_from_slice(&compressed.data[row * bytes..][..bytes]);
    }
    Rows { data: &to[..n * bytes], n_ctx: n, ..own }
}
