//! Rates of random aligned reads of a file, through the links that stream experts.
//!
//!     cargo bench --bench disk -- MODEL.gguf                          # a table in Markdown
//!     cargo bench --bench disk -- MODEL.gguf --size 512K --depth 32   # one case
//!     cargo bench --bench disk -- MODEL.gguf --seconds 5 --io uring
//!
//! The cases run in turn, round after round, so that a disk whose rate changes meanwhile meets all
//! of them alike; each shows the median of its rounds. A file much larger than the disk's own cache
//! gives the truth.

use moeba::experts::disk::{Files, IoKind};
use moeba::machine::disk_probe::{Probe, probe};
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

const SIZES: [usize; 4] = [128 << 10, 288 << 10, 512 << 10, 1 << 20];
const DEPTHS: [usize; 4] = [1, 4, 12, 32];
const ROUNDS: usize = 3;

struct Options {
    path: PathBuf,
    sizes: Vec<usize>,
    depths: Vec<usize>,
    kinds: Vec<IoKind>,
    seconds: f64,
}

/// 512K, 1M or bytes.
fn size(text: &str) -> usize {
    let (digits, unit) = match text.to_ascii_uppercase().strip_suffix(['K', 'M']) {
        Some(digits) => (digits.to_owned(), if text.ends_with(['k', 'K']) { 10 } else { 20 }),
        None => (text.to_owned(), 0),
    };
    digits.parse::<usize>().expect("--size is a number, with K or M") << unit
}

fn options() -> Options {
    let mut path = None;
    let mut options = Options {
        path: PathBuf::new(),
        sizes: SIZES.to_vec(),
        depths: DEPTHS.to_vec(),
        kinds: vec![IoKind::Uring, IoKind::Pread],
        seconds: 1.0,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{arg} takes a value"));
        match arg.as_str() {
            // Cargo's own.
            "--bench" => {}
            "--size" => options.sizes = vec![size(&value())],
            "--depth" => options.depths = vec![value().parse().expect("--depth is a number")],
            "--io" => options.kinds = vec![value().parse().unwrap_or_else(|e| panic!("{e}"))],
            "--seconds" => options.seconds = value().parse().expect("--seconds is a number"),
            _ => path = Some(PathBuf::from(arg)),
        }
    }
    options.path = path.expect("cargo bench --bench disk -- FILE");
    options
}

#[derive(Clone, Copy)]
struct Case {
    kind: IoKind,
    read_bytes: usize,
    depth: usize,
}

/// GB/s of one case once.
fn measure(file: &File, options: &Options, case: Case, seed: u64) -> f64 {
    let files = Files::of([(options.path.as_path(), file)]).unwrap_or_else(|e| panic!("{e}"));
    let Case { kind, read_bytes, depth } = case;
    let time = Duration::from_secs_f64(options.seconds / ROUNDS as f64);
    let rate = probe(files, &Probe { kind, read_bytes, depth, time, seed });
    rate.unwrap_or_else(|e| panic!("{e}")).gb_per_second()
}

fn main() {
    // `cargo test --benches` and a bench without a file have nothing to measure.
    if !std::env::args().skip(1).any(|arg| !arg.starts_with("--")) {
        eprintln!(
            "usage: cargo bench --bench disk -- FILE [--size 512K] [--depth 32] [--io uring]"
        );
        return;
    }
    let options = options();
    let file = File::open(&options.path).unwrap_or_else(|e| panic!("{e}"));
    let mut cases = Vec::new();
    for &size in &options.sizes {
        for &depth in &options.depths {
            cases.extend(options.kinds.iter().map(|&kind| Case { kind, read_bytes: size, depth }));
        }
    }
    let mut rates = vec![Vec::new(); cases.len()];
    for round in 0..ROUNDS {
        for (at, &case) in cases.iter().enumerate() {
            rates[at].push(measure(&file, &options, case, (round * cases.len() + at) as u64));
        }
    }
    println!("| io | read, KiB | depth | GB/s |\n|---|---|---|---|");
    for (&Case { kind, read_bytes, depth }, rates) in cases.iter().zip(&mut rates) {
        rates.sort_by(f64::total_cmp);
        println!("| {kind} | {} | {depth} | {:.3} |", read_bytes >> 10, rates[ROUNDS / 2]);
    }
}
