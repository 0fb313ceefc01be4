//! Room in transit that no prompt and no prefetch needs, and those that do.

use super::*;

/// Layers 1 and 3 have room for three working experts and two in transit; layer 3's first three
/// have been used.
fn world(policy: &str) -> World {
    let plan = plan([15, 8], 2 * GRANULES);
    let mut world = World::new(plan, true, &format!("predictor=none,eviction={policy}"), 1);
    (0..3).for_each(|expert| decode(&mut world, 3, &[expert]));
    world
}

/// The experts of layers 1 and 3 that are there, whole.
fn resident(world: &World) -> [Vec<u32>; 2] {
    [1, 3].map(|layer| (0..6).filter(|e| world.resident(layer, *e) == GRANULES).collect())
}

#[test]
fn what_leaves_the_working_set_stays_while_nothing_wants_its_room() {
    let mut world = world("lru");
    decode(&mut world, 1, &[0]);
    decode(&mut world, 1, &[1]);
    assert_eq!(resident(&world), [vec![0, 1], vec![0, 1, 2]]);
    // The least lately used of all leaves at last.
    decode(&mut world, 1, &[2]);
    assert_eq!(resident(&world), [vec![0, 1, 2], vec![1, 2]]);
    // One that is used again changes places with the least of the working set, without a read.
    let before = reads(&world);
    decode(&mut world, 3, &[1]);
    assert_eq!(reads(&world), before);
    assert_eq!(resident(&world), [vec![0, 1, 2], vec![1, 2]]);
    assert_eq!(world.state.held(Role::Working), 3 * GRANULES);
    world.state.check_integrity();
}

#[test]
fn a_prefetch_has_the_room_of_what_left_the_working_set() {
    let mut world = world("lru");
    decode(&mut world, 1, &[0, 1]);
    world.predict(&[predicted(1, 4, 0.1)]);
    world.load_all();
    assert_eq!(resident(&world), [vec![0, 1, 4], vec![1, 2]]);
}

/// The eviction is told of probabilities: then a prediction of an improbable expert takes nothing.
#[test]
fn a_prefetch_does_not_take_the_room_of_what_is_worth_more() {
    let mut world = world("scan-resistant");
    decode(&mut world, 1, &[0, 1]);
    let expect = |world: &mut World, layer, p: [f32; 6]| {
        world.state.observe(&Event::Expected { layer, used: &p, later: &[] });
    };
    expect(&mut world, 3, [0.5; 6]);
    expect(&mut world, 1, [0.5, 0.5, 0.1, 0.9, 0.0, 0.0]);
    world.predict(&[predicted(1, 2, 1.0)]);
    world.load_all();
    assert_eq!(world.resident(1, 2), 0);
    world.predict(&[predicted(1, 3, 1.0)]);
    world.load_all();
    assert_eq!(world.resident(1, 3), 3);
}

#[test]
fn a_prompt_has_all_of_transit() {
    let mut world = world("lru");
    decode(&mut world, 1, &[0, 1]);
    let before = world.working();
    world.acquire(0, 1, &[2, 3, 4, 5], Access::Prompt);
    assert_eq!(world.drain(0), None);
    world.release(0);
    assert_eq!((world.working(), world.state.held(Role::Transit)), (before, 0));
}

/// Roles are exchanged within the layer: nothing is read for it. LRU, which does not hear what is
/// expected, keeps what decode has used.
#[test]
fn what_a_prompt_brought_stays_in_the_place_of_what_is_worth_less() {
    let after = |policy: &str| {
        let mut world = world(policy);
        decode(&mut world, 1, &[0, 1]);
        let used = [0.2, 0.3, 0.1, 0.9, 0.0, 0.1];
        world.state.observe(&Event::Expected { layer: 1, used: &used, later: &[] });
        world.acquire(0, 1, &[2, 3, 4, 5], Access::Prompt);
        assert_eq!(world.drain(0), None);
        world.release(0);
        world.state.check_integrity();
        let entries = world.state.entries().iter();
        let kept = entries.filter(|entry| entry.id.layer == 1 && entry.working > 0);
        let kept: Vec<u32> = kept.map(|entry| entry.id.expert).collect();
        (kept, world.state.held(Role::Working), reads(&world))
    };
    let (kept, held, n_reads) = after("scan-resistant");
    assert_eq!((kept, held, n_reads), (vec![1, 3], 3 * GRANULES, n_reads));
    assert_eq!(after("lru"), (vec![0, 1], held, n_reads));
}
