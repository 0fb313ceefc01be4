//! Attention against plain softmax in f64, and the promise that neither cuts, threads nor vector
//! units change a bit. Rows that must not be read yet are NaN throughout.

use super::*;
use crate::backend::ops::{RowBytes, RowsMut, row_bytes};
use crate::gguf::TensorType::{self, BF16, F16, F32, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::quant;
use crate::simd;
use proptest::prelude::*;

const TYPES: [TensorType; 9] = [F32, F16, BF16, Q8_0, Q4_0, Q4_1, IQ4_NL, Q5_0, Q5_1];

#[derive(Clone, Debug)]
struct Case {
    n_head_kv: usize,
    group: usize,
    k_dim: usize,
    v_dim: usize,
    /// Values are the first elements of the keys.
    latent: bool,
    ty: TensorType,
    past: usize,
    tokens: usize,
    window: Option<usize>,
    chunk: Option<usize>,
    cap: Option<f32>,
    sinks: bool,
    bias: bool,
    /// All positions for all queries.
    all: bool,
}

const PLAIN: Case = Case {
    n_head_kv: 2,
    group: 2,
    k_dim: 64,
    v_dim: 64,
    latent: false,
    ty: F32,
    past: 0,
    tokens: 7,
    window: None,
    chunk: None,
    cap: None,
    sinks: false,
    bias: false,
    all: false,
};

/// Positions behind the last.
const SPARE: usize = 3;

/// Values in ±`scale` from a fixed sequence.
fn values(n: usize, seed: u32, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    (0..n).map(|_| next()).collect()
}

/// One layer's keys or values.
struct Cache {
    ty: TensorType,
    data: RowBytes,
}

impl Cache {
    /// All bits set: not a number, of any type.
    fn new(ty: TensorType, n: usize) -> Cache {
        let mut data = RowBytes::zeroed(row_bytes(ty, n));
        data.fill(0xff);
        Cache { ty, data }
    }

    fn rows(&self, dim: usize, n_ctx: usize) -> Rows<'_> {
        Rows { ty: self.ty, data: &self.data, dim, stride: dim, n_ctx }
    }

    fn store(&mut self, cpu: &Cpu, dim: usize, n_ctx: usize, x: &[f32], first: usize) {
        RowsMut { ty: self.ty, data: &mut self.data, dim, n_ctx }.store(cpu, x, first);
    }

    /// The expected values, by the plain conversions.
    fn floats(&self) -> Vec<f64> {
        let n = self.data.len() / self.ty.block_bytes() * self.ty.block_len();
        let mut out = vec![0.0; n];
        quant::dequantize(self.ty, &self.data, &mut out);
        out.into_iter().map(f64::from).collect()
    }
}

/// The operands of a case.
struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sinks: Vec<f32>,
    bias: DistanceBias,
}

impl Case {
    fn n_head(&self) -> usize {
        self.n_head_kv * self.group
    }

    fn n_ctx(&self) -> usize {
        self.past + self.tokens + SPARE
    }

    fn data(&self) -> Data {
        let end = self.past + self.tokens;
        let bias = |head: usize, distance: isize| (head as f32 + 0.3 * distance as f32).cos();
        Data {
            // Scores of a few units either way, so that exponentials differ.
            q: values(self.tokens * self.n_head() * self.k_dim, 1, 3.0),
            k: values(end * self.n_head_kv * self.k_dim, 2, 2.0),
            v: values(end * self.n_head_kv * self.v_dim, 3, 1.0),
            sinks: values(self.n_head(), 4, 3.0),
            bias: DistanceBias::new(self.n_head(), 9, bias),
        }
    }

