//! Hit rate by cache size of any eviction order, all sizes in one pass: the figures of MoEpic's
//! Table 1. The cache is taken to hold the experts of highest priority of each layer at any time.
//! Under LRU it does, as what it loads is the first of the order. Under LFU and LCP what is loaded
//! may stand below what has left for it, and the hit rate of a cache differs a little from this.

use super::{Event, Eviction, Expert, Routed, Shape};

pub struct HitCurve {
    eviction: Box<dyn Eviction>,
    /// By layer, activations of experts by how many of the layer stood before them.
    ranks: Vec<Vec<u64>>,
    /// Of a layer's experts, before the present token.
    priorities: Vec<f64>,
}

impl HitCurve {
    pub fn new(shape: &Shape, eviction: Box<dyn Eviction>) -> HitCurve {
        let ranks = shape.n_experts.iter().map(|n| vec![0; *n]).collect();
        HitCurve { eviction, ranks, priorities: Vec::new() }
    }

    /// Decode steps are counted; the eviction is told of everything.
    pub fn observe(&mut self, event: &Event<'_>) {
        if let Event::Routed(Routed { layer, chosen, .. }) = *event {
            let ranks = &mut self.ranks[layer as usize];
            let everyone = 0..ranks.len() as u32;
            let priority = |expert| self.eviction.priority(Expert { layer, expert });
            self.priorities.clear();
            self.priorities.extend(everyone.map(priority));
            for &expert in chosen {
                ranks[rank(&self.priorities, expert as usize)] += 1;
            }
        }
        self.eviction.observe(event);
    }

    /// How much of what a layer activated a cache of `size` of its experts had; 0 if nothing was.
    pub fn layer_hit_rate(&self, layer: usize, size: usize) -> f64 {
        hit_rate(std::slice::from_ref(&self.ranks[layer]), size)
    }

    /// The same of all layers together, each with a cache of `size` experts.
    pub fn hit_rate(&self, size: usize) -> f64 {
        hit_rate(&self.ranks, size)
    }
}

/// How many go later than an expert does, of equals those of lower id.
fn rank(priorities: &[f64], of: usize) -> usize {
    let own = priorities[of];
    let above = priorities[..of].iter().filter(|priority| **priority >= own).count();
    above + priorities[of + 1..].iter().filter(|priority| **priority > own).count()
}

fn hit_rate(layers: &[Vec<u64>], size: usize) -> f64 {
    let hits: u64 = layers.iter().flat_map(|ranks| ranks.iter().take(size)).sum();
    let activations: u64 = layers.iter().flatten().sum();
    hits as f64 / activations.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Lcp, Lfu, Lru, Random};
    use proptest::prelude::*;

    const N: usize = 7;

    fn routed(layer: u32, chosen: &[u32]) -> Event<'_> {
        let (probs, hidden, ahead) = (&[][..], &[][..], None);
        Event::Routed(Routed { request: 0, layer, chosen, probs, hidden, ahead })
    }

    fn shape() -> Shape {
        Shape::of_model(vec![0, N, N], 1)
    }

    proptest! {
        /// Caches of each size that load what they miss and drop what was used longest ago.
        #[test]
        fn of_lru_it_is_what_caches_do(
            tokens in prop::collection::vec((1u32..3, 0..N as u32), 1..200),
        ) {
            let mut curve = HitCurve::new(&shape(), Box::new(Lru::new(&shape())));
            tokens.iter().for_each(|(layer, expert)| curve.observe(&routed(*layer, &[*expert])));
            for size in 0..=N {
                let (mut hits, mut all) = ([0; 3], [0; 3]);
                // Experts that were never used are there at first, as they are for the curve.
                let mut caches = [(); 3].map(|_| (0..size as u32).collect::<Vec<_>>());
                for (layer, expert) in &tokens {
                    let (layer, cache) = (*layer as usize, &mut caches[*layer as usize]);
                    all[layer] += 1;
                    hits[layer] += usize::from(cache.contains(expert));
                    cache.retain(|e| e != expert);
                    cache.insert(0, *expert);
                    cache.truncate(size);
                }
                for layer in 1..3 {
                    let expected = hits[layer] as f64 / all[layer].max(1) as f64;
                    prop_assert_eq!(curve.layer_hit_rate(layer, size), expected);
                }
                let expected = hits.iter().sum::<usize>() as f64 / tokens.len() as f64;
                prop_assert_eq!(curve.hit_rate(size), expected);
            }
        }

        /// The definition, with the order sorted anew for each token.
        #[test]
        fn of_any_order_it_is_how_often_the_top_is_used(
            tokens in prop::collection::vec((1u32..3, 0..N as u32), 0..100),
            which in 0usize..4,
        ) {
            let eviction = || -> Box<dyn Eviction> {
                match which {
                    0 => Box::new(Lru::new(&shape())),
                    1 => Box::new(Lfu::new(&shape())),
                    2 => Box::new(Lcp::new(&shape())),
                    _ => Box::new(Random::new(1)),
                }
            };
            let (mut curve, mut order) = (HitCurve::new(&shape(), eviction()), eviction());
            let mut hits = [0; N + 1];
            for (layer, first) in &tokens {
                let chosen = [*first, (*first + 1) % N as u32];
                let mut top: Vec<u32> = (0..N as u32).collect();
                let priority = |expert: u32| order.priority(Expert { layer: *layer, expert });
                top.sort_by(|a, b| priority(*b).partial_cmp(&priority(*a)).unwrap());
                for (size, hits) in hits.iter_mut().enumerate() {
                    *hits += top[..size].iter().filter(|e| chosen.contains(e)).count();
                }
                curve.observe(&routed(*layer, &chosen));
                order.observe(&routed(*layer, &chosen));
            }
            for (size, hits) in hits.iter().enumerate() {
                let expected = *hits as f64 / (2 * tokens.len()).max(1) as f64;
                prop_assert_eq!(curve.hit_rate(size), expected);
            }
        }
    }

    #[test]
    fn dense_layers_and_none_are_no_hits() {
        let curve = HitCurve::new(&shape(), Box::new(Lcp::new(&shape())));
        assert_eq!((curve.hit_rate(N), curve.layer_hit_rate(0, N)), (0.0, 0.0));
    }
}
