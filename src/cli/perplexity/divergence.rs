//! How far a model's probabilities are from another's, by llama.cpp's measures and in its file of
//! the other's: `_logits_`, then as i32 n_ctx, n_vocab, the number of windows and their tokens;
//! then a row for each scored position, of two f32, a step and the least log-probability, and of
//! u16, how many steps each token's log-probability is above the least. Rows are padded to an even
//! number of u16. All is little-endian.

use super::windows::{Windows, n_scored, normalizer};
use super::{Args, report};
use crate::cli::new_file::NewFile;
use crate::cli::out;
use crate::cli::stats::Stats;
use crate::{Error, Result, terminal};
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"_logits_";

/// Log-probabilities further below the greatest are cut off, in nats.
const RANGE: f32 = 16.0;

/// Bytes of a row.
fn row_bytes(n_vocab: usize) -> usize {
    8 + 2 * n_vocab.next_multiple_of(2)
}

/// Writes such a file.
pub struct Writer {
    out: NewFile,
    row: Vec<u8>,
}

impl Writer {
    /// `tokens`: a whole number of windows of `n_ctx`.
    pub fn create(path: &Path, n_ctx: usize, n_vocab: usize, tokens: &[u32]) -> Result<Writer> {
        let mut writer = Writer { out: NewFile::create(path)?, row: vec![0; row_bytes(n_vocab)] };
        let numbers = [n_ctx, n_vocab, tokens.len() / n_ctx].map(|n| n as u32);
        let numbers = numbers.iter().chain(tokens).flat_map(|n| n.to_le_bytes());
        let header: Vec<u8> = MAGIC.iter().copied().chain(numbers).collect();
        writer.write(&header)?;
        Ok(writer)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|e| Error::io(self.out.path(), e))
    }

    /// Adds the next scored position's logits.
    pub fn add(&mut self, logits: &[f32]) -> Result<()> {
        let mut row = std::mem::take(&mut self.row);
        encode(logits, &mut row);
        let written = self.write(&row);
        self.row = row;
        written
    }

    pub fn finish(self) -> Result<()> {
        self.out.finish()
    }
}

fn encode(logits: &[f32], row: &mut [u8]) {
    let (max, log_sum) = normalizer(logits);
    let least = logits.iter().copied().fold(f32::INFINITY, f32::min).max(max - RANGE);
    let step = (max - least) / 65535.0;
    row[..4].copy_from_slice(&step.to_le_bytes());
    row[4..8].copy_from_slice(&(least - max - log_sum as f32).to_le_bytes());
    let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
    for (bytes, logit) in row[8..].as_chunks_mut::<2>().0.iter_mut().zip(logits) {
        let steps = (inverse * (logit - least)).round_ties_even();
        *bytes = (steps.max(0.0) as u16).to_le_bytes();
    }
}

/// A file that is read.
struct Base {
    path: PathBuf,
    file: BufReader<File>,
    n_ctx: usize,
    n_vocab: usize,
    tokens: Vec<u32>,
}

impl Base {
    fn open(path: &Path) -> Result<Base> {
        let fail = |expected: &str, got: String| Error::format(path, "file", expected, got);
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        let n_bytes = file.metadata().map_err(|e| Error::io(path, e))?.len();
        let mut file = BufReader::new(file);
        let mut header = [0; 20];
        let is_one = file.read_exact(&mut header).is_ok() && header.starts_with(MAGIC);
        if !is_one {
            let expected = "probabilities, as --kl-divergence-base writes them";
            return Err(fail(expected, "another kind of file".into()));
        }
        let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4"));
        let [n_ctx, n_vocab, n_chunks] = [8, 12, 16].map(|at| u64::from(number(at)));
        if !(4..=1 << 24).contains(&n_ctx) || !(1..=1 << 24).contains(&n_vocab) || n_chunks < 1 {
            let got = format!("{n_ctx} tokens a window, {n_vocab} in all, {n_chunks} windows");
            return Err(fail("windows of at least 4 tokens", got));
        }
        let rows = n_chunks * n_scored(n_ctx as usize) as u64 * row_bytes(n_vocab as usize) as u64;
        let expected = 20 + 4 * n_ctx * n_chunks + rows;
        if n_bytes < expected {
            return Err(fail(&format!("{expected} bytes"), n_bytes.to_string()));
        }
        let mut bytes = vec![0; 4 * (n_ctx * n_chunks) as usize];
        file.read_exact(&mut bytes).map_err(|e| Error::io(path, e))?;
        let tokens = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let (n_ctx, n_vocab) = (n_ctx as usize, n_vocab as usize);
        Ok(Base { path: path.into(), file, n_ctx, n_vocab, tokens })
    }

