//! `moeba quantize`: a GGUF file to one of another type or layout.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};

use super::convert::{LayoutArg, report};
use crate::convert::{Mix, QuantizeOptions, READ_ONLY, quantize};
use crate::{Error, Result};

/// The type that is none: every tensor keeps its own.
const COPY: &str = "copy";

#[derive(Args, Debug)]
pub struct QuantizeArgs {
    /// File to read
    #[arg(value_name = "IN.gguf")]
    input: PathBuf,
    /// File to write
    #[arg(value_name = "OUT.gguf")]
    output: PathBuf,
    /// Type of the weights; copy keeps them as they are, to change the layout or merge a split file
    #[arg(
        value_name = "TYPE",
        ignore_case = true,
        value_parser = type_names(),
    )]
    ty: String,
    #[command(flatten)]
    layout: LayoutArg,
    /// Importance matrix that llama-imatrix wrote, so that columns that matter lose less
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Quantize weights that are already quantized, which adds up the losses of both
    #[arg(long)]
    allow_requantize: bool,
}

/// The values of TYPE for clap. Read-only formats are among them, so that the error can name them.
fn type_names() -> PossibleValuesParser {
    let shown = Mix::names().chain([COPY]).map(PossibleValue::new);
    let hidden = Mix::aliases().chain(READ_ONLY).map(|name| PossibleValue::new(name).hide(true));
    PossibleValuesParser::new(shown.chain(hidden))
}

pub fn run(args: QuantizeArgs) -> Result<()> {
    if READ_ONLY.iter().any(|name| name.eq_ignore_ascii_case(&args.ty)) {
        let known = Mix::names().collect::<Vec<_>>().join(", ");
        let refusal =
            format!("{}: moeba reads this type but cannot write it; give one of {known}", args.ty);
        return Err(Error::Usage(refusal));
    }
    let options = QuantizeOptions {
        input: args.input,
        output: args.output,
        // clap has checked the name, so that one which is no mix is `COPY`.
        mix: Mix::from_name(&args.ty),
        layout: args.layout.layout(),
        imatrix: args.imatrix,
        allow_requantize: args.allow_requantize,
    };
    let written = quantize(&options)?;
    report(&written, &options.output);
    Ok(())
}
