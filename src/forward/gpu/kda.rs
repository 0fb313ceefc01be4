//! Kimi Delta Attention on a device: the stages of `forward::kda`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::conv::{ConvRows, DeviceConv, Units};
use crate::backend::gpu::delta::{KdaGates, NormGate};
use crate::backend::gpu::rows::Columns;
use crate::forward::gpu::acts::{GpuActs, RowShape};
use crate::forward::gpu::mixer::GpuMixer;
use crate::forward::gpu::mixer_layout::{DeviceSizes, MixerSizes, raise};
use crate::forward::gpu::pack::{OnDevice, Pack, pack};
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::weights::{GpuLinear, Packer};
use crate::model::weights::{KdaWeights, Projection};

impl GpuMixer for KdaWeights<OnDevice> {
    fn mix(&self, cx: &mut GpuPass, l: usize) -> Result<()> {
        let (n, m, dev) = (cx.n(), &cx.layout().mixer, cx.dev);
        let (stream, vector) = (cx.stream(), |vector| dev.weights.vector(vector));
        let (channels, width, heads) =
            (self.shape.channels(), self.shape.key_width(), self.shape.n_v_heads);
        // q, k, v, beta, decay and gate
        let inputs = self.qkv.iter().chain([&self.beta, &self.decay.first, &self.gate.first]);
        let acts = cx.mixer_input(l, inputs.map(|linear| linear.weight.ty))?;
        let qkv = cx.words(&m.qkv, n * channels);
        for (i, linear) in self.qkv.iter().enumerate() {
            let columns = Columns::new(qkv, channels, i * width);
            // The convolution's output is not there yet.
            cx.linear_columns(linear, &acts, columns, cx.slice(&m.convolved))?;
        }
        let beta = cx.words(&m.gates[0], n * heads);
        cx.linear(&self.beta, &acts, beta)?;
        let decay = cx.words(&m.decays, n * width);
        let gate = cx.words(&m.gate, n * width);
        cx.projection(&self.decay, &acts, decay)?;
        cx.projection(&self.gate, &acts, gate)?;
        // convolution, recurrence: each text with its own state
        let convolved = cx.words(&m.convolved, n * channels);
        let attended = cx.words(&m.attended, n * width);
        let units = Some(Units::of(self.shape));
        let conv = DeviceConv { units, ..dev.weights.conv(&self.conv) };
        let (dt, a) = (vector(&self.dt), vector(&self.a));
        cx.over_states(l, |part, [past, state]| {
            let rows = ConvRows::plain(part.of(qkv, channels), channels);
            let convolved = part.of(convolved, channels);
            dev.ops.conv.launch(stream, &conv, past, rows, convolved)?;
            let (beta, decay) = (part.of(beta, heads), part.of(decay, width));
            let gates = KdaGates { beta, decay, dt, a, bound: self.bound };
            dev.ops.delta.kda(stream, self.shape, convolved, gates, state, part.of(attended, width))
        })?;
        // norm, gate, output projection
        let (norm, eps, function) = (vector(&self.norm), cx.hyper().norm_eps, NormGate::Sigmoid);
        dev.ops.delta.rms_norm_gated(stream, attended, norm, eps, function, gate)?;
        cx.mixer_output(l, &self.output)
    }

    fn output(&self) -> Option<&GpuLinear> {
        Some(&self.output)
    }
}

impl DeviceSizes for KdaWeights {
    fn raise(&self, sizes: &mut MixerSizes) {
        raise(&mut sizes.projected, self.shape.channels());
        raise(&mut sizes.convolved, self.shape.channels());
        sizes.raise_values(self.shape.value_width());
        raise(&mut sizes.heads, self.shape.n_v_heads);
        raise(&mut sizes.decays, self.shape.key_width());
        for second in self.decay.second.iter().chain(&self.gate.second) {
            sizes.raise_rank(second.weight.cols);
        }
    }
}

pack! {
    KdaWeights { shape, qkv, conv, decay, beta, a, dt, bound, gate, norm, output }
    Projection { first, second }
}

impl<'a> GpuPass<'a> {
    /// out = second · (first · h), or first · h
    fn projection(&self, w: &Projection<OnDevice>, acts: &GpuActs, out: DeviceSlice) -> Result<()> {
        let Some(second) = &w.second else { return self.linear(&w.first, acts, out) };
        let (n, cols) = (self.n(), second.weight.cols);
        let ranks = self.words(&self.layout().mixer.ranks, n * cols);
        self.linear(&w.first, acts, ranks)?;
        let acts = self.mixer_acts([second.weight.ty], RowShape { n, cols }, ranks)?;
        self.linear(second, &acts, out)
    }
}
