//! Redundancy (§4.4).

use super::*;

proptest! {
    #[test]
    fn the_most_redundant_goes(
        seeds in prop::collection::vec(0u64..400, 1..30),
        distance in 1usize..5,
        capacity in 1usize..6,
    ) {
        let shape = shape();
        let mut store = MapStore::new(&shape, capacity, distance);
        let mut plain: Vec<Iteration> = Vec::new();
        let share = distance.min(3) as f64 / 3.0;
        for seed in seeds {
            let new = iteration(&shape, seed, 2.0);
            let at = insert(&mut store, &shape, &new);
            if plain.len() < capacity {
                prop_assert_eq!(at, plain.len());
                plain.push(new);
            } else {
                let rdy = |old: &Iteration| {
                    share * semantic_similarity(&new, old)
                        + (1.0 - share) * trajectory_similarity(&new, old, 3)
                };
                let max = plain.iter().map(rdy).fold(f64::MIN, f64::max);
                prop_assert!(rdy(&plain[at]) > max - 0.02, "{} {}", rdy(&plain[at]), max);
                plain[at] = new;
            }
            prop_assert_eq!(store.len(), plain.len());
            for (index, old) in plain.iter().enumerate() {
                let back = stored(&store, &shape, index);
                prop_assert!(trajectory_similarity(&back, old, 3) > 0.999);
            }
        }
    }
}
