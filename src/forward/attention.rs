//! Grouped-query attention over the KV caches, and what all mixers share.

use crate::Result;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::cpu::rope::RopeTable;
use crate::backend::ops::RopeShape;
use crate::forward::CpuPass;
use crate::forward::block_index::BlockBuffers;
use crate::forward::compressed::CompressedBuffers;
use crate::forward::gated_delta::DeltaBuffers;
use crate::forward::indexer::IndexerBuffers;
use crate::forward::kda::KdaBuffers;
use crate::forward::mixer::CpuMixer;
use crate::forward::mla::LatentBuffers;
use crate::forward::parts;
use crate::forward::recurrent::RecurrentBuffers;
use crate::forward::scratch::{rows_of, rows_of_mut};
use crate::model::Model;
use crate::model::descriptor::ValueGate;
use crate::model::rope::Temperature;
use crate::model::weights::{AttentionWeights, Linear};
use crate::simd::Floats;
use std::ops::Range;

/// Buffers of the stage that mixes positions.
#[derive(Default)]
pub struct MixerBuffers {
    pub ropes: RopeTables,
    pub q: Floats,        // [rows, n_head, head_dim]
    pub k: Floats,        // [rows, n_head_kv, head_dim]
    pub v: Floats,        // [rows, n_head_kv, head_dim_v]
    pub attended: Floats, // [rows, n_head, head_dim_v]
    pub gate: Floats,     // as `attended`
    pub factors: Floats,  // [rows, n_head]
    pub acts: ActSet,     // the input of one product after the other
    pub latent: LatentBuffers,
    pub indexer: IndexerBuffers,
    pub blocks: BlockBuffers,
    pub compressed: CompressedBuffers,
    pub delta: DeltaBuffers,
    pub kda: KdaBuffers,
    pub recurrent: RecurrentBuffers,
}

/// Rotations of queries and keys and factors on queries, for each row.
#[derive(Default)]
pub struct RopeTables {
    pub main: RopeTable,
    /// For sliding layers; empty where they turn as the others do.
    pub sliding: RopeTable,
    /// For the first positions of the rows' blocks; empty unless an indexer has means of blocks.
    pub blocks: RopeTable,
    /// Factors on queries, or what each head makes its own of; empty in a model without a
    /// temperature.
    pub temperature: RopeTable,
}

impl RopeTables {
    pub fn clear(&mut self) {
        self.main.clear();
        self.sliding.clear();
        self.blocks.clear();
        self.temperature.clear();
    }

    /// Adds rows of these positions, in a session of `n_ctx`.
    pub fn push(&mut self, model: &Model, n_ctx: usize, positions: Range<usize>) {
        let (first, n) = (positions.start, positions.len());
        self.main.push(model.frequencies(n_ctx), first, n);
        if let Some(frequencies) = &model.sliding_frequencies {
            self.sliding.push(frequencies, first, n);
        }
        if let Some(block) = model.hyper.means_block() {
            for position in positions.clone() {
                self.blocks.push(model.frequencies(n_ctx), position / block * block, 1);
            }
        }
        if let Some(temperature) = model.hyper.temperature {
            // A factor turns nothing; heads' own factors have a bias.
            let second = if temperature == Temperature::Heads { 1.0 } else { 0.0 };
            let n_pairs = model.hyper.temperature_width() / 2;
            self.temperature.push_pairs(n_pairs, |at| [temperature.at(at), second], positions);
        }
    }

    /// The table of a layer that slides or does not.
    pub fn of_layer(&self, slides: bool) -> &RopeTable {
        if slides && !self.sliding.turns().is_empty() { &self.sliding } else { &self.main }
    }
}

impl MixerBuffers {
    /// `q` with [q, gate] a head → `q` and `gate`.
    fn split_gates(&mut self, head_dim: usize) {
        self.gate.copy_from(self.q.chunks_exact(2 * head_dim).map(|head| &head[head_dim..]));
        let n_heads = self.q.len() / (2 * head_dim);
        for head in 1..n_heads {
            let start = 2 * head * head_dim;
            self.q.copy_within(start..start + head_dim, head * head_dim);
        }
        self.q.resize(n_heads * head_dim);
    }
}

