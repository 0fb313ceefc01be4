use super::*;
use window::SHORT;

fn judge(n: usize) -> Judge {
    Judge::new(Record::new(n))
}

/// Runs steps that cost what `cost` says of the active candidate; returns the number of steps
/// of each.
fn run(judge: &mut Judge, n_steps: u32, cost: impl Fn(usize, u32) -> u64) -> Vec<u32> {
    let mut steps = vec![0; judge.ratios().len()];
    for step in 0..n_steps {
        steps[judge.active()] += 1;
        judge.count(cost(judge.active(), step));
    }
    steps
}

/// From 0 to 1, whatever the step.
fn noise(step: u32) -> f64 {
    (crate::policy::mix(step.into()) >> 40) as f64 / (1 << 24) as f64
}

#[test]
fn what_pays_is_kept_and_little_time_goes_to_the_others() {
    for best in 0..4 {
        let mut judge = judge(4);
        let steps = run(&mut judge, 20_000, |i, step| {
            let cost = if i == best { 1000.0 } else { 1200.0 };
            (cost + 300.0 * noise(step)) as u64
        });
        assert_eq!(judge.kept(), best);
        assert!(steps[best] > 18_500, "{steps:?}");
        assert!(steps.iter().all(|n| *n > 0), "each is tried: {steps:?}");
    }
}

/// The costs of all rise and fall by half, slowly: texts differ more than candidates.
#[test]
fn what_changes_for_all_decides_nothing() {
    let mut judge = judge(3);
    run(&mut judge, 20_000, |i, step| {
        let text = 1.0 + 0.5 * (f64::from(step) / 150.0).sin();
        (1000.0 * text * [1.0, 0.9, 1.1][i] + 100.0 * noise(step)) as u64
    });
    assert_eq!(judge.kept(), 1);
    let ratio = |i: usize| judge.ratios()[i].unwrap();
    assert!((ratio(0) / (1.0 / 0.9) - 1.0).abs() < 0.05, "{}", ratio(0));
    assert!((ratio(2) / (1.1 / 0.9) - 1.0).abs() < 0.05, "{}", ratio(2));
}

#[test]
fn a_change_is_noticed() {
    let mut judge = judge(2);
    run(&mut judge, 2_000, |i, _| if i == 1 { 100 } else { 200 });
    assert_eq!(judge.kept(), 1);
    run(&mut judge, 8_000, |i, _| if i == 1 { 400 } else { 200 });
    assert_eq!(judge.kept(), 0);
}

/// A candidate that learns is slower at first and faster in the end.
#[test]
fn a_late_learner_gets_its_chance() {
    let mut judge = judge(5);
    run(&mut judge, 20_000, |i, step| match i {
        3 => 800 + 600_000 / u64::from(step + 1000),
        _ => 1000 + (100.0 * noise(step)) as u64,
    });
    assert_eq!(judge.kept(), 3);
}

#[test]
fn equals_are_not_exchanged_for_noise() {
    let mut judge = judge(3);
    let mut n_changes = 0;
    let mut kept = judge.kept();
    for step in 0..20_000 {
        judge.count(1000 + (200.0 * noise(step)) as u64);
        n_changes += u32::from(std::mem::replace(&mut kept, judge.kept()) != kept);
    }
    assert_eq!(n_changes, 0);
}

/// A window that takes twice as long as usual is the last of its bout.
#[test]
fn a_challenger_that_is_much_slower_loses_little_time() {
    let mut judge = judge(2);
    let steps = run(&mut judge, 200, |i, _| if i == 1 { 1000 } else { 100 });
    assert!(judge.kept() == 0 && judge.ratios()[1].is_some_and(|ratio| ratio > 1.5));
    assert!((1..=8).contains(&steps[1]), "{steps:?}");
}

/// Some of the kept one's steps take a hundred times as long, as where a disk is busy.
#[test]
fn outliers_decide_nothing() {
    let mut judge = judge(3);
    let cost = |_, step: u32| if step.is_multiple_of(37) { 100_000 } else { 1000 };
    for step in 0..40_000 {
        judge.count(cost(judge.active(), step));
        assert_eq!(judge.kept(), 0, "step {step}");
    }
}

