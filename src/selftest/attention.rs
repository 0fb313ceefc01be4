//! The KV cache, in every type, and attention over it.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::cpu::attention::{
    AttentionShape, DistanceBias, Elements, ElementsMut, Rows, RowsMut,
};
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::attention::{Attention, DeviceAttention, DeviceBias};
use crate::backend::gpu::cache::{CacheStore, DeviceRows};
use crate::gguf::TensorType;

const TYPES: [TensorType; 4] =
    [TensorType::F32, TensorType::F16, TensorType::BF16, TensorType::Q8_0];

/// Of the kernels of prompts, whose products are of halves.
const PROMPT_BOUND: f64 = 3e-3;

/// Heads that share a KV head.
const GROUP: usize = 4;
const N_HEAD_KV: usize = 2;

#[derive(Clone, Copy)]
struct Shape {
    dim: usize,
    past: usize,
    tokens: usize,
    window: Option<usize>,
    /// As an encoder: every query sees every position, with a bias by how far it is.
    all: bool,
}

/// How far apart key and query can be and still differ in their bias.
const REACH: usize = 9;

struct Kernels {
    attention: Attention,
    store: CacheStore,
}

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let attention = Attention::load(&bench.gpu)?;
    let kernels = Kernels { attention, store: CacheStore::load(&bench.gpu)? };
    let shape = |dim, past, tokens, window| Shape { dim, past, tokens, window, all: false };
    let encoder = |dim, tokens| Shape { all: true, ..shape(dim, 0, tokens, None) };
    let small = [shape(32, 70, 1, None), shape(64, 5, 3, Some(4)), encoder(32, 11)];
    let large = [
        shape(32, 513, 2, None),
        shape(128, 5000, 1, None),
        shape(128, 900, 64, Some(512)),
        encoder(64, 600),
    ];
    let shapes = bench.shapes(&small, &large);
    for ty in TYPES {
        let cases: Vec<Case> = shapes.iter().map(|shape| Case::new(bench, ty, *shape)).collect();
        report.row("cache_store", ty, |row| {
            cases.iter().try_for_each(|case| case.compare_cache(bench, &kernels, row))
        });
        report.row("attention", ty, |row| {
            cases.iter().try_for_each(|case| case.compare(bench, &kernels, row, false))
        });
        report.row("attention_prompt", ty, |row| {
            cases.iter().try_for_each(|case| case.compare(bench, &kernels, row, true))
        });
    }
    Ok(())
}

/// One layer's keys or values on the CPU.
enum Cache {
    Floats(Vec<f32>),
    Halves(TensorType, Vec<u16>),
    Blocks(Vec<u8>),
}

impl Cache {
    fn new(ty: TensorType, n: usize) -> Cache {
        match ty {
            TensorType::F32 => Cache::Floats(vec![0.0; n]),
            TensorType::Q8_0 => Cache::Blocks(vec![0; n / ty.block_len() * ty.block_bytes()]),
            ty => Cache::Halves(ty, vec![0; n]),
        }
    }

    fn elements(&self) -> Elements<'_> {
        match self {
            Cache::Floats(data) => Elements::F32(data),
            Cache::Halves(TensorType::F16, data) => Elements::F16(data),
            Cache::Halves(_, data) => Elements::BF16(data),
            Cache::Blocks(data) => Elements::Q8_0(data),
        }
    }

    fn elements_mut(&mut self) -> ElementsMut<'_> {
        match self {
            Cache::Floats(data) => ElementsMut::F32(data),
            Cache::Halves(TensorType::F16, data) => ElementsMut::F16(data),
            Cache::Halves(_, data) => ElementsMut::BF16(data),
            Cache::Blocks(data) => ElementsMut::Q8_0(data),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Cache::Floats(data) => data.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Cache::Halves(_, data) => data.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Cache::Blocks(data) => data.clone(),
        }
    }
}

struct Case {
    ty: TensorType,
    shape: Shape,
    q: Vec<f32>,
    /// Of all positions: [n_ctx, N_HEAD_KV, dim].
    kv: [Vec<f32>; 2],
    caches: [Cache; 2],
}

