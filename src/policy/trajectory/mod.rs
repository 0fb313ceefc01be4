//! The trajectory predictor: what one token has chosen in all layers tells what the next one will
//! use of each. What a token still needs of later layers was mostly safe in the cache anyway, so
//! that knowing it gains little; to know the next token is what pays.
//!
//! The probability of an expert is its rate of use (`rates`) and a linear correction: a map of rank
//! 32 from the token's trajectory, learned while the model runs (`map`, `gain`) and kept in the
//! profile (`persist`). The eviction hears of it by `Event::Expected`: a layer's as soon as its
//! router has chosen, when the token's later layers are still those of the token before, and those
//! of all layers passed four times a token.
//!
//! Prefetch is that of the next layer's router. What this predictor expects of later layers an idle
//! link brings by itself, where the eviction holds it to be worth its room.

mod gain;
mod learner;
mod map;
mod persist;
mod text;
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
            changed: Vec::new(),
            n_passes: 0,
            learner: Learner::new(grid, shape.k, map),
        }
    }

    /// With the map that an earlier run has learned. Refuses one of another shape: returns the
    /// reason as a clause, for use after a colon.
    pub fn restore(shape: &Shape, bytes: &[u8]) -> Result<TrajectoryPredictor, String> {
        let grid = Grid::new(shape);
        let map = Map::decode(&grid, bytes)?;
        Ok(TrajectoryPredictor::with_map(shape, grid, map))
    }

    fn routed(&mut self, routed: &Routed<'_>) {
        let Routed { request, layer, chosen, probs, .. } = *routed;
        let learner = &mut self.learner;
        let text = self.texts.entry(request).or_insert_with(|| learner.text());
        learner.routed(text, layer, chosen, probs);
        if text.lesson.is_none() {
            return;
        }
        let (place, n) = (learner.grid.place(layer), learner.grid.moe().len());
        let is_refresh = place * REFRESHES / n < (place + 1) * REFRESHES / n;
        let first = if is_refresh { 0 } else { place };
        self.expect(request, first..place + 1);
    }

    /// Updates the experts of some layers that a text's next token is expected to use, and those of
    /// the next pass.
    fn expect(&mut self, request: u32, places: Range<usize>) {
        let Some(text) = self.texts.get_mut(&request) else { return };
        for place in places {
            let layer = self.learner.grid.moe()[place];
            self.learner.expect(text, layer);
            self.changed.push(layer);
        }
        let since = self.active_since();
        for layer in &self.changed {
            let row = self.learner.grid.row(*layer);
            let used = &mut self.used[row.clone()];
            used.fill(1.0);
            let texts = self.texts.values().filter(|t| t.lesson.is_some() && t.last_pass >= since);
            for text in texts {
                let expected = &text.expected[row.clone()];
                used.iter_mut().zip(expected).for_each(|(unused, p)| *unused *= 1.0 - p);
            }
            used.iter_mut().for_each(|unused| *unused = 1.0 - *unused);
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
        let is_known = text.lesson.is_some() && phase == Phase::Decode;
        match phase {
            Phase::Decode => self.learner.end_token(text),
            Phase::Prompt => self.learner.end_prompt(text),
        }
        if !is_known {
            self.expect(request, 0..self.learner.grid.moe().len());
        }
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
            Event::IterationStart { request, .. } => {
                let learner = &self.learner;
                let text = self.texts.entry(request).or_insert_with(|| learner.text());
                self.n_passes += 1;
                text.last_pass = self.n_passes;
            }
            Event::Routed(ref routed) => self.routed(routed),
            Event::PromptRouted(ref routed) => {
                let (learner, k) = (&self.learner, self.learner.k());
                let text = self.texts.entry(routed.request).or_insert_with(|| learner.text());
                text.put_prompt(learner.grid.place(routed.layer), routed.chosen, k);
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
            let used = &self.used[self.learner.grid.row(*layer)];
            listener(&Event::Expected { layer: *layer, used });
        }
    }

    fn save(&self, profile: &mut Profile) {
        let Learner { grid, map, .. } = &self.learner;
        if map.n_tokens > 0 {
            profile.set(TrajectoryPredictor::SECTION, map.encode(grid));
        }
    }
}
