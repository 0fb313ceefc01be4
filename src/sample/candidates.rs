//! The tokens that may still be drawn, and the operations that samplers are made of.

use super::math::{exp, ln};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::Rng;
use std::cmp::Ordering;

/// One sampler of a chain: drops candidates or changes their logits.
pub trait Stage: Send {
    /// Leaves at least one candidate.
    fn apply(&mut self, candidates: &mut Candidates);

    /// Hears of a token that is now part of the text.
    fn accept(&mut self, _id: u32) {}

    /// How many of the best candidates this stage must see (`None`: all) if what follows must see
    /// this many of the best that it leaves.
    fn enough(&self, _best: Option<usize>) -> Option<usize> {
        None
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    pub id: u32,
    /// A finite number.
    pub logit: f32,
    /// The probability times a constant, after `weigh`.
    pub weight: f64,
}

/// Never empty while samplers see it.
#[derive(Debug)]
pub struct Candidates {
    pub list: Vec<Candidate>,
    /// How many logits the model gave, whether or not they are all here.
    pub n_logits: usize,
    /// All logits count divided by this: a temperature costs no pass over the list.
    temp: f64,
    order: Order,
    /// Of the list, between two uses.
    spare: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    Ids,
    /// Best first.
    Logits,
    Other,
}

/// The candidate that a draw found.
pub struct Drawn {
    /// Where in the list.
    pub at: usize,
    pub id: u32,
    pub probability: f64,
}

/// How surprising candidates are.
#[derive(Clone, Copy)]
pub struct Entropy {
    /// The sum of all weights.
    pub total: f64,
    /// The surprise that is to be expected.
    pub nats: f64,
    ln_total: f64,
    greatest: f64,
    temp: f64,
}

impl Entropy {
    /// −ln p of a candidate.
    pub fn surprise(&self, c: &Candidate) -> f64 {
        self.ln_total - (f64::from(c.logit) - self.greatest) / self.temp
    }
}

impl Candidates {
    pub fn new() -> Self {
        let (list, spare) = (Vec::new(), Vec::new());
        Self { list, n_logits: 0, temp: 1.0, order: Order::Ids, spare }
    }

    fn restart(&mut self, n_logits: usize, order: Order) {
        self.list.clear();
        (self.n_logits, self.temp, self.order) = (n_logits, 1.0, order);
    }

    /// All of these, in the order of their ids.
    pub fn fill(&mut self, n_logits: usize, all: impl Iterator<Item = (u32, f32)>) {
        self.restart(n_logits, Order::Ids);
        self.list.extend(all.map(candidate));
    }

    /// These, the best first.
    pub fn fill_sorted(&mut self, n_logits: usize, best: impl Iterator<Item = (u32, f32)>) {
        self.restart(n_logits, Order::Logits);
        self.list.extend(best.map(candidate));
    }

    /// The k best of these, best first.
    pub fn fill_best(&mut self, n_logits: usize, k: usize, all: impl Iterator<Item = (u32, f32)>) {
        self.restart(n_logits, Order::Logits);
        best_k(all.map(candidate), k, &mut self.list);
    }

    /// The best first.
    pub fn sort(&mut self) {
        if self.order != Order::Logits {
            self.list.sort_unstable_by(better);
            self.order = Order::Logits;
        }
    }

    /// By another order; of equals the best first.
    pub fn sort_by_score(&mut self, score: impl Fn(&Candidate) -> f64) {
        self.list.sort_unstable_by(|a, b| score(a).total_cmp(&score(b)).then(better(a, b)));
        self.order = Order::Other;
    }

    /// Only the k best, best first.
    pub fn keep_best(&mut self, k: usize) {
        if self.order != Order::Logits && k < self.list.len() {
            std::mem::swap(&mut self.list, &mut self.spare);
            self.list.clear();
            best_k(self.spare.iter().copied(), k, &mut self.list);
            self.order = Order::Logits;
        }
        self.sort();
        self.list.truncate(k);
    }

    /// Divides all logits by a number above 0.
    pub fn scale(&mut self, temp: f64) {
        self.temp = (self.temp * temp).clamp(f64::MIN_POSITIVE, f64::MAX);
    }

    /// Changes the logits of some tokens, by their ids; the change sees what a temperature before
    /// it made of the logit.
    pub fn change(&mut self, ids: impl Iterator<Item = u32>, change: impl Fn(u32, f32) -> f32) {
        self.settle();
        for id in ids {
            let found = match self.order {
                Order::Ids => self.list.binary_search_by_key(&id, |c| c.id).ok(),
                _ => self.list.iter().position(|c| c.id == id),
            };
            if let Some(c) = found.map(|at| &mut self.list[at]) {
                c.logit = finite(change(id, c.logit));
            }
        }
        if self.order == Order::Logits {
            self.order = Order::Other;
        }
    }

    /// New logits for all, from their places in the list.
    pub fn replace(&mut self, logit: impl Fn(usize) -> f64) {
        (self.temp, self.order) = (1.0, Order::Other);
        for (at, c) in self.list.iter_mut().enumerate() {
            c.logit = finite(logit(at) as f32);
        }
    }

    /// Makes the temperature a part of the logits.
    fn settle(&mut self) {
        if self.temp != 1.0 {
            for c in &mut self.list {
                c.logit = finite((f64::from(c.logit) / self.temp) as f32);
            }
            self.temp = 1.0;
        }
    }

