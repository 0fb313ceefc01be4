//! The numbers that shape sampling, a row each. Flags, a chat's `/set`, a file's defaults and the
//! check of ranges all read this table. Names and meanings are llama.cpp's.

use super::{SamplerKind, SamplerOptions};
use SamplerKind as K;

/// Beyond any use; keeps sums and products of logits finite.
const MAX: f32 = 1e6;

/// One number of [`SamplerOptions`].
#[derive(Debug)]
pub struct Parameter {
    /// The sampler that it is of; `None`: Mirostat.
    pub sampler: Option<SamplerKind>,
    /// The flag, without its dashes.
    pub name: &'static str,
    /// Other names of the flag.
    pub aliases: &'static [&'static str],
    /// The variable of the environment; `None`: there is none.
    pub variable: Option<&'static str>,
    /// The key in a file, behind `general.sampling.`; `None`: files have none.
    pub key: Option<&'static str>,
    pub help: &'static str,
    range: Range,
    get: fn(&SamplerOptions) -> f64,
    set: fn(&mut SamplerOptions, f64),
}

#[derive(Debug)]
enum Range {
    Whole(i32, i32),
    Real(f32, f32),
}

use Range::{Real, Whole};

impl Parameter {
    /// The parameter that a flag or `/set` names, with dashes or underscores.
    pub fn named(name: &str) -> Option<&'static Parameter> {
        let name = name.trim_start_matches('-').replace('_', "-");
        PARAMETERS.iter().find(|p| p.name == name || p.aliases.contains(&&*name))
    }

    pub fn is_whole(&self) -> bool {
        matches!(self.range, Whole(..))
    }

    /// The values that it takes, for messages.
    pub fn expected(&self) -> String {
        match self.range {
            Whole(i32::MIN, i32::MAX) => "a whole number".into(),
            Whole(from, to) => format!("a whole number from {from} to {to}"),
            Real(from, to) => format!("a number from {from} to {to}"),
        }
    }

    /// Whether it takes this value.
    pub fn takes(&self, value: f64) -> bool {
        match self.range {
            Whole(from, to) => {
                value.fract() == 0.0 && (f64::from(from)..=f64::from(to)).contains(&value)
            }
            Real(from, to) => (f64::from(from)..=f64::from(to)).contains(&value),
        }
    }

    /// A value as a person types it, or what was expected.
    pub fn parse(&self, text: &str) -> Result<f64, String> {
        let text = text.trim();
        let value = match self.range {
            // Model cards write --top-k 20.0.
            Whole(..) => {
                text.strip_suffix(".0").unwrap_or(text).parse::<i64>().ok().map(|n| n as f64)
            }
            Real(..) => text.parse::<f32>().ok().map(f64::from),
        };
        value.filter(|v| self.takes(*v)).ok_or_else(|| format!("expected {}", self.expected()))
    }

    pub fn get(&self, options: &SamplerOptions) -> f64 {
        (self.get)(options)
    }

    /// # Panics
    /// If it does not take this value.
    pub fn set(&self, options: &mut SamplerOptions, value: f64) {
        assert!(self.takes(value), "{}: {value}", self.name);
        (self.set)(options, value);
    }

    /// The value as people write it.
    pub fn text(&self, options: &SamplerOptions) -> String {
        match self.range {
            Whole(..) => self.get(options).to_string(),
            // Not the digits that only an f64 has.
            Real(..) => (self.get(options) as f32).to_string(),
        }
    }
}

/// A row: the sampler, the flag, its other names, the variable, the key, the range, the field and
/// the help.
macro_rules! row {
    ($sampler:expr, $name:literal, $aliases:expr, $variable:expr, $key:expr, $range:expr,
     $($field:ident).+ : $type:ty, $help:literal) => {
        Parameter {
            sampler: $sampler,
            name: $name,
            aliases: &$aliases,
            variable: $variable,
            key: $key,
            help: $help,
            range: $range,
            get: |o| f64::from(o.$($field).+),
            set: |o, value| o.$($field).+ = value as $type,
        }
    };
}

const PROBABILITY: Range = Real(0.0, 1.0);
const ANY: Range = Real(-MAX, MAX);
const POSITIVE: Range = Real(0.0, MAX);
const ANY_WHOLE: Range = Whole(i32::MIN, i32::MAX);
/// −1 is everything.
const TOKENS: Range = Whole(-1, i32::MAX);

const TEMPERATURE: Option<K> = Some(K::Temperature);
const PENALTIES: Option<K> = Some(K::Penalties);
const DRY: Option<K> = Some(K::Dry);
const XTC: Option<K> = Some(K::Xtc);
const ADAPTIVE: Option<K> = Some(K::AdaptiveP);

