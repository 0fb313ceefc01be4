//! Granules of experts, in every type: gate and up, down, and the ordered sum over ranks; pairs of
//! token and expert one by one, or grouped by expert.

mod grouped;
mod halves;
mod layer;

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::acts::{DeviceActs, Quantize, record_bytes};
use crate::backend::gpu::expert::{
    Chosen, DeviceBiases, DeviceForm, DeviceScales, ExpertShape, Experts, OrderedSum,
};
use crate::backend::gpu::halves::Halves;
use crate::backend::gpu::mat::{all_types, types};
use crate::backend::gpu::matmul::Products;
use crate::backend::ops::{Activation, NO_EXPERT};
use crate::gguf::TensorType::{self, BF16, F16, F32, MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::simd::{ActKind, act_kind};
use layer::{Layer, Spec, Tokens};

/// Experts of each token, two ranks: [tokens, 2].
const CHOSEN: [u32; 4] = [2, 0, 1, 2];

struct Kernels {
    experts: Experts,
    products: Products,
    halves: Halves,
    quantize: Quantize,
}

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let mut kernels = Kernels {
        experts: Experts::load(&bench.gpu, &all_types())?,
        products: Products::load(&bench.gpu, &all_types())?,
        halves: Halves::load(&bench.gpu, &[F16, BF16])?,
        quantize: Quantize::load(&bench.gpu)?,
    };
    for ty in types() {
        report.row("expert", ty, |row| {
            // Width of the model, of the expert, of a granule, the last of which is shorter where
            // it can be. Then the sizes of a model.
            let (block, plain) = (ty.block_len().max(32), Spec::plain(ty));
            let small = [Spec { sizes: [block, 3 * block, 2 * block], ..plain }];
            let large = [Spec { sizes: [2048, 768, 256], ..plain }];
            for spec in bench.shapes(&small, &as_gate_and_as_down(ty), &large) {
                compare(bench, &mut kernels, row, &Layer::new(spec), &CHOSEN)?;
            }
            Ok(())
        });
    }
    report.row("expert", "mixed", |row| {
        let chosen = [2, 0, 1, NO_EXPERT, 1, 2];
        for spec in mixed() {
            compare(bench, &mut kernels, row, &Layer::new(spec), &chosen)?;
        }
        other_sums(bench, &kernels, row)
    });
    report.row("scale_pairs", "f32", |row| grouped::scale(bench, &kernels, row));
    for ty in types().filter(|ty| act_kind(*ty) != ActKind::F32) {
        report.row("expert_grouped", ty, |row| {
            let block = ty.block_len();
            let spec = Spec { is_biased: true, has_any_bits: true, ..Spec::plain(ty) };
            let small = [Spec { types: [ty, ty, Q8_0], sizes: [block.max(32), 96, 64], ..spec }];
            let odd = [
                Spec { types: [ty, ty, Q8_0], sizes: [2 * block, 96, 64], ..spec },
                Spec { types: [Q8_0, Q8_0, ty], sizes: [32, 3 * block, 2 * block], ..spec },
            ];
            for spec in bench.shapes(&small, &odd, &[]) {
                grouped::compare(bench, &kernels, row, &Layer::new(spec))?;
            }
            Ok(())
        });
    }
    for ty in [F16, BF16] {
        report.row("expert_halves", ty, |row| {
            let of = |sizes| Spec { sizes, is_biased: true, ..Spec::plain(ty) };
            // Granules that end within a tile, and the last of them shorter.
            let small = [of([16, 48, 40])];
            let odd = [of([80, 112, 40]), of([48, 96, 96])];
            let large = [of([2048, 768, 64])];
            for spec in bench.shapes(&small, &odd, &large) {
                halves::compare(bench, &kernels, row, &Layer::new(spec))?;
            }
            Ok(())
        });
    }
    Ok(())
}

/// The type in gate and up, then in down, with a last granule that is shorter.
fn as_gate_and_as_down(ty: TensorType) -> [Spec; 3] {
    let (block, plain) = (ty.block_len().max(8), Spec { has_any_bits: true, ..Spec::plain(ty) });
    [
        Spec { types: [ty, ty, Q8_0], sizes: [block, 96, 64], ..plain },
        Spec { types: [ty, ty, Q8_0], sizes: [2 * block, 96, 64], ..plain },
        Spec { types: [Q8_0, Q8_0, ty], sizes: [32, 3 * block, 2 * block], ..plain },
    ]
}

