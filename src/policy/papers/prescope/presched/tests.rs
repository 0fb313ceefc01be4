//! Invariants for any set of missing experts, and the paper's cases by hand.

use super::*;
use proptest::prelude::*;

const TIMER: Timer =
    Timer { cpu_token_ns: 10.0, cpu_start_ns: 20.0, load_ns: 100.0, attention_ns: 30.0 };

fn missing(tokens: &[u32]) -> Vec<Missing> {
    let missing =
        |(expert, n): (usize, &u32)| Missing { expert: expert as u32, n_tokens: f64::from(*n) };
    tokens.iter().enumerate().map(missing).collect()
}

fn place(placement: &mut dyn Placement, view: &View) -> Schedule {
    let mut out = Schedule { cpu: vec![99], upload: vec![99], prefetch: vec![(9, 9)] };
    placement.place(view, &mut out);
    out
}

fn layer() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(1u32..40, 0..12)
}

fn tokens_of(missing: &[Missing], experts: &[u32]) -> Vec<f64> {
    let of = |e: &u32| missing.iter().find(|m| m.expert == *e).unwrap().n_tokens;
    experts.iter().map(of).collect()
}

/// The layer's time by the placement's own costs.
fn makespan(view: &View, schedule: &Schedule) -> f64 {
    let cpu = tokens_of(view.current, &schedule.cpu);
    let cpu: f64 = cpu.into_iter().map(|n| view.timer.cpu_ns(n)).sum();
    match schedule.upload.len() {
        0 => cpu,
        n => cpu.max(view.delay_ns + n as f64 * view.timer.load_ns),
    }
}

proptest! {
    #[test]
    fn schedules_are_sound(
        current in layer(),
        predicted in prop::collection::vec(layer(), 0..3),
        delay_ns in 0.0f64..150.0,
        p_hit in 0.0f64..=1.0,
        load_ns in 10.0f64..500.0,
        attention_ns in 0.0f64..300.0,
    ) {
        let current = missing(&current);
        let predicted: Vec<_> = predicted.iter().map(|layer| missing(layer)).collect();
        let timer = Timer { load_ns, attention_ns, ..TIMER };
        let view = View { timer, current: &current, predicted: &predicted, delay_ns, p_hit };
        let everything = (0..current.len() as u32).collect::<Vec<_>>();
        let all_on_cpu = Schedule { cpu: everything.clone(), ..Schedule::default() };
        let mut presched = PreSched::default();
        let schedule = place(&mut presched, &view);
        prop_assert_eq!(&schedule, &place(&mut presched, &view));
        let mut experts = [&schedule.cpu[..], &schedule.upload].concat();
        experts.sort_unstable();
        prop_assert_eq!(experts, everything);
        // An expert heavier than an uploaded one is uploaded too, and before it.
        let by_weight = tokens_of(&current, &[&schedule.upload[..], &schedule.cpu].concat());
        prop_assert!(by_weight.is_sorted_by(|a, b| a >= b));
        prop_assert!(makespan(&view, &schedule) <= makespan(&view, &all_on_cpu));
        check_prefetch(&view, &schedule)?;
    }

    /// The bound of Q2 and Q3: what fits into the gap and one more.
    #[test]
    fn prefetch_fills_the_gap_and_no_more(
        current in layer(),
        next in layer(),
        load_ns in 10.0f64..500.0,
        p_hit in 0.0f64..=1.0,
    ) {
        let (current, predicted) = (missing(&current), [missing(&next)]);
        let timer = Timer { load_ns, ..TIMER };
        let view = View { timer, current: &current, predicted: &predicted, delay_ns: 0.0, p_hit };
        let schedule = place(&mut PreSched::default(), &view);
        let cpu = tokens_of(&current, &schedule.cpu);
        let cpu: f64 = cpu.into_iter().map(|n| timer.cpu_ns(n)).sum();
        let link = schedule.upload.len() as f64 * load_ns;
        let gap = (cpu - link).max(0.0) + timer.attention_ns;
        let n = schedule.prefetch.len() as f64;
        prop_assert!((n - 1.0) * load_ns <= gap);
        // One that is sure to miss is no gain unless it costs nothing.
        let view = View { p_hit: 0.0, ..view };
        prop_assert!(place(&mut PreSched::default(), &view).prefetch.len() as f64 * load_ns <= gap);
    }
}

