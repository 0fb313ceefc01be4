//! The router: the experts of each token and their weights.

use super::delta::ln_1p;
use super::{Cpu, SharedOut};
use crate::backend::ops::{Choice, Route, RouteScratch, Score};
use crate::simd::Kernels;

impl Score {
    /// One token's logits → probabilities, in place.
    pub fn probabilities(self, kernels: &Kernels, logits: &mut [f32]) {
        match self {
            Score::Sigmoid => kernels.sigmoid(logits),
            Score::SqrtSoftplus => {
                for part in logits.chunks_mut(64) {
                    let mut small = [0.0; 64];
                    let small = &mut small[..part.len()];
                    small.iter_mut().zip(&*part).for_each(|(small, x)| *small = -x.abs());
                    kernels.exp(small);
                    let sums = part.iter_mut().zip(&*small);
                    sums.for_each(|(x, small)| *x = (x.max(0.0) + ln_1p(*small)).sqrt());
                }
            }
            Score::Softmax | Score::SoftmaxChosen | Score::SparseMixer => kernels.softmax(logits),
        }
    }
}

impl Cpu {
    /// Turns router logits, in `route.probs`, into probabilities, the `k` best experts (ties to
    /// the lower id) and their weights. `bias` `[n_experts]` is added to the probabilities for the
    /// choice, not for the weights; to the logits if the choice says so.
    pub fn route(&self, route: &mut Route, choice: &Choice, bias: Option<&[f32]>) {
        self.begin(route, choice);
        let by_logits = choice.bias_on_logits && bias.is_some();
        if by_logits {
            choice.choose_all(route, bias);
        }
        self.probabilities(route, choice);
        if choice.score == Score::SparseMixer {
            return;
        }
        if !by_logits {
            choice.choose_all(route, bias);
        }
        choice.weigh_all(route);
    }

    /// Routes to the experts that `of_token` tells of each token, instead of the best.
    pub fn route_to<'a>(
        &self,
        route: &mut Route,
        choice: &Choice,
        of_token: impl Fn(usize) -> &'a [u32],
    ) {
        self.begin(route, choice);
        self.probabilities(route, choice);
        for (t, chosen) in route.chosen.chunks_exact_mut(route.k).enumerate() {
            chosen.copy_from_slice(of_token(t));
        }
        choice.weigh_all(route);
    }

    /// Caps the logits and makes room for the rest of a route.
    fn begin(&self, route: &mut Route, choice: &Choice) {
        let n_pairs = route.probs.len() / route.n_experts * route.k;
        if choice.cap > 0.0 {
            self.kernels.soft_cap(&mut route.probs, choice.cap);
        }
        route.chosen.resize(n_pairs, 0);
        route.weights.resize(n_pairs, 0.0);
    }

    /// Router logits → probabilities; SparseMixer's choice too.
    fn probabilities(&self, route: &mut Route, choice: &Choice) {
        let n = route.n_experts;
        let tokens = route.probs.len() / n;
        if choice.score == Score::SparseMixer {
            self.sparse_mixer(route, choice.jitter);
        }
        let probs = SharedOut::new(&mut route.probs);
        self.chunks(tokens, self.token_chunk(tokens, n * 4), &|_, range| {
            for t in range {
                // SAFETY: each token is in one chunk.
                let probs = unsafe { probs.slice(t * n, n) };
                choice.score.probabilities(self.kernels, probs);
            }
        });
    }

    /// Chooses and weighs by the logits in `route.probs`.
    fn sparse_mixer(&self, route: &mut Route, jitter: f32) {
        let (n, k) = (route.n_experts, route.k);
        let rows = route.chosen.chunks_exact_mut(k).zip(route.weights.chunks_exact_mut(k));
        for (logits, (chosen, weights)) in route.probs.chunks_exact(n).zip(rows) {
            top_k(logits, chosen);
            for (rank, weight) in weights.iter_mut().enumerate() {
                let best = logits[chosen[rank] as usize];
                let near = |s: f32| (best - s) / s.abs().max(best) <= 2.0 * jitter;
                let left = (0..n as u32).filter(|e| !chosen[..rank].contains(e));
                // The best one first, so that its share is in a known place.
                let others = left.filter(|e| *e != chosen[rank]).map(|e| logits[e as usize]);
                let values = &mut route.scratch.values;
                values.clear();
                values.push(best);
                values.extend(others.filter(|s| near(*s)));
                self.kernels.softmax(values);
                *weight = values[0];
            }
        }
    }
}