impl CpuMixer for AttentionWeights {
    /// y = attention(h)
    fn mix(
        &self,
        pass: &mut CpuPass,
        l: usize,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (model, cpu) = (pass.model, pass.cpu);
        let hyper = &model.hyper;
        // q, k, v
        pass.queries_keys_values(self, h, m);
        if self.gated {
            m.split_gates(self.head_dim);
        }
        if let Some(limit) = hyper.qkv_limit {
            let all = [&mut m.q, &mut m.k, &mut m.v];
            all.into_iter().for_each(|x| x.iter_mut().for_each(|x| *x = x.clamp(-limit, limit)));
        }
        // QK-norm, RoPE
        let norm_after_rope = model.descriptor.parts.norm_after_rope;
        if !norm_after_rope {
            pass.norm_heads(self, m);
        }
        if self.rotates {
            let shape = model.rope_shape(self.head_dim, hyper.rope_offset);
            let table = m.ropes.of_layer(self.slides);
            cpu.rope(&mut m.q, shape, table);
            if self.shared_with.is_none() {
                cpu.rope(&mut m.k, shape, table);
            }
        }
        if norm_after_rope {
            pass.norm_heads(self, m);
        }
        if self.tempers {
            cpu.rope(&mut m.q, model.rope_shape(self.head_dim, 0), &m.ropes.temperature);
        }
        // cache
        if self.shared_with.is_none() {
            pass.store_keys_values(l, m);
        }
        match &self.index {
            Some(index) if index.means => pass.index_means(l, index, h, m),
            Some(index) if pass.chooses() => pass.index_blocks(l, index, h, m),
            _ => {}
        }
        // attention, each text over its own cache
        pass.attend_all(l, self, m)?;
        if let Some(norm) = &self.result_norm {
            cpu.rms_norm_heads(&mut m.attended, norm, hyper.norm_eps);
        }
        pass.gate_values(self, m);
        pass.attention_output(&self.output, m, y);
        if hyper.attention_output_scale != 1.0 {
            y.iter_mut().for_each(|y| *y *= hyper.attention_output_scale);
        }
        Ok(())
    }
}

impl CpuPass<'_, '_> {
    /// attended = attention of q, each text over its own cache.
    fn attend_all(&mut self, l: usize, w: &AttentionWeights, m: &mut MixerBuffers) -> Result<()> {
        let (cpu, hyper) = (self.cpu, &self.model.hyper);
        let chooses = w.index.is_some() && self.chooses();
        let (n_head, n_head_kv) = (w.n_head, w.n_head_kv);
        m.attended.resize(self.batch.n_rows() * n_head * w.head_dim_v);
        for (rows, segment) in self.batch.segments() {
            let shape = AttentionShape {
                n_head,
                n_head_kv,
                first: segment.past,
                all: hyper.sees_all.then_some(segment.past + rows.len()),
                window: w.window,
                chunk: w.chunk,
                scale: hyper.attention_scale,
                cap: hyper.attention_cap,
                sinks: w.sinks.as_deref(),
                bias: w.bias.as_ref(),
            };
            let (keys, values) = self.caches[segment.session].rows(w.shared_with.unwrap_or(l));
            // Rows that see all positions, then those that see chosen ones.
            let dense = match chooses {
                false => rows.clone(),
                true => self.rows_without_choice(&rows, segment.past),
            };
            let q = rows_of(&m.q, &dense, n_head * w.head_dim);
            let out = rows_of_mut(&mut m.attended, &dense, n_head * w.head_dim_v);
            parts::attend(cpu, self.rests, shape, q, [keys, values], out)?;
            for row in dense.end..rows.end {
                let n_seen = segment.past + row - rows.start + 1;
                match &w.index {
                    Some(index) if index.means => {
                        self.attend_chosen(l, segment.session, row, shape, m)?;
                    }
                    _ => self.attend_blocks(l, segment.session, row, n_seen, shape, m)?,
                }
            }
        }
        Ok(())
    }

