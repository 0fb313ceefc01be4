//! Whole experts, one step after the other, need no state machine to tell who is there: the tier
//! against a list.

use proptest::prelude::*;

use super::made_up::*;
use crate::policy::{Belady, Policy, Shape};
use crate::trace::*;

proptest! {
    /// Whole experts by themselves: the tier's working set under LRU is a list.
    #[test]
    fn on_demand_is_an_lru_list_of_experts(seed: u64, share in 0.45f64..1.0) {
        let routing = routing(seed, 2, 0, 30);
        let options = SimOptions {
            geometry: GEOMETRY.with_granules(1),
            ..options("on-demand", share)
        };
        let class = Tiers::of(&routing, &options).unwrap().plan.classes[0];
        let report = simulate(&routing, &options).unwrap();
        let (hits, misses) = lru_list(&routing, class.n_slots - class.n_transit);
        prop_assert_eq!((report.counters.hits_whole, report.counters.misses), (hits, misses));
    }

    /// No eviction misses less than Belady's, and it misses what a search of the future says.
    #[test]
    fn nobody_beats_belady(seed: u64, share in 0.45f64..1.0) {
        let routing = routing(seed, 2, 0, 25);
        let whole = |policy| SimOptions {
            geometry: GEOMETRY.with_granules(1),
            ..options(policy, share)
        };
        let tiers = Tiers::of(&routing, &whole("on-demand")).unwrap();
        let build = |shape: &Shape| Policy {
            eviction: Box::new(Belady::new(shape, future(&routing))),
            predictor: None,
            splitter: None,
            notes: Vec::new(),
        };
        let class = tiers.plan.classes[0];
        let best = simulate_policy(&routing, &whole("on-demand"), tiers, build).unwrap();
        let misses = best.counters.misses;
        prop_assert_eq!(misses, belady_misses(&routing, class.n_slots - class.n_transit));
        for policy in ["on-demand", "predictor=none,eviction=lfu", "predictor=none,eviction=lcp"] {
            let report = simulate(&routing, &whole(policy)).unwrap();
            prop_assert!(misses <= report.counters.misses, "{}", policy);
        }
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

/// Misses of decode steps with room for `room` experts, of which the one used last goes.
fn belady_misses(routing: &Recorded, room: usize) -> u64 {
    let layer_of = |l: usize, token: &Token| (l, token.layers[l].chosen.clone());
    let steps = routing.tokens.iter();
    let steps = steps.flat_map(|t| (0..N_EXPERTS.len()).map(move |l| layer_of(l, t)));
    let steps: Vec<_> = steps.filter(|step| !step.1.is_empty()).collect();
    let mut there: Vec<(usize, u32)> = Vec::new();
    let mut misses = 0;
    for (now, (l, chosen)) in steps.iter().enumerate() {
        let needed: Vec<_> = chosen.iter().map(|e| (*l, *e)).collect();
        for &id in needed.iter().filter(|id| !there.contains(id)).collect::<Vec<_>>() {
            misses += 1;
            if there.len() == room {
                let next = |id: &(usize, u32)| {
                    let uses = |step: &(usize, Vec<u32>)| step.0 == id.0 && step.1.contains(&id.1);
                    steps[now..].iter().position(uses).unwrap_or(usize::MAX)
                };
                let loose = (0..there.len()).filter(|at| !needed.contains(&there[*at]));
                let victim = loose.max_by_key(|at| next(&there[*at])).unwrap();
                there.remove(victim);
            }
            there.push(id);
        }
    }
    misses
}
