//! Free room is filled while the link has nothing else to do.

use super::*;

/// Nothing is used yet, and free room is filled. Six experts of three granules have room in the
/// class of layers 1 and 3, beside transit.
fn filling(policy: &str) -> World {
    let plan = plan([18 + GRANULES, 6], GRANULES);
    let mut world = World::new(plan, true, &format!("predictor=none,eviction={policy}"), 1);
    world.state.fill_free_room();
    world
}

fn routed(world: &mut World, layer: u32, chosen: &[u32]) {
    let (probs, hidden): (&[f32], &[f32]) = (&[], &[]);
    let routed = Routed { request: 0, layer, chosen, probs, hidden, ahead: None };
    world.state.observe(&Event::Routed(routed));
}

/// Experts that are whole, by layer and number.
fn whole(world: &World) -> Vec<(u32, u32)> {
    let whole = world.state.entries().iter().filter(|entry| entry.is_whole());
    whole.map(|entry| (entry.id.layer, entry.id.expert)).collect()
}

#[test]
fn free_room_is_filled_best_experts_first_and_then_the_link_rests() {
    let mut world = filling("lfu");
    routed(&mut world, 3, &[5, 2]);
    routed(&mut world, 3, &[5]);
    assert!(world.state.can_start());
    let first = world.state.start_read().unwrap();
    assert_eq!(world.state.ticket(first).expert, Expert { layer: 3, expert: 5 });
    world.in_flight.push(first);
    world.load_all();
    // The others are spread over the layers. Layer 2 has slots of its own, for one expert.
    let expected = [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (3, 2), (3, 5)];
    assert_eq!(whole(&world), expected);
    assert_eq!(world.state.held(Role::Working), 18 + 2);
    assert_eq!(world.state.held(Role::Transit), 0);
    assert!(!world.state.can_start() && world.state.is_idle());
}

#[test]
fn demand_goes_before_what_fills() {
    let mut world = filling("lru");
    world.start_reads();
    let is_fill = |world: &World, n: u32| world.state.ticket(n).access == Access::Fill;
    let in_flight = world.in_flight.clone();
    assert!(!in_flight.is_empty() && in_flight.iter().all(|n| is_fill(&world, *n)));
    world.acquire(0, 3, &[4], Access::Decode);
    while let Some(number) = world.state.start_read() {
        assert_eq!(world.state.ticket(number).cause, Cause::Demand);
        world.in_flight.push(number);
    }
    assert_eq!(world.drain(0), None);
    world.release(0);
    world.load_all();
    assert_eq!(world.resident(3, 4), GRANULES);
}

#[test]
fn a_filler_that_is_demanded_is_a_hit_and_stays() {
    let mut world = filling("lru");
    world.load_all();
    let (layer, expert) = whole(&world)[0];
    let before = world.state.counters();
    decode(&mut world, layer as usize, &[expert]);
    let since = world.state.counters().since(&before);
    assert_eq!((since.hits_whole, since.misses), (1, 0));
    assert!(since.prefetch_used_bytes > 0);
    // Prompts take the room of the other fillers, and not of this one.
    for _ in 0..3 {
        world.acquire(0, 3, &[0, 1, 2, 3, 4, 5], Access::Prompt);
        assert_eq!(world.drain(0), None);
        world.release(0);
    }
    assert!(whole(&world).contains(&(layer, expert)));
}

#[test]
fn a_prompt_takes_the_room_of_fillers_that_are_worth_less() {
    let mut world = filling("lfu");
    world.load_all();
    let absent: Vec<u32> = (0..6).filter(|e| world.resident(3, *e) == 0).collect();
    let prompt = |world: &mut World| {
        world.acquire(0, 3, &absent[..2], Access::Prompt);
        assert_eq!(world.drain(0), None);
        world.release(0);
        absent[..2].iter().map(|e| world.resident(3, *e)).collect::<Vec<_>>()
    };
    // Of equals none makes room for the other: they come through transit.
    assert_eq!(prompt(&mut world), [0, 0]);
    routed(&mut world, 3, &absent[..2]);
    assert_eq!(prompt(&mut world), [GRANULES, GRANULES]);
    world.state.check_integrity();
}

#[test]
fn of_an_expert_that_a_share_cuts_the_leading_granules_come() {
    let mut world = filling("lru");
    world.share(&[(6, 1), (0, 0), (6, 1)]);
    world.load_all();
    let of_layer = |layer| (0..6).map(|e| world.resident(layer, e)).collect::<Vec<_>>();
    assert_eq!([of_layer(1), of_layer(2), of_layer(3)], [[1; 6], [0; 6], [1; 6]]);
    // What is kept of them serves a demand, which brings the rest.
    decode(&mut world, 1, &[0]);
    let counters = world.state.counters();
    assert_eq!((counters.hits_partial, counters.misses), (1, 0));
}

#[test]
fn what_the_tier_above_has_is_left_out() {
    let mut world = filling("lru");
    world.set_upper(1, 0, true);
    world.load_all();
    assert_eq!(world.resident(1, 0), 0);
    assert!(!world.state.can_start());
}

#[test]
fn a_file_that_cannot_be_read_ends_the_filling() {
    let mut world = filling("lru");
    world.start_reads();
    while !world.in_flight.is_empty() {
        world.end_read(0, true);
    }
    assert!(!world.state.can_start() && world.state.is_idle());
    assert_eq!(world.state.held(Role::Working), 0);
    // A demand tries by itself.
    decode(&mut world, 1, &[0]);
    assert_eq!(world.resident(1, 0), GRANULES);
}
