//! `moeba synth`: random weights in a published model's shapes.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::convert::{LayoutArg, report};
use crate::Result;
use crate::convert::{
    PRESETS, Routing, SynthOptions, preset_architecture, synth, synth_type_names,
};
use crate::model::descriptor::Descriptor;

#[derive(Args, Debug)]
pub struct SynthArgs {
    /// Published model to take the shapes from
    #[arg(value_name = "PRESET", value_parser = PossibleValuesParser::new(PRESETS))]
    preset: String,
    /// File to write
    #[arg(short, long, value_name = "OUT.gguf")]
    output: PathBuf,
    /// Number of layers [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    layers: Option<u32>,
    /// Type of the weights: q4_k and q5_k for every matrix, or a mix of `quantize`
    #[arg(
        long = "type",
        value_name = "TYPE",
        default_value = "q4_k",
        ignore_case = true,
        value_parser = PossibleValuesParser::new(synth_type_names()),
    )]
    ty: String,
    /// How routers choose experts: all as often, some more often than others, or again and again
    /// those of the last tokens, as in trained models
    #[arg(
        long,
        value_name = "NAME",
        default_value = "uniform",
        ignore_case = true,
        value_parser = PossibleValuesParser::new(Routing::names()),
    )]
    routing: String,
    /// Seed of the random weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    layout: LayoutArg,
}

pub fn run(args: SynthArgs) -> Result<()> {
    let options = SynthOptions {
        preset: args.preset,
        output: args.output,
        layers: args.layers,
        ty: args.ty,
        seed: args.seed,
        routing: Routing::from_name(&args.routing).unwrap_or_default(),
        layout: args.layout.layout(),
    };
    let written = synth(&options)?;
    report(&written, &options.output);
    let architecture = preset_architecture(&options.preset).unwrap_or_default();
    if Descriptor::for_architecture(&architecture, &options.output).is_err() {
        log::warn!("moeba cannot run {architecture} models yet; `inspect` and llama.cpp read them");
    }
    Ok(())
}
