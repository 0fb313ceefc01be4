//! Grouped-query attention on a device: the stages of `forward::attention`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::attention::{AttentionData, DeviceAttention};
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::rope::DeviceCosSin;
use crate::backend::gpu::rows::Columns;
use crate::backend::ops::RopeShape;
use crate::forward::gpu::acts::{GpuActs, RowShape};
use crate::forward::gpu::layers::GpuAttention;
use crate::forward::gpu::pass::{GpuPass, GpuSegment, Role};
use crate::forward::gpu::weights::{GpuLinear, GpuVector};

impl<'a> GpuPass<'a> {
    /// h → y
    pub fn attention(&self, l: usize, w: &GpuAttention) -> Result<()> {
        let (hyper, m, n) = (self.hyper(), &self.layout().mixer, self.n());
        let (heads, heads_kv) = (n * hyper.n_head, n * hyper.n_head_kv);
        // q, k, v
        let acts = self.acts_of_h([&w.q, &w.k, &w.v].map(|linear| linear.weight.ty))?;
        let q = self.words(&m.q, heads * hyper.head_dim);
        let k = self.words(&m.k, heads_kv * hyper.head_dim);
        let v = self.words(&m.v, heads_kv * hyper.head_dim_v);
        if w.gated {
            self.split_gates(w, &acts, q)?;
        } else {
            self.linear(&w.q, &acts, q)?;
        }
        self.linear(&w.k, &acts, k)?;
        self.linear(&w.v, &acts, v)?;
        // QK-norm
        self.norm_heads(&w.q_norm, q)?;
        self.norm_heads(&w.k_norm, k)?;
        // RoPE
        if self.role == Role::Only {
            let shape = self.model.rope_shape(hyper.head_dim, hyper.rope_offset);
            self.rope(q, shape)?;
            self.rope(k, shape)?;
        }
        // cache, attention: each text over its own cache
        let attended = self.words(&m.attended, heads * hyper.head_dim_v);
        let sinks = w.sinks.as_ref().map(|sinks| self.dev.weights.vector(sinks));
        for segment in self.segments() {
            let (keys, values) = self.own_rows(l, &segment);
            self.store(&segment, k, keys)?;
            self.store(&segment, v, values)?;
            let view = DeviceAttention { window: w.window, sinks, ..self.view(&segment) };
            self.attend(&segment, &view, q, [keys, values], attended)?;
        }
        if w.gated {
            let gate = self.words(&m.gate, heads * hyper.head_dim_v);
            self.dev.ops.rows.mul_sigmoid(self.stream(), attended, gate)?;
        }
        self.attention_output(&w.output)
    }

    /// The product of q, whose heads are [q, gate] → q and gate
    fn split_gates(&self, w: &GpuAttention, acts: &GpuActs, q: DeviceSlice) -> Result<()> {
        let (hyper, m, rows) = (self.hyper(), &self.layout().mixer, &self.dev.ops.rows);
        let (dim, heads) = (hyper.head_dim, self.n() * hyper.n_head);
        let raw = self.words(&m.raw, 2 * heads * dim);
        self.linear(&w.q, acts, raw)?;
        let gate = self.words(&m.gate, heads * dim);
        for (first, to) in [(0, q), (dim, gate)] {
            let (from, to) = (Columns::new(raw, 2 * dim, first), Columns::new(to, dim, 0));
            rows.copy_columns(self.stream(), from, to, dim, heads)?;
        }
        Ok(())
    }

    fn norm_heads(&self, norm: &Option<GpuVector>, x: DeviceSlice) -> Result<()> {
        let Some(norm) = norm else { return Ok(()) };
        let (norm, eps) = (self.dev.weights.vector(norm), self.hyper().norm_eps);
        self.dev.ops.norm.rms_norm_heads(self.stream(), x, norm, eps)
    }

    /// Rotates the heads of x by the rows' positions.
    pub fn rope(&self, x: DeviceSlice, shape: RopeShape) -> Result<()> {
        let (layout, n_pairs) = (self.layout(), self.hyper().rope.n_rot / 2);
        let data = self.words(&self.kept().cos_sin, 2 * self.n() * n_pairs);
        let rows = self.words(&layout.iota, self.n());
        // SAFETY: `iota` counts from 0 to n - 1, and the table has a row for each token.
        unsafe {
            let table = DeviceCosSin { data, n_pairs };
            self.dev.ops.rope.launch(self.stream(), x, shape, table, rows)
        }
    }

    /// Stores a segment's rows of x in its cache, at the rows' positions.
    pub fn store(
        &self,
        segment: &GpuSegment<'a>,
        x: DeviceSlice<'a>,
        rows: DeviceRows,
    ) -> Result<()> {
        let x = segment.of(x, rows.heads * rows.dim);
        self.dev.ops.store.store(self.stream(), x, segment.n(), self.past(segment), rows)
    }

    /// u32 [1]: the position of a segment's first row
    fn past(&self, segment: &GpuSegment<'a>) -> DeviceSlice<'a> {
        segment.word(self.words(&self.kept().past, self.batch.n_segments()))
    }

    /// The view of queries on their own text: positions up to their own, or all of a source text.
    pub fn view(&self, segment: &GpuSegment<'a>) -> DeviceAttention<'a> {
        DeviceAttention {
            n_head: self.hyper().n_head,
            n_head_kv: self.hyper().n_head_kv,
            past: self.past(segment),
            max_seen: self.max_seen(segment),
            all: (self.role == Role::Source).then_some(segment.n()),
            window: None,
            scale: self.hyper().attention_scale,
            sinks: None,
            bias: self.distance_bias(),
            prompt: segment.is_prompt() && !self.dev.is_exact,
        }
    }

    /// q → out, for a segment's rows over its keys and values
    pub fn attend(
        &self,
        segment: &GpuSegment<'a>,
        view: &DeviceAttention,
        q: DeviceSlice<'a>,
        [k, v]: [DeviceRows; 2],
        out: DeviceSlice<'a>,
    ) -> Result<()> {
        let work = self.slice(&self.layout().mixer.work);
        let q = segment.of(q, view.n_head * k.dim);
        let out = segment.of(out, view.n_head * v.dim);
        let data = AttentionData { tokens: segment.n(), q, k, v, work, out };
        self.dev.ops.attention.launch(self.stream(), view, data)
    }

    /// The weighted values of all heads → y
    pub fn attention_output(&self, output: &GpuLinear) -> Result<()> {
        let width = output.weight.cols;
        let attended = self.words(&self.layout().mixer.attended, self.n() * width);
        let acts =
            self.mixer_acts([output.weight.ty], RowShape { n: self.n(), cols: width }, attended)?;
        self.linear(output, &acts, self.y())
    }
}
