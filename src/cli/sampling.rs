//! Flags of sampling and of a generation's end, with llama.cpp's names and defaults.

use super::prompt::unescape;
use super::values::{self, Parsed};
use crate::engine::{ContextShift, Limits};
use crate::gguf::Gguf;
use crate::sample::{LogitBias, PARAMETERS, Parameter, SamplerKind, SamplerOptions, recommend};
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

/// The options that the command line or the environment sets: a flag for each row of
/// [`PARAMETERS`], and [`ChainArgs`].
#[derive(Debug)]
pub struct SamplingArgs {
    numbers: Vec<(&'static Parameter, f64)>,
    chain: ChainArgs,
}

/// Flags whose values are no plain numbers.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Sampling")]
struct ChainArgs {
    /// Samplers in their order, by names between semicolons [default: the model's, else
    /// penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature]
    #[arg(long, value_name = "NAMES", overrides_with = "sampler_seq", value_parser = by_names)]
    samplers: Option<Chain>,
    /// Samplers in their order, by letters [default: edskypmxt]
    #[arg(long, visible_alias = "sampling-seq", value_name = "LETTERS")]
    #[arg(overrides_with = "samplers", value_parser = by_letters)]
    sampler_seq: Option<Chain>,
    /// A string that ends DRY's repetitions, in place of \n, :, " and *, or none; may be
    /// repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    dry_sequence_breaker: Vec<String>,
    /// Add BIAS to the logit of token ID: 15043+1, 15043-2.5, 15043-inf; may be repeated
    #[arg(short, long, value_name = "ID±BIAS", value_parser = logit_bias)]
    logit_bias: Vec<LogitBias>,
    /// Random seed; -1 draws a new one each time
    #[arg(short, long, value_name = "N", default_value = "-1", value_parser = seed)]
    #[arg(env = "MOEBA_SEED")]
    seed: i64,
}

/// Samplers in their order.
#[derive(Clone, Debug)]
struct Chain(Vec<SamplerKind>);

fn by_names(text: &str) -> Parsed<Chain> {
    SamplerKind::from_names(text).map(Chain)
}

fn by_letters(text: &str) -> Parsed<Chain> {
    SamplerKind::from_letters(text).map(Chain)
}

/// A token's id, a sign and what is added to its logit: a number, or −∞.
fn logit_bias(text: &str) -> Parsed<LogitBias> {
    let parsed = || {
        let sign = text.find(['+', '-'])?;
        let (id, bias) = (text[..sign].trim().parse().ok()?, text[sign + 1..].trim());
        // A second sign is none.
        let size: f32 = bias.parse().ok().filter(|_| !bias.starts_with(['+', '-']))?;
        let bias = if text[sign..].starts_with('-') { -size } else { size };
        Some(LogitBias { id, bias })
    };
    let is_bias = |b: &LogitBias| b.bias.is_finite() || b.is_ban();
    parsed().filter(is_bias).ok_or_else(|| {
        "expected a token id, a sign and a number or -inf, as in 15043+1 or 15043-inf".into()
    })
}

/// The breakers that flags name, one after the other: `none` forgets those before it.
fn breakers(given: &[String]) -> Vec<String> {
    let after = given.iter().rposition(|text| text == "none").map_or(0, |at| at + 1);
    given[after..].iter().map(|text| unescape(text)).collect()
}

/// Writes a text so that `breakers` reads it back.
fn escape(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('\n', "\\n");
    text.replace('\r', "\\r").replace('\t', "\\t")
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
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
    /// The given values; else the file's recommendations; else llama.cpp's defaults.
    pub fn options(&self, gguf: &Gguf) -> SamplerOptions {
        let mut options = SamplerOptions::default();
        let ChainArgs { samplers, sampler_seq, dry_sequence_breaker, logit_bias, seed } =
            &self.chain;
        let samplers = samplers.as_ref().or(sampler_seq.as_ref());
        let is_given = |name: &str| match name {
            "samplers" => samplers.is_some(),
            _ => self.numbers.iter().any(|(p, _)| p.name == name),
        };
        recommend(&mut options, gguf, is_given);
        if let Some(Chain(samplers)) = samplers {
            options.samplers.clone_from(samplers);
        }
        for (parameter, value) in &self.numbers {
            parameter.set(&mut options, *value);
        }
        if !dry_sequence_breaker.is_empty() {
            options.dry.breakers = breakers(dry_sequence_breaker);
        }
        options.logit_bias.clone_from(logit_bias);
        options.seed = u64::try_from(*seed).ok();
        options
    }

    /// The seed, unless a new one is drawn each time.
    pub fn seed(&self) -> Option<u64> {
        u64::try_from(self.chain.seed).ok()
    }
}

/// An option's name as `settings` has it.
pub fn canonical(name: &str) -> String {
    match Parameter::named(name) {
        Some(parameter) => parameter.name.into(),
        None => match name.trim_start_matches('-').replace('_', "-").as_str() {
            "sampling-seq" => "sampler-seq".into(),
            "l" => "logit-bias".into(),
            other => other.into(),
        },
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
        "samplers" => options.samplers = by_names(value)?.0,
        "sampler-seq" => options.samplers = by_letters(value)?.0,
        "dry-sequence-breaker" => options.dry.breakers = breakers(&words(value)),
        "logit-bias" if value == "none" => options.logit_bias.clear(),
        "logit-bias" => options.logit_bias.push(logit_bias(value)?),
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
    let names: Vec<&str> = options.samplers.iter().map(|kind| kind.name()).collect();
    let letters = options.samplers.iter().map(|kind| kind.letter()).collect();
    let biases: Vec<_> =
        options.logit_bias.iter().map(|b| format!("{}{:+}", b.id, b.bias)).collect();
    let listed =
        |texts: Vec<String>| if texts.is_empty() { "none".into() } else { texts.join(" ") };
    let breakers = options.dry.breakers.iter().map(|text| escape(text)).collect();
    all.extend([
        ("samplers", names.join(";")),
        ("sampler-seq", letters),
        ("dry-sequence-breaker", listed(breakers)),
        ("logit-bias", listed(biases)),
        ("seed", options.seed.map_or("-1".into(), |seed| seed.to_string())),
    ]);
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
    /// Go on when the context is full: the older half of the text leaves it
    #[arg(long, overrides_with = "no_context_shift", env = "MOEBA_CONTEXT_SHIFT")]
    #[arg(value_parser = values::boolean, hide_short_help = true)]
    context_shift: bool,
    /// End the text there; the default
    #[arg(long, overrides_with = "context_shift", hide_short_help = true)]
    no_context_shift: bool,
    /// Tokens of the prompt that stay then; -1 for all
    #[arg(long, value_name = "N", default_value = "0", value_parser = n_keep)]
    #[arg(hide_short_help = true)]
    keep: i64,
}

fn n_keep(text: &str) -> Parsed<i64> {
    values::integer(text, -1, super::args::MAX_TOKENS)
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
            context_shift: (self.context_shift && !self.no_context_shift)
                .then_some(ContextShift { n_keep: usize::try_from(self.keep).ok() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_have_a_sign() {
        let bias = |id, bias| Ok(LogitBias { id, bias });
        assert_eq!(logit_bias("15043+1"), bias(15043, 1.0));
        assert_eq!(logit_bias(" 7 - 2.5e1"), bias(7, -25.0));
        assert_eq!(logit_bias("7-inf"), bias(7, f32::NEG_INFINITY));
        for bad in ["", "7", "+1", "7+", "7+inf", "7--1", "7+nan", "-7+1", "x-1", "99999999999+1"] {
            assert!(logit_bias(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn breakers_take_the_place_of_what_was_before_none() {
        let owned = |texts: &[&str]| texts.iter().map(|t| t.to_string()).collect::<Vec<_>>();
        let given = |texts: &[&str]| breakers(&owned(texts));
        assert_eq!(given(&["\\n", "-"]), ["\n", "-"]);
        assert_eq!(given(&["a", "none", "b"]), ["b"]);
        assert_eq!(given(&["none"]), [""; 0]);
    }

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
