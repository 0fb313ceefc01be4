//! `moeba trace import`: routing that other programs recorded, as a trace.

use super::super::new_file::NewFile;
use super::super::out;
use super::super::values::{self, Parsed};
use crate::trace::import;
use crate::{Result, interrupt};
use std::path::PathBuf;

#[derive(clap::Args, Debug)]
pub struct Args {
    /// Files with the experts that a model chose: arrays of NumPy (.npz, .npy), JSON (a token or a
    /// request each, also vLLM's routed_experts), or CSV (a line for each expert, also llama.cpp's
    /// moe-trace); their requests come one after the other
    #[arg(required = true, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// File for the trace
    #[arg(short, long, value_name = "OUT.mtrace")]
    output: PathBuf,
    /// Experts of a layer [default: what the files say, or the highest number that is used and one]
    #[arg(long, value_name = "N", value_parser = experts)]
    experts: Option<usize>,
}

fn experts(text: &str) -> Parsed<usize> {
    values::integer(text, 1, 1 << 16)
}

pub fn run(args: Args) -> Result<()> {
    let mut sources = Vec::new();
    for file in &args.file {
        interrupt::check()?;
        sources.push(import::read(file)?);
    }
    let file = NewFile::create(&args.output)?;
    let (file, summary) = import::write(&sources, args.experts, file)?;
    file.finish()?;
    let import::Summary { n_requests, n_tokens, n_left_out, n_experts, .. } = summary;
    if n_left_out > 0 {
        out::note(&format!(
            "{n_left_out} tokens of prompts lack the experts of a layer and are left out"
        ));
    }
    if summary.experts_are_guessed {
        out::note(&format!(
            "no file says how many experts a layer has: it is taken to have {n_experts}, as the \
             highest number is {} (--experts says another)",
            n_experts - 1
        ));
    }
    if !summary.has_weights {
        out::note(
            "the trace has no router weights: policies that search by them (finemoe) cannot be \
             replayed on it",
        );
    }
    let path = args.output.display();
    out::line(&format!("{path}: {n_requests} requests, {n_tokens} tokens"))
}
