//! `moeba convert`: a Hugging Face checkpoint to a GGUF file.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::out;
use crate::Result;
use crate::convert::{ConvertOptions, Layout, Mix, Written, convert, needs_imatrix};
use crate::units::size;

#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// Folder with config.json, the safetensors files and the tokenizer
    #[arg(value_name = "HF_DIR")]
    folder: PathBuf,
    /// File to write
    #[arg(short, long, value_name = "OUT.gguf")]
    output: PathBuf,
    /// Type of the weights; auto keeps the checkpoint's own types [default: auto]
    #[arg(long, value_name = "TYPE", ignore_case = true, value_parser = mix_names())]
    outtype: Option<String>,
    /// Name of the pre-tokenizer, if moeba does not recognise its pattern
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
    /// Name of the model, general.name in the file [default: the folder's name]
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    /// Leave out the layers that predict further tokens, which draft for --spec
    #[arg(long)]
    no_mtp: bool,
    /// Folder of a PEFT LoRA adapter to merge into the weights; may be given several times
    #[arg(long, value_name = "ADAPTER_DIR")]
    lora: Vec<PathBuf>,
    /// Write the adapter as a GGUF file of its own, for --lora of other commands, not the model
    #[arg(long, requires = "lora")]
    lora_only: bool,
    #[command(flatten)]
    layout: LayoutArg,
}

/// The name of the checkpoint's own types, which are no mix.
const OWN_TYPES: &str = "auto";

/// The names of mixes that need no importance matrix, for clap to check and show.
fn mix_names() -> PossibleValuesParser {
    let names = Mix::names().filter(|name| !Mix::from_name(name).is_some_and(needs_imatrix));
    PossibleValuesParser::new([OWN_TYPES].into_iter().chain(names))
}

/// The layout of routed experts in the file.
#[derive(Args, Debug)]
pub(super) struct LayoutArg {
    /// Layout of routed experts: standard, which any GGUF reader knows, or granule, the order in
    /// which moeba reads them from disk, which llama.cpp cannot read
    #[arg(
        long,
        value_name = "LAYOUT",
        default_value = "standard",
        ignore_case = true,
        value_parser = PossibleValuesParser::new(Layout::names()),
    )]
    layout: String,
}

impl LayoutArg {
    pub(super) fn layout(&self) -> Layout {
        Layout::from_name(&self.layout).unwrap_or_default()
    }
}

pub fn run(args: ConvertArgs) -> Result<()> {
    let options = ConvertOptions {
        folder: args.folder,
        output: args.output,
        mix: args.outtype.as_deref().and_then(Mix::from_name),
        pre: args.pre,
        name: args.model_name,
        no_mtp: args.no_mtp,
        layout: args.layout.layout(),
        lora: args.lora,
        lora_only: args.lora_only,
    };
    let written = convert(&options)?;
    report(&written, &options.output);
    Ok(())
}

/// One line: what was written, how large, how fast.
pub(super) fn report(written: &Written, output: &std::path::Path) {
    let before = written.bytes_in.map_or_else(String::new, |n| format!("{} to ", size(n)));
    let rate = written.bytes_out as f64 / f64::from(1 << 20) / written.seconds.max(1e-3);
    out::note(&format!(
        "{}: {} tensors, {before}{} in {:.1} s ({rate:.0} MiB/s)",
        output.display(),
        written.n_tensors,
        size(written.bytes_out),
        written.seconds,
    ));
}
