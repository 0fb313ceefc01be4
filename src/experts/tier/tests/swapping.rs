//! An idle link brings what is expected in the place of what is worth less.

use super::*;

/// Working room for three experts of layers 1 and 3, and two in transit. All of it is taken by
/// layer 3's first five, each used once.
fn world(policy: &str) -> World {
    let plan = plan([15, 6], 2 * GRANULES);
    let mut world = World::new(plan, true, &format!("predictor=none,eviction={policy}"), 1);
    (0..5).for_each(|expert| decode(&mut world, 3, &[expert]));
    world.state.fill_free_room();
    world.swap_when_idle();
    world.load_all();
    world
}

/// Layer 3 is reached again, by an expert that is there, and its next coming is expected.
fn expect(world: &mut World, used: [f32; 6]) {
    decode(world, 3, &[4]);
    world.state.observe(&Event::Expected { layer: 3, used: &used, later: &[] });
}

fn in_transit(world: &World) -> Vec<u32> {
    let entries = world.state.entries().iter().filter(|e| e.in_transit() > 0);
    entries.map(|e| e.id.expert).collect()
}

fn resident(world: &World) -> Vec<u32> {
    (0..6).filter(|expert| world.resident(3, *expert) == GRANULES).collect()
}

#[test]
fn what_is_expected_comes_in_the_place_of_the_least() {
    let mut world = world("scan-resistant");
    assert_eq!(resident(&world), [0, 1, 2, 3, 4]);
    let before = world.working();
    // The least of those in transit.
    let [least, other] = in_transit(&world)[..] else { panic!("two in transit") };
    let mut used = [0.5; 6];
    (used[least as usize], used[other as usize], used[5]) = (0.0, 0.1, 0.9);
    expect(&mut world, used);
    world.load_all();
    let left: Vec<u32> = (0..6).filter(|expert| *expert != least).collect();
    assert_eq!(resident(&world), left);
    assert!(before.is_subset(&world.working()));
    // And it is found.
    let before = reads(&world);
    decode(&mut world, 3, &[5]);
    assert_eq!(reads(&world), before);
}

/// If transit has nothing that is worth little, the least of the working set leaves.
#[test]
fn what_is_worth_little_leaves_the_working_set() {
    let mut world = world("scan-resistant");
    let kept = in_transit(&world);
    let mut used = [0.0; 6];
    kept.iter().for_each(|expert| used[*expert as usize] = 0.9);
    (used[4], used[5]) = (0.9, 0.9);
    expect(&mut world, used);
    world.load_all();
    let resident = resident(&world);
    assert!(resident.contains(&4) && resident.contains(&5), "{resident:?}");
    assert!(kept.iter().all(|expert| resident.contains(expert)), "{kept:?} {resident:?}");
    assert_eq!(resident.len(), 5);
}

#[test]
fn nothing_comes_that_is_worth_hardly_more() {
    let mut world = world("scan-resistant");
    expect(&mut world, [0.5, 0.5, 0.5, 0.5, 0.5, 0.55]);
    let before = reads(&world);
    world.load_all();
    assert_eq!((reads(&world), resident(&world)), (before, vec![0, 1, 2, 3, 4]));
    assert!(world.state.is_idle());
}

/// A link whose idle time is not free brings experts that are worth their load, and no others.
#[test]
fn what_is_not_worth_its_load_stays_away() {
    for (price, comes) in [(0.5, true), (0.95, false)] {
        let mut world = world("scan-resistant");
        world.state.set_prefetch_price(price);
        expect(&mut world, [0.0, 0.0, 0.0, 0.0, 0.0, 0.9]);
        let before = reads(&world);
        world.load_all();
        assert_eq!(reads(&world) > before, comes, "a swap at {price}");
        if !comes {
            world.predict(&[predicted(3, 5, 0.9)]);
            world.load_all();
            assert_eq!(reads(&world), before, "a prefetch at {price}");
            // And when loads are free again it comes.
            world.state.set_prefetch_price(0.0);
            world.predict(&[predicted(3, 5, 0.9)]);
            world.load_all();
            assert!(reads(&world) > before);
        }
    }
}

#[test]
fn demand_goes_before_a_swap_and_waits_for_one_granule_of_it() {
    let mut world = world("scan-resistant");
    expect(&mut world, [0.0, 0.0, 0.0, 0.0, 0.0, 0.9]);
    world.start_reads();
    assert!(world.in_flight.iter().all(|n| world.state.ticket(*n).access == Access::Fill));
    assert_eq!(world.in_flight.len(), 2, "the reads of one granule");
    world.acquire(0, 1, &[0], Access::Decode);
    while let Some(number) = world.state.start_read() {
        assert_eq!(world.state.ticket(number).cause, Cause::Demand);
        world.in_flight.push(number);
    }
    assert_eq!(world.drain(0), None);
    world.release(0);
}

#[test]
fn an_eviction_that_is_told_nothing_swaps_nothing() {
    let mut world = world("lru");
    let before = reads(&world);
    expect(&mut world, [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]);
    world.load_all();
    assert_eq!(reads(&world), before);
}