fn check_prefetch(view: &View, schedule: &Schedule) -> Result<(), TestCaseError> {
    let of_layer =
        |distance: usize| schedule.prefetch.iter().filter(move |p| p.0 == distance).map(|p| p.1);
    for distance in 1..=view.predicted.len() {
        let experts: Vec<u32> = of_layer(distance).collect();
        let layer = &view.predicted[distance - 1];
        prop_assert!(experts.len() <= layer.len());
        prop_assert!(tokens_of(layer, &experts).is_sorted_by(|a, b| a >= b));
    }
    prop_assert!(schedule.prefetch.iter().all(|p| (1..=view.predicted.len()).contains(&p.0)));
    // Of one layer.
    prop_assert!(schedule.prefetch.windows(2).all(|p| p[0].0 == p[1].0));
    Ok(())
}

fn view<'a>(current: &'a [Missing], predicted: &'a [Vec<Missing>]) -> View<'a> {
    View { timer: TIMER, current, predicted, delay_ns: 0.0, p_hit: 0.9 }
}

/// CPU costs of 1, 2, 20 and 30 tokens: 30, 40, 220 and 320.
#[test]
fn the_heaviest_are_uploaded_while_the_cpu_would_take_longer() {
    let current = missing(&[1, 30, 2, 20]);
    let schedule = place(&mut PreSched::default(), &view(&current, &[]));
    // 100 < 610 and 200 < 290, but not 300 < 70.
    assert_eq!((schedule.upload, schedule.cpu), (vec![1, 3], vec![2, 0]));
    // A transfer that is running makes the second not worth while: 200 < 610, 300 > 290.
    let late = View { delay_ns: 100.0, ..view(&current, &[]) };
    let schedule = place(&mut PreSched::default(), &late);
    assert_eq!((schedule.upload, schedule.cpu), (vec![1], vec![3, 2, 0]));
}

/// A heavier expert of the next layer takes the link's turn from a lighter one of this layer.
#[test]
fn the_next_layer_competes_for_the_link() {
    let current = missing(&[9]); // 110 on the CPU, so 100 on the link by itself
    let alone = place(&mut PreSched::default(), &view(&current, &[]));
    assert_eq!(alone.upload, [0]);
    let predicted = [missing(&[12])]; // 140, together 250: the first load pays, a second not
    let both = place(&mut PreSched::default(), &view(&current, &predicted));
    assert_eq!((&both.cpu[..], &both.upload[..]), (&[0][..], &[][..]));
    // The gap of 110 + 30 hides it.
    assert_eq!(both.prefetch, [(1, 0)]);
}

/// Gap: 30 of attention; a load of 100 is hidden by 30 %, so it needs more than 70 % of hits.
#[test]
fn the_critical_prefetch_needs_hits() {
    let predicted = [missing(&[30, 30])];
    let n = |p_hit| {
        let view = View { p_hit, ..view(&[], &predicted) };
        place(&mut PreSched::default(), &view).prefetch.len()
    };
    assert_eq!((n(0.69), n(0.71)), (0, 1));
}

#[test]
fn a_layer_that_needs_nothing_is_looked_past() {
    // One token on the CPU is cheaper than any load.
    let predicted = [missing(&[1]), missing(&[40, 2])];
    let schedule = place(&mut PreSched::default(), &view(&[], &predicted));
    assert_eq!(schedule.prefetch, [(2, 0)]);
    // Only so far.
    let predicted = [missing(&[1]), missing(&[1]), missing(&[40])];
    assert_eq!(place(&mut PreSched::default(), &view(&[], &predicted)).prefetch, []);
}
