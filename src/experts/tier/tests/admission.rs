//! Experts that were used elsewhere and are worth keeping here.

use super::*;

/// An expert of which a part is there was the least worth keeping: it must not make the room for
/// its own other part.
#[test]
fn an_admission_does_not_push_out_what_it_adds_to() {
    let predicted = Prediction { expert: Expert { layer: 3, expert: 1 }, priority: 0.0 };
    let landed = || Op::EndRead { which: 0, fails: false };
    let mut world = World::new(plan([11, 6], 3), false, "predictor=none,eviction=lru", N_WORKS);
    let ops = vec![
        Op::Prefetch { predictions: vec![predicted], age: 0 },
        Op::StartReads,
        Op::Acquire { work: 0, layer: 3, experts: vec![5], later: vec![], access: Access::Decode },
        landed(),
        landed(),
        Op::Share { shares: vec![(0, 0), (0, 0), (2, 2)] },
        Op::Admit { layer: 3, experts: vec![1] },
    ];
    run(&mut world, ops);
    world.settle_down();
}

#[test]
fn what_is_worth_more_is_admitted_when_the_link_is_idle() {
    let mut world = full();
    let resident = |world: &World| (0..6).map(|e| world.resident(1, e)).collect::<Vec<_>>();
    // Never used: worth no more than what is there.
    world.state.admit(1, &[0]);
    assert!(world.state.is_idle());
    // Used elsewhere, the last two most lately.
    for expert in 0..4 {
        let chosen = &[expert];
        let (probs, hidden): (&[f32], &[f32]) = (&[], &[]);
        let routed = Routed { request: 0, layer: 1, chosen, probs, hidden, ahead: None };
        world.state.observe(&Event::Routed(routed));
    }
    world.predict(&[predicted(3, 4, 0.1)]);
    world.state.admit(1, &[2, 3, 0]);
    // What is predicted goes first, and neither replaces the other.
    world.start_reads();
    assert_eq!(world.state.ticket(world.in_flight[0]).expert.layer, 3);
    world.predict(&[]);
    world.load_all();
    // Two at a time.
    assert_eq!(resident(&world), [0, 0, 3, 3, 0, 0]);
    // For good: they have taken the place of the least lately used.
    let working = |world: &World| world.state.held(Role::Working);
    assert_eq!(working(&world), 9);
    let working = |e| {
        let found = world.state.entries().iter().find(|x| x.id == Expert { layer: 3, expert: e });
        found.unwrap().working
    };
    assert_eq!([0, 1, 2].map(working), [0, 0, 3]);
    decode(&mut world, 1, &[2, 3]);
    assert_eq!(world.state.counters().prefetch_used_bytes, 2 * 8 * PIECE_BYTES as u64);
}

#[test]
fn an_upload_says_nothing_of_the_layers_other_experts() {
    let accesses = [Access::Upload { keep: false }, Access::Upload { keep: true }, Access::Decode];
    for access in accesses {
        let mut world = full();
        world.predict(&[predicted(1, 0, 0.9)]);
        let step = world.state.step();
        world.acquire(0, 1, &[5], access);
        world.release(0);
        world.load_all();
        // In decode, what was predicted of the layer and is not wanted by it is not wanted at all.
        let is_decode = access == Access::Decode;
        assert_eq!(world.resident(1, 0), if is_decode { 0 } else { 3 }, "{access:?}");
        assert_eq!(world.state.step() > step, is_decode);
    }
}
