//! What mixes positions: grouped-query attention and latent attention, over the KV cache.

use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::ops::RopeShape;
use crate::forward::Buffers;
use crate::forward::gated_delta::DeltaBuffers;
use crate::model::Model;
use crate::model::kv::KvCache;
use crate::model::weights::{AttentionWeights, LatentWeights, Linear, Query};
use crate::simd::Floats;

/// What attention needs for itself.
#[derive(Default)]
pub struct MixerBuffers {
    pub q: Floats,        // [tokens, n_head, head_dim]
    pub k: Floats,        // [tokens, n_head_kv, head_dim]
    pub v: Floats,        // [tokens, n_head_kv, head_dim_v]
    pub attended: Floats, // [tokens, n_head, head_dim_v]
    pub gate: Floats,     // as `attended`
    compressed: Floats,   // [tokens, rank]
    nope: Floats,         // [tokens, n_head, head_dim - n_rot]
    absorbed: Floats,     // [tokens, n_head, kv_rank]
    kv: Floats,           // [tokens, kv_rank + n_rot]
    acts: ActSet,
    pub delta: DeltaBuffers,
}

impl MixerBuffers {
    /// `q` with [q, gate] a head → `q` and `gate`.
    fn split_gates(&mut self, head_dim: usize) {
        self.gate.copy_from(self.q.chunks_exact(2 * head_dim).map(|head| &head[head_dim..]));
        let n_heads = self.q.len() / (2 * head_dim);
        for head in 1..n_heads {
            let start = 2 * head * head_dim;
            self.q.copy_within(start..start + head_dim, head * head_dim);
        }
        self.q.resize(n_heads * head_dim);
    }
}

impl Model {
    /// h → y
    pub(super) fn attention(
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
        let m = &mut b.mixer;
        // q, k, v
        let kinds = Kinds::of([&w.q, &w.k, &w.v].map(|linear| linear.weight.ty));
        b.acts.fill(cpu, kinds, n, hyper.n_embd, &b.h);
        cpu.products([
            self.linear(&w.q, &b.acts, &mut m.q, n),
            self.linear(&w.k, &b.acts, &mut m.k, n),
            self.linear(&w.v, &b.acts, &mut m.v, n),
        ]);
        if w.gated {
            m.split_gates(hyper.head_dim);
        }
        // QK-norm
        if let Some(norm) = &w.q_norm {
            cpu.rms_norm_heads(&mut m.q, norm, hyper.norm_eps);
        }
        if let Some(norm) = &w.k_norm {
            cpu.rms_norm_heads(&mut m.k, norm, hyper.norm_eps);
        }
        // RoPE
        let shape = self.rope_shape(hyper.head_dim, hyper.rope_offset);
        cpu.rope(&mut m.q, shape, &b.rope);
        cpu.rope(&mut m.k, shape, &b.rope);
        // cache
        let (keys, values) = kv.rows_mut(l);
        keys.store(cpu, &m.k, past);
        values.store(cpu, &m.v, past);
        // attention
        m.attended.resize(n * hyper.n_head * hyper.head_dim_v);
        let shape = AttentionShape {
            n_head: hyper.n_head,
            n_head_kv: hyper.n_head_kv,
            first: past,
            all: None,
            window: w.window,
            scale: hyper.attention_scale,
            sinks: w.sinks.as_deref(),
            bias: None,
        };
        let (keys, values) = kv.rows(l);
        cpu.attention(shape, &m.q, keys, values, &mut m.attended);
        if w.gated {
            cpu.kernels.sigmoid(&mut m.gate);
            m.attended.iter_mut().zip(&m.gate[..]).for_each(|(x, gate)| *x *= gate);
        }
        self.attention_output(cpu, b, &w.output, n);
    }

