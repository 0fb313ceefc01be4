//! `moeba perplexity`: how well a model predicts a text, by llama.cpp's definition, so that figures
//! compare: windows of n_ctx tokens, each begun afresh with BOS where the model has one, and the
//! second half of each scored.

use super::args::{self, BatchArgs, ThreadsArg};
use super::model::ModelArg;
use super::out;
use super::prompt::read_text;
use super::report;
use super::stats::{Stats, per_second};
use super::values::{self, Parsed};
use crate::engine::{Engine, ExpertTraffic, Session, Want};
use crate::terminal::{self, Bar};
use crate::tokenizer::EncodeOptions;
use crate::{Error, Result};
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    /// Text to score (- is stdin)
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens per window; 0 uses the model's context
    #[arg(short, long, value_name = "N", default_value = "512")]
    #[arg(value_parser = args::tokens_or_zero, env = "MOEBA_CTX_SIZE")]
    ctx_size: usize,
    /// Score this many windows only; -1 is all
    #[arg(long, value_name = "N", default_value = "-1", value_parser = chunks)]
    chunks: i64,
    /// Write the figures to this file as JSON (- is standard output)
    #[arg(long, value_name = "FILE.json")]
    stats: Option<PathBuf>,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    batch: BatchArgs,
}

fn chunks(text: &str) -> Parsed<i64> {
    match values::integer(text, -1, args::MAX_TOKENS)? {
        0 => Err(format!("expected -1 or a whole number from 1 to {}", args::MAX_TOKENS)),
        n => Ok(n),
    }
}

/// Fewer tokens than this leave nothing to score.
const MIN_WINDOW: usize = 4;

pub fn run(args: Args) -> Result<()> {
    let text = read_text(&args.file)?;
    let options = args.batch.options(args.ctx_size, args.threads.count());
    let engine = args.model.resolve()?.load(&options)?;
    // As llama.cpp reads it: BOS by the model's own rule, control tokens are only text.
    let options = EncodeOptions { add_special: true, parse_special: false };
    let tokens = engine.tokenizer().encode(&text, options);
    let n_ctx = engine.n_ctx();
    if n_ctx < MIN_WINDOW || tokens.len() < n_ctx {
        return Err(Error::invalid(format!(
            "{}: {} tokens, but a window is {n_ctx} and must be at least {MIN_WINDOW}: give a \
             longer text or a smaller -c",
            args.file.display(),
            tokens.len()
        )));
    }
    let n_chunks = usize::try_from(args.chunks).unwrap_or(usize::MAX).min(tokens.len() / n_ctx);
    log::info!("{} tokens, {n_chunks} windows of {n_ctx}", tokens.len());

    let mut scorer = Scorer::new(&engine, &args.batch)?;
    let bar = terminal::bar_beside_output("perplexity", (n_chunks * n_ctx) as u64);
    for (i, window) in tokens.chunks_exact(n_ctx).take(n_chunks).enumerate() {
        scorer.window(window, &bar)?;
        let end = if i + 1 == n_chunks { "\n" } else { "," };
        out::write(format!("[{}]{:.4}{end}", i + 1, scorer.score.perplexity()).as_bytes())?;
    }
    drop(bar);
    report(&scorer, args.stats.as_deref())
}

fn report(scorer: &Scorer, stats: Option<&std::path::Path>) -> Result<()> {
    let score = &scorer.score;
    let (ppl, error) = (score.perplexity(), score.error());
    let bits = score.nll / std::f64::consts::LN_2 / scorer.bytes.max(1) as f64;
    let rate = per_second(scorer.evaluated, scorer.time);
    out::line(&format!("Final estimate: PPL = {ppl:.4} +/- {error:.5}"))?;
    out::line(&format!("{bits:.4} bits per byte ({} tokens scored)", score.n))?;
    let how = if scorer.one_by_one { " one by one" } else { "" };
    out::line(&format!("{rate:.2} tokens per second ({} evaluated{how})", scorer.evaluated))?;
    let experts = scorer.engine.expert_traffic().since(&scorer.before);
    report::lines(&experts, scorer.evaluated).iter().try_for_each(|line| out::line(line))?;
    let Some(path) = stats else { return Ok(()) };
    let mut stats = Stats::new();
    stats.number("perplexity", ppl);
    stats.number("perplexity_error", error);
    stats.number("bits_per_byte", bits);
    stats.count("scored_tokens", score.n as u64);
    stats.count("evaluated_tokens", scorer.evaluated as u64);
    stats.number("tokens_per_second", rate);
    if scorer.one_by_one {
        stats.number("decode_tokens_per_second", rate);
    }
    report::fill(&mut stats, scorer.engine.plan(), &experts, scorer.evaluated);
    stats.process();
    stats.write(path)
}

