//! The gated delta rule of linear-attention layers, and the norm behind it.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::conv::{Conv, ConvRows, DeviceConv, Units};
use crate::backend::gpu::delta::{Delta, DeviceGates, GateProducts, NormGate};
use crate::backend::ops::{DeltaShape, HeadOrder, ShortConv};

const EPS: f32 = 1e-6;
/// A prompt, single tokens, and passes of fewer tokens than the convolution's past.
const PASSES: [usize; 6] = [9, 1, 1, 2, 3, 1];
const LONG_PASSES: [usize; 3] = [1, 70, 33];

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let kernels = Kernels { conv: Conv::load(&bench.gpu)?, delta: Delta::load(&bench.gpu)? };
    let shape = |[n_k_heads, n_v_heads, k_dim, v_dim]: [usize; 4], order| DeltaShape {
        n_k_heads,
        n_v_heads,
        k_dim,
        v_dim,
        kernel: 4,
        order,
    };
    let small = shape([2, 4, 3, 5], HeadOrder::Grouped);
    let shapes = bench.shapes(
        &[small, shape([2, 6, 65, 33], HeadOrder::Tiled)],
        &[
            shape([2, 6, 3, 5], HeadOrder::Tiled),
            shape([1, 2, 65, 33], HeadOrder::Grouped),
            DeltaShape { kernel: 1, ..shape([3, 3, 32, 64], HeadOrder::Tiled) },
            shape([2, 2, 128, 128], HeadOrder::Grouped),
        ],
        &[shape([16, 32, 128, 128], HeadOrder::Grouped)],
    );
    report.row("delta_rule", "f32", |row| {
        for (mixed, shape) in
            [true, false].into_iter().flat_map(|m| shapes.iter().map(move |s| (m, s)))
        {
            Case { shape: *shape, mixed, passes: &PASSES }.compare(bench, &kernels, row)?;
        }
        for shape in bench.shapes(&[], &[small], &[]) {
            Case { shape, mixed: false, passes: &LONG_PASSES }.compare(bench, &kernels, row)?;
        }
        Ok(())
    });
    delta_norm(bench, &kernels.delta, report);
    Ok(())
}

fn delta_norm(bench: &Bench, delta: &Delta, report: &mut Report) {
    report.row("delta_norm", "f32", |row| {
        for [rows, dim] in bench.shapes(&[[7, 5], [1, 130]], &[[1, 128], [12, 64]], &[[512, 128]]) {
            let mut random = Random(dim as u64);
            let (x, weight) = (random.floats(rows * dim), random.floats(dim));
            let gate = random.floats(rows * dim);
            let (weight_up, gate_up) = (bench.up_f32(&weight)?, bench.up_f32(&gate)?);
            for function in [NormGate::Silu, NormGate::Sigmoid] {
                let (x_up, stream) = (bench.up_f32(&x)?, &bench.stream);
                let (weight_up, gate_up) = (weight_up.all(), gate_up.all());
                delta.rms_norm_gated(stream, x_up.all(), weight_up, EPS, function, gate_up)?;
                let mut x = x.clone();
                match function {
                    NormGate::Silu => bench.cpu.rms_norm_gated(&mut x, &weight, EPS, &gate),
                    NormGate::Sigmoid => {
                        bench.cpu.rms_norm_heads(&mut x, &weight, EPS);
                        bench.cpu.sigmoid_gated(&mut x, &mut gate.clone());
                    }
                }
                row.bits(format!("{rows}×{dim}, {function:?}"), &bench.down_f32(&x_up)?, &x);
            }
        }
        Ok(())
    });
}

struct Kernels {
    conv: Conv,
    delta: Delta,
}

/// Passes that follow one another on one state.
struct Case<'a> {
    shape: DeltaShape,
    /// Whether the gates' products are mixed or apart.
    mixed: bool,
    /// Tokens of each pass.
    passes: &'a [usize],
}

impl Case<'_> {
    /// Compares the outputs and the state after each pass.
    fn compare(&self, bench: &Bench, kernels: &Kernels, row: &mut Row) -> Result<()> {
        let Case { shape, mixed, passes } = *self;
        let (mut random, n) = (Random(shape.k_dim as u64), shape.n_v_heads);
        let (conv, dt) = (random.floats(shape.channels() * shape.kernel), random.floats(n));
        // Not positive, as in models: a state that grew without bound would hide differences.
        let a: Vec<f32> = random.floats(n).into_iter().map(|a| -a.abs()).collect();
        let (mut past, mut state) = (random.floats(shape.n_past()), random.floats(shape.n_state()));
        let [conv_up, dt_up, a_up, past_up, state_up] =
            [&conv, &dt, &a, &past, &state].map(|v| bench.up_f32(v));
        let (conv_up, dt_up, a_up) = (conv_up?, dt_up?, a_up?);
        let (past_up, state_up, stream) = (past_up?, state_up?, &bench.stream);
        for tokens in passes.iter().copied() {
            let x = random.floats(tokens * shape.channels());
            let (mut beta, mut alpha) = (random.floats(tokens * n), random.floats(tokens * n));

            let (x_up, qkv) = (bench.up_f32(&x)?, bench.empty(4 * x.len())?);
            let device = DeviceConv {
                shape: shape.conv(),
                weight: conv_up.all(),
                bias: None,
                silu: true,
                units: Some(Units::of(shape)),
            };
            let rows = ConvRows::plain(x_up.all(), shape.channels());
            kernels.conv.launch(stream, &device, past_up.all(), rows, qkv.all())?;
            let out = bench.empty(4 * tokens * shape.value_width())?;
            let both = bench.up_f32(&mix(n / shape.n_k_heads, &beta, &alpha))?;
            let (beta_up, alpha_up) = (bench.up_f32(&beta)?, bench.up_f32(&alpha)?);
            let products = match mixed {
                true => GateProducts::Mixed(both.all()),
                false => GateProducts::Apart { beta: beta_up.all(), alpha: alpha_up.all() },
            };
            let gates = DeviceGates { products, dt: dt_up.all(), a: a_up.all() };
            kernels.delta.rule(stream, shape, qkv.all(), gates, state_up.all(), out.all())?;

            let cpu = &bench.cpu;
            cpu.kernels.sigmoid(&mut beta);
            cpu.log_decays(&mut alpha, &dt, &a);
            let mut convolved = vec![0.0; x.len()];
            let conv = ShortConv { shape: shape.conv(), weight: &conv, bias: None, silu: true };
            cpu.short_conv(&conv, &mut past, &x, &mut convolved);
            let mut expected = vec![0.0; tokens * shape.value_width()];
            cpu.delta_rule(shape, &convolved, (&alpha, &beta), &mut state, &mut expected);

            assert!(expected.iter().all(|x| x.is_finite()), "data whose errors would show nowhere");
            let DeltaShape { n_v_heads, k_dim, v_dim, .. } = shape;
            let name = format!("{tokens}×{n_v_heads}×{k_dim}×{v_dim}");
            row.bits(&name, &bench.down_f32(&out)?, &expected);
            row.bits(format!("past of {name}"), &bench.down_f32(&past_up)?, &past);
            row.bits(format!("state of {name}"), &bench.down_f32(&state_up)?, &state);
        }
        Ok(())
    }
}

/// By key head, `group` value heads' betas, then their alphas.
fn mix(group: usize, beta: &[f32], alpha: &[f32]) -> Vec<f32> {
    let pairs = beta.chunks_exact(group).zip(alpha.chunks_exact(group));
    pairs.flat_map(|(beta, alpha)| beta.iter().chain(alpha)).copied().collect()
}
