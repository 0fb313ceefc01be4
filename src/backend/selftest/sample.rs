//! The best of a vocabulary.

use super::bench::Bench;
use super::data::Random;
use super::report::Report;
use crate::Result;
use crate::backend::gpu::sample::{Logits, NO_TOKEN, Sample, scratch_bytes};

const DIVISOR: f32 = 3.0;

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let sample = Sample::load(&bench.gpu)?;
    report.row("top_k", "f32", |row| {
        // (rows, vocabulary, k)
        let large = [(1, 151_936, 1), (1, 151_936, 40), (4, 151_936, 256)];
        for (rows, n, k) in bench.shapes(&[(3, 7, 7), (2, 50, 1), (1, 2049, 20)], &large) {
            let logits = logits(rows * n);
            let expected = logits.chunks_exact(n).flat_map(|row| best_of(row, k));
            let (values, ids): (Vec<f32>, Vec<u32>) = expected.unzip();
            let (data, scratch) = (bench.up_f32(&logits)?, scratch_bytes(n, rows, k));
            let scratch = bench.empty(scratch)?;
            let (values_up, ids_up) = (bench.empty(4 * rows * k)?, bench.empty(4 * rows * k)?);
            let logits =
                Logits { data: data.all(), n_vocab: n, divisor: DIVISOR, scratch: scratch.all() };
            sample.top_k(&bench.stream, logits, k, values_up.all(), ids_up.all())?;
            let shape = format!("{rows}×{k} of {n}");
            row.bits(&shape, &bench.down_f32(&values_up)?, &values);
            row.words(format!("{shape}: ids"), &bench.down_u32(&ids_up)?, &ids);
        }
        Ok(())
    });
    Ok(())
}

/// With many ties; some are −∞.
fn logits(n: usize) -> Vec<f32> {
    let mut random = Random(n as u64);
    let mut one = || match random.below(100) {
        0 => f32::NEG_INFINITY,
        _ => (random.below(1000) as f32 - 500.0) / 32.0,
    };
    (0..n).map(|_| one()).collect()
}

/// The k best (value, id) of quotients: descending by value, then ascending by id.
fn best_of(row: &[f32], k: usize) -> Vec<(f32, u32)> {
    let mut all: Vec<(f32, u32)> = row.iter().map(|logit| logit / DIVISOR).zip(0..).collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    all.resize(k, (f32::NEG_INFINITY, NO_TOKEN));
    all
}
