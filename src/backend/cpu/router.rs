//! Which experts a token goes to, and with what weight.

use super::{Cpu, SharedOut};

/// What one layer's router decided for some tokens.
#[derive(Debug, Default)]
pub struct Route {
    pub k: usize,
    pub n_experts: usize,
    /// [tokens, n_experts]
    pub probs: Vec<f32>,
    /// [tokens, k], best first
    pub chosen: Vec<u32>,
    /// [tokens, k]
    pub weights: Vec<f32>,
}

impl Route {
    /// One expert, weight 1, for each token: a dense layer.
    pub fn dense(&mut self, n_tokens: usize) {
        (self.k, self.n_experts) = (1, 1);
        self.probs.clear();
        self.chosen.clear();
        self.chosen.resize(n_tokens, 0);
        self.weights.clear();
        self.weights.resize(n_tokens, 1.0);
    }
}

impl Cpu {
    /// Turns router logits, in `route.probs`, into probabilities (softmax over all experts), the
    /// `k` best (ties to the lower id) and their weights: the probabilities, divided by their sum
    /// if `normalize`, times `scale`.
    pub fn route_softmax_top_k(&self, route: &mut Route, normalize: bool, scale: f32) {
        let (n, k) = (route.n_experts, route.k);
        let tokens = route.probs.len() / n;
        route.chosen.resize(tokens * k, 0);
        route.weights.resize(tokens * k, 0.0);
        let probs = SharedOut::new(&mut route.probs);
        self.chunks(tokens, self.token_chunk(tokens, n * 4), &|_, range| {
            for t in range {
                // SAFETY: each token is in one chunk.
                self.kernels.softmax(unsafe { probs.slice(t * n, n) });
            }
        });
        for t in 0..tokens {
            let probs = &route.probs[t * n..][..n];
            let chosen = &mut route.chosen[t * k..][..k];
            let weights = &mut route.weights[t * k..][..k];
            top_k(probs, chosen);
            for (w, &e) in weights.iter_mut().zip(chosen.iter()) {
                *w = probs[e as usize];
            }
            let sum: f32 = weights.iter().sum();
            let factor = if normalize { scale / sum } else { scale };
            weights.iter_mut().for_each(|w| *w *= factor);
        }
    }
}

/// The indices of the largest values, largest first, ties to the lower index. Selection by
/// repeated scan: k is at most a few tens and n a few hundreds.
fn top_k(values: &[f32], out: &mut [u32]) {
    for i in 0..out.len() {
        let mut best: Option<usize> = None;
        for (j, &v) in values.iter().enumerate() {
            if out[..i].contains(&(j as u32)) {
                continue;
            }
            // A NaN never wins against a number, and the first one wins where all are NaN, so k
            // distinct experts come out whatever the input.
            if best.is_none_or(|b| v > values[b] || (values[b].is_nan() && !v.is_nan())) {
                best = Some(j);
            }
        }
        out[i] = best.expect("k is at most n") as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_first_ties_to_the_lower_index() {
        let mut out = [0; 4];
        top_k(&[0.1, 0.4, 0.1, 0.4, 0.3], &mut out);
        assert_eq!(out, [1, 3, 4, 0]);
        top_k(&[f32::NAN, 0.2, f32::NAN, 0.1], &mut out);
        assert_eq!(out, [1, 3, 0, 2]);
    }

    #[test]
    fn weights_sum_to_one_if_normalised() {
        let cpu = Cpu::new(1);
        for normalize in [false, true] {
            let mut route = Route { k: 2, n_experts: 4, ..Route::default() };
            route.probs = vec![0.0, 1.0, 2.0, 3.0, -1.0, -1.0, -1.0, -1.0];
            cpu.route_softmax_top_k(&mut route, normalize, 1.0);
            assert_eq!(route.chosen, [3, 2, 0, 1]);
            let first: f32 = route.weights[..2].iter().sum();
            assert_eq!((first - 1.0).abs() < 1e-6, normalize);
            assert!((route.probs[..4].iter().sum::<f32>() - 1.0).abs() < 1e-6);
        }
    }
}
