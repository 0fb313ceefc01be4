use std::collections::BTreeMap;
use std::time::Instant;

use proptest::prelude::*;

use super::vector::{RANK, WIDTH};
use super::*;
use crate::policy::{PromptRouted, Timing, mix};

/// Layer 1 is dense.
const N_EXPERTS: [usize; 4] = [16, 0, 16, 12];
const K: usize = 2;

fn shape() -> Shape {
    Shape::of_model(N_EXPERTS.to_vec(), K)
}

/// The experts that a token of some kind uses in a layer: always the same.
fn choice(kind: u32, layer: usize, n_experts: usize, k: usize) -> Vec<u32> {
    let mut experts: Vec<u32> = (0..n_experts as u32).collect();
    let key = |expert: &u32| mix(u64::from(kind) << 32 | (layer as u64) << 16 | u64::from(*expert));
    experts.sort_unstable_by_key(key);
    experts.truncate(k);
    experts
}

/// A policy that hears tokens of some kinds, and what it tells an eviction.
struct World {
    shape: Shape,
    policy: TrajectoryPredictor,
    used: BTreeMap<u32, Vec<f32>>,
    later: BTreeMap<u32, Vec<f32>>,
    /// Whether the number of a token is known, which is its kind.
    has_numbers: bool,
}

impl World {
    fn new(shape: Shape) -> World {
        let (used, later) = Default::default();
        World { policy: TrajectoryPredictor::new(&shape), shape, used, later, has_numbers: false }
    }

    fn observe(&mut self, event: &Event<'_>) {
        self.policy.observe(event);
        let (told, told_later) = (&mut self.used, &mut self.later);
        self.policy.emit(&mut |event| {
            let Event::Expected { layer, used, later } = *event else { panic!("{event:?}") };
            told.insert(layer, used.to_vec());
            told_later.insert(layer, later.to_vec());
        });
    }

    fn pass(
        &mut self,
        request: u32,
        phase: Phase,
        token: Option<u32>,
        mut layers: impl FnMut(&mut World, usize),
    ) {
        self.observe(&Event::IterationStart { request, phase, token, embedding: &[] });
        for layer in self.shape.moe_layers().collect::<Vec<_>>() {
            layers(self, layer);
        }
        self.observe(&Event::IterationEnd { request, phase, timing: Timing::default() });
    }

    fn chosen(&self, kind: u32, layer: usize) -> Vec<u32> {
        choice(kind, layer, self.shape.n_experts[layer], self.shape.k)
    }

    fn decode(&mut self, request: u32, kind: u32) {
        let token = self.has_numbers.then_some(kind);
        self.pass(request, Phase::Decode, token, |world, layer| {
            let (chosen, probs, hidden) = (&world.chosen(kind, layer)[..], &[][..], &[][..]);
            let layer = layer as u32;
            world.observe(&Event::Routed(Routed {
                request,
                layer,
                chosen,
                probs,
                hidden,
                ahead: None,
            }));
        });
    }

    fn prompt(&mut self, request: u32, kinds: &[u32]) {
        self.pass(request, Phase::Prompt, None, |world, layer| {
            let chosen: Vec<u32> = kinds.iter().flat_map(|k| world.chosen(*k, layer)).collect();
            let (n_tokens, chosen) = (kinds.len() as u32, &chosen[..]);
            let (layer, counts, probs) = (layer as u32, &[][..], &[][..]);
            let routed = PromptRouted { request, layer, n_tokens, counts, probs, chosen };
            world.observe(&Event::PromptRouted(routed));
        });
    }

    /// The mean of what is told of the experts that a token of this kind uses.
    fn hope(&self, kind: u32) -> f32 {
        self.mean(&self.used, kind)
    }

    fn mean(&self, told: &BTreeMap<u32, Vec<f32>>, kind: u32) -> f32 {
        let mut sum = 0.0;
        for (layer, p) in told {
            let chosen = self.chosen(kind, *layer as usize);
            sum += chosen.iter().map(|expert| p[*expert as usize]).sum::<f32>();
        }
        sum / (told.len() * self.shape.k) as f32
    }
}

