//! Layers with a recurrence on a device: the stages of `forward::recurrent`.

use crate::Result;
use crate::backend::gpu::conv::ConvRows;
use crate::backend::gpu::scan::{DeviceScan, DeviceSteps};
use crate::backend::ops::Columns;
use crate::forward::gpu::layers::{GpuLightning, GpuMamba2, GpuShortConv};
use crate::forward::gpu::pass::GpuPass;

impl GpuPass<'_> {
    /// h → y = convolution(h)
    pub fn short_conv(&mut self, l: usize, w: &GpuShortConv) -> Result<()> {
        let (m, dev, n_embd) = (&self.layout().mixer, self.dev, self.hyper().n_embd);
        // b, c and x of output · (c ⊙ conv(b ⊙ x))
        let acts = self.acts_of_h([w.input.weight.ty])?;
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
        self.attention_output(&w.output)
    }

    /// h → y = scan(h)
    pub fn mamba2(&mut self, l: usize, w: &GpuMamba2) -> Result<()> {
        let (n, m, dev, shape) = (self.n(), &self.layout().mixer, self.dev, w.shape.scan);
        let (stream, vector) = (self.stream(), |vector| dev.weights.vector(vector));
        // gate, the convolution's inputs, steps
        let acts = self.acts_of_h([w.input.weight.ty])?;
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
        self.attention_output(&w.output)
    }

    /// h → y = linear attention(h)
    pub fn lightning(&mut self, l: usize, w: &GpuLightning) -> Result<()> {
        let (n, m, dev, shape) = (self.n(), &self.layout().mixer, self.dev, w.shape);
        let (stream, inner, width) = (self.stream(), shape.width(), 3 * shape.width());
        // q, k and v of each head; gate
        let acts = self.acts_of_h([w.qkv.weight.ty, w.gate.weight.ty])?;
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
        let (norm, eps) = (dev.weights.vector(&w.norm), self.hyper().norm_eps);
        dev.ops.norm.rms_norm_heads(stream, attended, norm, eps)?;
        dev.ops.rows.mul_sigmoid(stream, attended, gate)?;
        self.attention_output(&w.output)
    }
}
