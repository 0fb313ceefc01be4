//! The gated delta rule of linear-attention layers over vectors as a convolution makes them, with a
//! decay for each head or for each element of a key (Kimi's), and the norm behind it.

use super::{Bench, Mirror, Random};
use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::conv::{Conv, ConvRows, DeviceConv, Units};
use crate::backend::gpu::delta::{Delta, DeviceGates, GateProducts, KdaGates, NormGate};
use crate::backend::ops::{DeltaShape, HeadOrder, ShortConv};

const EPS: f32 = 1e-6;
/// A prompt, single tokens, and passes of fewer tokens than the convolution's past.
const PASSES: [usize; 6] = [9, 1, 1, 2, 3, 1];
const KDA_PASSES: [usize; 4] = [9, 1, 1, 3];
/// Prompts of more tokens than a warp makes shares of at once.
const LONG_PASSES: [usize; 3] = [1, 70, 33];

struct Kernels {
    conv: Conv,
    delta: Delta,
}

impl Kernels {
    fn load(bench: &Bench) -> Result<Kernels> {
        Ok(Kernels { conv: Conv::load(&bench.gpu)?, delta: Delta::load(&bench.gpu)? })
    }
}

/// How many decays a token has, and where.
#[derive(Clone, Copy, PartialEq)]
enum Gates {
    /// A decay of each head; betas and decays of a key head alternate.
    Mixed,
    /// A decay of each head.
    Apart,
    /// A decay of each element of a key, with a bound or without.
    Elements(Option<f32>),
}

/// Passes that follow one another on one state.
struct Case<'a> {
    shape: DeltaShape,
    gates: Gates,
    /// Tokens of each pass.
    passes: &'a [usize],
}

fn shape([n_k_heads, n_v_heads, k_dim, v_dim]: [usize; 4], order: HeadOrder) -> DeltaShape {
    DeltaShape { n_k_heads, n_v_heads, k_dim, v_dim, kernel: 4, order }
}

pub fn check(bench: &Bench) -> Result<()> {
    let kernels = Kernels::load(bench)?;
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
    bench.row("delta_rule", "f32", || {
        for gates in [Gates::Mixed, Gates::Apart] {
            for shape in shapes.iter().copied() {
                Case { shape, gates, passes: &PASSES }.compare(bench, &kernels)?;
            }
        }
        let mut long = bench.shapes(&[], &[small], &[]).into_iter();
        long.try_for_each(|shape| {
            Case { shape, gates: Gates::Apart, passes: &LONG_PASSES }.compare(bench, &kernels)
        })
    });
    let shapes = bench.shapes(&[[7, 5], [1, 130]], &[[1, 128], [12, 64]], &[[512, 128]]);
    bench.each("delta_norm", "f32", shapes, |shape| norm(bench, &kernels.delta, shape));
    Ok(())
}

pub fn check_kda(bench: &Bench) -> Result<()> {
    let kernels = Kernels::load(bench)?;
    let shape = |n, k_dim, v_dim| shape([n, n, k_dim, v_dim], HeadOrder::Grouped);
    let small = shape(3, 5, 5);
    let shapes = bench.shapes(
        &[small, shape(2, 65, 33)],
        &[shape(2, 32, 64), shape(1, 128, 128)],
        &[shape(32, 128, 128)],
    );
    bench.each("kda_rule", "f32", [None, Some(-5.0)], |bound| {
        let case = |shape, passes| Case { shape, gates: Gates::Elements(bound), passes };
        for shape in shapes.iter().copied() {
            case(shape, &KDA_PASSES[..]).compare(bench, &kernels)?;
        }
        let mut long = bench.shapes(&[], &[small], &[]).into_iter();
        long.try_for_each(|shape| case(shape, &LONG_PASSES).compare(bench, &kernels))
    });
    Ok(())
}

fn norm(bench: &Bench, delta: &Delta, [rows, dim]: [usize; 2]) -> Result<()> {
    let [given, weight, gate] = bench.seeded(dim, [rows * dim, dim, rows * dim])?;
    for function in [NormGate::Silu, NormGate::Sigmoid] {
        let mut x = bench.up(given.to_vec())?;
        let (on, weight_up) = (&bench.stream, weight.gpu());
        delta.rms_norm_gated(on, x.gpu(), weight_up, EPS, function, gate.gpu())?;
        match function {
            NormGate::Silu => bench.cpu.rms_norm_gated(&mut x, &weight, EPS, &gate),
            NormGate::Sigmoid => {
                bench.cpu.rms_norm_heads(&mut x, &weight, EPS);
                bench.cpu.sigmoid_gated(&mut x, &mut gate.to_vec());
            }
        }
        bench.equal(format!("{rows}×{dim}, {function:?}"), &x)?;
    }
    Ok(())
}