/// Runs that are too short for a bout to end, with a profile between them, are as good as one.
#[test]
fn short_runs_go_on_where_the_one_before_has_ended() {
    let mut record = Record::new(5);
    let mut tried = [false; 5];
    let mut has_bout = Vec::new();
    for _ in 0..30 {
        let mut judge = Judge::new(record);
        for step in 0..14 * SHORT {
            tried[judge.active()] = true;
            let cost = if judge.active() == 3 { 900.0 } else { 1000.0 };
            judge.count((cost + 30.0 * noise(step)) as u64);
        }
        record = judge.record();
        has_bout.push(!record.bout.is_empty());
    }
    assert_eq!((tried, record.kept), ([true; 5], 3));
    assert!(has_bout.contains(&true) && has_bout.contains(&false), "{has_bout:?}");
    assert!((0..5).all(|i| record.ratios[i].is_some() == (i != 3)));
}

/// A short run after one that has tried all candidates tries none again, but a new one.
#[test]
fn an_earlier_verdict_is_believed() {
    let n_steps = 12 * SHORT;
    let cost = |i: usize, _| if i == 1 { 100 } else { 200 };
    let ratios = vec![Some(2.0), None, Some(2.0)];
    let record = Record { kept: 1, ratios, next: 2, wait: 16, interval: 16, ..Record::new(3) };
    assert_eq!(run(&mut Judge::new(record.clone()), n_steps, cost), [0, n_steps, 0]);
    let ratios = vec![Some(2.0), None, None];
    let mut new_one = Judge::new(Record { ratios, ..record });
    assert!(run(&mut new_one, n_steps, cost)[1] < n_steps);
}

#[test]
fn a_run_that_knows_nothing_fills_its_memory_first() {
    let mut judge = judge(2);
    assert_eq!(run(&mut judge, WARM_UP * SHORT, |_, _| 100), [WARM_UP * SHORT, 0]);
    assert_eq!(judge.active(), 1);
}

/// The disk is busy while the better candidate is tried for the first time.
#[test]
fn a_candidate_that_was_given_up_is_tried_again_soon() {
    let mut judge = judge(3);
    run(&mut judge, 1_000, |i, step| match i {
        1 if step < 100 => 10_000,
        1 => 900,
        _ => 1000,
    });
    assert_eq!(judge.kept(), 1);
}

/// The machine is busy in all windows but those of one candidate, until that one is kept. None of
/// the others seems to be near it then.
#[test]
fn who_is_kept_by_chance_is_soon_found_out() {
    let mut judge = judge(4);
    run(&mut judge, 1_000, |i, _| [1000, 900, 1050, 1100][i]);
    assert_eq!(judge.kept(), 1);
    for _ in 0..20_000 {
        if judge.kept() != 1 {
            break;
        }
        judge.count([1000, 900, 720, 1100][judge.active()]);
    }
    assert_eq!(judge.kept(), 2);
    let steps = run(&mut judge, 1_000, |i, _| [1000, 900, 1050, 1100][i]);
    assert!(judge.kept() == 1 && steps[1] > 600, "{steps:?}");
}

/// A candidate that was much slower is tried again later than one that was near.
#[test]
fn who_was_near_is_tried_more_often() {
    let mut judge = judge(3);
    let steps = run(&mut judge, 20_000, |i, _| [1000, 1500, 1050][i]);
    assert!(steps[1] > 0 && 2 * steps[1] < steps[2], "{steps:?}");
}

/// A token takes what the candidates of the last tokens have left in memory, so that a short window
/// of the better one shows a fourth of the difference.
#[test]
fn a_candidate_that_lives_on_what_another_has_left_is_seen_through() {
    let mut judge = judge(3);
    let mut memory = 1000.0;
    for step in 0..6_000 {
        let with_active = [1000.0, 900.0, 1000.0][judge.active()];
        memory += (with_active - memory) / 16.0;
        judge.count((memory + 40.0 * noise(step)) as u64);
    }
    assert_eq!(judge.kept(), 1);
}

#[test]
fn times_of_nothing_decide_nothing() {
    for n in 1..4 {
        let mut judge = judge(n);
        run(&mut judge, 2_000, |_, _| 0);
        assert_eq!(judge.kept(), 0);
        assert!(judge.ratios().iter().flatten().all(|ratio| *ratio == 1.0));
    }
}
