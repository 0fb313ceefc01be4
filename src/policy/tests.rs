//! Each policy against a naive model of its definition, over random streams of events.

use super::*;
use proptest::prelude::*;

/// Layers 0 and 3 are dense.
const N_EXPERTS: [usize; 5] = [0, 6, 9, 0, 4];
const MOE_LAYERS: [u32; 3] = [1, 2, 4];

fn shape() -> Shape {
    Shape::of_model(N_EXPERTS.to_vec(), 2)
}

fn everyone() -> impl Iterator<Item = Expert> {
    let layers = MOE_LAYERS.into_iter();
    layers.flat_map(|layer| {
        (0..N_EXPERTS[layer as usize] as u32).map(move |expert| Expert { layer, expert })
    })
}

/// One layer and what it chose, distinct.
type Step = (u32, Vec<u32>);

fn step() -> impl Strategy<Value = Step> {
    (prop::sample::select(&MOE_LAYERS[..]), 1usize..=3, any::<u64>()).prop_map(|(layer, k, at)| {
        let n = N_EXPERTS[layer as usize] as u64;
        // Squared, so that some experts are more frequent than others.
        let first = (at % n) * (at / n % n) / n;
        (layer, (0..k as u64).map(|i| ((first + i) % n) as u32).collect())
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 0..200)
}

fn routed<'a>(layer: u32, chosen: &'a [u32], ahead: Option<LookAhead<'a>>) -> Event<'a> {
    Event::Routed(Routed { request: 0, layer, chosen, probs: &[], hidden: &[], ahead })
}

fn observe(policy: &mut dyn Eviction, (layer, chosen): &Step) {
    policy.observe(&routed(*layer, chosen, None));
}

/// The order in which experts go, equals by id.
fn leaving(policy: &dyn Eviction) -> Vec<Expert> {
    let mut all: Vec<Expert> = everyone().collect();
    all.sort_by(|a, b| policy.priority(*a).partial_cmp(&policy.priority(*b)).unwrap());
    all
}

fn uses<'a>(steps: &'a [Step], of: Expert) -> impl Iterator<Item = usize> + 'a {
    let uses = move |(_, (layer, chosen)): &(usize, &Step)| {
        *layer == of.layer && chosen.contains(&of.expert)
    };
    steps.iter().enumerate().filter(uses).map(|(at, _)| at)
}

proptest! {
    #[test]
    fn lru_is_a_list_that_uses_move_to_the_end(steps in steps()) {
        let mut lru = Lru::new(&shape());
        let mut list: Vec<Expert> = everyone().collect();
        for step in &steps {
            observe(&mut lru, step);
            for &expert in step.1.iter().rev() {
                let used = Expert { layer: step.0, expert };
                list.retain(|e| *e != used);
                list.push(used);
            }
            prop_assert_eq!(leaving(&lru), list.clone());
        }
    }

    #[test]
    fn lfu_counts_uses(steps in steps()) {
        let mut lfu = Lfu::new(&shape());
        steps.iter().for_each(|step| observe(&mut lfu, step));
        for expert in everyone() {
            prop_assert_eq!(lfu.priority(expert), uses(&steps, expert).count() as f64);
        }
    }

    /// Eq. 4 as it stands in the paper, from the whole history.
    #[test]
    fn lcp_is_equation_4(steps in steps()) {
        let mut lcp = Lcp::new(&shape());
        steps.iter().for_each(|step| observe(&mut lcp, step));
        let direct = |of: Expert| {
            let mu = uses(&steps, of).count() as f64;
            let after = uses(&steps, of).last().map_or(0, |at| at + 1);
            let nu = steps[after..].iter().filter(|step| step.0 == of.layer).count() as f64;
            mu * 0.25f64.powf(nu / 128.0)
        };
        for a in everyone() {
            let p = lcp.priority(a);
            prop_assert!((p.exp() - direct(a)).abs() <= 1e-9 * direct(a), "{} {}", p, direct(a));
            for b in everyone() {
                // Far enough apart for rounding not to matter.
                if direct(a) < direct(b) * (1.0 - 1e-9) {
                    prop_assert!(p < lcp.priority(b), "{a:?} {b:?}");
                }
            }
        }
    }

    #[test]
    fn what_was_never_used_goes_first(steps in steps()) {
        let policies: [Box<dyn Eviction>; 3] = [
            Box::new(Lru::new(&shape())),
            Box::new(Lfu::new(&shape())),
            Box::new(Lcp::new(&shape())),
        ];
        for mut policy in policies {
            steps.iter().for_each(|step| observe(&mut *policy, step));
            let order = leaving(&*policy);
            let never = order.iter().take_while(|e| uses(&steps, **e).next().is_none()).count();
            prop_assert!(order[never..].iter().all(|e| uses(&steps, *e).next().is_some()));
        }
    }

    #[test]
    fn next_layer_takes_the_best_in_order(
        ranks in prop::collection::vec(0u8..6, 1..40),
        k in 1usize..8,
    ) {
        // Few different values: ties are common.
        let probs: Vec<f32> = ranks.iter().map(|r| f32::from(*r) / 8.0).collect();
        let mut expected: Vec<u32> = (0..probs.len() as u32).collect();
        expected.sort_by(|a, b| probs[*b as usize].total_cmp(&probs[*a as usize]));
        expected.truncate(k);
        let mut predictor = NextLayer::new(&Shape::of_model(vec![probs.len(); 3], k));
        let mut out = Vec::new();
        let ahead = Some(LookAhead { layer: 2, probs: &probs });
        predictor.observe(&routed(1, &[0], ahead));
        predictor.predict(&mut out);
        prop_assert_eq!(out.iter().map(|p| p.expert.expert).collect::<Vec<_>>(), expected);
        prop_assert!(out.iter().all(|p| p.expert.layer == 2));
        prop_assert!(out.iter().all(|p| p.priority == probs[p.expert.expert as usize]));
    }
}

