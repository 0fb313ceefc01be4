//! Mirostat (Basu et al., 2021): draws tokens so that the text's surprise stays near a target.

use super::candidates::{Candidates, Drawn};
use super::math::{ln, power};
use rand_chacha::ChaCha12Rng;
use std::f64::consts::LN_2;

#[derive(Clone, Debug, PartialEq)]
pub struct MirostatOptions {
    /// 1 or 2; 0: the chain ends in an ordinary draw.
    pub version: u8,
    /// The surprise aimed at, in bits a token.
    pub tau: f32,
    /// How fast the limit follows what was drawn.
    pub eta: f32,
}

impl Default for MirostatOptions {
    fn default() -> Self {
        Self { version: 0, tau: 5.0, eta: 0.1 }
    }
}

/// How many of the best tokens the first version estimates the distribution's exponent from.
const ESTIMATED_FROM: usize = 100;

pub struct Mirostat {
    options: MirostatOptions,
    /// The limit of a token's surprise, in bits.
    mu: f64,
}

impl Mirostat {
    pub fn new(options: &MirostatOptions) -> Self {
        Self { options: options.clone(), mu: 2.0 * f64::from(options.tau) }
    }

    pub fn draw(&mut self, candidates: &mut Candidates, rng: &mut ChaCha12Rng) -> Drawn {
        candidates.sort();
        let total = candidates.weigh();
        let k = match self.options.version {
            1 => self.estimated_k(candidates),
            _ => candidates.list.partition_point(|c| bits(c.weight / total) <= self.mu),
        };
        candidates.list.truncate(k.max(1));
        let drawn = candidates.draw(rng);
        let error = bits(drawn.probability) - f64::from(self.options.tau);
        self.mu -= f64::from(self.options.eta) * error;
        drawn
    }

    /// How many tokens lead to a surprise of mu if probabilities follow Zipf's law, by an exponent
    /// that is estimated from the best ones (equations 3 and 6 of the paper).
    fn estimated_k(&self, candidates: &Candidates) -> usize {
        let (mut products, mut squares) = (0.0, 0.0);
        let best = candidates.list.iter().take_while(|c| c.weight > 0.0).take(ESTIMATED_FROM);
        let weights: Vec<f64> = best.map(|c| c.weight).collect();
        for (i, pair) in weights.windows(2).enumerate() {
            let t = ln((i + 2) as f64 / (i + 1) as f64);
            products += t * ln(pair[0] / pair[1]);
            squares += t * t;
        }
        if products == 0.0 {
            // All alike, or one: Zipf's law says nothing.
            return candidates.list.len();
        }
        let s = products / squares;
        let epsilon = s - 1.0;
        let n = candidates.n_logits as f64;
        // (1 − n^−ε)/ε, whose limit at 0 is ln n.
        let mass = match epsilon.abs() < 1e-9 {
            true => ln(n),
            false => (1.0 - power(n, -epsilon)) / epsilon,
        };
        // A cast brings what is too large or no number into range.
        power(power(2.0, self.mu) / mass, 1.0 / s) as usize
    }
}

/// −log2 p.
fn bits(p: f64) -> f64 {
    if p < f64::MIN_POSITIVE { f64::INFINITY } else { -ln(p) / LN_2 }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::testing::of;
    use super::*;
    use rand_chacha::rand_core::SeedableRng;

    fn mirostat(version: u8, tau: f32) -> Mirostat {
        Mirostat::new(&MirostatOptions { version, tau, eta: 0.1 })
    }

    fn kept(stage: &mut Mirostat, probabilities: &[f32]) -> usize {
        let mut candidates = of(probabilities);
        stage.draw(&mut candidates, &mut ChaCha12Rng::seed_from_u64(0));
        candidates.list.len()
    }

    /// Surprises of 1, 2, 3 and 3 bits against a first limit of 2·tau.
    #[test]
    fn the_second_drops_what_surprises_too_much() {
        let eighths = [0.5, 0.25, 0.125, 0.125];
        for (tau, expected) in [(0.4, 1), (0.6, 1), (1.1, 2), (1.6, 4), (5.0, 4)] {
            assert_eq!(kept(&mut mirostat(2, tau), &eighths), expected, "{tau}");
        }
    }

    /// After a draw of surprise s, the limit has moved by eta·(s − tau).
    #[test]
    fn the_limit_follows_what_was_drawn() {
        let mut stage = mirostat(2, 3.0);
        let mut candidates = of(&[0.25; 4]);
        stage.draw(&mut candidates, &mut ChaCha12Rng::seed_from_u64(0));
        assert!((stage.mu - (6.0 - 0.1 * (2.0 - 3.0))).abs() < 1e-6, "{}", stage.mu);
    }

    /// Probabilities of 1/i of 1,000 tokens: an exponent of 1, so k = 2^mu / ln 1000. With 1/i²,
    /// k² = 2^mu / (1 − 1/1000).
    #[test]
    fn the_first_estimates_how_many() {
        let zipf: Vec<f32> = (1..=1000).map(|i| 1.0 / i as f32).collect();
        assert_eq!(kept(&mut mirostat(1, 4.0), &zipf), (256.0f64 / 1000f64.ln()) as usize);
        let steep: Vec<f32> = zipf.iter().map(|p| p * p).collect();
        assert_eq!(kept(&mut mirostat(1, 4.0), &steep), (256.0f64 / 0.999).sqrt() as usize);
        assert_eq!(kept(&mut mirostat(1, 4.0), &[0.25; 4]), 4);
        assert_eq!(kept(&mut mirostat(1, 4.0), &[1.0]), 1);
    }

    /// In the long run the surprise is what was aimed at.
    #[test]
    fn the_surprise_is_near_its_target() {
        let zipf: Vec<f32> = (1..=2000).map(|i| 1.0 / i as f32).collect();
        for version in [1, 2] {
            let mut stage = mirostat(version, 3.0);
            let mut rng = ChaCha12Rng::seed_from_u64(1);
            let n = 1000;
            let mut sum = 0.0;
            for _ in 0..n {
                sum += bits(stage.draw(&mut of(&zipf), &mut rng).probability);
            }
            let mean = sum / f64::from(n);
            assert!((mean - 3.0).abs() < 0.15, "version {version}: {mean}");
        }
    }
}
