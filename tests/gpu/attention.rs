//! Attention and the KV cache on the device against their twins on the CPU, on the emulated device:
//! stored rows and the exact kernels to the bit, the tensor-core kernel within its bound. Cache
//! rows that were not stored are not initialised, and the emulated device ends a launch that
//! reads one.

use crate::support::Bench;
use moeba::backend::cpu::Cpu;
use moeba::backend::cpu::attention::AttentionShape;
use moeba::backend::gpu::DeviceBuffer;
use moeba::backend::gpu::attention::{Attention, AttentionData, DeviceAttention, DeviceBias};
use moeba::backend::gpu::cache::{CacheStore, DeviceRows};
use moeba::backend::ops::{DistanceBias, RowBytes, Rows, RowsMut, row_bytes};
use moeba::gguf::TensorType::{self, BF16, F16, F32, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use std::ops::Range;

const TYPES: [TensorType; 9] = [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL];

#[derive(Clone, Debug)]
struct Case {
    n_head_kv: usize,
    group: usize,
    k_dim: usize,
    v_dim: usize,
    /// Values are the first elements of the keys.
    latent: bool,
    /// The types of keys and of values.
    types: [TensorType; 2],
    past: usize,
    tokens: usize,
    window: Option<usize>,
    sinks: bool,
    bias: bool,
    /// All positions for all queries.
    all: bool,
    /// How many positions those are: of another text, wherever the queries are in their own.
    source: Option<usize>,
    prompt: bool,
    /// Factor on the queries, which the scale makes up for.
    loudness: f32,
}

const PLAIN: Case = Case {
    n_head_kv: 2,
    group: 2,
    k_dim: 32,
    v_dim: 32,
    latent: false,
    types: [F16, F16],
    past: 0,
    tokens: 1,
    window: None,
    sinks: false,
    bias: false,
    all: false,
    source: None,
    prompt: false,
    loudness: 1.0,
};

/// Positions behind the last.
const SPARE: usize = 3;
/// How far apart key and query can be and still differ in their bias.
const REACH: usize = 9;

/// Values in ±`scale` from a fixed sequence.
fn values(n: usize, seed: u32, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    (0..n).map(|_| next()).collect()
}

/// One layer's keys or values on the CPU: all bits set, which is not a number of any type.
fn unwritten(ty: TensorType, n: usize) -> RowBytes {
    let mut data = RowBytes::zeroed(row_bytes(ty, n));
    data.fill(0xff);
    data
}

/// The inputs of a case.
struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sinks: Vec<f32>,
    bias: DistanceBias,
    bias_values: Vec<f32>,
}

impl Case {
    fn n_head(&self) -> usize {
        self.n_head_kv * self.group
    }

    /// Positions that are there.
    fn end(&self) -> usize {
        self.source.unwrap_or(self.past + self.tokens)
    }

    fn n_ctx(&self) -> usize {
        self.end() + SPARE
    }

    /// Elements of a query's keys and of its values.
    fn dims(&self) -> [usize; 2] {
        [self.k_dim, self.v_dim]
    }

    fn data(&self) -> Data {
        let end = self.end();
        let of = |head: usize, distance: isize| (head as f32 + 0.3 * distance as f32).cos();
        let far = REACH as isize;
        let head = |h: usize| (-far..=far).map(move |d| of(h, d));
        Data {
            // Scores of a few units either way, so that exponentials differ.
            q: values(self.tokens * self.n_head() * self.k_dim, 1, 3.0 * self.loudness),
            k: values(end * self.n_head_kv * self.k_dim, 2, 2.0),
            v: values(end * self.n_head_kv * self.v_dim, 3, 1.0),
            sinks: values(self.n_head(), 4, 3.0),
            bias: DistanceBias::new(self.n_head(), REACH, of),
            bias_values: (0..self.n_head()).flat_map(head).collect(),
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.k_dim as f32).sqrt() / self.loudness
    }

    fn all(&self) -> Option<usize> {
        self.all.then_some(self.end())
    }

