//! The trajectory predictor: what one token has chosen in all layers tells what the next ones will
//! use of each.
//!
//! The probability of an expert is its rate of use (`rates`) and a linear correction: a map of rank
//! 32 from the token's trajectory, learned while the model runs (`map`, `gain`) and kept in the
//! profile (`persist`). Two estimates come of it: of the next token, for which its number counts as
//! well (`tokens`), and of the tokens behind that one (`horizon`). The first decides what an idle
//! link brings, the second mostly what is evicted.
//!
//! The eviction hears of both by `Event::Expected`: of all layers when a token begins; of a layer
//! as soon as its router has chosen, when the token's later layers are still those of the token
//! before; and of all layers passed four times a token.
//!
//! Prefetch is that of the next layer's router. What this predictor expects of later layers an idle
//! link brings by itself, where the eviction holds it to be worth its room.

mod gain;
mod horizon;
mod learner;
mod map;
mod persist;
mod text;
mod tokens;
mod vector;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;

use super::grid::Grid;
use super::{Event, NextLayer, Phase, Prediction, Predictor, Profile, Routed, Shape, Wants};
use learner::Learner;
use map::Map;
use text::Text;

/// How often while a token goes through the layers the estimates of all that it has come to are
/// updated.
const REFRESHES: usize = 4;

pub struct TrajectoryPredictor {
    learner: Learner,
    texts: BTreeMap<u32, Text>,
    nearest: NextLayer,
    /// Probabilities that the next pass uses an expert, for any of the texts that are decoded.
    used: Vec<f32>, // [cells]
    /// How much more often than of late passes after that one do.
    later: Vec<f32>, // [cells]
    /// Layers of which the last event has changed it.
    changed: Vec<u32>,
    n_passes: u64,
}

impl TrajectoryPredictor {
    /// The profile's section of the map.
    pub const SECTION: &str = "trajectory";

    pub fn new(shape: &Shape) -> TrajectoryPredictor {
        let grid = Grid::new(shape);
        let map = Map::new(grid.n_cells());
        TrajectoryPredictor::with_map(shape, grid, map)
    }

    fn with_map(shape: &Shape, grid: Grid, map: Map) -> TrajectoryPredictor {
        TrajectoryPredictor {
            texts: BTreeMap::new(),
            nearest: NextLayer::new(shape),
            used: vec![0.0; grid.n_cells()],
            later: vec![0.0; grid.n_cells()],
            changed: Vec::new(),
            n_passes: 0,
            learner: Learner::new(grid, map),
        }
    }

    /// With the map that an earlier run has learned. Refuses one of another shape: returns the
    /// reason as a clause, for use after a colon.
    pub fn restore(shape: &Shape, bytes: &[u8]) -> Result<TrajectoryPredictor, String> {
        let grid = Grid::new(shape);
        let map = Map::decode(&grid, bytes)?;
        Ok(TrajectoryPredictor::with_map(shape, grid, map))
    }

    fn begin(&mut self, request: u32, phase: Phase, token: Option<u32>) {
        let learner = &mut self.learner;
        let text = self.texts.entry(request).or_insert_with(|| learner.text());
        self.n_passes += 1;
        text.last_pass = self.n_passes;
        if phase == Phase::Decode {
            learner.begin_token(text, token);
            if learner.expect_next(text) {
                self.tell(0..self.learner.grid.moe().len());
            }
        }
    }

    fn routed(&mut self, routed: &Routed<'_>) {
        let Routed { request, layer, chosen, probs, .. } = *routed;
        let learner = &mut self.learner;
        let text = self.texts.entry(request).or_insert_with(|| learner.text());
        learner.routed(text, layer, chosen, probs);
        if text.last.is_none() {
            return;
        }
        let (place, n) = (learner.grid.place(layer), learner.grid.moe().len());
        let is_refresh = place * REFRESHES / n < (place + 1) * REFRESHES / n;
        let first = if is_refresh { 0 } else { place };
        learner.expect_behind(text, first..place + 1);
        self.tell(first..place + 1);
    }