    /// h → y by multi-head latent attention. With c the compressed row of a position, a head's
    /// score is (W_kᵀ·q)·c + q_rope·k_rope and its value W_v·Σ p·c: keys and values of heads are
    /// never made.
    pub(super) fn latent_attention(
        &self,
        cpu: &Cpu,
        kv: &mut KvCache,
        b: &mut Buffers,
        l: usize,
        w: &LatentWeights,
        past: usize,
    ) {
        let hyper = &self.hyper;
        let n = b.h.len() / hyper.n_embd;
        let (rank, n_head, n_rot) = (hyper.kv_rank, hyper.n_head, hyper.rope.n_rot);
        self.latent_products(cpu, b, w, n);
        let m = &mut b.mixer;
        // RoPE of the heads' last elements, and of the row's
        cpu.rope(&mut m.q, self.rope_shape(hyper.head_dim, hyper.head_dim - n_rot), &b.rope);
        cpu.rope(&mut m.kv, self.rope_shape(rank + n_rot, rank), &b.rope);
        // cache: the compressed part is normalised
        m.compressed.copy_from(m.kv.chunks_exact(rank + n_rot).map(|row| &row[..rank]));
        cpu.rms_norm_heads(&mut m.compressed, &w.kv_a_norm, hyper.norm_eps);
        let rows = m.kv.chunks_exact_mut(rank + n_rot).zip(m.compressed.chunks_exact(rank));
        rows.for_each(|(row, normed)| row[..rank].copy_from_slice(normed));
        kv.rows_mut(l).0.store(cpu, &m.kv, past);
        // queries into the compressed space
        let nope = hyper.head_dim - n_rot;
        m.nope.copy_from(m.q.chunks_exact(hyper.head_dim).map(|q| &q[..nope]));
        m.absorbed.resize(n * n_head * rank);
        let mats = w.k_b.mats(&self.gguf);
        m.acts.fill(cpu, Kinds::of([mats.all.ty]), n * n_head, nope, &m.nope);
        cpu.head_products(mats, m.acts.view(mats.all.ty), &mut m.absorbed);
        let heads = m.absorbed.chunks_exact(rank).zip(m.q.chunks_exact(hyper.head_dim));
        m.k.copy_from(heads.flat_map(|(absorbed, q)| [absorbed, &q[nope..]]));
        // attention among compressed rows
        let shape = AttentionShape {
            n_head,
            n_head_kv: 1,
            first: past,
            all: None,
            window: None,
            scale: hyper.attention_scale,
            sinks: None,
            bias: None,
        };
        let (rows, _) = kv.rows(l);
        cpu.attention(shape, &m.k, rows, rows.narrow(rank), &mut m.absorbed);
        // heads' values
        m.attended.resize(n * n_head * hyper.head_dim_v);
        let mats = w.v_b.mats(&self.gguf);
        m.acts.fill(cpu, Kinds::of([mats.all.ty]), n * n_head, rank, &m.absorbed);
        cpu.head_products(mats, m.acts.view(mats.all.ty), &mut m.attended);
        self.attention_output(cpu, b, &w.output, n);
    }

    /// h → q [tokens, n_head, head_dim] and kv [tokens, kv_rank + n_rot]
    fn latent_products(&self, cpu: &Cpu, b: &mut Buffers, w: &LatentWeights, n: usize) {
        let m = &mut b.mixer;
        let first = match &w.query {
            Query::Direct(q) => q,
            Query::Compressed { a, .. } => a,
        };
        let kinds = Kinds::of([first, &w.kv_a].map(|linear| linear.weight.ty));
        b.acts.fill(cpu, kinds, n, self.hyper.n_embd, &b.h);
        let into = match &w.query {
            Query::Direct(_) => &mut m.q,
            Query::Compressed { .. } => &mut m.compressed,
        };
        cpu.products([
            self.linear(first, &b.acts, into, n),
            self.linear(&w.kv_a, &b.acts, &mut m.kv, n),
        ]);
        if let Query::Compressed { norm, b: second, .. } = &w.query {
            cpu.rms_norm_heads(&mut m.compressed, norm, self.hyper.norm_eps);
            let kinds = Kinds::of([second.weight.ty]);
            m.acts.fill(cpu, kinds, n, second.weight.cols, &m.compressed);
            cpu.products([self.linear(second, &m.acts, &mut m.q, n)]);
        }
    }

    pub(super) fn rope_shape(&self, head_dim: usize, offset: usize) -> RopeShape {
        RopeShape { head_dim, offset, pairing: self.descriptor.parts.rope }
    }

    /// What attention gathered → y
    pub(super) fn attention_output(&self, cpu: &Cpu, b: &mut Buffers, output: &Linear, n: usize) {
        let kinds = Kinds::of([output.weight.ty]);
        b.mixer.acts.fill(cpu, kinds, n, output.weight.cols, &b.mixer.attended);
        cpu.products([self.linear(output, &b.mixer.acts, &mut b.y, n)]);
    }
}
