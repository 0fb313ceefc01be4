//! Sampling parameters: llama.cpp's names and defaults.

use super::parameters::{PARAMETERS, Parameter};
use super::{AdaptiveOptions, DryOptions, DynamicTemp, MirostatOptions, SamplerKind, XtcOptions};
use crate::{Error, Result};

#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// Which samplers, in their order. A number counts where its sampler is in the chain.
    pub samplers: Vec<SamplerKind>,
    /// 0 or less: always the most probable token.
    pub temp: f32,
    pub dynatemp: DynamicTemp,
    /// The k most probable tokens; 0 or less: all.
    pub top_k: i32,
    /// The most probable tokens that together have at least this probability; 1: all.
    pub top_p: f32,
    /// Tokens at least this probable compared with the most probable one; 0: all.
    pub min_p: f32,
    /// The tokens of the most typical surprise that together have more than this probability; 1:
    /// all.
    pub typical_p: f32,
    /// Tokens whose logits are within so many standard deviations of the greatest; 0 or less: all.
    pub top_n_sigma: f32,
    pub xtc: XtcOptions,
    /// Tokens that top-p, min-p, typical-p and XTC each leave at least, if there are as many.
    pub min_keep: usize,
    /// Logits of tokens among the last `repeat_last_n` are divided by this; 1: not.
    pub repeat_penalty: f32,
    /// How many tokens the penalties look back; −1: all, 0: none.
    pub repeat_last_n: i32,
    /// Subtracted once from the logit of a token that occurred.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time that it occurred.
    pub frequency_penalty: f32,
    pub dry: DryOptions,
    /// With a version, takes the place of the whole chain but the temperature.
    pub mirostat: MirostatOptions,
    pub adaptive: AdaptiveOptions,
    /// Biases of one token add up.
    pub logit_bias: Vec<LogitBias>,
    /// `None`: a random one.
    pub seed: Option<u64>,
}

/// A number that is added to a token's logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitBias {
    pub id: u32,
    /// A finite number, or −∞, which bans the token.
    pub bias: f32,
}

impl LogitBias {
    pub fn is_ban(&self) -> bool {
        self.bias == f32::NEG_INFINITY
    }
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            samplers: SamplerKind::DEFAULT.into(),
            temp: 0.8,
            dynatemp: DynamicTemp::default(),
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc: XtcOptions::default(),
            min_keep: 0,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            dry: DryOptions::default(),
            mirostat: MirostatOptions::default(),
            adaptive: AdaptiveOptions::default(),
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

impl SamplerOptions {
    pub fn greedy() -> Self {
        Self { temp: 0.0, ..Self::default() }
    }

    /// Whether a sampler changes anything, if it is in the chain.
    fn changes(&self, kind: SamplerKind) -> bool {
        match kind {
            SamplerKind::Penalties => {
                let numbers = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty);
                numbers != (1.0, 0.0, 0.0) && self.repeat_last_n != 0
            }
            SamplerKind::Dry => self.dry.multiplier != 0.0 && self.dry.last_n != 0,
            SamplerKind::TopNSigma => self.top_n_sigma > 0.0,
            SamplerKind::TopK => self.top_k > 0,
            SamplerKind::TypicalP => self.typical_p < 1.0,
            SamplerKind::TopP => self.top_p < 1.0,
            SamplerKind::MinP => self.min_p > 0.0,
            // Two tokens cannot both be above a half.
            SamplerKind::Xtc => self.xtc.probability > 0.0 && self.xtc.threshold <= 0.5,
            SamplerKind::Temperature => self.temp != 1.0 || self.dynatemp.range > 0.0,
            SamplerKind::AdaptiveP => self.adaptive.target >= 0.0,
        }
    }

    /// The samplers in force, in their order; none with Mirostat, which is not one of them.
    pub fn active(&self) -> impl Iterator<Item = SamplerKind> {
        let in_force = |kind: &SamplerKind| self.mirostat.version == 0 && self.changes(*kind);
        self.samplers.iter().copied().filter(in_force)
    }

