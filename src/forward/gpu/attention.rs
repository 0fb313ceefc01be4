//! Grouped-query attention on a device: the stages of `forward::attention`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::attention::{DeviceAttention, DeviceBias, records_fit};
use crate::backend::gpu::attention_inputs::{HeadRows, InputSteps, NewRows};
use crate::backend::gpu::rope::DeviceCosSin;
use crate::backend::gpu::rows::Columns;
use crate::forward::gpu::acts::{GpuActs, RowShape};
use crate::forward::gpu::attend::Attended;
use crate::forward::gpu::mixer::GpuMixer;
use crate::forward::gpu::mixer_layout::{DeviceSizes, MixerSizes, raise};
use crate::forward::gpu::pack::GpuAttention;
use crate::forward::gpu::pass::{GpuPass, GpuSegment, Role};
use crate::forward::gpu::weights::{GpuLinear, GpuVector};
use crate::model::descriptor::ValueGate;
use crate::model::hyper::HyperParams;
use crate::model::weights::AttentionWeights;
use crate::simd::act_kind;

/// Whether queries or keys are normalised over all heads together.
fn norms_all_heads(w: &GpuAttention) -> bool {
    let norms = [&w.q_norm, &w.k_norm].into_iter().flatten();
    norms.map(GpuVector::n).any(|n| n != w.head_dim)
}

impl GpuMixer for GpuAttention {
    fn mix(&self, cx: &mut GpuPass, l: usize) -> Result<()> {
        let (hyper, m, n) = (cx.hyper(), &cx.layout().mixer, cx.n());
        // q, k, v
        let own_gate = self.gate.as_ref().map(|(gate, _)| gate);
        let of_index = self.index.iter().flat_map(|index| [&index.q, &index.k]);
        let inputs = self.products.iter().chain(&self.gated).chain(own_gate).chain(of_index);
        let acts = cx.mixer_input(l, inputs.map(|linear| linear.weight.ty))?;
        let products = cx.words(&m.qkv, n * self.width);
        let mut first = 0;
        for linear in &self.products {
            let columns = Columns::new(products, self.width, first);
            // The queries' place is free until they are made.
            cx.linear_columns(linear, &acts, columns, cx.slice(&m.q))?;
            first += linear.weight.rows;
        }
        if let Some(linear) = &self.gated {
            cx.gated_queries(self, linear, &acts)?;
        }
        let rows = own_gate.map_or(self.n_head * self.head_dim_v, |linear| linear.weight.rows);
        let gate = cx.words(&m.gate, n * rows);
        if let Some(linear) = own_gate {
            cx.linear(linear, &acts, gate)?;
        }
        cx.norm_all_heads(self, products)?;
        // what an indexer chooses
        if let Some(index) = &self.index {
            cx.index_products(index, &acts)?;
            match index.means {
                true => cx.choose_by_means(l, index)?,
                false => cx.choose_blocks(l, index)?,
            }
        }
        // QK-norm, RoPE, cache, attention: each text over its own cache
        let attended = cx.words(&m.attended, n * self.n_head * self.head_dim_v);
        let stored = cx.stored_with_attention(self, attended);
        let records = stored.map(|acts| acts.view(self.output.weight.ty));
        for segment in cx.segments() {
            let records = records.map(|records| records.token_range(segment.rows.clone()));
            cx.attend_own(l, self, &segment, products, Attended { values: attended, records })?;
        }
        cx.gate_values(self, attended, gate)?;
        match &stored {
            Some(acts) => cx.mixer_product(l, &self.output, acts)?,
            None => cx.mixer_output(l, &self.output)?,
        }
        match hyper.attention_output_scale {
            1.0 => Ok(()),
            scale => cx.dev.ops.rows.scale(cx.stream(), cx.y(), scale),
        }
    }

    fn output(&self) -> Option<&GpuLinear> {
        Some(&self.output)
    }

    /// An indexer keeps what blocks that are not complete have summed up to.
    fn state_slot(&self, hyper: &HyperParams, l: usize) -> Option<usize> {
        let has_means = self.index.as_ref().is_some_and(|index| index.means);
        has_means.then(|| hyper.second_slot(l))
    }
}

impl DeviceSizes for AttentionWeights {
    fn raise(&self, sizes: &mut MixerSizes) {
        let [q, values] = [self.head_dim, self.head_dim_v].map(|dim| self.n_head * dim);
        let keys = [self.head_dim, self.head_dim_v].map(|dim| self.n_head_kv * dim);
        raise(&mut sizes.q, q);
        sizes.raise_values(values);
        raise(&mut sizes.gated, if self.gated { 2 * q } else { 0 });
        raise(&mut sizes.projected, q + keys[0] + keys[1]);
        sizes.keys.iter_mut().zip(keys).for_each(|(most, own)| raise(most, own));
    }
}

impl<'a> GpuPass<'a> {
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
        // An indexer's keys are behind them.
        let (keys, values) = self.own_rows(w.shared_with.unwrap_or(l), segment);
        let [keys, values] = [keys, values].map(|rows| rows.first_heads(w.n_head_kv));
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
        match w.index {
            None => self.attend_into(segment, &view, all, [keys, values], attended),
            Some(_) => self.attend_seen(segment, &view, all, [keys, values], attended.values),
        }
    }

    /// The memory of what the output projection reads, if attention can store it.
    fn stored_with_attention(
        &self,
        w: &GpuAttention,
        attended: DeviceSlice<'a>,
    ) -> Option<GpuActs<'a>> {
        let ty = w.output.weight.ty;
        let is_gated = w.gate.is_some() || w.gated.is_some();
        let fits =
            !is_gated && w.index.is_none() && records_fit(act_kind(ty), w.n_head, w.head_dim_v);
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
            if self.model.descriptor.parts.qk_norm_by_head {
                self.norm_each_head(w, products, norm, first)?;
                continue;
            }
            let columns = Columns::new(products, w.width, first);
            ops.norm.rms_norm_columns(stream, columns, norm, eps, None)?;
        }
        Ok(())
    }

    /// Normalises each head of the products from column `first` on, by weights of its own.
    fn norm_each_head(
        &self,
        w: &GpuAttention,
        products: DeviceSlice,
        norm: DeviceSlice,
        first: usize,
    ) -> Result<()> {
        let (ops, stream, eps) = (&self.dev.ops.norm, self.stream(), self.hyper().norm_eps);
        let n_heads = norm.count::<f32>() / w.head_dim;
        let words = |first: usize, n: usize| 4 * first..4 * (first + n);
        if self.n() <= n_heads {
            // The heads of a token are adjacent.
            return (0..self.n()).try_for_each(|token| {
                let heads = words(token * w.width + first, n_heads * w.head_dim);
                ops.rms_norm_groups(stream, products.slice(heads), norm, n_heads, eps)
            });
        }
        (0..n_heads).try_for_each(|head| {
            let at = head * w.head_dim;
            let columns = Columns::new(products, w.width, first + at);
            let norm = norm.slice(words(at, w.head_dim));
            ops.rms_norm_columns(stream, columns, norm, eps, None)
        })
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
            Some((_, ValueGate::BinarySoftplus)) => {
                ops.rows.scale(stream, gate, std::f32::consts::LN_2)?;
                ops.activate.softplus(stream, gate)?;
                ops.rows.scale(stream, gate, std::f32::consts::LOG2_E)?;
            }
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
}
