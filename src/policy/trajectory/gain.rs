//! Recursive least squares: how far each number of an input moves the weights when an outcome
//! differs from what was expected. One gain serves all weights that have the same input: after n
//! tokens they are those of a ridge regression on all n.

use super::vector::{add_scaled, dot};

/// Weight that a token keeps when another comes: some two thousand tokens count.
const KEEP: f32 = 0.9995;

/// For inputs of N numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Gain<const N: usize> {
    /// The inverse of the inputs' decayed second moments: [N, N].
    pub(super) inverse: Vec<[f32; N]>,
    /// The ridge: so many tokens' worth of doubt, in units of an input's squared number.
    ridge: f32,
}

impl<const N: usize> Gain<N> {
    pub fn new(ridge: f32) -> Gain<N> {
        let mut inverse = vec![[0.0; N]; N];
        (0..N).for_each(|i| inverse[i][i] = 1.0 / ridge);
        Gain { inverse, ridge }
    }

    /// Goes on from the moments of an earlier run. Refuses those that cannot be: returns the reason
    /// as a clause, for use after a colon.
    pub fn restore(&mut self, inverse: Vec<[f32; N]>) -> Result<(), String> {
        if inverse.iter().enumerate().any(|(i, row)| row[i] <= 0.0) {
            return Err("its second moments are not positive".into());
        }
        self.inverse = inverse;
        Ok(())
    }

    /// Takes in an input; its weights move by the error times the returned vector.
    pub fn learn(&mut self, input: &[f32; N]) -> [f32; N] {
        let product: [f32; N] = std::array::from_fn(|i| dot(&self.inverse[i], input));
        let scale = 1.0 / (KEEP + dot(&product, input));
        let gain: [f32; N] = std::array::from_fn(|i| scale * product[i]);
        for (row, gain) in self.inverse.iter_mut().zip(&gain) {
            add_scaled(row, -gain, &product);
        }
        self.forget();
        gain
    }

    /// Old tokens count less. What no token tells anything of does not become more doubtful than it
    /// was at first.
    fn forget(&mut self) {
        let doubt: f32 = (0..N).map(|i| self.inverse[i][i]).sum();
        let most = N as f32 / self.ridge;
        let scale = (1.0 / KEEP).min(most / doubt);
        self.inverse.iter_mut().flatten().for_each(|x| *x *= scale);
        // Rounding must not make it lopsided.
        for i in 0..N {
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
    use crate::policy::trajectory::vector::{RANK, Vector};

    fn summary(seed: u64) -> Vector {
        std::array::from_fn(|i| (mix(seed << 8 | i as u64) >> 40) as f32 / (1 << 23) as f32 - 1.0)
    }

    /// Weights that have seen a linear rule some hundred times follow it.
    #[test]
    fn a_linear_rule_is_learned() {
        let rule = summary(u64::MAX >> 9);
        let (mut gain, mut weights) = (Gain::new(30.0), [0.0; RANK]);
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
        let mut gain = Gain::new(30.0);
        let x = summary(1);
        for _ in 0..50_000 {
            let gain = gain.learn(&x);
            assert!(gain.iter().all(|g| g.is_finite() && g.abs() < 1.0));
        }
        let doubt: f32 = (0..RANK).map(|i| gain.inverse[i][i]).sum();
        assert!(doubt <= RANK as f32 / 30.0 * 1.001, "{doubt}");
    }
}