impl Case {
    fn new(bench: &Bench, ty: TensorType, shape: Shape) -> Case {
        let (mut random, n_ctx) = (Random(shape.past as u64), shape.past + shape.tokens);
        let n = n_ctx * N_HEAD_KV * shape.dim;
        let kv = [random.floats(n), random.floats(n)];
        let caches = [0, 1].map(|i| {
            let mut cache = Cache::new(ty, n);
            let data = cache.elements_mut();
            RowsMut { data, dim: shape.dim, n_ctx }.store(&bench.cpu, &kv[i], 0);
            cache
        });
        let q = random.floats(shape.tokens * N_HEAD_KV * GROUP * shape.dim);
        Case { ty, shape, q, kv, caches }
    }

    fn n_ctx(&self) -> usize {
        self.shape.past + self.shape.tokens
    }

    fn name(&self) -> String {
        let Shape { dim, past, tokens, window, all } = self.shape;
        let window = window.map_or(String::new(), |window| format!(", window {window}"));
        let all = if all { ", all" } else { "" };
        format!("{tokens}×{dim} after {past}{window}{all}")
    }

    fn rows<'a>(&self, buffer: &'a DeviceBuffer) -> DeviceRows<'a> {
        let dim = self.shape.dim;
        let (data, heads) = (buffer.all(), N_HEAD_KV);
        DeviceRows { ty: self.ty, data, heads, dim, stride: dim, n_ctx: self.n_ctx() }
    }

    fn stored(&self, bench: &Bench, kernels: &Kernels, i: usize) -> Result<DeviceBuffer> {
        let cache = bench.empty(self.caches[i].bytes().len())?;
        let (x, past) = (bench.up_f32(&self.kv[i])?, bench.up_u32(&[0])?);
        let rows = self.rows(&cache);
        kernels.store.store(&bench.stream, x.all(), self.n_ctx(), past.all(), rows)?;
        bench.stream.synchronize()?;
        Ok(cache)
    }

    fn compare_cache(&self, bench: &Bench, kernels: &Kernels, row: &mut Row) -> Result<()> {
        let cache = self.stored(bench, kernels, 0)?;
        row.words(self.name(), &bench.down(&cache)?, &self.caches[0].bytes());
        Ok(())
    }

    /// By the kernels that have the twin's bits, or by those of prompts, on tensor cores.
    fn compare(&self, bench: &Bench, kernels: &Kernels, row: &mut Row, prompt: bool) -> Result<()> {
        let Shape { dim, past, tokens, window, all } = self.shape;
        let (n_head, n_ctx) = (N_HEAD_KV * GROUP, self.n_ctx());
        let scale = 1.0 / (dim as f32).sqrt();
        let of = |head: usize, distance: isize| (head as f32 + 0.3 * distance as f32).cos();
        let bias = DistanceBias::new(n_head, REACH, of);
        let [k, v] = self.caches.each_ref();
        let [k, v] = [k, v].map(|c| Rows { data: c.elements(), dim, stride: dim, n_ctx });
        let shape = AttentionShape {
            n_head,
            n_head_kv: N_HEAD_KV,
            first: past,
            all: all.then_some(n_ctx),
            window,
            scale,
            sinks: None,
            bias: all.then_some(&bias),
        };
        let mut expected = vec![0.0; tokens * n_head * dim];
        bench.cpu.attention(shape, &self.q, k, v, &mut expected);

        let [k, v] = [0, 1].map(|i| self.stored(bench, kernels, i));
        let values = bench.up_f32(bias.values())?;
        let (k, v, past) = (k?, v?, bench.up_u32(&[past as u32])?);
        let shape = DeviceAttention {
            n_head,
            n_head_kv: N_HEAD_KV,
            past: past.all(),
            max_seen: n_ctx,
            all: all.then_some(n_ctx),
            window,
            scale,
            sinks: None,
            bias: all.then_some(DeviceBias { reach: REACH, values: values.all() }),
            prompt,
        };
        let work = bench.empty(Attention::work_bytes(n_head, dim, n_ctx, tokens))?;
        let (q, out) = (bench.up_f32(&self.q)?, bench.empty(4 * expected.len())?);
        let (k, v, stream) = (self.rows(&k), self.rows(&v), &bench.stream);
        let attention = &kernels.attention;
        attention.launch(stream, &shape, q.all(), tokens, k, v, work.all(), out.all())?;
        let got = bench.down_f32(&out)?;
        match prompt {
            true => row.near(self.name(), &got, &expected, PROMPT_BOUND),
            false => row.bits(self.name(), &got, &expected),
        }
        Ok(())
    }
}
