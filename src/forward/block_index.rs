//! Sparse grouped-query attention (MiniMax-M3): for each head of keys an indexer's head scores the
//! positions, a block of them is as good as its best, and queries of the group see the best blocks.

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::cpu::attention::index::best;
use crate::backend::ops::{RowBytes, Rows};
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::scratch::rows_of;
use crate::model::indexer::IndexerParams;
use crate::model::weights::BlockIndexer;
use crate::simd::Floats;
use std::ops::Range;

#[derive(Default)]
pub struct BlockBuffers {
    q: Floats, // [rows, heads of keys, dim]
    k: Floats, // [rows, dim]
    scores: Vec<f32>,
    room: Vec<u32>,
    blocks: Vec<u32>,
    positions: Vec<u32>,
    pub seen: SeenRows,
}

/// Keys and values that a token sees, gathered.
#[derive(Default)]
pub struct SeenRows {
    keys: RowBytes,
    values: RowBytes,
}

/// Heads of queries that share one of keys, of a row of the batch, and what they see.
pub struct Group<'a> {
    pub row: usize,
    pub head: usize,
    /// The head's keys and values.
    pub rows: [Rows<'a>; 2],
    pub positions: &'a [u32],
}

impl CpuPass<'_, '_> {
    /// h → an indexer's queries, and its keys behind the heads of keys in the texts' caches.
    pub(super) fn index_blocks(
        &mut self,
        l: usize,
        w: &BlockIndexer,
        h: &[f32],
        m: &mut MixerBuffers,
    ) {
        let (model, cpu, eps) = (self.model, self.cpu, self.model.hyper.norm_eps);
        let b = &mut m.blocks;
        self.product(&w.q, h, &mut m.acts, &mut b.q);
        self.product(&w.k, h, &mut m.acts, &mut b.k);
        let shape = model.rope_shape(w.k_norm.len(), model.hyper.rope_offset);
        for (x, norm) in [(&mut b.q, &w.q_norm), (&mut b.k, &w.k_norm)] {
            cpu.rms_norm_heads(x, norm, eps);
            cpu.rope(x, shape, &m.ropes.main);
        }
        for (rows, segment) in self.batch.segments() {
            let (keys, _) = self.caches[segment.session].rows_mut(l);
            let n = keys.n_heads();
            keys.heads(n - 1..n).store(cpu, rows_of(&b.k, &rows, w.k_norm.len()), segment.past);
        }
    }

    /// The first of a text's rows that see all positions.
    pub(super) fn rows_without_choice(&self, rows: &Range<usize>, past: usize) -> Range<usize> {
        let n_all = self.model.hyper.indexer.as_ref().map_or(usize::MAX, IndexerParams::n_all);
        rows.start..rows.end.min(rows.start.saturating_add(n_all.saturating_sub(past)))
    }

    /// The attention of row `row` to the `n_seen` first positions of session `session`, of each
    /// group to its own. `shape` is that of a row which sees all.
    pub(super) fn attend_blocks(
        &mut self,
        l: usize,
        session: usize,
        row: usize,
        n_seen: usize,
        shape: AttentionShape,
        m: &mut MixerBuffers,
    ) -> Result<()> {
        let Some(params) = &self.model.hyper.indexer else { return Ok(()) };
        let (keys, values) = self.caches[session].rows(l);
        let n_kv = shape.n_head_kv;
        let b = &mut m.blocks;
        for head in 0..n_kv {
            self.rests.rest()?;
            let q = &b.q[(row * n_kv + head) * params.dim..][..params.dim];
            b.scores.resize(n_seen.div_ceil(params.block), 0.0);
            self.cpu.block_scores(q, keys.head(n_kv), n_seen, params.block, &mut b.scores);
            let n_near = params.n_near.min(b.scores.len());
            let near = b.scores.len() - n_near;
            b.scores[near..].fill(f32::INFINITY);
            b.blocks.resize(params.top_k, 0);
            best(&b.scores, &mut b.room, &mut b.blocks);
            let of_block = |block: &u32| {
                let first = *block as usize * params.block;
                first as u32..n_seen.min(first + params.block) as u32
            };
            b.positions.clear();
            b.positions.extend(b.blocks.iter().flat_map(of_block));
            let rows = [keys.head(head), values.head(head)];
            let group = Group { row, head, rows, positions: &b.positions };
            b.seen.attend(self.cpu, shape, group, &m.q, &mut m.attended);
        }
        Ok(())
    }
}

impl SeenRows {
    /// The attention of a group. `shape` is that of a row which sees all; `q` and `out` have all
    /// rows of the batch.
    pub fn attend(
        &mut self,
        cpu: &Cpu,
        shape: AttentionShape,
        group: Group,
        q: &[f32],
        out: &mut [f32],
    ) {
        let Group { row, head, rows: [keys, values], positions } = group;
        let n_head = shape.n_head / shape.n_head_kv;
        let keys = cpu.gather_rows(keys, positions, &mut self.keys);
        let values = cpu.gather_rows(values, positions, &mut self.values);
        let own = AttentionShape {
            n_head,
            n_head_kv: 1,
            first: 0,
            all: Some(positions.len()),
            sinks: shape.sinks.map(|sinks| &sinks[head * n_head..][..n_head]),
            ..shape
        };
        let first = row * shape.n_head + head * n_head;
        let q = &q[first * keys.dim..][..n_head * keys.dim];
        let out = &mut out[first * values.dim..][..n_head * values.dim];
        cpu.attention(own, q, keys, values, out);
    }
}
