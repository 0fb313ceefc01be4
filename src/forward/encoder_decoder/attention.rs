//! Attention of a text to itself and of the decoder to the encoder's text: grouped-query attention
//! without rotation.

use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::ops::DistanceBias;
use crate::forward::Buffers;
use crate::model::Model;
use crate::model::kv::KvCache;
use crate::model::weights::{AttentionWeights, Linear};
use std::ops::Range;

/// Where queries look.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Layer of the cache.
    pub slot: usize,
    /// Position of the first query.
    pub first: usize,
    /// Positions that all queries see; up to its own if none is given.
    pub all: Option<usize>,
    pub bias: Option<&'a DistanceBias>,
}

impl Model {
    /// h → y; the tokens' keys and values go into the cache.
    pub(super) fn self_attention(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        w: &AttentionWeights,
        view: View,
    ) {
        let n = b.h.len() / self.hyper.n_embd;
        let kinds = Kinds::of([&w.q, &w.k, &w.v].map(|linear| linear.weight.ty));
        b.acts.fill(cpu, kinds, n, self.hyper.n_embd, &b.h);
        cpu.products([
            self.linear(&w.q, &b.acts, &mut b.mixer.q, n),
            self.linear(&w.k, &b.acts, &mut b.mixer.k, n),
            self.linear(&w.v, &b.acts, &mut b.mixer.v, n),
        ]);
        self.keep(cpu, kv, b, (view.slot, view.first));
        self.attend(cpu, kv, b, &w.output, view);
    }

    /// h → y; keys and values are there already.
    pub(super) fn cross_attention(
        &self,
        cpu: &Cpu,
        kv: &KvCache,
        b: &mut Buffers,
        w: &AttentionWeights,
        view: View,
    ) {
        let n = b.h.len() / self.hyper.n_embd;
        b.acts.fill(cpu, Kinds::of([w.q.weight.ty]), n, self.hyper.n_embd, &b.h);
        cpu.products([self.linear(&w.q, &b.acts, &mut b.mixer.q, n)]);
        self.attend(cpu, kv, b, &w.output, view);
    }

    /// Keys and values of the encoder's text, h, for layers of the decoder.
    pub(crate) fn cross_keys(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        layers: Range<usize>,
    ) {
        let n = b.h.len() / self.hyper.n_embd;
        let (_, weights) = self.encoder_parts();
        for l in layers {
            let w = &weights.cross[l - self.hyper.n_encoder_layers()].attention;
            let kinds = Kinds::of([w.k.weight.ty, w.v.weight.ty]);
            b.acts.fill(cpu, kinds, n, self.hyper.n_embd, &b.h);
            cpu.products([
                self.linear(&w.k, &b.acts, &mut b.mixer.k, n),
                self.linear(&w.v, &b.acts, &mut b.mixer.v, n),
            ]);
            self.keep(cpu, kv, b, (self.hyper.cache_slots(l).source, 0));
        }
    }

    /// Keys and values into a layer of the cache, from position `first` on.
    fn keep(&self, cpu: &Cpu, kv: &mut KvCache, b: &Buffers, (slot, first): (usize, usize)) {
        let (keys, values) = kv.rows_mut(slot);
        keys.store(cpu, &b.mixer.k, first);
        values.store(cpu, &b.mixer.v, first);
    }

    /// q → y
    fn attend(&self, cpu: &Cpu, kv: &KvCache, b: &mut Buffers, output: &Linear, view: View) {
        let hyper = &self.hyper;
        let m = &mut b.mixer;
        let n = m.q.len() / (hyper.n_head * hyper.head_dim);
        m.attended.resize(n * hyper.n_head * hyper.head_dim_v);
        let shape = AttentionShape {
            n_head: hyper.n_head,
            n_head_kv: hyper.n_head_kv,
            first: view.first,
            all: view.all,
            window: None,
            scale: hyper.attention_scale,
            sinks: None,
            bias: view.bias,
        };
        let (keys, values) = kv.rows(view.slot);
        cpu.attention(shape, &m.q, keys, values, &mut m.attended);
        self.attention_output(cpu, b, output, n);
    }
}
