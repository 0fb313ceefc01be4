//! Seeded randomness, and what of it makes networks robust: noise on activations, features and
//! inner values left out.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A stream of its own for each layer, so that layers do not depend on each other.
pub struct Noise(ChaCha8Rng);

impl Noise {
    pub fn new(seed: u64, stream: u64) -> Noise {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        Noise(rng)
    }

    /// From 0 to below 1.
    pub fn uniform(&mut self) -> f32 {
        // As many bits as an f32 holds.
        (self.0.next_u32() >> 8) as f32 / (1u32 << 24) as f32
    }

    /// Two draws from the standard normal distribution (Box and Muller, 1958).
    pub fn normal(&mut self) -> [f32; 2] {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        let (sin, cos) = (std::f32::consts::TAU * self.uniform()).sin_cos();
        [radius * cos, radius * sin]
    }

    /// Adds noise of that standard deviation.
    pub fn blur(&mut self, values: &mut [f32], deviation: f32) {
        for pair in values.chunks_mut(2) {
            let noise = self.normal();
            pair.iter_mut().zip(noise).for_each(|(value, noise)| *value += deviation * noise);
        }
    }

    /// `n` times 0, in that part of them, in steps of 1/65536, or what keeps the mean at 1.
    pub fn mask(&mut self, n: usize, part: f32) -> Vec<f32> {
        let limit = (part * 65536.0) as u16;
        let kept = 1.0 / (1.0 - f32::from(limit) / 65536.0);
        let mut out = Vec::with_capacity(n + 3);
        while out.len() < n {
            let draws = self.0.next_u64();
            let draws = (0..4).map(|at| (draws >> (16 * at)) as u16);
            out.extend(draws.map(|draw| if draw < limit { 0.0 } else { kept }));
        }
        out.truncate(n);
        out
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        // The product's high half: off by less than n / 2⁶⁴.
        ((u128::from(self.0.next_u64()) * n as u128) >> 64) as usize
    }

    /// Fisher and Yates.
    pub fn shuffle(&mut self, values: &mut [usize]) {
        for at in (1..values.len()).rev() {
            values.swap(at, self.below(at + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_moments_that_they_should() {
        let mut noise = Noise::new(7, 3);
        let n = 100_000;
        let mut normal = vec![1.0; n];
        noise.blur(&mut normal, 2.0);
        let mean = normal.iter().sum::<f32>() / n as f32;
        let variance = normal.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / n as f32;
        assert!((mean - 1.0).abs() < 0.03 && (variance - 4.0).abs() < 0.1, "{mean} {variance}");

        let mask = noise.mask(n, 0.25);
        let left_out = mask.iter().filter(|x| **x == 0.0).count() as f32 / n as f32;
        let mean = mask.iter().sum::<f32>() / n as f32;
        assert!((left_out - 0.25).abs() < 0.01 && (mean - 1.0).abs() < 0.01, "{left_out} {mean}");
        assert_eq!(noise.mask(5, 0.0), [1.0; 5]);
    }

    #[test]
    fn a_shuffle_is_a_permutation_of_its_stream() {
        let shuffled = |seed, stream| {
            let mut values: Vec<usize> = (0..50).collect();
            Noise::new(seed, stream).shuffle(&mut values);
            values
        };
        let mut sorted = shuffled(1, 1);
        assert_eq!(shuffled(1, 1), sorted);
        assert!(shuffled(1, 2) != sorted && shuffled(2, 1) != sorted);
        sorted.sort();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
    }
}
