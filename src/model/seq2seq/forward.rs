//! The loops over the encoder's and over the decoder's layers. Rows of every buffer are tokens.

use super::super::Model;
use super::super::forward::{Buffers, Listener, Want};
use super::super::kv::{CacheType, KvCache};
use super::super::publish::{Pass, nanos_since};
use super::super::weights::{FfnWeights, Mixer};
use super::attention::View;
use super::params::{EncoderParams, PositionParams};
use super::positions::add_sinusoids;
use super::weights::EncoderWeights;
use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
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
        listener: &mut dyn Listener,
    ) -> Result<()> {
        let (params, weights) = self.encoder_parts();
        let n = tokens.len();
        let pass = Pass::new(request, n);
        // embedding
        self.begin(b, tokens, 0, pass, listener);
        // Keys and values of one layer at a time: nobody sees them later.
        let shape = &self.hyper.cache_shapes()[..1];
        let mut own = KvCache::new(shape, n, CacheType::F32, CacheType::F32);
        let bias = weights.encoder_bias.as_ref();

        for (l, layer) in self.weights.layers[..params.n_layers].iter().enumerate() {
            // norm, attention to the whole text, residual
            self.norm(cpu, &layer.norm, &b.x, &mut b.h);
            let Mixer::Attention(w) = &layer.mixer else { unreachable!("bound as attention") };
            let view = View { slot: 0, first: 0, all: Some(n), bias };
            self.self_attention(cpu, &mut own, b, w, view);
            cpu.add(&mut b.x, &b.y);

            // norm, router, experts, residual
            self.feed_forward(cpu, b, (l, &layer.ffn), pass, listener)?;
        }

        // output norm, keys and values for the decoder
        let start = Instant::now();
        self.norm(cpu, &weights.output_norm, &b.x, &mut b.h);
        for (l, cross) in weights.cross.iter().enumerate() {
            self.cross_keys(cpu, kv, b, &cross.attention, params.n_decoder_layers + l);
        }
        b.published.timing.head_ns = nanos_since(start);
        self.publish_end(b, pass);
        Ok(())
    }

    /// Computes the decoder on `tokens`, appends them to the cache and gives the wanted logits to
    /// `listener`.
    pub fn decode(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        tokens: &[u32],
        Answering { request, n_source, past }: Answering,
        want: Want,
        listener: &mut dyn Listener,
    ) -> Result<()> {
        let (params, weights) = self.encoder_parts();
        let n = tokens.len();
        let pass = Pass::new(request, n);
        // embedding
        self.begin(b, tokens, past, pass, listener);
        let bias = weights.decoder_bias.as_ref();

        for (i, cross) in weights.cross.iter().enumerate() {
            let l = params.n_layers + i;
            let layer = &self.weights.layers[l];
            // norm, attention to what was said, residual
            self.norm(cpu, &layer.norm, &b.x, &mut b.h);
            let Mixer::Attention(w) = &layer.mixer else { unreachable!("bound as attention") };
            self.self_attention(cpu, kv, b, w, View { slot: i, first: past, all: None, bias });
            cpu.add(&mut b.x, &b.y);

            // norm, attention to the source text, residual
            self.norm(cpu, &cross.norm, &b.x, &mut b.h);
            let slot = params.n_decoder_layers + i;
            let view = View { slot, first: past, all: Some(n_source), bias: None };
            self.cross_attention(cpu, kv, b, &cross.attention, view);
            cpu.add(&mut b.x, &b.y);

            // norm, router, experts, residual
            self.feed_forward(cpu, b, (l, &layer.ffn), pass, listener)?;
        }

        // output norm, output head
        let start = Instant::now();
        self.logits(cpu, b, n, want, listener);
        b.published.timing.head_ns = nanos_since(start);
        self.publish_end(b, pass);
        Ok(())
    }

    fn encoder_parts(&self) -> (&EncoderParams, &EncoderWeights) {
        let parts = self.hyper.encoder.as_ref().zip(self.weights.encoder.as_ref());
        parts.expect("a model with an encoder")
    }

    /// x = embedding and, where they are added, positions from `past` on.
    fn begin(
        &self,
        b: &mut Buffers,
        tokens: &[u32],
        past: usize,
        pass: Pass,
        listener: &mut dyn Listener,
    ) {
        let (params, _) = self.encoder_parts();
        let n_embd = self.hyper.n_embd;
        self.embed(tokens, &mut b.x);
        if let PositionParams::Sinusoidal { first } = params.positions {
            add_sinusoids(&mut b.x, n_embd, first + past);
        }
        self.publish_start(b, pass);
        self.record_start(b, tokens, listener);
        b.h.resize(tokens.len() * n_embd, 0.0);
        b.y.resize(tokens.len() * n_embd, 0.0);
    }

    /// x += experts(norm(x)) of a layer, or its dense part.
    fn feed_forward(
        &self,
        cpu: &Cpu,
        b: &mut Buffers,
        (l, ffn): (usize, &FfnWeights),
        pass: Pass,
        listener: &mut dyn Listener,
    ) -> Result<()> {
        let n_embd = self.hyper.n_embd;
        let n = b.x.len() / n_embd;
        self.norm(cpu, &ffn.norm, &b.x, &mut b.h);
        b.acts.fill(cpu, Kinds::of(ffn.inputs()), n, n_embd, &b.h);
        self.route(cpu, b, ffn, n);
        self.record_routed(cpu, b, l, listener);
        let result = self.experts(cpu, b, l, ffn, pass);
        self.experts_of(&ffn.gate).release(&mut b.ffn.work);
        result?;
        cpu.add(&mut b.x, &b.y);
        Ok(())
    }
}
