//! The trajectory search (§4.2.2), grown layer by layer: dot products and norms of the prefixes
//! are sums over layers, so each layer adds its own to what there was.

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
    /// By stored map: dot product over the layers that were seen.
    dots: Vec<f32>,
    /// By stored map: squared norm of those layers.
    norms2: Vec<f32>,
    query: Query,
}

impl Trajectory {
    /// An empty trajectory, for comparison with this store's maps only.
    pub fn new(store: &MapStore) -> Self {
        let mut trajectory = Self {
            probs: vec![0.0; store.layers.n_all_experts()],
            seen: vec![false; store.layers.len()],
            norm2: 0.0,
            dots: Vec::with_capacity(store.capacity),
            norms2: Vec::with_capacity(store.capacity),
            query: Query::default(),
        };
        trajectory.restart(store);
        trajectory
    }

    pub fn restart(&mut self, store: &MapStore) {
        self.seen.fill(false);
        self.norm2 = 0.0;
        for sums in [&mut self.dots, &mut self.norms2] {
            sums.clear();
            sums.resize(store.len(), 0.0);
        }
    }

    /// The router of a layer has spoken: `probs` of all its experts, on any scale, as routers by
    /// sigmoid do not add up to 1. Layers come in ascending order. What is no layer of experts, or
    /// has no probabilities, is as if it had not been said.
    pub fn push(&mut self, store: &MapStore, layer: u32, probs: &[f32]) {
        assert_eq!(self.dots.len(), store.len(), "the store has changed behind the trajectory");
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
        store.rows[ordinal].add_products(&self.query, &mut self.dots, &mut self.norms2);
    }

    /// The store has put something into this place.
    pub fn refresh(&mut self, store: &MapStore, index: usize) {
        if index == self.dots.len() {
            self.dots.push(0.0);
            self.norms2.push(0.0);
        }
        (self.dots[index], self.norms2[index]) = (0.0, 0.0);
        for ordinal in (0..self.seen.len()).filter(|&ordinal| self.seen[ordinal]) {
            let (head, ids, levels) = store.rows[ordinal].row(index);
            self.query.set(&self.probs[store.layers.range(ordinal)]);
            self.dots[index] += self.query.dot(head, ids, levels);
            self.norms2[index] += head.norm2;
        }
    }

    /// Replaces `out` by the cosine similarity to each stored map (Eq. 5), as far as the trajectory
    /// goes; 0 of one that has not begun.
    pub(super) fn scores(&self, out: &mut Vec<f32>) {
        out.clear();
        out.extend(self.dots.iter().zip(&self.norms2).map(|(dot, norm2)| {
            let product = norm2 * self.norm2;
            if product > 0.0 { dot / product.sqrt() } else { 0.0 }
        }));
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
        best(scores)
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