    /// The CPU's result for all tokens.
    fn expected(&self) -> Vec<f32> {
        let (data, cpu, n_ctx) = (self.data(), Cpu::new(1), self.n_ctx());
        let cache = |ty, dim, x: &[f32]| {
            let mut data = unwritten(ty, n_ctx * self.n_head_kv * dim);
            RowsMut { ty, data: &mut data, dim, n_ctx }.store(&cpu, x, 0);
            data
        };
        let k = cache(self.types[0], self.k_dim, &data.k);
        let v = (!self.latent).then(|| cache(self.types[1], self.v_dim, &data.v));
        let rows = |i: usize, data| {
            let (ty, dim) = (self.types[i], self.dims()[i]);
            Rows { ty, data, dim, stride: dim, n_ctx }
        };
        let keys = rows(0, &k);
        let values = v.as_deref().map_or_else(|| keys.narrow(self.v_dim), |v| rows(1, v));
        let shape = AttentionShape {
            n_head: self.n_head(),
            n_head_kv: self.n_head_kv,
            first: self.past,
            all: self.all(),
            window: self.window,
            chunk: None,
            cap: None,
            scale: self.scale(),
            sinks: self.sinks.then_some(&data.sinks),
            bias: self.bias.then_some(&data.bias),
        };
        let mut out = vec![0.0; self.tokens * self.n_head() * self.v_dim];
        cpu.attention(shape, &data.q, keys, values, &mut out);
        out
    }
}

/// A case on the device: its caches hold the past.
struct OnDevice<'a> {
    bench: &'a Bench,
    attention: Attention,
    store: CacheStore,
    case: &'a Case,
    data: Data,
    caches: [DeviceBuffer; 2],
    sinks: DeviceBuffer,
    bias: DeviceBuffer,
    stored: usize,
}

impl<'a> OnDevice<'a> {
    fn new(bench: &'a Bench, case: &'a Case) -> OnDevice<'a> {
        let data = case.data();
        let n = case.n_ctx() * case.n_head_kv;
        let of = |i: usize| {
            let (ty, dim) = (case.types[i], case.dims()[i]);
            bench.empty(n * dim.div_ceil(ty.block_len()) * ty.block_bytes())
        };
        OnDevice {
            bench,
            attention: Attention::load(&bench.gpu).unwrap(),
            store: CacheStore::load(&bench.gpu).unwrap(),
            case,
            caches: [of(0), of(1)],
            sinks: bench.up_f32(&data.sinks),
            bias: bench.up_f32(&data.bias_values),
            data,
            stored: 0,
        }
    }

    fn rows(&self, i: usize) -> DeviceRows<'_> {
        let case = self.case;
        let (ty, dim, heads) = (case.types[i], case.dims()[i], case.n_head_kv);
        let n_ctx = case.n_ctx();
        DeviceRows { ty, data: self.caches[i].all(), heads, dim, stride: dim, n_ctx }
    }

    /// Stores positions up to `end`.
    fn store(&mut self, end: usize) {
        let past = self.bench.up_u32(&[self.stored as u32]);
        let new = [&self.data.k, &self.data.v];
        // Latent attention has one row for both.
        for (i, x) in new.into_iter().enumerate().take(if self.case.latent { 1 } else { 2 }) {
            let width = self.case.n_head_kv * self.case.dims()[i];
            let x = self.bench.up_f32(&x[self.stored * width..end * width]);
            let tokens = end - self.stored;
            let rows = self.rows(i);
            self.store.store(&self.bench.stream, x.all(), tokens, past.all(), rows).unwrap();
        }
        self.stored = end;
    }

    /// Some of the tokens, with room for the partial results of `at_once` of them.
    fn attend(&self, tokens: Range<usize>, at_once: usize) -> Vec<f32> {
        let (case, bench) = (self.case, self.bench);
        let past = bench.up_u32(&[(case.past + tokens.start) as u32]);
        let max_seen = case.end();
        let bias = DeviceBias::Near { reach: REACH, values: self.bias.all() };
        let shape = DeviceAttention {
            n_head: case.n_head(),
            n_head_kv: case.n_head_kv,
            past: past.all(),
            max_seen,
            all: case.all(),
            window: case.window,
            chunk: None,
            cap: None,
            scale: case.scale(),
            sinks: case.sinks.then_some(self.sinks.all()),
            bias: case.bias.then_some(bias),
            prompt: case.prompt,
            lists: 0,
        };
        let bytes = Attention::work_bytes(case.n_head(), case.v_dim, max_seen, at_once);
        let work = bench.empty(bytes);
        let width = case.n_head() * case.k_dim;
        let q = bench.up_f32(&self.data.q[tokens.start * width..tokens.end * width]);
        let out = bench.empty(4 * tokens.len() * case.n_head() * case.v_dim);
        let keys = self.rows(0);
        let values = if case.latent { keys.narrow(case.v_dim) } else { self.rows(1) };
        let data = AttentionData {
            tokens: tokens.len(),
            q: q.all(),
            k: keys,
            v: values,
            work: work.all(),
            out: out.all(),
            records: None,
        };
        self.attention.launch(&bench.stream, &shape, data).unwrap();
        bench.down_f32(&out)
    }
}