    fn shape<'a>(&self, data: &'a Data, first: usize) -> AttentionShape<'a> {
        AttentionShape {
            n_head: self.n_head(),
            n_head_kv: self.n_head_kv,
            first,
            all: self.all.then_some(self.past + self.tokens),
            window: self.window,
            chunk: self.chunk,
            cap: self.cap,
            scale: 1.0 / (self.k_dim as f32).sqrt(),
            sinks: self.sinks.then_some(&data.sinks),
            bias: self.bias.then_some(&data.bias),
        }
    }

    fn rows<'a>(&self, k: &'a Cache, v: &'a Cache) -> (Rows<'a>, Rows<'a>) {
        let n_ctx = self.n_ctx();
        let keys = k.rows(self.k_dim, n_ctx);
        let values = if self.latent { keys.narrow(self.v_dim) } else { v.rows(self.v_dim, n_ctx) };
        (keys, values)
    }

    /// The outputs and the caches, of a prompt cut after the tokens that `cuts` says: rows of later
    /// pieces are not stored yet.
    fn run(&self, cpu: &Cpu, cuts: &[usize]) -> (Vec<f32>, Cache, Cache) {
        let (data, n_head, n_ctx) = (self.data(), self.n_head(), self.n_ctx());
        let mut k = Cache::new(self.ty, n_ctx * self.n_head_kv * self.k_dim);
        let mut v = Cache::new(self.ty, n_ctx * self.n_head_kv * self.v_dim);
        let store = |cache: &mut Cache, x: &[f32], dim: usize, at: Range<usize>| {
            let width = self.n_head_kv * dim;
            let x = &x[at.start * width..at.end * width];
            cache.store(cpu, dim, n_ctx, x, at.start);
        };
        let mut out = vec![0.0; self.tokens * n_head * self.v_dim];
        let (mut start, mut stored) = (0, 0);
        for end in cuts.iter().copied().chain([self.tokens]) {
            let upto = self.past + if self.all { self.tokens } else { end };
            store(&mut k, &data.k, self.k_dim, stored..upto);
            if !self.latent {
                store(&mut v, &data.v, self.v_dim, stored..upto);
            }
            stored = upto;
            let (keys, values) = self.rows(&k, &v);
            let q = &data.q[start * n_head * self.k_dim..end * n_head * self.k_dim];
            let out = &mut out[start * n_head * self.v_dim..end * n_head * self.v_dim];
            cpu.attention(self.shape(&data, self.past + start), q, keys, values, out);
            start = end;
        }
        (out, k, v)
    }

    /// Plain softmax in f64 on the same rows.
    fn reference(&self, k: &Cache, v: &Cache) -> Vec<f64> {
        let (data, k, v) = (self.data(), k.floats(), v.floats());
        let shape = self.shape(&data, self.past);
        let mut out = Vec::new();
        for token in 0..self.tokens {
            let end = shape.all.unwrap_or(self.past + token + 1);
            let first = end.saturating_sub(self.window.unwrap_or(end));
            let seen = first.max(self.chunk.map_or(0, |chunk| (end - 1) / chunk * chunk))..end;
            for head in 0..self.n_head() {
                let at = (token * self.n_head() + head) * self.k_dim;
                let row = |i: usize| head / self.group * self.n_ctx() + i;
                let score = |i: usize| {
                    let pairs = data.q[at..][..self.k_dim].iter().zip(&k[row(i) * self.k_dim..]);
                    let dot: f64 = pairs.map(|(q, k)| *q as f64 * k).sum();
                    let bias =
                        if self.bias { data.bias.at(head, i, self.past + token) } else { 0.0 };
                    let scaled = dot * shape.scale as f64;
                    let cap = |cap: f32| cap as f64 * (scaled / cap as f64).tanh();
                    self.cap.map_or(scaled, cap) + bias as f64
                };
                let scores: Vec<f64> = seen.clone().map(score).collect();
                let sink = if self.sinks { data.sinks[head] as f64 } else { f64::NEG_INFINITY };
                let max = scores.iter().fold(sink, |m, s| m.max(*s));
                let sum: f64 =
                    scores.iter().map(|s| (s - max).exp()).sum::<f64>() + (sink - max).exp();
                let mut mixed = vec![0.0; self.v_dim];
                for (i, s) in seen.clone().zip(&scores) {
                    let p = (s - max).exp() / sum;
                    let v = match self.latent {
                        true => &k[row(i) * self.k_dim..][..self.v_dim],
                        false => &v[row(i) * self.v_dim..][..self.v_dim],
                    };
                    mixed.iter_mut().zip(v).for_each(|(m, v)| *m += p * v);
                }
                out.extend(mixed);
            }
        }
        out
    }

    /// The largest error, as a part of the largest value.
    fn error(&self) -> f64 {
        let (got, k, v) = self.run(&Cpu::new(1), &[]);
        let wanted = self.reference(&k, &v);
        let largest = wanted.iter().fold(0f64, |m, x| m.max(x.abs()));
        let off = |(got, wanted): (&f32, &f64)| match got.is_finite() {
            true => (*got as f64 - wanted).abs(),
            false => f64::INFINITY,
        };
        got.iter().zip(&wanted).map(off).fold(0.0, f64::max) / largest
    }

    /// Cuts, threads and vector units against the whole on one thread.
    fn has_one_result(&self, cuts: &[usize]) {
        let bits = |cpu: &Cpu, cuts: &[usize]| -> Vec<u32> {
            self.run(cpu, cuts).0.iter().map(|x| x.to_bits()).collect()
        };
        let whole = bits(&Cpu::new(1), &[]);
        let each: Vec<usize> = (1..self.tokens).collect();
        for n_threads in [1, 2, 5] {
            let mut cpu = Cpu::new(n_threads);
            assert!(bits(&cpu, &[]) == whole, "{n_threads} threads: {self:?}");
            assert!(bits(&cpu, cuts) == whole, "{n_threads} threads, {cuts:?}: {self:?}");
            if n_threads > 1 {
                assert!(bits(&cpu, &each) == whole, "{n_threads} threads, one by one: {self:?}");
                cpu.kernels = simd::by_name("scalar").unwrap();
                assert!(bits(&cpu, cuts) == whole, "{n_threads} threads, scalar: {self:?}");
            }
        }
    }
}

