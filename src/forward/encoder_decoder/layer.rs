//! The loops over the encoder's and over the decoder's layers. Rows of every buffer are tokens.

use super::attention::View;
use super::positions::add_sinusoids;
use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::forward::events::{Pass, nanos_since};
use crate::forward::{Buffers, Observer, Want};
use crate::model::Model;
use crate::model::encoder::{EncoderParams, PositionParams};
use crate::model::kv::{CacheType, KvCache};
use crate::model::weights::encoder::EncoderWeights;
use crate::model::weights::{FfnWeights, Mixer};
use std::time::Instant;

/// A source text that was read, and what has been said to it.
#[derive(Clone, Copy, Debug)]
pub struct Answering {
    pub request: u32,
    /// Tokens of the source text.
    pub n_source: usize,
    /// Tokens of the decoder in the cache.
    pub past: usize,
}

impl Model {
    /// Computes the encoder on all of a text of the timeline `request`, and the keys and values
    /// that the layers of the decoder will see of it.
    pub fn encode(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        tokens: &[u32],
        request: u32,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let pass = Pass::new(request, tokens.len());
        // embedding
        self.begin_text(b, tokens, 0, pass, observer);
        let mut own = self.encoder_cache(tokens.len());
        for l in 0..self.hyper.n_encoder_layers() {
            let result = self.encoder_layer(cpu, &mut own, b, l, pass, observer);
            result.inspect_err(|_| self.cancel_layer_prefetch())?;
        }

        // output norm, keys and values for the decoder
        let start = Instant::now();
        self.encoder_output(cpu, b);
        self.cross_keys(cpu, kv, b, self.hyper.decoder_layers());
        b.published.timing.head_ns = nanos_since(start);
        self.publish_end(b, pass);
        Ok(())
    }

    /// Keys and values of one layer of the encoder at a time: nobody sees them later.
    pub(crate) fn encoder_cache(&self, n: usize) -> KvCache {
        let shape = &self.hyper.cache_shapes()[..1];
        KvCache::new(shape, n, CacheType::F32, CacheType::F32)
    }

    /// x → x; `own` as of `encoder_cache`
    pub(crate) fn encoder_layer(
        &self,
        cpu: &Cpu,
        own: &mut KvCache,
        b: &mut Buffers,
        l: usize,
        pass: Pass,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (_, weights) = self.encoder_parts();
        let (layer, n) = (&self.weights.layers[l], b.x.len() / self.hyper.n_embd);
        // norm, attention to the whole text, residual
        self.norm(cpu, &layer.norm, &b.x, &mut b.h);
        let Mixer::Attention(w) = &layer.mixer else { unreachable!("bound as attention") };
        let bias = weights.encoder_bias.as_ref();
        self.self_attention(cpu, own, b, w, View { slot: 0, first: 0, all: Some(n), bias });
        cpu.add(&mut b.x, &b.y);

        // norm, router, experts, residual
        self.feed_forward(cpu, b, (l, &layer.ffn), pass, observer)
    }

    /// x → h
    pub(crate) fn encoder_output(&self, cpu: &Cpu, b: &mut Buffers) {
        let (_, weights) = self.encoder_parts();
        self.norm(cpu, &weights.output_norm, &b.x, &mut b.h);
    }

    /// Computes the decoder on `tokens`, appends them to the cache and gives the wanted logits to
    /// `observer`.
    pub fn decode(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        tokens: &[u32],
        at: Answering,
        want: Want,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let pass = Pass::new(at.request, tokens.len());
        // embedding
        self.begin_text(b, tokens, at.past, pass, observer);
        for l in self.hyper.decoder_layers() {
            let result = self.decoder_layer(cpu, kv, b, l, at, pass, observer);
            result.inspect_err(|_| self.cancel_layer_prefetch())?;
        }

        // output norm, output head
        let start = Instant::now();
        self.logits(cpu, b, tokens.len(), want, observer);
        b.published.timing.head_ns = nanos_since(start);
        self.publish_end(b, pass);
        Ok(())
    }

    /// x → x
    #[allow(clippy::too_many_arguments)] // a pass and its place in it
    pub(crate) fn decoder_layer(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        l: usize,
        Answering { n_source, past, .. }: Answering,
        pass: Pass,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (_, weights) = self.encoder_parts();
        let (slots, layer) = (self.hyper.cache_slots(l), &self.weights.layers[l]);
        let cross = &weights.cross[l - self.hyper.n_encoder_layers()];
        // norm, attention to what was said, residual
        self.norm(cpu, &layer.norm, &b.x, &mut b.h);
        let Mixer::Attention(w) = &layer.mixer else { unreachable!("bound as attention") };
        let bias = weights.decoder_bias.as_ref();
        self.self_attention(cpu, kv, b, w, View { slot: slots.own, first: past, all: None, bias });
        cpu.add(&mut b.x, &b.y);

        // norm, attention to the source text, residual
        self.norm(cpu, &cross.norm, &b.x, &mut b.h);
        let view = View { slot: slots.source, first: past, all: Some(n_source), bias: None };
        self.cross_attention(cpu, kv, b, &cross.attention, view);
        cpu.add(&mut b.x, &b.y);

        // norm, router, experts, residual
        self.feed_forward(cpu, b, (l, &layer.ffn), pass, observer)
    }

    pub(super) fn encoder_parts(&self) -> (&EncoderParams, &EncoderWeights) {
        let parts = self.hyper.encoder.as_ref().zip(self.weights.encoder.as_ref());
        parts.expect("a model with an encoder")
    }

    /// x = embedding and, where they are added, positions from `past` on.
    pub(crate) fn begin_text(
        &self,
        b: &mut Buffers,
        tokens: &[u32],
        past: usize,
        pass: Pass,
        observer: &mut dyn Observer,
    ) {
        let (params, _) = self.encoder_parts();
        let n_embd = self.hyper.n_embd;
        self.embed(tokens, &mut b.x);
        if let PositionParams::Sinusoidal { first } = params.positions {
            add_sinusoids(&mut b.x, n_embd, first + past);
        }
        self.publish_start(b, pass);
        self.record_start(b, tokens, observer);
        b.h.resize(tokens.len() * n_embd, 0.0);
        b.y.resize(tokens.len() * n_embd);
    }

    /// x += experts(norm(x)) of a layer, or its dense part.
    fn feed_forward(
        &self,
        cpu: &Cpu,
        b: &mut Buffers,
        (l, ffn): (usize, &FfnWeights),
        pass: Pass,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let n_embd = self.hyper.n_embd;
        let n = b.x.len() / n_embd;
        self.norm(cpu, &ffn.norm, &b.x, &mut b.h);
        b.acts.fill(cpu, Kinds::of(ffn.inputs()), n, n_embd, &b.h);
        self.route(cpu, b, ffn, n);
        self.record_routed(cpu, b, l, observer);
        let result = self.experts(cpu, b, l, ffn, pass);
        self.experts_of(&ffn.gate).release(&mut b.ffn.work);
        result?;
        cpu.add(&mut b.x, &b.y);
        Ok(())
    }
}
