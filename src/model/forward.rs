//! The layer loop. Rows of every buffer are tokens; shapes stand beside the names.

use super::Model;
use super::kv::KvCache;
use super::publish::{Pass, Published, nanos_since};
use super::record::Recorder;
use super::weights::{AttentionWeights, ExpertShape, FfnWeights, Gate, Linear, SharedExpert};
use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::cpu::expert::{Demand, ExpertBuffers, GranuleMats};
use crate::backend::cpu::linear::Product;
use crate::backend::cpu::rope::RopeTable;
use crate::backend::cpu::router::Route;
use crate::experts::{Access, ExpertStore, ReadyGranule, Work};
use crate::policy::Phase;
use crate::quant;
use crate::simd::MatRef;
use std::time::Instant;

/// Logits are computed for this many tokens at a time: a vocabulary is large.
const LOGITS_TOKENS: usize = 32;

/// Buffers of one session; they grow to the largest micro-batch and stay.
#[derive(Default)]
pub struct Buffers {
    pub(super) x: Vec<f32>, // [tokens, n_embd], the residual stream
    pub(super) h: Vec<f32>, // [tokens, n_embd], normalised
    q: Vec<f32>,            // [tokens, n_head, head_dim]
    k: Vec<f32>,            // [tokens, n_head_kv, head_dim]
    v: Vec<f32>,            // [tokens, n_head_kv, head_dim_v]
    attended: Vec<f32>,     // [tokens, n_head, head_dim_v]
    y: Vec<f32>,            // [tokens, n_embd]
    acts: ActSet,
    rope: RopeTable,
    pub(super) route: Route,
    demand: Demand,
    shared_demand: Demand,
    shared_gate: Vec<f32>, // [tokens]
    expert: ExpertBuffers,
    work: Work,
    shared_work: Work,
    pub(super) ahead_acts: ActSet,
    pub(super) published: Published,
    logits: Vec<f32>,
}

/// Which tokens of a micro-batch get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    None,
    Last,
    All,
}

/// What the caller hears while a micro-batch is computed.
pub trait Listener {
    /// Who writes down the routing of this micro-batch, if anyone does.
    fn recorder(&mut self) -> Option<&mut dyn Recorder>;
    /// Logits of a token of this micro-batch; the listener may change them.
    fn logits(&mut self, token: usize, logits: &mut [f32]);
}

impl Model {
    /// Computes one micro-batch at positions `past..` of the timeline `request`, appends it to the
    /// cache and gives the wanted logits to `listener`.
    pub fn forward(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        tokens: &[u32],
        (request, past): (u32, usize),
        want: Want,
        listener: &mut dyn Listener,
    ) -> Result<()> {
        let hyper = &self.hyper;
        let n = tokens.len();
        let pass = Pass::new(request, n);
        // embedding
        self.embed(tokens, &mut b.x);
        self.publish_start(b, pass);
        self.record_start(b, tokens, listener);
        b.h.resize(n * hyper.n_embd, 0.0);
        b.y.resize(n * hyper.n_embd, 0.0);
        b.rope.fill(&self.frequencies, past, n);

        for (l, layer) in self.weights.layers.iter().enumerate() {
            // attention norm, attention, residual
            cpu.rms_norm_rows(&b.x, &layer.attention.norm, hyper.norm_eps, &mut b.h);
            self.attention(cpu, kv, b, l, &layer.attention, past);
            cpu.add(&mut b.x, &b.y);

            // ffn norm, router
            let ffn = &layer.ffn;
            cpu.rms_norm_rows(&b.x, &ffn.norm, hyper.norm_eps, &mut b.h);
            b.acts.fill(cpu, self.ffn_kinds(ffn), n, hyper.n_embd, &b.h);
            self.route(cpu, b, ffn, n);
            self.record_routed(cpu, b, l, listener);

            // experts and shared expert, residual
            let result = self.experts(cpu, b, l, ffn, pass);
            self.experts_of(&ffn.gate).release(&mut b.work);
            result?;
            cpu.add(&mut b.x, &b.y);
        }

        // output norm, output head
        let start = Instant::now();
        self.logits(cpu, b, n, want, listener);
        b.published.timing.head_ns = nanos_since(start);
        self.publish_end(b, pass);
        Ok(())
    }

    fn embed(&self, tokens: &[u32], x: &mut Vec<f32>) {
        let n_embd = self.hyper.n_embd;
        x.resize(tokens.len() * n_embd, 0.0);
        let table = self.weights.token_embd.mat(&self.gguf);
        for (&token, x) in tokens.iter().zip(x.chunks_exact_mut(n_embd)) {
            quant::dequantize(table.ty, table.row(token as usize), x);
        }
    }

