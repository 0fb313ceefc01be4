//! Bounds that can be asked for by name: on-demand evictions that know what is still to come.

use super::{Belady, Future};
use crate::policy::{Event, Eviction, Expert, Lru, Policy, Shape};
use std::fmt;
use std::sync::Arc;

/// `belady`, or `known:N`: an eviction that knows the future, without prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// All of the future.
    Belady,
    /// The rest of the present token and the next so many.
    Known(usize),
}

/// The tokens that `known:N` may know.
const MAX_TOKENS: usize = 1_000_000;

impl Bound {
    /// `None`: no bound has such a name. Returns what is wrong with the N of `known:N` as a
    /// sentence.
    pub fn parse(text: &str) -> Option<Result<Bound, String>> {
        if text == "belady" {
            return Some(Ok(Bound::Belady));
        }
        let n = text.strip_prefix("known:")?;
        let number = n.parse().ok().filter(|n| *n <= MAX_TOKENS);
        let bound = number.map(Bound::Known);
        Some(bound.ok_or_else(|| {
            format!(
                "known:N takes a number of tokens up to {MAX_TOKENS}, such as known:4, not {n:?}"
            )
        }))
    }

    /// The eviction for a run of this future, on a model and tier of this shape.
    pub fn policy(self, future: Arc<Future>, shape: &Shape) -> Policy {
        let eviction: Box<dyn Eviction> = match self {
            Bound::Belady => Box::new(Belady::new(future)),
            Bound::Known(n_tokens) => Box::new(Known::new(future, n_tokens, shape)),
        };
        Policy { eviction, predictor: None, splitter: None, notes: Vec::new() }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bound::Belady => f.write_str("belady"),
            Bound::Known(n) => write!(f, "known:{n}"),
        }
    }
}

/// Knows the rest of the present token and the next `n_tokens`. What none of them uses goes first,
/// the least recently used before others; then what is used last.
#[derive(Clone, Debug)]
pub struct Known {
    belady: Belady,
    n_tokens: usize,
    /// Steps of a token.
    n_layers: usize,
    lru: Lru,
}

/// Puts what is not known to be used below all that is: larger than any number of steps or uses,
/// and small enough for an f64 to be exact.
const BEYOND: f64 = (1_u64 << 52) as f64;

impl Known {
    pub fn new(future: Arc<Future>, n_tokens: usize, shape: &Shape) -> Self {
        let n_layers = shape.moe_layers().count().max(1);
        Self { belady: Belady::new(future), n_tokens, n_layers, lru: Lru::new(shape) }
    }
}

impl Eviction for Known {
    fn observe(&mut self, event: &Event<'_>) {
        self.belady.observe(event);
        self.lru.observe(event);
    }

    fn priority(&self, expert: Expert) -> f64 {
        let n_begun = self.belady.now.div_ceil(self.n_layers);
        let end = (n_begun + self.n_tokens) * self.n_layers;
        match self.belady.next_use(expert).filter(|step| *step < end) {
            Some(step) => -(step as f64),
            None => self.lru.priority(expert) - BEYOND,
        }
    }
}
