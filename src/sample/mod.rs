//! From logits to a token: a chain of small samplers, in llama.cpp's order or any other
//! (<https://github.com/ggml-org/llama.cpp/tree/master/tools/completion#sampler-parameters>).
//!
//! A seed gives the same tokens on every platform: the generator is ChaCha, exponentials and
//! logarithms are our own (libm's differ in the last bit from system to system), and sums run in a
//! fixed order.

mod adaptive;
mod breakers;
mod candidates;
mod cuts;
mod dry;
mod from_gguf;
pub mod grammar;
mod kind;
mod logprobs;
mod math;
mod mirostat;
mod options;
mod parameters;
mod penalties;
mod stop;
mod temperature;
mod typical;
mod xtc;

pub use adaptive::AdaptiveOptions;
pub use dry::DryOptions;
pub use from_gguf::recommend;
pub use kind::SamplerKind;
pub use logprobs::{MAX_TOP_LOGPROBS, TokenLogprob, TopLogprob};
pub use mirostat::MirostatOptions;
pub use options::{LogitBias, SamplerOptions};
pub use parameters::{PARAMETERS, Parameter};
pub use stop::{StopMatcher, Stopped};
pub use temperature::DynamicTemp;
pub use xtc::XtcOptions;

use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use adaptive::Adaptive;
use breakers::Breakers;
use candidates::{Candidates, Stage};
use cuts::{MinP, TopK, TopNSigma, TopP};
use dry::Dry;
use grammar::TokenMask;
use mirostat::Mirostat;
use penalties::Penalties;
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::SeedableRng;
use std::hash::{BuildHasher, Hasher, RandomState};
use temperature::Temperature;
use typical::TypicalP;
use xtc::Xtc;

/// Biases on logits, before all else.
struct Bias(Vec<LogitBias>);

impl Stage for Bias {
    fn apply(&mut self, candidates: &mut Candidates) {
        for bias in &self.0 {
            candidates.change(std::iter::once(bias.id), |_, logit| logit + bias.bias);
        }
    }
}

/// The end of a chain: the choice of a token.
enum Choice {
    Draw,
    Mirostat(Mirostat),
    Adaptive(Adaptive),
}

/// The state of one sequence's sampling.
pub struct Sampler {
    options: SamplerOptions,
    seed: u64,
    rng: ChaCha12Rng,
    stages: Vec<Box<dyn Stage>>,
    choice: Choice,
    /// Ascending.
    banned: Vec<u32>,
    candidates: Candidates,
}

impl Sampler {
    /// Refuses options that make no sense; without a seed takes a random one, which `seed` tells.
    /// DRY knows no breakers here.
    pub fn new(options: SamplerOptions) -> Result<Self> {
        Self::with_breakers(options, Breakers::default())
    }

    /// For texts in this tokenizer's tokens, in which DRY finds its breakers.
    pub fn for_text(options: SamplerOptions, tokenizer: &Tokenizer) -> Result<Self> {
        let n_vocab = tokenizer.n_vocab();
        if let Some(bias) = options.logit_bias.iter().find(|bias| bias.id as usize >= n_vocab) {
            let id = bias.id;
            return Err(Error::invalid(format!(
                "logit-bias: token id {id} is out of range: the model has {n_vocab} tokens"
            )));
        }
        let breakers = match options.active().any(|kind| kind == SamplerKind::Dry) {
            true => Breakers::new(tokenizer, &options.dry.breakers),
            false => Breakers::default(),
        };
        Self::with_breakers(options, breakers)
    }

