//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). With c the compressed
//! row of a position, a head's score is (W_kᵀ·q)·c + q_rope·k_rope and its value W_v·Σ p·c: the
//! cache has one row a position for all heads, and heads' own keys and values are never made.

use crate::Result;
use crate::backend::cpu::acts::Kinds;
use crate::backend::cpu::attention::AttentionShape;
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::forward::parts;
use crate::forward::scratch::{rows_of, rows_of_mut};
use crate::model::weights::{LatentWeights, Query};
use crate::simd::Floats;

#[derive(Default)]
pub struct LatentBuffers {
    compressed: Floats, // [rows, rank]
    nope: Floats,       // [rows, n_head, head_dim - n_rot]
    absorbed: Floats,   // [rows, n_head, kv_rank]
    kv: Floats,         // [rows, kv_rank + n_rot]
}

impl CpuPass<'_, '_> {
    /// y = attention(h) of layer `l`
    pub(super) fn latent_attention(
        &mut self,
        l: usize,
        w: &LatentWeights,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        let hyper = &model.hyper;
        let (rank, n_head, n_rot) = (hyper.kv_rank, hyper.n_head, hyper.rope.n_rot);
        self.latent_products(w, h, m);
        // RoPE of the heads' last elements, and of the row's
        cpu.rope(&mut m.q, model.rope_shape(hyper.head_dim, hyper.head_dim - n_rot), &m.ropes.main);
        let c = &mut m.latent;
        cpu.rope(&mut c.kv, model.rope_shape(rank + n_rot, rank), &m.ropes.main);
        cpu.rope(&mut m.q, model.rope_shape(hyper.head_dim, 0), &m.ropes.temperature);
        // cache: the compressed part is normalised
        c.compressed.copy_from(c.kv.chunks_exact(rank + n_rot).map(|row| &row[..rank]));
        cpu.rms_norm_heads(&mut c.compressed, &w.kv_a_norm, hyper.norm_eps);
        let rows = c.kv.chunks_exact_mut(rank + n_rot).zip(c.compressed.chunks_exact(rank));
        rows.for_each(|(row, normed)| row[..rank].copy_from_slice(normed));
        for (rows, segment) in self.batch.segments() {
            let (latent, _) = self.caches[segment.session].rows_mut(l);
            latent.store(cpu, rows_of(&c.kv, &rows, rank + n_rot), segment.past);
        }
        // queries into the compressed space
        let nope = hyper.head_dim - n_rot;
        c.nope.copy_from(m.q.chunks_exact(hyper.head_dim).map(|q| &q[..nope]));
        c.absorbed.resize(n * n_head * rank);
        let mats = w.k_b.mats(&model.gguf);
        m.acts.fill(cpu, Kinds::of([mats.all.ty]), n * n_head, nope, &c.nope);
        cpu.head_products(mats, m.acts.view(mats.all.ty), &mut c.absorbed);
        let heads = c.absorbed.chunks_exact(rank).zip(m.q.chunks_exact(hyper.head_dim));
        m.k.copy_from(heads.flat_map(|(absorbed, q)| [absorbed, &q[nope..]]));
        // attention among compressed rows, each text over its own cache
        for (rows, segment) in self.batch.segments() {
            let shape = AttentionShape {
                n_head,
                n_head_kv: 1,
                first: segment.past,
                all: None,
                window: None,
                chunk: None,
                cap: None,
                scale: hyper.attention_scale,
                sinks: None,
                bias: None,
            };
            let (latent, _) = self.caches[segment.session].rows(l);
            let q = rows_of(&m.k, &rows, n_head * (rank + n_rot));
            let out = rows_of_mut(&mut c.absorbed, &rows, n_head * rank);
            parts::attend(cpu, self.observer, shape, q, [latent, latent.narrow(rank)], out)?;
        }
        // heads' values
        m.attended.resize(n * n_head * hyper.head_dim_v);
        let mats = w.v_b.mats(&model.gguf);
        m.acts.fill(cpu, Kinds::of([mats.all.ty]), n * n_head, rank, &c.absorbed);
        cpu.head_products(mats, m.acts.view(mats.all.ty), &mut m.attended);
        self.attention_output(&w.output, m, y);
        Ok(())
    }

    /// h → q [rows, n_head, head_dim] and kv [rows, kv_rank + n_rot]
    fn latent_products(&self, w: &LatentWeights, h: &[f32], m: &mut MixerBuffers) {
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        let c = &mut m.latent;
        let first = match &w.query {
            Query::Direct(q) => q,
            Query::Compressed { a, .. } => a,
        };
        let kinds = Kinds::of([first, &w.kv_a].map(|linear| linear.weight.ty));
        m.acts.fill(cpu, kinds, n, model.hyper.n_embd, h);
        let into = match &w.query {
            Query::Direct(_) => &mut m.q,
            Query::Compressed { .. } => &mut c.compressed,
        };
        cpu.products([
            model.linear(first, &m.acts, into, n),
            model.linear(&w.kv_a, &m.acts, &mut c.kv, n),
        ]);
        if let Query::Compressed { norm, b: second, .. } = &w.query {
            cpu.rms_norm_heads(&mut c.compressed, norm, model.hyper.norm_eps);
            let kinds = Kinds::of([second.weight.ty]);
            m.acts.fill(cpu, kinds, n, second.weight.cols, &c.compressed);
            cpu.products([model.linear(second, &m.acts, &mut m.q, n)]);
        }
    }
}
