//! Layers' shares of the slots: experts that are kept in part.

use super::{GRANULES, PIECE_BYTES, World, decode, plan};

#[test]
fn a_split_expert_keeps_its_top_and_brings_its_bottom() {
    let mut world = World::new(plan([12, 8], GRANULES), true, "predictor=none,eviction=lru", 1);
    world.share(&[(8, 2), (5, 1), (1, 1)]);
    for expert in 0..5 {
        decode(&mut world, 1, &[expert]);
    }
    // Eight slots hold four tops; transit has room for three bottoms.
    let resident = |world: &World| (0..5).map(|e| world.resident(1, e)).collect::<Vec<_>>();
    assert_eq!(resident(&world), [0, 2, 3, 3, 3]);
    let before = world.state.counters();
    decode(&mut world, 1, &[1]);
    let since = world.state.counters().since(&before);
    assert_eq!((since.hits_partial, since.misses), (1, 0));
    // One granule of two reads, and two reads of rows.
    assert_eq!(since.demand_bytes, 4 * PIECE_BYTES as u64);
    // Another layer fills its own share and takes nothing of this one's.
    for expert in 0..6 {
        decode(&mut world, 3, &[expert]);
    }
    assert!((1..5).all(|e| world.resident(1, e) >= 2));
    // The last use, one granule of it for good.
    assert_eq!((0..6).map(|e| world.resident(3, e)).sum::<usize>(), 3);
}

#[test]
fn smaller_shares_take_effect_when_room_is_needed() {
    let mut world = World::new(plan([15, 8], GRANULES), true, "predictor=none,eviction=lru", 1);
    for expert in 0..4 {
        decode(&mut world, 1, &[expert]);
    }
    world.share(&[(4, 1), (8, 2), (8, 2)]);
    assert_eq!((0..4).map(|e| world.resident(1, e)).sum::<usize>(), 12);
    for expert in 0..4 {
        decode(&mut world, 3, &[expert]);
    }
    // The bottoms of the first layer's experts went, and none of their tops.
    assert_eq!((0..4).map(|e| world.resident(1, e)).collect::<Vec<_>>(), [1, 1, 1, 1]);
}
