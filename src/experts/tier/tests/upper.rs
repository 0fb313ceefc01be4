//! Two tiers that know of each other.

use super::{GRANULES, World, decode, full, plan, predicted, small};
use crate::policy::Expert;

impl World {
    /// The tier above has an expert, or has it no more.
    pub fn set_upper(&mut self, layer: u32, expert: u32, is_whole: bool) {
        self.state.upper_residency().set_whole(Expert { layer, expert }, is_whole);
    }
}

#[test]
fn of_what_the_tier_above_has_too_the_hottest_leaves_first() {
    // Four experts of three granules, a transit of one; a third of fifteen slots is five.
    let plan = plan([15, 8], GRANULES);
    let mut world = World::new(plan, false, "predictor=none,eviction=lru", 1);
    let held = |world: &World| -> Vec<u32> {
        let entries = world.state.entries().iter().filter(|e| e.id.layer == 1);
        entries.filter(|e| e.working == GRANULES).map(|e| e.id.expert).collect()
    };
    for expert in 0..4 {
        decode(&mut world, 1, &[expert]);
    }
    // One copy is kept: the coldest expert leaves, whoever else has it.
    world.set_upper(1, 2, true);
    decode(&mut world, 1, &[4]);
    assert_eq!(held(&world), [1, 2, 3, 4]);
    // Two are too many, and the one that was used last leaves.
    world.set_upper(1, 3, true);
    decode(&mut world, 1, &[0]);
    assert_eq!(held(&world), [0, 1, 2, 4]);
    // What that tier has no more is as good as any other.
    world.set_upper(1, 0, true);
    world.set_upper(1, 2, false);
    decode(&mut world, 1, &[3]);
    assert_eq!(held(&world), [0, 2, 3, 4]);
}

#[test]
fn what_the_tier_above_has_is_not_prefetched_here() {
    let mut world = full();
    world.set_upper(1, 0, true);
    world.predict(&[predicted(1, 0, 0.9), predicted(1, 1, 0.5)]);
    world.load_all();
    assert_eq!((world.resident(1, 0), world.resident(1, 1)), (0, 3));
}

#[test]
fn nothing_is_left_to_predict_where_the_tier_above_has_all() {
    let mut world = full();
    let experts: Vec<Expert> = world.state.entries().iter().map(|entry| entry.id).collect();
    for Expert { layer, expert } in &experts {
        assert!(!world.state.has_everything());
        // Once more changes nothing.
        (0..2).for_each(|_| world.set_upper(*layer, *expert, true));
    }
    assert!(world.state.has_everything());
    world.set_upper(experts[0].layer, experts[0].expert, false);
    assert!(!world.state.has_everything());
}

#[test]
fn a_tier_that_ends_has_nothing_that_the_one_below_may_leave_to_it() {
    let mut world = small();
    decode(&mut world, 1, &[5]);
    let (told, id) = (world.told.clone(), Expert { layer: 1, expert: 5 });
    assert!(told.has(id));
    drop(world);
    assert!(!told.has(id));
}
