//! Exposed loading latency of a token, by MoEpic's model of a decode step (Eqs. 5 to 7 and
//! `ExpertSplit` of Algorithm 1). A layer's prefetch window is the time in which the layer before
//! it computes and loads nothing, plus the attention. The window gives the layer's exposed latency
//! and the next window.
//!
//! As the paper has it, α + βθ is taken to be m, and β(1 − θ) + γ to be K − m.

use super::curves::Curves;
use super::split::Layer;
use super::stats::Stats;
use crate::policy::{Costs, LayerShare, Shape};

#[derive(Clone, Debug)]
pub(super) struct Exposure {
    /// None where a layer is dense.
    layers: Vec<Option<Layer>>,
    k: f64,
    costs: Costs,
}

impl Exposure {
    pub fn new(shape: &Shape, stats: &Stats, costs: &Costs) -> Exposure {
        let layer = |l: usize| {
            let (n_granules, k) = (shape.n_granules[l], shape.k.min(shape.n_experts[l]));
            let layer = || Layer { curves: Curves::new(&stats.layers[l]), n_granules, k };
            (shape.n_experts[l] > 0).then(layer)
        };
        let layers = (0..shape.n_layers()).map(layer).collect();
        Exposure { layers, k: shape.k as f64, costs: *costs }
    }

    /// ns that each layer waits for if it has so many slots and splits its experts as is best.
    /// Also says how it splits them: `keep` of dense layers is left alone.
    pub fn expert_split(&self, n_slots: &[usize], keep: &mut [usize]) -> Vec<f64> {
        self.walk(|l, layer, window| {
            let (best, loaded) = layer.split(n_slots[l], window);
            keep[l] = best;
            loaded
        })
    }

    /// ns that each layer waits for with these shares.
    pub fn of_shares(&self, shares: &[LayerShare]) -> Vec<f64> {
        self.walk(|l, layer, window| {
            let LayerShare { n_slots, keep } = shares[l];
            layer.loaded(n_slots, keep, window)
        })
    }

    /// `loaded` answers m for a layer and its window in loads.
    fn walk(&self, mut loaded: impl FnMut(usize, &Layer, f64) -> f64) -> Vec<f64> {
        let Costs { attention_ns, experts_ns, head_ns, load_ns } = self.costs;
        // The previous token's head
        let mut window_ns = head_ns;
        let layers = self.layers.iter().enumerate();
        let exposed = layers.map(|(l, layer)| {
            // A dense layer's feed-forward network is part of its `attention_ns`.
            window_ns += attention_ns;
            let Some(layer) = layer else { return 0.0 };
            let m = loaded(l, layer, window_ns / load_ns);
            // Eq. 5 and what stands above Eq. 6
            let hide_ns = m * experts_ns / self.k;
            let miss_ns = (layer.k as f64 - m) * load_ns;
            // Eq. 7
            window_ns = experts_ns - hide_ns.min(miss_ns);
            // Eq. 6
            (miss_ns - hide_ns).max(0.0)
        });
        exposed.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worked by hand: a dense layer, then two with experts, of 4 granules.
    #[test]
    fn windows_go_from_layer_to_layer() {
        let shape = Shape {
            n_experts: vec![0, 4, 4],
            k: 2,
            n_granules: vec![0, 4, 4],
            class: vec![0; 3],
            n_slots: vec![12],
        };
        let mut stats = Stats::new(&shape);
        for layer in &mut stats.layers[1..] {
            layer.tokens = 10;
            // H = 0.5, 0.8, 0.9, 1
            layer.activations.copy_from_slice(&[10, 6, 2, 2]);
            // P = 0.9, 0.6, …; PH(1, 1) = 0.5, PH(2, 1) = 0
            layer.correct.copy_from_slice(&[9, 6, 3, 2]);
            layer.predictions[..4].copy_from_slice(&[5, 5, 0, 0]);
            layer.predictions[4..8].copy_from_slice(&[0, 5, 5, 0]);
        }
        let costs = Costs { attention_ns: 20.0, experts_ns: 80.0, head_ns: 10.0, load_ns: 100.0 };
        let exposure = Exposure::new(&shape, &stats, &costs);
        let share = LayerShare { n_slots: 4, keep: 4 };
        let shares = [LayerShare::default(), share, share];

        // Layer 1. Window 10 + 20 + 20 = 50, half a load: all that the first prefetch misses.
        let m = 2.0 * 0.5 + 0.5 * 0.9;
        let (hide, miss) = (m * 40.0, (2.0 - m) * 100.0);
        let first = miss - hide;
        assert!(first < 0.0, "experts are computed for longer than others are loaded");
        // Layer 2. Window 80 − 55 + 20 = 45: less than it.
        assert!((80.0 - miss + 20.0 - 45.0f64).abs() < 1e-9);
        let m = 2.0 * 0.5 + 0.45 * 0.9;
        let second = (2.0 - m) * 100.0 - m * 40.0;
        assert!(second > 0.0);

        let exposed = exposure.of_shares(&shares);
        assert_eq!(exposed[..2], [0.0, 0.0]);
        assert!((exposed[2] - second).abs() < 1e-9, "{exposed:?} {second}");
    }
}
