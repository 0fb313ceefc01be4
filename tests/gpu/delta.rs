//! The gated delta rule on the emulated device against the CPU, to the bit: outputs, states and
//! remembered inputs, however a text is cut into passes.

use crate::support::Bench;
use moeba::backend::cpu::Cpu;
use moeba::backend::gpu::DeviceBuffer;
use moeba::backend::gpu::delta::{Delta, DeviceGates, GateProducts};
use moeba::backend::ops::{DeltaShape, HeadOrder};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.0 >> 33
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        let unit = |bits: u64| bits as f32 / (1u64 << 30) as f32 - 1.0;
        (0..n).map(|_| unit(self.next()) * [1.0, 3.0, 0.01][self.next() as usize % 3]).collect()
    }
}

fn same(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.to_bits(), expected.to_bits(), "{what}: {got:e} for {expected:e} at {i}");
    }
}

/// A layer's weights.
struct Weights {
    conv: Vec<f32>,
    dt: Vec<f32>,
    /// None positive, as in models: a state that grew without bound would hide everything.
    a: Vec<f32>,
}

/// What a layer remembers on the CPU.
struct OnCpu {
    cpu: Cpu,
    past: Vec<f32>,
    state: Vec<f32>,
}

impl OnCpu {
    fn pass(&mut self, shape: DeltaShape, w: &Weights, x: &[f32], gates: &Gates) -> Vec<f32> {
        let (mut beta, mut decay) = gates.split(shape);
        self.cpu.kernels.sigmoid(&mut beta);
        self.cpu.log_decays(&mut decay, &w.dt, &w.a);
        let mut conv = vec![0.0; x.len()];
        self.cpu.short_conv(shape, &w.conv, &mut self.past, x, &mut conv);
        let mut out = vec![0.0; x.len() / shape.channels() * shape.value_width()];
        self.cpu.delta_rule(shape, &conv, (&decay, &beta), &mut self.state, &mut out);
        out
    }
}

/// What it remembers on the device.
struct OnDevice {
    bench: Bench,
    delta: Delta,
    past: DeviceBuffer,
    state: DeviceBuffer,
}

impl OnDevice {
    fn pass(&self, shape: DeltaShape, w: &Weights, x: &[f32], gates: &Gates) -> Vec<f32> {
        let Bench { stream, .. } = &self.bench;
        let [conv, dt, a, x_up] = [&w.conv, &w.dt, &w.a, x].map(|v| self.bench.up_f32(v));
        let qkv = self.bench.empty(4 * x.len());
        let (past, state) = (self.past.all(), self.state.all());
        self.delta.inputs(stream, shape, conv.all(), past, x_up.all(), qkv.all()).unwrap();
        let tokens = x.len() / shape.channels();
        let out = self.bench.empty(4 * tokens * shape.value_width());
        let (first, second) = (self.bench.up_f32(&gates.first), self.bench.up_f32(&gates.second));
        let products = match gates.second.is_empty() {
            true => GateProducts::Mixed(first.all()),
            false => GateProducts::Apart { beta: first.all(), alpha: second.all() },
        };
        let gates = DeviceGates { products, dt: dt.all(), a: a.all() };
        self.delta.rule(stream, shape, qkv.all(), gates, state, out.all()).unwrap();
        self.bench.down_f32(&out)
    }
}