/// The count of a used expert is never lost, however long ago that was.
#[test]
fn lcp_tells_old_experts_apart() {
    let mut lcp = Lcp::new(&shape());
    observe(&mut lcp, &(1, vec![0]));
    (0..2).for_each(|_| observe(&mut lcp, &(1, vec![1])));
    (0..1_000_000).for_each(|_| observe(&mut lcp, &(1, vec![2])));
    let priority = |expert| lcp.priority(Expert { layer: 1, expert });
    assert!(priority(3) == f64::NEG_INFINITY && priority(3) < priority(0));
    assert!(priority(0) < priority(1) && priority(1) < priority(2));
}

/// Tokens of another layer do not age an expert.
#[test]
fn lcp_counts_each_layers_own_tokens() {
    let mut lcp = Lcp::new(&shape());
    observe(&mut lcp, &(1, vec![0]));
    (0..128).for_each(|_| observe(&mut lcp, &(2, vec![0])));
    assert_eq!(lcp.priority(Expert { layer: 1, expert: 0 }), 0.0);
    (0..128).for_each(|_| observe(&mut lcp, &(1, vec![1])));
    let quarter = lcp.priority(Expert { layer: 1, expert: 0 }).exp();
    assert!((quarter - 0.25).abs() < 1e-12, "{quarter}");
}

#[test]
fn random_is_repeatable_and_fair() {
    let n = 4;
    let lowest = |seed: u64| {
        let mut random = Random::new(seed);
        let mut counts = vec![0; n];
        let mut victims = Vec::new();
        for _ in 0..4000 {
            observe(&mut random, &(4, vec![0]));
            let priority = |expert: &u32| random.priority(Expert { layer: 4, expert: *expert });
            let all = 0..n as u32;
            let victim = all.min_by(|a, b| priority(a).total_cmp(&priority(b))).unwrap();
            assert!((0.0..1.0).contains(&priority(&victim)));
            counts[victim as usize] += 1;
            victims.push(victim);
        }
        (counts, victims)
    };
    let (counts, victims) = lowest(1);
    assert!(counts.iter().all(|c| (850..1150).contains(c)), "{counts:?}");
    assert_eq!(lowest(1).1, victims);
    assert_ne!(lowest(2).1, victims);
}

/// A prediction is of one moment: what comes after it forgets it.
#[test]
fn next_layer_forgets_what_is_past() {
    let mut predictor = NextLayer::new(&shape());
    let mut out = vec![Prediction { expert: Expert::default(), priority: 1.0 }];
    predictor.predict(&mut out);
    assert!(out.is_empty());
    let ahead = Some(LookAhead { layer: 2, probs: &[0.1, 0.6, 0.3] });
    predictor.observe(&routed(1, &[0, 1], ahead));
    predictor.predict(&mut out);
    assert_eq!(out.len(), 2);
    predictor.observe(&routed(2, &[0, 1], None));
    predictor.predict(&mut out);
    assert!(out.is_empty());
}
