//! Invariants for any set of missing experts, and the paper's cases by hand.

use super::*;
use crate::policy::PredictedLayer;
use proptest::prelude::*;

const TIMER: Timer = Timer {
    cpu_token_ns: 10.0,
    cpu_start_ns: 20.0,
    load_ns: 100.0,
    granule_ns: 100.0,
    attention_ns: 30.0,
};

fn layer_of(tokens: &[u32], p_hit: f64) -> PredictedLayer {
    PredictedLayer { missing: missing(tokens), p_hit }
}

fn missing(tokens: &[u32]) -> Vec<Missing> {
    let missing = |(expert, n): (usize, &u32)| Missing::whole(expert as u32, f64::from(*n));
    tokens.iter().enumerate().map(missing).collect()
}

fn place(placement: &mut dyn Placement, view: &View) -> Schedule {
    let mut out =
        Schedule { cpu: vec![99], upload: vec![99], in_place: vec![99], prefetch: vec![(9, 9)] };
    placement.place(view, &mut out);
    out
}

fn presched(fills: bool) -> PreSched {
    if fills { PreSched::filling() } else { PreSched::default() }
}

fn layer() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(1u32..40, 0..12)
}

fn of_experts<'a>(missing: &'a [Missing], experts: &[u32]) -> Vec<&'a Missing> {
    experts.iter().map(|e| missing.iter().find(|m| m.expert == *e).unwrap()).collect()
}

fn tokens_of(missing: &[Missing], experts: &[u32]) -> Vec<f64> {
    of_experts(missing, experts).iter().map(|m| m.n_tokens).collect()
}

/// The layer's time by the placement's own costs.
fn makespan(view: &View, schedule: &Schedule) -> f64 {
    let cpu = tokens_of(view.current, &schedule.cpu);
    let cpu: f64 = cpu.into_iter().map(|n| view.timer.cpu_ns(n)).sum();
    match schedule.upload.len() {
        0 => cpu,
        _ => {
            let loads = of_experts(view.current, &schedule.upload);
            let loads: f64 = loads.iter().map(|m| m.part).sum();
            cpu.max(view.delay_ns + loads * view.timer.load_ns)
        }
    }
}

proptest! {
    #[test]
    fn schedules_are_sound(
        current in prop::collection::vec((1u32..40, 1u32..=4), 0..12),
        predicted in prop::collection::vec(layer(), 0..3),
        delay_ns in 0.0f64..150.0,
        p_hit in 0.0f64..=1.0,
        load_ns in 10.0f64..500.0,
        attention_ns in 0.0f64..300.0,
    ) {
        let (tokens, quarters): (Vec<u32>, Vec<u32>) = current.into_iter().unzip();
        let mut current = missing(&tokens);
        current.iter_mut().zip(quarters).for_each(|(m, n)| m.part = f64::from(n) / 4.0);
        let predicted: Vec<_> = predicted.iter().map(|layer| layer_of(layer, p_hit)).collect();
        let timer = Timer { load_ns, granule_ns: load_ns, attention_ns, ..TIMER };
        let view = View { timer, current: &current, predicted: &predicted, delay_ns };
        let everything = (0..current.len() as u32).collect::<Vec<_>>();
        let all_on_cpu = Schedule { cpu: everything.clone(), ..Schedule::default() };
        let mut presched = PreSched::default();
        let schedule = place(&mut presched, &view);
        // Filling gaps changes no place.
        let filled = place(&mut PreSched::filling(), &view);
        prop_assert_eq!((&filled.cpu, &filled.upload), (&schedule.cpu, &schedule.upload));
        prop_assert_eq!(&schedule, &place(&mut presched, &view));
        let mut experts = [&schedule.cpu[..], &schedule.upload].concat();
        experts.sort_unstable();
        prop_assert_eq!(experts, everything);
        // An expert heavier than an uploaded one is uploaded too, and before it.
        let by_weight = of_experts(&current, &[&schedule.upload[..], &schedule.cpu].concat());
        prop_assert!(by_weight.is_sorted_by(|a, b| a.weight() >= b.weight()));
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
        fills: bool,
    ) {
        let (current, predicted) = (missing(&current), [layer_of(&next, p_hit)]);
        let timer = Timer { load_ns, granule_ns: load_ns, ..TIMER };
        let view = View { timer, current: &current, predicted: &predicted, delay_ns: 0.0 };
        let schedule = place(&mut presched(fills), &view);
        let cpu = tokens_of(&current, &schedule.cpu);
        let cpu: f64 = cpu.into_iter().map(|n| timer.cpu_ns(n)).sum();
        let link = schedule.upload.len() as f64 * load_ns;
        let gap = (cpu - link).max(0.0) + timer.attention_ns;
        let n = schedule.prefetch.len() as f64;
        prop_assert!((n - 1.0) * load_ns <= gap);
        // One that is sure to miss is no gain unless it costs nothing.
        let predicted = [layer_of(&next, 0.0)];
        let view = View { predicted: &predicted, ..view };
        prop_assert!(place(&mut presched(fills), &view).prefetch.len() as f64 * load_ns <= gap);
    }
}