#[test]
fn what_follows_a_token_is_learned() {
    let mut world = World::new(shape());
    (0..400).for_each(|token| world.decode(0, token % 5));
    // The last token was of kind 4, so the next is of kind 0.
    let hopes: Vec<f32> = (0..5).map(|kind| world.hope(kind)).collect();
    assert!(hopes[0] > 0.9, "{hopes:?}");
    assert!(hopes[1..].iter().all(|hope| *hope < 0.5), "{hopes:?}");
}

/// The next token is chance, but its number tells before its first layer what it will use.
#[test]
fn a_token_is_known_by_its_number() {
    let mut world = World { has_numbers: true, ..World::new(shape()) };
    let kind = |token: u64| (mix(token) % 5) as u32;
    (0..600).for_each(|token| world.decode(0, kind(token)));
    let before: Vec<f32> = (0..5).map(|kind| world.hope(kind)).collect();
    assert!(before.iter().all(|hope| *hope < 0.6), "{before:?}");
    let (request, phase, token) = (0, Phase::Decode, Some(3));
    world.observe(&Event::IterationStart { request, phase, token, embedding: &[] });
    let hopes: Vec<f32> = (0..5).map(|kind| world.hope(kind)).collect();
    assert!(hopes[3] > 0.8, "{hopes:?}");
    assert!([0, 1, 2, 4].iter().all(|kind| hopes[*kind] < 0.5), "{hopes:?}");
}

/// Tokens of kinds 0 to 2 come in turn, then those of kinds 3 to 5: a token tells of its like.
#[test]
fn what_a_text_will_use_for_a_while_is_learned() {
    let mut world = World::new(shape());
    let kind = |token: u32| token % 3 + if token % 60 < 30 { 0 } else { 3 };
    (0..1216).for_each(|token| world.decode(0, kind(token)));
    let later: Vec<f32> = (0..6).map(|kind| world.mean(&world.later, kind)).collect();
    // Token 1216 is the 16th of its thirty.
    let [like, unlike] = [&later[..3], &later[3..]];
    assert!(like.iter().all(|own| unlike.iter().all(|other| own > other)), "{later:?}");
    assert!(like.iter().sum::<f32>() > 0.05, "{later:?}");
    assert!(unlike.iter().sum::<f32>() < -0.05, "{later:?}");
}

#[test]
fn a_prompt_teaches_as_decode_does() {
    let mut world = World::new(shape());
    for request in 0..16 {
        world.observe(&Event::RequestStart { request });
        world.prompt(request, &(0..25).map(|token| token % 5).collect::<Vec<_>>());
        world.observe(&Event::RequestEnd { request });
    }
    world.observe(&Event::RequestStart { request: 0 });
    world.prompt(0, &[1, 2]);
    assert!(world.hope(3) > 0.8, "{}", world.hope(3));
    assert!(world.hope(1) < 0.5, "{}", world.hope(1));
}

/// Two texts token by token in turn: what follows in one is not what came in the other.
#[test]
fn texts_that_are_decoded_together_have_their_own_trajectories() {
    let mut world = World::new(shape());
    for token in 0..400 {
        world.decode(7, token % 4);
        world.decode(9, 10 + token % 3);
    }
    // 400 % 4 and 400 % 3.
    for (request, next, other) in [(7, 0, 11), (9, 11, 0)] {
        let text = &world.policy.texts[&request];
        let p = |kind: u32| {
            let chosen = choice(kind, 0, N_EXPERTS[0], K);
            chosen.iter().map(|expert| text.expected[*expert as usize]).sum::<f32>() / K as f32
        };
        assert!(p(next) > 0.8 && p(other) < 0.6, "{request}: {} {}", p(next), p(other));
    }
    // The next pass uses what either of them does.
    assert!(world.hope(0) > 0.8 && world.hope(11) > 0.8);
    // Once one of them has paused, the next pass uses what the other does.
    (0..8).for_each(|token| world.decode(7, token % 4));
    assert!(world.hope(0) > 0.8 && world.hope(11) < 0.5, "{}", world.hope(11));
}

