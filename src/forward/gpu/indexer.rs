//! The indexer of sparse attention on a device: the stages of `forward::indexer`. It chooses the
//! positions that rows see whose texts are longer than the number of these, and attention sees
//! their keys and values, gathered.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::attention::DeviceAttention;
use crate::backend::gpu::block_keys::{KeyRows, KeyScores};
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::index::{DeviceIndex, DeviceLists, IndexQueries};
use crate::backend::gpu::rope::DeviceCosSin;
use crate::backend::ops::RopeShape;
use crate::forward::gpu::acts::{GpuActs, RowShape};
use crate::forward::gpu::index_layers::{n_lists, scores, width};
use crate::forward::gpu::pack::OnDevice;
use crate::forward::gpu::pass::{GpuPass, GpuSegment};
use crate::forward::gpu::weights::{GpuLinear, GpuVector};
use crate::model::indexer::IndexerParams;
use crate::model::weights::{BlockIndexer, Indexer};

impl<'a> GpuPass<'a> {
    fn indexer_params(&self) -> &'a IndexerParams {
        self.hyper().indexer.as_ref().expect("a model with an indexer")
    }

    /// Appends the rows' keys, of which the products are there, to their texts' caches.
    pub fn indexer_keys(&mut self, l: usize, w: &Indexer<OnDevice>) -> Result<()> {
        let (i, params) = (&self.layout().index, self.indexer_params());
        let [k, normed] = [&i.k, &i.normed].map(|range| self.words(range, self.n() * params.dim));
        let [weight, bias] = w.k_norm.each_ref().map(|vector| self.dev.weights.vector(vector));
        let (norm, eps) = (&self.dev.ops.norm, params.key_eps);
        norm.layer_norm_rows(self.stream(), k, weight, bias, eps, normed)?;
        if let Some(rope) = w.rope {
            self.rope(normed, rope, self.rope_table(false))?;
        }
        let Some(pool) = &w.pool else { return self.store_keys(normed, |s| index_keys(s, l)) };
        let scores = KeyScores {
            of_rows: self.words(&i.scores, self.n() * params.dim),
            of_places: self.dev.weights.vector(&pool.places),
        };
        self.block_keys(l, normed, Some(scores), k)?;
        self.store_keys(k, |segment| index_keys(segment, l).unpacked(params.dim))
    }

    /// The keys of blocks that end among the rows, of keys of positions in `x`; see
    /// `BlockKeys::launch`. What is kept of others is the state in place `slot`.
    fn block_keys(
        &mut self,
        slot: usize,
        x: DeviceSlice<'a>,
        scores: Option<KeyScores<'a>>,
        out: DeviceSlice<'a>,
    ) -> Result<()> {
        let (dev, stream, params) = (self.dev, self.stream(), self.indexer_params());
        let (dim, block) = (params.dim, params.block);
        let starts: Vec<usize> = self.segments().map(|segment| segment.rows.start).collect();
        let past = self.words(&self.kept().past, starts.len());
        self.over_states(slot, |part, [state, _]| {
            let first = part.rows.start - starts[part.index];
            let rows = KeyRows { x: part.of(x, dim), dim, block, past: part.word(past), first };
            let scores =
                scores.map(|scores| KeyScores { of_rows: part.of(scores.of_rows, dim), ..scores });
            dev.ops.block_keys.launch(stream, rows, scores, state, part.of(out, dim))
        })
    }

    /// Stores keys of positions, or of blocks in the rows of their last ones.
    fn store_keys(
        &self,
        keys: DeviceSlice<'a>,
        rows_of: impl Fn(&GpuSegment<'a>) -> DeviceRows<'a>,
    ) -> Result<()> {
        let (params, ops) = (self.indexer_params(), &self.dev.ops.store);
        // Heads choose among blocks of positions that have keys of their own.
        let block = if params.by_head { 1 } else { params.block };
        self.segments().try_for_each(|segment| {
            let (x, past) = (segment.of(keys, params.dim), self.past(&segment));
            let rows = rows_of(&segment);
            ops.store_blocks(self.stream(), x, segment.n(), past, rows, block)
        })
    }

    /// Chooses positions for all rows that do not see all, by queries and weights that are there.
    pub fn choose_positions(&self, l: usize, w: &Indexer<OnDevice>) -> Result<()> {
        if let Some(factors) = &w.head_factors {
            let rows = self.n() * w.q.weight.rows;
            self.multiply_heads(factors, self.words(&self.layout().index.q, rows))?;
        }
        self.choose_weighed(w.rope, |segment| index_keys(segment, l))
    }

    /// x [rows, heads, dim] *= the heads' own factors of the rows' positions
    pub fn multiply_heads(&self, factors: &GpuLinear, x: DeviceSlice<'a>) -> Result<()> {
        let shape = RowShape { n: self.n(), cols: factors.weight.cols };
        let positions = self.words(&self.kept().temperature, shape.n * shape.cols);
        let acts = self.mixer_acts([factors.weight.ty], shape, positions)?;
        let of_heads = self.words(&self.layout().mixer.head_factors, shape.n * factors.weight.rows);
        self.linear(factors, &acts.exact(), of_heads)?;
        self.dev.ops.rows.mul_rows(self.stream(), x, of_heads)
    }

    /// h → an indexer's queries, if they are made of it
    pub fn index_queries(&self, w: &Indexer<OnDevice>) -> Result<()> {
        let Some(norm) = &w.q_norm else { return Ok(()) };
        let [weight, bias] = norm.each_ref().map(|vector| self.dev.weights.vector(vector));
        // The part that the mixer adds to the stream comes there later.
        let (norm, eps, input) = (&self.dev.ops.norm, self.indexer_params().key_eps, self.y());
        norm.layer_norm_rows(self.stream(), self.h(), weight, bias, eps, input)?;
        let acts = self.acts_of([w.q.weight.ty], self.n(), input)?;
        self.linear(&w.q, &acts, self.words(&self.layout().index.q, self.n() * w.q.weight.rows))
    }

    /// Chooses blocks among a layer's compressed rows in the same way.
    pub fn choose_rows(&self, l: usize) -> Result<()> {
        let params = self.indexer_params();
        let shape = self.model.rope_shape(params.dim, params.rope_offset);
        self.choose_weighed(Some(shape), |segment| {
            index_keys(segment, 2 * self.hyper().n_layers + l)
        })
    }

    fn choose_weighed(
        &self,
        shape: Option<RopeShape>,
        keys_of: impl Fn(&GpuSegment<'a>) -> DeviceRows<'a>,
    ) -> Result<()> {
        let (i, params) = (&self.layout().index, self.indexer_params());
        let q = self.words(&i.q, self.n() * params.n_heads * params.dim);
        if let Some(shape) = shape {
            self.rope(q, shape, self.rope_table(false))?;
        }
        let weights = self.words(&i.weights, self.n() * params.n_heads);
        self.choose(Some(weights), |segment| keys_of(segment).unpacked(params.dim))
    }

    /// h → an indexer's queries and keys
    pub fn index_products(&self, w: &BlockIndexer<OnDevice>, acts: &GpuActs) -> Result<()> {
        let i = &self.layout().index;
        [(&w.q, &i.q), (&w.k, &i.k)].into_iter().try_for_each(|(linear, to)| {
            // What is chosen does not depend on rounding.
            self.linear(linear, &acts.exact(), self.words(to, self.n() * linear.weight.rows))
        })
    }

    /// Normalises and rotates the heads of an indexer's queries or keys.
    fn index_heads(&self, x: DeviceSlice, norm: &GpuVector, table: DeviceCosSin) -> Result<()> {
        let hyper = self.hyper();
        let shape = self.model.rope_shape(self.indexer_params().dim, hyper.rope_offset);
        let norm = self.dev.weights.vector(norm);
        self.dev.ops.norm.rms_norm_heads(self.stream(), x, norm, hyper.norm_eps)?;
        self.rope(x, shape, table)
    }

    /// The queries and keys of an indexer over blocks of each head's, of which the products are
    /// there, and the choice by them. Its keys lie behind those of the heads of keys.
    pub fn choose_blocks(&self, l: usize, w: &BlockIndexer<OnDevice>) -> Result<()> {
        let (i, params) = (&self.layout().index, self.indexer_params());
        let q = self.words(&i.q, self.n() * params.n_heads * params.dim);
        let k = self.words(&i.k, self.n() * params.dim);
        self.index_heads(q, &w.q_norm, self.rope_table(false))?;
        self.index_heads(k, &w.k_norm, self.rope_table(false))?;
        let keys = |segment: &GpuSegment<'a>| self.own_rows(l, segment).0.last_head();
        self.store_keys(k, keys)?;
        self.choose(None, keys)
    }

    /// Chooses for an indexer by the means of blocks' keys, which are in a cache of their own.
    pub fn choose_by_means(&mut self, l: usize, w: &BlockIndexer<OnDevice>) -> Result<()> {
        let (i, params) = (&self.layout().index, self.indexer_params());
        let slot = self.hyper().second_slot(l);
        let q = self.words(&i.q, self.n() * params.n_heads * params.dim);
        let [k, means] = [&i.k, &i.normed].map(|range| self.words(range, self.n() * params.dim));
        self.block_keys(slot, k, None, means)?;
        self.index_heads(q, &w.q_norm, self.rope_table(false))?;
        self.index_heads(means, &w.k_norm, self.block_rope_table())?;
        let keys = |segment: &GpuSegment<'a>| segment.cache.of_slot(slot).0.unpacked(params.dim);
        self.store_keys(means, keys)?;
        self.choose(None, keys)
    }

    /// Chooses by queries that are there, among the keys of each text.
    fn choose(
        &self,
        weights: Option<DeviceSlice<'a>>,
        keys_of: impl Fn(&GpuSegment<'a>) -> DeviceRows<'a>,
    ) -> Result<()> {
        let params = self.indexer_params();
        let width = params.n_heads * params.dim;
        let q = self.words(&self.layout().index.q, self.n() * width);
        for segment in self.segments() {
            let first = self.n_seeing_all(&segment);
            let rest = segment.from(first);
            if rest.n() == 0 {
                continue;
            }
            let index = DeviceIndex {
                scores: scores(params),
                n_heads: params.n_heads,
                keys: keys_of(&segment),
                block: params.block,
                top_k: params.top_k,
                n_near: params.n_near,
                past: self.past(&segment),
                max_seen: self.max_seen(&segment),
            };
            let weights = weights.map(|weights| rest.of(weights, params.n_heads));
            let queries = IndexQueries { first, tokens: rest.n(), q: rest.of(q, width), weights };
            let work = self.slice(&self.layout().mixer.work);
            let lists = self.lists().of_tokens(rest.rows.start, rest.n());
            self.dev.ops.index.choose(self.stream(), &index, queries, work, lists)?;
        }
        Ok(())
    }

    /// q → out, for a segment's rows over those of its keys and values that they see: all or, if
    /// an indexer has chosen, the chosen ones. Values may be the first elements of keys.
    pub fn attend_seen(
        &self,
        segment: &GpuSegment<'a>,
        view: &DeviceAttention,
        q: DeviceSlice<'a>,
        rows: [DeviceRows; 2],
        out: DeviceSlice<'a>,
    ) -> Result<()> {
        let n = self.n_seeing_all(segment);
        let (dense, rest) = (segment.to(n), segment.from(n));
        if dense.n() > 0 {
            self.attend(&dense, view, q, rows, out)?;
        }
        if rest.n() > 0 {
            self.attend_chosen(&rest, view, q, rows, out)?;
        }
        Ok(())
    }

    /// Attends where rows see the positions that were chosen.
    fn attend_chosen(
        &self,
        segment: &GpuSegment<'a>,
        view: &DeviceAttention,
        q: DeviceSlice<'a>,
        [k, v]: [DeviceRows; 2],
        out: DeviceSlice<'a>,
    ) -> Result<()> {
        let (gathered, lists) = (&self.layout().index.gathered, self.lists());
        let [of_keys, of_values] = gathered.each_ref().map(|range| self.slice(range));
        let are_parts = v.data.address() == k.data.address();
        let bytes = |rows: DeviceRows| rows.heads * lists.width * rows.row_bytes();
        let fit = of_keys.len() / bytes(k);
        let fit = if are_parts { fit } else { fit.min(of_values.len() / bytes(v)) };
        for first in (0..segment.n()).step_by(fit) {
            let part = segment.from(first).to(fit);
            let lists = lists.of_tokens(part.rows.start, part.n());
            let gather = |rows: DeviceRows, to: DeviceSlice<'a>| {
                // SAFETY: the lists have positions of the segment's text.
                unsafe { self.dev.ops.index.gather(self.stream(), rows, lists, part.n(), to) }
            };
            let keys = gather(k, of_keys)?;
            let values = if are_parts { keys.narrow(v.dim) } else { gather(v, of_values)? };
            let view = DeviceAttention {
                past: lists.last,
                max_seen: lists.width,
                prompt: false,
                lists: lists.lists,
                ..*view
            };
            self.attend(&part, &view, q, [keys, values], out)?;
        }
        Ok(())
    }

    /// The first of a segment's rows that see all positions: those of a graph, which serves many,
    /// see what was chosen if one of these does.
    fn n_seeing_all(&self, segment: &GpuSegment) -> usize {
        let n_all = self.indexer_params().n_all();
        match self.is_captured() {
            _ if self.max_seen(segment) <= n_all => segment.n(),
            true => 0,
            false => n_all.saturating_sub(segment.segment.past).min(segment.n()),
        }
    }

    /// The lists of all rows.
    pub fn lists(&self) -> DeviceLists<'a> {
        let (kept, params) = (&self.kept().lists, self.indexer_params());
        let (lists, width) = (n_lists(params), width(params));
        let n = self.n() * lists;
        let (chosen, last) = (self.words(&kept.chosen, n * width), self.words(&kept.last, n));
        DeviceLists { lists, width, chosen, last }
    }
}

/// The cached keys of an indexer, beside the rows of a place of the cache.
fn index_keys<'a>(segment: &GpuSegment<'a>, slot: usize) -> DeviceRows<'a> {
    segment.cache.of_slot(slot).1.expect("an indexer's keys")
}
