//! Requests dealt over replicas, machines that each serve some of them with a cache of their own.
//! Whether it pays to choose a request's replica by its experts depends on the model and the texts:
//! a replay of each one's requests tells.

use super::format::{Request, Trace};
use crate::policy::mix;

/// The rule that chooses a request's replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Router {
    Random,
    /// The one of two that has computed less.
    PowerOfTwo,
    /// By the beginning of the prompt, so that a conversation stays; `moeba serve --ray`'s.
    Affinity,
    /// By the kind of text, which no server knows.
    Kind,
    /// The one whose latest requests used the experts that the prompt uses.
    Signature,
}

impl Router {
    pub const ALL: [Router; 5] =
        [Router::Random, Router::PowerOfTwo, Router::Affinity, Router::Kind, Router::Signature];

    pub fn name(self) -> &'static str {
        match self {
            Router::Random => "random",
            Router::PowerOfTwo => "power of two",
            Router::Affinity => "affinity",
            Router::Kind => "kind of text",
            Router::Signature => "expert signature",
        }
    }
}

/// The requests of each replica, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dealt {
    pub requests: Vec<Vec<usize>>,
    /// Tokens that each computes.
    pub n_tokens: Vec<usize>,
}

/// A replica gets no request while it has this many times the mean's tokens: a router that fills
/// one and leaves others idle gains no throughput, whatever its caches hit.
const MOST_LOAD: f64 = 1.25;

/// Tokens of a prompt that name its conversation.
const BEGINNING: usize = 32;

/// The share of a replica's signature that is left after another request.
const DECAY: f32 = 0.8;

/// Deals the requests, in this order, over `n` replicas.
pub fn deal(trace: &Trace, order: &[usize], n: usize, router: Router) -> Dealt {
    let mut dealt = Dealt { requests: vec![Vec::new(); n], n_tokens: vec![0; n] };
    let mut signatures = Signatures::new(trace, n);
    for (i, &request) in order.iter().enumerate() {
        let text = &trace.requests()[request];
        let draw = |salt: u64| (mix(mix(i as u64) ^ salt) % n as u64) as usize;
        let ranks = match router {
            Router::Random => vec![draw(1)],
            Router::PowerOfTwo => {
                let (a, b) = (draw(1), draw(2));
                vec![if dealt.n_tokens[b] < dealt.n_tokens[a] { b } else { a }]
            }
            Router::Affinity => ranked(n, beginning(trace, text)),
            Router::Kind => ranked(n, hash(text.kind.bytes().map(u64::from))),
            Router::Signature => signatures.nearest(&signatures.of_prompt(text)),
        };
        let chosen = match router {
            // As servers do that look at nothing, or at the load alone.
            Router::Random | Router::PowerOfTwo => ranks[0],
            _ => bounded(&dealt.n_tokens, &ranks),
        };
        dealt.requests[chosen].push(request);
        dealt.n_tokens[chosen] += text.tokens.len();
        if router == Router::Signature {
            signatures.learn(chosen, text);
        }
    }
    dealt
}

/// The first in rank that has room.
fn bounded(n_tokens: &[usize], ranks: &[usize]) -> usize {
    let mean = n_tokens.iter().sum::<usize>() as f64 / n_tokens.len() as f64;
    let has_room = |replica: &&usize| n_tokens[**replica] as f64 <= MOST_LOAD * mean;
    *ranks.iter().find(has_room).expect("the least loaded has no more than the mean")
}

/// All replicas, in an order that the key decides: rendezvous hashing.
fn ranked(n: usize, key: u64) -> Vec<usize> {
    let mut ranks: Vec<usize> = (0..n).collect();
    ranks.sort_by_key(|replica| mix(key ^ mix(*replica as u64)));
    ranks
}

fn hash(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, |sum, value| mix(sum ^ value))
}

fn beginning(trace: &Trace, text: &Request) -> u64 {
    let tokens = text.tokens.clone().take(text.n_prompt.min(BEGINNING));
    hash(tokens.map(|token| u64::from(trace.token_id(token))))
}