#[test]
fn a_text_that_has_ended_is_forgotten() {
    let mut world = World::new(shape());
    (0..3).for_each(|token| world.decode(0, token));
    world.observe(&Event::RequestEnd { request: 0 });
    assert!(world.policy.texts.is_empty());
    // A text that takes its number does not go on where it ended.
    world.observe(&Event::RequestStart { request: 0 });
    world.observe(&Event::IterationStart {
        request: 0,
        phase: Phase::Decode,
        token: None,
        embedding: &[],
    });
    assert!(world.policy.texts[&0].last.is_none());
}

/// A pass of four quarters tells of all that has passed at the end of each.
#[test]
fn layers_that_have_passed_are_told_of_again() {
    let mut world = World::new(Shape::of_model(vec![4; 8], 1));
    world.decode(0, 0);
    let (request, phase) = (0, Phase::Decode);
    world.observe(&Event::IterationStart { request, phase, token: None, embedding: &[] });
    let mut told = Vec::new();
    for layer in 0..8 {
        let (chosen, probs, hidden) = (&[1][..], &[][..], &[][..]);
        let routed = Routed { request, layer, chosen, probs, hidden, ahead: None };
        world.policy.observe(&Event::Routed(routed));
        let mut n = 0;
        world.policy.emit(&mut |_| n += 1);
        told.push(n);
    }
    assert_eq!(told, [1, 2, 1, 4, 1, 6, 1, 8]);
}

#[test]
fn the_next_layer_is_prefetched_as_by_its_router() {
    let (mut policy, mut nearest) = (TrajectoryPredictor::new(&shape()), NextLayer::new(&shape()));
    assert_eq!(policy.wants(), nearest.wants());
    let probs: Vec<f32> = (0..16).map(|i| i as f32 / 120.0).collect();
    let ahead = Some(crate::policy::LookAhead { layer: 2, probs: &probs });
    let (chosen, hidden) = (&[0, 1][..], &[][..]);
    let routed = Routed { request: 0, layer: 0, chosen, probs: &probs, hidden, ahead };
    let (mut found, mut expected) = (Vec::new(), Vec::new());
    for (predictor, out) in [
        (&mut policy as &mut dyn Predictor, &mut found),
        (&mut nearest as &mut dyn Predictor, &mut expected),
    ] {
        predictor.observe(&Event::Routed(routed));
        predictor.predict(out);
    }
    assert_eq!((found.len(), found), (K, expected));
}

/// The eviction hears of the next layer's router, but not of one text's where a pass has several.
#[test]
fn a_look_ahead_is_told_of_a_text_alone() {
    for n_texts in 1..=2 {
        let mut world = World::new(shape());
        for request in 0..n_texts {
            let (phase, embedding) = (Phase::Decode, &[][..]);
            world.observe(&Event::IterationStart { request, phase, token: None, embedding });
        }
        let (chosen, hidden) = (&world.chosen(0, 0)[..], &[][..]);
        let ahead = Some(crate::policy::LookAhead { layer: 1, probs: &[0.25; 4] });
        let probs = &[0.25; 4];
        world.policy.observe(&Event::Routed(Routed {
            request: 0,
            layer: 0,
            chosen,
            probs,
            hidden,
            ahead,
        }));
        let mut n_told = 0;
        world.policy.emit(&mut |event| {
            n_told += usize::from(matches!(event, Event::Predicted { layer: 1, .. }))
        });
        assert_eq!(n_told, usize::from(n_texts == 1), "{n_texts} texts");
    }
}

fn learned(kinds: &[u32]) -> World {
    let mut world = World { has_numbers: true, ..World::new(shape()) };
    kinds.iter().for_each(|kind| world.decode(0, *kind));
    world
}

