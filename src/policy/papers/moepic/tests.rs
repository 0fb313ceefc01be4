//! The configurator as a whole.

use super::testing::{routed, shape};
use super::*;
use crate::policy::Timing;
use proptest::prelude::*;

/// To load an expert takes longer than to compute it. Otherwise nothing need be exposed, and what
/// is gained in one layer may cost the next one more of its window.
const COSTS: Costs = Costs { attention_ns: 2e5, experts_ns: 4e5, head_ns: 6e5, load_ns: 1e6 };

/// Layers (experts, granules, class) and slots of classes, mostly few enough to matter.
fn any_shape() -> impl Strategy<Value = Shape> {
    let layer = (0usize..9, 1usize..5, 0usize..2);
    let slots = prop::collection::vec(0usize..60, 2);
    (prop::collection::vec(layer, 1..7), 1usize..4, slots).prop_map(|(layers, k, n_slots)| {
        let granules =
            |(n, granules, _): &(usize, usize, usize)| if *n > 0 { *granules } else { 0 };
        Shape {
            n_experts: layers.iter().map(|layer| layer.0).collect(),
            k,
            n_granules: layers.iter().map(granules).collect(),
            class: layers.iter().map(|layer| layer.2).collect(),
            n_slots,
        }
    })
}

/// Statistics as tokens leave them, with a skew of each layer's own.
fn fill(moepic: &mut Moepic, seed: u64) {
    let mut state = seed;
    let mut draw = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    for layer in &mut moepic.stats.layers {
        let n = layer.n_experts();
        let skew = 1 + draw(3);
        for _ in 0..if n > 0 { 50 } else { 0 } {
            layer.tokens += 1;
            let mut rank = || (0..skew).map(|_| draw(n)).min().unwrap();
            for _ in 0..n.min(moepic.shape.k) {
                layer.activations[rank()] += 1;
            }
            for y in 0..layer.depth() {
                layer.predictions[y * n + rank()] += 1;
                layer.correct[y] += (rank() < n / (y + 2)) as u32;
            }
        }
    }
}

fn slots(shares: &[LayerShare]) -> Vec<usize> {
    shares.iter().map(|share| share.n_slots).collect()
}

