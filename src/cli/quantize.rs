//! `moeba quantize`: a GGUF file to one of another type or layout.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::convert::{LayoutArg, report};
use crate::Result;
use crate::convert::{Mix, QuantizeOptions, quantize};

/// The type that is none: every tensor keeps its own.
const COPY: &str = "copy";

/// Change the type or the layout of a GGUF file's weights
#[derive(Args, Debug)]
pub struct QuantizeArgs {
    /// File to read
    #[arg(value_name = "IN.gguf")]
    input: PathBuf,
    /// File to write
    #[arg(value_name = "OUT.gguf")]
    output: PathBuf,
    /// Type of the weights; copy: as they are, for another layout
    #[arg(
        value_name = "TYPE",
        ignore_case = true,
        value_parser = PossibleValuesParser::new(Mix::names().chain([COPY])),
    )]
    ty: String,
    #[command(flatten)]
    layout: LayoutArg,
    /// Quantise weights that are quantised already, with the loss of both
    #[arg(long)]
    allow_requantize: bool,
}

pub fn run(args: QuantizeArgs) -> Result<()> {
    let options = QuantizeOptions {
        input: args.input,
        output: args.output,
        // clap has checked the name, so that one which is no mix is `COPY`.
        mix: Mix::from_name(&args.ty),
        layout: args.layout.layout(),
        allow_requantize: args.allow_requantize,
    };
    let written = quantize(&options)?;
    report(&written, &options.output);
    Ok(())
}