    /// Updates what the next pass, and those after it, are expected to use of some places.
    fn tell(&mut self, places: Range<usize>) {
        let since = self.active_since();
        for place in places {
            let layer = self.learner.grid.moe()[place];
            self.changed.push(layer);
            let row = self.learner.grid.row(layer);
            let is_expected = |text: &&Text| text.is_expected(since);
            let texts = self.texts.values().filter(is_expected);
            union(
                &mut self.used[row.clone()],
                texts.clone().map(|text| &text.expected[row.clone()]),
            );
            mean(
                &mut self.later[row.clone()],
                texts.map(|text| &text.horizon.changes[row.clone()]),
            );
        }
    }

    /// A text whose last pass is before this one has paused: it is not part of the next pass.
    fn active_since(&self) -> u64 {
        self.n_passes.saturating_sub(2 * self.texts.len() as u64)
    }

    fn n_active(&self) -> usize {
        let since = self.active_since();
        self.texts.values().filter(|text| text.last_pass >= since).count()
    }

    fn end_pass(&mut self, request: u32, phase: Phase) {
        let Some(text) = self.texts.get_mut(&request) else { return };
        let is_known = text.last.is_some() && phase == Phase::Decode;
        match phase {
            Phase::Decode => self.learner.end_token(text),
            Phase::Prompt => self.learner.end_prompt(text),
        }
        text.horizon.expect(&self.learner.map);
        if !is_known && text.last.is_some() {
            let all = 0..self.learner.grid.moe().len();
            self.learner.expect_behind(text, all.clone());
            self.tell(all);
        }
    }
}

/// The probability that any of some events comes, of which each has these.
fn union<'a>(out: &mut [f32], events: impl Iterator<Item = &'a [f32]>) {
    out.fill(1.0);
    for p in events {
        out.iter_mut().zip(p).for_each(|(none, p)| *none *= 1.0 - p);
    }
    out.iter_mut().for_each(|none| *none = 1.0 - *none);
}

fn mean<'a>(out: &mut [f32], rows: impl Iterator<Item = &'a [f32]> + Clone) {
    let part = 1.0 / rows.clone().count().max(1) as f32;
    out.fill(0.0);
    for row in rows {
        out.iter_mut().zip(row).for_each(|(mean, x)| *mean += part * x);
    }
}

impl Predictor for TrajectoryPredictor {
    fn observe(&mut self, event: &Event<'_>) {
        self.nearest.observe(event);
        self.changed.clear();
        match *event {
            Event::RequestStart { request } | Event::RequestEnd { request } => {
                self.texts.remove(&request);
            }
            Event::IterationStart { request, phase, token, .. } => {
                self.begin(request, phase, token);
            }
            Event::Routed(ref routed) => self.routed(routed),
            Event::PromptRouted(ref routed) => {
                let learner = &self.learner;
                let text = self.texts.entry(routed.request).or_insert_with(|| learner.text());
                text.put_prompt(learner.grid.place(routed.layer), routed.chosen, routed.k());
            }
            Event::IterationEnd { request, phase, .. } => self.end_pass(request, phase),
            Event::NextToken { .. } | Event::Predicted { .. } | Event::Expected { .. } => {}
        }
    }

    fn predict(&mut self, out: &mut Vec<Prediction>) {
        self.nearest.predict(out);
    }

    fn wants(&self) -> Wants {
        self.nearest.wants()
    }

    fn emit(&self, listener: &mut dyn FnMut(&Event<'_>)) {
        // Of several texts in a pass, the look-ahead is one's alone.
        if self.n_active() == 1 {
            self.nearest.emit(listener);
        }
        for layer in &self.changed {
            let row = self.learner.grid.row(*layer);
            let (used, later) = (&self.used[row.clone()], &self.later[row]);
            listener(&Event::Expected { layer: *layer, used, later });
        }
    }

    fn save(&self, profile: &mut Profile) {
        let Learner { grid, map, .. } = &self.learner;
        if map.n_tokens > 0 {
            profile.set(TrajectoryPredictor::SECTION, map.encode(grid));
        }
    }
}
