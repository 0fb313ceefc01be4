//! Queries, keys and values between their products and attention.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::cpu::rope::RopeTable;
use crate::backend::gpu::attention_inputs::{AttentionInputs, HeadRows, InputSteps, NewRows};
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::rope::DeviceCosSin;
use crate::backend::ops::{Frequencies, RopePairing, RopeShape, RowBytes, RowsMut, row_bytes};
use crate::gguf::TensorType::{self, BF16, F16, F32, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};

const EPS: f32 = 1e-6;
const LIMIT: f32 = 0.4;
/// Positions of the cache, and the first token's.
const N_CTX: usize = 9;
const PAST: usize = 5;

/// Tokens, heads of queries and of keys, and their elements.
type Shape = [usize; 4];

/// The steps of a case.
#[derive(Clone, Copy)]
struct Steps {
    pairing: RopePairing,
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

const PLAIN: Steps = Steps {
    pairing: RopePairing::Halves,
    pairs: 16,
    offset: 0,
    has_norms: false,
    norm_last: false,
    is_limited: false,
    has_factors: false,
    has_rows: true,
    has_gaps: false,
};

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let inputs = AttentionInputs::load(&bench.gpu)?;
    let all = Steps { has_norms: true, is_limited: true, has_factors: true, ..PLAIN };
    let cases = [
        PLAIN,
        Steps { has_norms: true, pairs: 0, ..PLAIN },
        all,
        Steps { norm_last: true, pairing: RopePairing::Adjacent, offset: 8, pairs: 5, ..all },
        Steps { has_rows: false, has_gaps: true, ..all },
    ];
    let shapes: Vec<Shape> = bench.shapes(&[[1, 5, 2, 32], [6, 3, 1, 64]], &[], &[[4, 32, 4, 128]]);
    for ty in [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL] {
        report.row("attention_inputs", ty, |row| {
            for (i, steps) in cases.into_iter().enumerate() {
                for shape in shapes.iter().copied() {
                    Case { ty, shape, steps }.compare(bench, &inputs, row, i)?;
                }
            }
            Ok(())
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
        RopeShape { head_dim: self.shape[3], offset, pairing: self.steps.pairing }
    }

    /// Rotations and factors of the tokens.
    fn tables(&self) -> [RopeTable; 2] {
        let [tokens, _, _, dim] = self.shape;
        let (mut turns, mut factors) = (RopeTable::default(), RopeTable::default());
        let angles = (0..self.steps.pairs).map(|i| 0.9f32.powi(i as i32)).collect();
        turns.fill(&Frequencies::new(angles, 1.25), PAST, tokens);
        factors.push_factors(dim / 2, |at| 1.0 + 0.1 * at as f32, PAST..PAST + tokens);
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

    fn cached(&self, bench: &Bench, x: &[f32]) -> RowBytes {
        let [_, _, heads, dim] = self.shape;
        let mut data = RowBytes::zeroed(row_bytes(self.ty, N_CTX * heads * dim));
        let n = (N_CTX - PAST) * heads * dim;
        let x = &x[..n.min(x.len())];
        RowsMut { ty: self.ty, data: &mut data, dim, n_ctx: N_CTX }.store(&bench.cpu, x, PAST);
        data
    }

    fn compare(
        &self,
        bench: &Bench,
        inputs: &AttentionInputs,
        row: &mut Row,
        case: usize,
    ) -> Result<()> {
        let ([tokens, n_head, heads, dim], steps) = (self.shape, self.steps);
        let mut random = Random((7 * dim + case) as u64);
        let step = if steps.has_gaps { 2 * dim } else { dim };
        // Queries, keys and values of a token side by side.
        let stride = n_head * step + 2 * heads * dim;
        let products = random.floats(tokens * stride);
        let weights = [0; 3].map(|_| random.floats(dim));
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

        let (products, past) = (bench.up_f32(&products)?, bench.up_u32(&[PAST as u32])?);
        let [a, b, c] = weights.map(|weight| bench.up_f32(&weight));
        let weights = [a?, b?, c?];
        // No buffer is empty.
        let turns = [turns.turns().as_flattened(), &[0.0; 2]].concat();
        let turns = bench.up_f32(&turns)?;
        let factors = bench.up_f32(factors.turns().as_flattened())?;
        let [keys, values] = expected.each_ref().map(|bytes| bench.up(&vec![0; bytes.len()]));
        let (keys, values, out) = (keys?, values?, bench.empty(4 * q.len())?);
        let rows = |data| DeviceRows { ty: self.ty, data, heads, dim, stride: dim, n_ctx: N_CTX };
        let from = |first: usize, step| HeadRows {
            data: products.slice(4 * first..products.len()),
            stride,
            step,
        };
        let new = NewRows {
            k: from(k_first, dim),
            v: from(v_first, dim),
            keys: rows(keys.all()),
            values: rows(values.all()),
            past: past.all(),
        };
        let table = |shape, data, n_pairs| (shape, DeviceCosSin { data, n_pairs, back: false });
        let device_steps = InputSteps {
            norms: weights.each_ref().map(|weight| steps.has_norms.then(|| weight.all())),
            eps: EPS,
            norm_last: steps.norm_last,
            limit: steps.is_limited.then_some(LIMIT),
            rope: Some(table(self.rope_shape(steps.offset), turns.all(), steps.pairs)),
            factors: steps.has_factors.then(|| table(self.rope_shape(0), factors.all(), dim / 2)),
        };
        let (sizes, new) = ([tokens, n_head, dim], steps.has_rows.then_some(new));
        inputs.launch(&bench.stream, sizes, from(0, step), new, &device_steps, out.all())?;
        let name = format!("{tokens}×{n_head}×{dim}, case {case}");
        row.bits(format!("{name}, queries"), &bench.down_f32(&out)?, &q);
        if steps.has_rows {
            row.words(format!("{name}, keys"), &bench.down(&keys)?, &expected[0]);
            row.words(format!("{name}, values"), &bench.down(&values)?, &expected[1]);
        }
        Ok(())
    }
}
