//! Activation functions and softmax.

use super::bench::Bench;
use super::data::Random;
use super::report::Report;
use crate::Result;
use crate::backend::cpu::expert::{
    geglu, reglu, relu, relu_squared, situ, swiglu_capped, swiglu_limited,
};
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::activate::Activate;
use crate::backend::ops::{Activation, ExpertForm};
use crate::simd::Kernels;

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

/// Limits, and the slope of the clamped gate.
const LIMIT: f32 = 7.0;
const UP_LIMIT: f32 = 5.0;
const SLOPE: f32 = 1.702;

/// Gates and ups, on the host and on the device.
struct Pairs {
    gate: Vec<f32>,
    up: Vec<f32>,
    gate_up: DeviceBuffer,
    up_up: DeviceBuffer,
    out: DeviceBuffer,
}

impl Pairs {
    fn new(bench: &Bench) -> Result<Pairs> {
        let n = bench.shapes(&[1000], &[], &[1 << 20]).into_iter().max().unwrap_or(0);
        let mut random = Random(5);
        let (mut gate, mut up) = (random.floats(n), random.floats(n));
        for (x, y) in HARD.iter().flat_map(|x| HARD.map(|y| (*x, y))) {
            gate.push(x);
            up.push(y);
        }
        let (gate_up, up_up) = (bench.up_f32(&gate)?, bench.up_f32(&up)?);
        let out = bench.empty(gate_up.len())?;
        Ok(Pairs { gate, up, gate_up, up_up, out })
    }

    fn activated(
        &self,
        bench: &Bench,
        activate: &Activate,
        activation: Activation,
    ) -> Result<Vec<f32>> {
        let gate = Some(self.gate_up.all()).filter(|_| activation.is_gated());
        let (up, out) = (self.up_up.all(), self.out.all());
        let form = ExpertForm {
            activation,
            limit: LIMIT,
            up_limit: UP_LIMIT,
            biases: None,
            scales: None,
            adapted: None,
        };
        activate.gated(&bench.stream, form, gate, up, out)?;
        bench.down_f32(&self.out)
    }
}

/// The activation on the CPU, which may change gate and up.
type Twin = fn(&Kernels, &mut [f32], &mut [f32], &mut [f32]);

const GATED: [(&str, Activation, Twin); 9] = [
    ("swiglu_rows", Activation::Silu, |kernels, gate, up, out| kernels.swiglu(gate, up, out)),
    ("relu_rows", Activation::Relu, |_, _, up, out| {
        out.iter_mut().zip(up).for_each(|(o, u)| *o = relu(*u));
    }),
    ("relu_squared_rows", Activation::ReluSquared, |_, _, up, out| relu_squared(up, out)),
    ("swiglu_clamped_rows", Activation::SiluClamped, |kernels, gate, up, out| {
        let limited: Vec<f32> = gate.iter().map(|g| g.min(LIMIT)).collect();
        let mut share: Vec<f32> = limited.iter().map(|g| SLOPE * g).collect();
        kernels.sigmoid(&mut share);
        let terms = limited.iter().zip(&share).zip(up);
        let of = |((g, s), u): ((&f32, &f32), &mut f32)| g * s * (u.clamp(-LIMIT, LIMIT) + 1.0);
        out.iter_mut().zip(terms.map(of)).for_each(|(o, x)| *o = x);
    }),
    ("reglu_rows", Activation::ReluGated, |_, gate, up, out| reglu(gate, up, out)),
    ("geglu_rows", Activation::Gelu, |kernels, gate, up, out| geglu(kernels, gate, up, out)),
    ("swiglu_limited_rows", Activation::SiluLimited, |kernels, gate, up, out| {
        swiglu_limited(kernels, LIMIT, gate, up, out);
    }),
    ("swiglu_capped_rows", Activation::SiluCapped, |kernels, gate, up, out| {
        swiglu_capped(kernels, LIMIT, gate, up, out);
    }),
    ("situ_rows", Activation::Situ, |kernels, gate, up, out| {
        situ(kernels, [LIMIT, UP_LIMIT], gate, up, out);
    }),
];

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let activate = Activate::load(&bench.gpu)?;
    let kernels = bench.cpu.kernels;
    let pairs = Pairs::new(bench)?;
    for (name, activation, twin) in GATED {
        report.row(name, "f32", |row| {
            let (mut gate, mut up) = (pairs.gate.clone(), pairs.up.clone());
            let mut expected = vec![0.0; gate.len()];
            twin(kernels, &mut gate, &mut up, &mut expected);
            row.bits(gate.len(), &pairs.activated(bench, &activate, activation)?, &expected);
            Ok(())
        });
    }
    let gate = &pairs.gate;
    report.row("sigmoid_rows", "f32", |row| {
        let x: DeviceBuffer = bench.up_f32(gate)?;
        let mut expected = gate.clone();
        activate.sigmoid(&bench.stream, x.all())?;
        kernels.sigmoid(&mut expected);
        row.bits(gate.len(), &bench.down_f32(&x)?, &expected);
        Ok(())
    });
    report.row("softplus_rows", "f32", |row| {
        let x: DeviceBuffer = bench.up_f32(gate)?;
        let mut expected = gate.clone();
        activate.softplus(&bench.stream, x.all())?;
        bench.cpu.softplus(&mut expected);
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
