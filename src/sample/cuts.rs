//! Samplers that keep the best tokens: the k best, those of a total probability, those near the
//! best one.

use super::candidates::{Candidates, Stage};

/// The k most probable tokens.
pub struct TopK(pub usize);

impl Stage for TopK {
    fn apply(&mut self, candidates: &mut Candidates) {
        // A k that cuts nothing leaves the order of ids, too.
        if self.0 < candidates.n_logits {
            candidates.keep_best(self.0);
        }
    }

    fn enough(&self, best: Option<usize>) -> Option<usize> {
        Some(best.map_or(self.0, |best| best.min(self.0)))
    }
}

/// The most probable tokens that together have at least this probability, and no fewer than the
/// second number.
pub struct TopP(pub f32, pub usize);

impl Stage for TopP {
    fn apply(&mut self, candidates: &mut Candidates) {
        let p = f64::from(self.0);
        let total = candidates.weigh();
        // Fewer to sort: those lighter than (1 − p)·total/n weigh together less than 1 − p of all.
        let negligible = (1.0 - p) * total / candidates.list.len() as f64;
        if self.1 <= 1 {
            candidates.list.retain(|c| c.weight >= negligible);
        }
        candidates.sort();
        let mut sum = 0.0;
        let reached = candidates.list.iter().position(|c| {
            sum += c.weight;
            sum >= p * total
        });
        if let Some(last) = reached {
            candidates.list.truncate(self.1.max(last + 1));
        }
    }

    fn enough(&self, best: Option<usize>) -> Option<usize> {
        best.filter(|best| *best == 1 && self.1 <= 1)
    }
}

/// Tokens at least this probable compared with the most probable one, and no fewer than the second
/// number.
pub struct MinP(pub f32, pub usize);

impl Stage for MinP {
    fn apply(&mut self, candidates: &mut Candidates) {
        candidates.weigh();
        let least = f64::from(self.0);
        if self.1 <= 1 {
            candidates.list.retain(|c| c.weight >= least);
            return;
        }
        candidates.sort();
        let n = candidates.list.iter().take_while(|c| c.weight >= least).count();
        candidates.list.truncate(n.max(self.1));
    }

    fn enough(&self, best: Option<usize>) -> Option<usize> {
        best.filter(|best| self.1 <= *best)
    }
}

/// Tokens whose logits are within so many standard deviations of the greatest.
pub struct TopNSigma(pub f32);

impl Stage for TopNSigma {
    fn apply(&mut self, candidates: &mut Candidates) {
        let n = candidates.list.len() as f64;
        let logits = || candidates.list.iter().map(|c| f64::from(c.logit));
        let mean = logits().sum::<f64>() / n;
        let variance = logits().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
        let least = f64::from(candidates.greatest()) - f64::from(self.0) * variance.sqrt();
        candidates.list.retain(|c| f64::from(c.logit) >= least);
    }

