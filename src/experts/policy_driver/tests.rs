use std::ops::Range;

use super::*;
use crate::experts::layout::piece::Piece;
use crate::experts::tier::{ClassPlan, LayerPlan, Layout, Tier, TierPlan};
use crate::policy::{Expert, Lru, Phase, Shape, Timing};

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
    PolicyDriver::new(mover, Some(Box::new(Moody { is_slow, n_passes: 0 })), None, &[4096])
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
