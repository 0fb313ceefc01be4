//! Layer prefetch for prompts: what is brought, behind what, in whose place, and what
//! becomes of it when the layer comes or never does.

use super::*;

/// A tier whose working set is full of experts of layer 3 and whose transit holds so many granules.
fn full(n_transit: usize) -> World {
    let mut world =
        World::new(plan([9 + n_transit, 16], n_transit), true, "predictor=none,eviction=lru", 2);
    (0..3).for_each(|expert| decode(&mut world, 3, &[expert]));
    world
}

fn resident(world: &World, layer: u32) -> Vec<usize> {
    (0..6).map(|expert| world.resident(layer, expert)).collect()
}

/// All granules of one expert: each has two reads, and the expert two of rows.
const EXPERT_BYTES: u64 = 8 * PIECE_BYTES as u64;

#[test]
fn a_layer_prefetch_comes_as_far_as_there_is_room_and_is_used() {
    let mut world = full(2 * GRANULES);
    world.prefetch_layer(Some(1));
    world.load_all();
    assert_eq!(resident(&world, 1), [3, 3, 0, 0, 0, 0]);
    assert_eq!(resident(&world, 3), [3, 3, 3, 0, 0, 0]);
    let before = world.state.counters();
    world.acquire(0, 1, &[0, 1, 2, 3, 4, 5], Access::Prompt);
    assert_eq!(world.drain(0), None);
    world.release(0);
    let since = world.state.counters().since(&before);
    assert_eq!((since.hits_whole, since.misses), (2, 4));
    assert_eq!(since.prefetch_used_bytes, 2 * EXPERT_BYTES);
    assert_eq!(since.demand_bytes, 4 * EXPERT_BYTES);
    assert!(world.state.is_idle());
    assert_eq!(world.state.held(Role::Transit), 0);
}

#[test]
fn demand_goes_first_and_a_layer_prefetch_takes_the_room_that_it_leaves() {
    let mut world = full(2 * GRANULES);
    world.acquire(0, 3, &[0, 3, 4, 5], Access::Prompt);
    world.prefetch_layer(Some(1));
    // Two of the three that are missing fill transit: nothing of the next layer is queued.
    world.load_all();
    assert_eq!(resident(&world, 1), [0; 6]);
    let mut n_waits = 0;
    let progress = loop {
        match world.advance(0) {
            Progress::Ready => {}
            Progress::Waiting => {
                world.start_reads();
                let is_late = |n: &u32| world.state.ticket(*n).expert.layer == 1;
                assert!(!world.in_flight.iter().any(is_late), "before what is demanded");
                world.end_read(0, false);
                n_waits += 1;
            }
            done => break done,
        }
    };
    assert!(progress == Progress::Done && n_waits > 0);
    world.release(0);
    // All of transit is the next layer's then.
    world.load_all();
    assert_eq!(resident(&world, 1), [3, 3, 0, 0, 0, 0]);
}

#[test]
fn a_layer_prefetch_does_not_take_the_room_that_a_demand_waits_for() {
    let mut world = full(GRANULES);
    world.acquire(0, 1, &[0], Access::Prompt);
    world.acquire(1, 1, &[1], Access::Prompt);
    world.prefetch_layer(Some(3));
    world.load_all();
    // The first work gives its room back; the second has not asked again yet.
    assert_eq!(world.drain(0), None);
    world.release(0);
    assert!(world.state.start_read().is_none());
    assert_eq!(world.advance(1), Progress::Waiting);
    world.start_reads();
    assert_eq!(world.state.ticket(world.in_flight[0]).cause, Cause::Demand);
    assert_eq!(world.drain(1), None);
    world.release(1);
    world.load_all();
    assert_eq!(resident(&world, 3), [3, 3, 3, 3, 0, 0]);
}

/// A token comes by between the parts, at the same layer and at another one.
#[test]
fn experts_of_later_parts_come_while_the_first_is_computed_and_are_read_once() {
    let mut world = full(4 * GRANULES);
    world.prefetch_layer(Some(1));
    world.load_all();
    assert_eq!(resident(&world, 1), [3, 3, 3, 3, 0, 0]);
    let before = reads(&world);
    // The router leaves expert 3 out.
    world.acquire_part(0, 1, LayerPart { experts: &[0, 1], later: &[2, 4, 5] }, Access::Prompt);
    assert_eq!(world.drain(0), None);
    world.release(0);
    world.load_all();
    assert_eq!(resident(&world, 1), [0, 0, 3, 0, 3, 3]);
    decode(&mut world, 3, &[0, 1]);
    decode(&mut world, 1, &[2]);
    assert_eq!(resident(&world, 1)[4..], [3, 3]);
    world.acquire(0, 1, &[2, 4, 5], Access::Prompt);
    assert_eq!(world.drain(0), None);
    world.release(0);
    assert_eq!(reads(&world) - before, 2 * 8);
    assert!(world.state.is_idle());
}

