//! Granules of experts, in every type: gate and up, down, and the ordered sum over ranks; pairs of
//! token and expert one by one, or grouped by expert.

mod grouped;
mod halves;
mod layer;

use super::{Bench, Mirror, try_map};
use crate::Result;
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

pub fn check(bench: &Bench) -> Result<()> {
    let mut kernels = Kernels {
        experts: Experts::load(&bench.gpu, &all_types())?,
        products: Products::load(&bench.gpu, &all_types())?,
        halves: Halves::load(&bench.gpu, &[F16, BF16])?,
        quantize: Quantize::load(&bench.gpu)?,
    };
    for ty in types() {
        // Width of the model, of the expert, of a granule, the last of which is shorter where it
        // can be. Then the sizes of a model.
        let (block, plain) = (ty.block_len().max(32), Spec::plain(ty));
        let small = [Spec { sizes: [block, 3 * block, 2 * block], ..plain }];
        let large = [Spec { sizes: [2048, 768, 256], ..plain }];
        bench.each("expert", ty, bench.shapes(&small, &as_gate_and_as_down(ty), &large), |spec| {
            compare(bench, &mut kernels, &Layer::new(spec), &CHOSEN)
        });
    }
    bench.row("expert", "mixed", || {
        let chosen = [2, 0, 1, NO_EXPERT, 1, 2];
        for spec in mixed() {
            compare(bench, &mut kernels, &Layer::new(spec), &chosen)?;
        }
        other_sums(bench, &kernels)
    });
    bench.row("scale_pairs", "f32", || grouped::scale(bench, &kernels));
    for ty in types().filter(|ty| act_kind(*ty) != ActKind::F32) {
        let block = ty.block_len();
        let spec = Spec { is_biased: true, has_any_bits: true, ..Spec::plain(ty) };
        let small = [Spec { types: [ty, ty, Q8_0], sizes: [block.max(32), 96, 64], ..spec }];
        let odd = [
            Spec { types: [ty, ty, Q8_0], sizes: [2 * block, 96, 64], ..spec },
            Spec { types: [Q8_0, Q8_0, ty], sizes: [32, 3 * block, 2 * block], ..spec },
        ];
        bench.each("expert_grouped", ty, bench.shapes(&small, &odd, &[]), |spec| {
            grouped::compare(bench, &kernels, &Layer::new(spec))
        });
    }
    for ty in [F16, BF16] {
        let of = |sizes| Spec { sizes, is_biased: true, ..Spec::plain(ty) };
        // Granules that end within a tile, and the last of them shorter.
        let odd = [of([80, 112, 40]), of([48, 96, 96])];
        let specs = bench.shapes(&[of([16, 48, 40])], &odd, &[of([2048, 768, 64])]);
        bench.each("expert_halves", ty, specs, |spec| {
            halves::compare(bench, &kernels, &Layer::new(spec))
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

/// Whether a granule is there in a launch.
type Wave = fn(usize) -> bool;

/// All granules at once; the first before the others; and in launches of a token's two pairs, as
/// where there are more pairs than a grid has blocks.
fn compare(bench: &Bench, kernels: &mut Kernels, layer: &Layer, chosen: &[u32]) -> Result<()> {
    const HALVES: [Wave; 2] = [|granule| granule < 1, |granule| granule >= 1];
    let (tokens, name) = (Tokens::new(bench, layer, chosen), layer.name());
    let expected = layer.on_cpu(bench, &tokens);
    let got = on_device(bench, kernels, layer, &tokens, &[|_| true])?;
    bench.equal_values(&name, &got, &expected)?;
    let got = on_device(bench, kernels, layer, &tokens, &HALVES)?;
    bench.equal_values(format!("{name} in two waves"), &got, &expected)?;
    let pairs_a_launch = std::mem::replace(&mut kernels.experts.pairs_a_launch, 3);
    let got = on_device(bench, kernels, layer, &tokens, &HALVES);
    kernels.experts.pairs_a_launch = pairs_a_launch;
    bench.equal_values(format!("{name} in several launches"), &got?, &expected)
}

/// The sum in its other forms: it begins y, whose bytes are none before; and it is added to the
/// residual stream, also after what y holds.
fn other_sums(bench: &Bench, kernels: &Kernels) -> Result<()> {
    const COLS: usize = 37;
    let plain = Spec { sizes: [32, 96, 64], ..Spec::plain(Q8_0) };
    let shape = ExpertShape { n_embd: COLS, k: 3, ..Layer::new(plain).shape };
    let (n_tokens, n, scale) = (2, 2 * COLS, 0.75);
    let [partial, weights, before, x] = bench.seeded(5, [6 * COLS, 6, n, n])?;
    let sum = |i: usize| {
        let (token, at) = (i / COLS, i % COLS);
        (3 * token..3 * token + 3)
            .fold(0f32, |sum, pair| weights[pair].mul_add(partial[COLS * pair + at], sum))
    };
    let pairs = bench.up([0u32; 6])?;
    for (begins, is_residual) in [(true, false), (true, true), (false, true)] {
        let y = if begins { bench.empty(4 * n)? } else { bench.up(before.to_vec())?.device };
        let x_after = bench.up(x.to_vec())?;
        let operands = OrderedSum {
            n_tokens,
            pairs: pairs.gpu(),
            is_grouped: false,
            weights: weights.gpu(),
            partial: partial.gpu(),
            y: y.all(),
            begins,
            residual: is_residual.then_some((x_after.gpu(), scale)),
        };
        // SAFETY: without grouping, pairs are those of tokens and ranks.
        unsafe { kernels.experts.ordered_sum(&bench.stream, &shape, operands)? };
        let y_of = |i: usize| if begins { 0.0 } else { before[i] } + sum(i);
        let added = |i: usize| f32::mul_add(scale, y_of(i), x[i]);
        let (got, expected): (_, Vec<f32>) = match is_residual {
            false => (&y, (0..n).map(y_of).collect()),
            true => (&x_after.device, (0..n).map(added).collect()),
        };
        bench.equal_to(format!("begins {begins}, residual {is_residual}"), got, &expected)?;
    }
    Ok(())
}

/// `waves` say which granules are there, launch by launch; together they are all of them.
fn on_device(
    bench: &Bench,
    kernels: &Kernels,
    layer: &Layer,
    tokens: &Tokens,
    waves: &[Wave],
) -> Result<Vec<f32>> {
    let (s, stream, n_pairs) = (&layer.shape, &bench.stream, tokens.chosen.len());
    let slots = layer.upload(bench)?;
    let vectors = Vectors::new(bench, layer)?;
    let form = vectors.form();
    let gate = if s.activation.is_gated() { s.gate } else { s.up };
    let records = [(gate, tokens.records(bench, gate)?), (s.up, tokens.records(bench, s.up)?)];
    let x = |ty| {
        let (_, records) = records.iter().find(|(of, _)| *of == ty).expect("gate's or up's");
        DeviceActs::new(act_kind(ty), tokens.n, s.n_embd, records.gpu())
    };
    let (ids, weights) = (bench.up(tokens.chosen.to_vec())?, bench.up(tokens.weights.to_vec())?);
    let [inner, partial] = try_map([s.n_ff, s.n_embd], |n| bench.empty(4 * n_pairs * n))?;
    let kind = act_kind(s.down);
    let inner_records = bench.empty(n_pairs * record_bytes(kind, s.n_ff))?;
    let acts = DeviceActs::new(kind, n_pairs, s.n_ff, inner_records.all());
    let (experts, y) = (&kernels.experts, bench.up(vec![0.0; tokens.n * s.n_embd])?);
    for is_here in waves {
        let address = |expert: u32, granule: usize| match slots.get(expert as usize) {
            Some(slots) if is_here(granule) => slots[granule].all().address(),
            _ => 0,
        };
        let of = |expert: &u32| -> Vec<u64> {
            (0..s.n_granules()).map(|g| address(*expert, g)).collect()
        };
        let table = bench.up(tokens.chosen.iter().flat_map(of))?;
        let chosen = Chosen { n_pairs, granules: table.gpu(), apart: None, experts: ids.gpu() };
        // SAFETY: the table has 0 or addresses of slots of this shape, which live until the
        // launches are over; ids that have slots are experts.
        unsafe {
            experts.gate_up(stream, s, chosen, form, x, inner.all())?;
            kernels.quantize.store(stream, inner.all(), s.n_ff, acts)?;
            experts.down(stream, s, chosen, form.biases, acts, partial.all())?;
        }
        stream.synchronize()?;
    }
    let sum = OrderedSum {
        n_tokens: tokens.n,
        pairs: ids.gpu(),
        is_grouped: false,
        weights: weights.gpu(),
        partial: partial.all(),
        y: y.gpu(),
        begins: false,
        residual: None,
    };
    // SAFETY: pairs are those of the tokens and ranks.
    unsafe { experts.ordered_sum(stream, s, sum)? };
    bench.down(&y.device)
}

/// A layer's biases of gate, up and down and its factors of gate and up, in this order. Experts
/// without gate have no vectors of it.
struct Vectors {
    biases: Option<[Option<Mirror<f32>>; 3]>,
    scales: Option<[Option<Mirror<f32>>; 2]>,
}

impl Vectors {
    fn new(bench: &Bench, layer: &Layer) -> Result<Vectors> {
        let up = |x: &Vec<f32>| (!x.is_empty()).then(|| bench.up(x.to_vec())).transpose();
        let (biases, scales) = (layer.biases.as_ref(), layer.scales.as_ref());
        let biases = biases.map(|of| try_map([&of.gate, &of.up, &of.down], up)).transpose()?;
        let scales = scales.map(|of| try_map([&of.gate, &of.up], up)).transpose()?;
        Ok(Vectors { biases, scales })
    }

    fn form(&self) -> DeviceForm<'_> {
        let scales = self.scales.as_ref().map(|[gate, up]| DeviceScales {
            gate: gate.as_ref().map(Mirror::gpu),
            up: up.as_ref().expect("factors of up").gpu(),
        });
        let biases = self.biases.as_ref().map(|[gate, up, down]| DeviceBiases {
            gate: gate.as_ref().map(Mirror::gpu),
            up: up.as_ref().expect("biases of up").gpu(),
            down: down.as_ref().expect("biases of down").gpu(),
        });
        DeviceForm { biases, scales }
    }
}
