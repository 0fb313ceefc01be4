//! The predictor: events in, searches, predictions out.

use super::search::Match;
use super::select::{prompt_floor, select, threshold};
use super::store::MapStore;
use super::timeline::Timeline;
use crate::policy::{Event, Expert, PerExpert, Phase, Prediction, Predictor, Profile, Shape};
use std::ops::Range;

/// Requests that are followed at a time.
const MAX_TIMELINES: usize = 64;

/// Parts that can be switched off are those of the paper's ablation (§6.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FineMoeOptions {
    /// C: expert maps that are kept.
    pub capacity: usize,
    /// d: the prefetch distance, from 1 to the number of MoE layers.
    pub distance: usize,
    /// Whether embeddings predict the first d layers; otherwise nothing does.
    pub use_semantic: bool,
    /// Whether similarity says how many experts to prefetch; otherwise K.
    pub use_delta: bool,
}

impl Default for FineMoeOptions {
    /// The options of the paper's evaluation (§6.1).
    fn default() -> Self {
        Self { capacity: 1000, distance: 3, use_semantic: true, use_delta: true }
    }
}

#[derive(Clone, Debug)]
pub struct FineMoe {
    options: FineMoeOptions,
    k: usize,
    store: MapStore,
    timelines: Vec<Timeline>,
    n_events: u64,
    /// Ordinals that the last event has searched for.
    told: Range<usize>,
    /// Their probabilities, [all experts]; other places are stale.
    merged_probs: Vec<f32>,
    /// Room for similarities.
    scores: Vec<f32>,
    /// All false between calls.
    predicted: PerExpert<bool>,
}

impl FineMoe {
    /// Section of the profile that the store is saved to.
    pub const SECTION: &'static str = "finemoe.store";

    pub fn new(shape: &Shape, options: FineMoeOptions) -> Self {
        Self::with_store(shape, options, MapStore::new(shape, options.capacity, options.distance))
    }

    /// Restores the section that `save` has written. Returns the reason as a clause, for use after
    /// a colon.
    pub fn restore(shape: &Shape, options: FineMoeOptions, bytes: &[u8]) -> Result<Self, String> {
        let store = MapStore::restore(shape, options.capacity, options.distance, bytes)?;
        Ok(Self::with_store(shape, options, store))
    }

    fn with_store(shape: &Shape, options: FineMoeOptions, store: MapStore) -> Self {
        Self {
            options,
            k: shape.k,
            merged_probs: vec![0.0; store.layers.n_all_experts()],
            store,
            timelines: Vec::new(),
            n_events: 0,
            told: 0..0,
            scores: Vec::new(),
            predicted: PerExpert::new(shape),
        }
    }

    pub fn store(&self) -> &MapStore {
        &self.store
    }

    /// The index of the request's timeline. Makes one if there is none, and replaces the one
    /// without events for the longest time if there are too many.
    fn timeline(&mut self, request: u32) -> usize {
        let known = self.timelines.iter().position(|timeline| timeline.request == request);
        let at = known.unwrap_or_else(|| {
            if self.timelines.len() < MAX_TIMELINES {
                self.timelines.push(Timeline::new(&self.store, request));
                return self.timelines.len() - 1;
            }
            let silent = self.timelines.iter().enumerate().min_by_key(|(_, t)| t.last_event);
            let at = silent.expect("there are some").0;
            self.timelines[at].reassign(request);
            at
        });
        self.timelines[at].last_event = self.n_events;
        at
    }

    /// The request has nothing under way; what it has becomes another's when there is need.
    fn stop(&mut self, request: u32) {
        if let Some(timeline) = self.timelines.iter_mut().find(|t| t.request == request) {
            timeline.stop();
            timeline.last_event = 0;
        }
    }

    fn start(&mut self, request: u32, phase: Phase, embedding: &[f32]) {
        let at = self.timeline(request);
        let timeline = &mut self.timelines[at];
        timeline.start(&self.store, Some(embedding));
        if self.options.use_semantic {
            timeline.found = self.store.nearest_sketch(&timeline.sketch, &mut self.scores);
            let found = timeline.found;
            self.predict_layers(at, 0..self.store.distance, found);
            self.tell(0..self.store.distance, phase, found);
        }
    }

    /// A router has spoken, for so many tokens of a prompt if it is one.
    fn step(&mut self, request: u32, n_prompt: Option<u32>, layer: u32, probs: &[f32]) {
        let Some(ordinal) = self.store.layers.ordinal(layer) else { return };
        let at = self.timeline(request);
        let timeline = &mut self.timelines[at];
        if !timeline.active || ordinal < timeline.reached {
            timeline.start(&self.store, None);
        }
        timeline.trajectory.push(&self.store, layer, probs);
        timeline.reached = ordinal + 1;
        let (reached, asked) = (timeline.reached, timeline.asked);
        if let Some(n_tokens) = n_prompt.filter(|_| timeline.floor == f32::INFINITY) {
            // The first layer that tells how long the prompt is.
            timeline.floor = prompt_floor(n_tokens, self.k);
            let found = timeline.found;
            self.predict_layers(at, reached..asked, found);
        }
        let end = (reached + self.store.distance).min(self.store.layers.len());
        let targets = asked.max(reached)..end;
        if !targets.is_empty() {
            let timeline = &mut self.timelines[at];
            timeline.asked = end;
            let found = timeline.trajectory.best_in(&mut self.scores);
            self.predict_layers(at, targets.clone(), found);
            let phase = n_prompt.map_or(Phase::Decode, |_| Phase::Prompt);
            self.tell(targets, phase, found);
        }
    }