    fn next(&mut self, row: &mut [u8]) -> Result<()> {
        self.file.read_exact(row).map_err(|e| Error::io(&self.path, e))
    }
}

/// `--kl-divergence`
pub fn run(args: &Args, base: &Path) -> Result<()> {
    let mut base = Base::open(base)?;
    let options = args.batch.options(base.n_ctx, args.threads.count());
    let engine = args.model.resolve()?.load(&options)?;
    let n_vocab = engine.n_vocab();
    if base.n_vocab != n_vocab {
        let expected = format!("the model's vocabulary of {n_vocab} tokens");
        return Err(Error::format(&base.path, "vocabulary", expected, base.n_vocab.to_string()));
    }
    if let Some(id) = base.tokens.iter().find(|id| **id as usize >= n_vocab) {
        let expected = format!("tokens below {n_vocab}");
        return Err(Error::format(&base.path, "tokens", expected, id.to_string()));
    }
    let n_chunks = usize::try_from(args.windows.chunks).unwrap_or(usize::MAX);
    let tokens: Vec<u32> =
        base.tokens.chunks_exact(base.n_ctx).take(n_chunks).flatten().copied().collect();
    let mut windows = Windows::new(&engine, &args.batch)?;
    let (mut sums, mut row) = (Divergence::default(), vec![0; row_bytes(n_vocab)]);
    let bar = terminal::bar_beside_output("comparing", tokens.len() as u64);
    out::line(HEADING)?;
    for (i, window) in tokens.chunks_exact(base.n_ctx).enumerate() {
        windows.compute(window, &bar, &mut |_, logits, target| {
            base.next(&mut row)?;
            sums.add(logits, &row, target);
            Ok(())
        })?;
        out::line(&sums.line(i + 1))?;
    }
    drop(bar);
    out::line("")?;
    out::write(sums.table().as_bytes())?;
    out::line("")?;
    report(&windows, sums.stats(), args.stats.as_deref())
}

const HEADING: &str = "chunk             PPL               ln(PPL(Q)/PPL(base))          \
                       KL Divergence              Δp RMS            Same top p";

/// Sums of numbers and of their squares.
#[derive(Default)]
struct Moments {
    n: usize,
    sum: f64,
    squares: f64,
}

impl Moments {
    fn add(&mut self, x: f64) {
        self.n += 1;
        self.sum += x;
        self.squares += x * x;
    }

    fn mean(&self) -> f64 {
        self.sum / self.n.max(1) as f64
    }

    /// Standard error of the mean; 0 of few numbers.
    fn error(&self) -> f64 {
        let variance = self.squares / self.n.max(1) as f64 - self.mean() * self.mean();
        if self.n > 10 { (variance.max(0.0) / (self.n - 1) as f64).sqrt() } else { 0.0 }
    }
}

/// Sums over the positions that are compared. "Base" is the other model.
#[derive(Default)]
struct Divergence {
    nll: Moments,
    nll_base: Moments,
    nll_products: f64,
    kld: Moments,
    /// Differences of the probability of the text's token, and their squares.
    p_diff: Moments,
    p_diff_squares: Moments,
    n_same_top: usize,
    klds: Vec<f32>,
    p_diffs: Vec<f32>,
}

