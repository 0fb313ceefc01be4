//! The sub-problem of one layer (Eq. 11): given slots and a prefetching window, how much of each
//! cached expert to keep.
//!
//! The paper searches over the cache size C, with θ = V ÷ C. Here θ is a number of granules, so
//! the search is over that number, and C follows. Two things are whole in the paper and need not
//! be here: slots that are left when C experts have their top segments hold leading granules of
//! the next expert, and the last prefetch that the window has no room for counts by the part that
//! it has room for. Both are what the tier does, and they leave no steps on which a search that
//! moves few slots at a time would stop.
//!
//! By this model splitting is for layers whose ranks say little. Where what is activated falls with
//! rank, K·H(C)·V ÷ C is greatest for the smallest C, that is for whole experts, and prefetches
//! seldom make up for it. What a split does beyond that, to have each layer miss about as much
//! instead of one much and another nothing, an expectation does not see.

use super::curves::Curves;

/// A layer as the sub-problem sees it.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub curves: Curves,
    /// Granules of one expert.
    pub n_granules: usize,
    /// K
    pub k: usize,
}

impl Layer {
    /// m: the number of activated experts, in parts, that are loaded when the window ends. `keep`
    /// leading granules of each expert stay in `n_slots`. `window` is measured in loads of one
    /// whole expert.
    pub fn loaded(&self, n_slots: usize, keep: usize, window: f64) -> f64 {
        let (n, k) = (self.curves.n_experts(), self.k as f64);
        let part = |granules: usize| granules as f64 / self.n_granules as f64;
        let size = (n_slots / keep).min(n);
        let (theta, next) = (part(keep), (size + 1).min(n));
        let theta_next = part(n_slots - size * keep);
        // What is resident, where there are as many hits with C and with C + 1 experts cached.
        let resident = |hit: f64, hit_next: f64| theta * hit + theta_next * (hit_next - hit);

        // A_cache
        let mut loaded = k * resident(self.curves.hit(size), self.curves.hit(next));
        let mut room = window;
        let hits = self.curves.predicted_hit(size).iter().zip(self.curves.predicted_hit(next));
        for (accuracy, (hit, hit_next)) in self.curves.accuracy().iter().zip(hits) {
            // T_pref (Eq. 9) ÷ T_load, and A_pref (Eq. 10)
            let missing = 1.0 - resident(*hit, *hit_next);
            if missing > room {
                loaded += room * accuracy;
                break;
            }
            loaded += missing * accuracy;
            room -= missing;
        }
        loaded.min(k)
    }

