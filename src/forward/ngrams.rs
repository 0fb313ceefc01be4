//! Embeddings of the last tokens together, which join the residual streams before a layer: hashes
//! name rows of a table; a gate a stream weighs what the rows make, and a convolution carries it on
//! to the next tokens (Qwen3.8; DeepSeek-V4.1 has none).

use crate::Result;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::forward::CpuPass;
use crate::forward::scratch::{rows_of, rows_of_mut};
use crate::model::Model;
use crate::model::ngrams::NgramParams;
use crate::model::weights::NgramWeights;
use crate::quant;
use crate::simd::Floats;

#[derive(Default)]
pub struct NgramBuffers {
    before: Vec<Option<u32>>, // tokens of a text, behind those that its state has
    ids: Vec<usize>,          // [hashes], rows of the table
    read: Vec<u8>,            // one of these, where the file is not mapped
    pub embedded: Floats,     // [rows, width]
    n_embedded: usize,        // values of it that are there
    acts: ActSet,
    value: Floats, // [rows, n_embd]
    key: Floats,   // [rows, n, n_embd], as the next three
    query: Floats,
    normed: Floats,
    convolved: Floats,
}

impl NgramBuffers {
    /// Forgets rows of the table, of which there will be so many values.
    pub fn begin(&mut self, n_values: usize) {
        self.embedded.resize(n_values);
        self.n_embedded = 0;
    }

    /// The table's rows of these tokens of a text, behind those of other texts. `state`: what it
    /// remembers of the tokens before them. A table is never in memory: each row is read from the
    /// file when it is asked for.
    pub fn look_up(
        &mut self,
        model: &Model,
        params: &NgramParams,
        state: &[f32],
        tokens: &[u32],
    ) -> Result<()> {
        let table = model.weights.ngram_table.as_ref().expect("bound with the layer's weights");
        self.before.clear();
        self.before.extend(state.iter().map(|id| (*id as u32).checked_sub(1)));
        for token in tokens {
            self.ids.clear();
            let known = &self.before[self.before.len() - params.n_before()..];
            params.rows(*token, known, &mut self.ids);
            let own = &mut self.embedded[self.n_embedded..][..params.width()];
            for (to, id) in own.chunks_exact_mut(params.dim).zip(&self.ids) {
                quant::dequantize(table.ty, table.read_row(&model.gguf, *id, &mut self.read)?, to);
            }
            self.n_embedded += params.width();
            self.before.push(Some(*token));
        }
        Ok(())
    }
}

impl CpuPass<'_, '_> {
    /// streams += what the last tokens make of them, before layer `l`
    pub(super) fn add_ngrams(
        &mut self,
        l: usize,
        w: &NgramWeights,
        g: &mut NgramBuffers,
        streams: &mut Floats,
    ) -> Result<()> {
        let (model, cpu, n_rows) = (self.model, self.cpu, self.batch.n_rows());
        let (eps, n_embd, channels) = (model.hyper.norm_eps, model.hyper.n_embd, w.params.channels);
        let n = channels / n_embd;
        self.look_up(l, w, g)?;
        let kinds = Kinds::of([&w.key, &w.value].map(|linear| linear.weight.ty));
        g.acts.fill(cpu, kinds, n_rows, w.params.width(), &g.embedded);
        cpu.products([
            model.linear(&w.key, &g.acts, &mut g.key, n_rows),
            model.linear(&w.value, &g.acts, &mut g.value, n_rows),
        ]);
        g.query.copy_from(std::iter::once(&streams[..]));
        cpu.rms_norm_groups(&mut g.key, &w.key_norm, n, eps);
        cpu.rms_norm_groups(&mut g.query, &w.query_norm, n, eps);
        // gate · value, in the key's place
        cpu.gate_ngrams(n_rows, &mut g.key, &g.query, &g.value, w.conv.is_none());
        if let Some(conv) = &w.conv {
            g.normed.copy_from(std::iter::once(&g.key[..]));
            cpu.rms_norm_groups(&mut g.normed, &conv.norm, n, eps);
        }
        self.convolve(l, w, g);
        if w.conv.is_some() {
            cpu.add(&mut g.key, &g.convolved);
        }
        cpu.add(streams, &g.key);
        Ok(())
    }

    /// The table's rows of all tokens.
    fn look_up(&mut self, l: usize, w: &NgramWeights, g: &mut NgramBuffers) -> Result<()> {
        let slot = self.model.hyper.ngram_slot(l);
        let n_past = w.params.conv().n_past();
        g.begin(self.batch.n_rows() * w.params.width());
        for (rows, segment) in self.batch.segments() {
            let before = &self.caches[segment.session].state_mut(slot).past[n_past..];
            g.look_up(self.model, &w.params, before, &self.batch.tokens()[rows])?;
        }
        Ok(())
    }

    /// The convolution of each text's rows, if there is one; the state keeps the last tokens.
    fn convolve(&mut self, l: usize, w: &NgramWeights, g: &mut NgramBuffers) {
        let (cpu, batch, channels) = (self.cpu, self.batch, w.params.channels);
        let (n_before, n_past) = (w.params.n_before(), w.params.conv().n_past());
        g.convolved.resize(g.normed.len());
        self.over_states(self.model.hyper.ngram_slot(l), |rows, state| {
            let (past, ids) = state.past.split_at_mut(n_past);
            if let Some(conv) = &w.conv {
                let out = rows_of_mut(&mut g.convolved, rows, channels);
                cpu.short_conv(&conv.form.form(), past, rows_of(&g.normed, rows, channels), out);
            }
            // Ids are below 2²⁴, so that an f32 has them exactly.
            let n_new = rows.len().min(n_before);
            ids.copy_within(n_new.., 0);
            let last = &batch.tokens()[rows.end - n_new..rows.end];
            ids[n_before - n_new..].iter_mut().zip(last).for_each(|(to, id)| *to = (id + 1) as f32);
        });
    }
}
