//! The best of a vocabulary.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::sample::{Logits, NO_TOKEN, Sample, TOP_K_MAX, scratch_bytes};

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let sample = Sample::load(&bench.gpu)?;
    report.row("top_k", "f32", |row| {
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
                let logits = logits(rows * n, bad);
                Case { logits: &logits, rows, k, divisor }.compare(bench, &sample, row)?;
            }
        }
        // What differs before a division and not after it is in order of ids.
        let low = 1.9f32.next_up();
        let close = [0.5, low, low.next_up()];
        for divisor in [1.0, 1.9] {
            Case { logits: &close, rows: 1, k: 3, divisor }.compare(bench, &sample, row)?;
        }
        // Fewer logits than are asked for.
        let few = [-1.0, f32::NEG_INFINITY, f32::NAN, -0.0, f32::INFINITY, 0.0];
        Case { logits: &few, rows: 1, k: 8, divisor: 1.0 }.compare(bench, &sample, row)
    });
    Ok(())
}

/// Rows of logits, and how many of each are chosen.
struct Case<'a> {
    logits: &'a [f32],
    rows: usize,
    k: usize,
    divisor: f32,
}

impl Case<'_> {
    fn compare(&self, bench: &Bench, sample: &Sample, row: &mut Row) -> Result<()> {
        let Case { logits, rows, k, divisor } = *self;
        let n = logits.len() / rows;
        let expected = logits.chunks_exact(n).flat_map(|row| best_of(row, divisor, k));
        let (values, ids): (Vec<f32>, Vec<u32>) = expected.unzip();
        let (data, scratch) = (bench.up_f32(logits)?, scratch_bytes(n, rows, k));
        let scratch = bench.empty(scratch)?;
        let (values_up, ids_up) = (bench.empty(4 * rows * k)?, bench.empty(4 * rows * k)?);
        let logits = Logits { data: data.all(), n_vocab: n, divisor, scratch: scratch.all() };
        sample.top_k(&bench.stream, logits, k, values_up.all(), ids_up.all())?;
        let shape = format!("{rows}×{k} of {n}");
        row.bits(&shape, &bench.down_f32(&values_up)?, &values);
        row.words(format!("{shape}: ids"), &bench.down_u32(&ids_up)?, &ids);
        Ok(())
    }
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
