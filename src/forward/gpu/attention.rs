//! Grouped-query attention on a device: the stages of `forward::attention`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::acts::DeviceActs;
use crate::backend::gpu::attention::{AttentionData, DeviceAttention, DeviceBias, records_fit};
use crate::backend::gpu::attention_inputs::{HeadRows, InputSteps, NewRows};
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::matmul::is_few;
use crate::backend::gpu::rope::DeviceCosSin;
use crate::backend::gpu::rows::Columns;
use crate::backend::ops::RopeShape;
use crate::forward::gpu::acts::{GpuActs, RowShape};
use crate::forward::gpu::layers::{GpuAttention, GpuStreams};
use crate::forward::gpu::pass::{GpuPass, GpuSegment, Role};
use crate::forward::gpu::weights::{GpuLinear, GpuVector};
use crate::forward::gpu::workspace::ByteRange;
use crate::model::descriptor::ValueGate;
use crate::model::weights::Part;
use crate::simd::act_kind;

/// The memory of attention's result.
#[derive(Clone, Copy)]
struct Attended<'a> {
    /// f32 [rows, heads, dim], of all segments
    values: DeviceSlice<'a>,
    /// Records of the segment's rows, stored besides.
    records: Option<DeviceActs<'a>>,
}

/// Whether queries or keys are normalised over all heads together.
fn norms_all_heads(w: &GpuAttention) -> bool {
    let norms = [&w.q_norm, &w.k_norm].into_iter().flatten();
    norms.map(GpuVector::n).any(|n| n != w.head_dim)
}

impl<'a> GpuPass<'a> {
    /// x → y
    pub fn attention(&self, l: usize, w: &GpuAttention) -> Result<()> {
        let (hyper, m, n) = (self.hyper(), &self.layout().mixer, self.n());
        // q, k, v
        let own_gate = w.gate.as_ref().map(|(gate, _)| gate);
        let inputs = w.products.iter().chain(&w.gated).chain(own_gate);
        let acts = self.mixer_input(l, inputs.map(|linear| linear.weight.ty))?;
        let products = self.words(&m.qkv, n * w.width);
        let mut first = 0;
        for linear in &w.products {
            let columns = Columns::new(products, w.width, first);
            // The queries' place is free until they are made.
            self.linear_columns(linear, &acts, columns, self.slice(&m.q))?;
            first += linear.weight.rows;
        }
        if let Some(linear) = &w.gated {
            self.gated_queries(w, linear, &acts)?;
        }
        let rows = own_gate.map_or(w.n_head * w.head_dim_v, |linear| linear.weight.rows);
        let gate = self.words(&m.gate, n * rows);
        if let Some(linear) = own_gate {
            self.linear(linear, &acts, gate)?;
        }
        self.norm_all_heads(w, products)?;
        // QK-norm, RoPE, cache, attention: each text over its own cache
        let attended = self.words(&m.attended, n * w.n_head * w.head_dim_v);
        let stored = self.stored_with_attention(w, attended);
        let records = stored.map(|acts| acts.view(w.output.weight.ty));
        for segment in self.segments() {
            let records = records.map(|records| records.token_range(segment.rows.clone()));
            self.attend_own(l, w, &segment, products, Attended { values: attended, records })?;
        }
        self.gate_values(w, attended, gate)?;
        match &stored {
            Some(acts) => self.mixer_product(l, &w.output, acts)?,
            None => self.mixer_output(l, &w.output)?,
        }
        match hyper.attention_output_scale {
            1.0 => Ok(()),
            scale => self.dev.ops.rows.scale(self.stream(), self.y(), scale),
        }
    }

