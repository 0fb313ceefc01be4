//! Multi-head latent attention on a device: the stages of `Model::latent_attention`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::rows::Columns;
use crate::forward::gpu::acts::RowShape;
use crate::forward::gpu::bump::ByteRange;
use crate::forward::gpu::index_layers::GpuSees;
use crate::forward::gpu::layers::{GpuLatent, GpuQuery};
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::weights::GpuLinear;
use crate::model::heads::LatentShape;
use std::ops::Range;

impl<'a> GpuPass<'a> {
    /// x → y
    pub fn latent_attention(&mut self, l: usize, w: &GpuLatent) -> Result<()> {
        let (m, ops, stream) = (&self.layout().mixer, &self.dev.ops, self.stream());
        let LatentShape { n_head, head_dim, head_dim_v, rank, n_rot } = w.shape;
        let (n, eps, row) = (self.n(), self.hyper().norm_eps, rank + n_rot);
        self.latent_products(l, w)?;
        if let GpuSees::Chosen(indexer) = &w.sees {
            self.indexer_keys(l, indexer)?;
            self.choose_positions(l, indexer)?;
        }
        let q = self.words(&m.q, n * n_head * head_dim);
        let kv = self.words(&m.kv, n * row);
        if let Some(norm) = &w.k_norm {
            let (keys, norm) = (Columns::new(kv, row, rank), self.dev.weights.vector(norm));
            ops.norm.rms_norm_columns(stream, keys, norm, eps, None)?;
        }
        if w.rotates {
            let table = self.rope_table(w.slides);
            self.rope(q, self.model.rope_shape(head_dim, head_dim - n_rot), table)?;
            self.rope(kv, self.model.rope_shape(row, rank), table)?;
        }
        self.temper(q)?;
        // the row that the cache keeps: its compressed part is normalised
        let (compressed, norm) = (Columns::new(kv, row, 0), self.dev.weights.vector(&w.kv_a_norm));
        ops.norm.rms_norm_columns(stream, compressed, norm, eps, None)?;
        for segment in self.segments() {
            self.store(&segment, kv, segment.cache.of_slot(l).0)?;
        }
        // attention, each text over its own cache: among keys and values of the heads, or among
        // compressed rows
        let attended = self.words(&m.attended, n * n_head * head_dim_v);
        if self.segments().any(|segment| self.expands(l, w, &segment)) {
            for segment in self.segments() {
                match self.expands(l, w, &segment) {
                    true => self.attend_expanded(l, w, &segment, q, attended)?,
                    false => self.attend_absorbed(l, w, segment.rows, [q, attended])?,
                }
            }
        } else {
            self.attend_absorbed(l, w, 0..n, [q, attended])?;
        }
        if let Some(linear) = &w.gate {
            let gate = self.words(&m.gate, n * linear.weight.rows);
            ops.activate.sigmoid(stream, gate)?;
            ops.rows.mul_rows(stream, attended, gate)?;
        }
        self.mixer_output(l, &w.output)
    }

