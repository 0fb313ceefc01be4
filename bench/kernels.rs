//! Speed of the dot kernels against what one core of this machine can do.
//!
//!     cargo bench --bench kernels                 # tables in Markdown, one thread
//!     cargo bench --bench kernels -- q4_k         # cases whose name contains it, of any type
//!     cargo bench --bench kernels -- versions     # the vector versions against each other only
//!
//! Variants of a case run in turn, round after round, so that other work on the machine meets
//! all of them alike; each shows its fastest rounds.

use moeba::gguf::TensorType;
use moeba::machine::peak::Peak;
use moeba::machine::read_rate::ReadTest;
use moeba::quant;
use moeba::simd::{self, ActKind, Activations, Kernels, MatRef, Scratch, act_kind};
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 50;
/// The types of the tables; a filter reaches the others too.
const TYPES: [TensorType; 8] = [
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
    TensorType::Q8_0,
    TensorType::Q4_0,
    TensorType::F16,
    TensorType::BF16,
    TensorType::F32,
];

fn random(seed: &mut u64) -> f32 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// `count` copies of one random matrix, so that they can be more than the caches hold.
struct Weights {
    ty: TensorType,
    rows: usize,
    cols: usize,
    count: usize,
    bytes: Vec<u8>,
}

impl Weights {
    fn new(ty: TensorType, rows: usize, cols: usize, count: usize) -> Self {
        let size = rows * ty.row_bytes(cols as u64).unwrap() as usize;
        let mut bytes = vec![0; size * count];
        let (first, rest) = bytes.split_at_mut(size);
        let mut seed = 1;
        let x: Vec<f32> = (0..8 * cols).map(|_| random(&mut seed)).collect();
        for chunk in first.chunks_mut(size / rows * 8) {
            let n = chunk.len() / ty.block_bytes() * ty.block_len();
            quant::quantize(ty, &x[..n], chunk);
        }
        rest.chunks_exact_mut(size).for_each(|copy| copy.copy_from_slice(first));
        Weights { ty, rows, cols, count, bytes }
    }

    fn size(&self) -> usize {
        self.bytes.len() / self.count
    }

    fn matrix(&self, i: usize) -> MatRef<'_> {
        let bytes = &self.bytes[i % self.count * self.size()..][..self.size()];
        MatRef::dense(self.ty, bytes, self.rows, self.cols)
    }
}

fn activations(k: &Kernels, kind: ActKind, tokens: usize, cols: usize) -> Activations {
    let mut seed = 2;
    let x: Vec<f32> = (0..tokens * cols).map(|_| random(&mut seed)).collect();
    let mut acts = Activations::new();
    acts.resize(kind, tokens, cols);
    acts.quantize_rows(k, 0..tokens, &x, cols);
    acts
}

type Variant<'a> = Box<dyn FnMut(usize) + 'a>;

/// Seconds a call of each variant, by its fastest rounds (the third of them, as one may have met
/// a cache that should be cold). A round makes enough calls for about half a millisecond, so that
/// some rounds are not interrupted.
fn seconds(variants: &mut [Variant]) -> Vec<f64> {
    let mut calls: Vec<usize> = Vec::new();
    for variant in variants.iter_mut() {
        variant(0);
        let start = Instant::now();
        variant(1);
        calls.push((5e-4 / start.elapsed().as_secs_f64()).ceil() as usize);
    }
    let mut rounds = vec![Vec::new(); variants.len()];
    let mut i = 0;
    for round in 0..ROUNDS {
        for (v, variant) in variants.iter_mut().enumerate() {
            // Long calls get fewer rounds: a second in all.
            if rounds[v].iter().sum::<f64>() * calls[v] as f64 > 1.0 && round > 3 {
                continue;
            }
            let start = Instant::now();
            for _ in 0..calls[v] {
                variant(i);
                i += 1;
            }
            rounds[v].push(start.elapsed().as_secs_f64() / calls[v] as f64);
        }
    }
    let third = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[2]
    };
    rounds.into_iter().map(third).collect()
}