/// Checks the invariants of a plan.
fn check_plan(shape: &Shape, shares: &[LayerShare]) -> Result<(), TestCaseError> {
    prop_assert_eq!(shares.len(), shape.n_layers());
    for (l, share) in shares.iter().enumerate() {
        if shape.n_experts[l] == 0 {
            prop_assert_eq!(*share, LayerShare::default());
        } else {
            prop_assert!((1..=shape.n_granules[l]).contains(&share.keep), "{share:?}");
        }
    }
    for (class, total) in shape.n_slots.iter().enumerate() {
        let layers = || shape.moe_layers().filter(|l| shape.class[*l] == class);
        let most = |l: usize| shape.n_experts[l] * shape.n_granules[l];
        let given: usize = layers().map(|l| shares[l].n_slots).sum();
        prop_assert!(given == *total || layers().next().is_none());
        let fits = layers().map(most).sum::<usize>() >= *total;
        prop_assert!(layers().all(|l| !fits || shares[l].n_slots <= most(l)), "{shares:?}");
        let enough = *total >= layers().count();
        prop_assert!(layers().all(|l| !enough || shares[l].n_slots > 0), "{shares:?}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn plans_use_all_slots_and_never_expose_more(shape in any_shape(), seed in any::<u64>()) {
        let options = MoepicOptions { tau: 0, zeta: 0.05, fixed_theta: None };
        let mut moepic = Moepic::new(&shape, options);
        let equal = moepic.uniform(0.5);
        check_plan(&shape, &equal)?;
        fill(&mut moepic, seed);
        let mut before = moepic.predicted_exposed(&equal, &COSTS);
        let stats = moepic.stats.clone();
        // Each plan goes on from the one before.
        for _ in 0..3 {
            let Some(plan) = moepic.plan(&COSTS) else { break };
            // As they were before the plan halved them.
            moepic.stats = stats.clone();
            check_plan(&shape, &plan)?;
            let after = moepic.predicted_exposed(&plan, &COSTS);
            prop_assert!(after <= before * (1.0 + 1e-12), "{before} {after}");
            before = after;
        }
    }

    /// Without predictions and computation, windows do not matter and the gain of each slot is
    /// known: giving slots one by one to the largest gain is the best division.
    #[test]
    fn without_windows_the_division_is_the_best(
        layers in prop::collection::vec(prop::collection::vec(0u32..50, 5), 1..6),
        n_granules in 1usize..4,
        total in 6usize..70,
        zeta in 0.01..0.9,
    ) {
        let shape = Shape { n_slots: vec![total], ..shape_of(layers.len(), 5, n_granules) };
        let mut moepic = Moepic::new(&shape, MoepicOptions { tau: 0, zeta, fixed_theta: None });
        let mut rates = Vec::new();
        for (layer, mut uses) in moepic.stats.layers.iter_mut().zip(layers) {
            uses.sort_by(|a, b| b.cmp(a));
            layer.tokens = 50;
            layer.activations.copy_from_slice(&uses);
            let sum = uses.iter().sum::<u32>().max(1);
            let rate = |uses: &u32| f64::from(*uses) / f64::from(sum);
            rates.push(uses.iter().map(rate).collect::<Vec<_>>());
        }
        let mut given = vec![1; shape.n_layers()];
        let adds = |l: usize, given: usize| {
            rates[l].get(given / n_granules).copied().unwrap_or(0.0)
        };
        for _ in shape.n_layers()..total {
            let best = (0..shape.n_layers()).max_by(|a, b| {
                adds(*a, given[*a]).total_cmp(&adds(*b, given[*b]))
            });
            given[best.unwrap()] += 1;
        }
        let share = |n_slots: &usize| LayerShare { n_slots: *n_slots, keep: n_granules };
        let best: Vec<LayerShare> = given.iter().map(share).collect();
        let stats = moepic.stats.clone();
        let costs = Costs { load_ns: 1.0, ..Costs::default() };
        let plan = moepic.plan(&costs).unwrap();
        moepic.stats = stats;
        let (got, best) =
            (moepic.predicted_exposed(&plan, &costs), moepic.predicted_exposed(&best, &costs));
        prop_assert!((got - best).abs() < 1e-9, "{plan:?}: {got}, not {best}");
    }

    #[test]
    fn equal_parts_are_equal(total in 0usize..100, layers in 1usize..7) {
        let mut shape = shape_of(layers, 4, 3);
        shape.n_slots = vec![total];
        let plan = slots(&Moepic::new(&shape, MoepicOptions::default()).uniform(0.5));
        prop_assert_eq!(plan.iter().sum::<usize>(), total);
        let (least, most) = (plan.iter().min().unwrap(), plan.iter().max().unwrap());
        prop_assert!(most - least <= 1, "{plan:?}");
    }

    #[test]
    fn no_theta_leaves_room_empty(
        total in 0usize..100,
        layers in 1usize..7,
        theta in 0.01f64..1.0,
    ) {
        let mut shape = shape_of(layers, 4, 3);
        shape.n_slots = vec![total];
        for share in Moepic::new(&shape, MoepicOptions::default()).uniform(theta) {
            prop_assert!(share.keep * 4 >= share.n_slots.min(4 * 3), "{share:?}");
        }
    }
}

fn shape_of(n_layers: usize, n_experts: usize, n_granules: usize) -> Shape {
    Shape {
        n_experts: vec![n_experts; n_layers],
        k: 2,
        n_granules: vec![n_granules; n_layers],
        class: vec![0; n_layers],
        n_slots: vec![n_layers * n_experts * n_granules / 4],
    }
}

/// Layers that a cache serves badly, and whose predictions are as bad, need more of it.
#[test]
fn what_is_hard_to_cache_gets_more() {
    let shape = shape_of(4, 16, 4);
    let mut moepic = Moepic::new(&shape, MoepicOptions { tau: 0, ..Default::default() });
    for (l, layer) in moepic.stats.layers.iter_mut().enumerate() {
        layer.tokens = 800;
        match l % 2 {
            0 => layer.activations.fill(100),
            _ => layer.activations[..3].copy_from_slice(&[800, 600, 200]),
        }
    }
    let before = moepic.predicted_exposed(&moepic.uniform(0.5), &COSTS);
    let stats = moepic.stats.clone();
    let plan = moepic.plan(&COSTS).unwrap();
    moepic.stats = stats;
    assert!(moepic.predicted_exposed(&plan, &COSTS) < 0.9 * before);
    let slots = slots(&plan);
    assert!(slots[0].min(slots[2]) > slots[1].max(slots[3]), "{slots:?}");
    // The easy layers keep as much as it takes to compute longer than to load.
    assert!(slots[1].min(slots[3]) >= 8, "{slots:?}");
}

/// The split itself. Where few experts do most, whole ones are worth more than more of them. Where
/// experts take turns, those of the highest priority are those that have just been: only a cache
/// of parts of all is ever hit.
#[test]
fn the_split_follows_the_hit_rate() {
    let shape = Shape { n_slots: vec![2 * 4 * 4], ..shape_of(2, 8, 4) };
    let keep = |activations: [u32; 8]| {
        let mut moepic = Moepic::new(&shape, MoepicOptions { tau: 0, ..Default::default() });
        for layer in &mut moepic.stats.layers {
            layer.tokens = 100;
            layer.activations.copy_from_slice(&activations);
        }
        let plan = moepic.plan(&COSTS).unwrap();
        (plan[0].keep, plan[1].keep)
    };
    assert_eq!(keep([60, 50, 30, 20, 15, 10, 10, 5]), (4, 4));
    assert_eq!(keep([0, 0, 0, 0, 0, 0, 100, 100]), (2, 2));
}

fn pass(moepic: &mut Moepic, tokens: u64) {
    let step = |layer: u32| testing::Step {
        request: 0,
        layer,
        chosen: vec![0, 1],
        ahead: (1, vec![0.5; 9]),
    };
    for _ in 0..tokens {
        [1, 2, 4].iter().for_each(|layer| moepic.observe(&routed(&step(*layer))));
        for phase in [Phase::Prompt, Phase::Decode] {
            moepic.observe(&Event::IterationEnd { request: 0, phase, timing: Timing::default() });
        }
    }
}

#[test]
fn plans_come_at_the_start_and_every_tau_tokens() {
    let options = MoepicOptions { tau: 10, ..Default::default() };
    let mut moepic = Moepic::new(&shape(), options.clone());
    let first = moepic.plan(&Costs::default()).unwrap();
    assert_eq!(first, moepic.uniform(0.5));
    let keep: Vec<usize> = first.iter().map(|share| share.keep).collect();
    // 5 slots for 4 experts: one granule of each would leave one empty.
    assert_eq!(keep, [0, 2, 2, 0, 2]);
    pass(&mut moepic, 9);
    assert_eq!(moepic.plan(&COSTS), None);
    pass(&mut moepic, 1);
    // Costs that were not measured plan nothing, and no token is lost to them.
    assert_eq!(moepic.plan(&Costs::default()), None);
    assert_eq!(moepic.plan(&Costs { load_ns: f64::NAN, ..COSTS }), None);
    let second = moepic.plan(&COSTS).unwrap();
    assert_ne!(second, first);
    assert_eq!((moepic.tokens, moepic.stats.tokens()), (0, 5));
    pass(&mut moepic, 10);
    // The same again: nothing to say.
    assert_eq!(moepic.plan(&COSTS), None);
    assert_eq!((moepic.tokens, moepic.stats.tokens()), (0, 7));
}

#[test]
fn the_first_plans_come_sooner() {
    let mut moepic = Moepic::new(&shape(), MoepicOptions { tau: 300, ..Default::default() });
    moepic.plan(&COSTS).unwrap();
    for gap in [50, 100, 200, 300, 300] {
        pass(&mut moepic, gap - 1);
        assert!(!moepic.is_due());
        pass(&mut moepic, 1);
        assert!(moepic.is_due(), "after {gap} tokens");
        moepic.plan(&COSTS);
    }
}

/// Statistics of enough tokens make the first plan; of fewer they go on growing over runs.
#[test]
fn a_restored_configurator_starts_with_what_it_knows() {
    let options = MoepicOptions { tau: 10, ..Default::default() };
    let restored = |moepic: &Moepic| {
        let mut profile = Profile::default();
        moepic.save(&mut profile);
        let bytes = profile.get(Moepic::SECTION).unwrap();
        Moepic::restore(&shape(), options.clone(), bytes).unwrap()
    };
    let mut cold = Moepic::new(&shape(), options.clone());
    pass(&mut cold, 4);
    let mut cold = restored(&cold);
    assert_eq!(cold.plan(&COSTS), Some(cold.uniform(0.5)));
    assert_eq!(cold.plan(&COSTS), None);
    pass(&mut cold, 6);
    let plan = cold.plan(&COSTS);
    assert!(plan.is_some());

    let mut warm = restored(&cold);
    assert_eq!(warm.stats.tokens(), 5);
    assert_eq!(warm.plan(&COSTS), plan);
    assert_eq!(warm.stats.tokens(), 5, "a plan at the start forgets nothing");
    assert_eq!(warm.plan(&COSTS), None);
}

#[test]
fn a_fixed_split_is_said_once() {
    // Of less than two granules the shares would not be filled.
    for (theta, keep) in [(0.1, 2), (0.4, 2), (0.5, 2), (0.67, 2), (1.0, 3)] {
        let options = MoepicOptions { tau: 1, fixed_theta: Some(theta), ..Default::default() };
        let mut moepic = Moepic::new(&shape(), options);
        let plan = moepic.plan(&COSTS).unwrap();
        assert_eq!((plan[1].keep, plan[2].keep), (keep, keep), "{theta}");
        assert_eq!(slots(&plan), [0, 12, 13, 0, 5]);
        pass(&mut moepic, 5);
        assert_eq!(moepic.plan(&COSTS), None);
    }
}
