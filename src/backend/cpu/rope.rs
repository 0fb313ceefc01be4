//! Rotary position embedding (RoFormer, section 3.4.2) in its two pairings.

use super::{Cpu, SharedOut};

/// Which elements of a head are turned together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// (2i, 2i + 1)
    Adjacent,
    /// (i, i + n_rot/2)
    Halves,
}

/// Frequencies of the pairs: base^(−2i/n_rot), scaled and divided by optional factors.
#[derive(Clone, Debug)]
pub struct Frequencies(Vec<f32>);

impl Frequencies {
    pub fn new(n_rot: usize, base: f32, scale: f32, factors: Option<&[f32]>) -> Frequencies {
        let pair = |i: usize| {
            let plain = 1.0 / f64::from(base).powf(2.0 * i as f64 / n_rot as f64);
            (plain as f32) * scale / factors.map_or(1.0, |f| f[i])
        };
        Frequencies((0..n_rot / 2).map(pair).collect())
    }
}

/// Cosines and sines of a run of positions, computed once and used by every layer.
#[derive(Default)]
pub struct RopeTable {
    n_pairs: usize,
    /// [tokens, pairs, (cos, sin)]
    turns: Vec<[f32; 2]>,
}

impl RopeTable {
    pub fn fill(&mut self, frequencies: &Frequencies, first: usize, n: usize) {
        self.n_pairs = frequencies.0.len();
        self.turns.clear();
        for position in first..first + n {
            self.turns.extend(frequencies.0.iter().map(|f| {
                let angle = position as f32 * f;
                [angle.cos(), angle.sin()]
            }));
        }
    }

    fn token(&self, t: usize) -> &[[f32; 2]] {
        &self.turns[t * self.n_pairs..][..self.n_pairs]
    }
}

impl Cpu {
    /// Turns the leading elements of each head of `x` [tokens, heads, head_dim] in place.
    pub fn rope(&self, x: &mut [f32], head_dim: usize, table: &RopeTable, pairing: Pairing) {
        if table.n_pairs == 0 {
            return;
        }
        let tokens = table.turns.len() / table.n_pairs;
        let width = x.len() / tokens;
        assert!(width * tokens == x.len() && width.is_multiple_of(head_dim));
        let shared = SharedOut::new(x);
        self.chunks(tokens, self.token_chunk(tokens, width), &|_, range| {
            for t in range {
                // SAFETY: each token is in one chunk.
                let heads = unsafe { shared.slice(t * width, width) };
                for head in heads.chunks_exact_mut(head_dim) {
                    rotate(head, table.token(t), pairing);
                }
            }
        });
    }
}

fn rotate(head: &mut [f32], turns: &[[f32; 2]], pairing: Pairing) {
    let n = turns.len();
    for (i, [cos, sin]) in turns.iter().enumerate() {
        let (a, b) = match pairing {
            Pairing::Adjacent => (2 * i, 2 * i + 1),
            Pairing::Halves => (i, i + n),
        };
        let (x, y) = (head[a], head[b]);
        head[a] = x * cos - y * sin;
        head[b] = x * sin + y * cos;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_zero_is_the_identity_and_length_is_kept() {
        let cpu = Cpu::new(1);
        let f = Frequencies::new(8, 10000.0, 1.0, None);
        for pairing in [Pairing::Adjacent, Pairing::Halves] {
            let x: Vec<f32> = (0..20).map(|i| i as f32 - 7.5).collect();
            let mut y = x.clone();
            let mut table = RopeTable::default();
            table.fill(&f, 0, 1);
            cpu.rope(&mut y, 10, &table, pairing);
            assert_eq!(x, y);
            table.fill(&f, 1234, 1);
            cpu.rope(&mut y, 10, &table, pairing);
            assert_ne!(x, y);
            let square = |v: &[f32]| v.iter().map(|a| a * a).sum::<f32>();
            assert!((square(&x) - square(&y)).abs() < 1e-3 * square(&x));
            // Elements past n_rot stay as they are.
            assert_eq!((x[8], x[19]), (y[8], y[19]));
        }
    }

    #[test]
    fn the_two_pairings_are_one_permutation_apart() {
        let cpu = Cpu::new(1);
        let f = Frequencies::new(6, 500.0, 0.5, Some(&[1.0, 2.0, 4.0]));
        let mut table = RopeTable::default();
        table.fill(&f, 9, 1);
        let mut halves = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut adjacent = [1.0, 4.0, 2.0, 5.0, 3.0, 6.0];
        cpu.rope(&mut halves, 6, &table, Pairing::Halves);
        cpu.rope(&mut adjacent, 6, &table, Pairing::Adjacent);
        for i in 0..3 {
            assert_eq!(halves[i], adjacent[2 * i]);
            assert_eq!(halves[i + 3], adjacent[2 * i + 1]);
        }
    }
}
