//! From logits to a token: penalties, top-k, top-p, min-p and temperature, in llama.cpp's order
//! (<https://github.com/ggml-org/llama.cpp/tree/master/tools/completion#sampler-parameters>).
//!
//! A seed gives the same tokens on every platform: the generator is ChaCha, the exponential is our
//! own (libm's differ in the last bit from system to system), and sums run in a fixed order.

mod exponential;
mod from_gguf;
mod options;
mod parameters;
mod stop;

pub use from_gguf::recommend;
pub use options::SamplerOptions;
pub use parameters::{PARAMETERS, Parameter};
pub use stop::{StopMatcher, Stopped};

use crate::{Error, Result};
use exponential::exp;
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};

/// The state of one sequence's sampling.
pub struct Sampler {
    options: SamplerOptions,
    seed: u64,
    rng: ChaCha12Rng,
    window: Window,
    /// Ascending.
    banned: Vec<u32>,
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
    /// exp(logit − greatest logit), later with the temperature.
    weight: f64,
}

/// The last tokens, which the penalties look at.
struct Window {
    /// `None`: all tokens.
    size: Option<usize>,
    tokens: VecDeque<u32>,
    counts: HashMap<u32, u32>,
}

impl Window {
    fn push(&mut self, id: u32) {
        if self.size == Some(0) {
            return;
        }
        *self.counts.entry(id).or_insert(0) += 1;
        let Some(size) = self.size else { return };
        self.tokens.push_back(id);
        if self.tokens.len() > size
            && let Some(old) = self.tokens.pop_front()
            && let Some(n) = self.counts.get_mut(&old)
        {
            *n -= 1;
            if *n == 0 {
                self.counts.remove(&old);
            }
        }
    }
}

