//! Sparse grouped-query attention (Qwen3.8): an indexer with one key a block of positions, the mean
//! of theirs, chooses the blocks that all heads see. A token sees the positions of its own block,
//! too, until it is whole.

use crate::Result;
use crate::backend::cpu::attention::AttentionShape;
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::block_index::Group;
use crate::forward::compressed::unpacked_mut;
use crate::forward::indexer::IndexerBuffers;
use crate::forward::scratch::rows_of;
use crate::model::weights::BlockIndexer;

impl CpuPass<'_, '_> {
    /// Adds the rows' keys to those of their blocks, stores the keys of blocks that they complete,
    /// and chooses blocks for rows that do not see all.
    pub(super) fn index_means(
        &mut self,
        l: usize,
        w: &BlockIndexer,
        h: &[f32],
        m: &mut MixerBuffers,
    ) {
        let (model, cpu) = (self.model, self.cpu);
        let slot = model.hyper.second_slot(l);
        if !self.chooses() {
            // States are noted all the same: whoever asks for them counts on all.
            return self.over_parts(|_, cache, n| cache.note_state(slot, n));
        }
        let Some(params) = &model.hyper.indexer else { return };
        let MixerBuffers { indexer: i, acts, .. } = m;
        self.product(&w.q, h, acts, &mut i.q);
        self.product(&w.k, h, acts, &mut i.k);
        cpu.rms_norm_heads(&mut i.q, &w.q_norm, model.hyper.norm_eps);
        self.store_means(l, w, m);
        let i = &mut m.indexer;
        i.weights.resize(self.batch.n_rows() * params.n_heads);
        i.weights.fill(1.0);
        let shape = model.rope_shape(params.dim, model.hyper.rope_offset);
        self.choose(Some(shape), |cache| cache.rows(slot).0, m);
    }

    fn store_means(&mut self, l: usize, w: &BlockIndexer, m: &mut MixerBuffers) {
        let (model, cpu) = (self.model, self.cpu);
        let Some(params) = &model.hyper.indexer else { return };
        let (dim, block, slot) = (params.dim, params.block, model.hyper.second_slot(l));
        let shape = model.rope_shape(dim, model.hyper.rope_offset);
        let IndexerBuffers { k, pool, .. } = &mut m.indexer;
        self.over_parts(|rows, cache, n| {
            for row in rows.clone() {
                let position = n - rows.len() + row - rows.start;
                let sum = &mut cache.state_mut(slot).past;
                let own = rows_of(k, &(row..row + 1), dim);
                match position.is_multiple_of(block) {
                    true => sum.copy_from_slice(own),
                    false => sum.iter_mut().zip(own).for_each(|(sum, x)| *sum += x),
                }
                if !(position + 1).is_multiple_of(block) {
                    continue;
                }
                pool.key.clear();
                pool.key.extend(sum.iter().map(|x| x / block as f32));
                cpu.rms_norm_heads(&mut pool.key, &w.k_norm, model.hyper.norm_eps);
                pool.turn.fill(model.frequencies(cache.n_ctx()), position + 1 - block, 1);
                cpu.rope(&mut pool.key, shape, &pool.turn);
                let (packed, _) = cache.rows_mut(slot);
                unpacked_mut(packed, dim).store(cpu, &pool.key, position / block);
            }
            cache.note_state(slot, n);
        });
    }

    /// The attention of row `row` to the chosen positions of session `session`. `shape` is that of
    /// a row which sees all.
    pub(super) fn attend_chosen(
        &mut self,
        l: usize,
        session: usize,
        row: usize,
        shape: AttentionShape,
        m: &mut MixerBuffers,
    ) -> Result<()> {
        let (keys, values) = self.caches[session].rows(l);
        let positions = m.indexer.chosen_by(row);
        for head in 0..shape.n_head_kv {
            self.rests.rest()?;
            let rows = [keys.head(head), values.head(head)];
            let group = Group { row, head, rows, positions };
            m.blocks.seen.attend(self.cpu, shape, group, &m.q, &mut m.attended);
        }
        Ok(())
    }
}
