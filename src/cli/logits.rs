//! `moeba logits`: the model's answer to given tokens, for comparison with other programs.

use super::args::{BatchArgs, ThreadsArg};
use super::model::ModelArg;
use super::npy::Npy;
use super::values;
use super::values::Parsed;
use crate::{Error, Result, terminal};
use std::path::PathBuf;

/// Ids are checked against the vocabulary later; this is only what fits.
const MAX_ID: i64 = u32::MAX as i64;

#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", value_parser = ids, allow_hyphen_values = true)]
    tokens: Ids,
    /// Token ids for the decoder of an encoder-decoder model, whose encoder reads --tokens: the
    /// start token and the beginning of the answer
    #[arg(long, value_name = "IDS", value_parser = ids, allow_hyphen_values = true)]
    decoder_tokens: Option<Ids>,
    /// File for the logits, float32 [tokens, vocabulary] (of --decoder-tokens, if given)
    #[arg(short, long, value_name = "FILE.npy")]
    output: PathBuf,
    /// File for the chosen experts, int32 [layers, tokens, k], best first, -1 in dense layers (of
    /// the decoder, if --decoder-tokens is given, and -1 where an expert was full)
    #[arg(long, value_name = "FILE.npy")]
    experts: Option<PathBuf>,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    batch: BatchArgs,
}

/// A list is one value of the flag, so it needs a type of its own: clap reads `Vec` as "repeated".
#[derive(Clone, Debug)]
struct Ids(Vec<u32>);

fn ids(text: &str) -> Parsed<Ids> {
    values::list(text, |item| values::integer(item, 0, MAX_ID)).map(Ids)
}

pub fn run(args: Args) -> Result<()> {
    let (Ids(read), decoded) = (args.tokens, args.decoder_tokens);
    let n_ctx = decoded.as_ref().map_or(read.len(), |Ids(ids)| ids.len().max(read.len()));
    let mut options = args.batch.options(n_ctx, args.threads.count());
    options.without_text = true;
    let engine = args.model.resolve()?.load(&options)?;
    let mut session = engine.new_session()?;
    let tokens = match (decoded, engine.encoder()) {
        (None, None) => read,
        (Some(Ids(tokens)), Some(_)) => {
            session.encode(&read)?;
            tokens
        }
        (Some(_), None) => {
            let why = "--decoder-tokens is for encoder-decoder models; this model has no encoder";
            return Err(Error::Usage(why.into()));
        }
        (None, Some(encoder)) => {
            return Err(Error::Usage(format!(
                "an encoder-decoder model needs --decoder-tokens beside --tokens: this one's \
                 decoder starts with {}",
                encoder.start
            )));
        }
    };
    session.record_experts(args.experts.is_some());
    let mut out = Npy::create::<f32>(&args.output, &[tokens.len(), engine.n_vocab()])?;

    let bar = terminal::bar("prompt", tokens.len() as u64);
    let mut written = Ok(());
    session.eval_all(&tokens, &mut |_, logits| {
        if written.is_ok() {
            written = out.write(logits);
        }
        bar.inc(1);
    })?;
    written?;
    drop(bar);

    if let Some(path) = &args.experts {
        let experts = session.take_experts();
        let mut out = Npy::create::<i32>(path, &[experts.layers, experts.tokens, experts.k])?;
        out.write(&experts.ids)?;
        out.finish()?;
    }
    out.finish()
}
