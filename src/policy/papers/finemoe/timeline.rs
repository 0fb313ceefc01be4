//! One request's iteration as the predictor follows it.

use super::search::{Match, Trajectory};
use super::select::Pick;
use super::sketch::Sketch;
use super::store::MapStore;

#[derive(Clone, Debug)]
pub(super) struct Timeline {
    pub request: u32,
    /// Number of the last event that concerned it: the timeline that is longest silent makes room.
    pub last_event: u64,
    /// Whether an iteration is under way.
    pub active: bool,
    /// Whether its beginning was heard of: without an embedding it cannot be stored.
    pub embedded: bool,
    /// The probability from which on an expert is prefetched in any case.
    pub floor: f32,
    pub sketch: Sketch,
    /// The result of the semantic search.
    pub found: Option<Match>,
    pub trajectory: Trajectory,
    /// Ordinals below are past; l_now is the last of them.
    pub reached: usize,
    /// Trajectories have been asked about layers below: those up to d are not their business.
    pub asked: usize,
    /// By ordinal. Of layers below `reached` they are past.
    pub targets: Vec<Target>,
}

/// A layer that was searched for.
#[derive(Clone, Debug, Default)]
pub(super) struct Target {
    /// Experts to prefetch, with their probabilities; empty if the search found nothing.
    pub picks: Vec<Pick>,
    /// Probabilities of all experts of the layer.
    pub probs: Vec<f32>,
}

impl Timeline {
    pub fn new(store: &MapStore, request: u32) -> Self {
        let targets = (0..store.layers.len()).map(|ordinal| Target {
            picks: Vec::new(),
            probs: vec![0.0; store.layers.n_experts(ordinal)],
        });
        Self {
            request,
            last_event: 0,
            active: false,
            embedded: false,
            floor: f32::INFINITY,
            sketch: Sketch::default(),
            found: None,
            trajectory: Trajectory::new(store),
            reached: 0,
            asked: 0,
            targets: targets.collect(),
        }
    }

    /// Goes over to another request.
    pub fn reassign(&mut self, request: u32) {
        self.request = request;
        self.stop();
    }

    /// An iteration begins; `None` if its beginning was missed.
    pub fn start(&mut self, store: &MapStore, embedding: Option<&[f32]>) {
        self.stop();
        self.active = true;
        self.embedded = embedding.is_some();
        self.floor = f32::INFINITY;
        self.found = None;
        if let Some(embedding) = embedding {
            self.sketch.set(embedding);
        }
        self.trajectory.restart(store);
        self.reached = 0;
        self.asked = store.distance;
    }

    /// Nothing of the iteration is of any use any more.
    pub fn stop(&mut self) {
        self.active = false;
        self.targets.iter_mut().for_each(|target| target.picks.clear());
    }

    /// The prediction for a layer, if there is one and the layer is still to come.
    pub fn awaited(&self, ordinal: usize) -> Option<&Target> {
        let target = &self.targets[ordinal];
        let is_to_come = self.active && ordinal >= self.reached;
        (is_to_come && !target.picks.is_empty()).then_some(target)
    }
}