/// How often experts are used: by the prompts of requests, and by what replicas decoded of late.
struct Signatures<'a> {
    trace: &'a Trace,
    /// The position of a layer's first expert.
    starts: Vec<usize>,
    n_experts: usize,
    /// The recent uses of each replica.
    replicas: Vec<Vec<f32>>,
    /// The sum over all prompts, which is taken off: what all texts use tells none from another.
    common: Vec<f32>,
}

impl<'a> Signatures<'a> {
    fn new(trace: &'a Trace, n: usize) -> Signatures<'a> {
        let mut starts = Vec::new();
        let mut n_experts = 0;
        for layer in &trace.header().layers {
            starts.push(n_experts);
            n_experts += layer.n_experts;
        }
        let replicas = vec![vec![0.0; n_experts]; n];
        Signatures { trace, starts, n_experts, replicas, common: vec![0.0; n_experts] }
    }

    /// Uses of each expert by these tokens, as a unit vector.
    fn count(&self, tokens: std::ops::Range<usize>) -> Vec<f32> {
        let mut counts = vec![0.0; self.n_experts];
        for token in tokens {
            for (layer, start) in self.starts.iter().enumerate() {
                for expert in self.trace.chosen(token, layer) {
                    counts[start + *expert as usize] += 1.0;
                }
            }
        }
        unit(counts)
    }

    fn of_prompt(&self, text: &Request) -> Vec<f32> {
        self.count(text.tokens.start..text.tokens.start + text.n_prompt)
    }

    /// All replicas, those with the most similar requests first.
    fn nearest(&self, prompt: &[f32]) -> Vec<usize> {
        let common = unit(self.common.clone());
        let centred = |vector: &[f32]| -> Vec<f32> {
            unit(vector.iter().zip(&common).map(|(a, b)| a - b).collect())
        };
        let prompt = centred(prompt);
        let likeness = |replica: &Vec<f32>| -> f32 {
            match replica.iter().any(|x| *x > 0.0) {
                true => dot(&centred(&unit(replica.clone())), &prompt),
                // One that has computed nothing yet is as good as any.
                false => 0.0,
            }
        };
        let likeness: Vec<f32> = self.replicas.iter().map(likeness).collect();
        let mut ranks: Vec<usize> = (0..likeness.len()).collect();
        ranks.sort_by(|a, b| likeness[*b].total_cmp(&likeness[*a]));
        ranks
    }

    fn learn(&mut self, replica: usize, text: &Request) {
        let prompt = self.of_prompt(text);
        let decoded = self.count(text.tokens.start + text.n_prompt..text.tokens.end);
        let own = &mut self.replicas[replica];
        own.iter_mut().zip(&decoded).for_each(|(sum, x)| *sum = DECAY * *sum + x);
        self.common.iter_mut().zip(&prompt).for_each(|(sum, x)| *sum += x);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn unit(mut vector: Vec<f32>) -> Vec<f32> {
    let length = dot(&vector, &vector).sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x /= length);
    }
    vector
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_goes_moves_its_own_keys_alone() {
        for key in 0..1000 {
            let (of_three, of_two) = (ranked(3, key), ranked(2, key));
            let left: Vec<usize> = of_three.into_iter().filter(|replica| *replica < 2).collect();
            assert_eq!(left, of_two);
        }
        let firsts = (0..3000).map(|key| ranked(3, key)[0]);
        let n_zero = firsts.filter(|replica| *replica == 0).count();
        assert!((900..1100).contains(&n_zero), "{n_zero}");
    }

    #[test]
    fn a_full_replica_passes_on() {
        assert_eq!(bounded(&[0, 0, 0], &[2, 1, 0]), 2);
        assert_eq!(bounded(&[10, 10, 30], &[2, 1, 0]), 1);
        assert_eq!(bounded(&[40, 20, 30], &[0, 2, 1]), 2);
    }
}
