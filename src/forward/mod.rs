//! How a batch is computed: the layer loop on the CPU, and its stages, a file each. Every buffer
//! has a row for each of the batch's tokens.

mod adapted;
mod attention;
pub mod batch;
mod behind_router;
mod block_index;
mod classifier;
mod compressed;
pub mod encoder_decoder;
mod events;
mod gated_delta;
pub mod gpu;
mod indexer;
mod input_sums;
mod kda;
mod last_layer;
mod layer_inputs;
mod logits;
mod mean_index;
mod mixer;
mod mla;
mod moe;
mod next_token;
mod ngrams;
mod parts;
mod peers;
mod pooled_index;
pub mod record;
mod recurrent;
mod scratch;
mod streams;
mod values;

pub use batch::{Batch, LogitRow, Segment, TopK, Want};
pub use logits::Logits;
pub use next_token::NextTokenRows;
pub use parts::PART_WORK;
pub use peers::PeerBuffers;
pub use scratch::Buffers;

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::linear::Product;
use crate::forward::events::nanos_since;
use crate::forward::record::Recorder;
use crate::model::Model;
use crate::model::encoder::PositionParams;
use crate::model::kv::KvCache;
use crate::model::weights::{FfnWeights, Layer, Linear, Norm, SubLayer};
use crate::simd::FloatBuffer;
use crate::{model::descriptor, quant};
use attention::RopeTables;
use encoder_decoder::add_sinusoids;
use mixer::on_cpu;
use std::time::Instant;

/// Receives what a pass computes, of each of its sessions.
pub trait Outputs {
    /// Whoever records the routing of a session's rows.
    fn recorder(&mut self, session: usize) -> Option<&mut dyn Recorder>;

    /// A layer needs `n` different experts for all rows.
    fn experts(&mut self, _n: usize) {}

    /// The last rows of a session's segment whose normalised outputs it wants, at most.
    fn n_outputs(&self, _session: usize) -> usize {
        0
    }

    /// The model's normalised outputs for the last rows of a segment, [rows, n_embd], and the first
    /// one's position.
    fn outputs(&mut self, _session: usize, _position: usize, _rows: &[f32]) {}

    /// Logits of a token of a session's segment: only the best where no more are wanted and it
    /// saves work, else all.
    fn logits(&mut self, session: usize, token: usize, logits: Logits<'_>);
}

/// Says how a pass rests: between layers and between parts of them, where it may end early and
/// others may be computed.
pub trait Rests {
    /// Called before layer `l`. An error ends the pass.
    fn layer(&mut self, _l: usize) -> Result<()> {
        self.rest()
    }

    /// Called between the parts of a layer. An error ends the pass.
    fn rest(&mut self) -> Result<()> {
        Ok(())
    }

    /// Multiplications of a part.
    fn part_work(&self) -> usize {
        PART_WORK
    }

    /// Whether other passes are computed in a rest.
    fn has_others(&self) -> bool {
        false
    }
}

/// Rests in which nothing happens.
pub struct NoRests;

impl Rests for NoRests {}

/// One forward pass on the CPU: what its stages share. A stage is a method that takes the buffers
/// it reads and writes.
pub(super) struct CpuPass<'a, 'c> {
    pub model: &'a Model,
    pub cpu: &'a Cpu,
    pub batch: &'a Batch,
    /// Indexed by `Segment::session`.
    pub caches: &'a mut [&'c mut KvCache],
    pub outputs: &'a mut dyn Outputs,
    pub rests: &'a mut dyn Rests,
}

