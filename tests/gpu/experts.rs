//! Expert granules on the GPU against the CPU's, to the bit: every format, activations, biases,
//! granules that come in two launches or not at all, few tokens and many.

use crate::support::Bench;
use common::quant::{Random, bits, types, weights};
use moeba::backend::cpu::Cpu;
use moeba::backend::cpu::acts::{ActSet, Kinds};
use moeba::backend::cpu::expert::{ExpertBuffers, GranuleMats};
use moeba::backend::gpu::DeviceBuffer;
use moeba::backend::gpu::acts::{DeviceActs, Quantize, record_bytes, records_of};
use moeba::backend::gpu::expert::{Chosen, DeviceBiases, ExpertShape, Experts, OrderedSum};
use moeba::backend::gpu::matmul::{Groups, Products};
use moeba::backend::ops::{Activation, Demand, ExpertBiases, ExpertForm, NO_EXPERT};
use moeba::gguf::TensorType;
use moeba::simd::{ActKind, MatRef, act_kind};

const N_EXPERTS: usize = 3;

/// A layer's experts on the host.
struct Layer {
    shape: ExpertShape,
    /// Gate, up and down of each expert.
    matrices: Vec<[Vec<u8>; 3]>,
    biases: Option<ExpertBiases>,
}

fn bytes_of(ty: TensorType, rows: usize, cols: usize) -> usize {
    ty.row_bytes((rows * cols) as u64).unwrap() as usize
}

impl Layer {
    fn new(
        [gate, up, down]: [TensorType; 3],
        [n_embd, n_ff, granule_rows]: [usize; 3],
        activation: Activation,
        biased: bool,
    ) -> Layer {
        let line = |bytes: usize| bytes.next_multiple_of(256);
        let up_at = line(bytes_of(gate, granule_rows, n_embd));
        let down_at = up_at + line(bytes_of(up, granule_rows, n_embd));
        let shape = ExpertShape {
            gate,
            up,
            down,
            n_embd,
            n_ff,
            granule_rows,
            gate_at: 0,
            up_at,
            down_at,
            k: 2,
            activation,
        };
        let mut random = Random(17);
        let mut matrix = |ty, rows, cols| weights(ty, rows, cols, 0, &mut random);
        let matrices = (0..N_EXPERTS).map(|_| {
            [matrix(gate, n_ff, n_embd), matrix(up, n_ff, n_embd), matrix(down, n_embd, n_ff)]
        });
        let matrices = matrices.collect();
        let biases = biased.then(|| ExpertBiases {
            gate: if activation.is_gated() { random.floats(N_EXPERTS * n_ff) } else { vec![] },
            up: random.floats(N_EXPERTS * n_ff),
            down: random.floats(N_EXPERTS * n_embd),
        });
        Layer { shape, matrices, biases }
    }

    fn rows(&self, granule: usize) -> std::ops::Range<usize> {
        let first = granule * self.shape.granule_rows;
        first..self.shape.n_ff.min(first + self.shape.granule_rows)
    }

    /// The granule's rows of gate and up and columns of down.
    fn mats(&self, expert: usize, granule: usize) -> [MatRef<'_>; 3] {
        let ExpertShape { gate, up, down, n_embd, n_ff, .. } = self.shape;
        let [g, u, d] = &self.matrices[expert];
        let rows = self.rows(granule);
        [
            MatRef::dense(gate, g, n_ff, n_embd).row_range(rows.clone()),
            MatRef::dense(up, u, n_ff, n_embd).row_range(rows.clone()),
            MatRef::dense(down, d, n_embd, n_ff).column_range(rows),
        ]
    }

    fn kinds(&self) -> [Kinds; 2] {
        let s = &self.shape;
        let gate = if s.activation.is_gated() { s.gate } else { s.up };
        [Kinds::of([gate, s.up]), Kinds::of([s.down])]
    }

