//! Layers with a recurrence on a device: the stages of `forward::recurrent`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::conv::ConvRows;
use crate::backend::gpu::rows;
use crate::backend::gpu::scan::{DeviceScan, DeviceSelective, DeviceSteps};
use crate::backend::ops::Columns;
use crate::forward::gpu::acts::RowShape;
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::recurrent_layers::{GpuLightning, GpuMamba, GpuMamba2, GpuShortConv};

impl<'a> GpuPass<'a> {
    /// x → y = convolution(h)
    pub fn short_conv(&mut self, l: usize, w: &GpuShortConv) -> Result<()> {
        let (m, dev, n_embd) = (&self.layout().mixer, self.dev, self.hyper().n_embd);
        // b, c and x of output · (c ⊙ conv(b ⊙ x))
        let acts = self.mixer_input(l, [w.input.weight.ty])?;
        let width = w.input.weight.rows;
        let projected = self.words(&m.qkv, self.n() * width);
        self.linear(&w.input, &acts, projected)?;
        // convolution: each text with its own past
        let attended = self.words(&m.attended, self.n() * n_embd);
        let (conv, stream) = (dev.weights.conv(&w.conv), self.stream());
        let [factor, gate] = [0, n_embd].map(Some);
        self.over_states(l, |part, [past, _]| {
            let rows = part.of(projected, width);
            let x = ConvRows { rows, stride: width, first: 2 * n_embd, factor, gate };
            dev.ops.conv.launch(stream, &conv, past, x, part.of(attended, n_embd))
        })?;
        self.mixer_output(l, &w.output)
    }

    /// x → y = selective scan(h)
    pub fn mamba(&mut self, l: usize, w: &GpuMamba) -> Result<()> {
        let (n, m, dev) = (self.n(), &self.layout().mixer, self.dev);
        let (stream, vector) = (self.stream(), |vector| dev.weights.vector(vector));
        let (channels, width) = (w.shape.conv.channels, w.scan.weight.rows);
        // the convolution's inputs, gate
        let acts = self.mixer_input(l, [w.input.weight.ty])?;
        let stride = w.input.weight.rows;
        let projected = self.words(&m.qkv, n * stride);
        self.linear(&w.input, &acts, projected)?;
        // convolution: each text with its own past, which moves with the state
        let convolved = self.words(&m.convolved, n * channels);
        let conv = dev.weights.conv(&w.conv);
        for segment in self.segments() {
            let [past, _] = segment.cache.state(l);
            let x = ConvRows::plain(segment.of(projected, stride), stride);
            dev.ops.conv.convolve(stream, &conv, past, x, segment.of(convolved, channels))?;
        }
        let rows = self.words(&m.scan, n * width);
        let steps = self.words(&m.decays, n * channels);
        self.selective_inputs(w, convolved, rows, steps)?;
        // scan, gate: each text with its own state
        let attended = self.words(&m.attended, n * channels);
        let (log_decay, skip) = (vector(&w.log_decay), vector(&w.skip));
        let (input, n_states) = (w.shape.rank, w.shape.n_states);
        let batch = self.batch;
        self.over_states(l, |part, [past, state]| {
            let projected = part.of(projected, stride);
            // The convolution of one row has moved it.
            if batch.segments().nth(part.index).is_some_and(|(rows, _)| rows.len() > 1) {
                dev.ops.conv.move_past(stream, &conv, past, ConvRows::plain(projected, stride))?;
            }
            let scan = DeviceSelective {
                x: part.of(convolved, channels),
                steps: part.of(steps, channels),
                rows: part.of(rows, width),
                width,
                input,
                output: input + n_states,
                n_states,
                log_decay,
                skip,
                gate: projected,
                gate_stride: stride,
                gate_first: channels,
            };
            dev.ops.scan.selective(stream, &scan, state, part.of(attended, channels))
        })?;
        self.mixer_output(l, &w.output)
    }

    /// The convolution's output → what is put into states and reads them, in `rows`, and steps
    /// before their softplus.
    fn selective_inputs(
        &self,
        w: &GpuMamba,
        convolved: DeviceSlice<'a>,
        rows: DeviceSlice<'a>,
        steps: DeviceSlice<'a>,
    ) -> Result<()> {
        let (n, dev, eps) = (self.n(), self.dev, self.hyper().norm_eps);
        let (rank, width) = (w.shape.rank, w.scan.weight.rows);
        let shape = RowShape { n, cols: w.shape.conv.channels };
        let acts = self.mixer_acts([w.scan.weight.ty], shape, convolved)?;
        self.linear(&w.scan, &acts, rows)?;
        let ranks = self.words(&self.layout().mixer.ranks, n * rank);
        let firsts = [0, rank, rank + w.shape.n_states];
        for ((first, norm), out) in firsts.into_iter().zip(&w.norms).zip([Some(ranks), None, None])
        {
            let (columns, norm) =
                (rows::Columns::new(rows, width, first), dev.weights.vector(norm));
            dev.ops.norm.rms_norm_columns(self.stream(), columns, norm, eps, out)?;
        }
        let acts = self.mixer_acts([w.steps.weight.ty], RowShape { n, cols: rank }, ranks)?;
        self.linear(&w.steps, &acts, steps)
    }

