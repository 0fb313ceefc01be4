//! Rotary position embedding (RoFormer, section 3.4.2) in its two pairings.

use super::{Cpu, SharedOut};
use crate::backend::ops::{Frequencies, RopePairing, RopeShape};
use std::ops::Range;

/// Cosines and sines of each row's position, computed once and used by every layer.
#[derive(Default)]
pub struct RopeTable {
    n_pairs: usize,
    /// [tokens, pairs, (cos, sin)]
    turns: Vec<[f32; 2]>,
}

impl RopeTable {
    /// Positions `first..first + n` in place of all rows.
    pub fn fill(&mut self, frequencies: &Frequencies, first: usize, n: usize) {
        self.clear();
        self.push(frequencies, first, n);
    }

    pub fn clear(&mut self) {
        self.n_pairs = 0;
        self.turns.clear();
    }

    /// Adds rows of positions `first..first + n`, with as many pairs as the rows before.
    pub fn push(&mut self, frequencies: &Frequencies, first: usize, n: usize) {
        self.n_pairs = frequencies.pairs().len();
        for position in first..first + n {
            self.turns.extend(frequencies.pairs().iter().map(|f| {
                let angle = position as f32 * f;
                [angle.cos() * frequencies.magnitude(), angle.sin() * frequencies.magnitude()]
            }));
        }
    }

    /// Adds rows of positions with the same for each of `n_pairs` pairs.
    pub fn push_pairs(
        &mut self,
        n_pairs: usize,
        pair: impl Fn(usize) -> [f32; 2],
        positions: Range<usize>,
    ) {
        self.n_pairs = n_pairs;
        for position in positions {
            self.turns.extend(std::iter::repeat_n(pair(position), n_pairs));
        }
    }

    /// Turns back what another table turns, if it turns without a magnitude.
    pub fn fill_back(&mut self, of: &RopeTable) {
        self.n_pairs = of.n_pairs;
        self.turns.clear();
        self.turns.extend(of.turns.iter().map(|[cos, sin]| [*cos, -sin]));
    }

    /// [tokens, pairs, (cos, sin)]
    pub fn turns(&self) -> &[[f32; 2]] {
        &self.turns
    }

    fn token(&self, t: usize) -> &[[f32; 2]] {
        &self.turns[t * self.n_pairs..][..self.n_pairs]
    }
}

impl Cpu {
    /// Turns elements of each head of `x` [tokens, heads, head_dim] in place.
    pub fn rope(&self, x: &mut [f32], shape: RopeShape, table: &RopeTable) {
        if table.n_pairs == 0 {
            return;
        }
        let tokens = table.turns.len() / table.n_pairs;
        let width = x.len() / tokens;
        assert!(width * tokens == x.len() && width.is_multiple_of(shape.head_dim));
        assert!(shape.offset + 2 * table.n_pairs <= shape.head_dim);
        let shared = SharedOut::new(x);
        self.chunks(tokens, self.token_chunk(tokens, width), &|_, range| {
            for t in range {
                // SAFETY: each token is in one chunk.
                let heads = unsafe { shared.slice(t * width, width) };
                for head in heads.chunks_exact_mut(shape.head_dim) {
                    rotate(&mut head[shape.offset..], table.token(t), shape.pairing);
                }
            }
        });
    }
}

fn rotate(head: &mut [f32], turns: &[[f32; 2]], pairing: RopePairing) {
    let n = turns.len();
    for (i, [cos, sin]) in turns.iter().enumerate() {
        let (a, b) = match pairing {
            RopePairing::Adjacent => (2 * i, 2 * i + 1),
            RopePairing::Halves => (i, i + n),
        };
        let (x, y) = (head[a], head[b]);
        head[a] = x * cos - y * sin;
        head[b] = x * sin + y * cos;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(head_dim: usize, pairing: RopePairing) -> RopeShape {
        RopeShape { head_dim, offset: 0, pairing }
    }

    fn frequencies(base: f32, n_rot: usize) -> Frequencies {
        let pair = |i: usize| base.powf(-2.0 * i as f32 / n_rot as f32);
        Frequencies::new((0..n_rot / 2).map(pair).collect(), 1.0)
    }

    #[test]
    fn position_zero_is_the_identity_and_length_is_kept() {
        let cpu = Cpu::new(1);
        let f = frequencies(10000.0, 8);
        for pairing in [RopePairing::Adjacent, RopePairing::Halves] {
            let x: Vec<f32> = (0..20).map(|i| i as f32 - 7.5).collect();
            let mut y = x.clone();
            let mut table = RopeTable::default();
            table.fill(&f, 0, 1);
            cpu.rope(&mut y, shape(10, pairing), &table);
            assert_eq!(x, y);
            table.fill(&f, 1234, 1);
            cpu.rope(&mut y, shape(10, pairing), &table);
            assert_ne!(x, y);
            let square = |v: &[f32]| v.iter().map(|a| a * a).sum::<f32>();
            assert!((square(&x) - square(&y)).abs() < 1e-3 * square(&x));
            // Elements past n_rot stay as they are.
            assert_eq!((x[8], x[19]), (y[8], y[19]));
        }
    }

    #[test]
    fn an_offset_leaves_the_head_of_the_head_alone() {
        let cpu = Cpu::new(1);
        let mut table = RopeTable::default();
        table.fill(&frequencies(100.0, 4), 7, 1);
        let mut whole: Vec<f32> = (0..6).map(|i| i as f32).collect();
        let mut tail = whole[2..].to_vec();
        let offset = RopeShape { offset: 2, ..shape(6, RopePairing::Adjacent) };
        cpu.rope(&mut whole, offset, &table);
        cpu.rope(&mut tail, shape(4, RopePairing::Adjacent), &table);
        assert_eq!((&whole[..2], &whole[2..]), (&[0.0, 1.0][..], &tail[..]));
    }

    #[test]
    fn the_two_pairings_are_one_permutation_apart() {
        let cpu = Cpu::new(1);
        let f = Frequencies::new(vec![0.5, 0.1, 0.01], 1.5);
        let mut table = RopeTable::default();
        table.fill(&f, 9, 1);
        let mut halves = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut adjacent = [1.0, 4.0, 2.0, 5.0, 3.0, 6.0];
        cpu.rope(&mut halves, shape(6, RopePairing::Halves), &table);
        cpu.rope(&mut adjacent, shape(6, RopePairing::Adjacent), &table);
        for i in 0..3 {
            assert_eq!(halves[i], adjacent[2 * i]);
            assert_eq!(halves[i + 3], adjacent[2 * i + 1]);
        }
    }
}