/// To the bit. Every NaN is one: which one an operation gives is the processor's to say.
fn same(got: &[f32], expected: &[f32], case: &Case) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let equal = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
        assert!(equal, "{got:e} for {expected:e} at {i}: {case:?}");
    }
}

/// All tokens at once, and one after the other as they come.
fn check(case: &Case) {
    let bench = Bench::new(case.past as u64);
    let expected = case.expected();
    let mut device = OnDevice::new(&bench, case);
    if case.all {
        device.store(case.end());
        same(&device.attend(0..case.tokens, case.tokens), &expected, case);
        return;
    }
    let width = case.n_head() * case.v_dim;
    for t in 0..case.tokens {
        device.store(case.past + t + 1);
        same(&device.attend(t..t + 1, 1), &expected[t * width..(t + 1) * width], case);
    }
    same(&device.attend(0..case.tokens, 2), &expected, case);
}

/// A number with the bits of the types' every trouble: ties, subnormals, overflow, NaN, infinity.
fn odd_numbers(n: usize) -> Vec<f32> {
    let mut x = values(n, 3, 2.0);
    for (i, x) in x.iter_mut().enumerate() {
        match i / 32 % 10 {
            1 => *x = if i % 2 == 0 { -0.0 } else { 0.0 },
            2 => *x *= 1e-40,
            3 => *x *= 1e7,
            4 => *x = if i % 32 == 0 { 127.0 } else { (i % 32) as f32 - 15.5 },
            5 => *x = f32::from_bits(0x3f80_0800 + 0x1000 * (i as u32 % 32)),
            6 if i % 32 == 7 => *x = f32::from_bits(0xffa1_2345),
            7 if i % 32 == 9 => *x = f32::NEG_INFINITY,
            8 => *x *= 3e5,
            9 => *x = 1.5,
            _ => (),
        }
    }
    x
}

#[test]
fn rows_are_stored_as_the_cpu_stores_them() {
    let bench = Bench::new(1);
    let store = CacheStore::load(&bench.gpu).unwrap();
    for ty in TYPES {
        for (heads, dim, tokens, past) in [(1, 32, 1, 0), (2, 96, 7, 3), (3, 64, 30, 11)] {
            let (n_ctx, x) = (past + tokens + 2, odd_numbers(tokens * heads * dim));
            let mut cache = unwritten(ty, heads * n_ctx * dim);
            let untouched = bench.up(&cache);
            RowsMut { ty, data: &mut cache, dim, n_ctx }.store(&Cpu::new(1), &x, past);
            let data = untouched.all();
            let rows = DeviceRows { ty, data, heads, dim, stride: dim, n_ctx };
            let (x, past) = (bench.up_f32(&x), bench.up_u32(&[past as u32]));
            store.store(&bench.stream, x.all(), tokens, past.all(), rows).unwrap();
            assert!(bench.down(&untouched) == cache[..], "{ty}: {heads}×{dim}, {tokens}");
        }
    }
}

