//! `moeba diffuse`: an answer of a model that fills in masked tokens.

use super::args::{self, BatchArgs, ThreadsArg};
use super::model::ModelArg;
use super::out;
use super::prompt::read_prompt;
use super::values::{self, Parsed};
use crate::engine::diffusion::{Confidence, DiffusionOptions, Schedule, diffuse};
use crate::tokenizer::EncodeOptions;
use crate::{Error, Result, terminal};
use std::path::PathBuf;

#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    /// The prompt, as plain text
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file that holds the prompt (- is stdin)
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    /// Tokens to fill in behind the prompt
    #[arg(short, long, value_name = "N", default_value = "128", value_parser = args::tokens)]
    n_predict: usize,
    /// Steps in all
    #[arg(long, visible_alias = "diffusion-steps", value_name = "N", default_value = "128")]
    #[arg(value_parser = args::tokens)]
    steps: usize,
    /// Fill in blocks of this many tokens, one after the other [default: 32, or all at once where N
    /// is not a multiple of it]
    #[arg(long, visible_alias = "diffusion-block-length", value_name = "N")]
    #[arg(value_parser = args::tokens, conflicts_with = "eps")]
    block_length: Option<usize>,
    /// Fill in all tokens by a schedule that ends at this time, instead of block by block
    #[arg(long, visible_alias = "diffusion-eps", value_name = "X", value_parser = part)]
    eps: Option<f32>,
    /// The tokens that a step keeps, by origin, entropy, margin, random or confidence, or its
    /// number in llama.cpp
    #[arg(long, visible_alias = "diffusion-algorithm", value_name = "NAME")]
    #[arg(default_value = "confidence")]
    algorithm: Confidence,
    /// Move logits away from those of the text without its prompt by this factor
    #[arg(long, visible_alias = "diffusion-cfg-scale", value_name = "X", default_value = "0")]
    #[arg(value_parser = factor)]
    cfg_scale: f32,
    /// Temperature; 0 takes the best token
    #[arg(long, visible_alias = "temperature", value_name = "X", default_value = "0")]
    #[arg(value_parser = factor)]
    temp: f32,
    /// Draw from this many tokens, the best; 0 is all
    #[arg(long, value_name = "N", default_value = "0", value_parser = args::tokens_or_zero)]
    top_k: usize,
    /// Draw from the best tokens that together have this probability
    #[arg(long, value_name = "P", default_value = "1", value_parser = part)]
    top_p: f32,
    /// Seed of what is drawn
    #[arg(short, long, value_name = "N", default_value = "0", value_parser = seed)]
    seed: u64,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    batch: BatchArgs,
}

fn part(text: &str) -> Parsed<f32> {
    match text.parse::<f32>() {
        Ok(x) if x > 0.0 && x <= 1.0 => Ok(x),
        _ => Err("expected a number above 0, at most 1".into()),
    }
}

fn factor(text: &str) -> Parsed<f32> {
    match text.parse::<f32>() {
        Ok(x) if x >= 0.0 && x.is_finite() => Ok(x),
        _ => Err("expected a number of at least 0".into()),
    }
}

fn seed(text: &str) -> Parsed<u64> {
    values::integer(text, 0, i64::MAX).map(|n: i64| n as u64)
}

/// The length of blocks where none is given.
const BLOCK: usize = 32;

pub fn run(args: Args) -> Result<()> {
    let prompt = match (args.prompt, args.file) {
        (Some(text), _) => text,
        (None, Some(path)) => read_prompt(&path)?,
        (None, None) => return Err(Error::Usage("give a prompt with -p or -f".into())),
    };
    let options = args.batch.options(0, args.threads.count());
    let engine = args.model.resolve()?.load(&options)?;
    engine.check_fills_in()?;
    let mask = engine.tokenizer().special().mask.ok_or_else(|| {
        let path = engine.gguf().path();
        Error::format(path, "tokenizer.ggml.mask_token_id", "a token that is masked", "nothing")
    })?;
    let n = args.n_predict;
    let schedule = match (args.eps, args.block_length) {
        (Some(eps), _) => Schedule::Time(eps),
        (None, Some(length)) => Schedule::Blocks(length),
        (None, None) => Schedule::Blocks(if n.is_multiple_of(BLOCK) { BLOCK } else { n }),
    };
    let options = DiffusionOptions {
        n_predict: n,
        steps: args.steps,
        schedule,
        confidence: args.algorithm,
        temperature: args.temp,
        top_k: args.top_k,
        top_p: args.top_p,
        guidance: args.cfg_scale,
        seed: args.seed,
        mask,
        is_shifted: engine.shifts_logits()?,
    };
    options.check()?;
    let tokens = engine.tokenizer().encode(&prompt, EncodeOptions::PROMPT);
    let mut session = engine.new_session()?;
    let bar = terminal::bar("steps", args.steps as u64);
    let filled = diffuse(&mut session, &tokens, &options, &mut |step, _| {
        bar.set_position(step as u64);
        Ok(())
    })?;
    drop(bar);
    // What follows the end of the text is filling.
    let ends = |token: &u32| engine.tokenizer().is_eog(*token);
    let end = filled.iter().position(ends).unwrap_or(filled.len());
    out::line(&engine.tokenizer().decode_lossy(&filled[..end], true)?)
}
