//! The delta rule with a decay for each element of a key, over vectors as a convolution makes them.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::conv::{Conv, ConvRows, DeviceConv, Units};
use crate::backend::gpu::delta::{Delta, KdaGates};
use crate::backend::ops::{DeltaShape, HeadOrder, ShortConv};

/// A prompt, and single tokens; then prompts of more tokens than a warp makes shares of at once.
const PASSES: [usize; 4] = [9, 1, 1, 3];
const LONG_PASSES: [usize; 3] = [1, 70, 33];

/// Passes that follow one another on one state.
#[derive(Clone, Copy)]
struct Case {
    shape: DeltaShape,
    bound: Option<f32>,
    passes: &'static [usize],
}

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let (conv, delta) = (Conv::load(&bench.gpu)?, Delta::load(&bench.gpu)?);
    let shape = |n_heads, k_dim, v_dim| DeltaShape {
        n_k_heads: n_heads,
        n_v_heads: n_heads,
        k_dim,
        v_dim,
        kernel: 4,
        order: HeadOrder::Grouped,
    };
    let small = shape(3, 5, 5);
    let shapes = bench.shapes(
        &[small, shape(2, 65, 33)],
        &[shape(2, 32, 64), shape(1, 128, 128)],
        &[shape(32, 128, 128)],
    );
    report.row("kda_rule", "f32", |row| {
        for bound in [None, Some(-5.0)] {
            for shape in shapes.iter().copied() {
                Case { shape, bound, passes: &PASSES }.compare(bench, &conv, &delta, row)?;
            }
            for shape in bench.shapes(&[], &[small], &[]) {
                Case { shape, bound, passes: &LONG_PASSES }.compare(bench, &conv, &delta, row)?;
            }
        }
        Ok(())
    });
    Ok(())
}

impl Case {
    /// Compares the outputs and the state after each pass.
    fn compare(&self, bench: &Bench, conv: &Conv, delta: &Delta, row: &mut Row) -> Result<()> {
        let Case { shape, bound, passes } = *self;
        let (mut random, n, width) =
            (Random(shape.k_dim as u64), shape.n_v_heads, shape.key_width());
        let (taps, dt) = (random.floats(shape.channels() * shape.kernel), random.floats(width));
        // Not positive without a bound, as in models: a state that grew would hide differences.
        let mut a = random.floats(n);
        if bound.is_none() {
            a.iter_mut().for_each(|a| *a = -a.abs());
        }
        let (mut past, mut state) = (random.floats(shape.n_past()), random.floats(shape.n_state()));
        let [taps_up, dt_up, a_up, past_up, state_up] =
            [&taps, &dt, &a, &past, &state].map(|v| bench.up_f32(v));
        let (taps_up, dt_up, a_up) = (taps_up?, dt_up?, a_up?);
        let (past_up, state_up, stream) = (past_up?, state_up?, &bench.stream);
        let form = ShortConv { shape: shape.conv(), weight: &taps, bias: None, silu: true };
        for tokens in passes.iter().copied() {
            let x = random.floats(tokens * shape.channels());
            let (mut beta, mut decay) = (random.floats(tokens * n), random.floats(tokens * width));
            let (x_up, qkv) = (bench.up_f32(&x)?, bench.empty(4 * x.len())?);
            let device = DeviceConv {
                shape: shape.conv(),
                weight: taps_up.all(),
                bias: None,
                silu: true,
                units: Some(Units::of(shape)),
            };
            let rows = ConvRows::plain(x_up.all(), shape.channels());
            conv.launch(stream, &device, past_up.all(), rows, qkv.all())?;
            let out = bench.empty(4 * tokens * shape.value_width())?;
            let (beta_up, decay_up) = (bench.up_f32(&beta)?, bench.up_f32(&decay)?);
            let gates = KdaGates {
                beta: beta_up.all(),
                decay: decay_up.all(),
                dt: dt_up.all(),
                a: a_up.all(),
                bound,
            };
            delta.kda(stream, shape, qkv.all(), gates, state_up.all(), out.all())?;

            let cpu = &bench.cpu;
            cpu.kernels.sigmoid(&mut beta);
            cpu.element_decays(&mut decay, &dt, &a, bound);
            let mut convolved = vec![0.0; x.len()];
            cpu.short_conv(&form, &mut past, &x, &mut convolved);
            let mut expected = vec![0.0; tokens * shape.value_width()];
            cpu.delta_rule(shape, &convolved, (&decay, &beta), &mut state, &mut expected);

            assert!(expected.iter().all(|x| x.is_finite()), "data whose errors would show nowhere");
            let name = format!("{tokens}×{n}×{}×{}", shape.k_dim, shape.v_dim);
            row.bits(&name, &bench.down_f32(&out)?, &expected);
            row.bits(format!("state of {name}"), &bench.down_f32(&state_up)?, &state);
        }
        Ok(())
    }
}
