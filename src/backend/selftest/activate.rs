//! Activation functions and softmax.

use super::bench::Bench;
use super::data::Random;
use super::report::Report;
use crate::Result;
use crate::backend::cpu::expert::relu;
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::activate::Activate;
use crate::backend::ops::Activation;

/// The ends of the exponential's range, infinities and NaN.
const HARD: [f32; 12] = [
    0.0,
    -0.0,
    88.7,
    -87.3,
    -103.9,
    1e30,
    -1e30,
    7.0,
    -7.0001,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

/// Limit and slope of the clamped gate.
const LIMIT: f32 = 7.0;
const SLOPE: f32 = 1.702;

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let activate = Activate::load(&bench.gpu)?;
    let kernels = bench.cpu.kernels;
    let n = bench.shapes(&[1000], &[], &[1 << 20]).into_iter().max().unwrap_or(0);
    let mut random = Random(5);
    let (mut gate, mut up) = (random.floats(n), random.floats(n));
    for (x, y) in HARD.iter().flat_map(|x| HARD.map(|y| (*x, y))) {
        gate.push(x);
        up.push(y);
    }
    let (gate_up, up_up) = (bench.up_f32(&gate)?, bench.up_f32(&up)?);
    let out = bench.empty(gate_up.len())?;
    let gated = |activation| -> Result<Vec<f32>> {
        let gate = Some(gate_up.all()).filter(|_| activation != Activation::Relu);
        activate.gated(&bench.stream, activation, gate, up_up.all(), out.all())?;
        bench.down_f32(&out)
    };
    report.row("swiglu_rows", "f32", |row| {
        let mut expected = vec![0.0; gate.len()];
        kernels.swiglu(&gate, &up, &mut expected);
        row.bits(gate.len(), &gated(Activation::Silu)?, &expected);
        Ok(())
    });
    report.row("relu_rows", "f32", |row| {
        let expected: Vec<f32> = up.iter().map(|u| relu(*u)).collect();
        row.bits(gate.len(), &gated(Activation::Relu)?, &expected);
        Ok(())
    });
    report.row("swiglu_clamped_rows", "f32", |row| {
        let limited: Vec<f32> = gate.iter().map(|g| g.min(LIMIT)).collect();
        let mut share: Vec<f32> = limited.iter().map(|g| SLOPE * g).collect();
        kernels.sigmoid(&mut share);
        let terms = limited.iter().zip(&share).zip(&up);
        let of = |((g, s), u): ((&f32, &f32), &f32)| g * s * (u.clamp(-LIMIT, LIMIT) + 1.0);
        let expected: Vec<f32> = terms.map(of).collect();
        row.bits(gate.len(), &gated(Activation::SiluClamped)?, &expected);
        Ok(())
    });
    report.row("sigmoid_rows", "f32", |row| {
        let x: DeviceBuffer = bench.up_f32(&gate)?;
        let mut expected = gate.clone();
        activate.sigmoid(&bench.stream, x.all())?;
        kernels.sigmoid(&mut expected);
        row.bits(gate.len(), &bench.down_f32(&x)?, &expected);
        Ok(())
    });
    report.row("softmax_rows", "f32", |row| {
        let odd = [(2, 8), (1, 64), (1, 1000)];
        for (rows, n) in bench.shapes(&[(1, 1), (3, 7), (5, 33), (4, 160)], &odd, &[(64, 4096)]) {
            for first in [None, Some(f32::INFINITY), Some(f32::NAN), Some(-7.0001)] {
                let mut x = Random(n as u64).floats(rows * n);
                if let Some(first) = first.filter(|_| n > 1) {
                    (x[0], x[n - 1]) = (first, f32::NEG_INFINITY);
                }
                let x_up = bench.up_f32(&x)?;
                activate.softmax_rows(&bench.stream, x_up.all(), n)?;
                x.chunks_exact_mut(n).for_each(|row| kernels.softmax(row));
                row.bits(format!("{rows}×{n}"), &bench.down_f32(&x_up)?, &x);
            }
        }
        Ok(())
    });
    Ok(())
}