    /// What the CPU adds to zeros: [tokens, n_embd].
    fn on_cpu(&self, cpu: &Cpu, x: &ActSet, chosen: &[u32], weights: &[f32]) -> Vec<f32> {
        let s = &self.shape;
        let mut demand = Demand::default();
        demand.group(chosen, s.k, N_EXPERTS);
        let mut granules = Vec::new();
        for (slot, expert) in demand.experts.iter().enumerate() {
            for g in 0..s.n_granules() {
                let [gate, up, down] = self.mats(*expert as usize, g);
                let gate = s.activation.is_gated().then_some(gate);
                granules.push(GranuleMats { slot, rows: self.rows(g), gate, up, down });
            }
        }
        let mut buffers = ExpertBuffers::default();
        buffers.begin(demand.n_pairs(), s.n_ff, s.n_embd, self.kinds()[1]);
        let form = ExpertForm { activation: s.activation, biases: self.biases.as_ref() };
        cpu.expert_granules(&granules, &demand, form, x, &mut buffers);
        let mut y = vec![0.0; chosen.len() / s.k * s.n_embd];
        cpu.ordered_sum(&demand, weights, &buffers, &mut y);
        y
    }

    /// Every granule in a slot of its own, of which nothing else is written.
    fn upload(&self, bench: &Bench) -> Vec<Vec<DeviceBuffer>> {
        let s = &self.shape;
        let slot_bytes = s.down_at + bytes_of(s.down, s.n_embd, s.granule_rows);
        let slot = |expert, granule| {
            let slot = bench.empty(slot_bytes);
            let parts = self.mats(expert, granule).into_iter();
            for (mat, at) in parts.zip([s.gate_at, s.up_at, s.down_at]) {
                let bytes: Vec<u8> = (0..mat.rows).flat_map(|r| mat.row(r).to_vec()).collect();
                bench.stream.upload_now(slot.slice(at..at + bytes.len()), &bytes).unwrap();
            }
            slot
        };
        let expert = |e| (0..s.n_granules()).map(|g| slot(e, g)).collect();
        (0..N_EXPERTS).map(expert).collect()
    }
}

/// The host's tables and activations of a layer's tokens, on both sides.
struct Tokens {
    n: usize,
    chosen: Vec<u32>,
    weights: Vec<f32>,
    x: ActSet,
}

impl Tokens {
    fn new(cpu: &Cpu, layer: &Layer, chosen: &[u32]) -> Tokens {
        let (n, n_embd) = (chosen.len() / layer.shape.k, layer.shape.n_embd);
        let mut random = Random(23);
        let mut x = ActSet::default();
        x.fill(cpu, layer.kinds()[0], n, n_embd, &random.floats(n * n_embd));
        let chosen = chosen.to_vec();
        Tokens { n, weights: random.floats(chosen.len()), chosen, x }
    }

    fn records(&self, bench: &Bench, ty: TensorType) -> DeviceBuffer {
        bench.up(&records_of(self.x.view(ty)))
    }
}