    /// Takes these layers of the found map as the timeline's prediction.
    fn predict_layers(&mut self, at: usize, targets: Range<usize>, found: Option<Match>) {
        let Some(Match { index, score }) = found else { return };
        let threshold = if self.options.use_delta { threshold(score) } else { 0.0 };
        let Timeline { floor, targets: all, .. } = &mut self.timelines[at];
        for ordinal in targets {
            let target = &mut all[ordinal];
            let ranked = self.store.ranked(index, ordinal);
            select(ranked, threshold, *floor, self.k, &mut target.picks);
            self.store.fill(index, ordinal, &mut target.probs);
        }
    }

    /// Lets the eviction hear of layers that were found. Prompts evict nothing.
    fn tell(&mut self, targets: Range<usize>, phase: Phase, found: Option<Match>) {
        if phase == Phase::Decode && found.is_some() {
            targets.clone().for_each(|ordinal| self.merge(ordinal));
            self.told = targets;
        }
    }

    /// An expert of a layer that several requests wait for is as probable as for the one that most
    /// probably uses it.
    fn merge(&mut self, ordinal: usize) {
        let merged = &mut self.merged_probs[self.store.layers.range(ordinal)];
        merged.fill(0.0);
        for target in self.timelines.iter().filter_map(|timeline| timeline.awaited(ordinal)) {
            merged.iter_mut().zip(&target.probs).for_each(|(max, p)| *max = p.max(*max));
        }
    }

    /// The store learns a whole iteration, and what is under way compares itself with it.
    fn end(&mut self, request: u32) {
        let Some(at) = self.timelines.iter().position(|t| t.request == request) else { return };
        let timeline = &mut self.timelines[at];
        let whole = timeline.active && timeline.embedded && timeline.trajectory.is_complete();
        timeline.stop();
        if whole {
            let index = self.store.insert_sketch(&timeline.sketch, &timeline.trajectory);
            let under_way = self.timelines.iter_mut().filter(|timeline| timeline.active);
            under_way.for_each(|timeline| timeline.trajectory.refresh(&self.store, index));
        }
    }
}

impl Predictor for FineMoe {
    fn observe(&mut self, event: &Event<'_>) {
        self.told = 0..0;
        self.n_events += 1;
        match *event {
            Event::RequestStart { request } | Event::RequestEnd { request } => self.stop(request),
            Event::IterationStart { request, phase, embedding, .. } => {
                self.start(request, phase, embedding);
            }
            Event::Routed(routed) => {
                self.step(routed.request, None, routed.layer, routed.probs);
            }
            Event::PromptRouted(routed) => {
                self.step(routed.request, Some(routed.n_tokens), routed.layer, routed.probs);
            }
            Event::IterationEnd { request, .. } => self.end(request),
            Event::NextToken { .. } | Event::Predicted { .. } | Event::Expected { .. } => {}
        }
    }

    /// By p / (l − l_now) (§4.5); of several requests that want an expert the most urgent counts.
    fn predict(&mut self, out: &mut Vec<Prediction>) {
        out.clear();
        for timeline in &self.timelines {
            for ordinal in timeline.reached..self.store.layers.len() {
                let Some(target) = timeline.awaited(ordinal) else { continue };
                let layer = self.store.layers.number(ordinal);
                let distance = (ordinal + 1 - timeline.reached) as f32;
                out.extend(target.picks.iter().map(|&(expert, p)| Prediction {
                    expert: Expert { layer, expert },
                    priority: p / distance,
                }));
            }
        }
        out.sort_unstable_by(|a, b| {
            b.priority.total_cmp(&a.priority).then(a.expert.cmp(&b.expert))
        });
        out.retain(|p| !std::mem::replace(&mut self.predicted[p.expert], true));
        out.iter().for_each(|p| self.predicted[p.expert] = false);
    }

    /// A search reads a layer of all maps: some tens of microseconds for a thousand of them.
    fn is_slow(&self) -> bool {
        true
    }

    fn predicts_prompts(&self) -> bool {
        true
    }

    fn emit(&self, listener: &mut dyn FnMut(&Event<'_>)) {
        for ordinal in self.told.clone() {
            let layer = self.store.layers.number(ordinal);
            let probs = &self.merged_probs[self.store.layers.range(ordinal)];
            listener(&Event::Predicted { layer, probs });
        }
    }

    fn verdict(&self) -> Option<String> {
        let (distance, n_maps) = (self.store.distance, self.store.len());
        Some(format!("FineMoE: prefetch distance {distance}, {n_maps} expert maps"))
    }

    fn save(&self, profile: &mut Profile) {
        profile.set(Self::SECTION, self.store.save());
    }
}
