//! `moeba quantize`: a GGUF file to one of another type or layout.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};

use super::args;
use super::convert::{LayoutArg, report};
use crate::convert::{Mix, QuantizeOptions, READ_ONLY, TypeRule, TypeRules, block_type, quantize};
use crate::gguf::TensorType;
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
    /// Number of threads [default: one for each processor]
    #[arg(value_name = "THREADS", value_parser = args::n_threads)]
    threads: Option<usize>,
    #[command(flatten)]
    layout: LayoutArg,
    /// Importance matrix of moeba imatrix or llama-imatrix, so that columns that matter lose less
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Quantize weights that are already quantized, which adds up the losses of both
    #[arg(long)]
    allow_requantize: bool,
    /// Write as many files as IN has, OUT-00001-of-00003.gguf and so on
    #[arg(long)]
    keep_split: bool,
    #[command(flatten)]
    types: TypeArgs,
}

/// Types of some tensors, which come before TYPE.
#[derive(Args, Debug)]
#[command(next_help_heading = "Types of some tensors")]
struct TypeArgs {
    /// Type of the tensors in whose names the regular expression is found; may be repeated, the
    /// first match counts
    #[arg(long, value_name = "PATTERN=TYPE")]
    tensor_type: Vec<TypeRule>,
    /// Type of output.weight, and of an embedding that stands in for it
    #[arg(long, value_name = "TYPE", value_parser = block_type)]
    output_tensor_type: Option<TensorType>,
    /// Type of token_embd.weight
    #[arg(long, value_name = "TYPE", value_parser = block_type)]
    token_embedding_type: Option<TensorType>,
    /// Give all matrices the type that TYPE has for most
    #[arg(long)]
    pure: bool,
    /// Leave output.weight as it is
    #[arg(long)]
    leave_output_tensor: bool,
}

/// The beginning of the names of a model's files, of a name that may end in `.gguf`.
pub(super) fn prefix(name: PathBuf) -> PathBuf {
    if name.extension().is_some_and(|end| end == "gguf") { name.with_extension("") } else { name }
}

/// The values of TYPE for clap. Read-only formats are among them, so that the error can name them.
fn type_names() -> PossibleValuesParser {
    let shown = Mix::names().chain([COPY]).map(PossibleValue::new);
    let hidden = Mix::aliases().chain(read_only()).map(|name| PossibleValue::new(name).hide(true));
    PossibleValuesParser::new(shown.chain(hidden))
}

fn read_only() -> impl Iterator<Item = &'static str> {
    READ_ONLY.iter().map(|(name, _)| *name)
}

pub fn run(args: QuantizeArgs) -> Result<()> {
    if read_only().any(|name| args.ty.eq_ignore_ascii_case(name)) {
        let known = Mix::names().collect::<Vec<_>>().join(", ");
        let refusal =
            format!("{}: moeba reads this type but cannot write it; give one of {known}", args.ty);
        return Err(Error::Usage(refusal));
    }
    let options = QuantizeOptions {
        input: args.input,
        output: match args.keep_split {
            true => prefix(args.output),
            false => args.output,
        },
        // clap has checked the name, so that one which is no mix is `COPY`.
        mix: Mix::from_name(&args.ty),
        layout: args.layout.layout(),
        imatrix: args.imatrix,
        allow_requantize: args.allow_requantize,
        types: TypeRules {
            tensors: args.types.tensor_type,
            output: args.types.output_tensor_type,
            embedding: args.types.token_embedding_type,
            pure: args.types.pure,
            leave_output: args.types.leave_output_tensor,
        },
        keep_split: args.keep_split,
    };
    let written = match args.threads {
        None => quantize(&options)?,
        Some(n) => {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build();
            pool.map_err(|e| Error::invalid(e.to_string()))?.install(|| quantize(&options))?
        }
    };
    report(&written, &options.output);
    Ok(())
}