/// Sums over the scored tokens.
#[derive(Default)]
struct Score {
    n: usize,
    nll: f64,
    nll_squared: f64,
}

impl Score {
    fn add(&mut self, nll: f64) {
        self.n += 1;
        self.nll += nll;
        self.nll_squared += nll * nll;
    }

    fn perplexity(&self) -> f64 {
        (self.nll / self.n as f64).exp()
    }

    /// Standard error of the mean, carried through the exponential.
    fn error(&self) -> f64 {
        let n = self.n as f64;
        let mean = self.nll / n;
        let variance = self.nll_squared / n - mean * mean;
        if self.n < 2 { 0.0 } else { (variance.max(0.0) / (n - 1.0)).sqrt() * self.perplexity() }
    }
}

struct Scorer<'a> {
    engine: &'a Engine,
    session: Session,
    n_batch: usize,
    /// Each token is a step of its own: decode, on a given text.
    one_by_one: bool,
    /// Experts moved before the first window.
    before: ExpertTraffic,
    score: Score,
    /// Bytes of the scored tokens' text.
    bytes: usize,
    evaluated: usize,
    time: Duration,
}

impl<'a> Scorer<'a> {
    fn new(engine: &'a std::sync::Arc<Engine>, batch: &BatchArgs) -> Result<Self> {
        Ok(Self {
            engine,
            session: engine.new_session()?,
            n_batch: batch.sizes.batch_size,
            one_by_one: engine.plan().n_ubatch == 1,
            before: engine.expert_traffic(),
            score: Score::default(),
            bytes: 0,
            evaluated: 0,
            time: Duration::ZERO,
        })
    }

    fn window(&mut self, tokens: &[u32], bar: &Bar) -> Result<()> {
        let tokenizer = self.engine.tokenizer();
        let mut tokens = tokens.to_vec();
        if let (true, Some(bos)) = (tokenizer.add_bos(), tokenizer.bos()) {
            tokens[0] = bos;
        }
        // Position i predicts token i + 1; the last has nothing to predict and is not needed.
        let (first, last) = (tokens.len() / 2, tokens.len() - 1);
        self.session.truncate(0);
        self.eval(&tokens[..first], None, bar)?;
        self.eval(&tokens[first..last], Some(&tokens[first + 1..]), bar)?;
        for &id in &tokens[first + 1..] {
            self.bytes += tokenizer.piece(id)?.len();
        }
        Ok(())
    }

    /// Evaluates `tokens` and, where their successors are given, scores those.
    fn eval(&mut self, tokens: &[u32], targets: Option<&[u32]>, bar: &Bar) -> Result<()> {
        for (i, part) in tokens.chunks(self.n_batch).enumerate() {
            let start = Instant::now();
            match targets {
                None => drop(self.session.eval(part, Want::None)?),
                Some(targets) => {
                    let (targets, score) = (&targets[i * self.n_batch..], &mut self.score);
                    self.session.eval_all(part, &mut |at, logits| {
                        score.add(nll(logits, targets[at]));
                    })?;
                }
            }
            self.time += start.elapsed();
            self.evaluated += part.len();
            bar.inc(part.len() as u64);
        }
        Ok(())
    }
}

/// −ln p(target)
fn nll(logits: &[f32], target: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from((l - max).exp())).sum();
    sum.ln() - f64::from(logits[target as usize] - max)
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