#[test]
fn rows_from_the_end_of_the_cache_on_are_left_out() {
    let bench = Bench::new(2);
    let store = CacheStore::load(&bench.gpu).unwrap();
    for ty in TYPES {
        let before = unwritten(ty, 2 * 4 * 32);
        let cache = bench.up(&before);
        let rows = DeviceRows { ty, data: cache.all(), heads: 2, dim: 32, stride: 32, n_ctx: 4 };
        let (x, past) = (bench.up_f32(&values(3 * 64, 1, 1.0)), bench.up_u32(&[3]));
        store.store(&bench.stream, x.all(), 3, past.all(), rows).unwrap();
        let row = before.len() / 8;
        for (i, (got, before)) in bench.down(&cache).chunks(row).zip(before.chunks(row)).enumerate()
        {
            assert_eq!(got != before, i % 4 == 3, "{ty}: row {i}");
        }
    }
}

#[test]
fn one_token_of_any_type_has_the_bits_of_the_cpu() {
    for k in TYPES {
        for v in TYPES {
            check(&Case { types: [k, v], past: 70, ..PLAIN });
        }
        let types = [k, k];
        check(&Case { types, past: 0, ..PLAIN });
        check(&Case { types, past: 600, tokens: 2, group: 3, sinks: true, ..PLAIN });
        let latent = Case { types, n_head_kv: 1, latent: true, ..PLAIN };
        check(&Case { group: 17, k_dim: 576, v_dim: 512, past: 20, ..latent.clone() });
        check(&Case { group: 4, k_dim: 64, v_dim: 40, past: 70, ..latent.clone() });
        // Values that are not read four at a time.
        check(&Case { group: 4, k_dim: 64, v_dim: 42, past: 70, ..latent });
    }
}

#[test]
fn groups_of_one_to_sixteen_heads_have_the_bits_of_the_cpu() {
    for group in 1..=16 {
        check(&Case { group, past: 60 + group, k_dim: 96, v_dim: 64, ..PLAIN });
    }
    check(&Case { group: 1, n_head_kv: 5, past: 513, ..PLAIN });
}

#[test]
fn rows_of_any_length_have_the_bits_of_the_cpu() {
    for (k_dim, v_dim) in [(80, 80), (1, 3), (20, 12), (7, 65), (256, 130), (40, 1030)] {
        for ty in [F32, F16, BF16] {
            check(&Case { k_dim, v_dim, types: [ty, ty], past: 9, tokens: 2, ..PLAIN });
        }
    }
}

#[test]
fn windows_sinks_biases_and_all_have_the_bits_of_the_cpu() {
    for past in [0, 3, 515, 1100] {
        for window in [None, Some(1), Some(5), Some(64), Some(530)] {
            for n in 0..4 {
                let (sinks, bias) = (n % 2 == 1, n / 2 == 1);
                check(&Case { past, window, sinks, bias, tokens: 2, k_dim: 8, v_dim: 8, ..PLAIN });
            }
            check(&Case { past, window, bias: true, all: true, tokens: 3, ..PLAIN });
        }
    }
}

/// As a decoder sees what its encoder has read: shorter and longer than the decoder's own text.
#[test]
fn another_text_has_the_bits_of_the_cpu() {
    for (source, past, tokens) in [(1, 0, 1), (5, 40, 3), (67, 2, 7), (511, 700, 1), (1030, 0, 5)] {
        for ty in TYPES {
            let case = Case { source: Some(source), all: true, past, tokens, ..PLAIN };
            check(&Case { types: [ty, ty], group: 1, ..case.clone() });
            check(&Case { types: [ty, F32], group: 3, sinks: true, ..case });
        }
    }
    // A text that sees all of itself, by how far its tokens are from each other.
    for tokens in [1, 2, 31, 65] {
        let case = Case { all: true, bias: true, tokens, group: 1, ..PLAIN };
        check(&Case { types: [F32, F32], k_dim: 20, v_dim: 12, ..case.clone() });
        check(&Case { types: [BF16, F16], n_head_kv: 3, ..case });
    }
}

