//! An indexer with one key for the positions of a block (GLM-5.3): in each element the mean of
//! their keys, weighed by the softmax of their scores.

use crate::backend::cpu::compress::ScoredRow;
use crate::backend::cpu::rope::RopeTable;
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::compressed::{keep, unpacked_mut};
use crate::forward::indexer::IndexerBuffers;
use crate::forward::scratch::rows_of;
use crate::model::weights::KeyPool;
use crate::simd::Floats;

#[derive(Default)]
pub struct PoolBuffers {
    scores: Floats, // [rows, dim]
    room: Vec<f32>,
    pub key: Vec<f32>, // a block's
    pub turn: RopeTable,
}

impl CpuPass<'_, '_> {
    /// Keeps the rows' keys, which are normalised, and their scores, and stores the keys of blocks
    /// that they complete.
    pub(super) fn pool_keys(&mut self, l: usize, pool: &KeyPool, h: &[f32], m: &mut MixerBuffers) {
        let Some(params) = &self.model.hyper.indexer else { return };
        let (cpu, dim, block) = (self.cpu, params.dim, params.block);
        let MixerBuffers { acts, indexer, .. } = m;
        let IndexerBuffers { normed, pool: p, .. } = indexer;
        self.product(&pool.scores, h, acts, &mut p.scores);
        self.over_parts(|rows, cache, n| {
            for row in rows.clone() {
                let position = n - rows.len() + row - rows.start;
                let (own, at) = (row..row + 1, position % block);
                let own = ScoredRow {
                    values: rows_of(normed, &own, dim),
                    scores: rows_of(&p.scores, &own, dim),
                };
                let past = &mut cache.state_mut(l).past[..2 * block * dim];
                let place = &pool.places[at * dim..][..dim];
                let (keys, scores) = keep(past, at, own, place);
                if !(position + 1).is_multiple_of(block) {
                    continue;
                }
                let kept = keys.chunks_exact(dim).zip(scores.chunks_exact(dim));
                let kept = kept.map(|(values, scores)| ScoredRow { values, scores });
                p.key.resize(dim, 0.0);
                cpu.compress_rows(kept, &mut p.room, &mut p.key);
                let (_, packed) = cache.rows_mut(l);
                unpacked_mut(packed, dim).store(cpu, &p.key, position / block);
            }
            cache.note_state(l, n);
        });
    }
}
