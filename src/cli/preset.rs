//! A published model's shapes in the place of a file: `--dry-run` tells what the model would need
//! on this machine.

use super::model::ModelArg;
use super::plan;
use crate::convert::{PRESETS, preset_header, synth_type_names};
use crate::engine::{Engine, EngineOptions};
use crate::{Error, Result};
use clap::builder::PossibleValuesParser;
use std::path::Path;

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Report")]
pub struct PresetArgs {
    /// With --dry-run: a published model's shapes instead of MODEL (see synth)
    #[arg(long, value_name = "NAME", conflicts_with_all = ["model", "hf_repo"])]
    #[arg(hide_short_help = true)]
    #[arg(value_parser = PossibleValuesParser::new(PRESETS))]
    preset: Option<String>,
    /// Number of layers of --preset [default: all]
    #[arg(long, value_name = "N", hide_short_help = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    layers: Option<u32>,
    /// Type of the weights of --preset: q4_k and q5_k for every matrix, or a mix of quantize
    /// [default: q4_k]
    #[arg(long = "type", value_name = "TYPE", ignore_case = true, hide_short_help = true)]
    #[arg(hide_possible_values = true)]
    #[arg(value_parser = PossibleValuesParser::new(synth_type_names()))]
    ty: Option<String>,
}

impl PresetArgs {
    /// The preset's name, if one is given.
    pub fn name(&self) -> Result<Option<&str>> {
        if self.preset.is_none() && (self.layers.is_some() || self.ty.is_some()) {
            return Err(Error::Usage("--layers and --type are those of --preset: give one".into()));
        }
        Ok(self.preset.as_deref())
    }

    /// Prints the plan of `--dry-run` for a preset.
    pub fn print_plan(&self, name: &str, model: &ModelArg, options: EngineOptions) -> Result<()> {
        let header = preset_header(name, self.layers, self.ty.as_deref().unwrap_or("q4_k"))?;
        let options = EngineOptions { overrides: model.overrides(), ..options };
        plan::print(&Engine::plan_of_header(header, &options)?, Some(Path::new(".")))
    }
}

/// The error for a run of shapes.
pub fn without_weights(preset: &str) -> Error {
    Error::Usage(format!(
        "--preset has no weights to run: add --dry-run for the plan, or write a file with `moeba \
         synth {preset} -o FILE`"
    ))
}
