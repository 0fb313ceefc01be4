//! Queries, keys and values between their products and attention.

use super::operands::{CACHE_TYPES, Cached};
use super::{Bench, Mirror, Random, try_map};
use crate::Result;
use crate::backend::cpu::rope::RopeTable;
use crate::backend::gpu::attention_inputs::{AttentionInputs, HeadRows, InputSteps, NewRows};
use crate::backend::gpu::rope::DeviceCosSin;
use crate::backend::ops::{Frequencies, RopePairing, RopeShape};
use crate::gguf::TensorType;

const EPS: f32 = 1e-6;
const LIMIT: f32 = 0.4;
/// Positions of the cache, and the first token's.
const N_CTX: usize = 9;
const PAST: usize = 5;

/// Tokens, heads of queries and of keys, and their elements.
type Shape = [usize; 4];

/// The steps of a case.
#[derive(Clone, Copy, Default)]
struct Steps {
    /// Adjacent elements are pairs, else those of two halves.
    is_adjacent: bool,
    pairs: usize,
    offset: usize,
    has_norms: bool,
    norm_last: bool,
    is_limited: bool,
    has_factors: bool,
    has_rows: bool,
    /// Queries have as many numbers of something else between their heads.
    has_gaps: bool,
}

pub fn check(bench: &Bench) -> Result<()> {
    let inputs = AttentionInputs::load(&bench.gpu)?;
    let plain = Steps { pairs: 16, has_rows: true, ..Steps::default() };
    let all = Steps { has_norms: true, is_limited: true, has_factors: true, ..plain };
    let cases = [
        plain,
        Steps { has_norms: true, pairs: 0, ..plain },
        all,
        Steps { norm_last: true, is_adjacent: true, offset: 8, pairs: 5, ..all },
        Steps { has_rows: false, has_gaps: true, ..all },
    ];
    let shapes: Vec<Shape> = bench.shapes(&[[1, 5, 2, 32], [6, 3, 1, 64]], &[], &[[4, 32, 4, 128]]);
    for ty in CACHE_TYPES {
        bench.each("attention_inputs", ty, cases.into_iter().enumerate(), |(i, steps)| {
            let of = |shape: &Shape| Case { ty, shape: *shape, steps };
            shapes.iter().try_for_each(|shape| of(shape).compare(bench, &inputs, i))
        });
    }
    Ok(())
}

/// The places of heads of `dim` that are `step` apart, in tokens that are `stride` apart.
fn places(
    [tokens, stride, first]: [usize; 3],
    [heads, step, dim]: [usize; 3],
) -> impl Iterator<Item = usize> {
    let head = move |t: usize, head: usize| {
        let start = t * stride + first + head * step;
        start..start + dim
    };
    (0..tokens).flat_map(move |t| (0..heads).flat_map(move |i| head(t, i)))
}

struct Case {
    ty: TensorType,
    shape: Shape,
    steps: Steps,
}

impl Case {
    fn rope_shape(&self, offset: usize) -> RopeShape {
        use RopePairing::{Adjacent, Halves};
        let pairing = if self.steps.is_adjacent { Adjacent } else { Halves };
        RopeShape { head_dim: self.shape[3], offset, pairing }
    }

    /// Rotations and factors of the tokens.
    fn tables(&self) -> [RopeTable; 2] {
        let [tokens, _, _, dim] = self.shape;
        let (mut turns, mut factors) = (RopeTable::default(), RopeTable::default());
        let angles = (0..self.steps.pairs).map(|i| 0.9f32.powi(i as i32)).collect();
        turns.fill(&Frequencies::new(angles, 1.25), PAST, tokens);
        factors.push_pairs(dim / 2, |at| [1.0 + 0.1 * at as f32, 0.0], PAST..PAST + tokens);
        [turns, factors]
    }

    /// The twin's steps, of queries or of keys or values.
    fn twin(&self, bench: &Bench, x: &mut [f32], weight: &[f32], tables: [Option<&RopeTable>; 2]) {
        let Steps { has_norms, norm_last, is_limited, offset, .. } = self.steps;
        if is_limited {
            x.iter_mut().for_each(|x| *x = x.clamp(-LIMIT, LIMIT));
        }
        let is_last = norm_last && tables[0].is_some();
        if has_norms && !is_last {
            bench.cpu.rms_norm_heads(x, weight, EPS);
        }
        if let Some(table) = tables[0] {
            bench.cpu.rope(x, self.rope_shape(offset), table);
        }
        if has_norms && is_last {
            bench.cpu.rms_norm_heads(x, weight, EPS);
        }
        if let Some(factors) = tables[1] {
            bench.cpu.rope(x, self.rope_shape(0), factors);
        }
    }

