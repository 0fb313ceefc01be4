//! Layers that are pinned for a device, and their slot tables.

use super::*;

#[test]
fn what_is_pinned_stays_and_leaves_room_for_demand() {
    let mut world = full();
    world.predict(&[predicted(1, 0, 0.5), predicted(1, 1, 0.9)]);
    world.load_all();
    // Of the two in transit the more urgent one: the other's room is for demand.
    world.pin_layer(3);
    world.pin_layer(1);
    let experts = |world: &World, layer| {
        world.pinned_layers[&layer].iter().map(|handed| handed.expert).collect::<Vec<_>>()
    };
    assert_eq!(experts(&world, 3), [0, 0, 0, 1, 1, 1, 2, 2, 2]);
    assert_eq!(experts(&world, 1), [1, 1, 1]);
    // All of the working set is pinned, and yet as many experts as there are can be had.
    let before = world.state.counters();
    decode(&mut world, 3, &[3, 4]);
    decode(&mut world, 1, &[2, 3, 4, 5]);
    world.unpin_layer(3, &[1, 3, 5]);
    let since = world.state.counters().since(&before);
    // A pinned one is a hit when its layer is unpinned; what was acquired is counted already.
    assert_eq!((since.hits_whole, since.misses), (1, 2 + 4 + 1));
    let step = world.state.step();
    world.unpin_layer(1, &[1]);
    assert_eq!(world.state.step(), step, "the layer's step was its demand");
    // What was used in transit has joined the working set.
    let used = world.state.entries().iter().find(|e| e.id == Expert { layer: 1, expert: 1 });
    assert_eq!(used.unwrap().working, GRANULES);
    assert!(world.state.is_idle());
}

#[test]
fn a_layer_of_which_nothing_has_changed_is_pinned_without_a_look_at_its_experts() {
    let mut world = full();
    // Layer 3 has settled: the first time names all that came, the next none.
    for n_rows in [3, 0, 0] {
        assert_eq!(world.pin_layer(3), n_rows);
        world.unpin_layer(3, &[0, 1]);
    }
    // An expert comes in the place of another, which stays in transit: whether that may be pinned
    // is decided each time.
    decode(&mut world, 3, &[4]);
    for n_rows in [2, 1, 1] {
        assert_eq!(world.pin_layer(3), n_rows);
        world.unpin_layer(3, &[4]);
    }
}
