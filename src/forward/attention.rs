//! Grouped-query attention over the KV caches, and what all mixers share.

use crate::Result;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::cpu::rope::RopeTable;
use crate::backend::ops::RopeShape;
use crate::forward::CpuPass;
use crate::forward::gated_delta::DeltaBuffers;
use crate::forward::mla::LatentBuffers;
use crate::forward::parts;
use crate::forward::scratch::{rows_of, rows_of_mut};
use crate::model::Model;
use crate::model::weights::{AttentionWeights, Linear};
use crate::simd::Floats;

/// Buffers of the stage that mixes positions.
#[derive(Default)]
pub struct MixerBuffers {
    pub rope: RopeTable,
    pub q: Floats,        // [rows, n_head, head_dim]
    pub k: Floats,        // [rows, n_head_kv, head_dim]
    pub v: Floats,        // [rows, n_head_kv, head_dim_v]
    pub attended: Floats, // [rows, n_head, head_dim_v]
    pub gate: Floats,     // as `attended`
    pub acts: ActSet,     // the input of one product after the other
    pub latent: LatentBuffers,
    pub delta: DeltaBuffers,
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

impl CpuPass<'_, '_> {
    /// y = attention(h) of layer `l`
    pub(super) fn attention(
        &mut self,
        l: usize,
        w: &AttentionWeights,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (model, cpu) = (self.model, self.cpu);
        let hyper = &model.hyper;
        // q, k, v
        self.queries_keys_values(w, h, m);
        if w.gated {
            m.split_gates(hyper.head_dim);
        }
        // QK-norm
        if let Some(norm) = &w.q_norm {
            cpu.rms_norm_heads(&mut m.q, norm, hyper.norm_eps);
        }
        if let Some(norm) = &w.k_norm {
            cpu.rms_norm_heads(&mut m.k, norm, hyper.norm_eps);
        }
        // RoPE
        let shape = model.rope_shape(hyper.head_dim, hyper.rope_offset);
        cpu.rope(&mut m.q, shape, &m.rope);
        cpu.rope(&mut m.k, shape, &m.rope);
        // cache
        self.store_keys_values(l, m);
        // attention, each text over its own cache
        m.attended.resize(self.batch.n_rows() * hyper.n_head * hyper.head_dim_v);
        for (rows, segment) in self.batch.segments() {
            let shape = AttentionShape {
                n_head: hyper.n_head,
                n_head_kv: hyper.n_head_kv,
                first: segment.past,
                all: None,
                window: w.window,
                scale: hyper.attention_scale,
                sinks: w.sinks.as_deref(),
                bias: None,
            };
            let (keys, values) = self.caches[segment.session].rows(l);
            let q = rows_of(&m.q, &rows, hyper.n_head * hyper.head_dim);
            let out = rows_of_mut(&mut m.attended, &rows, hyper.n_head * hyper.head_dim_v);
            parts::attend(cpu, self.observer, shape, q, [keys, values], out)?;
        }
        if w.gated {
            cpu.kernels.sigmoid(&mut m.gate);
            m.attended.iter_mut().zip(&m.gate[..]).for_each(|(x, gate)| *x *= gate);
        }
        self.attention_output(&w.output, m, y);
        Ok(())
    }

    /// h → q, k, v
    pub(super) fn queries_keys_values(
        &self,
        w: &AttentionWeights,
        h: &[f32],
        m: &mut MixerBuffers,
    ) {
        let (model, n) = (self.model, self.batch.n_rows());
        let kinds = Kinds::of([&w.q, &w.k, &w.v].map(|linear| linear.weight.ty));
        m.acts.fill(self.cpu, kinds, n, model.hyper.n_embd, h);
        self.cpu.products([
            model.linear(&w.q, &m.acts, &mut m.q, n),
            model.linear(&w.k, &m.acts, &mut m.k, n),
            model.linear(&w.v, &m.acts, &mut m.v, n),
        ]);
    }

    /// Appends keys and values of the rows to their texts' caches.
    pub(super) fn store_keys_values(&mut self, layer: usize, m: &MixerBuffers) {
        let hyper = &self.model.hyper;
        let (k_width, v_width) =
            (hyper.n_head_kv * hyper.head_dim, hyper.n_head_kv * hyper.head_dim_v);
        for (rows, segment) in self.batch.segments() {
            let (keys, values) = self.caches[segment.session].rows_mut(layer);
            keys.store(self.cpu, rows_of(&m.k, &rows, k_width), segment.past);
            values.store(self.cpu, rows_of(&m.v, &rows, v_width), segment.past);
        }
    }

    /// y = output · attended
    pub(super) fn attention_output(&self, output: &Linear, m: &mut MixerBuffers, y: &mut Floats) {
        let n = self.batch.n_rows();
        m.acts.fill(self.cpu, Kinds::of([output.weight.ty]), n, output.weight.cols, &m.attended);
        self.cpu.products([self.model.linear(output, &m.acts, y, n)]);
    }
}

impl Model {
    pub(super) fn rope_shape(&self, head_dim: usize, offset: usize) -> RopeShape {
        RopeShape { head_dim, offset, pairing: self.descriptor.parts.rope }
    }
}
