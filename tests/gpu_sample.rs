//! The best of a vocabulary, chosen on the emulated device, against a sort on the CPU.

mod gpu_support;

use gpu_support::Bench;
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

/// The k best (value, id): descending by value, then ascending by id, without NaN.
fn best_of(row: &[f32], k: usize) -> Vec<(u32, u32)> {
    let mut all: Vec<(f32, u32)> = row.iter().copied().zip(0..).collect();
    all.retain(|(value, _)| !value.is_nan());
    all.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1)));
    all.resize(k, (f32::NEG_INFINITY, NO_TOKEN));
    all.into_iter().map(|(value, id)| (value.to_bits(), id)).collect()
}

fn top_k(bench: &Bench, logits: &[f32], rows: usize, k: usize) -> Vec<(u32, u32)> {
    let n_vocab = logits.len() / rows;
    let (data, values) = (bench.up_f32(logits), bench.empty(4 * rows * k));
    let (ids, scratch) = (bench.empty(4 * rows * k), bench.empty(scratch_bytes(n_vocab, rows, k)));
    let logits = Logits { data: data.all(), n_vocab, scratch: scratch.all() };
    let sample = Sample::load(&bench.gpu).unwrap();
    sample.top_k(&bench.stream, logits, k, values.all(), ids.all()).unwrap();
    let values = bench.down_f32(&values).into_iter().map(f32::to_bits);
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
        let logits = random.logits(rows * n, 3);
        let expected: Vec<_> = logits.chunks_exact(n).flat_map(|row| best_of(row, k)).collect();
        assert_eq!(top_k(&bench, &logits, rows, k), expected, "{k} of {rows} rows of {n}");
    }
}

#[test]
fn where_there_are_fewer_there_is_no_token() {
    let bench = Bench::new(1);
    let logits = [f32::NAN, -1.0, f32::NEG_INFINITY, f32::NAN, -0.0, 0.0];
    let got = top_k(&bench, &logits, 1, 8);
    assert_eq!(got, best_of(&logits, 8));
    let ids: Vec<u32> = got.iter().map(|(_, id)| *id).collect();
    assert_eq!(ids, [4, 5, 1, 2, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN]);
}

/// (best, broken) of each row.
fn argmax(bench: &Bench, logits: &[f32], rows: usize) -> Vec<(u32, u32)> {
    let n_vocab = logits.len() / rows;
    let (data, best) = (bench.up_f32(logits), bench.empty(4 * rows));
    let (broken, scratch) = (bench.empty(4 * rows), bench.empty(scratch_bytes(n_vocab, rows, 1)));
    let logits = Logits { data: data.all(), n_vocab, scratch: scratch.all() };
    let sample = Sample::load(&bench.gpu).unwrap();
    sample.argmax(&bench.stream, logits, best.all(), Some(broken.all())).unwrap();
    let both = down_u32(bench, &best).into_iter().zip(down_u32(bench, &broken)).collect();
    sample.argmax(&bench.stream, logits, broken.all(), None).unwrap();
    assert_eq!(down_u32(bench, &broken), down_u32(bench, &best));
    both
}

#[test]
fn the_greatest_is_the_first_of_equals() {
    for (seed, (rows, n)) in [(1, 1), (3, 50), (2, 2048), (5, 2049), (1, 30_001)].iter().enumerate()
    {
        let (bench, mut random) = (Bench::new(seed as u64), Random(seed as u64));
        for bad in [0, 2] {
            let logits = random.logits(rows * n, bad);
            let expected = logits.chunks_exact(*n).map(|row| {
                let (value, id) = best_of(row, 1)[0];
                let unusable = |logit: &f32| logit.is_nan() || *logit == f32::INFINITY;
                let broken = row.iter().position(unusable).map_or(NO_TOKEN, |id| id as u32);
                (if f32::from_bits(value) > f32::NEG_INFINITY { id } else { NO_TOKEN }, broken)
            });
            let expected: Vec<_> = expected.collect();
            assert_eq!(argmax(&bench, &logits, *rows), expected, "{rows} rows of {n}");
        }
    }
}

#[test]
fn nothing_above_minus_infinity_is_no_token() {
    let bench = Bench::new(0);
    let logits = [f32::NEG_INFINITY, f32::NAN, f32::NEG_INFINITY, -5.0, -0.0, 0.0];
    assert_eq!(argmax(&bench, &logits, 2), [(NO_TOKEN, 1), (1, NO_TOKEN)]);
}
