//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). With c the compressed
//! row of a position, a head's score is (W_kᵀ·q)·c + q_rope·k_rope and its value W_v·Σ p·c: the
//! cache has one row a position for all heads, and heads' own keys and values are never made.

use crate::Result;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::attention::AttentionShape;
use crate::forward::CpuPass;
use crate::forward::attention::{MixerBuffers, RopeTables};
use crate::forward::mixer::CpuMixer;
use crate::forward::parts;
use crate::forward::scratch::{rows_of, rows_of_mut};
use crate::model::heads::LatentShape;
use crate::model::weights::{LatentRow, LatentWeights, Linear, Query, Sees};
use crate::simd::Floats;

#[derive(Default)]
pub struct LatentBuffers {
    compressed: Floats, // [rows, rank]
    nope: Floats,       // [rows, n_head, head_dim - n_rot]
    absorbed: Floats,   // [rows, n_head, rank]
    kv: Floats,         // [rows, rank + n_rot]
}

impl CpuMixer for LatentWeights {
    /// y = attention(h)
    fn mix(
        &self,
        pass: &mut CpuPass,
        l: usize,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) -> Result<()> {
        let (model, cpu, n) = (pass.model, pass.cpu, pass.batch.n_rows());
        let LatentShape { n_head, head_dim, head_dim_v, rank, n_rot } = self.shape;
        let chooses = pass.chooses();
        if let Sees::Chosen(indexer) = &self.sees {
            pass.indexer_keys(l, indexer, h, m);
        }
        if let Some(gate) = &self.gate {
            pass.product(gate, h, &mut m.acts, &mut m.gate);
        }
        pass.latent_products(self, h, m);
        // RoPE of the heads' last elements
        if self.rotates {
            let shape = model.rope_shape(head_dim, head_dim - n_rot);
            cpu.rope(&mut m.q, shape, m.ropes.of_layer(self.slides));
        }
        match &self.head_factors {
            None => cpu.rope(&mut m.q, model.rope_shape(head_dim, 0), &m.ropes.temperature),
            Some(factors) => {
                let MixerBuffers { ropes, acts, factors: of_heads, q, .. } = m;
                pass.multiply_heads(factors, ropes, acts, of_heads, q);
            }
        }
        if let Some(row) = &self.row {
            pass.store_latent(l, self, row, m);
        }
        // queries into the compressed space
        let (c, nope) = (&mut m.latent, head_dim - n_rot);
        c.nope.copy_from(m.q.chunks_exact(head_dim).map(|q| &q[..nope]));
        c.absorbed.resize(n * n_head * rank);
        m.acts.fill(cpu, Kinds::of([self.k_b.all.ty]), n * n_head, nope, &c.nope);
        pass.head_products(&self.k_b, &m.acts, &mut c.absorbed);
        let heads = c.absorbed.chunks_exact(rank).zip(m.q.chunks_exact(head_dim));
        m.k.copy_from(heads.flat_map(|(absorbed, q)| [absorbed, &q[nope..]]));
        // attention among compressed rows, each text over its own cache
        if let (Sees::Chosen(indexer), true) = (&self.sees, chooses) {
            pass.choose_positions(l, indexer, m);
        }
        pass.attend_latent(self, m)?;
        // heads' values
        m.attended.resize(n * n_head * head_dim_v);
        m.acts.fill(cpu, Kinds::of([self.v_b.all.ty]), n * n_head, rank, &m.latent.absorbed);
        pass.head_products(&self.v_b, &m.acts, &mut m.attended);
        if self.gate.is_some() {
            cpu.kernels.sigmoid(&mut m.gate);
            let each = m.attended.len() / m.gate.len();
            let values = m.attended.chunks_exact_mut(each).zip(&m.gate[..]);
            values.for_each(|(values, gate)| values.iter_mut().for_each(|x| *x *= gate));
        }
        pass.attention_output(&self.output, m, y);
        Ok(())
    }
}

impl CpuPass<'_, '_> {
    /// x [rows, heads, dim] *= the heads' own factors of the rows' positions
    pub(super) fn multiply_heads(
        &self,
        factors: &Linear,
        ropes: &RopeTables,
        acts: &mut ActSet,
        of_heads: &mut Floats,
        x: &mut [f32],
    ) {
        self.product(factors, ropes.temperature.turns().as_flattened(), acts, of_heads);
        let dim = x.len() / of_heads.len();
        let heads = x.chunks_exact_mut(dim).zip(&of_heads[..]);
        heads.for_each(|(x, factor)| x.iter_mut().for_each(|x| *x *= factor));
    }

