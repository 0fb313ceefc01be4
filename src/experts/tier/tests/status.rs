//! The reports of where experts are.

use super::{GRANULES, World, decode, plan, small};
use crate::experts::acquisition::Access;
use crate::experts::tier::status::{ExpertStatus, Presence};

fn report(world: &World, layer: usize) -> Vec<ExpertStatus> {
    let mut out = Vec::new();
    world.state.report(layer, &mut out);
    out
}

#[test]
fn a_report_follows_an_expert_from_its_load_to_its_uses() {
    let mut world = small();
    assert!(report(&world, 0).is_empty(), "a dense layer has no experts");
    assert_eq!(report(&world, 1), [ExpertStatus::default(); 6]);
    world.acquire(0, 1, &[2], Access::Decode);
    let status = |presence, n_hits, n_misses| ExpertStatus { presence, n_hits, n_misses };
    assert_eq!(report(&world, 1)[2], status(Presence::InFlight, 0, 1));
    world.drain(0);
    world.release(0);
    assert_eq!(report(&world, 1)[2], status(Presence::Whole, 0, 1));
    decode(&mut world, 1, &[2]);
    assert_eq!(report(&world, 1)[2], status(Presence::Whole, 1, 1));
    assert_eq!(report(&world, 1)[3], ExpertStatus::default());
    let counters = world.state.counters();
    assert_eq!((counters.hits_whole, counters.misses), (1, 1));
}

#[test]
fn a_part_of_an_expert_is_reported_as_one() {
    let mut world = World::new(plan([12, 8], GRANULES), true, "predictor=none,eviction=lru", 1);
    world.share(&[(8, 2), (5, 1), (1, 1)]);
    (0..5).for_each(|expert| decode(&mut world, 1, &[expert]));
    assert_eq!(report(&world, 1)[1].presence, Presence::Part);
    decode(&mut world, 1, &[1]);
    let now = report(&world, 1)[1];
    assert_eq!((now.n_hits, now.n_misses), (0, 2), "a part is no hit");
}