    /// Whether always the most probable token is taken, so that the seed is of no matter.
    pub fn is_greedy(&self) -> bool {
        let dynamic = self.mirostat.version == 0 && self.dynatemp.range > 0.0;
        let counts = self.mirostat.version > 0 || self.samplers.contains(&SamplerKind::Temperature);
        let random = self.active().any(|kind| kind == SamplerKind::Xtc);
        self.temp <= 0.0 && counts && !dynamic && !random
    }

    /// Refuses what is not a number or out of range, with the name of the option.
    pub fn validate(&self) -> Result<()> {
        for parameter in PARAMETERS {
            if !parameter.takes(parameter.get(self)) {
                let (name, expected) = (parameter.name, parameter.expected());
                let got = parameter.text(self);
                return Err(Error::Usage(format!("{name}: expected {expected}, got {got}")));
            }
        }
        if let Some(bias) = self.logit_bias.iter().find(|b| !b.bias.is_finite() && !b.is_ban()) {
            let got = bias.bias;
            let expected = "a finite number or -inf";
            return Err(Error::Usage(format!("logit-bias: expected {expected}, got {got}")));
        }
        Ok(())
    }

    /// The samplers in force, in their order, with their numbers.
    pub fn describe(&self) -> String {
        let mut parts = match self.mirostat.version {
            0 => self.active().map(|kind| self.numbers(Some(kind))).collect(),
            _ => vec![format!("temp {}", self.temp), self.numbers(None)],
        };
        if !self.logit_bias.is_empty() {
            parts.insert(0, format!("{} logit biases", self.logit_bias.len()));
        }
        if parts.is_empty() { "the model's own probabilities".into() } else { parts.join("; ") }
    }

    fn numbers(&self, sampler: Option<SamplerKind>) -> String {
        let own = PARAMETERS.iter().filter(|p| p.sampler == sampler);
        let one = |p: &Parameter| format!("{} {}", p.name, p.text(self));
        own.map(one).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changes_something_is_in_force() {
        let d = SamplerOptions::default;
        let active =
            |o: SamplerOptions| o.active().map(SamplerKind::name).collect::<Vec<_>>().join(" ");
        assert_eq!(active(d()), "top_k top_p min_p temperature");
        let o = SamplerOptions {
            top_k: -1,
            top_p: 1.0,
            min_p: 0.0,
            temp: 1.0,
            repeat_penalty: 2.0,
            repeat_last_n: 0,
            xtc: XtcOptions { probability: 1.0, threshold: 0.51 },
            dynatemp: DynamicTemp { range: -1.0, exponent: 1.0 },
            ..d()
        };
        assert_eq!(active(o.clone()), "");
        assert_eq!(o.describe(), "the model's own probabilities");
        let mirostat = MirostatOptions { version: 2, ..MirostatOptions::default() };
        let o = SamplerOptions { mirostat, ..d() };
        assert_eq!(active(o.clone()), "");
        assert_eq!(o.describe(), "temp 0.8; mirostat 2, mirostat-lr 0.1, mirostat-ent 5");
    }

    #[test]
    fn what_is_greedy_needs_no_seed() {
        let with = |temp, range, names| {
            let samplers = SamplerKind::from_names(names).unwrap();
            let dynatemp = DynamicTemp { range, exponent: 1.0 };
            SamplerOptions { temp, dynatemp, samplers, ..SamplerOptions::default() }.is_greedy()
        };
        assert!(with(0.0, 0.0, "temperature") && with(-1.0, 0.0, "top_k;temperature"));
        assert!(!with(0.1, 0.0, "temperature") && !with(0.0, 0.5, "temperature"));
        assert!(!with(0.0, 0.0, "top_k"), "no temperature in the chain");
    }
}
