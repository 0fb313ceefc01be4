use std::ops::Range;
use std::time::Duration;

use super::*;
use crate::experts::acquisition::{Access, Acquisition, LayerPart};
use crate::experts::layout::piece::Piece;
use crate::experts::tier::{ClassPlan, LayerPlan, Layout, Tier, TierPlan};
use crate::policy::{Costs, Expert, LayerShare, Lru, Phase, PolicySpec, Routed, Shape, Timing};

/// Wants to look ahead in every other pass.
struct Moody {
    is_slow: bool,
    n_passes: u32,
}

impl Predictor for Moody {
    fn observe(&mut self, event: &Event<'_>) {
        self.n_passes += u32::from(matches!(event, Event::IterationEnd { .. }));
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        let prediction = |expert| Prediction { expert: Expert { layer: 0, expert }, priority: 1.0 };
        *out = (0..4).map(prediction).collect();
    }

    fn wants(&self) -> Wants {
        Wants {
            ahead: self.n_passes.is_multiple_of(2),
            hidden: self.n_passes == 3,
            next_token: self.n_passes == 1,
        }
    }

    fn is_slow(&self) -> bool {
        self.is_slow
    }
}

struct OnePiece;

impl Layout for OnePiece {
    fn pieces(&self, _: Expert, granules: Range<usize>, out: &mut Vec<Piece>) {
        let to = |granule| crate::experts::Dest::Slot { granule, at: 0 };
        let piece = |granule| Piece { shard: 0, start: 0, len: 4096, need: 4096, to: to(granule) };
        out.extend(granules.map(piece));
    }
}

/// Holds even experts alone.
struct Even(Tier);

impl Mover for Even {
    fn price_section(&self) -> &'static str {
        "price.even"
    }

    fn tier(&self) -> &Tier {
        &self.0
    }

    fn may_hold(&self, expert: Expert) -> bool {
        expert.expert.is_multiple_of(2)
    }
}

fn mover() -> Arc<Even> {
    let plan = TierPlan {
        layers: vec![LayerPlan { n_experts: 4, n_own: 2, n_granules: 1, class: 0 }],
        classes: vec![ClassPlan { n_slots: 4, n_transit: 2, slot_bytes: 4096 }],
        n_staging: 0,
        staging_bytes: 0,
    };
    let lru = Lru::new(&Shape::of_model(vec![4], 2));
    Arc::new(Even(Tier::new(plan, Box::new(OnePiece), Box::new(lru))))
}

fn driver(mover: Arc<Even>, is_slow: bool) -> PolicyDriver {
    PolicyDriver::new(
        mover,
        Some(Box::new(Moody { is_slow, n_passes: 0 })),
        None,
        None,
        Timer::new(&[4096]),
    )
}

#[test]
fn wants_follow_the_predictor_on_either_thread() {
    for is_slow in [false, true] {
        let driver = driver(mover(), is_slow);
        let seen: Vec<Wants> = (0..5)
            .map(|_| {
                let wants = driver.wants();
                let (phase, timing) = (Phase::Decode, Timing::default());
                driver.observe(&Event::IterationEnd { request: 0, phase, timing });
                driver.catch_up();
                wants
            })
            .collect();
        let ahead = Wants { ahead: true, ..Wants::default() };
        let hidden = Wants { hidden: true, ..Wants::default() };
        let next_token = Wants { next_token: true, ..Wants::default() };
        assert_eq!(seen, [ahead, next_token, ahead, hidden, ahead], "{is_slow}");
    }
}

#[test]
fn predictions_that_the_tier_may_not_hold_are_left_out() {
    let mover = mover();
    let driver = driver(mover.clone(), false);
    let (phase, embedding) = (Phase::Decode, &[][..]);
    driver.observe(&Event::IterationStart { request: 0, phase, token: None, embedding });
    let mut reads = Vec::new();
    while mover.0.can_start() {
        mover.0.start_reads(1, false, &mut reads);
        let (number, ticket) = reads.pop().unwrap();
        assert!(ticket.expert.expert.is_multiple_of(2), "{ticket:?}");
        mover.0.end_read(number, Ok(()));
    }
    assert_eq!(mover.0.counters().n_reads, 2);
}

