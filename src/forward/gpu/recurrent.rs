//! Layers with a recurrence on a device: the stages of `forward::recurrent`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::conv::ConvRows;
use crate::backend::gpu::rows;
use crate::backend::gpu::scan::{DeviceScan, DeviceSelective, DeviceSteps};
use crate::backend::ops::Columns;
use crate::forward::gpu::acts::RowShape;
use crate::forward::gpu::mixer::GpuMixer;
use crate::forward::gpu::mixer_layout::{DeviceSizes, MixerSizes, raise};
use crate::forward::gpu::pack::{OnDevice, Pack, pack};
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::weights::{GpuLinear, Packer};
use crate::model::weights::{LightningWeights, Mamba2Weights, MambaWeights, ShortConvWeights};

impl GpuMixer for ShortConvWeights<OnDevice> {
    fn mix(&self, cx: &mut GpuPass, l: usize) -> Result<()> {
        let (m, dev, n_embd) = (&cx.layout().mixer, cx.dev, cx.hyper().n_embd);
        // b, c and x of output · (c ⊙ conv(b ⊙ x))
        let acts = cx.mixer_input(l, [self.input.weight.ty])?;
        let width = self.input.weight.rows;
        let projected = cx.words(&m.qkv, cx.n() * width);
        cx.linear(&self.input, &acts, projected)?;
        // convolution: each text with its own past
        let attended = cx.words(&m.attended, cx.n() * n_embd);
        let (conv, stream) = (dev.weights.conv(&self.conv), cx.stream());
        let [factor, gate] = [0, n_embd].map(Some);
        cx.over_states(l, |part, [past, _]| {
            let rows = part.of(projected, width);
            let x = ConvRows { rows, stride: width, first: 2 * n_embd, factor, gate };
            dev.ops.conv.launch(stream, &conv, past, x, part.of(attended, n_embd))
        })?;
        cx.mixer_output(l, &self.output)
    }

    fn output(&self) -> Option<&GpuLinear> {
        Some(&self.output)
    }
}