    /// attended *= function(gate), of which there is a number an element or a head.
    fn gate_values(&self, w: &AttentionWeights, m: &mut MixerBuffers) {
        match &w.gate {
            None if !w.gated => return,
            Some((_, ValueGate::Softplus)) => self.cpu.softplus(&mut m.gate),
            Some((_, ValueGate::BinarySoftplus)) => {
                m.gate.iter_mut().for_each(|x| *x *= std::f32::consts::LN_2);
                self.cpu.softplus(&mut m.gate);
                m.gate.iter_mut().for_each(|x| *x *= std::f32::consts::LOG2_E);
            }
            Some((_, ValueGate::Sigmoid)) | None => self.cpu.kernels.sigmoid(&mut m.gate),
        }
        let each = m.attended.len() / m.gate.len();
        for (x, gate) in m.attended.chunks_exact_mut(each).zip(&m.gate[..]) {
            x.iter_mut().for_each(|x| *x *= gate);
        }
    }

    fn norm_heads(&self, w: &AttentionWeights, m: &mut MixerBuffers) {
        let (eps, by_head) =
            (self.model.hyper.norm_eps, self.model.descriptor.parts.qk_norm_by_head);
        let norms = [(&w.q_norm, &mut m.q), (&w.k_norm, &mut m.k)];
        for (norm, x) in norms.into_iter().filter_map(|(norm, x)| Some((norm.as_ref()?, x))) {
            match by_head {
                true => self.cpu.rms_norm_groups(x, norm, norm.len() / w.head_dim, eps),
                false => self.cpu.rms_norm_heads(x, norm, eps),
            }
        }
        if let Some(norm) = &w.v_norm {
            self.cpu.rms_norm_heads(&mut m.v, norm, eps);
        }
    }

    /// h → q, k, v, unless experts have made it, and the values' gate if it has a matrix of its own
    pub(super) fn queries_keys_values(
        &self,
        w: &AttentionWeights,
        h: &[f32],
        m: &mut MixerBuffers,
    ) {
        let (model, n) = (self.model, self.batch.n_rows());
        let gate = w.gate.as_ref().map(|(gate, _)| gate);
        let is_own = w.shared_with.is_none();
        let own = [&w.k, &w.v].into_iter().filter(|linear| is_own && linear.weight.rows > 0);
        let inputs = [&w.q].into_iter().chain(own).chain(gate);
        let kinds = Kinds::of(inputs.map(|linear| linear.weight.ty));
        m.acts.fill(self.cpu, kinds, n, model.hyper.n_embd, h);
        if w.values.is_some() {
            let (q, k) = (&mut m.q, &mut m.k);
            self.cpu.products([self.linear(&w.q, &m.acts, q, n), self.linear(&w.k, &m.acts, k, n)]);
        } else if is_own {
            self.cpu.products([
                self.linear(&w.q, &m.acts, &mut m.q, n),
                self.linear(&w.k, &m.acts, &mut m.k, n),
                self.linear(&w.v, &m.acts, &mut m.v, n),
            ]);
        } else {
            self.cpu.products([self.linear(&w.q, &m.acts, &mut m.q, n)]);
        }
        if let Some(gate) = gate {
            self.cpu.products([self.linear(gate, &m.acts, &mut m.gate, n)]);
        }
    }

    /// Appends keys and values of the rows to their texts' caches.
    pub(super) fn store_keys_values(&mut self, layer: usize, m: &MixerBuffers) {
        let n = self.batch.n_rows();
        let (k_width, v_width) = (m.k.len() / n, m.v.len() / n);
        for (rows, segment) in self.batch.segments() {
            let (keys, values) = self.caches[segment.session].rows_mut(layer);
            // An indexer's keys may be behind them.
            let (n, n_values) = (k_width / keys.dim, v_width / values.dim);
            keys.heads(0..n).store(self.cpu, rows_of(&m.k, &rows, k_width), segment.past);
            values.heads(0..n_values).store(self.cpu, rows_of(&m.v, &rows, v_width), segment.past);
        }
    }

    /// y = output · attended
    pub(super) fn attention_output(&self, output: &Linear, m: &mut MixerBuffers, y: &mut Floats) {
        let n = self.batch.n_rows();
        m.acts.fill(self.cpu, Kinds::of([output.weight.ty]), n, output.weight.cols, &m.attended);
        self.cpu.products([self.linear(output, &m.acts, y, n)]);
    }
}

impl Model {
    pub(super) fn rope_shape(&self, head_dim: usize, offset: usize) -> RopeShape {
        RopeShape { head_dim, offset, pairing: self.hyper.rope_pairing }
    }
}
