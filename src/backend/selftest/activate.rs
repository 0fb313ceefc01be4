//! Activation functions and softmax.

use super::{Bench, Mirror, Random};
use crate::Result;
use crate::backend::cpu::expert::{
    geglu, reglu, relu, relu_squared, situ, swiglu_capped, swiglu_limited,
};
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

pub fn check(bench: &Bench) -> Result<()> {
    let activate = Activate::load(&bench.gpu)?;
    let (kernels, stream) = (bench.cpu.kernels, &bench.stream);
    let [gate, up] = gates_and_ups(bench)?;
    for (name, activation, twin) in GATED {
        bench.row(name, "f32", || {
            let (biases, scales, adapted) = (None, None, None);
            let (limit, up_limit) = (LIMIT, UP_LIMIT);
            let form = ExpertForm { activation, limit, up_limit, biases, scales, adapted };
            let mut out = bench.out(gate.len())?;
            let gates = activation.is_gated().then(|| gate.gpu());
            activate.gated(stream, form, gates, up.gpu(), out.gpu())?;
            twin(kernels, &mut gate.to_vec(), &mut up.to_vec(), &mut out);
            bench.equal(gate.len(), &out)
        });
    }
    bench.row("sigmoid_rows", "f32", || {
        let mut x = bench.up(gate.to_vec())?;
        activate.sigmoid(stream, x.gpu())?;
        kernels.sigmoid(&mut x);
        bench.equal(gate.len(), &x)
    });
    bench.row("softplus_rows", "f32", || {
        let mut x = bench.up(gate.to_vec())?;
        activate.softplus(stream, x.gpu())?;
        bench.cpu.softplus(&mut x);
        bench.equal(gate.len(), &x)
    });
    let odd = [(2, 8), (1, 64), (1, 1000)];
    let shapes = bench.shapes(&[(1, 1), (3, 7), (5, 33), (4, 160)], &odd, &[(64, 4096)]);
    bench.each("softmax_rows", "f32", shapes, |(rows, n)| {
        for first in [None, Some(f32::INFINITY), Some(f32::NAN), Some(-7.0001)] {
            let mut x = Random(n as u64).floats(rows * n);
            if let Some(first) = first.filter(|_| n > 1) {
                (x[0], x[n - 1]) = (first, f32::NEG_INFINITY);
            }
            let mut x = bench.up(x)?;
            activate.softmax_rows(stream, x.gpu(), n)?;
            x.chunks_exact_mut(n).for_each(|row| kernels.softmax(row));
            bench.equal(format!("{rows}×{n}"), &x)?;
        }
        Ok(())
    });
    Ok(())
}

/// Seeded gates and ups, and all pairs of hard ones.
fn gates_and_ups(bench: &Bench) -> Result<[Mirror<f32>; 2]> {
    let n = bench.shapes(&[1000], &[], &[1 << 20]).into_iter().max().unwrap_or(0);
    let [mut gate, mut up] = Random(5).vectors([n, n]);
    for (x, y) in HARD.iter().flat_map(|x| HARD.map(|y| (*x, y))) {
        gate.push(x);
        up.push(y);
    }
    Ok([bench.up(gate)?, bench.up(up)?])
}
