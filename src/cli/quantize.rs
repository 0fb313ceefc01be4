//! `moeba quantize`: a GGUF file to one of another type.

use std::path::PathBuf;

use clap::Args;

use super::convert::{mix_names, report};
use crate::convert::{Mix, QuantizeOptions, quantize};
use crate::{Error, Result};

/// Change the type of a GGUF file's weights
#[derive(Args, Debug)]
pub struct QuantizeArgs {
    /// File to read
    #[arg(value_name = "IN.gguf")]
    input: PathBuf,
    /// File to write
    #[arg(value_name = "OUT.gguf")]
    output: PathBuf,
    /// Type of the weights
    #[arg(value_name = "TYPE", ignore_case = true, value_parser = mix_names())]
    ty: String,
    /// Quantise weights that are quantised already, with the loss of both
    #[arg(long)]
    allow_requantize: bool,
}

pub fn run(args: QuantizeArgs) -> Result<()> {
    let mix = Mix::from_name(&args.ty);
    let options = QuantizeOptions {
        input: args.input,
        output: args.output,
        mix: mix.ok_or_else(|| Error::Usage(format!("unknown type {:?}", args.ty)))?,
        allow_requantize: args.allow_requantize,
    };
    let written = quantize(&options)?;
    report(&written, &options.output);
    Ok(())
}
