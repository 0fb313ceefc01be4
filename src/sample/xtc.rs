//! XTC, "exclude top choices": now and then the most probable tokens are left out, but for the
//! least probable one of them.

use super::candidates::{Candidates, Stage, uniform};
use rand_chacha::ChaCha12Rng;

#[derive(Clone, Debug, PartialEq)]
pub struct XtcOptions {
    /// How often; 0 or less: never.
    pub probability: f32,
    /// Which tokens are top choices: those at least this probable. Above 0.5: none.
    pub threshold: f32,
}

impl Default for XtcOptions {
    fn default() -> Self {
        Self { probability: 0.0, threshold: 0.1 }
    }
}

pub struct Xtc {
    options: XtcOptions,
    /// Nothing is left out where fewer would be left.
    min_keep: usize,
    rng: ChaCha12Rng,
}

impl Xtc {
    /// `rng` is of its own: the draws of tokens stay what they are.
    pub fn new(options: &XtcOptions, min_keep: usize, rng: ChaCha12Rng) -> Self {
        Self { options: options.clone(), min_keep, rng }
    }
}

impl Stage for Xtc {
    fn apply(&mut self, candidates: &mut Candidates) {
        if candidates.list.len() < 2 || uniform(&mut self.rng) > f64::from(self.options.probability)
        {
            return;
        }
        candidates.sort();
        let least = f64::from(self.options.threshold) * candidates.weigh();
        let n_top = candidates.list.iter().take_while(|c| c.weight >= least).count();
        let n = n_top.saturating_sub(1);
        if candidates.list.len() - n >= self.min_keep {
            candidates.list.drain(..n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::testing::{after, assert_near, of};
    use super::*;
    use rand_chacha::rand_core::SeedableRng;

    fn kept(probability: f32, threshold: f32) -> Vec<(u32, f64)> {
        let rng = ChaCha12Rng::seed_from_u64(0);
        let mut stage = Xtc::new(&XtcOptions { probability, threshold }, 0, rng);
        after(of(&[0.4, 0.3, 0.2, 0.1]), &mut stage)
    }

    /// The figures of llama.cpp's tests.
    #[test]
    fn all_top_choices_but_the_last_are_dropped() {
        assert_near(&kept(1.0, 0.09), &[(3, 1.0)]);
        assert_near(&kept(1.0, 0.19), &[(2, 2.0 / 3.0), (3, 1.0 / 3.0)]);
        assert_near(&kept(1.0, 0.29), &[(1, 0.5), (2, 1.0 / 3.0), (3, 1.0 / 6.0)]);
        assert_eq!(kept(1.0, 0.39).len(), 4);
    }

    #[test]
    fn it_acts_as_often_as_it_is_told() {
        let options = XtcOptions { probability: 0.3, threshold: 0.1 };
        let mut stage = Xtc::new(&options, 0, ChaCha12Rng::seed_from_u64(1));
        let mut acted = 0;
        for _ in 0..10_000 {
            acted += u32::from(after(of(&[0.6, 0.4]), &mut stage).len() == 1);
        }
        // Four standard deviations are 184.
        assert!((2816..3184).contains(&acted), "{acted}");
    }
}
