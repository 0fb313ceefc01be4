//! MoEpic's three probabilities of one layer (section 3.4.2), for all cache sizes at once.

use super::stats::LayerCounts;

/// Cache sizes go from 0 to the number of the layer's experts, both included.
#[derive(Clone, Debug)]
pub(super) struct Curves {
    /// H(C): `[n_experts + 1]`.
    hit: Vec<f64>,
    /// P(y): `[depth]`, for y from 0.
    accuracy: Vec<f64>,
    /// PH(y, C): `[n_experts + 1][depth]`.
    predicted_hit: Vec<f64>,
}

impl Curves {
    /// Probabilities of what was never seen are 0.
    pub fn new(counts: &LayerCounts) -> Curves {
        let (n, depth) = (counts.n_experts(), counts.depth());
        let n_activations: u64 = counts.activations.iter().map(|count| u64::from(*count)).sum();
        let per_activation = 1.0 / n_activations.max(1) as f64;
        let per_token = 1.0 / f64::from(counts.tokens.max(1));
        // Sums of whole numbers, so that the largest cache hits always and not almost always.
        let mut hits = 0u64;
        let mut hit = vec![0.0];
        let mut predicted_hits = vec![0u64; depth];
        let mut predicted_hit = vec![0.0; depth];
        for rank in 0..n {
            hits += u64::from(counts.activations[rank]);
            hit.push(hits as f64 * per_activation);
            for (y, hits) in predicted_hits.iter_mut().enumerate() {
                *hits += u64::from(counts.predictions[y * n + rank]);
                predicted_hit.push(*hits as f64 * per_token);
            }
        }
        let accuracy = counts.correct.iter().map(|n| f64::from(*n) * per_token).collect();
        Curves { hit, accuracy, predicted_hit }
    }

    pub fn n_experts(&self) -> usize {
        self.hit.len() - 1
    }

    /// H(C): how much of what is activated is among the C experts of highest priority.
    pub fn hit(&self, size: usize) -> f64 {
        self.hit[size]
    }

    /// P(y) for each y: how often the expert of the y-th highest predicted score is activated.
    pub fn accuracy(&self) -> &[f64] {
        &self.accuracy
    }

    /// PH(y, C) for each y: how often that expert is among the C of highest priority.
    pub fn predicted_hit(&self, size: usize) -> &[f64] {
        let depth = self.accuracy.len();
        &self.predicted_hit[size * depth..][..depth]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::papers::moepic::stats::Stats;
    use crate::policy::papers::moepic::testing::{Step, history, routed, shape};
    use crate::policy::{Eviction, Expert, Lcp};
    use proptest::prelude::*;

    /// A token of one layer with everything that the definitions speak of.
    struct Seen {
        /// Experts, highest priority first, before the token.
        order: Vec<u32>,
        chosen: Vec<u32>,
        /// Experts, highest score first; none if nothing was predicted.
        predicted: Vec<u32>,
    }

    /// The history of one layer by the definitions: `Lcp` is asked for each token.
    fn seen(history: &[Step], layer: u32) -> Vec<Seen> {
        let mut lcp = Lcp::new(&shape());
        let mut out = Vec::new();
        for (at, step) in history.iter().enumerate() {
            if step.layer == layer {
                let n = shape().n_experts[layer as usize] as u32;
                let mut order: Vec<u32> = (0..n).collect();
                let standing = |expert: u32| lcp.standing(Expert { layer, expert });
                order.sort_by(|a, b| standing(*b).partial_cmp(&standing(*a)).unwrap());
                // The last prediction for this layer since it was reached the last time.
                let of_request = history[..at].iter().rev().filter(|s| s.request == step.request);
                let prediction = of_request
                    .take_while(|s| s.ahead.0 == layer || s.layer != layer)
                    .find(|s| s.ahead.0 == layer);
                let scores = prediction.map_or(&[][..], |s| &s.ahead.1);
                let mut predicted: Vec<u32> = (0..scores.len() as u32).collect();
                predicted.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
                out.push(Seen { order, chosen: step.chosen.clone(), predicted });
            }
            lcp.observe(&routed(step));
        }
        out
    }

    proptest! {
        /// The definitions word for word, a cache size at a time.
        #[test]
        fn probabilities_are_those_of_the_history(history in history()) {
            let mut stats = Stats::new(&shape());
            history.iter().for_each(|step| stats.observe(&routed(step)));
            for layer in shape().moe_layers() {
                let seen = seen(&history, layer as u32);
                let counts = &stats.layers[layer];
                let curves = Curves::new(counts);
                let (n, q) = (counts.n_experts(), seen.len().max(1) as f64);
                prop_assert_eq!(counts.tokens as usize, seen.len());
                prop_assert_eq!(counts.depth(), n.min(4 * shape().k));
                let activated: usize = seen.iter().map(|s| s.chosen.len()).sum();
                for size in 0..=n {
                    let hits = seen.iter().flat_map(|s| {
                        s.chosen.iter().filter(|e| s.order[..size].contains(e))
                    });
                    let expected = hits.count() as f64 / activated.max(1) as f64;
                    prop_assert!((curves.hit(size) - expected).abs() < 1e-12);
                    for y in 0..counts.depth() {
                        let hits = seen.iter().filter(|s| {
                            s.predicted.get(y).is_some_and(|e| s.order[..size].contains(e))
                        });
                        let expected = hits.count() as f64 / q;
                        prop_assert!((curves.predicted_hit(size)[y] - expected).abs() < 1e-12);
                    }
                }
                for y in 0..counts.depth() {
                    let right = seen.iter().filter(|s| {
                        s.predicted.get(y).is_some_and(|e| s.chosen.contains(e))
                    });
                    let expected = right.count() as f64 / q;
                    prop_assert!((curves.accuracy()[y] - expected).abs() < 1e-12);
                }
            }
        }

        /// Half of everything is as probable as all of it was, but for what rounding takes.
        #[test]
        fn forgetting_keeps_probabilities(history in history()) {
            let mut stats = Stats::new(&shape());
            // Often enough for all counts to be even.
            (0..2).for_each(|_| history.iter().for_each(|step| stats.observe(&routed(step))));
            let mut doubled = stats.clone();
            doubled.layers.iter_mut().flat_map(LayerCounts::all_mut).for_each(|n| *n *= 2);
            doubled.forget_half();
            prop_assert!(doubled.layers == stats.layers);
        }
    }

    #[test]
    fn nothing_seen_is_probability_0() {
        let curves = Curves::new(&LayerCounts::new(5, 1));
        let hits: Vec<f64> = (0..=5).map(|size| curves.hit(size)).collect();
        assert_eq!((hits, curves.accuracy().to_vec()), (vec![0.0; 6], vec![0.0; 4]));
        assert_eq!(curves.predicted_hit(5), [0.0; 4]);
    }
}
