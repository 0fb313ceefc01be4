//! Adaptive-p: prefers tokens near a target probability, which moves so that the mean of what was
//! chosen meets it (<https://github.com/ggml-org/llama.cpp/pull/17927>).

use super::candidates::{Candidates, Drawn};
use rand_chacha::ChaCha12Rng;

#[derive(Clone, Debug, PartialEq)]
pub struct AdaptiveOptions {
    /// The probability aimed at; below 0: an ordinary draw.
    pub target: f32,
    /// How much of what was chosen before still counts with the next token.
    pub decay: f32,
}

impl Default for AdaptiveOptions {
    fn default() -> Self {
        Self { target: -1.0, decay: 0.9 }
    }
}

/// The distance from the target that costs half of the tail's slope.
const WIDTH: f64 = 0.3;
const PEAK_LOGIT: f64 = 5.0;
const SHARPNESS: f64 = 10.0;

pub struct Adaptive {
    target: f64,
    decay: f64,
    /// Of the probabilities of chosen tokens, the newest with weight 1.
    weighted_sum: f64,
    total_weight: f64,
    /// The last draw, until the text has it.
    pending: Option<(u32, f64)>,
}

impl Adaptive {
    pub fn new(options: &AdaptiveOptions) -> Self {
        let (target, decay) = (f64::from(options.target), f64::from(options.decay));
        // As if the target had been met forever.
        let total_weight = 1.0 / (1.0 - decay);
        Self { target, decay, weighted_sum: target * total_weight, total_weight, pending: None }
    }

    pub fn draw(&mut self, candidates: &mut Candidates, rng: &mut ChaCha12Rng) -> Drawn {
        if self.target < 0.0 {
            return candidates.draw(rng);
        }
        let total = candidates.weigh();
        let chances: Vec<f64> = candidates.list.iter().map(|c| c.weight / total).collect();
        let mean = self.weighted_sum / self.total_weight;
        let aim = (2.0 * self.target - mean).clamp(0.0, 1.0);
        candidates.replace(|at| {
            let distance = ((chances[at] - aim) / WIDTH).abs();
            PEAK_LOGIT - SHARPNESS * distance * distance / (1.0 + distance)
        });
        let drawn = candidates.draw(rng);
        self.pending = Some((drawn.id, chances[drawn.at]));
        drawn
    }

    pub fn accept(&mut self, id: u32) {
        if let Some((drawn, chance)) = self.pending.take()
            && drawn == id
        {
            self.weighted_sum = chance + self.decay * self.weighted_sum;
            self.total_weight = 1.0 + self.decay * self.total_weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::testing::{assert_near, of};
    use super::*;
    use rand_chacha::rand_core::SeedableRng;

    fn drawn(stage: &mut Adaptive, candidates: &mut Candidates) -> Drawn {
        stage.draw(candidates, &mut ChaCha12Rng::seed_from_u64(3))
    }

    /// Distances of 0, 1/3 and 1 from a target of 0.4 are logits of 5, 5 − 10/12 and 0.
    #[test]
    fn tokens_near_the_target_are_preferred() {
        let mut stage = Adaptive::new(&AdaptiveOptions { target: 0.4, decay: 0.9 });
        let mut candidates = of(&[0.4, 0.5, 0.1]);
        drawn(&mut stage, &mut candidates);
        let total = candidates.weigh();
        let got: Vec<_> = candidates.list.iter().map(|c| (c.id, c.weight / total)).collect();
        let weights = [1.0, (-10.0f64 / 12.0).exp(), (-5.0f64).exp()];
        let total: f64 = weights.iter().sum();
        let expected: Vec<_> = (0..).zip(weights.map(|w| w / total)).collect();
        assert_near(&got, &expected);
    }

    #[test]
    fn the_target_moves_against_what_was_chosen() {
        let mut stage = Adaptive::new(&AdaptiveOptions { target: 0.5, decay: 0.9 });
        let id = drawn(&mut stage, &mut of(&[1.0])).id;
        stage.accept(id + 1);
        assert_eq!(stage.weighted_sum, 0.5 * stage.total_weight, "another token was taken");
        let id = drawn(&mut stage, &mut of(&[1.0])).id;
        stage.accept(id);
        assert!((stage.weighted_sum - (1.0 + 0.9 * 5.0)).abs() < 1e-5);
        assert!((stage.total_weight - (1.0 + 0.9 * 10.0)).abs() < 1e-5);
    }

    #[test]
    fn below_zero_it_is_an_ordinary_draw() {
        let mut stage = Adaptive::new(&AdaptiveOptions { target: -1.0, decay: 0.9 });
        let (mut one, mut other) = (of(&[0.1, 0.2, 0.3, 0.4]), of(&[0.1, 0.2, 0.3, 0.4]));
        let (mut rng, mut same) = (ChaCha12Rng::seed_from_u64(1), ChaCha12Rng::seed_from_u64(1));
        for _ in 0..20 {
            let id = stage.draw(&mut one, &mut rng).id;
            assert_eq!(id, other.draw(&mut same).id);
        }
    }
}