impl Divergence {
    /// Adds a position: this model's logits, the other's row, and the token of the text.
    fn add(&mut self, logits: &[f32], row: &[u8], target: u32) {
        let number = |at: usize| f32::from_le_bytes(row[at..at + 4].try_into().expect("4 bytes"));
        let (step, least) = (number(0), number(4));
        let base = row[8..].as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b));
        let base = base.map(|steps| step * f32::from(steps) + least);
        let (max, log_sum) = normalizer(logits);
        let log_total = max + log_sum as f32;
        let (mut kld, mut top, mut top_base) =
            (0.0, (0, f32::NEG_INFINITY), (0, f32::NEG_INFINITY));
        let mut nll_base = 0.0;
        for (i, (logit, log_p)) in logits.iter().zip(base).enumerate() {
            if *logit > top.1 {
                top = (i, *logit);
            }
            if log_p > top_base.1 {
                top_base = (i, log_p);
            }
            if i == target as usize {
                nll_base = -log_p;
            }
            if log_p > -RANGE {
                kld += f64::from(log_p.exp() * (log_p - logit + log_total));
            }
        }
        let nll = log_total - logits[target as usize];
        self.nll.add(nll.into());
        self.nll_base.add(nll_base.into());
        self.nll_products += f64::from(nll * nll_base);
        self.kld.add(kld);
        self.klds.push(kld as f32);
        let p_diff = (-nll).exp() - (-nll_base).exp();
        self.p_diff.add(p_diff.into());
        self.p_diff_squares.add(f64::from(p_diff * p_diff));
        self.p_diffs.push(p_diff);
        self.n_same_top += usize::from(top.0 == top_base.0);
    }

    /// Covariance of the means of both nll.
    fn covariance(&self) -> f64 {
        let n = self.nll.n as f64;
        let of_one = self.nll_products / n - self.nll.mean() * self.nll_base.mean();
        if self.nll.n < 10 { 0.0 } else { of_one / (n - 1.0) }
    }

    /// ln(PPL(Q)/PPL(base)) and its error.
    fn log_ratio(&self) -> (f64, f64) {
        let errors = self.nll.error().powi(2) + self.nll_base.error().powi(2);
        let error = (errors - 2.0 * self.covariance()).max(0.0).sqrt();
        (self.nll.mean() - self.nll_base.mean(), error)
    }

    /// Root mean square of the differences of probabilities, and its error.
    fn p_diff_rms(&self) -> (f64, f64) {
        let rms = self.p_diff_squares.mean().sqrt();
        (rms, if rms > 0.0 { 0.5 / rms * self.p_diff_squares.error() } else { 0.0 })
    }

    fn same_top(&self) -> (f64, f64) {
        let (n, p) = (self.kld.n as f64, self.n_same_top as f64 / self.kld.n as f64);
        (p, if n > 1.0 { (p * (1.0 - p) / (n - 1.0)).sqrt() } else { 0.0 })
    }

    /// The figures after a window.
    fn line(&self, window: usize) -> String {
        let ppl = self.nll.mean().exp();
        let (ratio, rms, top) = (self.log_ratio(), self.p_diff_rms(), self.same_top());
        let percent = |(value, error): (f64, f64)| {
            format!("    {:6.3} ± {:6.3} %", 100.0 * value, 100.0 * error)
        };
        format!(
            "{window:4}    {ppl:9.4} ± {:9.4}    {:10.5} ± {:10.5}    {:10.5} ± {:10.5}{}{}",
            ppl * self.nll.error(),
            ratio.0,
            ratio.1,
            self.kld.mean(),
            self.kld.error(),
            percent(rms),
            percent(top),
        )
    }

    /// llama.cpp's table of all figures.
    fn table(&self) -> String {
        let row = |name: &str, value: f64, error: f64| {
            format!("{name:30}: {value:10.6} ± {error:10.6}\n")
        };
        let (ppl, ppl_base) = (self.nll.mean().exp(), self.nll_base.mean().exp());
        let [error, error_base] = [ppl * self.nll.error(), ppl_base * self.nll_base.error()];
        let covariance = self.covariance();
        let correlation = covariance / (self.nll.error() * self.nll_base.error());
        let (log_ratio, log_error) = self.log_ratio();
        let ratio = log_ratio.exp();
        let variance = error.powi(2) + error_base.powi(2) - 2.0 * ppl * ppl_base * covariance;
        let mut text = String::from("====== Perplexity statistics ======\n");
        text += &row("Mean PPL(Q)", ppl, error);
        text += &row("Mean PPL(base)", ppl_base, error_base);
        text += &format!("Cor(ln(PPL(Q)), ln(PPL(base))): {:6.2}%\n", 100.0 * correlation);
        text += &row("Mean ln(PPL(Q)/PPL(base))", log_ratio, log_error);
        text += &row("Mean PPL(Q)/PPL(base)", ratio, ratio * log_error);
        text += &row("Mean PPL(Q)-PPL(base)", ppl - ppl_base, variance.max(0.0).sqrt());
        text += "\n====== KL divergence statistics ======\n";
        text += &format!("Mean    KLD: {:10.6} ± {:10.6}\n", self.kld.mean(), self.kld.error());
        for (name, value) in quantiles(&self.klds, KLD_QUANTILES) {
            text += &format!("{name} KLD: {value:10.6}\n");
        }
        text += "\n====== Token probability statistics ======\n";
        let percent = |(value, error): (f64, f64)| {
            format!("{:6.3} ± {:5.3} %\n", 100.0 * value, 100.0 * error)
        };
        text += &format!("Mean    Δp: {}", percent((self.p_diff.mean(), self.p_diff.error())));
        for (name, value) in quantiles(&self.p_diffs, P_QUANTILES) {
            text += &format!("{name} Δp: {:6.3}%\n", 100.0 * value);
        }
        text += &format!("RMS Δp    : {}", percent(self.p_diff_rms()));
        text + &format!("Same top p: {}", percent(self.same_top()))
    }

    fn stats(&self) -> Stats {
        let mut stats = Stats::new();
        let mut score = |key: &str, value| stats.number(key, value);
        score("perplexity", self.nll.mean().exp());
        score("perplexity_base", self.nll_base.mean().exp());
        score("log_perplexity_ratio", self.log_ratio().0);
        score("log_perplexity_ratio_error", self.log_ratio().1);
        score("kl_divergence", self.kld.mean());
        score("kl_divergence_error", self.kld.error());
        score("probability_difference_rms", self.p_diff_rms().0);
        score("same_top_share", self.same_top().0);
        stats.count("scored_tokens", self.kld.n as u64);
        stats
    }
}

