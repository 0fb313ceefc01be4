//! The checkpoints of a session: positions of its text whose states are kept, for models that
//! cannot take positions back from their state.

use std::sync::{Arc, Weak};

use crate::model::kv::States;

/// The states after the first `n` tokens of a session's text.
#[derive(Clone, Debug)]
struct Checkpoint {
    n: usize,
    /// There as long as whoever keeps them does.
    values: Weak<Vec<f32>>,
    /// Present until they are handed over.
    own: Option<Arc<Vec<f32>>>,
}

/// Checkpoints by their positions.
#[derive(Debug, Default)]
pub(super) struct Checkpoints(Vec<Checkpoint>);

impl Checkpoints {
    /// Adds states that a pass over the text has given.
    pub fn add(&mut self, states: States) {
        let own = Arc::new(states.values);
        self.insert(Checkpoint { n: states.n, values: Arc::downgrade(&own), own: Some(own) });
    }

    /// Adds states that are kept elsewhere.
    pub fn add_kept(&mut self, n: usize, values: &Arc<Vec<f32>>) {
        self.insert(Checkpoint { n, values: Arc::downgrade(values), own: None });
    }

    /// Adds those of another session, whose text begins with the same `n` tokens.
    pub fn add_all(&mut self, other: &Checkpoints, n: usize) {
        for checkpoint in other.0.iter().filter(|checkpoint| checkpoint.n <= n) {
            self.insert(Checkpoint { own: None, ..checkpoint.clone() });
        }
    }

    fn insert(&mut self, checkpoint: Checkpoint) {
        self.0.retain(|other| other.n != checkpoint.n && other.values.strong_count() > 0);
        let at = self.0.partition_point(|other| other.n < checkpoint.n);
        self.0.insert(at, checkpoint);
    }

    /// The last one that is still there within the first `n` tokens, and where it is.
    pub fn last(&self, n: usize) -> Option<(usize, Arc<Vec<f32>>)> {
        let within = self.0.iter().rev().filter(|checkpoint| checkpoint.n <= n);
        within.filter_map(|checkpoint| Some((checkpoint.n, checkpoint.values.upgrade()?))).next()
    }

    /// Checkpoints that are still there, by their positions.
    pub fn all(&self) -> Vec<(usize, Arc<Vec<f32>>)> {
        let present = |checkpoint: &Checkpoint| Some((checkpoint.n, checkpoint.values.upgrade()?));
        self.0.iter().filter_map(present).collect()
    }

    /// Forgets those after the first `n` tokens.
    pub fn truncate(&mut self, n: usize) {
        self.0.retain(|checkpoint| checkpoint.n <= n);
    }

    /// Drops those at some positions that were not handed over.
    pub fn drop_at(&mut self, positions: &[usize]) {
        self.0.retain(|checkpoint| checkpoint.own.is_none() || !positions.contains(&checkpoint.n));
    }

    /// The states that were not handed over yet, with their positions.
    pub fn take_own(&mut self) -> Vec<(usize, Arc<Vec<f32>>)> {
        let own = |checkpoint: &mut Checkpoint| Some((checkpoint.n, checkpoint.own.take()?));
        self.0.iter_mut().filter_map(own).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn states(n: usize) -> States {
        States { n, values: vec![n as f32] }
    }

    #[test]
    fn the_last_one_that_is_kept_is_found() {
        let mut checkpoints = Checkpoints::default();
        [128, 64, 256].into_iter().for_each(|n| checkpoints.add(states(n)));
        let kept = checkpoints.take_own();
        assert_eq!(kept.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [64, 128, 256]);
        let found = |checkpoints: &Checkpoints, n| checkpoints.last(n).map(|(n, _)| n);
        assert_eq!(found(&checkpoints, 255), Some(128));
        drop(kept);
        assert_eq!(found(&checkpoints, 300), None);
        checkpoints.add(states(192));
        checkpoints.add(states(320));
        let mut other = Checkpoints::default();
        other.add_all(&checkpoints, 200);
        assert_eq!((found(&other, 999), found(&checkpoints, 319)), (Some(192), Some(192)));
        checkpoints.truncate(191);
        assert_eq!((found(&other, 999), found(&checkpoints, 999)), (None, None));
    }
}