    /// The `keep` that has most loaded, and how much that is; of equals the largest top segment,
    /// which the fewest loads complete.
    pub fn split(&self, n_slots: usize, window: f64) -> (usize, f64) {
        let mut best = (self.n_granules, self.loaded(n_slots, self.n_granules, window));
        for keep in (1..self.n_granules).rev() {
            let loaded = self.loaded(n_slots, keep, window);
            if loaded > best.1 {
                best = (keep, loaded);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::papers::moepic::stats::LayerCounts;
    use proptest::prelude::*;

    /// Counts as tokens make them, each with K activations and a whole prediction.
    fn layer() -> impl Strategy<Value = Layer> {
        let token = (any::<u64>(), any::<u64>());
        (1usize..10, 1usize..4, 1usize..5, prop::collection::vec(token, 0..40)).prop_map(
            |(n, k, n_granules, tokens)| {
                let k = k.min(n);
                let mut counts = LayerCounts::new(n, k);
                for (a, b) in tokens {
                    counts.tokens += 1;
                    for i in 0..k {
                        counts.activations[(a as usize + i) % n] += 1;
                    }
                    for y in 0..counts.depth() {
                        counts.correct[y] += u32::from(a >> 8 >> y & 1 == 0);
                        counts.predictions[y * n + (b as usize + y * y) % n] += 1;
                    }
                }
                Layer { curves: Curves::new(&counts), n_granules, k }
            },
        )
    }

    /// Rank by rank, granule by granule: what each expert has resident, and what the prefetches add
    /// to it in the order in which the link does them.
    fn brute_force(layer: &Layer, n_slots: usize, keep: usize, window: f64) -> f64 {
        let n = layer.curves.n_experts();
        // Slots go to experts by rank, at most `keep` each.
        let mut left = n_slots;
        let thetas: Vec<f64> = (0..n)
            .map(|_| {
                let granules = left.min(keep);
                left -= granules;
                granules as f64 / layer.n_granules as f64
            })
            .collect();
        let at_rank = |hits: &dyn Fn(usize) -> f64, rank: usize| hits(rank + 1) - hits(rank);
        let resident = |hits: &dyn Fn(usize) -> f64| -> f64 {
            (0..n).map(|rank| thetas[rank] * at_rank(hits, rank)).sum()
        };
        let mut loaded = layer.k as f64 * resident(&|size| layer.curves.hit(size));
        let mut busy = 0.0;
        for y in 0..layer.curves.accuracy().len() {
            let missing = 1.0 - resident(&|size| layer.curves.predicted_hit(size)[y]);
            let done = (window - busy).clamp(0.0, missing);
            loaded += done * layer.curves.accuracy()[y];
            busy += missing;
        }
        loaded.min(layer.k as f64)
    }

    proptest! {
        #[test]
        fn loaded_is_what_each_rank_has(
            layer in layer(), slots in 0usize..60, window in 0.0..8.0,
        ) {
            let mut best = f64::NEG_INFINITY;
            for keep in 1..=layer.n_granules {
                let expected = brute_force(&layer, slots, keep, window);
                let got = layer.loaded(slots, keep, window);
                prop_assert!((got - expected).abs() < 1e-9, "{keep}: {got} {expected}");
                best = best.max(expected);
            }
            let (keep, loaded) = layer.split(slots, window);
            prop_assert!((loaded - best).abs() < 1e-9, "{keep}: {loaded} {best}");
            prop_assert_eq!(layer.loaded(slots, keep, window), loaded);
        }

        /// If C experts are cached to the granule and prefetches end with the window, m equals the
        /// paper's.
        #[test]
        fn whole_numbers_give_equation_11(layer in layer(), size in 0usize..10, done in 0usize..6) {
            let size = size.min(layer.curves.n_experts());
            for keep in 1..=layer.n_granules {
                let theta = keep as f64 / layer.n_granules as f64;
                let cost = |y: usize| 1.0 - layer.curves.predicted_hit(size)[y] * theta;
                let done = done.min(layer.curves.accuracy().len());
                let window: f64 = (0..done).map(cost).sum();
                let prefetched: f64 =
                    (0..done).map(|y| cost(y) * layer.curves.accuracy()[y]).sum();
                let k = layer.k as f64;
                let m = (k * layer.curves.hit(size) * theta + prefetched).min(k);
                let got = layer.loaded(size * keep, keep, window);
                prop_assert!((got - m).abs() < 1e-9, "{got} {m}");
            }
        }

        #[test]
        fn more_is_never_less(layer in layer(), slots in 0usize..60, window in 0.0..8.0) {
            let (_, loaded) = layer.split(slots, window);
            prop_assert!((0.0..=layer.k as f64).contains(&loaded));
            prop_assert!(layer.split(slots, window + 0.5).1 >= loaded - 1e-12);
        }
    }

    /// All that is ever used is there: nothing is left to load, whatever the window.
    #[test]
    fn a_layer_that_fits_is_loaded() {
        let mut counts = LayerCounts::new(6, 2);
        counts.tokens = 10;
        counts.activations = vec![8, 5, 3, 2, 1, 1];
        let layer = Layer { curves: Curves::new(&counts), n_granules: 4, k: 2 };
        assert_eq!(layer.split(24, 0.0), (4, 2.0));
        assert_eq!(layer.split(1000, 0.0), (4, 2.0));
        assert_eq!(layer.split(0, 3.0), (4, 0.0));
    }
}