/// Types, activations and biases as models mix them, and as none does.
fn mixed() -> Vec<Spec> {
    let spec = |types, activation, is_biased| Spec {
        types,
        sizes: [64, 160, 64],
        activation,
        is_biased,
        is_scaled: false,
        has_any_bits: true,
    };
    let scaled = |spec| Spec { is_scaled: true, ..spec };
    vec![
        scaled(spec([Q4_0, Q4_0, Q8_0], Activation::Silu, false)),
        scaled(spec([Q5_0, Q8_0, F32], Activation::Gelu, true)),
        scaled(spec([Q8_0, Q8_0, Q4_0], Activation::ReluSquared, true)),
        spec([MXFP4, MXFP4, MXFP4], Activation::SiluClamped, true),
        spec([Q4_0, Q4_0, Q5_1], Activation::Silu, true),
        spec([Q5_0, Q8_0, Q4_1], Activation::Silu, true),
        spec([F16, Q8_0, F32], Activation::SiluClamped, false),
        spec([Q8_0, Q8_0, BF16], Activation::Relu, false),
        spec([Q8_0, Q8_0, Q4_0], Activation::Relu, true),
        spec([Q8_0, Q8_0, Q4_0], Activation::ReluSquared, true),
        spec([Q4_0, Q4_0, Q8_0], Activation::ReluGated, false),
        spec([Q8_0, Q4_0, Q8_0], Activation::Gelu, false),
        spec([Q4_0, Q4_0, Q8_0], Activation::SiluLimited, true),
        spec([Q4_0, Q4_0, Q8_0], Activation::SiluCapped, false),
        spec([Q4_0, Q4_0, Q8_0], Activation::Situ, true),
    ]
}

/// All granules at once; the first before the others; and in launches of a token's two pairs, as
/// where there are more pairs than a grid has blocks.
fn compare(
    bench: &Bench,
    kernels: &mut Kernels,
    row: &mut Row,
    layer: &Layer,
    chosen: &[u32],
) -> Result<()> {
    let tokens = Tokens::new(bench, layer, chosen);
    let expected = layer.on_cpu(bench, &tokens);
    let halves: [fn(usize) -> bool; 2] = [|granule| granule < 1, |granule| granule >= 1];
    let (all, name): ([fn(usize) -> bool; 1], _) = ([|_| true], layer.name());
    let got = on_device(bench, kernels, layer, &tokens, &all)?;
    row.bits(&name, &got, &expected);
    let got = on_device(bench, kernels, layer, &tokens, &halves)?;
    row.bits(format!("{name} in two waves"), &got, &expected);
    let pairs_a_launch = std::mem::replace(&mut kernels.experts.pairs_a_launch, 3);
    let got = on_device(bench, kernels, layer, &tokens, &halves);
    kernels.experts.pairs_a_launch = pairs_a_launch;
    row.bits(format!("{name} in several launches"), &got?, &expected);
    Ok(())
}

/// The sum in its other forms: it begins y, whose bytes are none before; and it is added to the
/// residual stream, also after what y holds.
fn other_sums(bench: &Bench, kernels: &Kernels, row: &mut Row) -> Result<()> {
    let plain = Spec { sizes: [32, 96, 64], ..Spec::plain(Q8_0) };
    let shape = ExpertShape { n_embd: 37, k: 3, ..Layer::new(plain).shape };
    let (n_tokens, n, mut random) = (2, 2 * 37, Random(5));
    let (stream, scale) = (&bench.stream, 0.75);
    let [partial, weights] = [6 * 37, 6].map(|n| random.floats(n));
    let [before, x] = [n, n].map(|n| random.floats(n));
    let sum = |i: usize| {
        let (token, at) = (i / 37, i % 37);
        (3 * token..3 * token + 3)
            .fold(0f32, |sum, pair| weights[pair].mul_add(partial[37 * pair + at], sum))
    };
    let pairs = bench.up_u32(&[0; 6])?;
    let (partial_up, weights_up) = (bench.up_f32(&partial)?, bench.up_f32(&weights)?);
    for (begins, is_residual) in [(true, false), (true, true), (false, true)] {
        let y = if begins { bench.empty(4 * n)? } else { bench.up_f32(&before)? };
        let x_up = bench.up_f32(&x)?;
        let operands = OrderedSum {
            n_tokens,
            pairs: pairs.all(),
            is_grouped: false,
            weights: weights_up.all(),
            partial: partial_up.all(),
            y: y.all(),
            begins,
            residual: is_residual.then_some((x_up.all(), scale)),
        };
        // SAFETY: without grouping, pairs are those of tokens and ranks.
        unsafe { kernels.experts.ordered_sum(stream, &shape, operands)? };
        let y_of = |i: usize| if begins { 0.0 } else { before[i] } + sum(i);
        let (got, expected): (_, Vec<f32>) = match is_residual {
            false => (bench.down_f32(&y)?, (0..n).map(y_of).collect()),
            true => {
                let of = |i: usize| f32::mul_add(scale, y_of(i), x[i]);
                (bench.down_f32(&x_up)?, (0..n).map(of).collect())
            }
        };
        row.bits(format!("begins {begins}, residual {is_residual}"), &got, &expected);
    }
    Ok(())
}

