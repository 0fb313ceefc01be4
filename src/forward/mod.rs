//! The layer loop. Rows of every buffer are tokens; shapes stand beside the names.

mod attention;
pub mod encoder_decoder;
mod events;
mod gated_delta;
pub mod gpu;
mod moe;
pub mod record;

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::linear::Product;
use crate::backend::cpu::rope::RopeTable;
use crate::backend::ops::Route;
use crate::forward::attention::MixerBuffers;
use crate::forward::events::{Pass, Published, nanos_since};
use crate::forward::moe::FfnBuffers;
use crate::forward::record::Recorder;
use crate::model::Model;
use crate::model::kv::KvCache;
use crate::model::weights::{Linear, Mixer, Norm};
use crate::simd::{FloatBuffer, Floats};
use crate::{model::descriptor, quant};
use std::time::Instant;

/// Logits are computed for this many tokens at a time: a vocabulary is large.
pub const LOGITS_TOKENS: usize = 32;

/// Buffers of one session; they grow to the largest micro-batch and stay.
#[derive(Default)]
pub struct Buffers {
    pub(super) x: Vec<f32>,      // [tokens, n_embd], the residual stream
    pub(super) before: Vec<f32>, // [tokens, n_embd], as it was before attention
    pub(super) h: Vec<f32>,      // [tokens, n_embd], normalised
    pub(super) y: Floats,        // [tokens, n_embd], what a part adds
    pub(super) acts: ActSet,
    pub(super) rope: RopeTable,
    pub(super) mixer: MixerBuffers,
    pub(super) route: Route,
    pub(super) ffn: FfnBuffers,
    pub(super) ahead_acts: ActSet,
    pub(super) published: Published,
    pub(super) logits: Vec<f32>,
    pub(super) best_ids: Vec<u32>,
}

/// Which tokens of a micro-batch get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    None,
    Last,
    All,
    /// The last one, of whose logits these suffice.
    LastBest(TopK),
}

/// The `k` greatest logits of the first `n_vocab` ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopK {
    pub k: usize,
    pub n_vocab: usize,
}

/// Logits of a token.
pub enum Logits<'a> {
    /// By id; who gets them may change them.
    All(&'a mut [f32]),
    /// As many as [`TopK`] says: the greatest first, of equals the lowest id. NaN and +∞ are equals
    /// before all others.
    Best { ids: &'a [u32], logits: &'a [f32] },
}

impl Want {
    /// The first of `n` tokens that gets logits; all behind it do.
    pub(super) fn first(self, n: usize) -> Option<usize> {
        match self {
            Want::None => None,
            Want::Last | Want::LastBest(_) => Some(n - 1),
            Want::All => Some(0),
        }
    }
}

/// What the caller hears while a micro-batch is computed.
pub trait Observer {
    /// Who writes down the routing of this micro-batch, if anyone does.
    fn recorder(&mut self) -> Option<&mut dyn Recorder>;
    /// Layer `l` of a pass is next. An error ends the pass.
    fn layer(&mut self, l: usize) -> Result<()>;
    /// Logits of a token of this micro-batch: the best alone only where they are wanted, and all
    /// even then where that is no more work.
    fn logits(&mut self, token: usize, logits: Logits<'_>);
}

impl Model {
    /// Computes one micro-batch at positions `past..` of the timeline `request`, appends it to the
    /// cache and gives the wanted logits to `observer`.
    pub fn forward(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        tokens: &[u32],
        (request, past): (u32, usize),
        want: Want,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let n = tokens.len();
        let pass = Pass::new(request, n);
        self.begin_pass(b, tokens, past, kv.n_ctx(), pass, observer);
        for l in 0..self.weights.layers.len() {
            let next = observer.layer(l);
            let result = next.and_then(|()| self.layer(cpu, kv, b, l, past, pass, observer));
            result.inspect_err(|_| self.cancel_layer_prefetch())?;
        }

        // output norm, output head
        let start = Instant::now();
        self.logits(cpu, b, n, want, observer);
        b.published.timing.head_ns = nanos_since(start);
        self.publish_end(b, pass);
        Ok(())
    }

    /// Embeddings, and what all layers read.
    pub(super) fn begin_pass(
        &self,
        b: &mut Buffers,
        tokens: &[u32],
        past: usize,
        n_ctx: usize,
        pass: Pass,
        observer: &mut dyn Observer,
    ) {
        let n = tokens.len();
        self.embed(tokens, &mut b.x);
        self.publish_start(b, pass);
        self.record_start(b, tokens, observer);
        b.h.resize(n * self.hyper.n_embd, 0.0);
        b.y.resize(n * self.hyper.n_embd);
        b.rope.fill(self.frequencies(n_ctx), past, n);
    }

