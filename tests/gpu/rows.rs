//! The GPU's kernels for rows (norms, rotary positions, activation functions, routing) against
//! their twins on the CPU, on the emulated device; to the bit but for layer norm.

use moeba::backend::cpu::Cpu;
use moeba::backend::cpu::expert::relu;
use moeba::backend::cpu::rope::RopeTable;
use moeba::backend::gpu::activate::Activate;
use moeba::backend::gpu::emulated::Config;
use moeba::backend::gpu::norm::Norm;
use moeba::backend::gpu::rope::{DeviceCosSin, Rope};
use moeba::backend::gpu::router::{DeviceRoute, Router};
use moeba::backend::gpu::{DeviceBuffer, Emulated, Stream};
use moeba::backend::ops::{Activation, Choice, Frequencies, RopePairing, RopeShape, Route, Score};
use moeba::simd;

fn stream(seed: u64) -> Stream {
    let config = Config { seed, ..Config::default() };
    Stream::new(&Emulated::devices(&config)[0]).unwrap()
}

fn empty(stream: &Stream, numbers: usize) -> DeviceBuffer {
    DeviceBuffer::new(stream.gpu(), 4 * numbers).unwrap()
}

fn up(stream: &Stream, x: &[f32]) -> DeviceBuffer {
    up_u32(stream, &x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>())
}

fn up_u32(stream: &Stream, x: &[u32]) -> DeviceBuffer {
    let buffer = empty(stream, x.len());
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    stream.upload_now(buffer.all(), &bytes).unwrap();
    buffer
}