impl Model {
    /// Computes a batch: appends its tokens to their texts' caches, of which `caches` has one for
    /// each session, and hands the wanted logits to `outputs`. With an encoder–decoder model this
    /// is the decoder; [`Model::encode`] has read the source texts. After an error some layers may
    /// have seen the tokens and others not.
    pub fn forward(
        &self,
        cpu: &Cpu,
        batch: &Batch,
        caches: &mut [&mut KvCache],
        b: &mut Buffers,
        outputs: &mut dyn Outputs,
        rests: &mut dyn Rests,
    ) -> Result<()> {
        let mut pass = CpuPass { model: self, cpu, batch, caches, outputs, rests };
        pass.begin(b);
        // Steps of decode, which may run while a prompt's pass rests, leave its prefetch alone.
        let has_prompt = batch.decode_rows().len() < batch.n_rows();
        let _prefetch = has_prompt.then(|| self.hierarchy.prefetch_guard());
        for l in self.hyper.decoder_layers() {
            pass.rests.layer(l)?;
            let is_last = l + 1 == self.hyper.n_layers;
            match self.hyper.encoder {
                None if is_last && pass.leaves_rows_out(b) => pass.last_layer(b, l)?,
                None => pass.layer(b, l)?,
                Some(_) => pass.decoder_layer(b, l)?,
            }
        }

        // output norm, output head
        let start = Instant::now();
        pass.outputs(&b.x, &mut b.h);
        pass.logits(&b.logit_rows, &b.x, &mut b.h, &mut b.ffn.acts, &mut b.logits);
        b.events.timing.head_ns = nanos_since(start);
        self.publish_end(batch, &mut b.events);
        Ok(())
    }
}

impl CpuPass<'_, '_> {
    /// x = embeddings, and what all layers read.
    pub(super) fn begin(&mut self, b: &mut Buffers) {
        let (model, n) = (self.model, self.batch.n_rows());
        model.embed(self.batch.tokens(), &mut b.x);
        self.adapt_embeddings(&mut b.x);
        self.start_stream(&mut b.x, &mut b.h);
        self.fill_layer_inputs(&b.x, &mut b.inputs);
        self.fill_positions(&mut b.mixer.ropes, &mut b.x);
        model.publish_start(self.batch, &b.x, &mut b.events);
        model.record_start(self.batch, &b.x, self.outputs);
        b.h.resize(n * model.hyper.n_embd, 0.0);
        b.y.resize(n * model.hyper.n_embd);
        b.logit_rows.clear();
        b.logit_rows.extend(self.batch.logit_rows());
    }

    /// x = norm(x + kind), in a model that normalises embeddings
    fn start_stream(&self, x: &mut Vec<f32>, h: &mut Vec<f32>) {
        let Some(start) = &self.model.weights.start else { return };
        for x in x.chunks_exact_mut(self.model.hyper.n_embd) {
            start.kind.iter().for_each(|kind| self.cpu.kernels.add(x, kind));
        }
        h.resize(x.len(), 0.0);
        self.model.norm(self.cpu, &start.norm, x, h);
        std::mem::swap(x, h);
    }

    /// Angles of RoPE, or positions added to x.
    fn fill_positions(&self, ropes: &mut RopeTables, x: &mut [f32]) {
        let (model, n_embd) = (self.model, self.model.hyper.n_embd);
        ropes.clear();
        for (rows, segment) in self.batch.segments() {
            match model.hyper.encoder.as_ref().map(|encoder| encoder.positions) {
                None => {
                    let n_ctx = self.caches[segment.session].n_ctx();
                    ropes.push(model, n_ctx, segment.past..segment.past + rows.len());
                }
                Some(PositionParams::Relative { .. }) => {}
                Some(PositionParams::Sinusoidal { first }) => {
                    let x = scratch::rows_of_mut(x, &rows, n_embd);
                    add_sinusoids(x, n_embd, first + segment.past);
                }
            }
        }
    }

