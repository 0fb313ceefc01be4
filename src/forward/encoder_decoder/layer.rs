//! The encoder's pass, and a layer of the encoder and of the decoder.

use super::attention::{Sees, View};
use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::forward::events::nanos_since;
use crate::forward::{Batch, Buffers, CpuPass, Outputs, Rests};
use crate::model::Model;
use crate::model::kv::{CacheType, KvCache};
use crate::model::weights::encoder::EncoderWeights;
use crate::model::weights::{FfnWeights, Mixer};
use std::time::Instant;

impl Model {
    /// Computes the encoder on source texts, each a segment that has all of its tokens, and puts
    /// the keys and values that the decoder's layers will see of them into the texts' caches.
    pub fn encode(
        &self,
        cpu: &Cpu,
        batch: &Batch,
        caches: &mut [&mut KvCache],
        b: &mut Buffers,
        outputs: &mut dyn Outputs,
        rests: &mut dyn Rests,
    ) -> Result<()> {
        let mut own = self.encoder_caches(batch);
        let own = &mut own.iter_mut().collect::<Vec<_>>()[..];
        let mut pass = CpuPass { model: self, cpu, batch, caches: own, outputs, rests };
        pass.begin(b);
        let _prefetch = self.hierarchy.prefetch_guard();
        for l in 0..self.hyper.n_encoder_layers() {
            pass.rests.layer(l)?;
            pass.encoder_layer(b, l)?;
        }

        // output norm, keys and values for the decoder
        let start = Instant::now();
        self.encoder_output(cpu, &b.x, &mut b.h);
        pass.cross_keys(self.hyper.decoder_layers(), caches, &b.h, &mut b.mixer);
        set_sources(batch, caches);
        b.events.timing.head_ns = nanos_since(start);
        self.publish_end(batch, &mut b.events);
        Ok(())
    }

    /// For each session a cache of one layer: the encoder's layers use it one after the other.
    pub(crate) fn encoder_caches(&self, batch: &Batch) -> Vec<KvCache> {
        let shape = &self.hyper.cache_shapes()[..1];
        let n_sessions = batch.segments().map(|(_, segment)| segment.session + 1).max();
        let mut lengths = vec![0; n_sessions.unwrap_or(0)];
        batch.segments().for_each(|(rows, segment)| lengths[segment.session] = rows.len());
        let cache = |n: usize| KvCache::new(shape, n, CacheType::F32, CacheType::F32);
        lengths.into_iter().map(cache).collect()
    }

    /// x → h
    pub(crate) fn encoder_output(&self, cpu: &Cpu, x: &[f32], h: &mut [f32]) {
        self.norm(cpu, &self.encoder_weights().output_norm, x, h);
    }

    fn encoder_weights(&self) -> &EncoderWeights {
        self.weights.encoder.as_ref().expect("a model with an encoder")
    }
}

/// Notes in the caches how many positions of the source texts they have.
pub(crate) fn set_sources(batch: &Batch, caches: &mut [&mut KvCache]) {
    batch.segments().for_each(|(rows, segment)| caches[segment.session].set_source(rows.len()));
}

impl CpuPass<'_, '_> {
    /// x → x; the pass's caches are those of `encoder_caches`.
    pub(crate) fn encoder_layer(&mut self, b: &mut Buffers, l: usize) -> Result<()> {
        let (model, cpu) = (self.model, self.cpu);
        let layer = &model.weights.layers[l];
        // norm, attention to the whole text, residual
        model.norm(cpu, &layer.norm, &b.x, &mut b.h);
        let Mixer::Attention(w) = &layer.mixer else { unreachable!("bound as attention") };
        let bias = model.encoder_weights().encoder_bias.as_ref();
        let view = View { slot: 0, sees: Sees::WholeText, bias };
        self.self_attention(w, view, &b.h, &mut b.mixer, &mut b.y);
        cpu.add(&mut b.x, &b.y);

        // norm, router, experts, residual
        self.feed_forward(b, l, layer.ffn.as_ref().expect("bound with the layer"))
    }

    /// x → x
    pub(crate) fn decoder_layer(&mut self, b: &mut Buffers, l: usize) -> Result<()> {
        let (model, cpu) = (self.model, self.cpu);
        let (slots, layer) = (model.hyper.cache_slots(l), &model.weights.layers[l]);
        // norm, attention to the text so far, residual
        model.norm(cpu, &layer.norm, &b.x, &mut b.h);
        let Mixer::Attention(w) = &layer.mixer else { unreachable!("bound as attention") };
        let bias = model.encoder_weights().decoder_bias.as_ref();
        let view = View { slot: slots.own, sees: Sees::UpToItself, bias };
        self.self_attention(w, view, &b.h, &mut b.mixer, &mut b.y);
        cpu.add(&mut b.x, &b.y);

        // norm, attention to the source text, residual
        let cross = model.cross_attention_of(l).expect("a layer of the decoder");
        model.norm(cpu, &cross.norm, &b.x, &mut b.h);
        let view = View { slot: slots.source, sees: Sees::Source, bias: None };
        self.cross_attention(&cross.attention, view, &b.h, &mut b.mixer, &mut b.y);
        cpu.add(&mut b.x, &b.y);

        // norm, router, experts, residual
        self.feed_forward(b, l, layer.ffn.as_ref().expect("bound with the layer"))
    }

    /// x += experts(norm(x)) of a layer, or its dense part.
    fn feed_forward(&mut self, b: &mut Buffers, l: usize, ffn: &FfnWeights) -> Result<()> {
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        model.norm(cpu, &ffn.norm, &b.x, &mut b.h);
        let f = &mut b.ffn;
        f.acts.fill(cpu, Kinds::of(ffn.inputs()), n, model.hyper.n_embd, &b.h);
        self.route(&ffn.gate, f);
        model.record_routed(cpu, self.batch, l, &mut b.routing(), self.outputs);
        self.experts(l, ffn, [&b.x, &b.h], &mut b.ffn, &mut b.events, &mut b.y)?;
        cpu.add(&mut b.x, &b.y);
        Ok(())
    }
}
