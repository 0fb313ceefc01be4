//! `moeba imatrix`: how much each input column of a model's matrices matters, as llama-imatrix
//! measures it: sums of squares of the activations that a text brings about.

use super::args::{BatchArgs, ThreadsArg};
use super::model::ModelArg;
use super::out;
use super::perplexity::windows::{self, Score, WindowArgs, Windows, nll};
use super::prompt::read_text;
use super::report;
use crate::convert::{self, ImatrixFacts};
use crate::engine::{DeviceChoice, Sums};
use crate::{Result, terminal};
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    /// Text to compute, of the kind that the model is used for (- is stdin)
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// File to write
    #[arg(short, long, value_name = "OUT.gguf", default_value = "imatrix.gguf")]
    #[arg(visible_alias = "output-file")]
    output: PathBuf,
    /// Add to the sums of this file of an earlier run; may be given several times
    #[arg(long, value_name = "FILE")]
    in_file: Vec<PathBuf>,
    /// Measure the output matrix too
    #[arg(long)]
    process_output: bool,
    /// Leave out the perplexity of the text
    #[arg(long)]
    no_ppl: bool,
    #[command(flatten)]
    windows: WindowArgs,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    batch: BatchArgs,
}

pub fn run(args: Args) -> Result<()> {
    let text = read_text(&args.file)?;
    let mut options = args.batch.options(args.windows.ctx_size, args.threads.count());
    options.sums_inputs = true;
    if options.device == DeviceChoice::default() {
        options.device = DeviceChoice::Cpu;
    }
    let engine = args.model.resolve()?.load(&options)?;
    let tokens = windows::tokens(&engine, &args.file, &text, args.windows.chunks)?;
    let (n_ctx, mut score) = (engine.n_ctx(), Score::default());
    let mut windows = Windows::new(&engine, &args.batch)?;
    windows.whole = true;
    let bar = terminal::bar_beside_output("measuring", tokens.len() as u64);
    for (i, window) in tokens.chunks_exact(n_ctx).enumerate() {
        windows.compute(window, &bar, &mut |_, logits, target| {
            if !args.no_ppl {
                score.add(nll(logits, target));
            }
            Ok(())
        })?;
        if !args.no_ppl {
            score.print(i + 1, tokens.len() / n_ctx)?;
        }
    }
    drop(bar);
    if !args.no_ppl {
        score.print_all()?;
    }
    let mut sums = engine.input_sums().expect("they were asked for").all();
    sums.retain(|name, _| {
        name.starts_with("blk.") || args.process_output && name == "output.weight"
    });
    let mut facts = ImatrixFacts {
        datasets: Vec::new(),
        n_chunks: (tokens.len() / n_ctx) as u32,
        chunk_size: n_ctx as u32,
    };
    for file in &args.in_file {
        convert::Imatrix::open(file)?.add_to(&mut sums, &mut facts)?;
    }
    facts.datasets.push(args.file.display().to_string());
    warn_of_gaps(&sums);
    convert::write_imatrix(&args.output, &sums, &facts)?;
    let (evaluated, rate) = (windows.evaluated, windows.rate());
    out::line(&format!("{rate:.2} tokens per second ({evaluated} evaluated)"))?;
    report::lines(&windows.traffic(), evaluated).iter().try_for_each(|line| out::line(line))?;
    out::note(&format!("{}: {} tensors", args.output.display(), sums.len()));
    Ok(())
}

/// Experts that the text did not use have no say in how they are quantized.
fn warn_of_gaps(sums: &BTreeMap<String, Sums>) {
    for (name, sums) in sums {
        let idle = sums.counts.iter().enumerate().filter(|(_, n)| **n == 0).map(|(i, _)| i);
        let idle: Vec<String> = idle.map(|i| i.to_string()).collect();
        if !idle.is_empty() {
            let (n, of) = (idle.len(), sums.counts.len());
            log::warn!("{name}: no data for {n} of {of} experts: {}", idle.join(", "));
        }
    }
}
