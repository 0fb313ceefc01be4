//! Locally typical sampling (Meister et al., 2022): the tokens whose surprise is nearest to the
//! expected one.

use super::candidates::{Candidates, Stage};

/// The most typical that have more than this probability together, and no fewer than the second
/// number.
pub struct TypicalP(pub f32, pub usize);

impl Stage for TypicalP {
    fn apply(&mut self, candidates: &mut Candidates) {
        let entropy = candidates.entropy();
        candidates.sort_by_score(|c| (entropy.surprise(c) - entropy.nats).abs());
        let mut sum = 0.0;
        let reached = candidates.list.iter().position(|c| {
            sum += c.weight;
            sum > f64::from(self.0) * entropy.total
        });
        if let Some(last) = reached {
            candidates.list.truncate(self.1.max(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::testing::{after, assert_near, of};
    use super::*;

    /// The figures of llama.cpp's tests.
    #[test]
    fn the_typical_are_kept() {
        let got = after(of(&[0.97, 0.01, 0.01, 0.01]), &mut TypicalP(0.5, 0));
        assert_near(&got, &[(0, 1.0)]);
        let third = 1.0 / 3.0;
        let got = after(of(&[0.4, 0.2, 0.2, 0.2]), &mut TypicalP(0.5, 0));
        assert_near(&got, &[(1, third), (2, third), (3, third)]);
    }

    /// Entropy 1.28 nats; surprises 2.30, 1.61, 1.20 and 0.92.
    #[test]
    fn the_best_may_be_dropped() {
        let tenths = [0.1, 0.2, 0.3, 0.4];
        assert_near(&after(of(&tenths), &mut TypicalP(0.2, 0)), &[(2, 1.0)]);
        let got = after(of(&tenths), &mut TypicalP(0.45, 0));
        assert_near(&got, &[(1, 0.4), (2, 0.6)]);
        assert_eq!(after(of(&tenths), &mut TypicalP(0.999, 0)).len(), 4);
    }
}
