use super::*;
use crate::policy::{Expert, PolicySpec, Routed, Shape, Timing, divide};

const NAMES: [&str; 4] = ["none", "one", "two", "three"];

/// Predicts its own number, wants a look-ahead, and tells what it has heard of.
struct Fake {
    number: u32,
    is_slow: bool,
    n_events: u32,
}

impl Predictor for Fake {
    fn observe(&mut self, _: &Event<'_>) {
        self.n_events += 1;
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        let expert = Expert { layer: self.n_events, expert: self.number };
        *out = vec![Prediction { expert, priority: 1.0 }];
    }

    fn wants(&self) -> Wants {
        Wants { ahead: true, ..Wants::default() }
    }

    fn is_slow(&self) -> bool {
        self.is_slow
    }

    fn emit(&self, listener: &mut dyn FnMut(&Event<'_>)) {
        listener(&Event::Expected { layer: self.number, used: &[], later: &[] });
    }
}

/// Some of `NAMES`; the first predicts nothing, and the last one is slow if `is_slow`.
fn auto_of(candidates: &[usize], is_slow: bool, profile: &Profile) -> Auto {
    let fake = |number: usize| {
        let is_slow = is_slow && number == NAMES.len() - 1;
        Box::new(Fake { number: number as u32, is_slow, n_events: 0 }) as Box<dyn Predictor>
    };
    let candidate = |i: &usize| {
        let predictor = (*i > 0).then(|| fake(*i));
        Candidate { name: NAMES[*i], predictor, is_tried_alone: false }
    };
    Auto::new(candidates.iter().map(candidate).collect(), None, profile)
}

fn name(auto: &Auto, mode: usize) -> &str {
    &auto.modes[mode].name
}

/// Runs steps that cost what `cost` says of the active candidate.
fn run(auto: &mut Auto, n_steps: u32, cost: impl Fn(&str) -> u64) {
    for _ in 0..n_steps {
        let stall_ns = cost(name(auto, auto.judge.active()));
        let timing = Timing { wall_ns: stall_ns, stall_ns, ..Timing::default() };
        auto.observe(&Event::IterationEnd { request: 0, phase: Phase::Decode, timing });
    }
}

fn saved(auto: &Auto) -> Profile {
    let mut profile = Profile::default();
    auto.save(&mut profile);
    profile
}

#[test]
fn a_choice_goes_by_name() {
    let mut before = auto_of(&[0, 1, 3], false, &Profile::default());
    run(&mut before, 3_000, |name| if name == "three" { 100 } else { 200 });
    let mut profile = saved(&before);
    // Another candidate has come in between, or one has gone: the same one is kept.
    for candidates in [&[0, 1, 2, 3][..], &[0, 3], &[3]] {
        let again = auto_of(candidates, false, &profile);
        assert_eq!(name(&again, again.judge.kept()), "three");
        assert_eq!(again.judge.active(), again.judge.kept());
    }
    let verdict = auto_of(&[0, 1, 2, 3], false, &profile).verdict().unwrap();
    assert!(verdict.contains("keeps three") && verdict.contains("none 2.000, one 2.000"));
    // The new one is tried in its turn, and kept if it is better.
    let mut more = auto_of(&[0, 1, 2, 3], false, &profile);
    run(&mut more, 3_000, |name| if name == "two" { 50 } else { 100 });
    assert_eq!(name(&more, more.judge.kept()), "two");
    // The kept one has gone, or the bytes are damaged: as if there were no choice.
    let without = auto_of(&[0, 1], false, &profile);
    assert_eq!((without.judge.kept(), without.judge.ratios()), (0, &[None, None][..]));
    let whole = profile.get(SECTION).unwrap().to_vec();
    let mut unknown = whole.clone();
    unknown[4] = 200;
    for damaged in [&[9; 25][..], &whole[..whole.len() - 1], &whole[..3], &[], &unknown] {
        profile.set(SECTION, damaged.to_vec());
        let again = auto_of(&[0, 1, 3], false, &profile);
        assert_eq!(
            (again.judge.kept(), again.verdict().unwrap().contains("not measured")),
            (0, true)
        );
    }
}

/// A predictor that is off costs nothing: no look-ahead is wanted for it.
#[test]
fn a_look_ahead_is_wanted_while_its_candidate_is_active() {
    let mut auto = auto_of(&[0, 1], false, &Profile::default());
    let mut seen = [false; 2];
    for _ in 0..400 {
        let is_active = auto.judge.active() == 1;
        assert_eq!(auto.wants(), Wants { ahead: is_active, ..Wants::default() });
        seen[usize::from(is_active)] = true;
        run(&mut auto, 1, |name| if name == "one" { 200 } else { 100 });
    }
    assert_eq!(seen, [true, true]);
}

/// Whoever is active, all observe all; the slow one elsewhere.
#[test]
fn all_candidates_learn_from_the_first_event() {
    let auto = auto_of(&[0, 1, 2, 3], true, &Profile::default());
    let (mut auto, mut slow) = divide(Box::new(auto));
    assert!(slow.len() == 1 && slow[0].is_slow());
    let mut deputies = Vec::new();
    let mut out = Vec::new();
    for n in 1..2_000 {
        let timing = Timing { wall_ns: 100, ..Timing::default() };
        let event = Event::IterationEnd { request: 0, phase: Phase::Decode, timing };
        auto.observe(&event);
        slow[0].observe(&event);
        let predicting = match auto.deputy() {
            Some(part) => &mut slow[part],
            None => &mut auto,
        };
        predicting.predict(&mut out);
        assert!(out.iter().all(|p| p.expert.layer == n), "{n} events, {out:?}");
        deputies.push(auto.deputy());
    }
    assert!(deputies.contains(&Some(0)) && deputies.contains(&None));
    // While the slow one predicts, nothing is wanted for the others.
    auto.predict(&mut out);
    assert!(auto.deputy().is_none() || auto.wants() == Wants::default());
}

/// The estimator's estimates come once, and not in a mode without them.
#[test]
fn the_eviction_hears_the_estimator_in_modes_with_estimates() {
    let fake = |number: u32| Box::new(Fake { number, is_slow: false, n_events: 0 });
    let candidate = |number: u32, is_tried_alone| Candidate {
        name: NAMES[number as usize],
        predictor: (number > 0).then(|| fake(number) as Box<dyn Predictor>),
        is_tried_alone,
    };
    let candidates = vec![candidate(0, true), candidate(1, false), candidate(2, true)];
    let mut auto = Auto::new(candidates, Some("one"), &Profile::default());
    let expected = [
        ("none", &[1][..]),
        ("none without estimates", &[]),
        ("one", &[1]),
        ("two", &[2, 1]),
        ("two without estimates", &[2]),
    ];
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..4_000 {
        let mut told = Vec::new();
        auto.emit(&mut |event| match event {
            Event::Expected { layer, .. } => told.push(*layer),
            _ => panic!("{event:?}"),
        });
        let active = auto.judge.active();
        assert_eq!((name(&auto, active), &told[..]), expected[active]);
        seen.insert(active);
        run(&mut auto, 1, |_| 100);
    }
    assert_eq!(seen.len(), expected.len());
}

/// From an empty profile, as `--policy auto` builds it: those that must learn first are candidates
/// too, come to be chosen where they are the fastest, and leave what they have learned.
#[test]
fn what_must_learn_first_can_be_chosen_with_an_empty_profile() {
    let shape = Shape::of_model(vec![0, 32, 32, 32, 32, 32, 32, 32, 32, 32], 2);
    for best in ["eamc", "map"] {
        let spec: PolicySpec = "auto".parse().unwrap();
        let predictor = spec.build(&shape, &Profile::default()).predictor.unwrap();
        let (mut auto, mut slow) = divide(predictor);
        let (probs, embedding) = ([1.0 / 32.0; 32], [1.0, 2.0]);
        for token in 0..800u32 {
            let (request, phase) = (0, Phase::Decode);
            let chosen = [token % 32, (token + 1) % 32];
            let mut tell = |event: Event<'_>| {
                auto.observe(&event);
                slow.iter_mut().for_each(|part| part.observe(&event));
            };
            tell(Event::IterationStart { request, phase, token: None, embedding: &embedding });
            for layer in 1..10 {
                let (chosen, probs) = (&chosen[..], &probs[..]);
                let routed = Routed { request, layer, chosen, probs, hidden: &[], ahead: None };
                tell(Event::Routed(routed));
            }
            // The slow candidates come in the order of their names here.
            let deputy = auto.deputy().map(|part| ["eamc", "map"][part]);
            let wall_ns = if deputy == Some(best) { 800 } else { 1000 };
            let timing = Timing { wall_ns, ..Timing::default() };
            let end = Event::IterationEnd { request, phase, timing };
            auto.observe(&end);
            slow.iter_mut().for_each(|part| part.observe(&end));
        }
        assert!(auto.verdict().unwrap().contains(&format!("keeps {best}")), "{:?}", auto.verdict());
        let mut profile = Profile::default();
        auto.save(&mut profile);
        slow.iter().for_each(|part| part.save(&mut profile));
        let sections = [SECTION, "trajectory", crate::policy::EamcPredictor::SECTION];
        let sections = sections.into_iter().chain([crate::policy::FineMoe::SECTION]);
        sections.for_each(|section| assert!(profile.get(section).is_some(), "{section}"));
    }
}