impl Sampler {
    /// Refuses options that make no sense; without a seed takes a random one, which `seed` tells.
    pub fn new(options: SamplerOptions) -> Result<Self> {
        options.validate()?;
        // 32 bits, as llama.cpp's: it is printed, and someone types it.
        let seed = options.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish() >> 32);
        // −1 is everything, as llama.cpp's "context size".
        let size = usize::try_from(options.repeat_last_n).ok();
        let size = if options.penalises() { size } else { Some(0) };
        Ok(Self {
            seed,
            rng: ChaCha12Rng::seed_from_u64(seed),
            window: Window { size, tokens: VecDeque::new(), counts: HashMap::new() },
            banned: Vec::new(),
            candidates: Vec::new(),
            options,
        })
    }

    /// The seed in use, given or random.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// Tells the penalties of a token that is now part of the text: the prompt's tokens and each
    /// sampled one.
    pub fn accept(&mut self, id: u32) {
        self.window.push(id);
    }

    /// Tokens that are never sampled.
    pub fn ban(&mut self, ids: impl IntoIterator<Item = u32>) {
        self.banned.extend(ids);
        self.banned.sort_unstable();
        self.banned.dedup();
    }

    /// How many of the greatest logits `sample_best` needs; `None` if only `sample` will do, which
    /// sees all.
    pub fn n_best(&self) -> Option<usize> {
        let o = &self.options;
        let k = if o.temp <= 0.0 { 1 } else { usize::try_from(o.top_k).unwrap_or(0) };
        // Penalties may make any token one of the best; bans may take as many away as there are.
        (k > 0 && !o.penalises()).then_some(k + self.banned.len())
    }

    /// The next token. Changes `logits` by bans and penalties. Logits that are no numbers are an
    /// error: they mean broken weights, and any token picked from them would be made up.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<u32> {
        self.penalise(logits);
        for &id in &self.banned {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        let best = greatest(logits)?;
        if self.options.temp <= 0.0 {
            return Ok(best);
        }
        self.collect(logits);
        Ok(self.choose(logits[best as usize]))
    }

    /// What `sample` answers to all logits, from the `n_best` greatest: the greatest first, of
    /// equals the lowest id, and before all others those that are no numbers below +∞. There are
    /// more logits than these.
    ///
    /// # Panics
    /// If there are not `n_best` of them.
    pub fn sample_best(&mut self, ids: &[u32], logits: &[f32]) -> Result<u32> {
        assert_eq!([Some(ids.len()), Some(logits.len())], [self.n_best(); 2], "the best");
        let banned = &self.banned;
        let all = ids.iter().zip(logits).map(|(&id, &logit)| Candidate { id, logit, weight: 0.0 });
        let allowed = all.filter(|c| banned.binary_search(&c.id).is_err());
        self.candidates.clear();
        self.candidates.extend(allowed.take(ids.len() - banned.len()));
        let best = self.candidates[0];
        check(best.id, best.logit)?;
        if best.logit == f32::NEG_INFINITY {
            return Err(nothing_left());
        }
        if self.options.temp <= 0.0 {
            return Ok(best.id);
        }
        Ok(self.choose(best.logit))
    }

    fn penalise(&self, logits: &mut [f32]) {
        let o = &self.options;
        for (&id, &n) in &self.window.counts {
            let Some(logit) = logits.get_mut(id as usize) else { continue };
            // Dividing a negative logit would favour it.
            match *logit > 0.0 {
                true => *logit /= o.repeat_penalty,
                false => *logit *= o.repeat_penalty,
            }
            *logit -= n as f32 * o.frequency_penalty + o.presence_penalty;
        }
    }

    /// Candidates for the draw: the k best, best first, or all in order of their ids.
    fn collect(&mut self, logits: &[f32]) {
        self.candidates.clear();
        let k = usize::try_from(self.options.top_k).unwrap_or(0);
        let all =
            logits.iter().zip(0u32..).map(|(&logit, id)| Candidate { id, logit, weight: 0.0 });
        if k == 0 || k >= logits.len() {
            self.candidates.extend(all);
        } else {
            best_k(all, k, &mut self.candidates);
        }
    }

    /// One of the candidates, of which `greatest` is the greatest logit.
    fn choose(&mut self, greatest: f32) -> u32 {
        for c in &mut self.candidates {
            c.weight = exp(f64::from(c.logit) - f64::from(greatest));
        }
        self.cut();
        self.draw()
    }

    /// Top-p and min-p. Both keep the first so many candidates in descending order, so they can be
    /// applied in either order. Before sorting, what top-p cannot need is dropped too: candidates
    /// lighter than (1 − p)·total/n weigh together less than 1 − p of the total.
    fn cut(&mut self) {
        let o = &self.options;
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        let top_p = f64::from(o.top_p);
        let negligible = (1.0 - top_p) * total / self.candidates.len() as f64;
        let least = f64::from(o.min_p).max(negligible);
        self.candidates.retain(|c| c.weight >= least);
        if top_p >= 1.0 {
            return;
        }
        self.candidates.sort_unstable_by(better);
        let mut sum = 0.0;
        let reached = self.candidates.iter().position(|c| {
            sum += c.weight;
            sum >= top_p * total
        });
        if let Some(last) = reached {
            self.candidates.truncate(last + 1);
        }
    }

    /// One draw from the candidates at the temperature; uses one number of the generator whatever
    /// the number of candidates, so that a text's draws stay aligned.
    fn draw(&mut self) -> u32 {
        let temp = f64::from(self.options.temp);
        let greatest = self.candidates.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0.0;
        for c in &mut self.candidates {
            c.weight = exp((f64::from(c.logit) - f64::from(greatest)) / temp);
            total += c.weight;
        }
        let uniform = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * total;
        for c in &self.candidates {
            left -= c.weight;
            if left < 0.0 {
                return c.id;
            }
        }
        // Rounding left a sliver: it belongs to the last candidate that can be drawn at all.
        let drawn = self.candidates.iter().rev().find(|c| c.weight > 0.0);
        drawn.map_or(0, |c| c.id)
    }
}

/// The greatest logit's id, of equals the lowest.
fn greatest(logits: &[f32]) -> Result<u32> {
    let mut best = (0, f32::NEG_INFINITY);
    for (&logit, id) in logits.iter().zip(0..) {
        check(id, logit)?;
        if logit > best.1 {
            best = (id, logit);
        }
    }
    if best.1 == f32::NEG_INFINITY {
        return Err(nothing_left());
    }
    Ok(best.0)
}

fn check(id: u32, logit: f32) -> Result<()> {
    if logit.is_nan() || logit == f32::INFINITY {
        return Err(Error::Invalid(format!(
            "the model's logit for token {id} is {logit}: the \
             weights or the computation are broken"
        )));
    }
    Ok(())
}

fn nothing_left() -> Error {
    Error::invalid("no token is left to sample: all logits are -inf or there are none")
}

/// Descending by logit; of equals the lowest id is the better.
fn better(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// The `k` best, best first. One pass with a threshold: once there are k, almost all of a large
/// vocabulary is below it, so the work is close to that of finding the maximum.
fn best_k(all: impl Iterator<Item = Candidate>, k: usize, out: &mut Vec<Candidate>) {
    let room = 4 * k;
    out.reserve(room);
    let mut threshold = f32::NEG_INFINITY;
    for candidate in all {
        if candidate.logit > threshold || out.len() < k {
            out.push(candidate);
        }
        if out.len() == room {
            out.select_nth_unstable_by(k - 1, better);
            out.truncate(k);
            threshold = out[k - 1].logit;
        }
    }
    out.sort_unstable_by(better);
    out.truncate(k);
}