pub const PARAMETERS: &[Parameter] = &[
    row!(TEMPERATURE, "temp", ["temperature"], Some("MOEBA_TEMP"), Some("temp"), ANY, temp: f32,
        "Temperature; 0 or less always takes the most probable token"),
    row!(TEMPERATURE, "dynatemp-range", [], None, None, ANY, dynatemp.range: f32,
        "Let the temperature follow the entropy, this far up and down; 0 is off"),
    row!(TEMPERATURE, "dynatemp-exp", [], None, None, ANY, dynatemp.exponent: f32,
        "Raise the entropy to this power before the temperature follows it"),
    row!(Some(K::TopK), "top-k", [], Some("MOEBA_TOP_K"), Some("top_k"), ANY_WHOLE, top_k: i32,
        "Only this many of the most probable tokens; 0 or less is all"),
    row!(Some(K::TopP), "top-p", [], Some("MOEBA_TOP_P"), Some("top_p"), PROBABILITY, top_p: f32,
        "Only the most probable tokens that together have this probability; 1 is all"),
    row!(Some(K::MinP), "min-p", [], Some("MOEBA_MIN_P"), Some("min_p"), PROBABILITY, min_p: f32,
        "Only tokens with at least this part of the best one's probability; 0 is all"),
    row!(Some(K::TypicalP), "typical", ["typical-p"], None, None, PROBABILITY, typical_p: f32,
        "Only the most typical tokens that together have this probability; 1 is all"),
    row!(Some(K::TopNSigma), "top-nsigma", ["top-n-sigma"], None, None, ANY, top_n_sigma: f32,
        "Only tokens within this many standard deviations of the best; 0 or less is all"),
    row!(XTC, "xtc-probability", [], None, Some("xtc_probability"), Real(-MAX, 1.0),
        xtc.probability: f32,
        "How often XTC drops the top choices but the least probable one; 0 is never"),
    row!(XTC, "xtc-threshold", [], None, Some("xtc_threshold"), PROBABILITY, xtc.threshold: f32,
        "Tokens at least this probable are XTC's top choices; above 0.5 is off"),
    row!(PENALTIES, "repeat-penalty", [], Some("MOEBA_REPEAT_PENALTY"), Some("penalty_repeat"),
        Real(1.0 / MAX, MAX), repeat_penalty: f32,
        "Divide the logits of recent tokens by this; 1 is off"),
    row!(PENALTIES, "repeat-last-n", [], None, Some("penalty_last_n"), TOKENS, repeat_last_n: i32,
        "How many recent tokens the penalties see; 0 is none, -1 all"),
    row!(PENALTIES, "presence-penalty", [], Some("MOEBA_PRESENCE_PENALTY"), None, ANY,
        presence_penalty: f32,
        "Subtract this from the logits of tokens that occurred"),
    row!(PENALTIES, "frequency-penalty", [], Some("MOEBA_FREQUENCY_PENALTY"), None, ANY,
        frequency_penalty: f32,
        "Subtract this for each time that a token occurred"),
    row!(DRY, "dry-multiplier", [], None, None, ANY, dry.multiplier: f32,
        "Penalise tokens that continue a repetition, by at least this; 0 is off"),
    row!(DRY, "dry-base", [], None, None, Real(1.0, MAX), dry.base: f32,
        "Multiply DRY's penalty by this for each further repeated token"),
    row!(DRY, "dry-allowed-length", [], None, None, ANY_WHOLE, dry.allowed_length: i32,
        "The shortest repetition that DRY penalises, in tokens"),
    row!(DRY, "dry-penalty-last-n", [], None, None, TOKENS, dry.last_n: i32,
        "How many recent tokens DRY looks for repetitions in; 0 is none, -1 all"),
    row!(None, "mirostat", [], None, Some("mirostat"), Whole(0, 2), mirostat.version: u8,
        "Use Mirostat 1 or 2 instead of all samplers but the temperature; 0 is off"),
    row!(None, "mirostat-lr", [], None, Some("mirostat_eta"), POSITIVE, mirostat.eta: f32,
        "Mirostat's learning rate, eta"),
    row!(None, "mirostat-ent", [], None, Some("mirostat_tau"), POSITIVE, mirostat.tau: f32,
        "Mirostat's target entropy, tau, in bits per token"),
    row!(ADAPTIVE, "adaptive-target", [], None, None, Real(-MAX, 1.0), adaptive.target: f32,
        "Prefer tokens near this probability, where adaptive_p is in --samplers; below 0 is off"),
    row!(ADAPTIVE, "adaptive-decay", [], None, None, Real(0.0, 0.99), adaptive.decay: f32,
        "How much earlier tokens count for adaptive_p"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_default_is_within_its_range_and_can_be_set() {
        let defaults = SamplerOptions::default();
        for p in PARAMETERS {
            let value = p.get(&defaults);
            assert!(p.takes(value), "{}", p.name);
            assert_eq!(p.parse(&p.text(&defaults)), Ok(value), "{}", p.name);
            let other = if p.takes(1.0) && value != 1.0 { 1.0 } else { 0.5 };
            let mut changed = defaults.clone();
            p.set(&mut changed, other);
            assert_eq!(p.get(&changed), other, "{}", p.name);
            assert_ne!(changed, defaults, "{}", p.name);
            p.set(&mut changed, value);
            assert_eq!(changed, defaults, "{}", p.name);
        }
    }

    #[test]
    fn names_are_found_however_they_are_spelled() {
        for name in ["top-k", "--top-k", "top_k"] {
            assert_eq!(Parameter::named(name).map(|p| p.name), Some("top-k"));
        }
        assert_eq!(Parameter::named("temperature").map(|p| p.name), Some("temp"));
        assert!(Parameter::named("top").is_none());
    }

    #[test]
    fn what_is_out_of_range_or_no_number_is_refused() {
        let parse = |name, text| Parameter::named(name).unwrap().parse(text);
        assert_eq!(parse("temp", "-1"), Ok(-1.0));
        assert_eq!(parse("top-k", " -1 "), Ok(-1.0));
        assert_eq!(parse("top-p", "1.5"), Err("expected a number from 0 to 1".into()));
        assert_eq!(parse("top-k", "1.5"), Err("expected a whole number".into()));
        for (name, text) in [
            ("temp", "nan"),
            ("temp", "inf"),
            ("temp", ""),
            ("top-k", "99999999999"),
            ("repeat-last-n", "-2"),
            ("repeat-penalty", "0"),
        ] {
            assert!(parse(name, text).is_err(), "{name} {text}");
        }
    }
}