/// Products: betas and alphas mixed, the second list empty, or apart.
struct Gates {
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Gates {
    /// As `DeltaBuffers::split` of the model does.
    fn split(&self, shape: DeltaShape) -> (Vec<f32>, Vec<f32>) {
        if !self.second.is_empty() {
            return (self.first.clone(), self.second.clone());
        }
        let group = shape.n_v_heads / shape.n_k_heads;
        let pairs = || self.first.chunks_exact(2 * group).map(|pair| pair.split_at(group));
        let beta = pairs().flat_map(|(beta, _)| beta).copied().collect();
        (beta, pairs().flat_map(|(_, alpha)| alpha).copied().collect())
    }
}

/// Passes of so many tokens each.
fn compare(shape: DeltaShape, passes: &[usize], mixed: bool, seed: u64) {
    let mut random = Random(seed);
    let n = shape.n_v_heads;
    let a = random.floats(n).into_iter().map(|a| -a.abs()).collect();
    let conv = random.floats(shape.channels() * shape.kernel);
    let w = Weights { conv, dt: random.floats(n), a };
    let past = random.floats(shape.n_past());
    let state = random.floats(shape.n_state());
    let bench = Bench::new(seed);
    let device = OnDevice {
        delta: Delta::load(&bench.gpu).unwrap(),
        past: bench.up_f32(&past),
        state: bench.up_f32(&state),
        bench,
    };
    let mut cpu = OnCpu { cpu: Cpu::new(1), past, state };
    for tokens in passes {
        let x = random.floats(tokens * shape.channels());
        let gates = match mixed {
            true => Gates { first: random.floats(2 * tokens * n), second: Vec::new() },
            false => Gates { first: random.floats(tokens * n), second: random.floats(tokens * n) },
        };
        let what = format!("{shape:?}, {tokens} of {passes:?} tokens");
        let expected = cpu.pass(shape, &w, &x, &gates);
        assert!(expected.iter().all(|x| x.is_finite()), "{what}");
        same(&device.pass(shape, &w, &x, &gates), &expected, &what);
        same(&device.bench.down_f32(&device.past), &cpu.past, &format!("past, {what}"));
        same(&device.bench.down_f32(&device.state), &cpu.state, &format!("state, {what}"));
    }
}

const SMALL: DeltaShape = DeltaShape {
    n_k_heads: 2,
    n_v_heads: 4,
    k_dim: 3,
    v_dim: 5,
    kernel: 4,
    order: HeadOrder::Grouped,
};

#[test]
fn passes_have_the_cpus_bits() {
    let tiled = DeltaShape { order: HeadOrder::Tiled, n_v_heads: 6, ..SMALL };
    let wide = DeltaShape { n_k_heads: 1, n_v_heads: 2, k_dim: 65, v_dim: 33, ..SMALL };
    let narrow =
        DeltaShape { n_k_heads: 3, n_v_heads: 3, k_dim: 32, v_dim: 64, kernel: 1, ..tiled };
    for (seed, shape) in [SMALL, tiled, wide, narrow].into_iter().enumerate() {
        for mixed in [true, false] {
            // A prompt, tokens one by one, and passes shorter than what the convolution remembers.
            compare(shape, &[9, 1, 1, 2, 3, 1], mixed, seed as u64);
        }
    }
}

#[test]
fn long_passes_have_the_cpus_bits() {
    compare(SMALL, &[1, 70, 33], false, 5);
    let heads_of_128 = DeltaShape { k_dim: 128, v_dim: 128, n_v_heads: 2, ..SMALL };
    compare(heads_of_128, &[1, 11], true, 6);
}

#[test]
fn gated_norm_has_the_cpus_bits() {
    for (seed, (rows, dim)) in [(1, 128), (7, 5), (12, 64), (3, 130)].into_iter().enumerate() {
        let (bench, mut random) = (Bench::new(seed as u64), Random(seed as u64));
        let (mut x, weight) = (random.floats(rows * dim), random.floats(dim));
        let gate = random.floats(rows * dim);
        let [x_up, weight_up, gate_up] = [&x, &weight, &gate].map(|v| bench.up_f32(v));
        let delta = Delta::load(&bench.gpu).unwrap();
        let weight_all = weight_up.all();
        delta.rms_norm_gated(&bench.stream, x_up.all(), weight_all, 1e-6, gate_up.all()).unwrap();
        Cpu::new(1).rms_norm_gated(&mut x, &weight, 1e-6, &gate);
        same(&bench.down_f32(&x_up), &x, &format!("{rows} rows of {dim}"));
    }
}
