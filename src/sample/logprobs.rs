//! Log probabilities of tokens: in the model's own distribution, that of all logits, before any
//! sampler and any grammar changes it, or in the one that a token was drawn from.

use super::candidates::{Candidate, Candidates, best_k};
use super::math::{exp, ln};
use super::{broken, is_broken};
use crate::Result;

/// Alternatives that can be asked for.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// A chosen token and the most probable ones in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    pub id: u32,
    /// The natural logarithm of the token's probability; −∞ for one that the model rules out.
    pub logprob: f32,
    /// The most probable first, of equals the lowest id. The chosen one need not be among them.
    pub top: Vec<TopLogprob>,
    /// The probabilities are those that samplers and grammars have left.
    pub after_sampling: bool,
}

/// A token that could have been chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopLogprob {
    pub id: u32,
    pub logprob: f32,
}

impl TokenLogprob {
    /// The log probability of `id` in these logits, and the `n_top` best, at most
    /// [`MAX_TOP_LOGPROBS`]. The sum runs in the order of ids. Fails if a logit is no number.
    pub fn new(logits: &[f32], id: u32, n_top: usize) -> Result<TokenLogprob> {
        if let Some((at, &logit)) = (0..).zip(logits).find(|(_, logit)| is_broken(**logit)) {
            return Err(broken(at, logit));
        }
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let above = |logit: f32| match greatest {
            f32::NEG_INFINITY => f64::NEG_INFINITY,
            _ => f64::from(logit) - f64::from(greatest),
        };
        let total: f64 = logits.iter().map(|&logit| exp(above(logit))).sum();
        let ln_total = ln(total.max(f64::MIN_POSITIVE));
        let logprob = |logit: f32| (above(logit) - ln_total) as f32;
        let chosen = logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let top = best(logits, n_top.min(MAX_TOP_LOGPROBS));
        let top = top.iter().map(|c| TopLogprob { id: c.id, logprob: logprob(c.logit) }).collect();
        Ok(TokenLogprob { id, logprob: logprob(chosen), top, after_sampling: false })
    }

    /// The log probability of `id` among the candidates that a draw was made from, and the `n_top`
    /// best of them.
    pub(super) fn after(candidates: &mut Candidates, id: u32, n_top: usize) -> TokenLogprob {
        let ln_total = ln(candidates.weigh().max(f64::MIN_POSITIVE));
        let logprob = |weight: f64| match weight > 0.0 {
            true => (ln(weight) - ln_total) as f32,
            false => f32::NEG_INFINITY,
        };
        let mut best = Vec::new();
        if n_top > 0 {
            best_k(candidates.list.iter().copied(), n_top.min(MAX_TOP_LOGPROBS), &mut best);
        }
        let top = best.iter().map(|c| TopLogprob { id: c.id, logprob: logprob(c.weight) });
        let chosen = candidates.list.iter().find(|c| c.id == id);
        let chosen = chosen.map_or(f32::NEG_INFINITY, |c| logprob(c.weight));
        TokenLogprob { id, logprob: chosen, top: top.collect(), after_sampling: true }
    }

    /// A token that had no other beside it.
    pub fn certain(id: u32, n_top: usize) -> TokenLogprob {
        let top = if n_top > 0 { vec![TopLogprob { id, logprob: 0.0 }] } else { Vec::new() };
        TokenLogprob { id, logprob: 0.0, top, after_sampling: true }
    }
}

fn best(logits: &[f32], n: usize) -> Vec<Candidate> {
    let mut out = Vec::new();
    if n > 0 {
        let all = (0..).zip(logits).map(|(id, &logit)| Candidate { id, logit, weight: 0.0 });
        best_k(all, n, &mut out);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_those_of_all_logits() {
        let logits = [0.25f32.ln(), 0.5f32.ln(), f32::NEG_INFINITY, 0.25f32.ln()];
        let found = TokenLogprob::new(&logits, 3, 20).unwrap();
        assert_eq!(found.top.iter().map(|top| top.id).collect::<Vec<_>>(), [1, 0, 3, 2]);
        assert!((found.logprob - 0.25f32.ln()).abs() < 1e-6);
        assert!((found.top[0].logprob - 0.5f32.ln()).abs() < 1e-6);
        assert_eq!(found.top[3].logprob, f32::NEG_INFINITY);
        assert_eq!(found.top[2], TopLogprob { id: 3, logprob: found.logprob });
        assert_eq!(TokenLogprob::new(&logits, 3, 2).unwrap().top, found.top[..2]);
        assert!(TokenLogprob::new(&logits, 3, 0).unwrap().top.is_empty());
    }

    #[test]
    fn probabilities_after_sampling_are_those_of_what_is_left() {
        use crate::sample::{Sampler, SamplerOptions};
        let logits = [0.1f32.ln(), 0.6f32.ln(), f32::NEG_INFINITY, 0.3f32.ln()];
        let options = SamplerOptions {
            top_k: 2,
            top_p: 1.0,
            min_p: 0.0,
            temp: 1.0,
            seed: Some(1),
            ..SamplerOptions::default()
        };
        let mut sampler = Sampler::new(options).unwrap();
        let id = sampler.sample(&logits).unwrap();
        let found = sampler.last_probabilities(id, 20);
        assert_eq!(found.top.iter().map(|top| top.id).collect::<Vec<_>>(), [1, 3]);
        let near = |got: f32, expected: f32| (got.exp() - expected).abs() < 1e-6;
        assert!(near(found.top[0].logprob, 2.0 / 3.0) && near(found.top[1].logprob, 1.0 / 3.0));
        assert!(found.top.iter().any(|top| (top.id, top.logprob) == (id, found.logprob)));
        let mut sampler = Sampler::new(SamplerOptions::greedy()).unwrap();
        let id = sampler.sample(&logits).unwrap();
        assert_eq!(sampler.last_probabilities(id, 1), TokenLogprob::certain(1, 1));
    }

    #[test]
    fn logits_that_are_no_numbers_are_an_error() {
        assert!(TokenLogprob::new(&[0.0, f32::NAN], 0, 1).is_err());
        let nothing = TokenLogprob::new(&[f32::NEG_INFINITY; 2], 0, 1).unwrap();
        assert_eq!(nothing.logprob, f32::NEG_INFINITY);
    }
}
