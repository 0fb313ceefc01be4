//! The indexer of sparse latent attention (DeepSeek-V3.2): it chooses the positions that each row
//! sees, if its text is longer than their number.

use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::backend::cpu::attention::index::best;
use crate::backend::ops::{RopeShape, RowBytes, Rows};
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::scratch::rows_of;
use crate::model::weights::Indexer;
use crate::simd::Floats;

#[derive(Default)]
pub struct IndexerBuffers {
    pub q: Floats,   // [rows, n_heads, dim]
    k: Floats,       // [rows, dim]
    normed: Floats,  // [rows, dim]
    weights: Floats, // [rows, n_heads]
    scores: Vec<f32>,
    room: Vec<u32>,
    /// [rows, top_k], of rows behind the first top_k positions of their texts.
    chosen: Vec<u32>,
    top_k: usize,
    /// The rows of one token's positions.
    gathered: RowBytes,
}

impl IndexerBuffers {
    /// Those of a text's latent rows that a row of the batch sees, in ascending order.
    pub fn seen_by<'a>(&'a mut self, cpu: &Cpu, row: usize, latent: Rows) -> Rows<'a> {
        let chosen = &self.chosen[row * self.top_k..][..self.top_k];
        cpu.gather_rows(latent, chosen, &mut self.gathered)
    }
}

/// The norm of keys has this, as a rule whatever the model's.
const KEY_EPS: f32 = 1e-6;

impl CpuPass<'_, '_> {
    /// Whether some row of some text of this size may see fewer positions than all.
    pub(super) fn chooses(&self) -> bool {
        let indexer = self.model.hyper.indexer.as_ref();
        indexer.is_some_and(|indexer| indexer.chooses(self.caches[0].n_ctx()))
    }

    /// Appends the rows' keys to their texts' caches, and keeps the heads' weights.
    pub(super) fn indexer_keys(&mut self, l: usize, w: &Indexer, h: &[f32], m: &mut MixerBuffers) {
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
        let own = model.descriptor.parts.indexer_eps_is_models;
        let eps = if own { model.hyper.norm_eps } else { KEY_EPS };
        cpu.layer_norm_rows(&i.k, (weight, bias), eps, &mut i.normed);
        let shape = RopeShape { head_dim: weight.len(), offset: w.rope_offset, pairing: w.pairing };
        cpu.rope(&mut i.normed, shape, &m.ropes.main);
        for (rows, segment) in self.batch.segments() {
            let (_, keys) = self.caches[segment.session].rows_mut(l);
            keys.store(cpu, rows_of(&i.normed, &rows, weight.len()), segment.past);
        }
    }

    /// Chooses positions for all rows that do not see all, by queries that are there.
    pub(super) fn choose_positions(&mut self, l: usize, w: &Indexer, m: &mut MixerBuffers) {
        let Some(params) = &self.model.hyper.indexer else { return };
        let (cpu, i) = (self.cpu, &mut m.indexer);
        let (n_heads, dim, top_k) = (params.n_heads, params.dim, params.top_k);
        let shape = RopeShape { head_dim: dim, offset: w.rope_offset, pairing: w.pairing };
        cpu.rope(&mut i.q, shape, &m.ropes.main);
        i.top_k = top_k;
        i.chosen.resize(self.batch.n_rows() * top_k, 0);
        for (rows, segment) in self.batch.segments() {
            let (_, keys) = self.caches[segment.session].rows(l);
            for row in rows.clone() {
                let n_seen = segment.past + row - rows.start + 1;
                if n_seen <= top_k {
                    continue;
                }
                i.scores.resize(n_seen, 0.0);
                let q = &i.q[row * n_heads * dim..][..n_heads * dim];
                cpu.index_scores(q, &i.weights[row * n_heads..][..n_heads], keys, &mut i.scores);
                best(&i.scores, &mut i.room, &mut i.chosen[row * top_k..][..top_k]);
            }
        }
    }
}
