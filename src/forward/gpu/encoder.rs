//! Encoder–decoder models on a device: the passes of `forward::encoder_decoder`, and where their
//! attention looks.
//!
//! The encoder's own keys and values, which nobody sees later, are f32 as on the CPU where the
//! session's cache is; f16 otherwise, if tensor cores take such rows.

use super::GpuModel;
use super::cache::GpuCache;
use super::front::graph_positions;
use super::layers::{GpuAttention, GpuEncoder};
use super::pass::{Pass, Text};
use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::gpu::attention::{DeviceAttention, DeviceBias};
use crate::backend::gpu::cache::DeviceRows;
use crate::forward::encoder_decoder::set_sources;
use crate::forward::events::nanos_since;
use crate::forward::gpu::layer::{Span, Tools};
use crate::forward::{Batch, Buffers, CpuPass, Observer};
use crate::gguf::TensorType;
use crate::model::Model;
use crate::model::hyper::CacheSlots;
use crate::model::kv::{CacheType, KvCache};
use crate::policy::Phase;
use std::ops::Range;
use std::time::Instant;

impl GpuModel {
    /// As `Model::encode`, for a batch of one segment; what is on the device is computed there.
    pub fn encode(
        &mut self,
        model: &Model,
        cpu: &Cpu,
        (kv, cache): (&mut KvCache, &GpuCache),
        b: &mut Buffers,
        batch: &Batch,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        CpuPass { model, cpu, batch, caches: &mut [kv], observer }.begin(b);
        let n = batch.n_rows();
        let span = Span { n, past: 0, is_prompt: true, max_seen: n, text: Text::Source };
        self.pass((model, cpu), cache, b, span, batch, |pass, tools| {
            pass.encode(tools, kv, observer)
        })
    }

    /// As `Model::forward` of a decoder; what is on the device is computed there.
    pub fn decode(
        &mut self,
        model: &Model,
        cpu: &Cpu,
        (kv, cache): (&mut KvCache, &GpuCache),
        b: &mut Buffers,
        batch: &Batch,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        CpuPass { model, cpu, batch, caches: &mut [kv], observer }.begin(b);
        let (n, past) = (batch.n_rows(), batch.only().past);
        let is_prompt = batch.only().phase == Phase::Prompt;
        let text = Text::Answer { n_source: kv.n_source() };
        let max_seen = if is_prompt { past + n } else { graph_positions(past + 1, kv.n_ctx()) };
        let span = Span { n, past, is_prompt, max_seen, text };
        self.pass((model, cpu), cache, b, span, batch, |pass, tools| pass.run(tools, kv, observer))
    }
}

impl<'a> Pass<'a> {
    fn encode(
        &self,
        tools: &mut Tools,
        kv: &mut KvCache,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let mut own = self.model.encoder_caches(self.batch);
        let mut on_device = self.run_layers(tools, &mut own[0], observer)?;
        let start = Instant::now();
        let layers = self.hyper().decoder_layers();
        let is_there = |l: &usize| self.dev.layers[*l].is_some();
        let first = layers.clone().find(is_there).unwrap_or(layers.end);
        // output norm, keys and values for the decoder: layers of the CPU come first
        if first > layers.start {
            self.move_stream(tools, (&mut on_device, false), observer)?;
            let Tools { staging, cpu, b, .. } = tools;
            self.model.encoder_output(cpu, b);
            let (model, batch) = (self.model, self.batch);
            let pass = CpuPass { model, cpu, batch, caches: &mut [], observer };
            pass.cross_keys(layers.start..first, &mut [&mut *kv], &b.h, &mut b.mixer);
            staging.upload(self.stream(), self.h(), &b.h, f32::to_le_bytes)?;
        } else {
            self.move_stream(tools, (&mut on_device, true), observer)?;
            self.norm(&self.encoder().output_norm, self.x(), self.h())?;
        }
        self.cross_keys(first..layers.end)?;
        self.finish_pending(tools, observer)?;
        set_sources(self.batch, &mut [kv]);
        tools.b.events.timing.head_ns = nanos_since(start);
        Ok(())
    }