    /// RMSNorm and RoPE of the rows, → cache
    fn store_latent(&mut self, l: usize, w: &LatentWeights, row: &LatentRow, m: &mut MixerBuffers) {
        let (model, cpu, c) = (self.model, self.cpu, &mut m.latent);
        let LatentShape { rank, n_rot, .. } = w.shape;
        let (width, eps) = (rank + n_rot, model.hyper.norm_eps);
        if let Some(norm) = &row.k_norm {
            for row in c.kv.chunks_exact_mut(width) {
                cpu.rms_norm_heads(&mut row[rank..], norm, eps);
            }
        }
        if w.rotates {
            cpu.rope(&mut c.kv, model.rope_shape(width, rank), m.ropes.of_layer(w.slides));
        }
        // The compressed part is normalised.
        c.compressed.copy_from(c.kv.chunks_exact(width).map(|row| &row[..rank]));
        cpu.rms_norm_heads(&mut c.compressed, &row.norm, eps);
        let rows = c.kv.chunks_exact_mut(width).zip(c.compressed.chunks_exact(rank));
        rows.for_each(|(row, normed)| row[..rank].copy_from_slice(normed));
        for (rows, segment) in self.batch.segments() {
            let (latent, _) = self.caches[segment.session].rows_mut(l);
            latent.store(cpu, rows_of(&c.kv, &rows, width), segment.past);
        }
    }

    /// Queries in `m.k` → `absorbed`, attention's output in the compressed space.
    fn attend_latent(&mut self, w: &LatentWeights, m: &mut MixerBuffers) -> Result<()> {
        let (hyper, cpu) = (&self.model.hyper, self.cpu);
        let LatentShape { n_head, rank, n_rot, .. } = w.shape;
        let c = &mut m.latent;
        for (rows, segment) in self.batch.segments() {
            let shape = AttentionShape {
                n_head,
                n_head_kv: 1,
                first: segment.past,
                all: None,
                window: w.window,
                chunk: None,
                cap: None,
                scale: w.scale,
                sinks: w.sinks.as_deref(),
                bias: None,
            };
            let (latent, _) = self.caches[segment.session].rows(w.source);
            // Rows that see all positions, then those that see chosen ones.
            let dense = match (&w.sees, &hyper.indexer) {
                (Sees::Chosen(_) | Sees::AsBefore, Some(indexer)) => {
                    rows.start
                        ..rows.end.min(rows.start + indexer.n_all().saturating_sub(segment.past))
                }
                _ => rows.clone(),
            };
            let q = rows_of(&m.k, &dense, n_head * (rank + n_rot));
            let out = rows_of_mut(&mut c.absorbed, &dense, n_head * rank);
            parts::attend(cpu, self.rests, shape, q, [latent, latent.narrow(rank)], out)?;
            for row in dense.end..rows.end {
                self.rests.rest()?;
                let latent = m.indexer.seen_by(cpu, row, latent);
                let q = rows_of(&m.k, &(row..row + 1), n_head * (rank + n_rot));
                let out = rows_of_mut(&mut c.absorbed, &(row..row + 1), n_head * rank);
                let shape = AttentionShape { first: 0, all: Some(latent.n_ctx), ..shape };
                cpu.attention(shape, q, latent, latent.narrow(rank), out);
            }
        }
        Ok(())
    }

    /// h → q [rows, n_head, head_dim] and kv [rows, rank + n_rot]
    fn latent_products(&self, w: &LatentWeights, h: &[f32], m: &mut MixerBuffers) {
        let (model, cpu, n) = (self.model, self.cpu, self.batch.n_rows());
        let c = &mut m.latent;
        let first = match &w.query {
            Query::Direct(q) => q,
            Query::Compressed { a, .. } => a,
        };
        let row = w.row.as_ref().map(|row| &row.a);
        let kinds = Kinds::of([first].into_iter().chain(row).map(|linear| linear.weight.ty));
        m.acts.fill(cpu, kinds, n, model.hyper.n_embd, h);
        let into = match &w.query {
            Query::Direct(_) => &mut m.q,
            Query::Compressed { .. } => &mut c.compressed,
        };
        let first = self.linear(first, &m.acts, into, n);
        match row {
            Some(row) => cpu.products([first, self.linear(row, &m.acts, &mut c.kv, n)]),
            None => cpu.products([first]),
        }
        if let Query::Compressed { norm, b: second, .. } = &w.query {
            cpu.rms_norm_heads(&mut c.compressed, norm, model.hyper.norm_eps);
            let indexer = match &w.sees {
                Sees::Chosen(indexer) if self.chooses() => Some(&indexer.q),
                _ => None,
            };
            let kinds = Kinds::of([second].into_iter().chain(indexer).map(|l| l.weight.ty));
            m.acts.fill(cpu, kinds, n, second.weight.cols, &c.compressed);
            cpu.products([self.linear(second, &m.acts, &mut m.q, n)]);
            if let Some(q) = indexer {
                cpu.products([self.linear(q, &m.acts, &mut m.indexer.q, n)]);
            }
        }
    }
}