fn down_u32(stream: &Stream, buffer: &DeviceBuffer) -> Vec<u32> {
    let mut bytes = vec![0; buffer.len()];
    stream.download_now(&mut bytes, buffer.all()).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

fn down(stream: &Stream, buffer: &DeviceBuffer) -> Vec<f32> {
    down_u32(stream, buffer).into_iter().map(f32::from_bits).collect()
}

/// To the bit. Every NaN is one: which one an operation gives is the processor's to say.
fn same(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let equal = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
        assert!(equal, "{what}: {got:e} for {expected:e} at {i}");
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.0 >> 33
    }

    /// Mostly of a size about 1, some small, some large.
    fn float(&mut self) -> f32 {
        let unit = self.next() as f32 / (1u64 << 30) as f32 - 1.0;
        unit * [1.0, 3.0, 0.01, 20.0][self.next() as usize % 4]
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

/// Rows and elements: one token, heads, odd sizes, several chunks, more rows than a block.
const SHAPES: &[(usize, usize)] =
    &[(1, 8), (1, 2048), (3, 5), (9, 64), (17, 128), (2, 513), (5, 1000), (1, 2500), (4, 1024)];

#[test]
fn rms_norm_has_the_cpus_bits() {
    let cpu = Cpu::new(1);
    for (seed, (rows, dim)) in SHAPES.iter().enumerate() {
        let (stream, mut random) = (stream(seed as u64), Random(seed as u64));
        let norm = Norm::load(stream.gpu()).unwrap();
        let (x, weight) = (random.floats(rows * dim), random.floats(*dim));
        let mut expected = vec![0.0; x.len()];
        cpu.rms_norm_rows(&x, &weight, 1e-6, &mut expected);
        let (x_up, weight_up) = (up(&stream, &x), up(&stream, &weight));
        let out = empty(&stream, x.len());
        let (x_all, weight_all) = (x_up.all(), weight_up.all());
        norm.rms_norm_rows(&stream, x_all, weight_all, 1e-6, out.all()).unwrap();
        same(&down(&stream, &out), &expected, &format!("{rows} rows of {dim}"));
        norm.rms_norm_heads(&stream, x_all, weight_all, 1e-6).unwrap();
        same(&down(&stream, &x_up), &expected, "in place");
    }
}

#[test]
fn layer_norm_is_off_by_a_last_bit_at_most() {
    let cpu = Cpu::new(1);
    for (seed, (rows, dim)) in SHAPES.iter().enumerate() {
        let (stream, mut random) = (stream(seed as u64), Random(seed as u64));
        let norm = Norm::load(stream.gpu()).unwrap();
        let (x, weight) = (random.floats(rows * dim), random.floats(*dim));
        let bias = vec![0.0; *dim];
        let mut expected = vec![0.0; x.len()];
        cpu.layer_norm_rows(&x, (&weight, &bias), 1e-5, &mut expected);
        let out = empty(&stream, x.len());
        let [x, weight, bias] = [&x, &weight, &bias].map(|v| up(&stream, v));
        let (weight, bias) = (weight.all(), bias.all());
        norm.layer_norm_rows(&stream, x.all(), weight, bias, 1e-5, out.all()).unwrap();
        for (got, expected) in down(&stream, &out).iter().zip(expected) {
            let ulps = (got.to_bits() as i64 - expected.to_bits() as i64).abs();
            assert!(ulps <= 2, "{got} for {expected}, {rows} rows of {dim}");
        }
    }
}

#[test]
fn layer_norm_adds_its_bias() {
    let stream = stream(0);
    let norm = Norm::load(stream.gpu()).unwrap();
    let [x, weight, bias] =
        [[1.0, 3.0], [2.0, 2.0], [10.0, 20.0]].map(|v: [f32; 2]| up(&stream, &v));
    let out = empty(&stream, 2);
    norm.layer_norm_rows(&stream, x.all(), weight.all(), bias.all(), 0.0, out.all()).unwrap();
    assert_eq!(down(&stream, &out), [8.0, 22.0]);
}

#[test]
fn sums_have_the_cpus_bits() {
    let cpu = Cpu::new(1);
    for (seed, scale) in [1.0, 0.37, -2.0].into_iter().enumerate() {
        let (stream, mut random) = (stream(seed as u64), Random(seed as u64));
        let norm = Norm::load(stream.gpu()).unwrap();
        let (mut acc, x) = (random.floats(777), random.floats(777));
        let (acc_up, x_up) = (up(&stream, &acc), up(&stream, &x));
        cpu.add_scaled(&mut acc, scale, &x);
        norm.add_scaled(&stream, acc_up.all(), scale, x_up.all()).unwrap();
        same(&down(&stream, &acc_up), &acc, "");
    }
}

#[test]
fn rotary_positions_have_the_cpus_bits() {
    let cpu = Cpu::new(1);
    // (tokens, heads, head_dim, offset, pairs)
    let shapes = [(1, 1, 2, 0, 1), (1, 4, 64, 0, 32), (5, 3, 80, 16, 32), (7, 2, 10, 1, 3)];
    for (seed, (tokens, heads, head_dim, offset, pairs)) in shapes.into_iter().enumerate() {
        for pairing in [RopePairing::Adjacent, RopePairing::Halves] {
            let (stream, mut random) = (stream(seed as u64), Random(seed as u64));
            let rope = Rope::load(stream.gpu()).unwrap();
            let frequencies = (0..pairs).map(|i| 0.9f32.powi(i as i32)).collect();
            let frequencies = Frequencies::new(frequencies, 1.25);
            let shape = RopeShape { head_dim, offset, pairing };
            let mut x = random.floats(tokens * heads * head_dim);
            let x_up = up(&stream, &x);
            // The table on the device begins at position 0, the one here at the first token's.
            let first = 11;
            let (mut table, mut whole) = (RopeTable::default(), RopeTable::default());
            table.fill(&frequencies, first, tokens);
            whole.fill(&frequencies, 0, first + tokens);
            cpu.rope(&mut x, shape, &table);
            let turns = up(&stream, whole.turns().as_flattened());
            let rows: Vec<u32> = (first..first + tokens).map(|p| p as u32).collect();
            let rows = up_u32(&stream, &rows);
            let turns = DeviceCosSin { data: turns.all(), n_pairs: pairs };
            // SAFETY: the table has each of these positions.
            unsafe { rope.launch(&stream, x_up.all(), shape, turns, rows.all()) }.unwrap();
            same(&down(&stream, &x_up), &x, &format!("{shape:?}"));
        }
    }
}

/// Ends of the exponential's range, and what is no number.
const HARD: [f32; 12] = [
    0.0,
    -0.0,
    88.7,
    -87.3,
    -103.9,
    1e30,
    -1e30,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    7.0,
    -7.0001,
];

#[test]
fn activation_functions_have_the_cpus_bits() {
    let kernels = simd::by_name("scalar").unwrap();
    let (stream, mut random) = (stream(5), Random(5));
    let activate = Activate::load(stream.gpu()).unwrap();
    let (mut gate, mut up_values) = (random.floats(1000), random.floats(1000));
    for x in HARD {
        for y in HARD {
            gate.push(x);
            up_values.push(y);
        }
    }
    let n = gate.len();
    let (gate_up, up_up, out) = (up(&stream, &gate), up(&stream, &up_values), empty(&stream, n));
    let run = |activation| {
        let gate = Some(gate_up.all());
        activate.gated(&stream, activation, gate, up_up.all(), out.all()).unwrap();
        down(&stream, &out)
    };
    let mut expected = vec![0.0; n];
    kernels.swiglu(&gate, &up_values, &mut expected);
    same(&run(Activation::Silu), &expected, "");
    let relu: Vec<f32> = up_values.iter().map(|u| relu(*u)).collect();
    same(&run(Activation::Relu), &relu, "");
    // As `swiglu_clamped` of cpu::expert.
    let limited: Vec<f32> = gate.iter().map(|g| g.min(7.0)).collect();
    let mut share: Vec<f32> = limited.iter().map(|g| 1.702 * g).collect();
    kernels.sigmoid(&mut share);
    let terms = limited.iter().zip(&share).zip(&up_values);
    let clamped: Vec<f32> = terms.map(|((g, s), u)| g * s * (u.clamp(-7.0, 7.0) + 1.0)).collect();
    same(&run(Activation::SiluClamped), &clamped, "");
    activate.sigmoid(&stream, gate_up.all()).unwrap();
    kernels.sigmoid(&mut gate);
    same(&down(&stream, &gate_up), &gate, "");
}

#[test]
fn softmax_has_the_cpus_bits() {
    let kernels = simd::by_name("scalar").unwrap();
    for (seed, (rows, n)) in
        [(1, 1), (3, 7), (2, 8), (5, 33), (1, 64), (4, 160), (1, 1000)].into_iter().enumerate()
    {
        let (stream, mut random) = (stream(seed as u64), Random(seed as u64));
        let activate = Activate::load(stream.gpu()).unwrap();
        let mut x = random.floats(rows * n);
        if seed % 2 == 1 {
            x[0] = HARD[seed + 6];
            x[n - 1] = f32::NEG_INFINITY;
        }
        let x_up = up(&stream, &x);
        activate.softmax_rows(&stream, x_up.all(), n).unwrap();
        x.chunks_exact_mut(n).for_each(|row| kernels.softmax(row));
        same(&down(&stream, &x_up), &x, &format!("{rows} rows of {n}"));
    }
}

const PLAIN: Choice = Choice {
    score: Score::Softmax,
    normalize: true,
    scale: 1.0,
    n_groups: 1,
    n_groups_used: 1,
    jitter: 0.2,
};

/// One route on both: ids equal, probabilities and weights to the bit.
fn compare(seed: u64, logits: &[f32], [n, k]: [usize; 2], choice: &Choice, bias: Option<&[f32]>) {
    let cpu = Cpu::new(1);
    let tokens = logits.len() / n;
    let mut route = Route::default();
    (route.k, route.n_experts, route.probs) = (k, n, logits.to_vec());
    cpu.route(&mut route, choice, bias);
    let stream = stream(seed);
    let router = Router::load(stream.gpu()).unwrap();
    let probs = up(&stream, logits);
    let [chosen, weights] = [(); 2].map(|()| empty(&stream, tokens * k));
    let bias_up = bias.map(|bias| up(&stream, bias));
    let device_route = DeviceRoute {
        k,
        n_experts: n,
        probs: probs.all(),
        chosen: chosen.all(),
        weights: weights.all(),
    };
    let bias_up = bias_up.as_ref().map(DeviceBuffer::all);
    router.route(&stream, device_route, choice, bias_up).unwrap();
    let what = format!("{tokens} tokens, {k} of {n}, {choice:?}, bias: {}", bias.is_some());
    assert_eq!(down_u32(&stream, &chosen), route.chosen, "{what}");
    same(&down(&stream, &probs), &route.probs, &what);
    same(&down(&stream, &weights), &route.weights, &what);
}

#[test]
fn routes_have_the_cpus_bits() {
    let mut random = Random(3);
    for (seed, [tokens, n, k]) in
        [[1, 8, 2], [7, 128, 8], [3, 60, 4], [2, 33, 33], [1, 256, 8], [2, 512, 10], [1, 1024, 3]]
            .into_iter()
            .enumerate()
    {
        let mut logits = random.floats(tokens * n);
        // Ties, which go to the lower id.
        logits[n - 1] = logits[0];
        logits[n / 2] = logits[n / 2 - 1];
        let bias = random.floats(n);
        for score in [Score::Softmax, Score::Sigmoid, Score::SparseMixer] {
            let choice = Choice { score, ..PLAIN };
            compare(seed as u64, &logits, [n, k], &choice, None);
            let choice = Choice { normalize: false, scale: 2.5, ..choice };
            compare(seed as u64, &logits, [n, k], &choice, Some(&bias));
        }
    }
}

#[test]
fn groups_are_chosen_as_on_the_cpu() {
    let mut random = Random(4);
    // (experts, groups, groups used, k)
    for (seed, (n, n_groups, n_groups_used, k)) in
        [(64, 8, 3, 6), (256, 8, 4, 8), (6, 6, 2, 2), (96, 48, 5, 4)].into_iter().enumerate()
    {
        let (logits, bias) = (random.floats(3 * n), random.floats(n));
        for bias in [None, Some(&bias[..])] {
            for score in [Score::Softmax, Score::Sigmoid] {
                let choice = Choice { score, n_groups, n_groups_used, ..PLAIN };
                compare(seed as u64, &logits, [n, k], &choice, bias);
            }
        }
    }
}

#[test]
fn routes_of_what_is_no_number_choose_distinct_experts() {
    let mut random = Random(6);
    let n = 40;
    for hard in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = random.floats(2 * n);
        logits[3] = hard;
        // The second token has nothing else.
        logits[n..].fill(hard);
        for score in [Score::Softmax, Score::Sigmoid] {
            compare(1, &logits, [n, 6], &Choice { score, ..PLAIN }, None);
        }
    }
}