impl Case<'_> {
    /// Compares the outputs and the state after each pass.
    fn compare(&self, bench: &Bench, kernels: &Kernels) -> Result<()> {
        let Case { shape, gates, passes } = *self;
        let (mut random, n, stream) = (Random(shape.k_dim as u64), shape.n_v_heads, &bench.stream);
        let of_elements = matches!(gates, Gates::Elements(_));
        let n_decays = if of_elements { shape.key_width() } else { n };
        let [taps, dt] = bench.floats(&mut random, [shape.channels() * shape.kernel, n_decays])?;
        let mut a = random.floats(n);
        // Not positive without a bound, as in models: a state that grew would hide differences.
        if !matches!(gates, Gates::Elements(Some(_))) {
            a.iter_mut().for_each(|a| *a = -a.abs());
        }
        let a = bench.up(a)?;
        let [mut past, mut state] = bench.floats(&mut random, [shape.n_past(), shape.n_state()])?;
        let conv = DeviceConv {
            shape: shape.conv(),
            weight: taps.gpu(),
            bias: None,
            silu: true,
            units: Some(Units::of(shape)),
        };
        let form = ShortConv { shape: shape.conv(), weight: &taps, bias: None, silu: true };
        for tokens in passes.iter().copied() {
            let lengths = [shape.channels(), n, n_decays].map(|n| tokens * n);
            let [x, mut beta, mut decay] = bench.floats(&mut random, lengths)?;
            let (qkv, mut out) =
                (bench.empty(4 * x.len())?, bench.out(tokens * shape.value_width())?);
            let rows = ConvRows::plain(x.gpu(), shape.channels());
            kernels.conv.launch(stream, &conv, past.gpu(), rows, qkv.all())?;
            self.launch(
                bench,
                &kernels.delta,
                [&beta, &decay, &dt, &a],
                [qkv.all(), state.gpu(), out.gpu()],
            )?;

            let mut convolved = vec![0.0; x.len()];
            bench.cpu.short_conv(&form, &mut past, &x, &mut convolved);
            bench.cpu.kernels.sigmoid(&mut beta);
            match gates {
                Gates::Elements(bound) => bench.cpu.element_decays(&mut decay, &dt, &a, bound),
                _ => bench.cpu.log_decays(&mut decay, &dt, &a),
            }
            bench.cpu.delta_rule(shape, &convolved, (&decay, &beta), &mut state, &mut out);

            assert!(out.iter().all(|x| x.is_finite()), "data whose errors would show nowhere");
            let name = format!("{tokens}×{n}×{}×{}", shape.k_dim, shape.v_dim);
            bench.equal(&name, &out)?;
            if !of_elements {
                bench.equal(format!("past of {name}"), &past)?;
            }
            bench.equal(format!("state of {name}"), &state)?;
        }
        Ok(())
    }

    /// Betas, decays and their parameters; then vectors, state and result.
    fn launch(
        &self,
        bench: &Bench,
        delta: &Delta,
        [beta, decay, dt, a]: [&Mirror<f32>; 4],
        [qkv, state, out]: [DeviceSlice; 3],
    ) -> Result<()> {
        let (shape, stream, dt, a) = (self.shape, &bench.stream, dt.gpu(), a.gpu());
        if let Gates::Elements(bound) = self.gates {
            let gates = KdaGates { beta: beta.gpu(), decay: decay.gpu(), dt, a, bound };
            return delta.kda(stream, shape, qkv, gates, state, out);
        }
        let mixed = bench.up(mix(shape.n_v_heads / shape.n_k_heads, beta, decay))?;
        let products = match self.gates {
            Gates::Mixed => GateProducts::Mixed(mixed.gpu()),
            _ => GateProducts::Apart { beta: beta.gpu(), alpha: decay.gpu() },
        };
        delta.rule(stream, shape, qkv, DeviceGates { products, dt, a }, state, out)
    }
}

/// By key head, `group` value heads' betas, then their alphas.
fn mix(group: usize, beta: &[f32], alpha: &[f32]) -> Vec<f32> {
    let pairs = beta.chunks_exact(group).zip(alpha.chunks_exact(group));
    pairs.flat_map(|(beta, alpha)| beta.iter().chain(alpha)).copied().collect()
}