    /// Makes a text's queries, stores its keys and values, and attends to its cache, or to that of
    /// the layer whose keys these are.
    fn attend_own(
        &self,
        l: usize,
        w: &GpuAttention,
        segment: &GpuSegment<'a>,
        products: DeviceSlice<'a>,
        attended: Attended<'a>,
    ) -> Result<()> {
        let (keys, values) = self.own_rows(w.shared_with.unwrap_or(l), segment);
        let (m, width) = (&self.layout().mixer, w.n_head * w.head_dim);
        let own = segment.of(products, w.width);
        let heads = |first: usize, step| HeadRows {
            data: own.slice((4 * first).min(own.len())..own.len()),
            stride: w.width,
            step,
        };
        let (k, v) = (heads(w.k_first, w.head_dim), heads(w.v_first, w.head_dim_v));
        let past = self.past(segment);
        let new = w.shared_with.is_none().then_some(NewRows { k, v, keys, values, past });
        let q = match &w.gated {
            None => heads(0, w.head_dim),
            Some(_) => {
                let data = segment.of(self.words(&m.raw, 2 * self.n() * width), 2 * width);
                HeadRows { data, stride: 2 * width, step: 2 * w.head_dim }
            }
        };
        let (all, sizes) =
            (self.words(&m.q, self.n() * width), [segment.n(), w.n_head, w.head_dim]);
        let (inputs, steps) = (&self.dev.ops.inputs, self.input_steps(w, segment));
        inputs.launch(self.stream(), sizes, q, new, &steps, segment.of(all, width))?;
        let vector = |v: &Option<GpuVector>| v.as_ref().map(|v| self.dev.weights.vector(v));
        let view = DeviceAttention {
            window: w.window,
            chunk: w.chunk,
            cap: self.hyper().attention_cap,
            sinks: vector(&w.sinks),
            n_head: w.n_head,
            n_head_kv: w.n_head_kv,
            bias: vector(&w.slopes).map(DeviceBias::Slopes).or(self.distance_bias()),
            ..self.view(segment)
        };
        self.attend_into(segment, &view, all, [keys, values], attended)
    }

