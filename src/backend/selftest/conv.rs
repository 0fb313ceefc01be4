//! Short convolutions, whose input and result may be multiplied by columns of the same rows. Unit
//! vectors are compared with the delta rule, which reads them.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::conv::{Conv, ConvRows, DeviceConv};
use crate::backend::ops::{ConvShape, ShortConv};

/// A prompt, single tokens, and passes of fewer tokens than the convolution's past.
const PASSES: [usize; 6] = [9, 1, 1, 2, 3, 1];

/// Passes that follow one another on one past.
#[derive(Clone, Copy)]
struct Case {
    shape: ConvShape,
    has_bias: bool,
    silu: bool,
    /// Rows are factors, gates and inputs, else inputs and what no one reads.
    is_gated: bool,
}

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let conv = Conv::load(&bench.gpu)?;
    let case = |channels, kernel, has: [bool; 3]| {
        let (shape, [has_bias, silu, is_gated]) = (ConvShape { channels, kernel }, has);
        Case { shape, has_bias, silu, is_gated }
    };
    let gated = [false, false, true];
    let cases = bench.shapes(
        &[case(6, 3, gated), case(160, 4, [true, true, false])],
        &[
            case(129, 4, [false, true, false]),
            case(33, 1, gated),
            case(5, 2, [true; 3]),
            case(257, 5, [true, false, false]),
        ],
        &[case(2048, 3, gated), case(8448, 4, [true, true, false])],
    );
    report.row("short_conv", "f32", |row| {
        cases.iter().try_for_each(|case| case.compare(bench, &conv, row))
    });
    Ok(())
}

impl Case {
    /// Compares the outputs and the past after each pass.
    fn compare(&self, bench: &Bench, kernels: &Conv, row: &mut Row) -> Result<()> {
        let Case { shape, has_bias, silu, is_gated } = *self;
        let ConvShape { channels, kernel } = shape;
        let mut random = Random(channels as u64);
        let (weight, bias) = (random.floats(channels * kernel), random.floats(channels));
        let mut past = random.floats(shape.n_past());
        let [weight_up, bias_up, past_up] = [&weight, &bias, &past].map(|v| bench.up_f32(v));
        let (weight_up, bias_up, past_up) = (weight_up?, bias_up?, past_up?);
        let device = DeviceConv {
            shape,
            weight: weight_up.all(),
            bias: has_bias.then(|| bias_up.all()),
            silu,
            units: None,
        };
        let bias = has_bias.then_some(&bias[..]);
        let form = ShortConv { shape, weight: &weight, bias, silu };
        let (stride, first) =
            if is_gated { (3 * channels, 2 * channels) } else { (channels + 7, 3) };
        for tokens in PASSES {
            let rows = random.floats(tokens * stride);
            let (rows_up, out) = (bench.up_f32(&rows)?, bench.empty(4 * tokens * channels)?);
            let [factor, gate] = [0, channels].map(|first| is_gated.then_some(first));
            let x = ConvRows { rows: rows_up.all(), stride, first, factor, gate };
            kernels.launch(&bench.stream, &device, past_up.all(), x, out.all())?;

            let columns = |first: usize| {
                let rows = rows.chunks_exact(stride);
                rows.flat_map(move |row| &row[first..first + channels]).copied()
            };
            let mut x: Vec<f32> = columns(first).collect();
            let mut expected = vec![0.0; x.len()];
            if is_gated {
                x.iter_mut().zip(columns(0)).for_each(|(x, factor)| *x *= factor);
            }
            bench.cpu.short_conv(&form, &mut past, &x, &mut expected);
            if is_gated {
                expected.iter_mut().zip(columns(channels)).for_each(|(x, gate)| *x *= gate);
            }
            let name = format!("{tokens}×{channels}×{kernel}");
            row.bits(&name, &bench.down_f32(&out)?, &expected);
            row.bits(format!("past of {name}"), &bench.down_f32(&past_up)?, &past);
        }
        Ok(())
    }
}
