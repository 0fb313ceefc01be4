//! The Expert Map Store (§4.4): embeddings and expert maps of past iterations, the most different
//! ones. Layers lie one after another and within a layer all maps side by side, because a search
//! reads one layer of all maps.
//!
//! A map of 48 layers of 128 experts takes 5,700 bytes with its embedding, so 32K of them take
//! 187 MB.

use super::layers::MoeLayers;
use super::row::{Encoder, Head, KEPT, ranked};
use super::search::{Match, Trajectory, best};
use super::sketch::{Sketch, Sketches};
use crate::policy::Shape;

#[derive(Clone, Debug)]
pub struct MapStore {
    pub(super) layers: MoeLayers,
    pub(super) capacity: usize,
    /// d
    pub(super) distance: usize,
    pub(super) n_maps: usize,
    pub(super) sketches: Sketches,
    /// By ordinal.
    pub(super) rows: Vec<Rows>,
    encoder: Encoder,
}

/// One layer of all maps.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    pub n_experts: usize,
    /// Experts that a row keeps one by one.
    pub kept: usize,
    /// [n]
    pub heads: Vec<Head>,
    /// [n, kept]
    pub ids: Vec<u16>,
    /// [n, kept]
    pub levels: Vec<u8>,
}

impl Rows {
    fn with_capacity(n: usize, n_experts: usize, k: usize) -> Self {
        let kept = KEPT.max(k).min(n_experts);
        Self {
            n_experts,
            kept,
            heads: Vec::with_capacity(n),
            ids: Vec::with_capacity(n * kept),
            levels: Vec::with_capacity(n * kept),
        }
    }

    fn put(&mut self, at: usize, probs: &[f32], encoder: &mut Encoder) {
        if at == self.heads.len() {
            self.heads.push(Head::default());
            self.ids.resize((at + 1) * self.kept, 0);
            self.levels.resize((at + 1) * self.kept, 0);
        }
        let ids = &mut self.ids[at * self.kept..][..self.kept];
        let levels = &mut self.levels[at * self.kept..][..self.kept];
        self.heads[at] = encoder.encode(probs, ids, levels);
    }

    pub fn row(&self, at: usize) -> (Head, &[u16], &[u8]) {
        let range = at * self.kept..(at + 1) * self.kept;
        (self.heads[at], &self.ids[range.clone()], &self.levels[range])
    }

    fn bytes(&self) -> usize {
        self.heads.capacity() * size_of::<Head>()
            + self.ids.capacity() * size_of::<u16>()
            + self.levels.capacity()
    }
}

impl MapStore {
    /// Room for `capacity` maps (C), at least one; `distance` (d) says how much embeddings and how
    /// much trajectories count when one has to go.
    pub fn new(shape: &Shape, capacity: usize, distance: usize) -> Self {
        let layers = MoeLayers::new(shape);
        let capacity = capacity.max(1);
        let rows = (0..layers.len())
            .map(|ordinal| Rows::with_capacity(capacity, layers.n_experts(ordinal), shape.k));
        Self {
            rows: rows.collect(),
            sketches: Sketches::with_capacity(capacity),
            distance: distance.clamp(1, layers.len().max(1)),
            layers,
            capacity,
            n_maps: 0,
            encoder: Encoder::default(),
        }
    }

    /// Maps that are stored.
    pub fn len(&self) -> usize {
        self.n_maps
    }

    pub fn is_empty(&self) -> bool {
        self.n_maps == 0
    }

    /// Memory that maps and embeddings have, room for those to come included.
    pub fn bytes(&self) -> usize {
        self.sketches.bytes() + self.rows.iter().map(Rows::bytes).sum::<usize>()
    }

    /// The semantic search (§4.2.1): the stored iteration whose embedding is the most similar.
    pub fn nearest(&self, embedding: &[f32]) -> Option<Match> {
        let mut sketch = Sketch::default();
        sketch.set(embedding);
        self.nearest_sketch(&sketch, &mut Vec::new())
    }

    /// `scores` is room for them.
    pub(super) fn nearest_sketch(&self, sketch: &Sketch, scores: &mut Vec<f32>) -> Option<Match> {
        if sketch.is_zero() {
            return None;
        }
        self.sketches.scores(sketch, scores);
        best(scores)
    }

    /// Stores an iteration, of which the trajectory must have all layers. When the store is full
    /// it takes the place of the one to which it has the highest redundancy score (§4.4):
    /// RDY = d/L · semantic + (L − d)/L · trajectory similarity. Returns its place: a trajectory
    /// that goes on must hear of it (`Trajectory::refresh`).
    pub fn insert(&mut self, embedding: &[f32], trajectory: &Trajectory) -> usize {
        let mut sketch = Sketch::default();
        sketch.set(embedding);
        self.insert_sketch(&sketch, trajectory)
    }

    pub(super) fn insert_sketch(&mut self, sketch: &Sketch, trajectory: &Trajectory) -> usize {
        assert!(trajectory.is_complete(), "an expert map has all layers");
        let at = if self.n_maps < self.capacity {
            self.n_maps += 1;
            self.n_maps - 1
        } else {
            self.most_redundant(sketch, trajectory)
        };
        self.sketches.put(at, sketch);
        for (ordinal, rows) in self.rows.iter_mut().enumerate() {
            rows.put(at, trajectory.row(&self.layers, ordinal), &mut self.encoder);
        }
        at
    }

    /// Among those that the trajectory was compared with to the end.
    fn most_redundant(&self, sketch: &Sketch, trajectory: &Trajectory) -> usize {
        let mut scores = Vec::new();
        trajectory.scores(&mut scores);
        let share = self.distance as f32 / self.layers.len() as f32;
        for (score, index) in scores.iter_mut().zip(trajectory.compared()) {
            let semantic = self.sketches.score(*index as usize, sketch);
            *score = share * semantic + (1.0 - share) * *score;
        }
        let at = best(&scores).expect("a full store is not empty").index;
        trajectory.compared()[at] as usize
    }

    /// A layer of a stored map: experts with their probabilities, most probable first.
    pub(super) fn ranked(&self, index: usize, ordinal: usize) -> impl Iterator<Item = (u32, f32)> {
        let rows = &self.rows[ordinal];
        let (head, ids, levels) = rows.row(index);
        ranked(head, ids, levels, rows.n_experts)
    }

    /// A layer of a stored map by its number in the model; what the compression has made of it.
    /// Replaces `out`; nothing if that layer has no experts.
    pub fn probs(&self, index: usize, layer: u32, out: &mut Vec<f32>) {
        out.clear();
        let Some(ordinal) = self.layers.ordinal(layer) else { return };
        out.resize(self.layers.n_experts(ordinal), 0.0);
        self.fill(index, ordinal, out);
    }

    /// `out` has a place for each expert of the layer.
    pub(super) fn fill(&self, index: usize, ordinal: usize, out: &mut [f32]) {
        let (head, ids, levels) = self.rows[ordinal].row(index);
        out.fill(head.rest);
        for (&id, &level) in ids.iter().zip(levels) {
            out[usize::from(id)] = head.p(level);
        }
    }
}
