//! The oracle and Belady's eviction, by themselves and in simulations of made-up routing.

use super::*;
use crate::policy::{Policy, PolicySpec, Profile, Routed, Shape, mix};
use crate::trace::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Layer 1 is dense.
const N_EXPERTS: [usize; 3] = [5, 0, 3];

type Step = (u32, Vec<u32>);

fn steps(max: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = (any::<bool>(), 0u32..15, 1u32..3).prop_map(|(is_first, at, by)| {
        let layer = if is_first { 0 } else { 2 };
        let n = N_EXPERTS[layer as usize] as u32;
        (layer, vec![at % n, (at + by) % n])
    });
    prop::collection::vec(step, 0..max)
}

fn future_of(steps: &[Step]) -> Arc<Future> {
    let mut future = Future::default();
    steps.iter().for_each(|(layer, chosen)| future.push(*layer, chosen));
    Arc::new(future)
}

fn routed(step: &Step) -> Event<'_> {
    let (layer, chosen) = step;
    let (probs, hidden) = (&[][..], &[][..]);
    Event::Routed(Routed { request: 0, layer: *layer, chosen, probs, hidden, ahead: None })
}

fn experts(step: &Step) -> impl Iterator<Item = Expert> + '_ {
    let (layer, chosen) = step;
    chosen.iter().map(|&expert| Expert { layer: *layer, expert })
}

fn everyone() -> impl Iterator<Item = Expert> {
    let layers = [(0, 5), (2, 3)].into_iter();
    layers.flat_map(|(layer, n)| (0..n).map(move |expert| Expert { layer, expert }))
}

/// Misses with room for so many experts, of steps that use one each.
fn misses(steps: &[Expert], room: usize, victim: impl Fn(usize, &[Expert]) -> usize) -> usize {
    let mut resident: Vec<Expert> = Vec::new();
    let mut misses = 0;
    for (now, expert) in steps.iter().enumerate() {
        if !resident.contains(expert) {
            misses += 1;
            if resident.len() == room {
                resident.remove(victim(now, &resident));
            }
            resident.push(*expert);
        }
    }
    misses
}

/// The fewest possible, by trying every victim.
fn fewest(steps: &[Expert], room: usize, resident: &BTreeSet<Expert>) -> usize {
    let Some((expert, rest)) = steps.split_first() else { return 0 };
    let with = |victim: Option<&Expert>| {
        let mut resident = resident.clone();
        victim.map(|victim| resident.remove(victim));
        resident.insert(*expert);
        fewest(rest, room, &resident)
    };
    if resident.contains(expert) {
        with(None)
    } else if resident.len() < room {
        1 + with(None)
    } else {
        1 + resident.iter().map(|victim| with(Some(victim))).min().unwrap()
    }
}

proptest! {
    #[test]
    fn oracle_and_belady_know_what_comes(steps in steps(40), n in 0usize..6) {
        let future = future_of(&steps);
        let mut oracle = Oracle::new(future.clone(), n);
        let mut belady = Belady::new(future);
        let mut out = Vec::new();
        for past in 0..=steps.len() {
            oracle.predict(&mut out);
            let mut expected: Vec<Prediction> = Vec::new();
            for (ahead, step) in steps[past..].iter().take(n).enumerate() {
                for expert in experts(step) {
                    if expected.iter().all(|p| p.expert != expert) {
                        let priority = 1.0 - ahead as f32 / n as f32;
                        expected.push(Prediction { expert, priority });
                    }
                }
            }
            prop_assert_eq!(&out, &expected);
            for expert in everyone() {
                let uses = |step: &Step| experts(step).any(|used| used == expert);
                let next = steps[past..].iter().position(uses);
                let expected = next.map_or(f64::NEG_INFINITY, |next| -((past + next) as f64));
                prop_assert_eq!(belady.priority(expert), expected);
            }
            if let Some(step) = steps.get(past) {
                oracle.observe(&routed(step));
                belady.observe(&routed(step));
            }
        }
    }

    #[test]
    fn belady_has_the_fewest_misses(steps in steps(9), room in 1usize..4) {
        // One expert a step: several of one step would not leave each other.
        let steps: Vec<Step> = steps.into_iter().map(|(l, c)| (l, vec![c[0]])).collect();
        let uses: Vec<Expert> = steps.iter().flat_map(experts).collect();
        let future = future_of(&steps);
        let priorities: Vec<Belady> = (0..steps.len()).map(|now| {
            let mut belady = Belady::new(future.clone());
            steps[..=now].iter().for_each(|step| belady.observe(&routed(step)));
            belady
        }).collect();
        let found = misses(&uses, room, |now, resident| {
            let p = |at: &usize| priorities[now].priority(resident[*at]);
            (0..resident.len()).min_by(|a, b| p(a).total_cmp(&p(b))).unwrap()
        });
        prop_assert_eq!(found, fewest(&uses, room, &BTreeSet::new()));
    }
}

