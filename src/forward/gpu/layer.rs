//! The layer loop on a device. Layers that are not there are the CPU's; the stream goes from one
//! to the other between them.

use super::GpuModel;
use super::cache::GpuCache;
use super::front::graph_positions;
use super::layers::GpuLayer;
use super::pass::{Pass, Text};
use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::sample::{self, TOP_K_MAX};
use crate::forward::events::nanos_since;
use crate::forward::gpu::decode_pipeline::DecodePipeline;
use crate::forward::gpu::expert_parallel::Peer;
use crate::forward::gpu::hybrid_moe::Hybrid;
use crate::forward::gpu::upload::{Staging, floats, integers};
use crate::forward::logits::LOGITS_ROWS;
use crate::forward::{Batch, Buffers, CpuPass, LogitRow, Logits, Observer, TopK};
use crate::model::Model;
use crate::model::kv::KvCache;
use crate::policy::Phase;
use std::time::Instant;

/// What a pass changes beside the device's memory.
pub struct Tools<'a> {
    pub staging: &'a mut Staging,
    pub hybrid: &'a mut Hybrid,
    pub pipeline: &'a mut DecodePipeline,
    pub peers: &'a mut [Peer],
    pub cpu: &'a Cpu,
    pub b: &'a mut Buffers,
}

/// Which tokens a pass has, and what they see: see `Pass`.
pub(super) struct Span {
    pub n: usize,
    pub past: usize,
    pub is_prompt: bool,
    pub max_seen: usize,
    pub text: Text,
}

impl Tools<'_> {
    /// What came from a peer that is lost is worth nothing: before anybody relies on it.
    pub fn wait_for_peers(&mut self) -> Result<()> {
        // All are waited for, whatever the others say.
        self.peers.iter_mut().map(Peer::wait).fold(Ok(()), Result::and)
    }
}

impl GpuModel {
    /// As `Model::forward`, for a batch of one segment; what is on the device is computed there.
    pub fn forward(
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
        let max_seen = match n {
            1 if !is_prompt => graph_positions(past + 1, kv.n_ctx()),
            n => past + n,
        };
        let span = Span { n, past, is_prompt, max_seen, text: Text::Only };
        self.pass((model, cpu), cache, b, span, batch, |pass, tools| pass.run(tools, kv, observer))
    }

    /// A pass that `run` computes. It is ended whatever becomes of it.
    pub(super) fn pass(
        &mut self,
        (model, cpu): (&Model, &Cpu),
        cache: &GpuCache,
        b: &mut Buffers,
        span: Span,
        batch: &Batch,
        run: impl FnOnce(&Pass, &mut Tools) -> Result<()>,
    ) -> Result<()> {
        let GpuModel { dev, staging, hybrid, pipeline, peers, .. } = self;
        let Span { n, past, is_prompt, max_seen, text } = span;
        let pass = Pass { model, dev, cache, batch, n, past, is_prompt, max_seen, text };
        let mut tools = Tools { staging, hybrid, pipeline, peers, cpu, b };
        let result = run(&pass, &mut tools);
        pass.end(&mut tools, result)?;
        model.publish_end(batch, b);
        Ok(())
    }
}

