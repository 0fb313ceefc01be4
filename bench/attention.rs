//! Attention of one layer: tokens × positions, GFLOP/s (a product and a sum are two), over caches
//! of some types.
//!
//!     cargo bench --bench attention               # one thread, a table in Markdown
//!
//! Variants of a case run in turn, round after round, so that other work on the machine meets all
//! of them alike; each shows its fastest round.

use moeba::backend::cpu::Cpu;
use moeba::backend::cpu::attention::AttentionShape;
use moeba::backend::ops::{RowBytes, Rows, RowsMut, row_bytes};
use moeba::gguf::TensorType::{self, F16, IQ4_NL, Q4_0, Q5_1, Q8_0};
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 7;
const TYPES: [TensorType; 5] = [F16, Q8_0, Q4_0, Q5_1, IQ4_NL];

struct Heads {
    name: &'static str,
    n_head: usize,
    n_head_kv: usize,
    k_dim: usize,
    v_dim: usize,
}

const HEADS: [Heads; 3] = [
    Heads { name: "32 heads on 4, 128", n_head: 32, n_head_kv: 4, k_dim: 128, v_dim: 128 },
    Heads { name: "16 heads on 16, 128", n_head: 16, n_head_kv: 16, k_dim: 128, v_dim: 128 },
    Heads { name: "128 heads on 1, 576", n_head: 128, n_head_kv: 1, k_dim: 576, v_dim: 512 },
];

fn values(n: usize) -> Vec<f32> {
    let mut seed = 1u64;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Over each type: GFLOP/s.
fn measure(cpu: &Cpu, heads: &Heads, tokens: usize, n_ctx: usize) -> [f64; TYPES.len()] {
    let q = values(tokens * heads.n_head * heads.k_dim);
    let x = values(n_ctx * heads.n_head_kv * heads.k_dim);
    let dim = heads.k_dim;
    let caches = TYPES.map(|ty| {
        let mut data = RowBytes::zeroed(row_bytes(ty, x.len()));
        RowsMut { ty, data: &mut data, dim, n_ctx }.store(cpu, &x, 0);
        data
    });
    let shape = AttentionShape {
        n_head: heads.n_head,
        n_head_kv: heads.n_head_kv,
        first: n_ctx - tokens,
        all: None,
        window: None,
        chunk: None,
        cap: None,
        scale: 1.0 / (dim as f32).sqrt(),
        sinks: None,
        bias: None,
    };
    let mut out = vec![0.0; tokens * heads.n_head * heads.v_dim];
    let mut fastest = TYPES.map(|_| f64::INFINITY);
    for _ in 0..ROUNDS {
        for (i, fastest) in fastest.iter_mut().enumerate() {
            let start = Instant::now();
            let (ty, data) = (TYPES[i], &caches[i]);
            let rows = Rows { ty, data, dim, stride: dim, n_ctx };
            cpu.attention(shape, &q, rows, rows.narrow(heads.v_dim), &mut out);
            black_box(&mut out);
            *fastest = fastest.min(start.elapsed().as_secs_f64());
        }
    }
    let pairs: usize = (0..tokens).map(|t| n_ctx - tokens + t + 1).sum();
    let flops = (2 * pairs * heads.n_head * (heads.k_dim + heads.v_dim)) as f64;
    fastest.map(|seconds| flops / seconds / 1e9)
}

fn main() {
    let cpu = Cpu::new(1);
    let names = TYPES.map(|ty| format!(" {} |", ty.name().to_lowercase())).concat();
    println!("| heads | tokens | positions |{names}");
    println!("|---|---|---|{}", "---|".repeat(TYPES.len()));
    for heads in &HEADS {
        for (tokens, n_ctx) in
            [(1, 512), (1, 16384), (32, 512), (512, 512), (512, 2048), (64, 8192)]
        {
            let speeds = measure(&cpu, heads, tokens, n_ctx).map(|speed| format!(" {speed:.1} |"));
            println!("| {} | {tokens} | {n_ctx} |{}", heads.name, speeds.concat());
        }
    }
}