fn upload_u64(bench: &Bench, values: &[u64]) -> DeviceBuffer {
    bench.up(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

/// `waves` say which granules are there, launch by launch; together they are all of them.
fn on_gpu(
    bench: &Bench,
    layer: &Layer,
    tokens: &Tokens,
    waves: &[&dyn Fn(usize) -> bool],
    pairs_a_launch: Option<usize>,
) -> Vec<f32> {
    let s = &layer.shape;
    let mut experts = Experts::load(&bench.gpu).unwrap();
    experts.pairs_a_launch = pairs_a_launch.unwrap_or(experts.pairs_a_launch);
    let quantize = Quantize::load(&bench.gpu).unwrap();
    let slots = layer.upload(bench);
    let n_pairs = tokens.chosen.len();
    let gate = if s.activation.is_gated() { s.gate } else { s.up };
    let records = [gate, s.up].map(|ty| (ty, tokens.records(bench, ty)));
    let x = |ty| {
        let (_, records) = records.iter().find(|r| r.0 == ty).unwrap();
        DeviceActs::new(act_kind(ty), tokens.n, s.n_embd, records.all())
    };
    let chosen_buffer = bench.up_u32(&tokens.chosen);
    let weights = bench.up_f32(&tokens.weights);
    let biases = layer.biases.as_ref().map(|b| {
        let gate = (!b.gate.is_empty()).then(|| bench.up_f32(&b.gate));
        (gate, bench.up_f32(&b.up), bench.up_f32(&b.down))
    });
    let biases = biases.as_ref().map(|(gate, up, down)| DeviceBiases {
        gate: gate.as_ref().map(|gate| gate.all()),
        up: up.all(),
        down: down.all(),
    });
    let inner = bench.empty(4 * n_pairs * s.n_ff);
    let kind = act_kind(s.down);
    let inner_records = bench.empty(n_pairs * record_bytes(kind, s.n_ff));
    let partial = bench.empty(4 * n_pairs * s.n_embd);
    for here in waves {
        let address = |e: u32, g: usize| match slots.get(e as usize) {
            Some(slots) if here(g) => slots[g].all().address(),
            _ => 0,
        };
        let all = 0..s.n_granules();
        let table = tokens.chosen.iter().flat_map(|e| all.clone().map(|g| address(*e, g)));
        let table = upload_u64(bench, &table.collect::<Vec<u64>>());
        let (granules, experts_of) = (table.all(), chosen_buffer.all());
        let chosen = Chosen { n_pairs, granules, experts: experts_of };
        let acts = DeviceActs::new(kind, n_pairs, s.n_ff, inner_records.all());
        // SAFETY: the table holds 0 or addresses of slots of this shape, which live until the end.
        unsafe {
            experts.gate_up(&bench.stream, s, chosen, biases, x, inner.all()).unwrap();
            quantize.store(&bench.stream, inner.all(), s.n_ff, acts).unwrap();
            experts.down(&bench.stream, s, chosen, biases, acts, partial.all()).unwrap();
        }
    }
    let y = bench.up_f32(&vec![0.0; tokens.n * s.n_embd]);
    let (pairs, n) = (chosen_buffer.all(), tokens.n);
    // SAFETY: without `grouped` pairs are those of the tokens and ranks.
    let sum = unsafe {
        let (weights, partial, y) = (weights.all(), partial.all(), y.all());
        let sum = OrderedSum { n_tokens: n, pairs, is_grouped: false, weights, partial, y };
        experts.ordered_sum(&bench.stream, s, sum)
    };
    sum.unwrap();
    bench.down_f32(&y)
}

#[track_caller]
fn check(layer: &Layer, chosen: &[u32], seed: u64) {
    let (bench, cpu) = (Bench::new(seed), Cpu::new(1));
    let tokens = Tokens::new(&cpu, layer, chosen);
    let expected = layer.on_cpu(&cpu, &tokens.x, chosen, &tokens.weights);
    assert!(expected.iter().any(|y| *y != 0.0));
    let all = on_gpu(&bench, layer, &tokens, &[&|_| true], None);
    assert_eq!(bits(&all), bits(&expected), "{:?}", layer.shape);
    let waves: [&dyn Fn(usize) -> bool; 2] = [&|g| g < 1, &|g| g >= 1];
    let halves = on_gpu(&bench, layer, &tokens, &waves, None);
    assert_eq!(bits(&halves), bits(&expected), "in two waves: {:?}", layer.shape);
    // More pairs than a grid has blocks: a token's two pairs at a time.
    let parts = on_gpu(&bench, layer, &tokens, &waves, Some(3));
    assert_eq!(bits(&parts), bits(&expected), "in several launches: {:?}", layer.shape);
}

/// Each type as gate and up, and as down, with a last granule that is shorter.
#[test]
fn granules_of_every_format_have_the_bits_of_the_cpu() {
    for (i, ty) in types().into_iter().enumerate() {
        let block = ty.block_len().max(8);
        let outer = [block * (1 + i % 2), 96, 64];
        let layer = Layer::new([ty, ty, TensorType::Q8_0], outer, Activation::Silu, false);
        check(&layer, &[1, 0], i as u64);
        let inner = [32, 3 * block, 2 * block];
        let layer =
            Layer::new([TensorType::Q8_0, TensorType::Q8_0, ty], inner, Activation::Silu, false);
        check(&layer, &[2, 1], i as u64);
    }
}

#[test]
fn activations_biases_mixed_types_and_absent_experts() {
    use TensorType::*;
    let chosen = [2, 0, 1, NO_EXPERT, 1, 2];
    for (types, activation, biased) in [
        ([MXFP4, MXFP4, MXFP4], Activation::SiluClamped, true),
        ([Q4_0, Q4_0, Q5_1], Activation::Silu, true),
        ([Q5_0, Q8_0, Q4_1], Activation::Silu, true),
        ([F16, Q8_0, F32], Activation::SiluClamped, false),
        ([Q8_0, Q8_0, BF16], Activation::Relu, false),
        ([Q8_0, Q8_0, Q4_0], Activation::Relu, true),
    ] {
        check(&Layer::new(types, [64, 160, 64], activation, biased), &chosen, 5);
    }
}

/// The way of prompts: pairs grouped by expert, a launch for each granule of all experts; each type
/// that is computed so as gate and up, and as down.
#[test]
fn grouped_products_have_the_bits_of_the_cpu() {
    use TensorType::Q8_0;
    // Expert 1 has more tokens than a tile has columns, expert 2 few.
    let chosen: Vec<u32> = (0..40).flat_map(|t| [1, if t % 9 == 0 { 2 } else { 0 }]).collect();
    let check = |types: [TensorType; 3], sizes: [usize; 3]| {
        let layer = Layer::new(types, sizes, Activation::Silu, true);
        let (bench, cpu) = (Bench::new(11), Cpu::new(1));
        let tokens = Tokens::new(&cpu, &layer, &chosen);
        let expected = layer.on_cpu(&cpu, &tokens.x, &chosen, &tokens.weights);
        let got = grouped(&bench, &cpu, &layer, &tokens);
        assert_eq!(bits(&got), bits(&expected), "{types:?}");
    };
    for ty in types().into_iter().filter(|ty| act_kind(*ty) != ActKind::F32) {
        let block = ty.block_len();
        check([ty, ty, Q8_0], [2 * block, 96, 64]);
        check([Q8_0, Q8_0, ty], [32, 3 * block, 2 * block]);
    }
}

/// Pairs in the order of their experts.
struct Grouping {
    /// Pair → place among [tokens, ranks].
    order: Vec<usize>,
    /// u32 [experts + 1], [pairs] and [tokens, k].
    starts: DeviceBuffer,
    tokens: DeviceBuffer,
    places: DeviceBuffer,
    /// u64 [experts], for each granule.
    tables: Vec<DeviceBuffer>,
    /// u32 [experts]: 0, 1, 2.
    experts: DeviceBuffer,
}

impl Grouping {
    fn new(bench: &Bench, s: &ExpertShape, chosen: &[u32], slots: &[Vec<DeviceBuffer>]) -> Self {
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_by_key(|i| chosen[*i]);
        let mut places = vec![0u32; chosen.len()];
        order.iter().enumerate().for_each(|(pair, i)| places[*i] = pair as u32);
        let tokens: Vec<u32> = order.iter().map(|i| (i / s.k) as u32).collect();
        let below = |e: u32| chosen.iter().filter(|c| **c < e).count() as u32;
        let starts: Vec<u32> = (0..=N_EXPERTS as u32).map(below).collect();
        let table = |g: usize| -> DeviceBuffer {
            let addresses: Vec<u64> = slots.iter().map(|s| s[g].all().address()).collect();
            upload_u64(bench, &addresses)
        };
        Grouping {
            order,
            starts: bench.up_u32(&starts),
            tokens: bench.up_u32(&tokens),
            places: bench.up_u32(&places),
            tables: (0..s.n_granules()).map(table).collect(),
            experts: bench.up_u32(&[0, 1, 2]),
        }
    }

    fn groups(&self, granule: usize, mat: MatRef, matrix_at: usize) -> Groups<'_> {
        Groups {
            ty: mat.ty,
            rows: mat.rows,
            cols: mat.cols,
            n_items: N_EXPERTS,
            matrices: self.tables[granule].all(),
            matrix_at,
            starts: self.starts.all(),
            tokens: None,
            max_pairs: self.order.len(),
            bias: None,
            accumulate: false,
        }
    }
}

fn grouped(bench: &Bench, cpu: &Cpu, layer: &Layer, tokens: &Tokens) -> Vec<f32> {
    let s = &layer.shape;
    let products = Products::load(&bench.gpu).unwrap();
    let slots = layer.upload(bench);
    let grouping = Grouping::new(bench, s, &tokens.chosen, &slots);
    let n_pairs = grouping.order.len();
    let x = tokens.records(bench, s.up);
    let x = DeviceActs::new(act_kind(s.up), tokens.n, s.n_embd, x.all());
    let gate_up = [(); 2].map(|()| bench.empty(4 * n_pairs * s.n_ff));
    for g in 0..s.n_granules() {
        let [gate, up, _] = layer.mats(0, g);
        for (out, mat, at) in [(&gate_up[0], gate, s.gate_at), (&gate_up[1], up, s.up_at)] {
            let list = Some(grouping.tokens.all());
            let groups = Groups { tokens: list, ..grouping.groups(g, mat, at) };
            let out = out.slice(4 * layer.rows(g).start..out.len());
            // SAFETY: the tables are those of the slots, of pairs and of their tokens.
            unsafe { products.grouped(&bench.stream, groups, x, out, s.n_ff) }.unwrap();
        }
    }
    // Biases and activations have kernels of their own.
    let biases = layer.biases.as_ref().unwrap();
    let [mut gate, mut up] = [&gate_up[0], &gate_up[1]].map(|buffer| bench.down_f32(buffer));
    for (pair, i) in grouping.order.iter().enumerate() {
        let (at, from) = (pair * s.n_ff, tokens.chosen[*i] as usize * s.n_ff);
        cpu.kernels.add(&mut gate[at..][..s.n_ff], &biases.gate[from..][..s.n_ff]);
        cpu.kernels.add(&mut up[at..][..s.n_ff], &biases.up[from..][..s.n_ff]);
    }
    let mut inner = vec![0.0; gate.len()];
    cpu.kernels.swiglu(&gate, &up, &mut inner);
    let partial = grouped_down(bench, layer, &products, &grouping, &inner);
    let y = bench.up_f32(&vec![0.0; tokens.n * s.n_embd]);
    let weights = bench.up_f32(&tokens.weights);
    let (pairs, n) = (grouping.places.all(), tokens.n);
    let experts = Experts::load(&bench.gpu).unwrap();
    // SAFETY: the places are those of the pairs.
    let sum = unsafe {
        let (weights, partial, y) = (weights.all(), partial.all(), y.all());
        let sum = OrderedSum { n_tokens: n, pairs, is_grouped: true, weights, partial, y };
        experts.ordered_sum(&bench.stream, s, sum)
    };
    sum.unwrap();
    bench.down_f32(&y)
}

/// down · inner of every pair, granule by granule; the first begins with the bias.
fn grouped_down(
    bench: &Bench,
    layer: &Layer,
    products: &Products,
    grouping: &Grouping,
    inner: &[f32],
) -> DeviceBuffer {
    let (s, n_pairs) = (&layer.shape, grouping.order.len());
    let kind = act_kind(s.down);
    let records = bench.empty(n_pairs * record_bytes(kind, s.n_ff));
    let acts = DeviceActs::new(kind, n_pairs, s.n_ff, records.all());
    let inner = bench.up_f32(inner);
    let quantize = Quantize::load(&bench.gpu).unwrap();
    quantize.store(&bench.stream, inner.all(), s.n_ff, acts).unwrap();
    let bias = bench.up_f32(&layer.biases.as_ref().unwrap().down);
    let partial = bench.empty(4 * n_pairs * s.n_embd);
    for g in 0..s.n_granules() {
        let [.., down] = layer.mats(0, g);
        let groups = Groups {
            bias: (g == 0).then(|| (grouping.experts.all(), bias.all())),
            accumulate: g > 0,
            ..grouping.groups(g, down, s.down_at)
        };
        let acts = acts.column_range(layer.rows(g));
        // SAFETY: the tables are those of the slots and of pairs.
        unsafe { products.grouped(&bench.stream, groups, acts, partial.all(), s.n_embd) }.unwrap();
    }
    partial
}
