//! `moeba split` and `moeba merge`: models in several files, as llama-gguf-split makes them.

use super::args;
use super::convert::report;
use super::out;
use super::quantize::prefix;
use super::values::Parsed;
use crate::convert::{Cut, SplitOptions, merge, shard_path, split, split_plan};
use crate::gguf::Gguf;
use crate::units::size;
use crate::{Error, Result};
use std::path::PathBuf;

#[derive(clap::Args, Debug)]
pub struct Args {
    /// File to split; with --merge the first of those to put together
    #[arg(value_name = "IN.gguf")]
    input: PathBuf,
    /// Beginning of the names of the files: OUT-00001-of-00003.gguf; with --merge the file to
    /// write
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Tensors a file at most
    #[arg(long, value_name = "N", default_value = "128", value_parser = args::tokens)]
    split_max_tensors: usize,
    /// Size of a file's tensors at most: N with M or G behind it, for 10^6 or 10^9 bytes
    #[arg(long, value_name = "SIZE", value_parser = max_size)]
    #[arg(conflicts_with = "split_max_tensors")]
    split_max_size: Option<u64>,
    /// Write a first file of metadata alone
    #[arg(long)]
    no_tensor_first_split: bool,
    /// Say what would be written, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Split, which is the default
    #[arg(long, hide = true, conflicts_with = "merge")]
    split: bool,
    /// Put the files together, as moeba merge does
    #[arg(long, conflicts_with_all = ["split_max_tensors", "split_max_size", "dry_run"])]
    merge: bool,
}

#[derive(clap::Args, Debug)]
pub struct MergeArgs {
    /// First file of a split model
    #[arg(value_name = "IN-00001-of-N.gguf")]
    input: PathBuf,
    /// File to write
    #[arg(value_name = "OUT.gguf")]
    output: PathBuf,
}

/// llama-gguf-split's sizes.
fn max_size(text: &str) -> Parsed<u64> {
    let units = [('M', 1_000_000), ('G', 1_000_000_000)];
    let size = units.iter().find_map(|(unit, bytes)| {
        let n: u64 = text.strip_suffix(*unit)?.parse().ok()?;
        n.checked_mul(*bytes).filter(|n| *n > 0)
    });
    size.ok_or_else(|| "expected a whole number with M or G behind it".into())
}

pub fn run(args: Args) -> Result<()> {
    if args.merge {
        return run_merge(MergeArgs { input: args.input, output: args.output });
    }
    let options = SplitOptions {
        input: args.input,
        prefix: prefix(args.output),
        cut: match args.split_max_size {
            Some(n) => Cut::MaxBytes(n),
            None => Cut::MaxTensors(args.split_max_tensors),
        },
        no_tensor_first_split: args.no_tensor_first_split,
    };
    if options.prefix.file_name().is_none() {
        return Err(Error::Usage("OUT: expected what the names of files begin with".into()));
    }
    if !args.dry_run {
        return split(&options).map(|written| report(&written, &options.prefix));
    }
    let parts = split_plan(&Gguf::open(&options.input)?, &options);
    for (no, (tensors, bytes)) in parts.iter().enumerate() {
        let path = shard_path(&options.prefix, no, parts.len());
        out::line(&format!("{}: {} tensors, {}", path.display(), tensors.len(), size(*bytes)))?;
    }
    Ok(())
}

pub fn run_merge(args: MergeArgs) -> Result<()> {
    merge(&args.input, &args.output).map(|written| report(&written, &args.output))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit() {
        assert_eq!((max_size("3M"), max_size("2G")), (Ok(3_000_000), Ok(2_000_000_000)));
        for bad in ["", "M", "0M", "3", "3K", "-1G", "1.5G", "99999999999999999999G"] {
            assert!(max_size(bad).is_err(), "{bad}");
        }
    }
}