/// Takes its time for every event, as long as the gate is closed.
struct Stuck {
    gate: Arc<Mutex<()>>,
    heard: Arc<AtomicU64>,
}

impl Predictor for Stuck {
    fn observe(&mut self, _: &Event<'_>) {
        drop(self.gate.lock().unwrap());
        self.heard.fetch_add(1, Ordering::Relaxed);
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clear();
    }

    fn is_slow(&self) -> bool {
        true
    }
}

/// While a search is stuck the layer loop goes on, at once and for ever; what the search was too
/// slow for is counted, and nothing else is lost.
#[test]
fn the_layer_loop_never_waits_for_a_search_and_what_it_misses_is_counted() {
    let (gate, heard) = (Arc::new(Mutex::new(())), Arc::new(AtomicU64::new(0)));
    let stuck = Stuck { gate: gate.clone(), heard: heard.clone() };
    let driver = PolicyDriver::new(mover(), Some(Box::new(stuck)), None, None, Timer::new(&[4096]));
    let n_events = 2000;
    let closed = gate.lock().unwrap();
    let (chosen, probs, hidden): (&[u32], &[f32], &[f32]) = (&[], &[], &[]);
    for _ in 0..n_events {
        let routed = Routed { request: 0, layer: 0, chosen, probs, hidden, ahead: None };
        driver.observe(&Event::Routed(routed));
    }
    // All were told while it heard of none.
    assert_eq!(heard.load(Ordering::Relaxed), 0);
    drop(closed);
    driver.catch_up();
    let mut counters = Counters::default();
    driver.count(&mut counters);
    let heard = heard.load(Ordering::Relaxed);
    assert_eq!(heard + counters.policy_events_dropped, n_events);
    assert!((1..n_events).contains(&heard), "{heard} of {n_events}");
    assert!(0 < counters.policy_loop_ns && counters.policy_loop_ns < counters.policy_ns);
}

