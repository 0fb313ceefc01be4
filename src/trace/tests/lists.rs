//! Whole experts, one step after the other, need no state machine to tell who is there: the tier
//! against a list.

use proptest::prelude::*;

use super::made_up::*;
use crate::trace::*;

proptest! {
    /// Whole experts by themselves: the tier under LRU is a list, as what leaves the working set
    /// goes to transit.
    #[test]
    fn on_demand_is_an_lru_list_of_experts(seed: u64, share in 0.45f64..1.0) {
        let routing = routing(seed, 2, 0, 30);
        let options = SimOptions {
            geometry: GEOMETRY.with_granules(1),
            ..options("on-demand", share)
        };
        let class = Tiers::of(&routing, &options).unwrap().plan.classes[0];
        let report = simulate(&routing, &options).unwrap();
        let (hits, misses) = lru_list(&routing, class.n_slots);
        prop_assert_eq!((report.counters.hits_whole, report.counters.misses), (hits, misses));
    }
}

/// Hits and misses of decode steps with room for `room` experts.
fn lru_list(routing: &Recorded, room: usize) -> (u64, u64) {
    let mut list: Vec<(usize, u32)> = Vec::new();
    let (mut hits, mut misses) = (0, 0);
    for token in &routing.tokens {
        for (l, layer) in token.layers.iter().enumerate() {
            for &e in layer.chosen.iter() {
                if list.contains(&(l, e)) {
                    hits += 1;
                } else {
                    misses += 1;
                }
            }
            // Those of the same token are pinned; the best counts as used last.
            list.retain(|(of, e)| *of != l || !layer.chosen.contains(e));
            list.extend(layer.chosen.iter().rev().map(|e| (l, *e)));
            list.drain(..list.len().saturating_sub(room));
        }
    }
    (hits, misses)
}
