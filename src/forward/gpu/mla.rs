//! Multi-head latent attention on a device: the stages of `Model::latent_attention`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::rows::Columns;
use crate::forward::gpu::acts::RowShape;
use crate::forward::gpu::bump::ByteRange;
use crate::forward::gpu::mixer::GpuMixer;
use crate::forward::gpu::mixer_layout::{DeviceSizes, MixerSizes, raise};
use crate::forward::gpu::pack::{OnDevice, Pack, pack};
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::weights::{GpuLinear, Packer};
use crate::model::heads::LatentShape;
use crate::model::hyper::HyperParams;
use crate::model::weights::{LatentRow, LatentWeights, Query, Sees};
use std::ops::Range;

impl GpuMixer for LatentWeights<OnDevice> {
    fn mix(&self, cx: &mut GpuPass, l: usize) -> Result<()> {
        let (m, ops, stream) = (&cx.layout().mixer, &cx.dev.ops, cx.stream());
        let LatentShape { n_head, head_dim, head_dim_v, n_rot, .. } = self.shape;
        let n = cx.n();
        cx.latent_products(l, self)?;
        if let Sees::Chosen(indexer) = &self.sees {
            cx.indexer_keys(l, indexer)?;
            cx.choose_positions(l, indexer)?;
        }
        let q = cx.words(&m.q, n * n_head * head_dim);
        if self.rotates {
            let shape = cx.model.rope_shape(head_dim, head_dim - n_rot);
            cx.rope(q, shape, cx.rope_table(self.slides))?;
        }
        match &self.head_factors {
            None => cx.temper(q)?,
            Some(factors) => cx.multiply_heads(factors, q)?,
        }
        if let Some(row) = &self.row {
            cx.store_latent(l, self, row)?;
        }
        // attention, each text over its own cache: among keys and values of the heads, or among
        // compressed rows
        let attended = cx.words(&m.attended, n * n_head * head_dim_v);
        if cx.segments().any(|segment| cx.expands(self, &segment)) {
            for segment in cx.segments() {
                match cx.expands(self, &segment) {
                    true => cx.attend_expanded(self, &segment, q, attended)?,
                    false => cx.attend_absorbed(self, segment.rows, [q, attended])?,
                }
            }
        } else {
            cx.attend_absorbed(self, 0..n, [q, attended])?;
        }
        if let Some(linear) = &self.gate {
            let gate = cx.words(&m.gate, n * linear.weight.rows);
            ops.activate.sigmoid(stream, gate)?;
            ops.rows.mul_rows(stream, attended, gate)?;
        }
        cx.mixer_output(l, &self.output)
    }

    fn output(&self) -> Option<&GpuLinear> {
        Some(&self.output)
    }

    /// An indexer keeps the rows of blocks that are not complete.
    fn state_slot(&self, _hyper: &HyperParams, l: usize) -> Option<usize> {
        matches!(&self.sees, Sees::Chosen(indexer) if indexer.pool.is_some()).then_some(l)
    }
}

impl DeviceSizes for LatentWeights {
    fn raise(&self, sizes: &mut MixerSizes) {
        let (n, LatentShape { n_head, head_dim, head_dim_v, rank, n_rot }) = (sizes.n, self.shape);
        let low_rank = match &self.query {
            Query::Direct(_) => 0,
            Query::Compressed { norm, .. } => norm.len(),
        };
        raise(&mut sizes.q, n_head * head_dim);
        sizes.raise_values(n_head * head_dim_v);
        raise(&mut sizes.low_rank, low_rank);
        sizes.raise_acts(n, low_rank);
        sizes.raise_acts(n * n_head, head_dim - n_rot);
        sizes.raise_acts(n * n_head, rank);
        raise(&mut sizes.latent_row, rank + n_rot);
        raise(&mut sizes.latent_queries, n_head * (rank + n_rot));
        raise(&mut sizes.nope, n_head * (head_dim - n_rot));
        raise(&mut sizes.latent_values, n_head * rank);
        raise(&mut sizes.latent_rank, rank);
        let indexer = match &self.sees {
            Sees::Chosen(indexer) => indexer.head_factors.as_ref(),
            _ => None,
        };
        for factors in self.head_factors.iter().chain(indexer) {
            raise(&mut sizes.head_factors, factors.weight.rows);
            sizes.raise_acts(n, factors.weight.cols);
        }
    }
}

