use std::ops::Range;

use super::*;
use crate::experts::acquisition::{Access, Acquisition, LayerPart};
use crate::experts::layout::piece::Piece;
use crate::experts::tier::{ClassPlan, LayerPlan, Layout, Tier, TierPlan};
use crate::policy::{Expert, Lru, Phase, Routed, Shape, Timing};

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
        Wants { ahead: self.n_passes.is_multiple_of(2), hidden: self.n_passes == 3 }
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
    PolicyDriver::new(mover, Some(Box::new(Moody { is_slow, n_passes: 0 })), None, None, &[4096])
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
        let wants = |ahead, hidden| Wants { ahead, hidden };
        let expected = [(true, false), (false, false), (true, false), (false, true), (true, false)];
        assert_eq!(seen, expected.map(|(ahead, hidden)| wants(ahead, hidden)), "{is_slow}");
    }
}

#[test]
fn predictions_that_the_tier_may_not_hold_are_left_out() {
    let mover = mover();
    let driver = driver(mover.clone(), false);
    let (phase, embedding) = (Phase::Decode, &[][..]);
    driver.observe(&Event::IterationStart { request: 0, phase, embedding });
    let mut reads = Vec::new();
    while mover.0.can_start() {
        mover.0.start_reads(1, false, &mut reads);
        let (number, ticket) = reads.pop().unwrap();
        assert!(ticket.expert.expert.is_multiple_of(2), "{ticket:?}");
        mover.0.end_read(number, Ok(()));
    }
    assert_eq!(mover.0.counters().n_reads, 2);
}

/// With a planner only what there is time for is prefetched, once it is known what a load takes.
#[test]
fn a_planner_limits_prefetches_to_the_time_that_there_is() {
    let mover = mover();
    let tier = &mover.0;
    let shape = Shape { n_granules: vec![1], ..Shape::of_model(vec![4], 2) };
    let moody = Box::new(Moody { is_slow: false, n_passes: 0 });
    let planner = Some(PrefetchPlanner::new(&shape));
    let driver = PolicyDriver::new(mover.clone(), Some(moody), None, planner, &[4096]);
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
