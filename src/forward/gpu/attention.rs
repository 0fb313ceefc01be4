//! Grouped-query attention on a device: the stages of `forward::attention`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::attention::{AttentionData, DeviceAttention, DeviceBias};
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

impl<'a> GpuPass<'a> {
    /// x → y
    pub fn attention(&self, l: usize, w: &GpuAttention) -> Result<()> {
        let (hyper, m, n) = (self.hyper(), &self.layout().mixer, self.n());
        let (heads, heads_kv) = (n * w.n_head, n * w.n_head_kv);
        // q, k, v
        let own_gate = w.gate.as_ref().map(|(gate, _)| gate);
        let is_own = w.shared_with.is_none();
        let own = [&w.k, &w.v].into_iter().filter(|_| is_own);
        let inputs = [&w.q].into_iter().chain(own).chain(own_gate);
        let acts = self.mixer_input(l, inputs.map(|linear| linear.weight.ty))?;
        let q = self.words(&m.q, heads * w.head_dim);
        let k = self.words(&m.k, heads_kv * w.head_dim);
        let v = self.words(&m.v, heads_kv * w.head_dim_v);
        if w.gated {
            self.split_gates(w, &acts, q)?;
        } else {
            self.linear(&w.q, &acts, q)?;
        }
        if is_own {
            self.linear(&w.k, &acts, k)?;
            self.linear(&w.v, &acts, v)?;
        }
        let rows = own_gate.map_or(w.n_head * w.head_dim_v, |linear| linear.weight.rows);
        let gate = self.words(&m.gate, n * rows);
        if let Some(linear) = own_gate {
            self.linear(linear, &acts, gate)?;
        }
        self.limit(&[q, k, v][..if is_own { 3 } else { 1 }])?;
        // QK-norm, RoPE
        let norm_after_rope = self.model.descriptor.parts.norm_after_rope;
        let norm = || {
            self.norm_heads(&w.q_norm, q)?;
            self.norm_heads(&w.k_norm, k)?;
            self.norm_heads(&w.v_norm, v)
        };
        if !norm_after_rope {
            norm()?;
        }
        if self.role == Role::Only && w.rotates {
            let shape = self.model.rope_shape(w.head_dim, hyper.rope_offset);
            let table = self.rope_table(w.slides);
            self.rope(q, shape, table)?;
            if is_own {
                self.rope(k, shape, table)?;
            }
        }
        if norm_after_rope {
            norm()?;
        }
        if w.tempers {
            self.temper(q)?;
        }
        // cache, attention: each text over its own cache
        let attended = self.words(&m.attended, heads * w.head_dim_v);
        self.attend_own(l, w, [q, k, v], attended)?;
        self.gate_values(w, attended, gate)?;
        self.mixer_output(l, &w.output)?;
        match hyper.attention_output_scale {
            1.0 => Ok(()),
            scale => self.dev.ops.rows.scale(self.stream(), self.y(), scale),
        }
    }

    /// Stores each text's keys and values, and attends to its cache, or to that of the layer whose
    /// keys these are.
    fn attend_own(
        &self,
        l: usize,
        w: &GpuAttention,
        [q, k, v]: [DeviceSlice<'a>; 3],
        attended: DeviceSlice<'a>,
    ) -> Result<()> {
        let vector = |v: &Option<GpuVector>| v.as_ref().map(|v| self.dev.weights.vector(v));
        let (sinks, slopes) = (vector(&w.sinks), vector(&w.slopes));
        for segment in self.segments() {
            let (keys, values) = self.own_rows(w.shared_with.unwrap_or(l), &segment);
            if w.shared_with.is_none() {
                self.store(&segment, k, keys)?;
                self.store(&segment, v, values)?;
            }
            let view = DeviceAttention {
                window: w.window,
                chunk: w.chunk,
                cap: self.hyper().attention_cap,
                sinks,
                n_head: w.n_head,
                n_head_kv: w.n_head_kv,
                bias: slopes.map(DeviceBias::Slopes).or(self.distance_bias()),
                ..self.view(&segment)
            };
            self.attend(&segment, &view, q, [keys, values], attended)?;
        }
        Ok(())
    }

    /// Limits queries, keys and values, if the model has a limit.
    fn limit(&self, all: &[DeviceSlice]) -> Result<()> {
        let Some(limit) = self.hyper().qkv_limit else { return Ok(()) };
        let rows = &self.dev.ops.rows;
        all.iter().try_for_each(|x| rows.clamp(self.stream(), *x, limit))
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
            None if !w.gated => return Ok(()),
            Some((_, ValueGate::Softplus)) => ops.activate.softplus(stream, gate)?,
            Some((_, ValueGate::Sigmoid)) | None => ops.activate.sigmoid(stream, gate)?,
        }
        ops.rows.mul_rows(stream, attended, gate)
    }

    /// The product of q, whose heads are [q, gate] → q and gate
    fn split_gates(&self, w: &GpuAttention, acts: &GpuActs, q: DeviceSlice) -> Result<()> {
        let (m, rows) = (&self.layout().mixer, &self.dev.ops.rows);
        let (dim, heads) = (w.head_dim, self.n() * w.n_head);
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
        [k, v]: [DeviceRows; 2],
        out: DeviceSlice<'a>,
    ) -> Result<()> {
        let work = self.slice(&self.layout().mixer.work);
        let q = segment.of(q, view.n_head * k.dim);
        let out = segment.of(out, view.n_head * v.dim);
        let data = AttentionData { tokens: segment.n(), q, k, v, work, out };
        self.dev.ops.attention.launch(self.stream(), view, data)
    }

    /// The values that a mixer weighs → y, or added to x
    pub fn mixer_output(&self, l: usize, output: &GpuLinear) -> Result<()> {
        let Some(scale) = self.mixer_residual(l) else { return self.attention_output(output) };
        let (dev, acts) = (self.dev, self.attended_acts(output)?);
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
