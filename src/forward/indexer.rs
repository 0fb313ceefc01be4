//! The indexer of sparse latent attention (DeepSeek-V3.2): it chooses the positions that each row
//! sees, if its text is longer than their number, or blocks of them (GLM-5.3).

use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::backend::cpu::attention::index::best;
use crate::backend::ops::{RopeShape, RowBytes, Rows};
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::compressed::unpacked;
use crate::forward::pooled_index::PoolBuffers;
use crate::forward::scratch::rows_of;
use crate::model::kv::KvCache;
use crate::model::weights::Indexer;
use crate::simd::Floats;

#[derive(Default)]
pub struct IndexerBuffers {
    pub q: Floats,       // [rows, n_heads, dim]
    pub k: Floats,       // [rows, dim]
    pub normed: Floats,  // [rows, dim]
    pub input: Floats,   // [rows, n_embd]
    pub factors: Floats, // [rows, n_heads]
    pub weights: Floats, // [rows, n_heads]
    pub pool: PoolBuffers,
    scores: Vec<f32>,
    room: Vec<u32>,
    blocks: Vec<u32>,
    /// Positions, [rows, width], of rows that do not see all of their texts.
    chosen: Vec<u32>,
    /// By row: how many they are.
    n_chosen: Vec<usize>,
    width: usize,
    /// The rows of one token's positions.
    gathered: RowBytes,
}

impl IndexerBuffers {
    /// The positions that a row of the batch sees, in ascending order.
    pub fn chosen_by(&self, row: usize) -> &[u32] {
        &self.chosen[row * self.width..][..self.n_chosen[row]]
    }

    /// The latent rows of a text that a row of the batch sees, in ascending order.
    pub fn seen_by<'a>(&'a mut self, cpu: &Cpu, row: usize, latent: Rows) -> Rows<'a> {
        let chosen = &self.chosen[row * self.width..][..self.n_chosen[row]];
        cpu.gather_rows(latent, chosen, &mut self.gathered)
    }
}

impl CpuPass<'_, '_> {
    /// Whether some row of some text of this size may see fewer positions than all.
    pub(super) fn chooses(&self) -> bool {
        self.model.hyper.choosing_indexer(self.caches[0].n_ctx()).is_some()
    }

    /// Appends the rows' keys to their texts' caches, and keeps the heads' weights and queries that
    /// are made of the input, if positions are chosen.
    pub(super) fn indexer_keys(&mut self, l: usize, w: &Indexer, h: &[f32], m: &mut MixerBuffers) {
        if !self.chooses() {
            // States are noted all the same: whoever asks for them counts on all.
            return self.over_parts(|_, cache, n| cache.note_state(l, n));
        }
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        let i = &mut m.indexer;
        let kinds = Kinds::of([&w.k, &w.weights].map(|linear| linear.weight.ty));
        m.acts.fill(cpu, kinds, n, model.hyper.n_embd, h);
        cpu.products([
            model.linear(&w.k, &m.acts, &mut i.k, n),
            model.linear(&w.weights, &m.acts, &mut i.weights, n),
        ]);
        let [weight, bias] = &w.k_norm;
        i.normed.resize(i.k.len());
        let Some(params) = &model.hyper.indexer else { return };
        cpu.layer_norm_rows(&i.k, (weight, bias), params.key_eps, &mut i.normed);
        if let Some(rope) = w.rope {
            cpu.rope(&mut i.normed, rope, &m.ropes.main);
        }
        if let Some([weight, bias]) = &w.q_norm {
            i.input.resize(h.len());
            cpu.layer_norm_rows(h, (weight, bias), params.key_eps, &mut i.input);
            self.product(&w.q, &i.input, &mut m.acts, &mut i.q);
        }
        if let Some(pool) = &w.pool {
            return self.pool_keys(l, pool, h, m);
        }
        for (rows, segment) in self.batch.segments() {
            let (_, keys) = self.caches[segment.session].rows_mut(l);
            keys.store(cpu, rows_of(&i.normed, &rows, weight.len()), segment.past);
        }
    }

    /// Chooses positions for all rows that do not see all, by queries that are there.
    pub(super) fn choose_positions(&mut self, l: usize, w: &Indexer, m: &mut MixerBuffers) {
        if let Some(factors) = &w.head_factors {
            let MixerBuffers { ropes, acts, indexer: i, .. } = m;
            self.multiply_heads(factors, ropes, acts, &mut i.factors, &mut i.q);
        }
        self.choose(w.rope, |cache| cache.rows(l).1, m);
    }

    /// Chooses among a text's keys, which may be of blocks, by queries that turn so, if they do.
    pub(super) fn choose(
        &mut self,
        shape: Option<RopeShape>,
        keys_of: impl Fn(&KvCache) -> Rows<'_>,
        m: &mut MixerBuffers,
    ) {
        let Some(params) = &self.model.hyper.indexer else { return };
        let (cpu, i) = (self.cpu, &mut m.indexer);
        let (n_heads, dim, block) = (params.n_heads, params.dim, params.block);
        if let Some(shape) = shape {
            cpu.rope(&mut i.q, shape, &m.ropes.main);
        }
        // Those of a row's own block are seen, too.
        i.width = params.n_all() + block - 1;
        i.chosen.resize(self.batch.n_rows() * i.width, 0);
        i.n_chosen.resize(self.batch.n_rows(), 0);
        for (rows, segment) in self.batch.segments() {
            let keys = unpacked(keys_of(self.caches[segment.session]), dim);
            for row in rows.clone() {
                let n_seen = segment.past + row - rows.start + 1;
                if n_seen <= params.n_all() {
                    continue;
                }
                let n_blocks = n_seen / block;
                i.blocks.clear();
                if n_blocks <= params.top_k {
                    i.blocks.extend(0..n_blocks as u32);
                } else {
                    i.scores.resize(n_blocks, 0.0);
                    let q = &i.q[row * n_heads * dim..][..n_heads * dim];
                    let weights = &i.weights[row * n_heads..][..n_heads];
                    cpu.index_scores(q, weights, keys, &mut i.scores);
                    i.blocks.resize(params.top_k, 0);
                    best(&i.scores, &mut i.room, &mut i.blocks);
                }
                let of_block = |b: &u32| (*b as usize * block..).take(block);
                let seen = i.blocks.iter().flat_map(of_block).chain(n_blocks * block..n_seen);
                let places = i.chosen[row * i.width..].iter_mut();
                i.n_chosen[row] = places.zip(seen).map(|(to, seen)| *to = seen as u32).count();
            }
        }
    }
}