/// Measured 1.5e-6 at worst; a wrong or missing position shows at 1e-3 and above.
const BOUND: f64 = 4e-6;

#[test]
fn agrees_with_softmax_in_f64() {
    let check = |case: Case| {
        let error = case.error();
        assert!(error < BOUND, "{error:e} {case:?}");
    };
    for ty in TYPES {
        for (k_dim, v_dim) in [(64, 64), (128, 128), (96, 64), (160, 192)] {
            check(Case { k_dim, v_dim, ty, past: 50, tokens: 30, ..PLAIN });
        }
        // Latent attention: 576 elements, of which 512 are values; a narrow row that cuts a block.
        let latent = Case { n_head_kv: 1, latent: true, ty, ..PLAIN };
        check(Case { group: 128, k_dim: 576, v_dim: 512, past: 600, tokens: 2, ..latent.clone() });
        check(Case { group: 4, k_dim: 64, v_dim: 40, past: 70, tokens: 5, ..latent });
        // Long contexts: several splits.
        check(Case { ty, past: 2000, tokens: 1, ..PLAIN });
        check(Case { ty, past: 1030, tokens: 40, window: Some(700), sinks: true, ..PLAIN });
    }
    for (k_dim, v_dim) in [(80, 80), (1, 3), (20, 12), (7, 65)] {
        for ty in [F32, F16, BF16] {
            check(Case { k_dim, v_dim, ty, past: 90, tokens: 9, ..PLAIN });
        }
    }
}

/// A prompt, which threads share, and tokens one by one.
#[test]
fn rows_are_stored_alike_by_all_threads() {
    let (dim, n_ctx, heads, tokens) = (96, 310, 2, 300);
    let x = values(tokens * heads * dim, 3, 2.0);
    // Half a step of numbers up to ±2; a whole one where the range has no twin of its end.
    let bounds = [0.0001, 0.001, 0.01, 0.01, 0.26, 0.14, 0.3, 0.13, 0.07];
    for (ty, bound) in TYPES.into_iter().zip(bounds) {
        let stored = |n_threads: usize, step: usize| {
            let (cpu, mut cache) = (Cpu::new(n_threads), Cache::new(ty, heads * n_ctx * dim));
            for (i, x) in x.chunks(step * heads * dim).enumerate() {
                cache.store(&cpu, dim, n_ctx, x, 7 + i * step);
            }
            cache.floats()
        };
        let got = stored(3, tokens);
        let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&got) == bits(&stored(1, 1)), "{ty:?}");
        for (t, head) in (0..n_ctx).flat_map(|t| (0..heads).map(move |head| (t, head))) {
            let row = &got[(head * n_ctx + t) * dim..][..dim];
            let Some(token) = t.checked_sub(7).filter(|token| *token < tokens) else {
                assert!(row.iter().all(|x| x.is_nan()), "{ty:?} {t}");
                continue;
            };
            let wanted = &x[(token * heads + head) * dim..][..dim];
            let near = |(got, wanted): (&f64, &f32)| (got - f64::from(*wanted)).abs() < bound;
            assert!(row.iter().zip(wanted).all(near), "{ty:?} {t} {head}");
        }
    }
}