    fn with_breakers(options: SamplerOptions, breakers: Breakers) -> Result<Self> {
        options.validate()?;
        // 32 bits, as llama.cpp's: it is printed, and someone types it.
        let seed = options.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish() >> 32);
        let mut sampler = Self {
            seed,
            rng: ChaCha12Rng::seed_from_u64(seed),
            stages: stages(&options, seed, breakers),
            choice: choice(&options),
            banned: Vec::new(),
            candidates: Candidates::new(),
            options,
        };
        let banned = sampler.options.logit_bias.iter().filter(|b| b.is_ban()).map(|b| b.id);
        sampler.ban(banned.collect::<Vec<_>>());
        Ok(sampler)
    }

    /// The seed in use, given or random.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// Hears of a token that is now part of the text: the prompt's tokens and each sampled one.
    pub fn accept(&mut self, id: u32) {
        self.stages.iter_mut().for_each(|stage| stage.accept(id));
        if let Choice::Adaptive(adaptive) = &mut self.choice {
            adaptive.accept(id);
        }
    }

    /// Tokens that are never sampled.
    pub fn ban(&mut self, ids: impl IntoIterator<Item = u32>) {
        self.banned.extend(ids);
        self.banned.sort_unstable();
        self.banned.dedup();
    }

    /// How many of the greatest logits decide, if no token is banned; `None`: all.
    fn enough(&self) -> Option<usize> {
        self.stages.iter().rev().fold(None, |best, stage| stage.enough(best))
    }

    /// How many of the greatest logits `sample_best` needs; `None` if only `sample` will do, which
    /// sees all.
    pub fn n_best(&self) -> Option<usize> {
        // Bans may take as many away as there are.
        self.enough().map(|k| k + self.banned.len())
    }

    /// The next token. Logits that are no numbers are an error: they mean broken weights, and any
    /// token picked from them would be made up.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        self.sample_of(logits, |_| true)
    }

    /// [`sample`](Self::sample) of the tokens that a mask allows, before all samplers.
    pub fn sample_allowed(&mut self, logits: &[f32], mask: &TokenMask) -> Result<u32> {
        self.sample_of(logits, |id| mask.allows(id))
    }

    fn sample_of(&mut self, logits: &[f32], may_come: impl Fn(u32) -> bool) -> Result<u32> {
        let (n, enough) = (logits.len(), self.enough());
        let Self { banned, candidates, .. } = self;
        for (&logit, id) in logits.iter().zip(0..) {
            if is_broken(logit) && !is_banned(banned, id) {
                return Err(broken(id, logit));
            }
        }
        let allowed = |(id, logit): &(u32, f32)| {
            let is_banned = !banned.is_empty() && is_banned(banned, *id);
            *logit != f32::NEG_INFINITY && !is_banned && may_come(*id)
        };
        let all = (0..).zip(logits.iter().copied()).filter(allowed);
        match enough {
            Some(k) if k < n => candidates.fill_best(n, k, all),
            _ => candidates.fill(n, all),
        }
        self.choose()
    }

    /// Chooses the token that `sample` would choose of all logits, from the `n_best` greatest: the
    /// greatest first, of equals the lowest id, and before all others those that are no numbers
    /// below +∞. There are more logits than these.
    ///
    /// # Panics
    /// If there are not `n_best` of them.
    pub fn sample_best(&mut self, ids: &[u32], logits: &[f32]) -> Result<u32> {
        assert_eq!([Some(ids.len()), Some(logits.len())], [self.n_best(); 2], "the best");
        let Self { banned, candidates, .. } = self;
        let all = ids.iter().copied().zip(logits.iter().copied());
        let mut allowed = all.filter(|(id, _)| !is_banned(banned, *id)).peekable();
        if let Some(&(id, logit)) = allowed.peek().filter(|(_, logit)| is_broken(*logit)) {
            return Err(broken(id, logit));
        }
        let finite = allowed.filter(|(_, logit)| *logit != f32::NEG_INFINITY);
        candidates.fill_sorted(usize::MAX, finite.take(ids.len() - banned.len()));
        self.choose()
    }

    /// The probability that `id`, which was sampled last, had after all samplers, and those of the
    /// `n_top` most probable tokens that were left.
    pub fn last_probabilities(&mut self, id: u32, n_top: usize) -> TokenLogprob {
        TokenLogprob::after(&mut self.candidates, id, n_top)
    }

    fn choose(&mut self) -> Result<u32> {
        let Self { stages, candidates, rng, choice, .. } = self;
        if candidates.list.is_empty() {
            return Err(Error::invalid(
                "no token is left to sample: all are banned, or their logits are -inf",
            ));
        }
        stages.iter_mut().for_each(|stage| stage.apply(candidates));
        let drawn = match choice {
            Choice::Draw => candidates.draw(rng),
            Choice::Mirostat(mirostat) => mirostat.draw(candidates, rng),
            Choice::Adaptive(adaptive) => adaptive.draw(candidates, rng),
        };
        Ok(drawn.id)
    }
}

/// The chain, without samplers that change nothing.
fn stages(o: &SamplerOptions, seed: u64, mut breakers: Breakers) -> Vec<Box<dyn Stage>> {
    let mut out: Vec<Box<dyn Stage>> = Vec::new();
    let biases: Vec<_> = o.logit_bias.iter().filter(|b| !b.is_ban()).copied().collect();
    if !biases.is_empty() {
        out.push(Box::new(Bias(biases)));
    }
    if o.mirostat.version > 0 {
        out.push(Box::new(Temperature::fixed(o.temp)));
    }
    for kind in o.active() {
        out.push(match kind {
            SamplerKind::Penalties => Box::new(Penalties::new(o)),
            SamplerKind::Dry => Box::new(Dry::new(&o.dry, std::mem::take(&mut breakers))),
            SamplerKind::TopNSigma => Box::new(TopNSigma(o.top_n_sigma)),
            SamplerKind::TopK => Box::new(TopK(o.top_k as usize)),
            SamplerKind::TypicalP => Box::new(TypicalP(o.typical_p, o.min_keep)),
            SamplerKind::TopP => Box::new(TopP(o.top_p, o.min_keep)),
            SamplerKind::MinP => Box::new(MinP(o.min_p, o.min_keep)),
            SamplerKind::Xtc => {
                let mut rng = ChaCha12Rng::seed_from_u64(seed);
                rng.set_stream(1);
                Box::new(Xtc::new(&o.xtc, o.min_keep, rng))
            }
            SamplerKind::Temperature => Box::new(Temperature::new(o.temp, &o.dynatemp)),
            // It is the choice at the chain's end.
            SamplerKind::AdaptiveP => continue,
        });
    }
    out
}

fn choice(o: &SamplerOptions) -> Choice {
    match o.mirostat.version {
        0 if o.samplers.contains(&SamplerKind::AdaptiveP) => {
            Choice::Adaptive(Adaptive::new(&o.adaptive))
        }
        0 => Choice::Draw,
        _ => Choice::Mirostat(Mirostat::new(&o.mirostat)),
    }
}

fn is_banned(banned: &[u32], id: u32) -> bool {
    banned.binary_search(&id).is_ok()
}

fn is_broken(logit: f32) -> bool {
    logit.is_nan() || logit == f32::INFINITY
}

fn broken(id: u32, logit: f32) -> Error {
    Error::Invalid(format!(
        "the model's logit for token {id} is {logit}: the weights or the computation are broken"
    ))
}
