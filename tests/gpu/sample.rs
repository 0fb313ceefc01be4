//! The best of a vocabulary, chosen on the emulated device, against a sort on the CPU.

use crate::support::Bench;
use moeba::backend::gpu::DeviceBuffer;
use moeba::backend::gpu::sample::{Logits, NO_TOKEN, Sample, TOP_K_MAX, scratch_bytes};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.0 >> 33
    }

    /// Logits with many ties; some are −∞, both zeros occur, and `bad` of 100 are NaN or +∞.
    fn logits(&mut self, n: usize, bad: u64) -> Vec<f32> {
        let value = |step: u64| (step as f32 - 500.0) / 32.0;
        let mut one = || match self.next() % 100 {
            of if of < bad => [f32::NAN, f32::INFINITY, -f32::NAN][self.next() as usize % 3],
            99 => f32::NEG_INFINITY,
            98 => [0.0, -0.0][self.next() as usize % 2],
            _ => value(self.next() % 1000),
        };
        (0..n).map(|_| one()).collect()
    }
}

fn down_u32(bench: &Bench, buffer: &DeviceBuffer) -> Vec<u32> {
    let bytes = bench.down(buffer);
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// The k best (value, id): descending by value, then ascending by id, NaN and +∞ before all.
fn best_of(row: &[f32], divisor: f32, k: usize) -> Vec<(u32, u32)> {
    let mut all: Vec<(f32, u32)> = row.iter().map(|logit| logit / divisor).zip(0..).collect();
    let order = |value: f32| if value.is_nan() { f32::INFINITY } else { value };
    all.sort_by(|a, b| order(b.0).partial_cmp(&order(a.0)).unwrap().then(a.1.cmp(&b.1)));
    all.resize(k, (f32::NEG_INFINITY, NO_TOKEN));
    all.into_iter().map(|(value, id)| (bits(value), id)).collect()
}

/// NaN has several.
fn bits(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

fn top_k(bench: &Bench, logits: &[f32], divisor: f32, rows: usize, k: usize) -> Vec<(u32, u32)> {
    let n_vocab = logits.len() / rows;
    let (data, values) = (bench.up_f32(logits), bench.empty(4 * rows * k));
    let (ids, scratch) = (bench.empty(4 * rows * k), bench.empty(scratch_bytes(n_vocab, rows, k)));
    let logits = Logits { data: data.all(), n_vocab, divisor, scratch: scratch.all() };
    let sample = Sample::load(&bench.gpu).unwrap();
    sample.top_k(&bench.stream, logits, k, values.all(), ids.all()).unwrap();
    let values = bench.down_f32(&values).into_iter().map(bits);
    values.zip(down_u32(bench, &ids)).collect()
}

#[test]
fn the_best_come_in_order() {
    let shapes = [
        (1, 1, 1),
        (3, 7, 7),
        (1, 2048, 40),
        (2, 2049, 256),
        (1, 5000, 1),
        (2, 4999, 20),
        (1, 40_000, TOP_K_MAX),
    ];
    for (seed, (rows, n, k)) in shapes.into_iter().enumerate() {
        let (bench, mut random) = (Bench::new(seed as u64), Random(seed as u64));
        for (bad, divisor) in [(0, 1.0), (3, 1.0), (0, 3.0)] {
            let logits = random.logits(rows * n, bad);
            let best = |row| best_of(row, divisor, k);
            let expected: Vec<_> = logits.chunks_exact(n).flat_map(best).collect();
            let got = top_k(&bench, &logits, divisor, rows, k);
            assert_eq!(got, expected, "{k} of {rows} rows of {n}");
        }
    }
}

/// What differs before a division and not after it is in order of ids.
#[test]
fn quotients_are_compared() {
    let bench = Bench::new(2);
    let divisor = 1.9f32;
    let low = divisor.next_up();
    let logits = [0.5, low, low.next_up()];
    assert_eq!(logits[1] / divisor, logits[2] / divisor, "an example");
    let ids = |divisor| -> Vec<u32> {
        top_k(&bench, &logits, divisor, 1, 3).iter().map(|(_, id)| *id).collect()
    };
    assert_eq!([ids(1.0), ids(divisor)], [[2, 1, 0], [1, 2, 0]]);
}

#[test]
fn where_there_are_fewer_there_is_no_token() {
    let bench = Bench::new(1);
    let logits = [-1.0, f32::NEG_INFINITY, f32::NAN, -0.0, f32::INFINITY, 0.0];
    let got = top_k(&bench, &logits, 1.0, 1, 8);
    assert_eq!(got, best_of(&logits, 1.0, 8));
    let ids: Vec<u32> = got.iter().map(|(_, id)| *id).collect();
    assert_eq!(ids, [2, 4, 3, 5, 0, 1, NO_TOKEN, NO_TOKEN]);
}