/// A sink of +∞ or a NaN among the keys shows; scores of −∞ alone are no number.
#[test]
fn what_is_no_number_shows() {
    let cpu = Cpu::new(1);
    let mut out = [0.0; 8];
    let mut attend = |k: [f32; 16], q: f32, sinks: Option<&[f32]>| {
        let rows = |data| Rows { ty: F32, data, dim: 8, stride: 8, n_ctx: 2 };
        let data = Data { sinks: vec![], ..PLAIN.data() };
        let shape = AttentionShape { n_head: 1, n_head_kv: 1, sinks, ..PLAIN.shape(&data, 1) };
        let v = [1f32; 16];
        let (k, v) = (bytemuck::cast_slice(&k), bytemuck::cast_slice(&v));
        cpu.attention(shape, &[q; 8], rows(k), rows(v), &mut out);
        out
    };
    assert_eq!(attend([1.0; 16], 1.0, None), [1.0; 8]);
    let mut k = [1.0; 16];
    k[9] = f32::NAN;
    assert!(attend(k, 1.0, None).iter().all(|x| x.is_nan()));
    assert!(attend([f32::INFINITY; 16], -1.0, None).iter().all(|x| x.is_nan()));
    assert_eq!(attend([f32::INFINITY; 16], -1.0, Some(&[0.0])), [0.0; 8]);
    let one = [[f32::INFINITY; 8], [1.0; 8]].concat().try_into().unwrap();
    assert_eq!(attend(one, -1.0, None), [1.0; 8]);
}

/// The bytes are those of a weight's row, but for Q8_0, which is rounded as activations are.
#[test]
fn rows_of_blocks_are_quantised_as_weights_are() {
    let (cpu, dim) = (Cpu::new(1), 64);
    let x = values(5 * dim, 9, 3.0);
    for ty in [Q4_0, Q4_1, IQ4_NL, Q5_0, Q5_1] {
        let mut cache = Cache::new(ty, 5 * dim);
        cache.store(&cpu, dim, 5, &x, 0);
        let mut wanted = vec![0; cache.data.len()];
        quant::quantize(ty, &x, &mut wanted);
        assert!(cache.data[..] == wanted[..], "{ty}");
    }
}

/// A number that is none or that no scale reaches makes NaN of its block and of no other.
#[test]
fn blocks_that_cannot_be_quantised_are_nan() {
    let cpu = Cpu::new(1);
    for ty in [Q8_0, Q4_0, Q4_1, IQ4_NL, Q5_0, Q5_1] {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = values(96, 5, 1.0);
            x[40] = odd;
            let mut cache = Cache::new(ty, 96);
            cache.store(&cpu, 96, 1, &x, 0);
            let is_nan: Vec<bool> = cache.floats().iter().map(|x| x.is_nan()).collect();
            assert!(is_nan.iter().enumerate().all(|(i, nan)| *nan == (i / 32 == 1)), "{ty} {odd}");
        }
        // Zeros of either sign, numbers that are too small for any scale, and too large.
        for (value, wanted) in [(-0.0, Some(0.0)), (1e-30, Some(0.0)), (1e9, None)] {
            let mut cache = Cache::new(ty, 32);
            let x: Vec<f32> = (0..32).map(|i| if i % 2 == 0 { value } else { 0.0 }).collect();
            cache.store(&cpu, 32, 1, &x, 0);
            let got = cache.floats();
            let fits = |x: &f64| wanted.map_or(!x.is_finite(), |wanted: f64| *x == wanted);
            assert!(got.iter().step_by(2).all(fits), "{ty} of {value}: {got:?}");
        }
    }
}

