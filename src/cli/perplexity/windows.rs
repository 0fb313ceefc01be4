//! A text in windows of n_ctx tokens, each begun afresh with BOS where the model has one. The
//! second half of each is scored, as llama.cpp does.

use crate::cli::args::{self, BatchArgs};
use crate::cli::out;
use crate::cli::stats::per_second;
use crate::cli::values::{self, Parsed};
use crate::engine::{Engine, ExpertTraffic, Session, Want};
use crate::terminal::Bar;
use crate::tokenizer::EncodeOptions;
use crate::{Error, Result};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A text's windows.
#[derive(clap::Args, Debug)]
pub struct WindowArgs {
    /// Tokens per window; 0 uses the model's context
    #[arg(short, long, value_name = "N", default_value = "512")]
    #[arg(value_parser = args::tokens_or_zero, env = "MOEBA_CTX_SIZE")]
    pub ctx_size: usize,
    /// Compute this many windows only; -1 is all
    #[arg(long, value_name = "N", default_value = "-1", value_parser = chunks)]
    pub chunks: i64,
}

fn chunks(text: &str) -> Parsed<i64> {
    match values::integer(text, -1, args::MAX_TOKENS)? {
        0 => Err(format!("expected -1 or a whole number from 1 to {}", args::MAX_TOKENS)),
        n => Ok(n),
    }
}

/// Fewer tokens than this leave nothing to score.
const MIN_WINDOW: usize = 4;

/// Told of each scored position: its number in the window, its logits and the token that follows.
pub type OnScored<'a> = &'a mut dyn FnMut(usize, &[f32], u32) -> Result<()>;

/// Tokens of a text, a whole number of windows of `n_ctx`, at most `chunks` of them (−1: all).
pub fn tokens(engine: &Engine, file: &Path, text: &str, chunks: i64) -> Result<Vec<u32>> {
    // As llama.cpp reads it: BOS by the model's own rule, control tokens are only text.
    let options = EncodeOptions { add_special: true, parse_special: false };
    let (mut tokens, n_ctx) = (engine.tokenizer().encode(text, options), engine.n_ctx());
    if n_ctx < MIN_WINDOW || tokens.len() < n_ctx {
        return Err(Error::invalid(format!(
            "{}: {} tokens, but a window is {n_ctx} and must be at least {MIN_WINDOW}: give a \
             longer text or a smaller -c",
            file.display(),
            tokens.len()
        )));
    }
    let n_chunks = usize::try_from(chunks).unwrap_or(usize::MAX).min(tokens.len() / n_ctx);
    log::info!("{} tokens, {n_chunks} windows of {n_ctx}", tokens.len());
    tokens.truncate(n_chunks * n_ctx);
    Ok(tokens)
}

/// Positions of a window that are scored.
pub fn n_scored(n_ctx: usize) -> usize {
    n_ctx - 1 - n_ctx / 2
}

/// Computes windows.
pub struct Windows<'a> {
    pub engine: &'a Engine,
    session: Session,
    n_batch: usize,
    /// Each token is a step of its own: decode, on a given text.
    pub one_by_one: bool,
    /// All layers compute all rows of a window, and not those alone that logits are wanted of.
    pub whole: bool,
    /// Experts moved before the first window.
    before: ExpertTraffic,
    /// Bytes of the scored tokens' text.
    pub bytes: usize,
    pub evaluated: usize,
    time: Duration,
}

impl<'a> Windows<'a> {
    pub fn new(engine: &'a Arc<Engine>, batch: &BatchArgs) -> Result<Self> {
        Ok(Self {
            engine,
            session: engine.new_session()?,
            n_batch: batch.sizes.batch_size,
            one_by_one: engine.plan().n_ubatch == 1,
            whole: false,
            before: engine.expert_traffic(),
            bytes: 0,
            evaluated: 0,
            time: Duration::ZERO,
        })
    }