    /// x → x
    pub(super) fn layer(&mut self, b: &mut Buffers, l: usize) -> Result<()> {
        let model = self.model;
        let (layer, cpu, n) = (&model.weights.layers[l], self.cpu, self.batch.n_rows());
        // router, if it reads the stream
        if let Some(ffn) = layer.ffn.as_ref().filter(|ffn| ffn.routes_stream) {
            b.ffn.acts.fill(cpu, Kinds::of(ffn.router_input()), n, model.hyper.n_embd, &b.x);
            self.route(&ffn.gate, &mut b.ffn);
        }
        // attention, residual
        self.mix(b, l, layer)?;
        self.behind_mixer(b, l)
    }

    /// x → x, behind a layer's mixer
    fn behind_mixer(&mut self, b: &mut Buffers, l: usize) -> Result<()> {
        let layer = &self.model.weights.layers[l];
        // experts, residual
        if let Some(ffn) = &layer.ffn {
            self.feed_forward_part(b, l, ffn)?;
        }
        if let Some(part) = &layer.input {
            self.add_layer_input(l, part, &mut b.inputs, &mut b.y, &mut b.h, &mut b.x);
        }
        if layer.scale != 1.0 {
            b.x.iter_mut().for_each(|x| *x *= layer.scale);
        }
        self.end_streams(l, &mut b.streams, &mut b.x);
        Ok(())
    }

    /// x += attention(norm(x)), or another mixer
    fn mix(&mut self, b: &mut Buffers, l: usize, layer: &Layer) -> Result<()> {
        let (model, cpu) = (self.model, self.cpu);
        let Some(mixer) = on_cpu(&layer.mixer) else { return Ok(()) };
        self.begin_streams(l, &b.x, &mut b.streams);
        if let Some(ngrams) = &layer.ngrams {
            self.add_ngrams(l, ngrams, &mut b.ngrams, &mut b.streams.all)?;
        }
        self.read_streams(l, SubLayer::Mixer, &mut b.streams, &mut b.x);
        model.norm(cpu, &layer.norm, &b.x, &mut b.h);
        self.make_values(b, l)?;
        mixer.mix(self, l, &b.h, &mut b.mixer, &mut b.y)?;
        if layer.ffn.as_ref().is_some_and(|ffn| ffn.sees_before) {
            b.before.clone_from(&b.x);
        }
        self.feed_streams(l, SubLayer::Mixer, [&mut b.y, &mut b.h], &mut b.streams, &mut b.x);
        Ok(())
    }

    /// x += experts(norm(x))
    fn feed_forward_part(&mut self, b: &mut Buffers, l: usize, ffn: &FfnWeights) -> Result<()> {
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        let hyper = &model.hyper;
        self.read_streams(l, SubLayer::FeedForward, &mut b.streams, &mut b.x);
        // dense branch, residual
        if let Some(branch) = &ffn.branch {
            model.norm(cpu, &branch.norm, &b.x, &mut b.h);
            self.dense_branch(l, branch, &b.h, &mut b.ffn, &mut b.y)?;
            match &branch.post_norm {
                None => cpu.add_scaled(&mut b.x, hyper.residual_scale, &b.y),
                Some(norm) => {
                    b.branch.resize(b.y.len());
                    model.norm(cpu, norm, &b.y, &mut b.branch);
                }
            }
        }

        // norm, router
        if let Some(norm) = ffn.router_norm() {
            model.norm(cpu, norm, &b.x, &mut b.h);
            b.ffn.acts.fill(cpu, Kinds::of(ffn.router_input()), n, hyper.n_embd, &b.h);
            self.route(&ffn.gate, &mut b.ffn);
        }
        let input = if ffn.sees_before { &b.before } else { &b.x };
        model.norm(cpu, &ffn.norm, input, &mut b.h);
        self.rests.rest()?;
        b.ffn.acts.fill(cpu, Kinds::of(ffn.inputs()), n, hyper.n_embd, &b.h);
        if !ffn.routes_stream && ffn.router_norm().is_none() {
            self.route(&ffn.gate, &mut b.ffn);
        }
        model.record_routed(cpu, self.batch, l, &mut b.routing(), self.outputs);

        // routed experts and shared expert, residual
        self.experts(l, ffn, [&b.x, &b.h], &mut b.ffn, &mut b.events, &mut b.y)?;
        if let Some(bias) = &ffn.sum_bias {
            b.y.chunks_exact_mut(bias.len()).for_each(|y| cpu.kernels.add(y, bias));
        }
        if let Some(norm) = &ffn.experts_norm {
            model.norm(cpu, norm, &b.y, &mut b.h);
            b.y.copy_from_slice(&b.h);
            cpu.add(&mut b.y, &b.branch);
        }
        self.feed_streams(l, SubLayer::FeedForward, [&mut b.y, &mut b.h], &mut b.streams, &mut b.x);
        Ok(())
    }
}