/// (name, share of the values below)
type Quantiles = &'static [(&'static str, f32)];

const KLD_QUANTILES: Quantiles = &[
    ("Maximum", 1.0),
    ("99.9%  ", 0.999),
    ("99.0%  ", 0.99),
    ("95.0%  ", 0.95),
    ("90.0%  ", 0.9),
    ("Median ", 0.5),
    ("10.0%  ", 0.1),
    (" 5.0%  ", 0.05),
    (" 1.0%  ", 0.01),
    (" 0.1%  ", 0.001),
    ("Minimum", 0.0),
];

const P_QUANTILES: Quantiles = &[
    ("Maximum", 1.0),
    ("99.9%  ", 0.999),
    ("99.0%  ", 0.99),
    ("95.0%  ", 0.95),
    ("90.0%  ", 0.9),
    ("75.0%  ", 0.75),
    ("Median ", 0.5),
    ("25.0%  ", 0.25),
    ("10.0%  ", 0.1),
    (" 5.0%  ", 0.05),
    (" 1.0%  ", 0.01),
    (" 0.1%  ", 0.001),
    ("Minimum", 0.0),
];

/// Quantiles, between two values on the line through both.
fn quantiles(values: &[f32], of: Quantiles) -> impl Iterator<Item = (&'static str, f32)> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f32::total_cmp);
    of.iter().map(move |(name, share)| {
        let place = share * (sorted.len() - 1) as f32;
        let (at, part) = (place as usize, place.fract());
        let next = sorted[(at + 1).min(sorted.len() - 1)];
        (*name, (1.0 - part) * sorted[at] + part * next)
    })
}