impl Pass<'_> {
    /// Waits for what was queued; of a pass that failed, gives back what it had taken.
    fn end(&self, tools: &mut Tools, result: Result<()>) -> Result<()> {
        if result.is_err() {
            // One that is lost waits for nothing; what is told is the first error.
            let _ = tools.pipeline.abandon(self);
        }
        // Also after an error: what was queued may still use what is given back.
        let waited = tools.staging.wait(self.stream());
        let waited = waited.and(tools.wait_for_peers());
        if result.is_err() {
            self.model.cancel_layer_prefetch();
        }
        if let (Err(_), Some(tiers)) = (&result, &self.dev.tiers) {
            tools.hybrid.release_all(tiers);
            tools.pipeline.release_all(tiers);
        }
        result.and(waited)
    }

    /// The layers, the output norm and the head.
    pub fn run(
        &self,
        tools: &mut Tools,
        kv: &mut KvCache,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let mut on_device = self.run_layers(tools, kv, observer)?;
        let start = Instant::now();
        let moved = (&mut on_device, self.dev.head.is_some());
        self.move_stream(tools, moved, observer)?;
        self.finish_pending(tools, observer)?;
        match on_device {
            true => self.logits(tools, observer)?,
            false => {
                let (model, batch, Tools { cpu, b, .. }) = (self.model, self.batch, &mut *tools);
                CpuPass { model, cpu, batch, caches: &mut [kv], observer }.logits(b);
            }
        }
        tools.b.events.timing.head_ns = nanos_since(start);
        Ok(())
    }

    /// Answers whether the stream is on the device then.
    pub fn run_layers(
        &self,
        tools: &mut Tools,
        kv: &mut KvCache,
        observer: &mut dyn Observer,
    ) -> Result<bool> {
        self.make_graphs(tools)?;
        self.upload_positions(tools)?;
        // Where the stream is.
        let mut on_device = false;
        for l in self.layers() {
            observer.layer(l)?;
            let layer = self.dev.layers[l].as_ref();
            let moved = (&mut on_device, layer.is_some());
            self.move_stream(tools, moved, observer)?;
            match layer {
                Some(layer) => self.layer(tools, l, layer, observer)?,
                None => self.layer_on_cpu(tools, kv, l, observer)?,
            }
        }
        Ok(on_device)
    }

    fn layer_on_cpu(
        &self,
        tools: &mut Tools,
        kv: &mut KvCache,
        l: usize,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (model, batch, Tools { cpu, b, .. }) = (self.model, self.batch, tools);
        let mut pass = CpuPass { model, cpu, batch, caches: &mut [kv], observer };
        match self.text {
            Text::Only => pass.layer(b, l),
            Text::Source => pass.encoder_layer(b, l),
            Text::Answer { .. } => pass.decoder_layer(b, l),
        }
    }

    /// One layer, of the stages of `Model::layer`.
    fn layer(
        &self,
        tools: &mut Tools,
        l: usize,
        layer: &GpuLayer,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let is_recorded = observer.recorder(self.batch.only().session).is_some();
        let tiers = self.tiers(l).filter(|_| self.looks_up(l) && !is_recorded);
        let pinned = tiers.map(|tiers| self.pin_layer(tools, l, tiers)).transpose()?;

        // norm, attention, residual; dense branch; norm, router, shared expert
        self.before_experts(tools, l, layer)?;
        let (ffn, acts) = (&layer.ffn, self.acts_at(l));

        // experts, residual
        match (&ffn.dense, pinned) {
            (Some(expert), _) => {
                self.record_dense(tools, l, observer)?;
                self.only_expert(tools.staging, expert, ffn.biases.as_ref(), &acts, None)?;
            }
            (None, Some(pinned)) => {
                return self.queue_experts(tools, l, pinned, observer);
            }
            (None, None) => {
                self.download_route(tools, l, observer)?;
                self.routed_experts(tools, l, &acts)?;
            }
        }
        self.add_residual()
    }

    fn upload_positions(&self, tools: &mut Tools) -> Result<()> {
        let (layout, stream) = (self.layout(), self.stream());
        if self.text == Text::Only {
            let turns: Vec<f32> = tools.b.mixer.rope.turns().iter().flatten().copied().collect();
            let to = self.words(&layout.turns, turns.len());
            tools.staging.upload(stream, to, &turns, f32::to_le_bytes)?;
        }
        let mut up = |place, position: usize| {
            let to = self.words(place, 1);
            tools.staging.upload(stream, to, &[position as u32], u32::to_le_bytes)
        };
        if let Text::Answer { n_source } = self.text {
            up(&layout.source, n_source - 1)?;
        }
        up(&layout.past, self.past)
    }

    /// Brings the stream to where the next stage wants it.
    pub fn move_stream(
        &self,
        tools: &mut Tools,
        (on_device, wanted): (&mut bool, bool),
        observer: &mut dyn Observer,
    ) -> Result<()> {
        if std::mem::replace(on_device, wanted) == wanted {
            return Ok(());
        }
        self.finish_pending(tools, observer)?;
        let (stream, Tools { staging, b, .. }) = (self.stream(), &mut *tools);
        if wanted {
            return staging.upload(stream, self.x(), &b.x, f32::to_le_bytes);
        }
        staging.download(stream, &[self.x()], &mut |_, bytes| floats(bytes, &mut b.x))?;
        tools.wait_for_peers()
    }

    /// A dense layer's routing is told to whoever writes it down.
    fn record_dense(&self, tools: &mut Tools, l: usize, observer: &mut dyn Observer) -> Result<()> {
        if observer.recorder(self.batch.only().session).is_some() {
            self.finish_pending(tools, observer)?;
            let Tools { staging, cpu, b, .. } = tools;
            b.route.dense(self.n);
            staging
                .download(self.stream(), &[self.h()], &mut |_, bytes| floats(bytes, &mut b.h))?;
            self.model.record_routed(cpu, self.batch, b, l, observer);
        }
        Ok(())
    }

    /// The route comes down, and what predictors and recorders want beside it; they hear of it.
    fn download_route(
        &self,
        tools: &mut Tools,
        l: usize,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.finish_pending(tools, observer)?;
        let Tools { staging, cpu, b, .. } = tools;
        let is_recorded = observer.recorder(self.batch.only().session).is_some();
        let mut parts = vec![self.route_bytes()];
        if is_recorded || self.n == 1 && self.model.wants_activation(l) {
            parts.extend([self.h(), self.x()]);
        }
        staging.download(self.stream(), &parts, &mut |i, bytes| match i {
            0 => self.take_route(bytes, &mut b.route),
            1 => floats(bytes, &mut b.h),
            _ => floats(bytes, &mut b.x),
        })?;
        self.model.record_routed(cpu, self.batch, b, l, observer);
        self.model.publish_routed(cpu, self.batch, b, l);
        Ok(())
    }

    fn logits(&self, tools: &mut Tools, observer: &mut dyn Observer) -> Result<()> {
        // One segment's rows follow one another.
        let wanted: Vec<LogitRow> = self.batch.logit_rows().collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let (norm, head) = self.dev.head.as_ref().expect("the head is on the device");
        let (n_embd, n_vocab) = (self.hyper().n_embd, head.weight.rows);
        for wanted in wanted.chunks(LOGITS_ROWS) {
            let (start, m) = (wanted[0].row, wanted.len());
            let part = Pass { n: m, past: self.past + start, ..*self };
            let x = self.x().slice(4 * start * n_embd..4 * (start + m) * n_embd);
            part.norm(norm, x, part.h())?;
            let acts = part.acts_of_h([head.weight.ty])?;
            let out = part.words(&self.layout().logits, m * n_vocab);
            part.linear(head, &acts, out)?;
            match chosen_there(wanted[0].best, n_vocab) {
                Some(top) => self.best(tools, out, top, wanted[0], observer)?,
                None => {
                    let Tools { staging, b: Buffers { logits, .. }, .. } = &mut *tools;
                    let take = &mut |_, bytes: &[u8]| floats(bytes, logits);
                    staging.download(self.stream(), &[out], take)?;
                    tools.wait_for_peers()?;
                    self.model.give_logits(&mut tools.b.logits, wanted, observer);
                }
            }
        }
        Ok(())
    }

    /// Chooses among a token's logits on the device, by what `Model::give_logits` makes of them.
    fn best(
        &self,
        tools: &mut Tools,
        products: DeviceSlice,
        TopK { k, n_vocab }: TopK,
        row: LogitRow,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let all = sample::Logits {
            data: products.slice(0..4 * n_vocab),
            n_vocab,
            divisor: self.model.weights.logit_divisor,
            scratch: self.slice(&self.layout().top_k),
        };
        // Values and ids come down as one piece.
        let best = self.words(&self.layout().best, 2 * k);
        let (values, ids) = (best.slice(0..4 * k), best.slice(4 * k..8 * k));
        self.dev.ops.sample.top_k(self.stream(), all, k, values, ids)?;
        let Tools { staging, b, .. } = tools;
        staging.download(self.stream(), &[best], &mut |_, bytes| {
            floats(&bytes[..4 * k], &mut b.logits);
            integers(&bytes[4 * k..], &mut b.best_ids);
        })?;
        tools.wait_for_peers()?;
        let Buffers { best_ids, logits, .. } = &*tools.b;
        observer.logits(row.session, row.token, Logits::Best { ids: best_ids, logits });
        Ok(())
    }
}

/// What the device is to choose: no more than it can, and fewer than there are.
fn chosen_there(best: Option<TopK>, n_logits: usize) -> Option<TopK> {
    let top = best?;
    let fits = top.n_vocab <= n_logits && (1..=TOP_K_MAX).contains(&top.k);
    (fits && top.k < top.n_vocab).then_some(top)
}