    /// h → y
    fn attention(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        l: usize,
        w: &AttentionWeights,
        past: usize,
    ) {
        let hyper = &self.hyper;
        let n = b.h.len() / hyper.n_embd;
        // q, k, v
        let kinds = Kinds::of([&w.q, &w.k, &w.v].map(|linear| linear.weight.ty));
        b.acts.fill(cpu, kinds, n, hyper.n_embd, &b.h);
        cpu.products([
            self.linear(&w.q, &b.acts, &mut b.q, n),
            self.linear(&w.k, &b.acts, &mut b.k, n),
            self.linear(&w.v, &b.acts, &mut b.v, n),
        ]);
        // QK-norm
        if let Some(norm) = &w.q_norm {
            cpu.rms_norm_heads(&mut b.q, norm, hyper.norm_eps);
        }
        if let Some(norm) = &w.k_norm {
            cpu.rms_norm_heads(&mut b.k, norm, hyper.norm_eps);
        }
        // RoPE
        cpu.rope(&mut b.q, hyper.head_dim, &b.rope, self.pairing());
        cpu.rope(&mut b.k, hyper.head_dim, &b.rope, self.pairing());
        // cache
        let (mut keys, mut values) = kv.rows_mut(l);
        keys.store(cpu.kernels, &b.k, past);
        values.store(cpu.kernels, &b.v, past);
        // attention
        b.attended.resize(n * hyper.n_head * hyper.head_dim_v, 0.0);
        let shape = AttentionShape {
            n_head: hyper.n_head,
            n_head_kv: hyper.n_head_kv,
            first: past,
            scale: 1.0 / (hyper.head_dim as f32).sqrt(),
        };
        let (keys, values) = kv.rows(l);
        cpu.attention(shape, &b.q, keys, values, &mut b.attended);
        // output projection
        let output = w.output.mat(&self.gguf);
        b.acts.fill(cpu, Kinds::of([output.ty]), n, output.cols, &b.attended);
        cpu.product(output, b.acts.view(output.ty), &mut b.y);
    }