    fn enough(&self, best: Option<usize>) -> Option<usize> {
        best.filter(|best| *best == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::testing::{after, assert_near, of};
    use super::*;

    const TENTHS: [f32; 4] = [0.1, 0.2, 0.3, 0.4];

    /// The figures of llama.cpp's tests: what is kept of `TENTHS`, in tenths.
    #[track_caller]
    fn keeps(stage: &mut dyn Stage, tenths: &[u32]) {
        let total = f64::from(tenths.iter().sum::<u32>());
        let expected: Vec<_> = tenths.iter().map(|&n| (n - 1, f64::from(n) / total)).collect();
        assert_near(&after(of(&TENTHS), stage), &expected);
    }

    #[test]
    fn top_k_keeps_k() {
        keeps(&mut TopK(1), &[4]);
        keeps(&mut TopK(3), &[2, 3, 4]);
        keeps(&mut TopK(4), &[1, 2, 3, 4]);
        keeps(&mut TopK(9), &[1, 2, 3, 4]);
    }

    #[test]
    fn top_p_keeps_the_fewest_that_reach_it() {
        keeps(&mut TopP(0.0, 0), &[4]);
        keeps(&mut TopP(0.699, 0), &[3, 4]);
        keeps(&mut TopP(0.8, 0), &[2, 3, 4]);
        keeps(&mut TopP(0.9999, 0), &[1, 2, 3, 4]);
    }

    #[test]
    fn min_p_compares_with_the_best() {
        keeps(&mut MinP(0.24, 0), &[1, 2, 3, 4]);
        keeps(&mut MinP(0.26, 0), &[2, 3, 4]);
        keeps(&mut MinP(0.49, 0), &[2, 3, 4]);
        keeps(&mut MinP(0.51, 0), &[3, 4]);
        keeps(&mut MinP(0.74, 0), &[3, 4]);
        keeps(&mut MinP(0.76, 0), &[4]);
        keeps(&mut MinP(1.0, 0), &[4]);
    }

    #[test]
    fn no_fewer_are_kept_than_asked_for() {
        keeps(&mut TopP(0.0, 3), &[2, 3, 4]);
        keeps(&mut TopP(0.95, 2), &[1, 2, 3, 4]);
        keeps(&mut MinP(1.0, 2), &[3, 4]);
        keeps(&mut MinP(0.26, 2), &[2, 3, 4]);
        keeps(&mut MinP(1.0, 9), &[1, 2, 3, 4]);
    }

    #[test]
    fn top_n_sigma_keeps_those_near_the_best() {
        keeps(&mut TopNSigma(1.0), &[3, 4]);
        keeps(&mut TopNSigma(3.0), &[1, 2, 3, 4]);
    }

    /// Of 10,000 tokens, token i with a logit of ln i: llama.cpp's queues of two and three.
    #[test]
    fn cuts_in_a_row_are_llama_cpps() {
        let kept = |stages: &mut [&mut dyn Stage]| {
            let mut candidates = Candidates::new();
            let logits = (1..10_000u32).map(|id| (id, (id as f32).ln()));
            candidates.fill(10_000, logits);
            stages.iter_mut().for_each(|stage| stage.apply(&mut candidates));
            candidates.sort();
            assert_eq!(candidates.list[0].id, 9999);
            candidates.list.len()
        };
        assert_eq!(kept(&mut [&mut TopK(100)]), 100);
        assert_eq!(kept(&mut [&mut MinP(0.1, 0)]), 9000);
        // 80 % of 9,999 · 10,000 / 2 are those from 4,472 on.
        assert_eq!(kept(&mut [&mut TopP(0.8, 0)]), 5528);
        assert_eq!(kept(&mut [&mut TopK(100), &mut MinP(0.1, 0)]), 100);
        assert_eq!(kept(&mut [&mut MinP(0.1, 0), &mut TopK(100)]), 100);
        assert_eq!(kept(&mut [&mut TopK(100), &mut TopP(0.8, 0)]), 80);
        assert_eq!(kept(&mut [&mut TopP(0.8, 0), &mut TopK(100)]), 100);
    }

    #[test]
    fn a_temperature_before_counts() {
        let kept = |temp: f64, stage: &mut dyn Stage| {
            let mut candidates = of(&TENTHS);
            candidates.scale(temp);
            after(candidates, stage).len()
        };
        // At a temperature of 1/2, probabilities are as 1 : 4 : 9 : 16.
        assert_eq!([kept(1.0, &mut TopP(0.8, 0)), kept(0.5, &mut TopP(0.8, 0))], [3, 2]);
        assert_eq!([kept(1.0, &mut MinP(0.3, 0)), kept(0.5, &mut MinP(0.3, 0))], [3, 2]);
        assert_eq!([kept(1.0, &mut TopNSigma(1.0)), kept(0.5, &mut TopNSigma(1.0))], [2, 2]);
    }
}
