//! `moeba perplexity`: how well a model predicts a text, and how far it is from another model, by
//! llama.cpp's definitions, so that figures compare.

mod divergence;
mod questions;
mod random;
mod tasks;
pub(super) mod windows;

use super::args::{BatchArgs, ThreadsArg};
use super::model::ModelArg;
use super::out;
use super::prompt::read_text;
use super::report;
use super::stats::Stats;
use crate::{Result, terminal};
use std::path::{Path, PathBuf};
use windows::{Score, WindowArgs, Windows, nll};

#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    /// Text to score, or tasks (- is stdin)
    #[arg(short, long, value_name = "FILE", required_unless_present = "kl_divergence")]
    file: Option<PathBuf>,
    #[command(flatten)]
    windows: WindowArgs,
    #[command(flatten)]
    divergence: DivergenceArgs,
    #[command(flatten)]
    tasks: tasks::TaskArgs,
    /// Write the figures to this file as JSON (- is standard output)
    #[arg(long, value_name = "FILE.json")]
    stats: Option<PathBuf>,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    batch: BatchArgs,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Comparison")]
struct DivergenceArgs {
    /// File of a model's probabilities, in llama.cpp's format: written, or read with
    /// --kl-divergence
    #[arg(long, value_name = "FILE", visible_alias = "save-all-logits")]
    kl_divergence_base: Option<PathBuf>,
    /// Compare this model with the one whose probabilities are in --kl-divergence-base, on the
    /// tokens that are in the file
    #[arg(long, requires = "kl_divergence_base")]
    kl_divergence: bool,
}

pub fn run(args: Args) -> Result<()> {
    match (&args.file, &args.divergence) {
        (_, DivergenceArgs { kl_divergence: true, kl_divergence_base: Some(base) }) => {
            divergence::run(&args, base)
        }
        (Some(file), _) if args.tasks.kind().is_some() => tasks::run(&args, file),
        (Some(file), _) => score(&args, file),
        (None, _) => unreachable!("clap requires one of them"),
    }
}

/// Perplexity of a text.
fn score(args: &Args, file: &Path) -> Result<()> {
    let text = read_text(file)?;
    let options = args.batch.options(args.windows.ctx_size, args.threads.count());
    let engine = args.model.resolve()?.load(&options)?;
    let tokens = windows::tokens(&engine, file, &text, args.windows.chunks)?;
    let (n_ctx, mut score) = (engine.n_ctx(), Score::default());
    let base = args.divergence.kl_divergence_base.as_deref();
    let mut base = base
        .map(|path| divergence::Writer::create(path, n_ctx, engine.n_vocab(), &tokens))
        .transpose()?;
    let mut windows = Windows::new(&engine, &args.batch)?;
    let bar = terminal::bar_beside_output("perplexity", tokens.len() as u64);
    for (i, window) in tokens.chunks_exact(n_ctx).enumerate() {
        windows.compute(window, &bar, &mut |_, logits, target| {
            score.add(nll(logits, target));
            base.as_mut().map_or(Ok(()), |base| base.add(logits))
        })?;
        score.print(i + 1, tokens.len() / n_ctx)?;
    }
    drop(bar);
    base.map_or(Ok(()), divergence::Writer::finish)?;
    let bits = score.nll / std::f64::consts::LN_2 / windows.bytes.max(1) as f64;
    score.print_all()?;
    out::line(&format!("{bits:.4} bits per byte ({} tokens scored)", score.n))?;
    let mut stats = Stats::new();
    stats.number("perplexity", score.perplexity());
    stats.number("perplexity_error", score.error());
    stats.number("bits_per_byte", bits);
    stats.count("scored_tokens", score.n as u64);
    report(&windows, stats, args.stats.as_deref())
}

/// How fast it went, and the file of --stats.
fn report(windows: &Windows<'_>, mut stats: Stats, path: Option<&Path>) -> Result<()> {
    let (rate, evaluated) = (windows.rate(), windows.evaluated);
    let how = if windows.one_by_one { " one by one" } else { "" };
    out::line(&format!("{rate:.2} tokens per second ({evaluated} evaluated{how})"))?;
    let experts = windows.traffic();
    report::lines(&experts, evaluated).iter().try_for_each(|line| out::line(line))?;
    let Some(path) = path else { return Ok(()) };
    stats.count("evaluated_tokens", evaluated as u64);
    stats.number("tokens_per_second", rate);
    if windows.one_by_one {
        stats.number("decode_tokens_per_second", rate);
    }
    report::fill(&mut stats, windows.engine.plan(), &experts, evaluated);
    stats.process();
    stats.write(path)
}