/// A splitter plans on the worker's thread, when a request starts and while it runs.
#[test]
fn shares_are_planned_within_a_request() {
    struct Planner {
        n_events: u64,
        planned_after: Arc<Mutex<Vec<u64>>>,
    }

    impl Splitter for Planner {
        fn observe(&mut self, _: &Event<'_>) {
            self.n_events += 1;
        }

        fn is_due(&self) -> bool {
            self.n_events != 3
        }

        fn plan(&mut self, costs: &Costs) -> Option<Vec<LayerShare>> {
            assert_eq!(std::thread::current().name(), Some("policy"));
            assert_eq!(*costs, Costs::LOCKSTEP);
            self.planned_after.lock().unwrap().push(self.n_events);
            None
        }
    }

    let planned_after = Arc::new(Mutex::new(Vec::new()));
    let splitter = Box::new(Planner { n_events: 0, planned_after: planned_after.clone() });
    let timer = Timer::new(&[4096]).in_lockstep();
    let driver = PolicyDriver::new(mover(), None, Some(splitter), None, timer);
    let (request, timing) = (0, Timing::default());
    driver.observe(&Event::RequestStart { request });
    for phase in [Phase::Prompt, Phase::Decode, Phase::Decode, Phase::Decode] {
        driver.observe(&Event::IterationEnd { request, phase, timing });
    }
    driver.observe(&Event::RequestEnd { request });
    driver.catch_up();
    // Not after the prompt, not when it is not due, and not at the end.
    assert_eq!(*planned_after.lock().unwrap(), [1, 4, 5]);
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes into a timespec that is there.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// `cargo test --release --lib policy_driver::tests::cost -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn cost_of_a_token_of_48_layers_of_128_experts() {
    let (n_layers, n_tokens, n_known) = (48, 1050, 1000);
    let shape = Shape::of_model(vec![128; n_layers], 8);
    let value = |seed: usize| (crate::policy::mix(seed as u64) >> 40) as f32 / (1 << 24) as f32;
    let probs: Vec<f32> = (0..1 << 16).map(|i| value(i).powi(12)).collect();
    let probs = |token: usize, layer: usize| {
        let at = (token * 48 + layer) * 31 % (probs.len() - 128);
        &probs[at..at + 128]
    };
    for name in ["map", "eamc", "trajectory"] {
        let plan = TierPlan {
            layers: vec![
                LayerPlan { n_experts: 128, n_own: 128, n_granules: 1, class: 0 };
                n_layers
            ],
            classes: vec![ClassPlan { n_slots: 1000, n_transit: 8, slot_bytes: 4096 }],
            n_staging: 0,
            staging_bytes: 0,
        };
        let tier = Tier::new(plan, Box::new(OnePiece), Box::new(Lru::new(&shape)));
        let spec: PolicySpec = format!("predictor={name}").parse().unwrap();
        let predictor = spec.build(&shape, &Profile::default()).predictor;
        let timer = Timer::new(&vec![4096; n_layers]);
        let driver = PolicyDriver::new(Arc::new(Even(tier)), predictor, None, None, timer);
        let mut spent = Duration::ZERO;
        let mut worker_ns = 0;
        for token in 0..n_tokens {
            if token == n_known {
                (spent, worker_ns) =
                    (Duration::ZERO, driver.shared.worker_ns.load(Ordering::Relaxed));
            }
            let (request, phase, timing) = (0, Phase::Decode, Timing::default());
            let mut tell = |event: Event<'_>| {
                let start = cpu_time();
                driver.observe(&event);
                spent += cpu_time() - start;
                // The worker sleeps before the next event that it predicts from.
                let is_end = matches!(event, Event::IterationEnd { .. });
                if is_end || token >= n_known && ["map", "eamc"].contains(&name) {
                    driver.catch_up();
                }
            };
            let embedding = [probs(token, 0), probs(token, 1)].concat().repeat(8);
            tell(Event::IterationStart { request, phase, token: None, embedding: &embedding });
            for layer in 0..n_layers {
                let probs = probs(token, layer);
                let chosen: Vec<u32> = (0..8).map(|i| (token + 16 * i) as u32 % 128).collect();
                let (layer, chosen, hidden) = (layer as u32, &chosen[..], &[][..]);
                tell(Event::Routed(Routed { request, layer, chosen, probs, hidden, ahead: None }));
            }
            tell(Event::IterationEnd { request, phase, timing });
        }
        let n = (n_tokens - n_known) as u64;
        let worker_us = (driver.shared.worker_ns.load(Ordering::Relaxed) - worker_ns) / n / 1000;
        let loop_us = spent.as_micros() as u64 / n;
        eprintln!("{name}: {loop_us} µs a token of the layer loop's CPU, worker {worker_us} µs");
    }
}

/// With a planner only what there is time for is prefetched, once it is known what a load takes.
#[test]
fn a_planner_limits_prefetches_to_the_time_that_there_is() {
    let mover = mover();
    let tier = &mover.0;
    let shape = Shape { n_granules: vec![1], ..Shape::of_model(vec![4], 2) };
    let moody = Box::new(Moody { is_slow: false, n_passes: 0 });
    let planner = Some(PrefetchPlanner::new(&shape));
    let driver = PolicyDriver::new(mover.clone(), Some(moody), None, planner, Timer::new(&[4096]));
    let end_reads = || {
        let mut reads = Vec::new();
        while tier.can_start() {
            tier.start_reads(1, false, &mut reads);
            reads.drain(..).for_each(|(number, _)| tier.end_read(number, Ok(())));
        }
        tier.counters().n_reads
    };
    // A load is measured, and a token without any time between its layers.
    let mut demand = Acquisition::default();
    demand.start(0, 0, LayerPart::whole(&[3]), Access::Prompt);
    tier.acquire(&mut demand);
    assert_eq!(end_reads(), 1);
    tier.release(&mut demand);
    let (request, phase, timing) = (0, Phase::Decode, Timing::default());
    driver.observe(&Event::IterationEnd { request, phase, timing });
    let routed = || {
        let (chosen, probs, hidden) = (&[1][..], &[][..], &[][..]);
        let routed = Routed { request, layer: 0, chosen, probs, hidden, ahead: None };
        driver.observe(&Event::Routed(routed));
        let mut predicted = PredictedLayers::new();
        driver.predicted(0, &mut predicted);
        (end_reads(), predicted[0].missing.len())
    };
    // Two of what is predicted may be held.
    assert_eq!(routed(), (1, 2));
    driver.set_attention_ns(1e12);
    assert_eq!(routed(), (3, 0));
}