    pub fn greatest(&self) -> f32 {
        self.list.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max)
    }

    /// Gives each candidate its weight, 1 for the best; answers their sum.
    pub fn weigh(&mut self) -> f64 {
        let greatest = f64::from(self.greatest());
        let mut total = 0.0;
        for c in &mut self.list {
            c.weight = exp((f64::from(c.logit) - greatest) / self.temp);
            total += c.weight;
        }
        total
    }

    /// Weighs all; answers how surprising they are.
    pub fn entropy(&mut self) -> Entropy {
        let total = self.weigh();
        let greatest = f64::from(self.greatest());
        let mut out = Entropy { total, ln_total: ln(total), greatest, temp: self.temp, nats: 0.0 };
        // What is too improbable for a weight adds nothing.
        let drawable = self.list.iter().filter(|c| c.weight > 0.0);
        out.nats = drawable.map(|c| c.weight / total * out.surprise(c)).sum();
        out
    }

    /// One draw. Uses one number of the generator whatever the number of candidates, so that a
    /// text's draws stay aligned.
    pub fn draw(&mut self, rng: &mut ChaCha12Rng) -> Drawn {
        let total = self.weigh();
        let mut left = uniform(rng) * total;
        let at = self.list.iter().position(|c| {
            left -= c.weight;
            left < 0.0
        });
        // Rounding may leave a sliver: it belongs to the last candidate that can be drawn at all.
        let at = at.or_else(|| self.list.iter().rposition(|c| c.weight > 0.0)).unwrap_or(0);
        let c = self.list[at];
        Drawn { at, id: c.id, probability: c.weight / total }
    }
}

/// The `k` best, best first, for a `k` above 0. One pass with a threshold: once there are k, almost
/// all of a large vocabulary is below it, so the work is close to that of finding the maximum.
pub fn best_k(all: impl Iterator<Item = Candidate>, k: usize, out: &mut Vec<Candidate>) {
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

/// From 0 to below 1.
pub fn uniform(rng: &mut ChaCha12Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

fn candidate((id, logit): (u32, f32)) -> Candidate {
    Candidate { id, logit, weight: 0.0 }
}

/// Of a sum or product of finite numbers.
pub fn finite(x: f32) -> f32 {
    x.clamp(f32::MIN, f32::MAX)
}

/// Descending by logit; of equals the lowest id is the better.
pub fn better(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// For tests of samplers, which llama.cpp states in probabilities.
#[cfg(test)]
pub mod testing {
    use super::*;

    /// Candidates of these probabilities.
    pub fn of(probabilities: &[f32]) -> Candidates {
        let mut out = Candidates::new();
        let logits = probabilities.iter().map(|p| p.ln());
        out.fill(probabilities.len(), (0..).zip(logits));
        out
    }

    /// (id, probability) after a sampler, in the order of ids.
    pub fn after(mut candidates: Candidates, stage: &mut dyn Stage) -> Vec<(u32, f64)> {
        stage.apply(&mut candidates);
        let total = candidates.weigh();
        let of_one = |c: &Candidate| (c.id, c.weight / total);
        let mut out: Vec<(u32, f64)> = candidates.list.iter().map(of_one).collect();
        out.sort_by_key(|c| c.0);
        out
    }

    /// Compares as llama.cpp's tests do.
    #[track_caller]
    pub fn assert_near(got: &[(u32, f64)], expected: &[(u32, f64)]) {
        assert_eq!(got.len(), expected.len(), "{got:?} {expected:?}");
        for (got, expected) in got.iter().zip(expected) {
            let near = got.0 == expected.0 && (got.1 - expected.1).abs() < 1e-5;
            assert!(near, "{got:?} {expected:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(candidates: &Candidates) -> Vec<u32> {
        candidates.list.iter().map(|c| c.id).collect()
    }

    #[test]
    fn the_best_are_first_and_of_equals_the_lowest_id() {
        let logits = [1.0, 3.0, -1.0, 3.0, 2.0];
        let mut c = Candidates::new();
        c.fill_best(5, 3, (0..).zip(logits));
        assert_eq!(ids(&c), [1, 3, 4]);
        c.fill(5, (0..).zip(logits));
        c.keep_best(2);
        assert_eq!(ids(&c), [1, 3]);
        c.fill(5, (0..).zip(logits));
        c.keep_best(9);
        assert_eq!(ids(&c), [1, 3, 4, 0, 2]);
    }

    #[test]
    fn a_change_after_a_temperature_sees_scaled_logits() {
        let mut c = Candidates::new();
        c.fill(3, (0..).zip([2.0, -4.0, 6.0]));
        c.scale(2.0);
        c.change([1, 2, 9].into_iter(), |id, logit| logit + id as f32);
        assert_eq!(c.list.iter().map(|c| c.logit).collect::<Vec<_>>(), [1.0, -1.0, 5.0]);
    }

    #[test]
    fn extreme_temperatures_leave_weights_that_can_be_drawn() {
        for temp in [1e-300, 1e300] {
            let mut c = Candidates::new();
            c.fill(3, (0..).zip([f32::MIN, 0.0, f32::MAX]));
            c.scale(temp);
            c.scale(temp);
            let total = c.weigh();
            assert!(total.is_finite() && total >= 1.0, "{temp}: {total}");
            assert!(c.entropy().nats.is_finite());
        }
    }
}