    /// The memory of what the output projection reads, if attention can store it.
    fn stored_with_attention(
        &self,
        w: &GpuAttention,
        attended: DeviceSlice<'a>,
    ) -> Option<GpuActs<'a>> {
        let ty = w.output.weight.ty;
        let is_gated = w.gate.is_some() || w.gated.is_some();
        let fits = !is_gated && records_fit(act_kind(ty), w.n_head, w.head_dim_v);
        let shape = RowShape { n: self.n(), cols: w.output.weight.cols };
        let memory = self.slice(&self.layout().mixer.acts);
        fits.then(|| GpuActs::at([ty], shape, attended, memory))
    }

    /// The steps between a text's products and its attention.
    fn input_steps(&self, w: &GpuAttention, segment: &GpuSegment<'a>) -> InputSteps<'a> {
        let (hyper, model) = (self.hyper(), self.model);
        let of_head = |norm: &Option<GpuVector>, dim: usize| {
            let norm = norm.as_ref().map(|norm| self.dev.weights.vector(norm))?;
            (norm.count::<f32>() == dim).then_some(norm)
        };
        let rows = |table: DeviceCosSin<'a>| DeviceCosSin {
            data: segment.of(table.data, 2 * table.n_pairs),
            ..table
        };
        let rotates = self.role == Role::Only && w.rotates;
        let rope = rotates.then(|| {
            let shape = model.rope_shape(w.head_dim, hyper.rope_offset);
            (shape, rows(self.rope_table(w.slides)))
        });
        let tempers = w.tempers && hyper.temperature.is_some();
        let factors = tempers.then(|| {
            let table = self.cos_sin(&self.kept().temperature, hyper.head_dim);
            (model.rope_shape(hyper.head_dim, 0), rows(table))
        });
        InputSteps {
            norms: [
                of_head(&w.q_norm, w.head_dim),
                of_head(&w.k_norm, w.head_dim),
                of_head(&w.v_norm, w.head_dim_v),
            ],
            eps: hyper.norm_eps,
            norm_last: model.descriptor.parts.norm_after_rope,
            limit: hyper.qkv_limit.filter(|_| !norms_all_heads(w)),
            rope,
            factors,
        }
    }

    /// Normalises the queries and the keys of all heads together, in the place of the products, in
    /// layers that do so.
    fn norm_all_heads(&self, w: &GpuAttention, products: DeviceSlice) -> Result<()> {
        if !norms_all_heads(w) {
            return Ok(());
        }
        assert!(w.gated.is_none() && !self.model.descriptor.parts.norm_after_rope);
        let (ops, stream, eps) = (&self.dev.ops, self.stream(), self.hyper().norm_eps);
        if let Some(limit) = self.hyper().qkv_limit {
            ops.rows.clamp(stream, products, limit)?;
        }
        let n = if w.shared_with.is_none() { 2 } else { 1 };
        for (norm, first) in [(&w.q_norm, 0), (&w.k_norm, w.k_first)].into_iter().take(n) {
            let norm = norm.as_ref().map(|norm| self.dev.weights.vector(norm));
            let Some(norm) = norm.filter(|norm| norm.count::<f32>() != w.head_dim) else {
                continue;
            };
            let columns = Columns::new(products, w.width, first);
            ops.norm.rms_norm_columns(stream, columns, norm, eps, None)?;
        }
        Ok(())
    }

    /// attended *= function(gate), of which there is a number an element or a head.
    fn gate_values(
        &self,
        w: &GpuAttention,
        attended: DeviceSlice,
        gate: DeviceSlice,
    ) -> Result<()> {
        let (ops, stream) = (&self.dev.ops, self.stream());
        match &w.gate {
            None if w.gated.is_none() => return Ok(()),
            Some((_, ValueGate::Softplus)) => ops.activate.softplus(stream, gate)?,
            Some((_, ValueGate::Sigmoid)) | None if gate.len() == attended.len() => {
                return ops.rows.mul_sigmoid(stream, attended, gate);
            }
            Some((_, ValueGate::Sigmoid)) | None => ops.activate.sigmoid(stream, gate)?,
        }
        ops.rows.mul_rows(stream, attended, gate)
    }

    /// x → [q, gate] of each head, in `raw`, and gates without gaps
    fn gated_queries(&self, w: &GpuAttention, linear: &GpuLinear, acts: &GpuActs) -> Result<()> {
        let (m, dim, heads) = (&self.layout().mixer, w.head_dim, self.n() * w.n_head);
        let raw = self.words(&m.raw, 2 * heads * dim);
        self.linear(linear, acts, raw)?;
        let gate = Columns::new(self.words(&m.gate, heads * dim), dim, 0);
        let from = Columns::new(raw, 2 * dim, dim);
        self.dev.ops.rows.copy_columns(self.stream(), from, gate, dim, heads)
    }

    /// The cosines and sines of a layer that slides or does not.
    pub fn rope_table(&self, slides: bool) -> DeviceCosSin<'a> {
        let (kept, hyper) = (self.kept(), self.hyper());
        match slides && self.model.sliding_frequencies.is_some() {
            true => self.cos_sin(&kept.sliding_cos_sin, hyper.sliding_rope.n_rot),
            false => self.cos_sin(&kept.cos_sin, hyper.rope.n_rot),
        }
    }

    fn cos_sin(&self, range: &ByteRange, n_rot: usize) -> DeviceCosSin<'a> {
        let data = self.words(range, self.n() * n_rot);
        DeviceCosSin { data, n_pairs: n_rot / 2, back: false }
    }

    /// Multiplies queries by their positions' factors, if the model has a temperature.
    pub fn temper(&self, q: DeviceSlice) -> Result<()> {
        if self.hyper().temperature.is_none() {
            return Ok(());
        }
        let head_dim = self.hyper().head_dim;
        let table = self.cos_sin(&self.kept().temperature, head_dim);
        self.rope(q, self.model.rope_shape(head_dim, 0), table)
    }

    /// Rotates the heads of x by the rows' positions.
    pub fn rope(&self, x: DeviceSlice, shape: RopeShape, table: DeviceCosSin) -> Result<()> {
        let rows = self.words(&self.layout().iota, self.n());
        // SAFETY: `iota` counts from 0 to n - 1, and the table has a row for each token.
        unsafe { self.dev.ops.rope.launch(self.stream(), x, shape, table, rows) }
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
    pub fn past(&self, segment: &GpuSegment<'a>) -> DeviceSlice<'a> {
        segment.word(self.words(&self.kept().past, self.batch.n_segments()))
    }

    /// The view of queries on their own text: positions up to their own, or the whole of a source
    /// text and where the model fills in masked tokens.
    pub fn view(&self, segment: &GpuSegment<'a>) -> DeviceAttention<'a> {
        let sees_all = self.role == Role::Source || self.hyper().sees_all;
        DeviceAttention {
            own_rows: false,
            n_head: self.hyper().n_head,
            n_head_kv: self.hyper().n_head_kv,
            past: self.past(segment),
            max_seen: self.max_seen(segment),
            // A decoded token is the last of its text.
            all: (sees_all && !self.is_decode()).then_some(segment.segment.past + segment.n()),
            window: None,
            chunk: None,
            scale: self.hyper().attention_scale,
            cap: None,
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
        rows: [DeviceRows; 2],
        out: DeviceSlice<'a>,
    ) -> Result<()> {
        let attended = Attended { values: out, records: None };
        self.attend_into(segment, view, q, rows, attended)
    }

    /// As `attend`, and stores the segment's records if there are any.
    fn attend_into(
        &self,
        segment: &GpuSegment<'a>,
        view: &DeviceAttention,
        q: DeviceSlice<'a>,
        [k, v]: [DeviceRows; 2],
        attended: Attended<'a>,
    ) -> Result<()> {
        let work = self.slice(&self.layout().mixer.work);
        let q = segment.of(q, view.n_head * k.dim);
        let Attended { values, records } = attended;
        let out = segment.of(values, view.n_head * v.dim);
        let data = AttentionData { tokens: segment.n(), q, k, v, work, out, records };
        self.dev.ops.attention.launch(self.stream(), view, data)
    }

    /// The values that a mixer weighs → y, or added to x
    pub fn mixer_output(&self, l: usize, output: &GpuLinear) -> Result<()> {
        self.mixer_product(l, output, &self.attended_acts(output)?)
    }

    /// The same of values in the form that the projection reads.
    fn mixer_product(&self, l: usize, output: &GpuLinear, acts: &GpuActs) -> Result<()> {
        let Some(scale) = self.mixer_residual(l) else {
            return self.linear(output, acts, self.y());
        };
        let dev = self.dev;
        let (mat, bias) = (dev.weights.mat(&output.weight), dev.weights.bias(output));
        let x = acts.view(mat.ty);
        dev.ops.products.add_product(self.stream(), mat, x, bias, scale, self.x())
    }

    /// The factor of what the mixer of layer `l` adds to the residual stream, if its last
    /// projection adds it: for few rows, where nothing comes between.
    pub fn mixer_residual(&self, l: usize) -> Option<f32> {
        let (hyper, layer) = (self.hyper(), self.layer(l));
        let output = layer.mixer.output()?;
        let is_one = matches!(layer.streams[Part::Mixer as usize], GpuStreams::One);
        let has_scale = output.scale != 1.0 || hyper.attention_output_scale != 1.0;
        let sees_before = layer.ffn.as_ref().is_some_and(|ffn| ffn.sees_before);
        let is_plain = is_one && layer.post_norm.is_none() && !has_scale && !sees_before;
        let is_few = is_few(&self.dev.weights.mat(&output.weight), self.n());
        let is_added = is_plain && is_few && !self.adds_to_normed();
        is_added.then_some(hyper.residual_scale).filter(|scale| *scale != 0.0)
    }

    /// The weighted values of all heads → y
    pub fn attention_output(&self, output: &GpuLinear) -> Result<()> {
        self.linear(output, &self.attended_acts(output)?, self.y())
    }

    fn attended_acts(&self, output: &GpuLinear) -> Result<GpuActs<'a>> {
        let (n, cols) = (self.n(), output.weight.cols);
        let attended = self.words(&self.layout().mixer.attended, n * cols);
        self.mixer_acts([output.weight.ty], RowShape { n, cols }, attended)
    }
}
