//! Short convolutions, whose input and result may be multiplied by columns of the same rows. Unit
//! vectors are compared with the delta rule, which reads them.

use super::{Bench, Random};
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

pub fn check(bench: &Bench) -> Result<()> {
    let conv = Conv::load(&bench.gpu)?;
    let case = |channels, kernel, [has_bias, silu, is_gated]: [bool; 3]| {
        let shape = ConvShape { channels, kernel };
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
    bench.each("short_conv", "f32", cases, |case| case.compare(bench, &conv));
    Ok(())
}

impl Case {
    /// Compares the outputs and the past after each pass.
    fn compare(&self, bench: &Bench, kernels: &Conv) -> Result<()> {
        let Case { shape, has_bias, silu, is_gated } = *self;
        let ConvShape { channels, kernel } = shape;
        let mut random = Random(channels as u64);
        let [weight, bias, mut past] =
            bench.floats(&mut random, [channels * kernel, channels, shape.n_past()])?;
        let own = has_bias.then(|| bias.gpu());
        let device = DeviceConv { shape, weight: weight.gpu(), bias: own, silu, units: None };
        let form = ShortConv { shape, weight: &weight, bias: has_bias.then_some(&bias), silu };
        let (stride, first) =
            if is_gated { (3 * channels, 2 * channels) } else { (channels + 7, 3) };
        for tokens in PASSES {
            let [rows] = bench.floats(&mut random, [tokens * stride])?;
            let mut out = bench.out(tokens * channels)?;
            let [factor, gate] = [0, channels].map(|first| is_gated.then_some(first));
            let x = ConvRows { rows: rows.gpu(), stride, first, factor, gate };
            kernels.launch(&bench.stream, &device, past.gpu(), x, out.gpu())?;

            let columns = |first: usize| {
                let rows = rows.chunks_exact(stride);
                rows.flat_map(move |row| &row[first..first + channels]).copied()
            };
            let mut x: Vec<f32> = columns(first).collect();
            if is_gated {
                x.iter_mut().zip(columns(0)).for_each(|(x, factor)| *x *= factor);
            }
            bench.cpu.short_conv(&form, &mut past, &x, &mut out);
            if is_gated {
                out.iter_mut().zip(columns(channels)).for_each(|(x, gate)| *x *= gate);
            }
            let name = format!("{tokens}×{channels}×{kernel}");
            bench.equal(&name, &out)?;
            bench.equal(format!("past of {name}"), &past)?;
        }
        Ok(())
    }
}
