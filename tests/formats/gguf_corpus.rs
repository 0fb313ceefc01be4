//! The fuzz corpus on a stable toolchain: every file of it, then mutations of them drawn from a
//! fixed sequence, so that a failure comes back on every machine.

use common::gguf_exercise::exercise;
use std::fs;
use std::path::Path;

/// Mutated files to try; some seconds' worth.
const N_MUTATIONS: usize = 400_000;

/// Sizes and counts that have broken parsers.
const EXTREMES: [u64; 12] =
    [0, 1, 9, 31, 63, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 61, 1 << 63, u64::MAX - 7, u64::MAX];

/// All seeds, by name: the fuzzer's corpus and the reader's fixtures.
fn seeds() -> Vec<(String, Vec<u8>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut seeds = Vec::new();
    for folder in ["fuzz/corpus/gguf_header", "fixtures/gguf"] {
        let entries = fs::read_dir(root.join(folder)).expect("the folder is committed");
        let files = entries.map(|entry| entry.unwrap().path());
        let wanted = |path: &Path| !path.extension().is_some_and(|e| e == "json" || e == "py");
        for path in files.filter(|path| path.is_file() && wanted(path)) {
            seeds.push((path.display().to_string(), fs::read(&path).unwrap()));
        }
    }
    // The order of a folder is not guaranteed; the mutations depend on it.
    seeds.sort();
    assert!(seeds.len() > 20, "the corpus is missing");
    seeds
}

#[test]
fn the_corpus() {
    let accepted = seeds().into_iter().filter(|(name, bytes)| {
        eprintln!("{name}");
        exercise(bytes)
    });
    assert!(accepted.count() >= 7, "the fixtures at least are good files");
}

/// A linear congruential generator (constants of Knuth's MMIX); the high bits are the good ones.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % n.max(1)
    }
}

fn mutate(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(bytes.len());
    match random.below(8) {
        0 => bytes.truncate(at),
        1 => bytes[at..].iter_mut().take(1).for_each(|b| *b ^= 1 << random.below(8)),
        2 => bytes[at..].iter_mut().take(1).for_each(|b| *b = random.below(256) as u8),
        // Whole fields are where the structure is.
        3 | 4 => {
            let extreme = EXTREMES[random.below(EXTREMES.len())].to_le_bytes();
            let n = [1, 4, 8][random.below(3)];
            bytes[at..].iter_mut().zip(&extreme[..n]).for_each(|(b, e)| *b = *e);
        }
        5 => {
            let end = at + random.below(bytes.len() - at).min(64);
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        6 => {
            let end = at + random.below(bytes.len() - at).min(64);
            bytes.drain(at..end);
        }
        _ => {
            let start = random.below(other.len());
            let n = random.below(other.len() - start).min(128);
            bytes.splice(at..at, other[start..start + n].iter().copied());
        }
    }
}

#[test]
fn mutations_of_the_corpus() {
    let seeds = seeds();
    let random = &mut Random(20_261_121);
    let mut n_accepted = 0;
    for i in 0..N_MUTATIONS {
        let mut bytes = seeds[random.below(seeds.len())].1.clone();
        for _ in 0..1 + random.below(4) {
            let other = &seeds[random.below(seeds.len())].1;
            if !bytes.is_empty() {
                mutate(&mut bytes, other, random);
            }
        }
        let result = std::panic::catch_unwind(|| exercise(&bytes));
        n_accepted += usize::from(result.unwrap_or_else(|_| panic!("mutation {i}: {bytes:02x?}")));
    }
    // A few survive, so the mutations reach past the first check.
    assert!(n_accepted > N_MUTATIONS / 1000, "{n_accepted} accepted");
}