pack! {
    LatentWeights {
        shape, scale, query, source, row, k_b, v_b, rotates, slides, gate, sinks, window, sees,
        head_factors, output,
    }
    LatentRow { a, norm, k_norm }
}

impl<'a> Pack<'a> for Query {
    type Packed = Query<OnDevice>;

    fn pack(&'a self, packer: &mut Packer<'a>) -> Query<OnDevice> {
        match self {
            Query::Direct(q) => Query::Direct(q.pack(packer)),
            Query::Compressed { a, norm, b } => {
                Query::Compressed { a: a.pack(packer), norm: norm.pack(packer), b: b.pack(packer) }
            }
        }
    }
}

impl<'a> GpuPass<'a> {
    /// RMSNorm and RoPE of the rows, → cache
    fn store_latent(
        &self,
        l: usize,
        w: &LatentWeights<OnDevice>,
        row: &LatentRow<OnDevice>,
    ) -> Result<()> {
        let (ops, stream, eps) = (&self.dev.ops, self.stream(), self.hyper().norm_eps);
        let LatentShape { rank, n_rot, .. } = w.shape;
        let width = rank + n_rot;
        let kv = self.words(&self.layout().mixer.kv, self.n() * width);
        if let Some(norm) = &row.k_norm {
            let (keys, norm) = (Columns::new(kv, width, rank), self.dev.weights.vector(norm));
            ops.norm.rms_norm_columns(stream, keys, norm, eps, None)?;
        }
        if w.rotates {
            self.rope(kv, self.model.rope_shape(width, rank), self.rope_table(w.slides))?;
        }
        // The compressed part is normalised.
        let (compressed, norm) = (Columns::new(kv, width, 0), self.dev.weights.vector(&row.norm));
        ops.norm.rms_norm_columns(stream, compressed, norm, eps, None)?;
        self.segments().try_for_each(|segment| self.store(&segment, kv, segment.cache.of_slot(l).0))
    }

    /// q → attended, of rows that are whole segments: f32 [rows, n_head, head_dim] → [..,
    /// head_dim_v]
    fn attend_absorbed(
        &self,
        w: &LatentWeights<OnDevice>,
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
            let (keys, _) = segment.cache.of_slot(w.source);
            let view = self.latent_view(w, &segment);
            let both = [keys, keys.narrow(rank)];
            match w.sees {
                Sees::All => self.attend(&segment, &view, k, both, mixed)?,
                _ => self.attend_seen(&segment, &view, k, both, mixed)?,
            }
        }
        let shape = RowShape { n: heads, cols: rank };
        self.head_products(&w.v_b, shape, absorbed, own(attended, head_dim_v))
    }

    /// x → q [tokens, n_head, head_dim], kv [tokens, kv_rank + n_rot], and the values' gate if
    /// there is one
    fn latent_products(&self, l: usize, w: &LatentWeights<OnDevice>) -> Result<()> {
        let m = &self.layout().mixer;
        let LatentShape { n_head, head_dim, .. } = w.shape;
        let q = self.words(&m.q, self.n() * n_head * head_dim);
        let row = w.row.as_ref().map(|row| &row.a);
        let first = match &w.query {
            Query::Direct(q) => q,
            Query::Compressed { a, .. } => a,
        };
        let indexer = match &w.sees {
            Sees::Chosen(indexer) => Some(indexer),
            _ => None,
        };
        let pool = indexer.iter().flat_map(|indexer| &indexer.pool).map(|pool| &pool.scores);
        let of_indexer = indexer.iter().flat_map(|indexer| [&indexer.k, &indexer.weights]);
        let of_indexer = of_indexer.chain(pool.clone());
        let inputs = [first].into_iter().chain(row).chain(&w.gate).chain(of_indexer);
        let acts = self.mixer_input(l, inputs.map(|linear| linear.weight.ty))?;
        if let Some(row) = row {
            self.linear(row, &acts, self.words(&m.kv, self.n() * row.weight.rows))?;
        }
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
        let Query::Compressed { a, norm, b } = &w.query else {
            self.linear(first, &acts, q)?;
            return indexer.map_or(Ok(()), |indexer| self.index_queries(indexer));
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
