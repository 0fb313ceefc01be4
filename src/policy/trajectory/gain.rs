//! Recursive least squares: how far each number of a summary moves the weights when a token's
//! outcome differs from what was expected. One gain serves all weights, as all have the same input:
//! after n tokens they are those of a ridge regression on all n.

use super::vector::{RANK, Vector, add_scaled, dot};

/// The ridge: so many tokens' worth of doubt, in units of a summary's squared number.
const RIDGE: f32 = 30.0;

/// Weight that a token keeps when another comes: some two thousand tokens count.
const KEEP: f32 = 0.9995;

#[derive(Clone, Debug, PartialEq)]
pub struct Gain {
    /// The inverse of the summaries' decayed second moments.
    pub(super) inverse: [Vector; RANK],
}

impl Gain {
    pub fn new() -> Gain {
        let mut inverse = [[0.0; RANK]; RANK];
        (0..RANK).for_each(|i| inverse[i][i] = 1.0 / RIDGE);
        Gain { inverse }
    }

    /// Takes in a token's summary; its weights move by the error times the returned vector.
    pub fn learn(&mut self, summary: &Vector) -> Vector {
        let product: Vector = std::array::from_fn(|i| dot(&self.inverse[i], summary));
        let scale = 1.0 / (KEEP + dot(&product, summary));
        let gain: Vector = std::array::from_fn(|i| scale * product[i]);
        for (row, gain) in self.inverse.iter_mut().zip(&gain) {
            add_scaled(row, -gain, &product);
        }
        self.forget();
        gain
    }

    /// Old tokens count less. What no token tells anything of does not become more doubtful than it
    /// was at first.
    fn forget(&mut self) {
        let doubt: f32 = (0..RANK).map(|i| self.inverse[i][i]).sum();
        let most = RANK as f32 / RIDGE;
        let scale = (1.0 / KEEP).min(most / doubt);
        self.inverse.iter_mut().flatten().for_each(|x| *x *= scale);
        // Rounding must not make it lopsided.
        for i in 0..RANK {
            for j in 0..i {
                let mean = 0.5 * (self.inverse[i][j] + self.inverse[j][i]);
                (self.inverse[i][j], self.inverse[j][i]) = (mean, mean);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::mix;

    fn summary(seed: u64) -> Vector {
        std::array::from_fn(|i| (mix(seed << 8 | i as u64) >> 40) as f32 / (1 << 23) as f32 - 1.0)
    }

    /// Weights that have seen a linear rule some hundred times follow it.
    #[test]
    fn a_linear_rule_is_learned() {
        let rule = summary(u64::MAX >> 9);
        let (mut gain, mut weights) = (Gain::new(), [0.0; RANK]);
        let error = |seed| {
            let x = summary(seed);
            let error = dot(&rule, &x) - dot(&weights, &x);
            add_scaled(&mut weights, error, &gain.learn(&x));
            error.abs()
        };
        let errors: Vec<f32> = (0..2050).map(error).collect();
        let (first, last): (f32, f32) = (errors[..50].iter().sum(), errors[2000..].iter().sum());
        assert!(last < first / 10.0, "{first} {last}");
    }

    /// One direction for ever: the others' doubt stays what it was, and nothing overflows.
    #[test]
    fn a_text_that_repeats_itself_does_no_harm() {
        let mut gain = Gain::new();
        let x = summary(1);
        for _ in 0..50_000 {
            let gain = gain.learn(&x);
            assert!(gain.iter().all(|g| g.is_finite() && g.abs() < 1.0));
        }
        let doubt: f32 = (0..RANK).map(|i| gain.inverse[i][i]).sum();
        assert!(doubt <= RANK as f32 / RIDGE * 1.001, "{doubt}");
    }
}