#[test]
#[should_panic(expected = "not the trace's")]
fn another_run_is_refused() {
    let mut belady = Belady::new(future_of(&[(0, vec![1, 2])]));
    belady.observe(&routed(&(0, vec![1, 3])));
}

/// Layer 1 is dense.
const ROUTED: [usize; 4] = [6, 0, 8, 6];
const K: usize = 2;

/// One request of decode steps, in which tokens stay with an expert for a while.
fn routing(seed: u64, n_tokens: usize) -> Recorded {
    let mut draw = seed;
    let mut below = |n: u64| {
        draw = mix(draw);
        draw % n
    };
    let mut tokens: Vec<Token> = Vec::new();
    for _ in 0..n_tokens {
        let layers = ROUTED.iter().enumerate().map(|(l, n)| {
            let mut chosen = tokens.last().map_or(Vec::new(), |t| t.layers[l].chosen.clone());
            chosen.truncate(if below(3) == 0 { 0 } else { 1 });
            while chosen.len() < K.min(*n) {
                let expert = below(*n as u64) as u32;
                if !chosen.contains(&expert) {
                    chosen.push(expert);
                }
            }
            TokenLayer { probs: vec![1.0 / *n as f32; *n], chosen, ..TokenLayer::default() }
        });
        let layers = layers.collect();
        tokens.push(Token { id: None, embedding: vec![0.5; 4], layers });
    }
    let passes = (0..n_tokens).map(|t| Pass { tokens: t..t + 1, is_prompt: false }).collect();
    Recorded { n_experts: ROUTED.to_vec(), k: K, requests: vec![passes], tokens }
}

fn options(policy: &str, share: f64, link: LinkCosts) -> SimOptions {
    let kernel = |memory_ns| Roofline { launch_ns: 50.0, memory_ns, token_ns: 10.0 };
    SimOptions {
        policy: policy.parse::<PolicySpec>().unwrap(),
        profile: Profile::default(),
        // Whole experts.
        geometry: Geometry {
            expert_bytes: 4000,
            n_granules: 1,
            attention_bytes: 1000,
            shared_bytes: 0,
            head_bytes: 1000,
            weight_bytes: 2.0,
        },
        costs: CostModel {
            link,
            expert: kernel(400.0),
            attention: kernel(150.0),
            shared: kernel(30.0),
            head: kernel(70.0),
            cpu_expert: CpuExpert::default(),
            search_ns: 0,
        },
        budget: Budget::Share(share),
        caching: Caching::Keep,
        mode: Mode::Timed,
        n_warm_up: 0,
    }
}

fn policy(eviction: Box<dyn Eviction>, predictor: Option<Box<dyn Predictor>>) -> Policy {
    Policy { eviction, predictor, splitter: None, notes: Vec::new() }
}

/// With the future known and a link that keeps up, nothing is missed after the first step, and
/// nothing is brought in vain.
#[test]
fn an_oracle_misses_nothing() {
    let routing = routing(9, 60);
    // Transit, an eighth of the slots, holds the two experts of a layer.
    let options = options("on-demand", 0.85, LinkCosts::new(2e10, 0, 2));
    let tiers = Tiers::of(&routing, &options).unwrap();
    let build = |_: &Shape| {
        let oracle = Oracle::new(future(&routing), 2);
        policy(Box::new(Belady::new(future(&routing))), Some(Box::new(oracle)))
    };
    let report = simulate_policy(&routing, &options, tiers, build).unwrap();
    let later = &report.timeline[1..];
    let missed: u64 = later.iter().map(|i| i.counters.misses + i.counters.hits_partial).sum();
    assert_eq!((missed, report.counters.prefetch_wasted_bytes), (0, 0));
    assert!(later.iter().all(|i| i.timing.stall_ns == 0));
}

/// Six tokens of one layer, an expert each.
#[test]
fn tokens_that_are_known_come_before_the_least_recently_used() {
    let steps: Vec<Step> = [0, 1, 2, 1, 0, 3].map(|expert| (0, vec![expert])).to_vec();
    let shape = Shape::of_model(vec![4], 1);
    let next_victim = |n_tokens, n_past: usize| {
        let mut known = Known::new(future_of(&steps), n_tokens, &shape);
        steps[..n_past].iter().for_each(|step| known.observe(&routed(step)));
        let expert = |expert| Expert { layer: 0, expert };
        let p = |e: &u32| known.priority(expert(*e));
        (0..3).min_by(|a, b| p(a).total_cmp(&p(b))).unwrap()
    };
    // After 0, 1, 2: with nothing known 0 is the oldest; of the next token 1 is known, and of the
    // next two 1 and 0.
    assert_eq!([0, 1, 2, 9].map(|n| next_victim(n, 3)), [0, 0, 2, 2]);
    // Two tokens later nothing but 3 is to come.
    assert_eq!([0, 9].map(|n| next_victim(n, 5)), [2, 2]);
}