/// The cost of a type: the largest difference of attention's results from those over an f32 cache,
/// as a part of the largest of them. Measured, in the order of `TYPES`: 0, 6.9·10⁻⁴, 4.3·10⁻³,
/// 8.4·10⁻³, 0.17, 0.14, 0.17, 0.087 and 0.079; bounds are half as much again.
#[test]
fn attention_over_each_type_is_near_that_over_f32() {
    let bounds = [0.0, 1e-3, 6.4e-3, 1.3e-2, 0.26, 0.22, 0.26, 0.13, 0.12];
    let case = Case { group: 4, k_dim: 128, v_dim: 128, past: 700, tokens: 20, ..PLAIN };
    let latent = Case { n_head_kv: 1, group: 16, k_dim: 576, v_dim: 512, latent: true, ..case };
    for case in [case.clone(), latent] {
        let run = |ty| Case { ty, ..case.clone() }.run(&Cpu::new(2), &[]).0;
        let exact = run(F32);
        let largest = exact.iter().fold(0f32, |m, x| m.max(x.abs()));
        for (ty, bound) in TYPES.into_iter().zip(bounds) {
            let off = |(a, b): (&f32, &f32)| if b.is_finite() { (a - b).abs() } else { f32::NAN };
            let worst = exact.iter().zip(&run(ty)).map(off).fold(0f32, f32::max) / largest;
            assert!(worst <= bound, "{ty}: {worst:e}, latent {}", case.latent);
        }
    }
}

#[test]
fn one_result_for_decode_over_splits() {
    for ty in TYPES {
        let case = Case { ty, past: 1500, tokens: 3, n_head_kv: 1, group: 3, ..PLAIN };
        case.has_one_result(&[1]);
    }
    // More splits than a wave of two threads.
    let long = Case { past: 9 * SPLIT, tokens: 2, n_head_kv: 1, group: 1, ..PLAIN };
    Case { sinks: true, ..long.clone() }.has_one_result(&[1]);
    Case { window: Some(5 * SPLIT + 7), ..long }.has_one_result(&[1]);
}

/// Blocks of many queries on one thread, of fewer on two and five.
#[test]
fn one_result_for_blocks_of_any_size() {
    for window in [None, Some(9)] {
        let case = Case { group: 16, k_dim: 16, v_dim: 24, past: 500, tokens: 70, window, ..PLAIN };
        assert!(case.error() < BOUND);
        case.has_one_result(&[33]);
    }
}

fn cases() -> impl Strategy<Value = (Case, Vec<usize>)> {
    let dims = prop::sample::select(vec![(64, 64), (80, 80), (128, 128), (576, 512), (20, 13)]);
    let heads = (1..4usize, prop::sample::select(vec![1, 2, 3, 8, 17]));
    let window = prop::option::weighted(0.4, prop::sample::select(vec![1, 5, 63, 64, 100, 600]));
    let range = (prop::sample::select(vec![0, 1, 60, 64, 500, 1030]), 1..90usize, window);
    let chunk = prop::option::weighted(0.3, prop::sample::select(vec![1, 7, 64, 300]));
    let cap = prop::option::weighted(0.3, prop::sample::select(vec![0.5f32, 30.0]));
    let parts = (chunk, cap);
    let flags = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.2));
    let cuts = prop::collection::vec(1..90usize, 0..4);
    (dims, heads, prop::sample::select(TYPES.to_vec()), range, parts, flags, cuts).prop_map(
        |((k_dim, v_dim), heads, ty, range, (chunk, cap), (sinks, bias, all), mut cuts)| {
            let (past, tokens, window) = range;
            let latent = k_dim > v_dim;
            let (n_head_kv, group) = if latent { (1, 6) } else { heads };
            // Whole blocks only, and no more work than a second's.
            let ty = if k_dim % ty.block_len() == 0 { ty } else { F16 };
            let work = (past + tokens) * n_head_kv * group * k_dim;
            let tokens = tokens.min(3_000_000 / work).max(2);
            cuts.retain(|cut| *cut < tokens);
            cuts.sort();
            cuts.dedup();
            let case = Case { n_head_kv, group, k_dim, v_dim, latent, ty, past, tokens, ..PLAIN };
            (Case { window, chunk, cap, sinks, bias, all, ..case }, cuts)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_shape_agrees_and_has_one_result((case, cuts) in cases()) {
        let error = case.error();
        prop_assert!(error < BOUND, "{error:e} {case:?}");
        case.has_one_result(&cuts);
    }
}