    /// x → x
    #[allow(clippy::too_many_arguments)] // a pass and its place in it
    pub(super) fn layer(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        l: usize,
        past: usize,
        pass: Pass,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (layer, hyper) = (&self.weights.layers[l], &self.hyper);
        let n = b.x.len() / hyper.n_embd;
        // norm, attention, residual
        self.norm(cpu, &layer.norm, &b.x, &mut b.h);
        match &layer.mixer {
            Mixer::Attention(w) => self.attention(cpu, kv, b, l, w, past),
            Mixer::Latent(w) => self.latent_attention(cpu, kv, b, l, w, past),
            Mixer::Delta(w) => self.delta_rule(cpu, kv, b, l, w),
        }
        self.keep_before(b, &layer.ffn);
        cpu.add_scaled(&mut b.x, hyper.residual_scale, &b.y);

        // dense branch, residual
        if let Some(branch) = &layer.ffn.branch {
            self.dense_branch(cpu, b, l, branch)?;
            cpu.add_scaled(&mut b.x, hyper.residual_scale, &b.y);
        }

        // norm, router
        let ffn = &layer.ffn;
        let seen = if ffn.branch.is_some() { &b.before } else { &b.x };
        self.norm(cpu, &ffn.norm, seen, &mut b.h);
        b.acts.fill(cpu, Kinds::of(ffn.inputs()), n, hyper.n_embd, &b.h);
        self.route(cpu, b, ffn, n);
        self.record_routed(cpu, b, l, observer);

        // experts and shared expert, residual
        let result = self.experts(cpu, b, l, ffn, pass);
        self.experts_of(&ffn.gate).release(&mut b.ffn.work);
        result?;
        cpu.add_scaled(&mut b.x, hyper.residual_scale, &b.y);
        Ok(())
    }

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

    pub(super) fn norm(&self, cpu: &Cpu, norm: &Norm, x: &[f32], out: &mut [f32]) {
        let eps = self.hyper.norm_eps;
        match norm.kind {
            descriptor::Norm::Rms => cpu.rms_norm_rows(x, &norm.weight, eps, out),
            descriptor::Norm::Layer => cpu.layer_norm_rows(x, (&norm.weight, &norm.bias), eps, out),
        }
    }

    /// The product of a linear layer, to be computed into `out`.
    pub(super) fn linear<'a>(
        &'a self,
        linear: &'a Linear,
        acts: &'a ActSet,
        out: &'a mut impl FloatBuffer,
        n: usize,
    ) -> Product<'a> {
        let out = out.with_len(n * linear.weight.rows);
        let mat = linear.weight.mat(&self.gguf);
        Product { mat, acts: acts.view(mat.ty), bias: linear.bias.as_deref(), out }
    }

    pub(super) fn logits(
        &self,
        cpu: &Cpu,
        b: &mut Buffers,
        n: usize,
        want: Want,
        observer: &mut dyn Observer,
    ) {
        let Some(first) = want.first(n) else { return };
        let head = &self.weights.output;
        let n_embd = self.hyper.n_embd;
        for start in (first..n).step_by(LOGITS_TOKENS) {
            let m = LOGITS_TOKENS.min(n - start);
            let h = &mut b.h[..m * n_embd];
            let x = &b.x[start * n_embd..][..m * n_embd];
            self.norm(cpu, &self.weights.output_norm, x, h);
            b.acts.fill(cpu, Kinds::of([head.weight.ty]), m, n_embd, h);
            cpu.products([self.linear(head, &b.acts, &mut b.logits, m)]);
            self.give_logits(&mut b.logits, start, observer);
        }
    }

    /// The head's products of tokens from `start` on → logits, to the observer.
    pub(super) fn give_logits(
        &self,
        logits: &mut [f32],
        start: usize,
        observer: &mut dyn Observer,
    ) {
        if self.weights.logit_divisor != 1.0 {
            logits.iter_mut().for_each(|l| *l /= self.weights.logit_divisor);
        }
        for (t, logits) in logits.chunks_exact_mut(self.n_vocab()).enumerate() {
            observer.logits(start + t, Logits::All(logits));
        }
    }
}