/// A query sees all of a text as the query at its last position does: one graph for all of them.
#[test]
fn one_graph_serves_other_texts_of_any_length() {
    let of = |source| Case { source: Some(source), all: true, past: 3, group: 3, ..PLAIN };
    let (bench, longest) = (Bench::new(5), of(600));
    let mut device = OnDevice::new(&bench, &longest);
    device.store(longest.end());
    let [last, out] = [4, 4 * longest.n_head() * longest.v_dim].map(|bytes| bench.empty(bytes));
    let q = bench.up_f32(&longest.data().q);
    let work = bench.empty(Attention::work_bytes(longest.n_head(), 32, longest.end(), 1));
    let shape = DeviceAttention {
        n_head: longest.n_head(),
        n_head_kv: longest.n_head_kv,
        past: last.all(),
        max_seen: longest.end(),
        all: None,
        window: None,
        chunk: None,
        cap: None,
        scale: longest.scale(),
        sinks: None,
        bias: None,
        prompt: false,
        lists: 0,
    };
    let (stream, k, v) = (&bench.stream, device.rows(0), device.rows(1));
    let data = AttentionData {
        tokens: 1,
        q: q.all(),
        k,
        v,
        work: work.all(),
        out: out.all(),
        records: None,
    };
    let graph = stream.capture(|| device.attention.launch(stream, &shape, data)).unwrap();
    for source in [600, 1, 64, 513, 512] {
        stream.upload_now(last.all(), &(source as u32 - 1).to_le_bytes()).unwrap();
        // SAFETY: the buffers live as long as the graph.
        unsafe { stream.run(&graph) }.unwrap();
        same(&bench.down_f32(&out), &of(source).expected(), &of(source));
    }
}

#[test]
fn one_graph_serves_a_text_that_grows() {
    let case = &Case { past: 508, tokens: 6, group: 4, ..PLAIN };
    let bench = Bench::new(1);
    let expected = case.expected();
    let mut device = OnDevice::new(&bench, case);
    device.store(case.past);
    let (width, v_width) = (case.n_head() * case.k_dim, case.n_head() * case.v_dim);
    let [past, q, out] = [4, 4 * width, 4 * v_width].map(|bytes| bench.empty(bytes));
    let [k, v] = [case.k_dim, case.v_dim].map(|dim| bench.empty(4 * case.n_head_kv * dim));
    let work = bench.empty(Attention::work_bytes(case.n_head(), case.v_dim, case.n_ctx(), 1));
    let shape = DeviceAttention {
        n_head: case.n_head(),
        n_head_kv: case.n_head_kv,
        past: past.all(),
        max_seen: case.n_ctx(),
        all: None,
        window: None,
        chunk: None,
        cap: None,
        scale: case.scale(),
        sinks: None,
        bias: None,
        prompt: false,
        lists: 0,
    };
    let (stream, rows) = (&bench.stream, [device.rows(0), device.rows(1)]);
    let graph = stream.capture(|| {
        device.store.store(stream, k.all(), 1, past.all(), rows[0])?;
        device.store.store(stream, v.all(), 1, past.all(), rows[1])?;
        let [k, v] = rows;
        let (q, work, out) = (q.all(), work.all(), out.all());
        let data = AttentionData { tokens: 1, q, k, v, work, out, records: None };
        device.attention.launch(stream, &shape, data)
    });
    let graph = graph.unwrap();
    for t in 0..case.tokens {
        let up = |to: &DeviceBuffer, x: &[f32], at: usize| {
            let n = to.len() / 4;
            let bytes: Vec<u8> = x[at * n..][..n].iter().flat_map(|x| x.to_le_bytes()).collect();
            stream.upload_now(to.all(), &bytes).unwrap();
        };
        let position = case.past + t;
        stream.upload_now(past.all(), &(position as u32).to_le_bytes()).unwrap();
        up(&q, &device.data.q, t);
        up(&k, &device.data.k, position);
        up(&v, &device.data.v, position);
        // SAFETY: the buffers live as long as the graph.
        unsafe { stream.run(&graph) }.unwrap();
        same(&bench.down_f32(&out), &expected[t * v_width..][..v_width], case);
    }
}