    /// The product of a linear layer, to be computed into `out`.
    fn linear<'a>(
        &'a self,
        linear: &'a Linear,
        acts: &'a ActSet,
        out: &'a mut Vec<f32>,
        n: usize,
    ) -> Product<'a> {
        out.resize(n * linear.weight.rows, 0.0);
        let mat = linear.weight.mat(&self.gguf);
        Product { mat, acts: acts.view(mat.ty), bias: linear.bias.as_deref(), out }
    }

    /// Everything that reads the normalised input of the FFN.
    fn ffn_kinds(&self, ffn: &FfnWeights) -> Kinds {
        let router = match &ffn.gate {
            Gate::Router(m) => Some(m.ty),
            Gate::Dense => None,
        };
        let shared = ffn.shared.iter().flat_map(|s| {
            [s.shape.gate, s.shape.up].into_iter().chain(s.gate.as_ref().map(|m| m.ty))
        });
        Kinds::of([ffn.expert.gate, ffn.expert.up].into_iter().chain(router).chain(shared))
    }

    fn route(&self, cpu: &Cpu, b: &mut Buffers, ffn: &FfnWeights, n: usize) {
        match &ffn.gate {
            Gate::Dense => b.route.dense(n),
            Gate::Router(router) => {
                (b.route.n_experts, b.route.k) = (router.rows, self.hyper.n_experts_used);
                b.route.probs.resize(n * router.rows, 0.0);
                let mat = router.mat(&self.gguf);
                cpu.product(mat, b.acts.view(mat.ty), &mut b.route.probs);
                let (normalize, scale) = (self.hyper.normalize_weights, self.hyper.weights_scale);
                cpu.route_softmax_top_k(&mut b.route, normalize, scale);
            }
        }
    }

    /// y = shared expert + Σ weights · chosen experts. The caller releases `b.work`, also after an
    /// error.
    fn experts(
        &self,
        cpu: &Cpu,
        b: &mut Buffers,
        l: usize,
        ffn: &FfnWeights,
        pass: Pass,
    ) -> Result<()> {
        let (store, n_embd) = (self.experts_of(&ffn.gate), self.hyper.n_embd);
        let access = match pass.phase {
            Phase::Prompt => Access::Prompt,
            Phase::Decode => Access::Decode,
        };
        // demand: pins, and queues loads of what is missing
        b.demand.group(&b.route.chosen, b.route.k, b.route.n_experts);
        store.acquire(l, &b.demand.experts, access, &mut b.work);
        // shared expert, a look ahead: dense work while loads are in flight
        b.y.fill(0.0);
        if let Some(shared) = &ffn.shared {
            self.shared_expert(cpu, b, l, shared)?;
        }
        self.publish_routed(cpu, b, l, pass);
        // granules: resident ones first, then as they land
        let start = Instant::now();
        b.expert.begin(b.demand.n_pairs(), ffn.expert.n_ff, n_embd, ffn.expert.inner());
        while store.next_ready(&mut b.work)? {
            let mats = self.granules(&store.ready(&b.work), &b.demand, &ffn.expert);
            cpu.expert_granules(&mats, &b.demand, &b.acts, &mut b.expert);
        }
        // ordered sum
        cpu.ordered_sum(&b.demand, &b.route.weights, &b.expert, &mut b.y);
        b.published.timing.add_experts(nanos_since(start), b.work.stall_ns());
        Ok(())
    }

    /// y += sigmoid(gate · h) · expert(h)
    fn shared_expert(
        &self,
        cpu: &Cpu,
        b: &mut Buffers,
        l: usize,
        shared: &SharedExpert,
    ) -> Result<()> {
        let n = b.route.chosen.len() / b.route.k;
        b.shared_gate.clear();
        b.shared_gate.resize(n, 1.0);
        if let Some(gate) = &shared.gate {
            let mat = gate.mat(&self.gguf);
            cpu.product(mat, b.acts.view(mat.ty), &mut b.shared_gate);
            cpu.kernels.sigmoid(&mut b.shared_gate);
        }
        let store = &self.shared;
        b.shared_demand.everyone(n);
        b.expert.begin(n, shared.shape.n_ff, self.hyper.n_embd, shared.shape.inner());
        store.acquire(l, &b.shared_demand.experts, Access::Decode, &mut b.shared_work);
        while store.next_ready(&mut b.shared_work)? {
            let mats = self.granules(&store.ready(&b.shared_work), &b.shared_demand, &shared.shape);
            cpu.expert_granules(&mats, &b.shared_demand, &b.acts, &mut b.expert);
        }
        cpu.ordered_sum(&b.shared_demand, &b.shared_gate, &b.expert, &mut b.y);
        store.release(&mut b.shared_work);
        Ok(())
    }

    /// Bytes and types brought together: what the backend computes with.
    fn granules<'a>(
        &self,
        ready: &[ReadyGranule<'a>],
        demand: &Demand,
        shape: &ExpertShape,
    ) -> Vec<GranuleMats<'a>> {
        let mats = |g: &ReadyGranule<'a>| {
            let n = g.rows.len();
            GranuleMats {
                slot: demand.slot(g.expert),
                rows: g.rows.clone(),
                gate: MatRef::new(shape.gate, g.gate, n, shape.n_embd, g.gate_stride),
                up: MatRef::new(shape.up, g.up, n, shape.n_embd, g.up_stride),
                down: MatRef::new(shape.down, g.down, shape.n_embd, n, g.down_stride),
            }
        };
        ready.iter().map(mats).collect()
    }

    fn logits(
        &self,
        cpu: &Cpu,
        b: &mut Buffers,
        n: usize,
        want: Want,
        listener: &mut dyn Listener,
    ) {
        let first = match want {
            Want::None => return,
            Want::Last => n - 1,
            Want::All => 0,
        };
        let (n_embd, n_vocab) = (self.hyper.n_embd, self.weights.output.rows);
        let output = self.weights.output.mat(&self.gguf);
        for start in (first..n).step_by(LOGITS_TOKENS) {
            let m = LOGITS_TOKENS.min(n - start);
            let h = &mut b.h[..m * n_embd];
            let x = &b.x[start * n_embd..][..m * n_embd];
            cpu.rms_norm_rows(x, &self.weights.output_norm, self.hyper.norm_eps, h);
            b.acts.fill(cpu, Kinds::of([output.ty]), m, n_embd, h);
            b.logits.resize(m * n_vocab, 0.0);
            cpu.product(output, b.acts.view(output.ty), &mut b.logits);
            for (t, logits) in b.logits.chunks_exact_mut(n_vocab).enumerate() {
                listener.logits(start + t, logits);
            }
        }
    }
}

impl ExpertShape {
    /// The form of the intermediate activations.
    fn inner(&self) -> Kinds {
        Kinds::of([self.down])
    }
}