#[test]
fn predictions_do_not_cancel_a_layer_prefetch_nor_take_its_room() {
    let mut world = full(2 * GRANULES);
    world.prefetch_layer(Some(1));
    world.predict(&[super::predicted(3, 4, 0.9), super::predicted(1, 5, 0.8)]);
    world.load_all();
    assert_eq!((resident(&world, 1), world.resident(3, 4)), (vec![3, 3, 0, 0, 0, 0], 0));
    world.predict(&[]);
    world.predict(&[super::predicted(3, 4, 0.9)]);
    world.load_all();
    assert_eq!((resident(&world, 1), world.resident(3, 4)), (vec![3, 3, 0, 0, 0, 0], 0));
    // A token of another timeline that comes by does not either.
    decode(&mut world, 1, &[0]);
    assert_eq!(world.resident(1, 1), 3);
}

#[test]
fn a_useless_layer_prefetch_leaves_when_the_layer_comes() {
    for n_landed in [0, 1, 2, 99] {
        let mut world = full(2 * GRANULES);
        world.prefetch_layer(Some(1));
        for _ in 0..n_landed {
            world.start_reads();
            world.end_read(0, false);
        }
        world.acquire(0, 1, &[3], Access::Prompt);
        assert_eq!(world.drain(0), None);
        world.release(0);
        world.load_all();
        assert_eq!(resident(&world, 1), [0; 6]);
        assert!(world.state.is_idle());
        let counters = world.state.counters();
        assert_eq!((counters.prefetch_used_bytes, counters.prefetch_pending_bytes), (0, 0));
        assert_eq!(counters.prefetch_wasted_bytes > 0, n_landed > 0);
    }
}

#[test]
fn a_prompt_that_ends_early_leaves_nothing_queued() {
    for n_landed in [0, 1, 2, 99] {
        let mut world = full(2 * GRANULES);
        world.acquire(0, 3, &[0, 1, 2], Access::Prompt);
        world.prefetch_layer(Some(1));
        for _ in 0..n_landed {
            world.start_reads();
            world.end_read(0, false);
        }
        world.release(0);
        world.prefetch_layer(None);
        assert!(world.state.start_read().is_none());
        world.load_all();
        assert!(world.state.is_idle());
        assert_eq!(world.state.held(Role::Transit), 0);
        decode(&mut world, 1, &[5]);
    }
}

#[test]
fn a_failed_read_of_a_layer_prefetch_is_no_error() {
    let mut world = full(2 * GRANULES);
    world.prefetch_layer(Some(1));
    world.start_reads();
    world.end_read(0, true);
    world.load_all();
    // Brought as demand, if it can be.
    world.acquire(0, 1, &[0, 1], Access::Prompt);
    assert_eq!(world.drain(0), None);
    world.release(0);
    assert!(world.state.is_idle());
}

/// A prompt's layers, one after the other: the experts that it wants of each.
fn prompt() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let all: Vec<u32> = (0..6).collect();
    let experts = proptest::sample::subsequence(all, 1..=6).prop_shuffle();
    proptest::collection::vec(experts, MOE_LAYERS.len())
}

/// Layers of which something is being brought, or has come to transit and has not been asked for.
/// Loads that have been given up are neither, while their last read is on its way.
fn moving(world: &World) -> HashSet<usize> {
    let entries = world.state.entries().iter();
    let moving = entries.filter(|entry| match entry.load {
        Some(load) => world.state.is_bringing(load),
        None => entry.unused_bytes > 0 && entry.in_transit() > 0,
    });
    moving.map(|entry| entry.id.layer as usize).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn prompts_are_double_buffered_and_read_only(
        prompts in proptest::collection::vec(prompt(), 1..4),
        n_slots in (9..22usize, 6..14usize),
        n_transit in GRANULES..=8,
        rows: bool,
        order in proptest::collection::vec(0..9usize, 1..40),
    ) {
        let plan = plan([n_slots.0.max(n_transit), n_slots.1.max(n_transit)], n_transit);
        let mut world = World::new(plan, rows, "predictor=none,eviction=lru", 1);
        for expert in 0..4 {
            decode(&mut world, 1, &[expert]);
            decode(&mut world, 2, &[5 - expert]);
        }
        let mut turns = order.iter().cycle();
        let mut turn = || *turns.next().unwrap();
        for prompt in prompts {
            for (layer, experts) in MOE_LAYERS.zip(&prompt) {
                let working = world.working();
                // Attention: some reads end meanwhile.
                for _ in 0..turn() {
                    world.start_reads();
                    world.end_read(turn(), false);
                }
                let next = Some(layer + 1).filter(|next| MOE_LAYERS.contains(next));
                world.acquire(0, layer, experts, Access::Prompt);
                world.prefetch_layer(next);
                let is_near = |l: &usize| *l == layer || Some(*l) == next;
                for step in 0.. {
                    assert!(step < 10_000, "the prompt waits for ever");
                    let progress = world.advance(0);
                    world.state.check_integrity();
                    prop_assert!(moving(&world).iter().all(is_near), "{:?}", moving(&world));
                    prop_assert!(working.is_subset(&world.working()));
                    world.start_reads();
                    match progress {
                        Progress::Done => break,
                        Progress::Waiting => {
                            prop_assert!(!world.in_flight.is_empty(), "waits for nothing");
                            world.end_read(turn(), false);
                        }
                        _ => {}
                    }
                }
                world.release(0);
                prop_assert!(working.is_subset(&world.working()));
            }
            // The last layer has none to prefetch: with the prompt all that it moved is gone.
            world.load_all();
            prop_assert!(world.state.is_idle());
            prop_assert!(moving(&world).is_empty());
        }
    }
}