/// The bound for tensor cores: the largest difference from the CPU, as a part of the largest value.
/// Measured 6.9e-4 at worst; a wrong or missing position shows at 1e-2 and above.
const BOUND: f32 = 1.5e-3;

fn error(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    let off = |(got, expected): (&f32, &f32)| match got.is_finite() {
        true => (got - expected).abs(),
        false => f32::INFINITY,
    };
    got.iter().zip(expected).map(off).fold(0.0, f32::max) / largest
}

/// All tokens at once, with room for some, and cut after some: near the CPU, and with one result.
fn check_prompt(case: Case) {
    let case = &Case { prompt: true, ..case };
    let bench = Bench::new(case.tokens as u64);
    let expected = case.expected();
    let width = case.n_head() * case.v_dim;
    let mut device = OnDevice::new(&bench, case);
    let mut cut = Vec::new();
    if !case.all {
        let mut start = 0;
        for at in [1, case.tokens / 3, case.tokens] {
            device.store(case.past + at.max(start));
            cut.extend(device.attend(start..at.max(start), case.tokens));
            start = at.max(start);
        }
    }
    device.store(case.end());
    let whole = device.attend(0..case.tokens, case.tokens);
    let off = error(&whole, &expected);
    assert!(off < BOUND, "{off:e} {case:?}");
    if !case.all {
        same(&cut, &whole, case);
    }
    same(&device.attend(0..case.tokens, case.tokens / 2 + 1), &whole, case);
    assert_eq!(whole.len(), case.tokens * width);
}

#[test]
fn prompts_are_near_the_cpu_and_do_not_depend_on_their_cut() {
    for types in [[F16, F16], [Q8_0, Q8_0], [F16, Q8_0], [Q8_0, F16]] {
        for (past, tokens) in [(0, 70), (130, 17)] {
            check_prompt(Case { types, past, tokens, ..PLAIN });
        }
    }
    for types in [[Q4_0, Q4_0], [Q4_1, F16], [F16, Q5_0], [Q5_1, Q8_0], [IQ4_NL, Q4_1]] {
        check_prompt(Case { types, past: 70, tokens: 33, k_dim: 96, v_dim: 64, ..PLAIN });
    }
    for group in [1, 3, 5, 16, 70] {
        check_prompt(Case { group, n_head_kv: 1, past: 20, tokens: 11, ..PLAIN });
    }
    for (k_dim, v_dim) in [(16, 16), (80, 64), (128, 128), (192, 128), (96, 208)] {
        check_prompt(Case { k_dim, v_dim, past: 40, tokens: 30, ..PLAIN });
    }
    // What f16 cannot hold, in queries of any size.
    for loudness in [1e-30, 1e30] {
        check_prompt(Case { loudness, tokens: 9, ..PLAIN });
    }
}

#[test]
fn prompts_have_windows_sinks_biases_and_splits() {
    for (i, window) in [None, Some(1), Some(40), Some(100)].into_iter().enumerate() {
        let (sinks, bias) = (i % 2 == 0, i % 2 == 1);
        let case = Case { window, sinks, bias, past: 90, tokens: 41, n_head_kv: 1, ..PLAIN };
        check_prompt(Case { all: true, sinks: bias, bias: sinks, ..case.clone() });
        check_prompt(case);
    }
    for (source, past, tokens) in [(3, 90, 41), (130, 0, 9), (4100, 7, 3)] {
        check_prompt(Case { source: Some(source), all: true, past, tokens, group: 1, ..PLAIN });
    }
    let long = Case { n_head_kv: 1, past: 4090, tokens: 14, k_dim: 16, v_dim: 16, ..PLAIN };
    check_prompt(Case { window: Some(4090), ..long });
}