    /// Keys and values of the encoder's text, h, for layers of the decoder.
    fn cross_keys(&self, layers: Range<usize>) -> Result<()> {
        let (hyper, m) = (self.hyper(), &self.layout().mixer);
        let heads = self.n * hyper.n_head_kv;
        let (k, v) = (&m.k, &m.v);
        let k = self.words(k, heads * hyper.head_dim);
        let v = self.words(v, heads * hyper.head_dim_v);
        for l in layers {
            let cross = self.dev.layers[l].as_ref().and_then(|layer| layer.cross.as_ref());
            let w = &cross.expect("a layer of the decoder on the device").attention;
            let acts = self.acts_of_h([&w.k, &w.v].map(|linear| linear.weight.ty))?;
            self.linear(&w.k, &acts, k)?;
            self.linear(&w.v, &acts, v)?;
            let (keys, values) = self.source_rows(l);
            self.store(k, keys)?;
            self.store(v, values)?;
        }
        Ok(())
    }

    /// h → y; keys and values are there already.
    pub fn cross_attention(&self, l: usize, w: &GpuAttention) -> Result<()> {
        let (hyper, m) = (self.hyper(), &self.layout().mixer);
        let heads = self.n * hyper.n_head;
        let acts = self.acts_of_h([w.q.weight.ty])?;
        let q = self.words(&m.q, heads * hyper.head_dim);
        self.linear(&w.q, &acts, q)?;
        let (keys, values) = self.source_rows(l);
        let attended = self.words(&m.attended, heads * hyper.head_dim_v);
        self.attend(&self.view_of_source(), q, keys, values, attended)?;
        self.attention_output(&w.output)
    }

    /// What queries of the decoder see of the encoder's text: all of it. A decoded token sees what
    /// the text's last one would, so that its position can stand in memory and one graph serve
    /// texts of any length.
    fn view_of_source(&self) -> DeviceAttention<'a> {
        let Text::Answer { n_source } = self.text else { panic!("nobody has encoded a text") };
        let view = DeviceAttention { max_seen: self.max_source(), bias: None, ..self.view() };
        match self.is_prompt {
            true => DeviceAttention { all: Some(n_source), ..view },
            false => DeviceAttention { past: self.words(&self.layout().source, 1), ..view },
        }
    }

    /// Positions of the encoder's text that a decoded token sees, or more.
    pub fn max_source(&self) -> usize {
        match self.text {
            Text::Answer { n_source } if self.is_prompt => n_source,
            Text::Answer { n_source } => graph_positions(n_source, self.cache.n_ctx()),
            Text::Only | Text::Source => 0,
        }
    }

    /// The layers that this pass goes through.
    pub fn layers(&self) -> Range<usize> {
        match self.text {
            Text::Source => 0..self.hyper().n_encoder_layers(),
            Text::Only | Text::Answer { .. } => self.hyper().decoder_layers(),
        }
    }

    /// Where the cache has what layer `l` of the decoder keeps.
    pub fn slots(&self, l: usize) -> CacheSlots {
        self.hyper().cache_slots(l)
    }

    fn encoder(&self) -> &'a GpuEncoder {
        self.dev.encoder.as_ref().expect("a model with an encoder")
    }

    /// What is added to the scores of a text's attention to itself.
    pub fn distance_bias(&self) -> Option<DeviceBias<'a>> {
        let bias = match self.text {
            Text::Only => None,
            Text::Source => self.encoder().encoder_bias.as_ref(),
            Text::Answer { .. } => self.encoder().decoder_bias.as_ref(),
        }?;
        Some(DeviceBias { reach: bias.reach, values: self.dev.weights.vector(&bias.values) })
    }

    fn source_rows(&self, l: usize) -> (DeviceRows<'a>, DeviceRows<'a>) {
        let (keys, values) = self.cache.of_slot(self.slots(l).source);
        (keys, values.expect("values beside the keys"))
    }

    /// Where the layer of the encoder that is computed has its keys and values.
    pub fn encoder_rows(&self) -> (DeviceRows<'a>, DeviceRows<'a>) {
        let (hyper, [k, v]) = (self.hyper(), &self.layout().encoder);
        let rows = |ty, place, dim| {
            let (data, heads) = (self.slice(place), hyper.n_head_kv);
            DeviceRows { ty, data, heads, dim, stride: dim, n_ctx: self.cache.n_ctx() }
        };
        let both = |ty| (rows(ty, k, hyper.head_dim), rows(ty, v, hyper.head_dim_v));
        let (keys, values) = both(TensorType::F16);
        let is_exact = self.cache.types() == (CacheType::F32, CacheType::F32);
        match !is_exact && self.dev.ops.attention.has_prompt_kernel(&keys, &values) {
            true => (keys, values),
            false => both(TensorType::F32),
        }
    }
}