impl GpuMixer for MambaWeights<OnDevice> {
    fn mix(&self, cx: &mut GpuPass, l: usize) -> Result<()> {
        let (n, m, dev) = (cx.n(), &cx.layout().mixer, cx.dev);
        let (stream, vector) = (cx.stream(), |vector| dev.weights.vector(vector));
        let (channels, width) = (self.shape.conv.channels, self.scan.weight.rows);
        // the convolution's inputs, gate
        let acts = cx.mixer_input(l, [self.input.weight.ty])?;
        let stride = self.input.weight.rows;
        let projected = cx.words(&m.qkv, n * stride);
        cx.linear(&self.input, &acts, projected)?;
        // convolution: each text with its own past, which moves with the state
        let convolved = cx.words(&m.convolved, n * channels);
        let conv = dev.weights.conv(&self.conv);
        for segment in cx.segments() {
            let [past, _] = segment.cache.state(l);
            let x = ConvRows::plain(segment.of(projected, stride), stride);
            dev.ops.conv.convolve(stream, &conv, past, x, segment.of(convolved, channels))?;
        }
        let rows = cx.words(&m.scan, n * width);
        let steps = cx.words(&m.decays, n * channels);
        cx.selective_inputs(self, convolved, rows, steps)?;
        // scan, gate: each text with its own state
        let attended = cx.words(&m.attended, n * channels);
        let (log_decay, skip) = (vector(&self.log_decay), vector(&self.skip));
        let (input, n_states) = (self.shape.rank, self.shape.n_states);
        let batch = cx.batch;
        cx.over_states(l, |part, [past, state]| {
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
        cx.mixer_output(l, &self.output)
    }

    fn output(&self) -> Option<&GpuLinear> {
        Some(&self.output)
    }
}

impl GpuMixer for Mamba2Weights<OnDevice> {
    fn mix(&self, cx: &mut GpuPass, l: usize) -> Result<()> {
        let (n, m, dev, shape) = (cx.n(), &cx.layout().mixer, cx.dev, self.shape.scan);
        let (stream, vector) = (cx.stream(), |vector| dev.weights.vector(vector));
        // gate, the convolution's inputs, steps
        let acts = cx.mixer_input(l, [self.input.weight.ty])?;
        let (stride, channels, inner) =
            (self.input.weight.rows, self.shape.conv.channels, shape.width());
        let projected = cx.words(&m.qkv, n * stride);
        cx.linear(&self.input, &acts, projected)?;
        // convolution, scan, gate: each text with its own state
        let convolved = cx.words(&m.convolved, n * channels);
        let attended = cx.words(&m.attended, n * inner);
        let conv = dev.weights.conv(&self.conv);
        let [bias, log_decay, skip] = [&self.step_bias, &self.log_decay, &self.skip].map(vector);
        // heads' values, groups' inputs, groups' outputs
        let of_group = |first| Columns { first, step: shape.k_dim };
        let outputs = of_group(inner + shape.n_groups * shape.k_dim);
        cx.over_states(l, |part, [past, state]| {
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
        let (norm, eps) = (vector(&self.norm), cx.hyper().norm_eps);
        dev.ops.norm.rms_norm_groups(stream, attended, norm, shape.n_groups, eps)?;
        cx.mixer_output(l, &self.output)
    }

    fn output(&self) -> Option<&GpuLinear> {
        Some(&self.output)
    }
}

impl GpuMixer for LightningWeights<OnDevice> {
    fn mix(&self, cx: &mut GpuPass, l: usize) -> Result<()> {
        let (n, m, dev, shape) = (cx.n(), &cx.layout().mixer, cx.dev, self.shape);
        let (stream, inner, width) = (cx.stream(), shape.width(), 3 * shape.width());
        // q, k and v of each head; gate
        let acts = cx.mixer_input(l, [self.qkv.weight.ty, self.gate.weight.ty])?;
        let (qkv, gate) = (cx.words(&m.qkv, n * width), cx.words(&m.gate, n * inner));
        cx.linear(&self.qkv, &acts, qkv)?;
        cx.linear(&self.gate, &acts, gate)?;
        // scan: each text with its own state
        let attended = cx.words(&m.attended, n * inner);
        let (dim, step) = (shape.v_dim, 3 * shape.v_dim);
        let [q, k, v] = [0, dim, 2 * dim].map(|first| Columns { first, step });
        let log_decay = dev.weights.vector(&self.log_decay);
        cx.over_states(l, |part, [_, state]| {
            let rows = part.of(qkv, width);
            let (silu, steps, skip) = (true, None, None);
            let scan = DeviceScan { shape, rows, width, q, k, v, silu, steps, log_decay, skip };
            dev.ops.scan.launch(stream, &scan, state, part.of(attended, inner))
        })?;
        // norm, gate, output projection
        let (norm, eps) = (dev.weights.vector(&self.norm), LightningWeights::NORM_EPS);
        dev.ops.norm.rms_norm_heads(stream, attended, norm, eps)?;
        dev.ops.rows.mul_sigmoid(stream, attended, gate)?;
        cx.mixer_output(l, &self.output)
    }

    fn output(&self) -> Option<&GpuLinear> {
        Some(&self.output)
    }
}

impl<'a> GpuPass<'a> {
    /// The convolution's output → what is put into states and reads them, in `rows`, and steps
    /// before their softplus.
    fn selective_inputs(
        &self,
        w: &MambaWeights<OnDevice>,
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
}

impl DeviceSizes for ShortConvWeights {
    fn raise(&self, sizes: &mut MixerSizes) {
        raise(&mut sizes.projected, self.input.weight.rows);
        sizes.raise_values(self.conv.shape.channels);
    }
}

impl DeviceSizes for MambaWeights {
    fn raise(&self, sizes: &mut MixerSizes) {
        raise(&mut sizes.projected, self.input.weight.rows);
        raise(&mut sizes.convolved, self.shape.conv.channels);
        sizes.raise_values(self.shape.conv.channels);
        raise(&mut sizes.decays, self.shape.conv.channels);
        sizes.raise_rank(self.shape.rank);
        raise(&mut sizes.scan, self.scan.weight.rows);
    }
}

impl DeviceSizes for Mamba2Weights {
    fn raise(&self, sizes: &mut MixerSizes) {
        raise(&mut sizes.projected, self.input.weight.rows);
        raise(&mut sizes.convolved, self.shape.conv.channels);
        sizes.raise_values(self.shape.scan.width());
    }
}

impl DeviceSizes for LightningWeights {
    fn raise(&self, sizes: &mut MixerSizes) {
        raise(&mut sizes.projected, self.qkv.weight.rows);
        sizes.raise_values(self.shape.width());
    }
}

pack! {
    ShortConvWeights { input, conv, output }
    MambaWeights { shape, input, conv, scan, norms, steps, log_decay, skip, output }
    Mamba2Weights { shape, input, conv, step_bias, log_decay, skip, norm, output }
    LightningWeights { shape, qkv, log_decay, norm, gate, output }
}