    /// q → attended, of rows that are whole segments: f32 [rows, n_head, head_dim] → [..,
    /// head_dim_v]
    fn attend_absorbed(
        &self,
        l: usize,
        w: &GpuLatent,
        rows: Range<usize>,
        [q, attended]: [DeviceSlice<'a>; 2],
    ) -> Result<()> {
        let (m, ops, stream) = (&self.layout().mixer, &self.dev.ops, self.stream());
        let LatentShape { n_head, head_dim, head_dim_v, rank, n_rot } = w.shape;
        let (heads, nope, row) = (rows.len() * n_head, head_dim - n_rot, rank + n_rot);
        let own = |all: DeviceSlice<'a>, width: usize| {
            all.slice(4 * rows.start * n_head * width..4 * rows.end * n_head * width)
        };
        let words = |range: &ByteRange, width: usize| self.words(range, self.n() * n_head * width);
        // queries into the compressed space
        let x = own(words(&m.nope, nope), nope);
        let of_q = |first: usize| Columns::new(own(q, head_dim), head_dim, first);
        ops.rows.copy_columns(stream, of_q(0), Columns::new(x, nope, 0), nope, heads)?;
        let mixed = words(&m.absorbed, rank);
        let absorbed = own(mixed, rank);
        self.head_products(&w.k_b, RowShape { n: heads, cols: nope }, x, absorbed)?;
        let k = words(&m.k, row);
        let of_k = |first: usize| Columns::new(own(k, row), row, first);
        ops.rows.copy_columns(stream, Columns::new(absorbed, rank, 0), of_k(0), rank, heads)?;
        ops.rows.copy_columns(stream, of_q(nope), of_k(rank), n_rot, heads)?;
        // attention; then the heads' values
        for segment in self.segments().filter(|segment| rows.contains(&segment.rows.start)) {
            let (keys, _) = segment.cache.of_slot(l);
            let view = self.latent_view(w, &segment);
            let both = [keys, keys.narrow(rank)];
            match w.sees {
                GpuSees::All => self.attend(&segment, &view, k, both, mixed)?,
                _ => self.attend_seen(&segment, &view, k, both, mixed)?,
            }
        }
        let shape = RowShape { n: heads, cols: rank };
        self.head_products(&w.v_b, shape, absorbed, own(attended, head_dim_v))
    }

    /// x → q [tokens, n_head, head_dim], kv [tokens, kv_rank + n_rot], and the values' gate if
    /// there is one
    fn latent_products(&self, l: usize, w: &GpuLatent) -> Result<()> {
        let m = &self.layout().mixer;
        let LatentShape { n_head, head_dim, rank, n_rot, .. } = w.shape;
        let q = self.words(&m.q, self.n() * n_head * head_dim);
        let kv = self.words(&m.kv, self.n() * (rank + n_rot));
        let first = match &w.query {
            GpuQuery::Direct(q) => q,
            GpuQuery::Compressed { a, .. } => a,
        };
        let indexer = match &w.sees {
            GpuSees::Chosen(indexer) => Some(indexer),
            _ => None,
        };
        let pool = indexer.iter().flat_map(|indexer| &indexer.pool).map(|pool| &pool.scores);
        let of_indexer = indexer.iter().flat_map(|indexer| [&indexer.k, &indexer.weights]);
        let of_indexer = of_indexer.chain(pool.clone());
        let inputs = [first, &w.kv_a].into_iter().chain(&w.gate).chain(of_indexer);
        let acts = self.mixer_input(l, inputs.map(|linear| linear.weight.ty))?;
        self.linear(&w.kv_a, &acts, kv)?;
        if let Some(gate) = &w.gate {
            self.linear(gate, &acts, self.words(&m.gate, self.n() * gate.weight.rows))?;
        }
        let i = &self.layout().index;
        let rows = |linear: &GpuLinear| self.n() * linear.weight.rows;
        if let Some(indexer) = indexer {
            // What is chosen does not depend on rounding.
            let acts = acts.exact();
            self.linear(&indexer.k, &acts, self.words(&i.k, rows(&indexer.k)))?;
            let weights = self.words(&i.weights, rows(&indexer.weights));
            self.linear(&indexer.weights, &acts, weights)?;
        }
        for scores in pool {
            self.linear(scores, &acts.exact(), self.words(&i.scores, rows(scores)))?;
        }
        let GpuQuery::Compressed { a, norm, b } = &w.query else {
            return self.linear(first, &acts, q);
        };
        let compressed = self.words(&m.compressed, self.n() * a.weight.rows);
        self.linear(a, &acts, compressed)?;
        let (norm, eps) = (self.dev.weights.vector(norm), self.hyper().norm_eps);
        self.dev.ops.norm.rms_norm_heads(self.stream(), compressed, norm, eps)?;
        let second = indexer.map(|indexer| &indexer.q);
        let types = [b].into_iter().chain(second).map(|linear| linear.weight.ty);
        let shape = RowShape { n: self.n(), cols: b.weight.cols };
        let acts = self.mixer_acts(types, shape, compressed)?;
        if let Some(second) = second {
            self.linear(second, &acts.exact(), self.words(&i.q, rows(second)))?;
        }
        self.linear(b, &acts, q)
    }
}
