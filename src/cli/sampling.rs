//! Flags of sampling and of a generation's end, with llama.cpp's names and defaults.

use super::generate::Limits;
use super::values::{self, Parsed};
use crate::gguf::Gguf;
use crate::sample::{PARAMETERS, Parameter, SamplerOptions, recommend};
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

/// What the command line or the environment sets. A flag for each row of [`PARAMETERS`], and those
/// of [`ChainArgs`].
#[derive(Debug)]
pub struct SamplingArgs {
    numbers: Vec<(&'static Parameter, f64)>,
    chain: ChainArgs,
}

/// Flags whose values are no plain numbers.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Sampling")]
struct ChainArgs {
    /// Random seed; -1 draws a new one each time
    #[arg(short, long, value_name = "N", default_value = "-1", value_parser = seed)]
    #[arg(env = "MOEBA_SEED")]
    seed: i64,
}

fn seed(text: &str) -> Parsed<i64> {
    values::integer(text, -1, u32::MAX.into())
}

fn flag(parameter: &'static Parameter) -> Arg {
    let default = parameter.text(&SamplerOptions::default());
    let default = match parameter.key {
        Some(_) => format!("the model's, else {default}"),
        None => default,
    };
    let arg = Arg::new(parameter.name)
        .long(parameter.name)
        .aliases(parameter.aliases)
        .value_name(if parameter.is_whole() { "N" } else { "X" })
        .help(format!("{} [default: {default}]", parameter.help))
        .help_heading("Sampling")
        .value_parser(move |text: &str| parameter.parse(text));
    match parameter.variable {
        Some(name) => arg.env(name),
        None => arg,
    }
}

impl Args for SamplingArgs {
    fn augment_args(command: Command) -> Command {
        ChainArgs::augment_args(command.args(PARAMETERS.iter().map(flag)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SamplingArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |p: &'static Parameter| Some((p, *matches.get_one::<f64>(p.name)?));
        let numbers = PARAMETERS.iter().filter_map(given).collect();
        Ok(Self { numbers, chain: ChainArgs::from_arg_matches(matches)? })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl SamplingArgs {
    /// What is given; else what the file recommends; else llama.cpp's defaults.
    pub fn options(&self, gguf: &Gguf) -> SamplerOptions {
        let mut options = SamplerOptions::default();
        let is_given = |name: &str| self.numbers.iter().any(|(p, _)| p.name == name);
        recommend(&mut options, gguf, is_given);
        for (parameter, value) in &self.numbers {
            parameter.set(&mut options, *value);
        }
        options.seed = u64::try_from(self.chain.seed).ok();
        options
    }
}

/// An option's name as `settings` has it.
pub fn canonical(name: &str) -> String {
    match Parameter::named(name) {
        Some(parameter) => parameter.name.into(),
        None => name.trim_start_matches('-').replace('_', "-"),
    }
}

/// Changes one option by its flag's name: a chat's `/set`.
pub fn set(options: &mut SamplerOptions, name: &str, value: &str) -> Parsed<()> {
    if let Some(parameter) = Parameter::named(name) {
        parameter.set(options, parameter.parse(value)?);
        return Ok(());
    }
    match canonical(name).as_str() {
        "seed" => options.seed = u64::try_from(seed(value)?).ok(),
        _ => return Err(unknown(options)),
    }
    Ok(())
}

pub fn unknown(options: &SamplerOptions) -> String {
    let names: Vec<&str> = settings(options).iter().map(|(name, _)| *name).collect();
    format!("there is no such option; the options are {} and n", names.join(", "))
}

/// The options that `set` changes, with their values.
pub fn settings(options: &SamplerOptions) -> Vec<(&'static str, String)> {
    let mut all: Vec<_> = PARAMETERS.iter().map(|p| (p.name, p.text(options))).collect();
    all.push(("seed", options.seed.map_or("-1".into(), |seed| seed.to_string())));
    all
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Generation")]
pub struct LimitArgs {
    /// Tokens to generate; -1 goes on until the model ends or the context is full
    #[arg(short = 'n', long, visible_alias = "n-predict", value_name = "N", default_value = "-1")]
    #[arg(value_parser = n_predict, env = "MOEBA_N_PREDICT")]
    predict: i64,
    /// Go on after an end-of-text token
    #[arg(long)]
    ignore_eos: bool,
    /// Stop before this text; may be repeated
    #[arg(short, long, visible_alias = "stop", value_name = "TEXT", allow_hyphen_values = true)]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    reverse_prompt: Vec<String>,
}

pub fn n_predict(text: &str) -> Parsed<i64> {
    // llama.cpp's -2 is "until the context is full", which is where -1 ends, too.
    values::integer(text, -2, super::args::MAX_TOKENS)
}

impl LimitArgs {
    /// `unescaped` is for the stop strings.
    pub fn limits(&self, unescaped: impl Fn(&str) -> String) -> Limits {
        Limits {
            n_predict: usize::try_from(self.predict).ok(),
            ignore_eos: self.ignore_eos,
            stops: self.reverse_prompt.iter().map(|text| unescaped(text)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_listed_can_be_set() {
        let mut options = SamplerOptions::default();
        let before = settings(&options);
        for (name, value) in &before {
            set(&mut options, name, value).unwrap_or_else(|why| panic!("{name}: {why}"));
        }
        assert_eq!(settings(&options), before);
    }
}
