//! The trajectory search (§4.2.2), grown layer by layer: dot products and norms of the prefixes
//! are sums over layers, so each layer adds its own to what there was. In a large store, maps that
//! are far from the trajectory after some layers are not compared with the others (`compared`).

use super::compared::Compared;
use super::layers::MoeLayers;
use super::row::Query;
use super::store::MapStore;

/// A stored iteration and how similar it is, −1…1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Match {
    pub index: usize,
    pub score: f32,
}

/// Scores that differ by less are equal but for rounding.
const ROUNDING: f32 = 1e-6;

/// After so many layers each, half of the compared maps are left out.
const LAYERS_OF_A_ROUND: usize = 2;

/// The highest, of equals the first.
pub(super) fn best(scores: &[f32]) -> Option<Match> {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let index = scores.iter().position(|score| *score >= max - ROUNDING)?;
    Some(Match { index, score: max.clamp(-1.0, 1.0) })
}

/// The probabilities of an iteration's routers so far, compared with the same layers of the stored
/// maps. A layer without an event counts on neither side.
#[derive(Clone, Debug)]
pub struct Trajectory {
    /// Probabilities of all experts of all MoE layers; those of a layer add up to 1.
    probs: Vec<f32>,
    /// By ordinal: whether the layer was heard of.
    seen: Vec<bool>,
    norm2: f32,
    /// Maps in the store.
    n_maps: usize,
    compared: Compared,
    query: Query,
}

impl Trajectory {
    /// An empty trajectory, for comparison with this store's maps only.
    pub fn new(store: &MapStore) -> Self {
        let mut trajectory = Self {
            probs: vec![0.0; store.layers.n_all_experts()],
            seen: vec![false; store.layers.len()],
            norm2: 0.0,
            n_maps: 0,
            compared: Compared::default(),
            query: Query::default(),
        };
        trajectory.restart(store);
        trajectory
    }

    pub fn restart(&mut self, store: &MapStore) {
        self.seen.fill(false);
        self.norm2 = 0.0;
        self.n_maps = store.len();
        self.compared.restart(self.n_maps);
    }

    /// The router of a layer has spoken: `probs` of all its experts, on any scale, as routers by
    /// sigmoid do not add up to 1. Layers come in ascending order. What is no layer of experts, or
    /// has no probabilities, is as if it had not been said.
    pub fn push(&mut self, store: &MapStore, layer: u32, probs: &[f32]) {
        assert_eq!(self.n_maps, store.len(), "the store has changed behind the trajectory");
        let Some(ordinal) = store.layers.ordinal(layer) else { return };
        let later = &self.seen[ordinal..];
        assert!(!later.contains(&true), "a trajectory goes through the layers in order");
        let row = &mut self.probs[store.layers.range(ordinal)];
        if !normalise(probs, row) {
            return;
        }
        self.seen[ordinal] = true;
        self.norm2 += row.iter().map(|p| p * p).sum::<f32>();
        self.query.set(row);
        self.compared.add_layer(&store.rows[ordinal], &self.query);
        if self.seen.iter().filter(|seen| **seen).count().is_multiple_of(LAYERS_OF_A_ROUND) {
            self.compared.halve(self.norm2);
        }
    }

    /// The store has put something into this place.
    pub fn refresh(&mut self, store: &MapStore, index: usize) {
        let is_new = index == self.n_maps;
        self.n_maps = store.len();
        let Some(sums) = self.compared.reset(index, is_new) else { return };
        for ordinal in (0..self.seen.len()).filter(|&ordinal| self.seen[ordinal]) {
            let (head, ids, levels) = store.rows[ordinal].row(index);
            self.query.set(&self.probs[store.layers.range(ordinal)]);
            sums.dot += self.query.dot(head, ids, levels);
            sums.norm2 += head.norm2;
        }
    }

    /// Replaces `out` by the cosine similarity to each map that is compared (Eq. 5), as far as the
    /// trajectory goes; 0 of one that has not begun.
    pub(super) fn scores(&self, out: &mut Vec<f32>) {
        self.compared.scores(self.norm2, out);
    }

    /// Places of the maps that are compared, ascending.
    pub(super) fn compared(&self) -> &[u32] {
        self.compared.indices()
    }

    /// The stored map with the highest score. `None` if there is nothing to compare.
    pub fn best(&self) -> Option<Match> {
        self.best_in(&mut Vec::new())
    }

    /// `scores` is room for them.
    pub(super) fn best_in(&self, scores: &mut Vec<f32>) -> Option<Match> {
        if self.norm2 == 0.0 {
            return None;
        }
        self.scores(scores);
        let Match { index, score } = best(scores)?;
        Some(Match { index: self.compared()[index] as usize, score })
    }

    /// Whether all layers were heard of.
    pub fn is_complete(&self) -> bool {
        !self.seen.is_empty() && !self.seen.contains(&false)
    }

    pub(super) fn row(&self, layers: &MoeLayers, ordinal: usize) -> &[f32] {
        &self.probs[layers.range(ordinal)]
    }
}

/// Writes `probs` to `out` as a distribution. False if they are none: of another number, not
/// finite, negative or all 0.
fn normalise(probs: &[f32], out: &mut [f32]) -> bool {
    let sum: f32 = probs.iter().sum();
    let valid =
        probs.len() == out.len() && sum > 0.0 && sum.is_finite() && probs.iter().all(|p| *p >= 0.0);
    if valid {
        out.iter_mut().zip(probs).for_each(|(to, p)| *to = p / sum);
    }
    valid
}