impl Choice {
    /// Chooses each token's experts by the values in `route.probs`.
    fn choose_all(&self, route: &mut Route, bias: Option<&[f32]>) {
        let Route { k, n_experts, probs, chosen, scratch, .. } = route;
        for (values, chosen) in probs.chunks_exact(*n_experts).zip(chosen.chunks_exact_mut(*k)) {
            self.choose(values, bias, scratch, chosen);
        }
    }

    fn weigh_all(&self, route: &mut Route) {
        let Route { k, n_experts, probs, chosen, weights, .. } = route;
        let pairs = chosen.chunks_exact(*k).zip(weights.chunks_exact_mut(*k));
        for (probs, (chosen, weights)) in probs.chunks_exact(*n_experts).zip(pairs) {
            self.weigh(probs, chosen, weights);
        }
    }

    fn choose(
        &self,
        probs: &[f32],
        bias: Option<&[f32]>,
        scratch: &mut RouteScratch,
        chosen: &mut [u32],
    ) {
        if bias.is_none() && self.n_groups == 1 {
            return top_k(probs, chosen);
        }
        let values = &mut scratch.values;
        values.clear();
        values.extend_from_slice(probs);
        if let Some(bias) = bias {
            values.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
        }
        if self.n_groups > 1 {
            self.keep_best_groups(scratch, if bias.is_some() { 2 } else { 1 });
        }
        top_k(&scratch.values, chosen);
    }

    /// Sets the experts of all but the best groups to −∞. A group is as good as its best expert
    /// (DeepSeek-V2, section 2.1.2) or, where a bias balances the load, as the sum of its best two
    /// (DeepSeek-V3, its code's `noaux_tc`): its best `n_best`.
    fn keep_best_groups(&self, scratch: &mut RouteScratch, n_best: usize) {
        let RouteScratch { values, merits, best, .. } = scratch;
        let size = values.len() / self.n_groups;
        let merit = |group: &[f32]| {
            let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
            for &v in group {
                if v > first {
                    (first, second) = (v, first);
                } else if v > second {
                    second = v;
                }
            }
            if n_best == 2 && size > 1 { first + second } else { first }
        };
        merits.clear();
        merits.extend(values.chunks_exact(size).map(merit));
        best.clear();
        best.resize(self.n_groups_used, 0);
        top_k(merits, best);
        for (g, group) in values.chunks_exact_mut(size).enumerate() {
            if !best.contains(&(g as u32)) {
                group.fill(f32::NEG_INFINITY);
            }
        }
    }