/// One product of each format: cold (weights from memory) for one token, warm for many. `rate` is
/// in GB/s, `peak` in GOP/s.
fn formats(k: &Kernels, filter: &str, rate: f64, peak: f64) {
    println!(
        "\n| rows × columns | cold, GB/s | of read | GOP/s: 1 token | 4 | 32 | 512 | of peak |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for ty in TensorType::all().filter(|ty| quant::is_supported(*ty)) {
        for (rows, cols) in [(2048, 768), (768, 2048), (2048, 4096)] {
            let name = format!("{} {rows} × {cols}", ty.name().to_lowercase());
            if !name.contains(filter) || filter.is_empty() && !TYPES.contains(&ty) {
                continue;
            }
            let many = (400 << 20) / (rows * ty.row_bytes(cols as u64).unwrap() as usize);
            let cold = Weights::new(ty, rows, cols, many);
            let mut variants: Vec<Variant> = Vec::new();
            for (tokens, warm) in [(1, false), (1, true), (4, true), (32, true), (512, true)] {
                let acts = activations(k, act_kind(ty), tokens, cols);
                let (mut out, mut scratch) = (vec![0.0; rows * tokens], Scratch::new());
                let cold = &cold;
                variants.push(Box::new(move |i| {
                    let mat = cold.matrix(if warm { 0 } else { i });
                    // 64 rows say as much of 512 tokens, and are done before an interruption.
                    let mat = if tokens == 512 { mat.row_range(0..64) } else { mat };
                    let out = &mut out[..mat.rows * tokens];
                    k.matmul_all(mat, acts.all(), out, &mut scratch);
                    black_box(out);
                }));
            }
            let seconds = seconds(&mut variants);
            let gbs = cold.size() as f64 / seconds[0] / 1e9;
            let gops = |i: usize, t: usize| 2e-9 * (rows * cols * t) as f64 / seconds[i];
            println!(
                "| {name} | {gbs:.1} | {:.0} % | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} % |",
                100.0 * gbs / rate,
                gops(1, 1),
                gops(2, 4),
                gops(3, 32),
                gops(4, 512) * 64.0 / rows as f64,
                100.0 * gops(4, 512) * 64.0 / rows as f64 / peak,
            );
        }
    }
}

/// The same product by each vector version that this processor has, in turn: weights in cache,
/// GOP/s and how many times the speed of the first version.
fn versions(filter: &str) {
    let found: Vec<_> =
        ["avx2", "avx512", "neon", "dotprod"].into_iter().filter_map(simd::by_name).collect();
    if found.len() < 2 {
        return;
    }
    let names: Vec<_> = found.iter().map(|k| k.name).collect();
    println!("\n| case, GOP/s | {} | ratio |", names.join(" | "));
    println!("|---|{}---|", "---|".repeat(found.len()));
    let (rows, cols) = (768, 2048);
    for ty in TensorType::all().filter(|ty| quant::is_supported(*ty) && ty.block_len() > 1) {
        for tokens in [1, 4, 32, 512] {
            let name = format!("versions {}, {tokens} tokens", ty.name().to_lowercase());
            if !name.contains(filter) {
                continue;
            }
            let weights = Weights::new(ty, rows, cols, 1);
            let rows = if tokens == 512 { 64 } else { rows };
            let mat = weights.matrix(0).row_range(0..rows);
            let acts = &activations(found[0], act_kind(ty), tokens, cols);
            let mut variants: Vec<Variant> = Vec::new();
            for k in &found {
                let (mut out, mut scratch) = (vec![0.0; rows * tokens], Scratch::new());
                variants.push(Box::new(move |_| {
                    k.matmul_all(mat, acts.all(), &mut out, &mut scratch);
                    black_box(&mut out);
                }));
            }
            let seconds = seconds(&mut variants);
            let gops: Vec<_> = seconds
                .iter()
                .map(|s| format!("{:.0}", 2e-9 * (rows * cols * tokens) as f64 / s))
                .collect();
            let ratio = seconds[0] / seconds[seconds.len() - 1];
            println!("| {name} | {} | {ratio:.2} |", gops.join(" | "));
        }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let filter = args.first().map_or("", String::as_str);
    let k = simd::kernels();
    let rate = ReadTest::new(None).expect("memory for the read test").gb_per_second(1).median();
    let peak = Peak::of_kernels(k.name).giga_ops_per_second(1).median();
    println!("kernels: {}; one thread reads {rate:.1} GB/s;", k.name);
    println!("integer peak: {peak:.0} GOP/s (a product and a sum are two)");
    if filter.contains("versions") {
        versions(filter);
        return;
    }
    formats(k, filter, rate, peak);
    versions(filter);
}
