//! Flags of sampling and of a generation's end, with llama.cpp's names and defaults.

use super::generate::Limits;
use super::values::{self, Parsed};
use crate::sample::SamplerOptions;

/// Beyond any use; keeps products of logits far from infinity.
const MAX_FACTOR: f32 = 1e6;

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Temperature; 0 always takes the most probable token
    #[arg(long, alias = "temperature", value_name = "T", default_value = "0.8")]
    #[arg(value_parser = temperature, env = "MOEBA_TEMP")]
    temp: f32,
    /// Only the K most probable tokens; 0 is all
    #[arg(long, value_name = "K", default_value = "40", value_parser = top_k)]
    #[arg(env = "MOEBA_TOP_K")]
    top_k: i32,
    /// Only the most probable tokens that together have probability P; 1 is all
    #[arg(long, value_name = "P", default_value = "0.95", value_parser = probability)]
    #[arg(env = "MOEBA_TOP_P")]
    top_p: f32,
    /// Only tokens at least P times as probable as the most probable one; 0 is all
    #[arg(long, value_name = "P", default_value = "0.05", value_parser = probability)]
    #[arg(env = "MOEBA_MIN_P")]
    min_p: f32,
    /// Divide the logits of recent tokens by this; 1 is off
    #[arg(long, value_name = "X", default_value = "1", value_parser = factor)]
    #[arg(env = "MOEBA_REPEAT_PENALTY")]
    repeat_penalty: f32,
    /// How many recent tokens the penalties see; 0 is none, -1 all
    #[arg(long, value_name = "N", default_value = "64", value_parser = look_back)]
    repeat_last_n: i32,
    /// Subtract this from the logits of tokens that occurred
    #[arg(long, value_name = "X", default_value = "0", value_parser = penalty)]
    #[arg(env = "MOEBA_PRESENCE_PENALTY")]
    presence_penalty: f32,
    /// Subtract this for each time that a token occurred
    #[arg(long, value_name = "X", default_value = "0", value_parser = penalty)]
    #[arg(env = "MOEBA_FREQUENCY_PENALTY")]
    frequency_penalty: f32,
    /// Random seed; -1 is a new one each time
    #[arg(short, long, value_name = "N", default_value = "-1", value_parser = seed)]
    #[arg(env = "MOEBA_SEED")]
    seed: i64,
}

fn temperature(text: &str) -> Parsed<f32> {
    values::float(text, 0.0, MAX_FACTOR)
}

pub fn probability(text: &str) -> Parsed<f32> {
    values::float(text, 0.0, 1.0)
}

fn factor(text: &str) -> Parsed<f32> {
    values::float(text, 1.0 / MAX_FACTOR, MAX_FACTOR)
}

fn penalty(text: &str) -> Parsed<f32> {
    values::float(text, -MAX_FACTOR, MAX_FACTOR)
}

fn top_k(text: &str) -> Parsed<i32> {
    values::integer(text, 0, i32::MAX.into())
}

fn look_back(text: &str) -> Parsed<i32> {
    values::integer(text, -1, i32::MAX.into())
}

fn seed(text: &str) -> Parsed<i64> {
    values::integer(text, -1, u32::MAX.into())
}

impl SamplingArgs {
    pub fn options(&self) -> SamplerOptions {
        SamplerOptions {
            temp: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: u64::try_from(self.seed).ok(),
        }
    }
}

/// An option's name as `settings` has it.
pub fn canonical(name: &str) -> String {
    match name.trim_start_matches('-').replace('_', "-").as_str() {
        "temperature" => "temp".into(),
        name => name.into(),
    }
}

/// Changes one option by its flag's name: a chat's `/set`.
pub fn set(options: &mut SamplerOptions, name: &str, value: &str) -> Parsed<()> {
    match canonical(name).as_str() {
        "temp" => options.temp = temperature(value)?,
        "top-k" => options.top_k = top_k(value)?,
        "top-p" => options.top_p = probability(value)?,
        "min-p" => options.min_p = probability(value)?,
        "repeat-penalty" => options.repeat_penalty = factor(value)?,
        "repeat-last-n" => options.repeat_last_n = look_back(value)?,
        "presence-penalty" => options.presence_penalty = penalty(value)?,
        "frequency-penalty" => options.frequency_penalty = penalty(value)?,
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
    vec![
        ("temp", options.temp.to_string()),
        ("top-k", options.top_k.to_string()),
        ("top-p", options.top_p.to_string()),
        ("min-p", options.min_p.to_string()),
        ("repeat-penalty", options.repeat_penalty.to_string()),
        ("repeat-last-n", options.repeat_last_n.to_string()),
        ("presence-penalty", options.presence_penalty.to_string()),
        ("frequency-penalty", options.frequency_penalty.to_string()),
        ("seed", options.seed.map_or("-1".into(), |seed| seed.to_string())),
    ]
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Generation")]
pub struct LimitArgs {
    /// Tokens to generate; -1 is until the model or the context ends
    #[arg(short = 'n', long, visible_alias = "n-predict", value_name = "N", default_value = "-1")]
    #[arg(value_parser = n_predict, env = "MOEBA_N_PREDICT")]
    predict: i64,
    /// Go on when the model says that it is done
    #[arg(long)]
    ignore_eos: bool,
    /// End the text before this one; may be repeated
    #[arg(short, long, visible_alias = "stop", value_name = "TEXT", allow_hyphen_values = true)]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    reverse_prompt: Vec<String>,
}

pub fn n_predict(text: &str) -> Parsed<i64> {
    // llama.cpp's -2 is "until the context is full", which is where -1 ends, too.
    values::integer(text, -2, super::args::MAX_TOKENS)
}

impl LimitArgs {
    pub fn limits(&self) -> Limits {
        Limits {
            n_predict: usize::try_from(self.predict).ok(),
            ignore_eos: self.ignore_eos,
            stops: self.reverse_prompt.clone(),
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