impl Model {
    pub(super) fn embed(&self, tokens: &[u32], x: &mut Vec<f32>) {
        let n_embd = self.hyper.n_embd;
        x.resize(tokens.len() * n_embd, 0.0);
        let table = self.weights.token_embd.mat(&self.gguf);
        for (&token, x) in tokens.iter().zip(x.chunks_exact_mut(n_embd)) {
            quant::dequantize(table.ty, table.row(token as usize), x);
        }
        if self.hyper.embedding_scale != 1.0 {
            x.iter_mut().for_each(|x| *x *= self.hyper.embedding_scale);
        }
    }

    /// x += norm(scale · y), or as the architecture adds; y and h are overwritten if there is a
    /// norm.
    fn add_to_stream(
        &self,
        cpu: &Cpu,
        norm: Option<&Norm>,
        scale: f32,
        [y, h]: [&mut [f32]; 2],
        x: &mut [f32],
    ) {
        let residual_scale = self.hyper.residual_scale;
        if self.descriptor.parts.residual == descriptor::Residual::Normed {
            x.fill(0.0);
            cpu.add_scaled(x, residual_scale, h);
            return cpu.add(x, y);
        }
        match norm {
            Some(norm) if self.descriptor.parts.residual == descriptor::Residual::Post => {
                cpu.add(x, y);
                self.norm(cpu, norm, x, h);
                x.copy_from_slice(h);
            }
            None => cpu.add_scaled(x, scale * residual_scale, y),
            Some(norm) => {
                if scale != 1.0 {
                    y.iter_mut().for_each(|y| *y *= scale);
                }
                self.norm(cpu, norm, y, h);
                cpu.add_scaled(x, residual_scale, h);
            }
        }
    }

    pub(super) fn norm(&self, cpu: &Cpu, norm: &Norm, x: &[f32], out: &mut [f32]) {
        let eps = norm.eps;
        match norm.kind {
            descriptor::Norm::Rms => cpu.rms_norm_rows(x, &norm.weight, eps, out),
            descriptor::Norm::GroupedRms => {
                out.copy_from_slice(x);
                cpu.rms_norm_groups(out, &norm.weight, self.hyper.norm_groups, eps);
            }
            descriptor::Norm::Layer => cpu.layer_norm_rows(x, (&norm.weight, &norm.bias), eps, out),
            descriptor::Norm::ScaledRms => {
                out.copy_from_slice(x);
                cpu.scaled_rms_norm_rows(out, &norm.weight, eps);
            }
            descriptor::Norm::None => out.copy_from_slice(x),
        }
    }

    /// The product of a linear layer with `n` rows, to be computed into `out`.
    pub(super) fn linear<'a>(
        &'a self,
        linear: &'a Linear,
        acts: &'a ActSet,
        out: &'a mut impl FloatBuffer,
        n: usize,
    ) -> Product<'a> {
        self.sum_inputs(&linear.weight, acts);
        let out = out.with_len(n * linear.weight.rows);
        let mat = linear.weight.mat(&self.gguf);
        let (acts, bias) = (acts.view(mat.ty), linear.bias.as_deref());
        Product { mat, acts, bias, scale: linear.scale, out, adapted: None }
    }
}
