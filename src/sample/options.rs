//! Sampling parameters: llama.cpp's names and defaults.

use super::parameters::{PARAMETERS, Parameter};
use crate::{Error, Result};

#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// 0 or less: always the most probable token.
    pub temp: f32,
    /// The k most probable tokens; 0 or less: all.
    pub top_k: i32,
    /// The most probable tokens that together have at least this probability; 1: all.
    pub top_p: f32,
    /// Tokens at least this probable compared with the most probable one; 0: all.
    pub min_p: f32,
    /// Logits of tokens among the last `repeat_last_n` are divided by this; 1: not.
    pub repeat_penalty: f32,
    /// How many tokens the penalties look back; −1: all, 0: none.
    pub repeat_last_n: i32,
    /// Subtracted once from the logit of a token that occurred.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time that it occurred.
    pub frequency_penalty: f32,
    /// `None`: a random one.
    pub seed: Option<u64>,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            temp: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
        }
    }
}

impl SamplerOptions {
    pub fn greedy() -> Self {
        Self { temp: 0.0, ..Self::default() }
    }

    /// Whether any penalty can change a logit.
    pub fn penalises(&self) -> bool {
        let none = self.repeat_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0;
        !none && self.repeat_last_n != 0
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
        Ok(())
    }

    /// Every number, as flags name them.
    pub fn describe(&self) -> String {
        let one = |p: &Parameter| format!("{} {}", p.name, p.text(self));
        PARAMETERS.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}
