//! The best of a vocabulary.

use super::{Bench, Random};
use crate::Result;
use crate::backend::gpu::sample::{Logits, NO_TOKEN, Sample, TOP_K_MAX, scratch_bytes};

pub fn check(bench: &Bench) -> Result<()> {
    let sample = Sample::load(&bench.gpu)?;
    bench.row("top_k", "f32", || {
        // Rows, vocabulary, k.
        let odd = [
            [1, 1, 1],
            [1, 2048, 40],
            [2, 2049, 256],
            [1, 5000, 1],
            [2, 4999, 20],
            [1, 40_000, TOP_K_MAX],
        ];
        let large = [[1, 151_936, 1], [1, 151_936, 40], [4, 151_936, 256]];
        let small = [[3, 7, 7], [2, 50, 1], [1, 2049, 20]];
        for [rows, n, k] in bench.shapes(&small, &odd, &large) {
            for (bad, divisor) in [(0, 1.0), (3, 1.0), (0, 3.0)] {
                compare(bench, &sample, &logits(rows * n, bad), [rows, k], divisor)?;
            }
        }
        // What differs before a division and not after it is in order of ids.
        let low = 1.9f32.next_up();
        let close = [0.5, low, low.next_up()];
        for divisor in [1.0, 1.9] {
            compare(bench, &sample, &close, [1, 3], divisor)?;
        }
        // Fewer logits than are asked for.
        let few = [-1.0, f32::NEG_INFINITY, f32::NAN, -0.0, f32::INFINITY, 0.0];
        compare(bench, &sample, &few, [1, 8], 1.0)
    });
    Ok(())
}

/// The `k` best of each of `rows` of logits.
fn compare(
    bench: &Bench,
    sample: &Sample,
    logits: &[f32],
    [rows, k]: [usize; 2],
    divisor: f32,
) -> Result<()> {
    let (n, x) = (logits.len() / rows, bench.up(logits.to_vec())?);
    let scratch = bench.empty(scratch_bytes(n, rows, k))?;
    let (mut values, mut ids) = (bench.out(rows * k)?, bench.out(rows * k)?);
    let logits = Logits { data: x.gpu(), n_vocab: n, divisor, scratch: scratch.all() };
    sample.top_k(&bench.stream, logits, k, values.gpu(), ids.gpu())?;
    let best = x.chunks_exact(n).flat_map(|row| best_of(row, divisor, k));
    (values.host, ids.host) = best.unzip();
    let shape = format!("{rows}×{k} of {n}");
    bench.equal(&shape, &values)?;
    bench.equal(format!("{shape}: ids"), &ids)
}

/// With many ties; some are −∞, both zeros occur, and `bad` of 100 are NaN or +∞.
fn logits(n: usize, bad: usize) -> Vec<f32> {
    let mut random = Random(n as u64);
    let mut one = || match random.below(100) {
        of if of < bad => [f32::NAN, f32::INFINITY, -f32::NAN][random.below(3)],
        99 => f32::NEG_INFINITY,
        98 => [0.0, -0.0][random.below(2)],
        _ => (random.below(1000) as f32 - 500.0) / 32.0,
    };
    (0..n).map(|_| one()).collect()
}

/// The k best (value, id) of quotients: descending by value, then ascending by id. A NaN counts as
/// +∞.
fn best_of(row: &[f32], divisor: f32, k: usize) -> Vec<(f32, u32)> {
    let mut all: Vec<(f32, u32)> = row.iter().map(|logit| logit / divisor).zip(0..).collect();
    let order = |value: f32| if value.is_nan() { f32::INFINITY } else { value };
    // Zeros of both signs are equal.
    let by_value = |a: f32, b: f32| order(b).partial_cmp(&order(a)).expect("no NaN");
    all.sort_by(|a, b| by_value(a.0, b.0).then(a.1.cmp(&b.1)));
    all.resize(k, (f32::NEG_INFINITY, NO_TOKEN));
    all
}
