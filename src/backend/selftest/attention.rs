//! The KV cache, in every type, and attention over it.

use super::operands::{CACHE_TYPES, Cached};
use super::quantize::Records;
use super::{Bench, Random, try_map};
use crate::Result;
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::attention::{
    Attention, AttentionData, DeviceAttention, DeviceBias, records_fit,
};
use crate::backend::gpu::cache::CacheStore;
use crate::backend::ops::DistanceBias;
use crate::gguf::TensorType;
use crate::simd::ActKind;

/// The bound of the kernels for prompts, which multiply halves.
const PROMPT_BOUND: f64 = 3e-3;

#[derive(Clone, Copy, Default)]
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

pub fn check(bench: &Bench) -> Result<()> {
    let attention = Attention::load(&bench.gpu)?;
    let kernels = Kernels { attention, store: CacheStore::load(&bench.gpu)? };
    let shapes = bench.shapes(&small(), &[], &large());
    for ty in CACHE_TYPES {
        let cases: Vec<Case> = shapes.iter().map(|shape| Case::new(bench, ty, *shape)).collect();
        bench.each("cache_store", ty, &cases, |case| {
            let [keys, _] = &case.caches;
            bench.equal_to(case.name(), &case.stored(bench, &kernels, 0)?, &keys.bytes[..])
        });
        bench.each("attention", ty, &cases, |case| case.compare(bench, &kernels, false));
        bench.each("attention_prompt", ty, &cases, |case| case.compare(bench, &kernels, true));
    }
    Ok(())
}

/// Two KV heads with four heads each; every query sees the positions before it.
fn shape(dim: usize, past: usize, tokens: usize, window: Option<usize>) -> Shape {
    Shape { dim, n_head_kv: 2, group: 4, past, tokens, window, ..Shape::default() }
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
    shape: Shape,
    q: Vec<f32>,
    /// All positions: [n_head_kv, n_ctx, dim].
    kv: [Vec<f32>; 2],
    /// `kv` in the CPU's form.
    caches: [Cached; 2],
}

impl Case {
    fn new(bench: &Bench, ty: TensorType, shape: Shape) -> Case {
        let (mut random, n_ctx) = (Random(shape.past as u64), shape.past + shape.tokens);
        let sizes = [shape.n_head_kv, n_ctx, shape.dim];
        let kv = random.vectors([sizes.iter().product(); 2]);
        let caches = kv.each_ref().map(|x| Cached::new(bench, ty, sizes, x, 0));
        let q = random.floats(shape.tokens * shape.n_head_kv * shape.group * shape.dim);
        Case { shape, q, kv, caches }
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

    /// Keys or values as the device stores them.
    fn stored(&self, bench: &Bench, kernels: &Kernels, i: usize) -> Result<DeviceBuffer> {
        let cached = &self.caches[i];
        let (x, past) = (bench.up(self.kv[i].to_vec())?, bench.word(0)?);
        let cache = bench.empty(cached.bytes.len())?;
        let rows = cached.at(&cache);
        kernels.store.store(&bench.stream, x.gpu(), cached.n_ctx, past.gpu(), rows)?;
        bench.stream.synchronize()?;
        Ok(cache)
    }

    fn bias(&self, n_head: usize) -> Option<DistanceBias> {
        let of = |head: usize, distance: isize| (head as f32 + 0.3 * distance as f32).cos();
        match self.shape.slopes {
            true => Some(DistanceBias::alibi(n_head)),
            false => self.shape.all.then(|| DistanceBias::new(n_head, REACH, of)),
        }
    }

    /// With the exact kernels, or with those for prompts, on tensor cores.
    fn compare(&self, bench: &Bench, kernels: &Kernels, prompt: bool) -> Result<()> {
        let Shape { dim, latent, n_head_kv, group, past, tokens, window, chunk, cap, .. } =
            self.shape;
        let (n_head, n_ctx, v_dim) = (n_head_kv * group, past + tokens, latent.unwrap_or(dim));
        let (all, scale) = (self.shape.all.then_some(n_ctx), 1.0 / (dim as f32).sqrt());
        let bias = self.bias(n_head);
        let sinks = (0..n_head).map(|head| 0.4 * (head as f32).sin());
        let sinks = bench.up(sinks)?;
        let [k, v] = self.caches.each_ref().map(Cached::cpu);
        let v = latent.map_or(v, |v_dim| k.narrow(v_dim));
        let shape = AttentionShape {
            n_head,
            n_head_kv,
            first: past,
            all,
            window,
            chunk,
            scale,
            cap,
            sinks: self.shape.sinks.then_some(&sinks),
            bias: bias.as_ref(),
        };
        let mut expected = vec![0.0; tokens * n_head * v_dim];
        bench.cpu.attention(shape, &self.q, k, v, &mut expected);

        let slopes = self.shape.slopes;
        let up = |bias: &DistanceBias| {
            bench.up(if slopes { bias.slopes() } else { bias.values() }.to_vec())
        };
        let (bias, past) = (bias.as_ref().map(up).transpose()?, bench.word(past)?);
        let shape = DeviceAttention {
            n_head,
            n_head_kv,
            past: past.gpu(),
            max_seen: n_ctx,
            all,
            window,
            chunk,
            scale,
            cap,
            sinks: self.shape.sinks.then(|| sinks.gpu()),
            bias: bias.as_ref().map(|values| match slopes {
                true => DeviceBias::Slopes(values.gpu()),
                false => DeviceBias::Near { reach: REACH, values: values.gpu() },
            }),
            prompt,
            lists: 0,
        };
        let caches = try_map([0, 1], |i| self.stored(bench, kernels, i))?;
        let [k, v] = [0, 1].map(|i| self.caches[i].at(&caches[i]));
        let v = latent.map_or(v, |v_dim| k.narrow(v_dim));
        let work = bench.empty(Attention::work_bytes(n_head, v_dim, n_ctx, tokens))?;
        let (q, out) = (bench.up(self.q.to_vec())?, bench.empty(4 * expected.len())?);
        let (q, work) = (q.gpu(), work.all());
        let data = AttentionData { tokens, q, k, v, work, out: out.all(), records: None };
        kernels.attention.launch(&bench.stream, &shape, data)?;
        match prompt {
            true => bench.near(self.name(), &bench.down(&out)?, &expected, PROMPT_BOUND)?,
            false => bench.equal_to(self.name(), &out, &expected)?,
        }
        // Results that are stored as records besides.
        let kinds = [ActKind::Q8_0, ActKind::Q8_K].into_iter();
        for kind in kinds.filter(|kind| records_fit(*kind, n_head, v_dim)) {
            let records = Records::new(bench, kind, tokens, n_head * v_dim)?;
            let data = AttentionData { records: Some(records.gpu()), ..data };
            kernels.attention.launch(&bench.stream, &shape, data)?;
            records.equal(bench, format!("{} as {kind:?}", self.name()), &bench.down(&out)?)?;
        }
        Ok(())
    }
}
