//! Attention of a text to itself and of the decoder to the source text: grouped-query attention
//! without rotation.

use crate::backend::cpu::acts::Kinds;
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::ops::DistanceBias;
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::scratch::{rows_of, rows_of_mut};
use crate::model::kv::KvCache;
use crate::model::weights::AttentionWeights;
use crate::simd::Floats;
use std::ops::Range;

/// The positions that a query sees.
#[derive(Clone, Copy)]
pub enum Sees {
    /// Positions of its own text up to its own (decoder).
    UpToItself,
    /// All of its own text, which is one segment (encoder).
    WholeText,
    /// All of the source text (cross-attention).
    Source,
}

/// The positions that queries see.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Layer of the cache.
    pub slot: usize,
    pub sees: Sees,
    pub bias: Option<&'a DistanceBias>,
}

impl CpuPass<'_, '_> {
    /// y = attention(h); the rows' keys and values go into the cache.
    pub(super) fn self_attention(
        &mut self,
        w: &AttentionWeights,
        view: View,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) {
        self.queries_keys_values(w, h, m);
        self.store_keys_values(view.slot, m);
        self.attend(view, m);
        self.attention_output(&w.output, m, y);
    }

    /// y = attention(h); the keys and values are in the cache.
    pub(super) fn cross_attention(
        &mut self,
        w: &AttentionWeights,
        view: View,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) {
        let (model, n) = (self.model, self.batch.n_rows());
        m.acts.fill(self.cpu, Kinds::of([w.q.weight.ty]), n, model.hyper.n_embd, h);
        self.cpu.products([model.linear(&w.q, &m.acts, &mut m.q, n)]);
        self.attend(view, m);
        self.attention_output(&w.output, m, y);
    }

    /// Keys and values of the source texts, h, for `layers` of the decoder: into `caches`, not into
    /// the encoder's own.
    pub(crate) fn cross_keys(
        &self,
        layers: Range<usize>,
        caches: &mut [&mut KvCache],
        h: &[f32],
        m: &mut MixerBuffers,
    ) {
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        let hyper = &model.hyper;
        let (k_width, v_width) =
            (hyper.n_head_kv * hyper.head_dim, hyper.n_head_kv * hyper.head_dim_v);
        for l in layers {
            let cross = model.cross_attention_of(l).expect("a layer of the decoder");
            let w = &cross.attention;
            let kinds = Kinds::of([w.k.weight.ty, w.v.weight.ty]);
            m.acts.fill(cpu, kinds, n, hyper.n_embd, h);
            cpu.products([
                model.linear(&w.k, &m.acts, &mut m.k, n),
                model.linear(&w.v, &m.acts, &mut m.v, n),
            ]);
            for (rows, segment) in self.batch.segments() {
                let cache = &mut caches[segment.session];
                let (keys, values) = cache.rows_mut(hyper.cache_slots(l).source);
                keys.store(cpu, rows_of(&m.k, &rows, k_width), 0);
                values.store(cpu, rows_of(&m.v, &rows, v_width), 0);
            }
        }
    }

    /// q → attended
    fn attend(&self, view: View, m: &mut MixerBuffers) {
        let hyper = &self.model.hyper;
        let (q_width, width) = (hyper.n_head * hyper.head_dim, hyper.n_head * hyper.head_dim_v);
        m.attended.resize(self.batch.n_rows() * width);
        for (rows, segment) in self.batch.segments() {
            let cache = &self.caches[segment.session];
            let shape = AttentionShape {
                n_head: hyper.n_head,
                n_head_kv: hyper.n_head_kv,
                first: segment.past,
                all: match view.sees {
                    Sees::UpToItself => None,
                    Sees::WholeText => Some(rows.len()),
                    Sees::Source => Some(cache.n_source()),
                },
                window: None,
                chunk: None,
                cap: None,
                scale: hyper.attention_scale,
                sinks: None,
                bias: view.bias,
            };
            let (keys, values) = cache.rows(view.slot);
            let q = rows_of(&m.q, &rows, q_width);
            let out = rows_of_mut(&mut m.attended, &rows, width);
            self.cpu.attention(shape, q, keys, values, out);
        }
    }
}