    /// x → y = scan(h)
    pub fn mamba2(&mut self, l: usize, w: &GpuMamba2) -> Result<()> {
        let (n, m, dev, shape) = (self.n(), &self.layout().mixer, self.dev, w.shape.scan);
        let (stream, vector) = (self.stream(), |vector| dev.weights.vector(vector));
        // gate, the convolution's inputs, steps
        let acts = self.mixer_input(l, [w.input.weight.ty])?;
        let (stride, channels, inner) = (w.input.weight.rows, w.shape.conv.channels, shape.width());
        let projected = self.words(&m.qkv, n * stride);
        self.linear(&w.input, &acts, projected)?;
        // convolution, scan, gate: each text with its own state
        let convolved = self.words(&m.convolved, n * channels);
        let attended = self.words(&m.attended, n * inner);
        let conv = dev.weights.conv(&w.conv);
        let [bias, log_decay, skip] = [&w.step_bias, &w.log_decay, &w.skip].map(vector);
        // heads' values, groups' inputs, groups' outputs
        let of_group = |first| Columns { first, step: shape.k_dim };
        let outputs = of_group(inner + shape.n_groups * shape.k_dim);
        self.over_states(l, |part, [past, state]| {
            let (rows, convolved) = (part.of(projected, stride), part.of(convolved, channels));
            let x = ConvRows { first: inner, ..ConvRows::plain(rows, stride) };
            dev.ops.conv.launch(stream, &conv, past, x, convolved)?;
            let scan = DeviceScan {
                shape,
                rows: convolved,
                width: channels,
                q: outputs,
                k: of_group(inner),
                v: Columns { first: 0, step: shape.v_dim },
                silu: false,
                steps: Some(DeviceSteps { rows, stride, first: inner + channels, bias }),
                log_decay,
                skip: Some(skip),
            };
            dev.ops.scan.launch(stream, &scan, state, part.of(attended, inner))
        })?;
        // norm, output projection
        let (norm, eps) = (vector(&w.norm), self.hyper().norm_eps);
        dev.ops.norm.rms_norm_groups(stream, attended, norm, shape.n_groups, eps)?;
        self.mixer_output(l, &w.output)
    }

    /// x → y = linear attention(h)
    pub fn lightning(&mut self, l: usize, w: &GpuLightning) -> Result<()> {
        let (n, m, dev, shape) = (self.n(), &self.layout().mixer, self.dev, w.shape);
        let (stream, inner, width) = (self.stream(), shape.width(), 3 * shape.width());
        // q, k and v of each head; gate
        let acts = self.mixer_input(l, [w.qkv.weight.ty, w.gate.weight.ty])?;
        let (qkv, gate) = (self.words(&m.qkv, n * width), self.words(&m.gate, n * inner));
        self.linear(&w.qkv, &acts, qkv)?;
        self.linear(&w.gate, &acts, gate)?;
        // scan: each text with its own state
        let attended = self.words(&m.attended, n * inner);
        let (dim, step) = (shape.v_dim, 3 * shape.v_dim);
        let [q, k, v] = [0, dim, 2 * dim].map(|first| Columns { first, step });
        let log_decay = dev.weights.vector(&w.log_decay);
        self.over_states(l, |part, [_, state]| {
            let rows = part.of(qkv, width);
            let (silu, steps, skip) = (true, None, None);
            let scan = DeviceScan { shape, rows, width, q, k, v, silu, steps, log_decay, skip };
            dev.ops.scan.launch(stream, &scan, state, part.of(attended, inner))
        })?;
        // norm, gate, output projection
        let (norm, eps) =
            (dev.weights.vector(&w.norm), crate::model::weights::LightningWeights::NORM_EPS);
        dev.ops.norm.rms_norm_heads(stream, attended, norm, eps)?;
        dev.ops.rows.mul_sigmoid(stream, attended, gate)?;
        self.mixer_output(l, &w.output)
    }
}