fn check_prefetch(view: &View, schedule: &Schedule) -> Result<(), TestCaseError> {
    let of_layer =
        |distance: usize| schedule.prefetch.iter().filter(move |p| p.0 == distance).map(|p| p.1);
    for distance in 1..=view.predicted.len() {
        let experts: Vec<u32> = of_layer(distance).collect();
        let layer = &view.predicted[distance - 1].missing;
        prop_assert!(experts.len() <= layer.len());
        prop_assert!(tokens_of(layer, &experts).is_sorted_by(|a, b| a >= b));
    }
    prop_assert!(schedule.prefetch.iter().all(|p| (1..=view.predicted.len()).contains(&p.0)));
    // Of one layer.
    prop_assert!(schedule.prefetch.windows(2).all(|p| p[0].0 == p[1].0));
    Ok(())
}

fn view<'a>(current: &'a [Missing], predicted: &'a [PredictedLayer]) -> View<'a> {
    View { timer: TIMER, current, predicted, delay_ns: 0.0 }
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
    let predicted = [layer_of(&[12], 0.9)]; // 140, together 250: the first load pays, a second not
    let both = place(&mut PreSched::default(), &view(&current, &predicted));
    assert_eq!((&both.cpu[..], &both.upload[..]), (&[0][..], &[][..]));
    // The gap of 110 + 30 hides it.
    assert_eq!(both.prefetch, [(1, 0)]);
}

/// Gap: 30 of attention; a load of 100 is hidden by 30 %, so it needs more than 70 % of hits.
#[test]
fn the_critical_prefetch_needs_hits() {
    let n = |p_hit, granule_ns| {
        let predicted = [layer_of(&[30, 30], p_hit)];
        let timer = Timer { granule_ns, ..TIMER };
        place(&mut PreSched::default(), &View { timer, ..view(&[], &predicted) }).prefetch.len()
    };
    assert_eq!((n(0.69, 100.0), n(0.71, 100.0)), (0, 1));
    // A load in quarters keeps the demand waiting for 25 instead of 70.
    assert_eq!((n(0.45, 25.0), n(0.46, 25.0)), (0, 1));
}

/// Each distance is judged by its own hits.
#[test]
fn a_layer_that_is_predicted_badly_is_not_prefetched() {
    let current = missing(&[8]); // 100 on the CPU: with attention a gap of 130
    let n = |near, far| {
        let predicted = [layer_of(&[1], near), layer_of(&[40, 40, 40], far)];
        place(&mut PreSched::default(), &view(&current, &predicted)).prefetch.len()
    };
    // 30 for the layer between and its attention's 30 make it 190: one, and one that is hidden by
    // nine tenths.
    assert_eq!((n(0.5, 0.05), n(0.05, 0.5)), (1, 2));
}

/// An expert that the CPU computes sooner than the link loads it is worth a link that is idle.
#[test]
fn an_idle_link_brings_what_the_cpu_would_compute() {
    let predicted = [layer_of(&[1], 0.9), layer_of(&[1, 1], 0.9)];
    let current = missing(&[1, 1, 1]); // 90 on the CPU: with attention a gap of 120
    let view = view(&current, &predicted);
    assert_eq!(place(&mut PreSched::default(), &view).prefetch, []);
    // One, and with the next attention one that is hidden by half.
    assert_eq!(place(&mut PreSched::filling(), &view).prefetch, [(1, 0), (2, 0)]);
}

#[test]
fn a_layer_that_needs_nothing_is_looked_past() {
    // One token on the CPU is cheaper than any load.
    let predicted = [layer_of(&[1], 0.9), layer_of(&[40, 2], 0.9)];
    let schedule = place(&mut PreSched::default(), &view(&[], &predicted));
    assert_eq!(schedule.prefetch, [(2, 0)]);
    // Only so far.
    let predicted = [1, 1, 40].map(|n_tokens| layer_of(&[n_tokens], 0.9));
    assert_eq!(place(&mut PreSched::default(), &view(&[], &predicted)).prefetch, []);
}

/// Half a load brings the rest of an expert that is half there.
#[test]
fn experts_that_are_there_in_part_are_loaded_before_whole_ones() {
    let placed = |parts: [f64; 2]| {
        let mut current = missing(&[9, 10]); // 110 and 120 on the CPU
        current.iter_mut().zip(parts).for_each(|(m, part)| m.part = part);
        let schedule = place(&mut PreSched::default(), &view(&current, &[]));
        (schedule.upload, schedule.cpu)
    };
    // 100 < 230, but not 200 < 110.
    assert_eq!(placed([1.0, 1.0]), (vec![1], vec![0]));
    // 50 < 230, but not 150 < 120.
    assert_eq!(placed([0.5, 1.0]), (vec![0], vec![1]));
    // 25 < 230 and 75 < 110.
    assert_eq!(placed([0.5, 0.25]), (vec![1, 0], vec![]));
}