    fn weigh(&self, probs: &[f32], chosen: &[u32], weights: &mut [f32]) {
        for (w, &e) in weights.iter_mut().zip(chosen) {
            *w = probs[e as usize];
        }
        // The sum of sigmoids can be 0.
        let sum = weights.iter().sum::<f32>() + 1e-20;
        let factor = if self.normalizes() { self.scale / sum } else { self.scale };
        weights.iter_mut().for_each(|w| *w *= factor);
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

    const PLAIN: Choice = Choice {
        score: Score::Softmax,
        cap: 0.0,
        normalize: false,
        scale: 1.0,
        bias_on_logits: false,
        n_groups: 1,
        n_groups_used: 1,
        jitter: 0.01,
    };

    fn routed(logits: &[f32], k: usize, choice: &Choice, bias: Option<&[f32]>) -> Route {
        let n_experts = logits.len();
        let mut route = Route { k, n_experts, probs: logits.to_vec(), ..Route::default() };
        Cpu::new(1).route(&mut route, choice, bias);
        route
    }

    #[test]
    fn weights_sum_to_one_if_normalised() {
        for normalize in [false, true] {
            let choice = Choice { normalize, ..PLAIN };
            let route = routed(&[0.0, 1.0, 2.0, 3.0], 2, &choice, None);
            assert_eq!(route.chosen, [3, 2]);
            let sum: f32 = route.weights.iter().sum();
            assert_eq!((sum - 1.0).abs() < 1e-6, normalize);
            assert!((route.probs.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn told_experts_are_weighed_as_chosen_ones() {
        let logits: Vec<f32> = (0..130).map(|i| (i % 17) as f32 - 8.0).collect();
        let choice = Choice { score: Score::SqrtSoftplus, normalize: true, scale: 1.5, ..PLAIN };
        let mut route = Route { k: 2, n_experts: 65, probs: logits.clone(), ..Route::default() };
        let told = [[3u32, 60], [7, 1]];
        Cpu::new(1).route_to(&mut route, &choice, |t| &told[t]);
        assert_eq!(route.chosen, [3, 60, 7, 1]);
        for (x, p) in logits.iter().zip(&route.probs) {
            assert!((f64::from(*x).exp().ln_1p().sqrt() - f64::from(*p)).abs() < 1e-6);
        }
        let (a, b) = (route.probs[3], route.probs[60]);
        assert_eq!(route.weights[..2], [a * (1.5 / (a + b)), b * (1.5 / (a + b))]);
    }

    #[test]
    fn a_bias_chooses_but_does_not_weigh() {
        let bias = [0.0, 5.0, 0.0, -5.0];
        let choice = Choice { score: Score::Sigmoid, scale: 2.0, ..PLAIN };
        let route = routed(&[0.5, -1.0, 0.2, 3.0], 2, &choice, Some(&bias));
        assert_eq!(route.chosen, [1, 0]);
        assert_eq!(route.weights, [2.0 * route.probs[1], 2.0 * route.probs[0]]);
    }

    #[test]
    fn a_bias_on_logits_chooses_by_them() {
        // By probabilities, of which the first two are all but 1, the third would win.
        let (logits, bias) = ([20.0, 18.0, 0.0], [0.0, 1.5, 1.0]);
        let choice = Choice { score: Score::Sigmoid, bias_on_logits: true, ..PLAIN };
        let route = routed(&logits, 2, &choice, Some(&bias));
        assert_eq!(route.chosen, [0, 1]);
        assert_eq!(route.weights, [route.probs[0], route.probs[1]]);
    }

    #[test]
    fn experts_come_from_the_best_groups() {
        let logits = [2.0, -9.0, 1.5, 1.4, 1.0, 0.9];
        let best = Choice { n_groups: 3, n_groups_used: 1, ..PLAIN };
        assert_eq!(routed(&logits, 2, &best, None).chosen, [0, 1]);
        // By its best two the second group wins.
        let two = Choice { score: Score::Sigmoid, ..best };
        assert_eq!(routed(&logits, 2, &two, Some(&[0.0; 6])).chosen, [2, 3]);
    }

    #[test]
    fn the_sparse_mixer_shares_among_near_logits_only() {
        let choice = Choice { score: Score::SparseMixer, ..PLAIN };
        let route = routed(&[1.0, 0.99, 0.5, 0.4999, -3.0], 2, &choice, None);
        assert_eq!(route.chosen, [0, 1]);
        let near = 1.0 / (1.0 + (-0.01f32).exp());
        assert!((route.weights[0] - near).abs() < 1e-6, "{:?}", route.weights);
        assert_eq!(route.weights[1], 1.0);
        let lone = routed(&[0.1, -0.2], 2, &choice, None);
        assert_eq!(lone.weights, [1.0, 1.0]);
    }
}
