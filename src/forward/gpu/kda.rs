//! Kimi Delta Attention on a device: the stages of `forward::kda`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::conv::ConvRows;
use crate::backend::gpu::delta::{KdaGates, NormGate};
use crate::backend::gpu::rows::Columns;
use crate::forward::gpu::acts::{GpuActs, RowShape};
use crate::forward::gpu::layers::{GpuKda, GpuProjection};
use crate::forward::gpu::pass::GpuPass;

impl<'a> GpuPass<'a> {
    /// x → y
    pub fn kda(&mut self, l: usize, w: &GpuKda) -> Result<()> {
        let (n, m, dev) = (self.n(), &self.layout().mixer, self.dev);
        let (stream, vector) = (self.stream(), |vector| dev.weights.vector(vector));
        let (channels, width, heads) = (w.shape.channels(), w.shape.key_width(), w.shape.n_v_heads);
        // q, k, v, beta, decay and gate
        let inputs = w.qkv.iter().chain([&w.beta, &w.decay.first, &w.gate.first]);
        let acts = self.mixer_input(l, inputs.map(|linear| linear.weight.ty))?;
        let qkv = self.words(&m.qkv, n * channels);
        for (i, linear) in w.qkv.iter().enumerate() {
            let columns = Columns::new(qkv, channels, i * width);
            // The convolution's output is not there yet.
            self.linear_columns(linear, &acts, columns, self.slice(&m.convolved))?;
        }
        let beta = self.words(&m.gates[0], n * heads);
        self.linear(&w.beta, &acts, beta)?;
        let decay = self.words(&m.decays, n * width);
        let gate = self.words(&m.gate, n * width);
        self.projection(&w.decay, &acts, decay)?;
        self.projection(&w.gate, &acts, gate)?;
        // convolution, recurrence: each text with its own state
        let convolved = self.words(&m.convolved, n * channels);
        let attended = self.words(&m.attended, n * width);
        let (conv, dt, a) = (dev.weights.conv(&w.conv), vector(&w.dt), vector(&w.a));
        self.over_states(l, |part, [past, state]| {
            let rows = ConvRows::plain(part.of(qkv, channels), channels);
            let convolved = part.of(convolved, channels);
            dev.ops.conv.launch(stream, &conv, past, rows, convolved)?;
            let (beta, decay) = (part.of(beta, heads), part.of(decay, width));
            let gates = KdaGates { beta, decay, dt, a, bound: w.bound };
            dev.ops.delta.kda(stream, w.shape, convolved, gates, state, part.of(attended, width))
        })?;
        // norm, gate, output projection
        let (norm, eps, function) = (vector(&w.norm), self.hyper().norm_eps, NormGate::Sigmoid);
        dev.ops.delta.rms_norm_gated(stream, attended, norm, eps, function, gate)?;
        self.mixer_output(l, &w.output)
    }

    /// out = second · (first · h), or first · h
    fn projection(&self, w: &GpuProjection, acts: &GpuActs, out: DeviceSlice) -> Result<()> {
        let Some(second) = &w.second else { return self.linear(&w.first, acts, out) };
        let (n, cols) = (self.n(), second.weight.cols);
        let ranks = self.words(&self.layout().mixer.ranks, n * cols);
        self.linear(&w.first, acts, ranks)?;
        let acts = self.mixer_acts([second.weight.ty], RowShape { n, cols }, ranks)?;
        self.linear(second, &acts, out)
    }
}