    /// The rows of a token that fit, in a cache of zeros.
    fn cached(&self, bench: &Bench, x: &[f32]) -> Cached {
        let [_, _, heads, dim] = self.shape;
        let x = &x[..x.len().min((N_CTX - PAST) * heads * dim)];
        Cached::new(bench, self.ty, [heads, N_CTX, dim], x, PAST)
    }

    fn compare(&self, bench: &Bench, inputs: &AttentionInputs, case: usize) -> Result<()> {
        let ([tokens, n_head, heads, dim], steps) = (self.shape, self.steps);
        let mut random = Random((7 * dim + case) as u64);
        let step = if steps.has_gaps { 2 * dim } else { dim };
        // Queries, keys and values of a token side by side.
        let stride = n_head * step + 2 * heads * dim;
        let [products] = bench.floats(&mut random, [tokens * stride])?;
        let weights = bench.floats(&mut random, [dim; 3])?;
        let columns = |first: usize, heads: usize, step: usize| {
            let places = places([tokens, stride, first], [heads, step, dim]);
            places.map(|at| products[at]).collect::<Vec<f32>>()
        };
        let (k_first, v_first) = (n_head * step, n_head * step + heads * dim);
        let mut q = columns(0, n_head, step);
        let [mut k, mut v] = [k_first, v_first].map(|first| columns(first, heads, dim));
        let [turns, factors] = self.tables();
        let tempered = steps.has_factors.then_some(&factors);
        self.twin(bench, &mut q, &weights[0], [Some(&turns), tempered]);
        self.twin(bench, &mut k, &weights[1], [Some(&turns), None]);
        self.twin(bench, &mut v, &weights[2], [None, None]);
        let expected = [&k, &v].map(|x| self.cached(bench, x));

        let past = bench.word(PAST)?;
        // No buffer is empty.
        let turns = bench.up([turns.turns().as_flattened(), &[0.0; 2]].concat())?;
        let factors = bench.up(factors.turns().as_flattened().to_vec())?;
        let caches: [Mirror<u8>; 2] =
            try_map(expected.each_ref(), |cached| bench.up(vec![0; cached.bytes.len()]))?;
        let [keys, values] = [0, 1].map(|i| expected[i].at(&caches[i].device));
        let out = bench.empty(4 * q.len())?;
        let from = |first: usize, step| HeadRows {
            data: products.gpu().slice(4 * first..4 * products.len()),
            stride,
            step,
        };
        let (new_k, new_v) = (from(k_first, dim), from(v_first, dim));
        let new = NewRows { k: new_k, v: new_v, keys, values, past: past.gpu() };
        let table = |shape, data, n_pairs| (shape, DeviceCosSin { data, n_pairs, back: false });
        let device_steps = InputSteps {
            norms: weights.each_ref().map(|weight| steps.has_norms.then(|| weight.gpu())),
            eps: EPS,
            norm_last: steps.norm_last,
            limit: steps.is_limited.then_some(LIMIT),
            rope: Some(table(self.rope_shape(steps.offset), turns.gpu(), steps.pairs)),
            factors: steps.has_factors.then(|| table(self.rope_shape(0), factors.gpu(), dim / 2)),
        };
        let (sizes, new) = ([tokens, n_head, dim], steps.has_rows.then_some(new));
        inputs.launch(&bench.stream, sizes, from(0, step), new, &device_steps, out.all())?;
        let name = format!("{tokens}×{n_head}×{dim}, case {case}");
        bench.equal_to(format!("{name}, queries"), &out, &q)?;
        let caches = caches.iter().zip(&expected).zip(["keys", "values"]);
        for ((got, expected), what) in caches.filter(|_| steps.has_rows) {
            bench.equal_to(format!("{name}, {what}"), &got.device, &expected.bytes[..])?;
        }
        Ok(())
    }
}