/// `waves` say which granules are there, launch by launch; together they are all of them.
fn on_device(
    bench: &Bench,
    kernels: &Kernels,
    layer: &Layer,
    tokens: &Tokens,
    waves: &[fn(usize) -> bool],
) -> Result<Vec<f32>> {
    let (s, stream, n_pairs) = (&layer.shape, &bench.stream, tokens.chosen.len());
    let (slots, biases) = (layer.upload(bench)?, layer.upload_biases(bench)?);
    let scales = layer.upload_scales(bench)?;
    let scales = scales.as_ref().map(|[gate, up]| DeviceScales {
        gate: gate.as_ref().map(DeviceBuffer::all),
        up: up.as_ref().expect("factors of up").all(),
    });
    let biases = biases.as_ref().map(|[gate, up, down]| DeviceBiases {
        gate: gate.as_ref().map(DeviceBuffer::all),
        up: up.as_ref().expect("biases of up").all(),
        down: down.as_ref().expect("biases of down").all(),
    });
    let gate = if s.activation.is_gated() { s.gate } else { s.up };
    let records = [(gate, tokens.records(bench, gate)?), (s.up, tokens.records(bench, s.up)?)];
    let x = |ty| {
        let (_, records) = records.iter().find(|(of, _)| *of == ty).expect("gate's or up's");
        DeviceActs::new(act_kind(ty), tokens.n, s.n_embd, records.all())
    };
    let (ids, weights) = (bench.up_u32(&tokens.chosen)?, bench.up_f32(&tokens.weights)?);
    let (inner, partial) =
        (bench.empty(4 * n_pairs * s.n_ff)?, bench.empty(4 * n_pairs * s.n_embd)?);
    let kind = act_kind(s.down);
    let inner_records = bench.empty(n_pairs * record_bytes(kind, s.n_ff))?;
    let acts = DeviceActs::new(kind, n_pairs, s.n_ff, inner_records.all());
    let (experts, y) = (&kernels.experts, bench.up_f32(&vec![0.0; tokens.n * s.n_embd])?);
    for is_here in waves {
        let address = |expert: u32, granule: usize| match slots.get(expert as usize) {
            Some(slots) if is_here(granule) => slots[granule].all().address(),
            _ => 0,
        };
        let granules = 0..s.n_granules();
        let of = |expert: &u32| granules.clone().map(|g| address(*expert, g)).collect::<Vec<_>>();
        let table = bench.up_u64(&tokens.chosen.iter().flat_map(of).collect::<Vec<u64>>())?;
        let chosen = Chosen { n_pairs, granules: table.all(), apart: None, experts: ids.all() };
        // SAFETY: the table has 0 or addresses of slots of this shape, which live until the
        // launches are over; ids that have slots are experts.
        unsafe {
            experts.gate_up(stream, s, chosen, DeviceForm { biases, scales }, x, inner.all())?;
            kernels.quantize.store(stream, inner.all(), s.n_ff, acts)?;
            experts.down(stream, s, chosen, biases, acts, partial.all())?;
        }
        stream.synchronize()?;
    }
    let sum = OrderedSum {
        n_tokens: tokens.n,
        pairs: ids.all(),
        is_grouped: false,
        weights: weights.all(),
        partial: partial.all(),
        y: y.all(),
        begins: false,
        residual: None,
    };
    // SAFETY: pairs are those of the tokens and ranks.
    unsafe { experts.ordered_sum(stream, s, sum)? };
    bench.down_f32(&y)
}