/// With all tokens known, the bound is Belady's.
#[test]
fn knowing_more_misses_less() {
    let routing = routing(5, 80);
    let options = options("on-demand", 0.5, LinkCosts::new(2e9, 100, 2));
    let misses = |bound: Bound| {
        let tiers = Tiers::of(&routing, &options).unwrap();
        let build = |shape: &Shape| bound.policy(future(&routing), shape);
        simulate_policy(&routing, &options, tiers, build).unwrap().counters.misses
    };
    let lru = simulate(&routing, &options).unwrap().counters.misses;
    let known = [0, 1, 2, 4, 80].map(|n| misses(Bound::Known(n)));
    assert!(known.windows(2).all(|pair| pair[0] >= pair[1]) && known[0] <= lru, "{known:?}, {lru}");
    assert!(known[4] == misses(Bound::Belady) && known[4] < known[0], "{known:?}");
}

proptest! {
    /// A layer's experts are one event in the tier, as in the counts without a machine.
    #[test]
    fn the_tier_counts_events(seed: u64, share in 0.45f64..1.0) {
        let routing = routing(seed, 50);
        let options = options("on-demand", share, LinkCosts::new(2e9, 100, 2));
        let tiers = || Tiers::of(&routing, &options).unwrap();
        let uses = Uses::of(&routing);
        let hits = uses.hits(tiers().plan.classes[0].n_slots);
        let lru = simulate(&routing, &options).unwrap().counters;
        let build = |shape: &Shape| Bound::Belady.policy(future(&routing), shape);
        let belady = simulate_policy(&routing, &options, tiers(), build).unwrap().counters;
        let found = [lru.misses, belady.misses].map(|n| 1.0 - n as f64 / uses.n_uses() as f64);
        for (found, counted) in found.into_iter().zip([hits.lru, hits.belady]) {
            prop_assert!((found - counted).abs() < 1e-9, "{} and {}", found, counted);
        }
    }

    /// No eviction misses less than Belady's, and it misses what a search of the future says.
    #[test]
    fn belady_beats_all_evictions(seed: u64, share in 0.45f64..1.0) {
        let routing = routing(seed, 50);
        let whole = |policy| options(policy, share, LinkCosts::new(2e9, 100, 2));
        let tiers = Tiers::of(&routing, &whole("on-demand")).unwrap();
        let build = |_: &Shape| policy(Box::new(Belady::new(future(&routing))), None);
        let class = tiers.plan.classes[0];
        let best = simulate_policy(&routing, &whole("on-demand"), tiers, build).unwrap();
        let misses = best.counters.misses;
        prop_assert_eq!(misses, belady_misses(&routing, class.n_slots));
        for policy in ["on-demand", "predictor=none,eviction=lfu", "predictor=none,eviction=lcp"] {
            let report = simulate(&routing, &whole(policy)).unwrap();
            prop_assert!(misses <= report.counters.misses, "{}", policy);
        }
    }
}

/// Misses of decode steps with room for `room` experts, of which the one used last goes.
fn belady_misses(routing: &Recorded, room: usize) -> u64 {
    let layer_of = |l: usize, token: &Token| (l, token.layers[l].chosen.clone());
    let steps = routing.tokens.iter();
    let steps = steps.flat_map(|t| (0..ROUTED.len()).map(move |l| layer_of(l, t)));
    let steps: Vec<_> = steps.filter(|step| !step.1.is_empty()).collect();
    let mut there: Vec<(usize, u32)> = Vec::new();
    let mut misses = 0;
    for (now, (l, chosen)) in steps.iter().enumerate() {
        let needed: Vec<_> = chosen.iter().map(|e| (*l, *e)).collect();
        for &id in needed.iter().filter(|id| !there.contains(id)).collect::<Vec<_>>() {
            misses += 1;
            if there.len() == room {
                let next = |id: &(usize, u32)| {
                    let uses = |step: &(usize, Vec<u32>)| step.0 == id.0 && step.1.contains(&id.1);
                    steps[now..].iter().position(uses).unwrap_or(usize::MAX)
                };
                let loose = (0..there.len()).filter(|at| !needed.contains(&there[*at]));
                let victim = loose.max_by_key(|at| next(&there[*at])).unwrap();
                there.remove(victim);
            }
            there.push(id);
        }
    }
    misses
}