    /// Computes one window.
    pub fn compute(&mut self, tokens: &[u32], bar: &Bar, on_scored: OnScored<'_>) -> Result<()> {
        let tokenizer = self.engine.tokenizer();
        let mut tokens = tokens.to_vec();
        if let (true, Some(bos)) = (tokenizer.add_bos(), tokenizer.bos()) {
            tokens[0] = bos;
        }
        // Position i predicts token i + 1; the last has nothing to predict and is not needed.
        let first = tokens.len() / 2;
        let last = tokens.len() - usize::from(!self.whole);
        self.session.truncate(0);
        let targets = tokens[first + 1..].to_vec();
        self.eval(&tokens[..first], None, bar, on_scored)?;
        self.eval(&tokens[first..last], Some(&targets), bar, on_scored)?;
        for &id in &targets {
            self.bytes += self.engine.tokenizer().piece(id)?.len();
        }
        Ok(())
    }

    /// Evaluates `tokens`, and scores those whose successors are given.
    fn eval(
        &mut self,
        tokens: &[u32],
        targets: Option<&[u32]>,
        bar: &Bar,
        on_scored: OnScored<'_>,
    ) -> Result<()> {
        for (i, part) in tokens.chunks(self.n_batch).enumerate() {
            let (start, mut failed) = (Instant::now(), Ok(()));
            if targets.is_none() && !self.whole {
                self.session.eval(part, Want::None)?;
            } else {
                let targets = targets.unwrap_or_default();
                self.session.eval_all(part, &mut |at, logits| {
                    let at = i * self.n_batch + at;
                    if let (Some(target), Ok(())) = (targets.get(at), &failed) {
                        failed = on_scored(at, logits, *target);
                    }
                })?;
            }
            failed?;
            self.time += start.elapsed();
            self.evaluated += part.len();
            bar.inc(part.len() as u64);
        }
        Ok(())
    }

    pub fn rate(&self) -> f64 {
        per_second(self.evaluated, self.time)
    }

    /// Experts moved since the first window.
    pub fn traffic(&self) -> ExpertTraffic {
        self.engine.expert_traffic().since(&self.before)
    }
}

/// Sums over the scored tokens.
#[derive(Default)]
pub struct Score {
    pub n: usize,
    pub nll: f64,
    nll_squared: f64,
}

impl Score {
    pub fn add(&mut self, nll: f64) {
        self.n += 1;
        self.nll += nll;
        self.nll_squared += nll * nll;
    }

    pub fn perplexity(&self) -> f64 {
        (self.nll / self.n as f64).exp()
    }

    /// Prints the perplexity of the first windows, in llama.cpp's form.
    pub fn print(&self, n_windows: usize, n_all: usize) -> Result<()> {
        let end = if n_windows == n_all { "\n" } else { "," };
        out::write(format!("[{n_windows}]{:.4}{end}", self.perplexity()).as_bytes())
    }

    /// Prints the perplexity of the text, in llama.cpp's form.
    pub fn print_all(&self) -> Result<()> {
        let (ppl, error) = (self.perplexity(), self.error());
        out::line(&format!("Final estimate: PPL = {ppl:.4} +/- {error:.5}"))
    }

    /// Standard error of the mean, carried through the exponential.
    pub fn error(&self) -> f64 {
        let n = self.n as f64;
        let mean = self.nll / n;
        let variance = self.nll_squared / n - mean * mean;
        if self.n < 2 { 0.0 } else { (variance.max(0.0) / (n - 1.0)).sqrt() * self.perplexity() }
    }
}

/// −ln p(target)
pub fn nll(logits: &[f32], target: u32) -> f64 {
    let (max, log_sum) = normalizer(logits);
    log_sum - f64::from(logits[target as usize] - max)
}

/// The greatest logit m, and ln Σ exp(logit − m).
pub fn normalizer(logits: &[f32]) -> (f32, f64) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from((l - max).exp())).sum();
    (max, sum.ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_logits_have_the_perplexity_of_their_number() {
        let mut score = Score::default();
        for target in 0..4 {
            score.add(nll(&[1.0; 4], target));
        }
        assert!((score.perplexity() - 4.0).abs() < 1e-9);
        assert!(score.error().abs() < 1e-6);
    }
}
