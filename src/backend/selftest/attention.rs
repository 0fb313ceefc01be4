//! The KV cache, in every type, and attention over it.

use super::bench::Bench;
use super::data::Random;
use super::quantize::words;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::acts::{DeviceActs, record_bytes, records_of};
use crate::backend::gpu::attention::{
    Attention, AttentionData, DeviceAttention, DeviceBias, records_fit,
};
use crate::backend::gpu::cache::{CacheStore, DeviceRows};
use crate::backend::ops::{DistanceBias, RowBytes, Rows, RowsMut, row_bytes};
use crate::gguf::TensorType::{self, BF16, F16, F32, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::simd::{ActKind, Activations};

const TYPES: [TensorType; 9] = [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL];

/// The bound of the kernels for prompts, which multiply halves.
const PROMPT_BOUND: f64 = 3e-3;

#[derive(Clone, Copy)]
struct Shape {
    dim: usize,
    /// The length of values that are the first elements of the keys (latent attention).
    latent: Option<usize>,
    n_head_kv: usize,
    /// Heads that share a KV head.
    group: usize,
    past: usize,
    tokens: usize,
    window: Option<usize>,
    chunk: Option<usize>,
    cap: Option<f32>,
    sinks: bool,
    /// An encoder's view: every query sees every position, with a bias by distance.
    all: bool,
    /// Scores fall with the distance, however far it is.
    slopes: bool,
}

/// Distances beyond this have the same bias.
const REACH: usize = 9;

struct Kernels {
    attention: Attention,
    store: CacheStore,
}

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let attention = Attention::load(&bench.gpu)?;
    let kernels = Kernels { attention, store: CacheStore::load(&bench.gpu)? };
    let shapes = bench.shapes(&small(), &[], &large());
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

/// Two KV heads with four heads each; every query sees the positions before it.
fn shape(dim: usize, past: usize, tokens: usize, window: Option<usize>) -> Shape {
    Shape {
        dim,
        latent: None,
        n_head_kv: 2,
        group: 4,
        past,
        tokens,
        window,
        chunk: None,
        cap: None,
        sinks: false,
        all: false,
        slopes: false,
    }
}

fn encoder(dim: usize, tokens: usize) -> Shape {
    Shape { all: true, ..shape(dim, 0, tokens, None) }
}

/// Rows of 512 elements and 64 rotated ones, as in published models.
fn latent(group: usize, past: usize, tokens: usize) -> Shape {
    Shape { latent: Some(512), n_head_kv: 1, group, ..shape(576, past, tokens, None) }
}

/// Each kernel at least once.
fn small() -> Vec<Shape> {
    vec![
        shape(32, 70, 1, None),
        shape(64, 5, 3, Some(4)),
        encoder(32, 11),
        Shape { group: 1, ..shape(128, 20, 2, None) },
        Shape { group: 2, sinks: true, ..shape(256, 9, 2, None) },
        Shape { group: 16, n_head_kv: 1, sinks: true, ..shape(64, 30, 2, Some(16)) },
        latent(8, 12, 1),
        Shape { chunk: Some(8), ..shape(64, 5, 13, None) },
        Shape { cap: Some(0.4), ..shape(32, 21, 3, None) },
        Shape { slopes: true, group: 3, ..shape(32, 70, 3, None) },
    ]
}

fn large() -> Vec<Shape> {
    vec![
        shape(32, 513, 2, None),
        shape(128, 5000, 1, None),
        shape(128, 900, 64, Some(512)),
        encoder(64, 600),
        Shape { group: 8, ..shape(128, 3000, 70, None) },
        Shape { group: 8, sinks: true, ..shape(64, 700, 65, Some(128)) },
        Shape { group: 1, n_head_kv: 16, ..shape(128, 1500, 3, None) },
        Shape { group: 8, ..shape(256, 1025, 66, None) },
        latent(16, 2000, 3),
        latent(128, 600, 1),
        Shape { chunk: Some(700), ..shape(64, 690, 20, None) },
        Shape { cap: Some(0.4), ..shape(128, 700, 9, Some(600)) },
        Shape { slopes: true, group: 6, ..shape(128, 700, 5, None) },
    ]
}

struct Case {
    ty: TensorType,
    shape: Shape,
    q: Vec<f32>,
    /// All positions: [n_ctx, n_head_kv, dim].
    kv: [Vec<f32>; 2],
    /// `kv` in the CPU's form.
    caches: [RowBytes; 2],
}

impl Case {
    fn new(bench: &Bench, ty: TensorType, shape: Shape) -> Case {
        let (mut random, n_ctx) = (Random(shape.past as u64), shape.past + shape.tokens);
        let n = n_ctx * shape.n_head_kv * shape.dim;
        let kv = [random.floats(n), random.floats(n)];
        let caches = [0, 1].map(|i| {
            let mut data = RowBytes::zeroed(row_bytes(ty, n));
            RowsMut { ty, data: &mut data, dim: shape.dim, n_ctx }.store(&bench.cpu, &kv[i], 0);
            data
        });
        let q = random.floats(shape.tokens * shape.n_head_kv * shape.group * shape.dim);
        Case { ty, shape, q, kv, caches }
    }

    fn n_ctx(&self) -> usize {
        self.shape.past + self.shape.tokens
    }

    fn name(&self) -> String {
        let Shape { dim, group, past, tokens, window, chunk, cap, sinks, .. } = self.shape;
        let window = window.map_or(String::new(), |window| format!(", window {window}"));
        let all = if self.shape.all { ", all" } else { "" };
        let slopes = if self.shape.slopes { ", slopes" } else { "" };
        let sinks = if sinks { ", sinks" } else { "" };
        let chunk = chunk.map_or(String::new(), |chunk| format!(", chunks of {chunk}"));
        let cap = cap.map_or(String::new(), |cap| format!(", capped at {cap}"));
        let seen = format!("{window}{chunk}{cap}{sinks}{all}{slopes}");
        format!("{tokens}×{dim} after {past}, {group} heads on one{seen}")
    }

    fn rows<'a>(&self, buffer: &'a DeviceBuffer) -> DeviceRows<'a> {
        let dim = self.shape.dim;
        let (data, heads) = (buffer.all(), self.shape.n_head_kv);
        DeviceRows { ty: self.ty, data, heads, dim, stride: dim, n_ctx: self.n_ctx() }
    }

    fn stored(&self, bench: &Bench, kernels: &Kernels, i: usize) -> Result<DeviceBuffer> {
        let cache = bench.empty(self.caches[i].len())?;
        let (x, past) = (bench.up_f32(&self.kv[i])?, bench.up_u32(&[0])?);
        let rows = self.rows(&cache);
        kernels.store.store(&bench.stream, x.all(), self.n_ctx(), past.all(), rows)?;
        bench.stream.synchronize()?;
        Ok(cache)
    }

    fn compare_cache(&self, bench: &Bench, kernels: &Kernels, row: &mut Row) -> Result<()> {
        let cache = self.stored(bench, kernels, 0)?;
        row.words(self.name(), &bench.down(&cache)?, &self.caches[0]);
        Ok(())
    }

    fn bias(&self, n_head: usize) -> Option<DistanceBias> {
        let of = |head: usize, distance: isize| (head as f32 + 0.3 * distance as f32).cos();
        match self.shape.slopes {
            true => Some(DistanceBias::alibi(n_head)),
            false => self.shape.all.then(|| DistanceBias::new(n_head, REACH, of)),
        }
    }

    /// With the exact kernels, or with those for prompts, on tensor cores.
    fn compare(&self, bench: &Bench, kernels: &Kernels, row: &mut Row, prompt: bool) -> Result<()> {
        let Shape { dim, latent, n_head_kv, group, past, tokens, window, chunk, cap, .. } =
            self.shape;
        let (n_head, n_ctx, all) = (n_head_kv * group, self.n_ctx(), self.shape.all);
        let v_dim = latent.unwrap_or(dim);
        let scale = 1.0 / (dim as f32).sqrt();
        let bias = self.bias(n_head);
        let [k, v] = self.caches.each_ref();
        let [k, v] = [k, v].map(|data| Rows { ty: self.ty, data, dim, stride: dim, n_ctx });
        let v = latent.map_or(v, |v_dim| k.narrow(v_dim));
        let sinks: Vec<f32> = (0..n_head).map(|head| 0.4 * (head as f32).sin()).collect();
        let shape = AttentionShape {
            n_head,
            n_head_kv,
            first: past,
            all: all.then_some(n_ctx),
            window,
            chunk,
            scale,
            cap,
            sinks: self.shape.sinks.then_some(&sinks),
            bias: bias.as_ref(),
        };
        let mut expected = vec![0.0; tokens * n_head * v_dim];
        bench.cpu.attention(shape, &self.q, k, v, &mut expected);

        let [k, v] = [0, 1].map(|i| self.stored(bench, kernels, i));
        let up = |bias: &DistanceBias| match self.shape.slopes {
            true => bench.up_f32(bias.slopes()),
            false => bench.up_f32(bias.values()),
        };
        let (values, sinks) = (bias.as_ref().map(up).transpose()?, bench.up_f32(&sinks)?);
        let (k, v, past) = (k?, v?, bench.up_u32(&[past as u32])?);
        let shape = DeviceAttention {
            n_head,
            n_head_kv,
            past: past.all(),
            max_seen: n_ctx,
            all: all.then_some(n_ctx),
            window,
            chunk,
            scale,
            cap,
            sinks: self.shape.sinks.then(|| sinks.all()),
            bias: values.as_ref().map(|values| match self.shape.slopes {
                true => DeviceBias::Slopes(values.all()),
                false => DeviceBias::Near { reach: REACH, values: values.all() },
            }),
            prompt,
            lists: 0,
        };
        let work = bench.empty(Attention::work_bytes(n_head, v_dim, n_ctx, tokens))?;
        let (q, out) = (bench.up_f32(&self.q)?, bench.empty(4 * expected.len())?);
        let (k, v, stream) = (self.rows(&k), self.rows(&v), &bench.stream);
        let v = latent.map_or(v, |v_dim| k.narrow(v_dim));
        let attention = &kernels.attention;
        let (q, work) = (q.all(), work.all());
        let data = AttentionData { tokens, q, k, v, work, out: out.all(), records: None };
        attention.launch(stream, &shape, data)?;
        let got = bench.down_f32(&out)?;
        match prompt {
            true => row.near(self.name(), &got, &expected, PROMPT_BOUND),
            false => row.bits(self.name(), &got, &expected),
        }
        self.compare_records(bench, row, |records| {
            attention.launch(stream, &shape, AttentionData { records, ..data })?;
            bench.down_f32(&out)
        })
    }

    /// Results that are stored as records besides.
    fn compare_records(
        &self,
        bench: &Bench,
        row: &mut Row,
        launch: impl Fn(Option<DeviceActs>) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let Shape { dim, latent, n_head_kv, group, tokens, .. } = self.shape;
        let (n_head, v_dim) = (n_head_kv * group, latent.unwrap_or(dim));
        let cols = n_head * v_dim;
        let kinds = [ActKind::Q8_0, ActKind::Q8_K].into_iter();
        for kind in kinds.filter(|kind| records_fit(*kind, n_head, v_dim)) {
            let memory = bench.up(&vec![0; tokens * record_bytes(kind, cols)])?;
            let got = launch(Some(DeviceActs::new(kind, tokens, cols, memory.all())))?;
            let mut acts = Activations::new();
            acts.resize(kind, tokens, cols);
            acts.quantize_rows(bench.cpu.kernels, 0..tokens, &got, cols);
            let expected = words(kind, &records_of(acts.all()));
            let name = format!("{} as {kind:?}", self.name());
            row.words(name, &words(kind, &bench.down(&memory)?), &expected);
        }
        Ok(())
    }
}