proptest! {
    #[test]
    fn what_was_learned_comes_back(kinds in prop::collection::vec(0u32..9, 1..40)) {
        let world = learned(&kinds);
        let mut profile = Profile::default();
        world.policy.save(&mut profile);
        let bytes = profile.get(TrajectoryPredictor::SECTION).unwrap();
        let restored = TrajectoryPredictor::restore(&shape(), bytes).unwrap();
        prop_assert_eq!(&restored.learner.map, &world.policy.learner.map);
        let other = Shape::of_model(vec![16, 0, 16], K);
        prop_assert!(TrajectoryPredictor::restore(&other, bytes).is_err());
    }

    #[test]
    fn damage_is_refused(
        cut in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        value in prop::sample::select(&[f32::NAN, f32::INFINITY, -1e30][..]),
    ) {
        let world = learned(&[0, 1, 2, 0, 1]);
        let grid = Grid::new(&shape());
        let bytes = world.policy.learner.map.encode(&grid);
        prop_assert!(Map::decode(&grid, &bytes[..cut.index(bytes.len())]).is_err());
        let n_values = RANK * (1 + RANK + 4 * WIDTH + 5 * grid.n_cells() + 3);
        let at = bytes.len() - 4 * (1 + at.index(n_values));
        let mut damaged = bytes.clone();
        damaged[at..at + 4].copy_from_slice(&value.to_le_bytes());
        prop_assert!(Map::decode(&grid, &damaged).is_err());
        let mut newer = bytes;
        newer[0] += 1;
        prop_assert!(Map::decode(&grid, &newer).unwrap_err().contains("version 3"));
    }

    /// Whatever comes, what is told are probabilities, and equal events give equal bits.
    #[test]
    fn estimates_are_probabilities_and_repeatable(
        acts in prop::collection::vec((0u32..3, 0u32..9, any::<bool>(), any::<f32>()), 0..60),
    ) {
        let run = || {
            let mut world = World { has_numbers: true, ..World::new(shape()) };
            for &(request, kind, is_prompt, prob) in &acts {
                if is_prompt {
                    world.prompt(request, &[kind, kind + 1, kind]);
                } else {
                    world.decode(request, kind);
                }
                let probs = [prob; 16];
                let (chosen, hidden) = (&[kind, u32::MAX][..], &[][..]);
                let routed =
                    Routed { request, layer: 2, chosen, probs: &probs, hidden, ahead: None };
                world.observe(&Event::Routed(routed));
            }
            (world.used, world.later)
        };
        let told = run();
        prop_assert!(told.0.values().flatten().all(|p| (0.0..=1.0).contains(p)));
        prop_assert!(told.1.values().flatten().all(|change| (-1.0..=1.0).contains(change)));
        prop_assert_eq!(told, run());
    }
}

/// `cargo test --release --lib trajectory::tests::cost -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn cost_of_a_token_of_48_layers_of_128_experts() {
    let mut world = World::new(Shape::of_model(vec![128; 48], 8));
    let choices: Vec<Vec<u32>> = (0..48 * 16).map(|i| choice(i / 48, i as usize, 128, 8)).collect();
    let probs = vec![1.0 / 128.0; 128];
    let n_tokens = 2000;
    let mut nanos = 0;
    for token in 0..n_tokens {
        let (request, phase) = (0, Phase::Decode);
        let start = Instant::now();
        world.observe(&Event::IterationStart { request, phase, token: None, embedding: &[] });
        for layer in 0..48 {
            let chosen = &choices[token % 16 * 48 + layer as usize];
            let (probs, hidden) = (&probs[..], &[][..]);
            let routed = Routed { request, layer, chosen, probs, hidden, ahead: None };
            world.policy.observe(&Event::Routed(routed));
        }
        world.observe(&Event::IterationEnd { request, phase, timing: Timing::default() });
        nanos += start.elapsed().as_nanos();
    }
    eprintln!("{} ns a token", nanos / n_tokens as u128);
}
