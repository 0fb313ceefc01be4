//! The states of a cache's layers at some positions of a text: to keep elsewhere and to put back,
//! as no position can be taken from a state.

use super::{KvCache, LayerCache};

/// All states of a cache after a text's first `n` positions.
#[derive(Debug, PartialEq)]
pub struct States {
    pub n: usize,
    /// By layer: the inputs that the convolution remembers, and the state.
    pub values: Vec<f32>,
}

/// States that a pass is asked for, as far as they are there.
pub(super) struct Mark {
    states: States,
    /// The places of the cache whose states are there, in ascending order.
    slots: Vec<usize>,
}

impl Mark {
    fn new(n: usize, n_values: usize) -> Mark {
        Mark { states: States { n, values: Vec::with_capacity(n_values) }, slots: Vec::new() }
    }
}

impl KvCache {
    /// Values of all states; 0 for a model without any.
    pub fn n_state_values(&self) -> usize {
        self.layers.iter().map(|layer| layer.state.past.len() + layer.state.state.len()).sum()
    }

    /// Asks the next pass for the states after each of these numbers of positions, `n_values`
    /// values each: a device may have some of the layers.
    pub fn mark(&mut self, positions: &[usize], n_values: usize) {
        self.marks = positions.iter().map(|&n| Mark::new(n, n_values)).collect();
    }

    /// Asks the next pass for the states after `n` positions, too; false if it was asked for them.
    pub fn mark_one_more(&mut self, n: usize, n_values: usize) -> bool {
        let is_new = self.marks.iter().all(|mark| mark.states.n != n);
        if is_new {
            self.marks.push(Mark::new(n, n_values));
        }
        is_new
    }

    /// Positions that a layer may compute after `n_past` before it has to call
    /// [`KvCache::note_state`].
    pub fn n_to_mark(&self, n_past: usize) -> usize {
        let after = self.marks.iter().map(|mark| mark.states.n).filter(|n| *n > n_past);
        after.min().map_or(usize::MAX, |n| n - n_past)
    }

    /// Copies the state of a place of the cache, whose layer has computed `n` positions, if it was
    /// asked for. A pass calls it once for each place, in any order.
    pub fn note_state(&mut self, slot: usize, n: usize) {
        let layers = &self.layers;
        let Some(mark) = self.marks.iter_mut().find(|mark| mark.states.n == n) else { return };
        let before = mark.slots.partition_point(|other| *other < slot);
        let n_values =
            |slot: &usize| layers[*slot].state.past.len() + layers[*slot].state.state.len();
        let at: usize = mark.slots[..before].iter().map(n_values).sum();
        let state = &layers[slot].state;
        mark.states.values.splice(at..at, state.past.iter().chain(&state.state).copied());
        mark.slots.insert(before, slot);
    }

    /// The place for the states after `n` positions, if they were asked for: a device's layers add
    /// theirs behind the CPU's.
    pub fn mark_at(&mut self, n: usize) -> Option<&mut States> {
        self.marks.iter_mut().map(|mark| &mut mark.states).find(|states| states.n == n)
    }

    /// The states that the pass was asked for and has come to. One that was not completed leaves
    /// fewer than `n_values` values, which are dropped.
    pub fn take_states(&mut self, n_values: usize) -> Vec<States> {
        let marks = std::mem::take(&mut self.marks).into_iter().map(|mark| mark.states);
        marks.filter(|states| states.values.len() == n_values).collect()
    }

    /// Resets all states to zero.
    pub fn clear_states(&mut self) {
        for layer in &mut self.layers {
            layer.state.past.fill(0.0);
            layer.state.state.fill(0.0);
        }
    }

    /// All states as they are.
    #[cfg(test)]
    pub fn states(&self) -> Vec<f32> {
        let parts = self.layers.iter().flat_map(|layer| [&layer.state.past, &layer.state.state]);
        parts.flatten().copied().collect()
    }

    /// Puts states back.
    pub fn restore_states(&mut self, values: &[f32]) {
        assert_eq!(values.len(), self.n_state_values());
        let mut rest = values;
        for LayerCache { state, .. } in &mut self.layers {
            for part in [&mut state.past, &mut state.state] {
                let (values, more) = rest.split_at(part.len());
                part.copy_from_slice(values);
                rest = more;
            }
        }
    }

    /// Copies the states of a cache with the same layers.
    pub fn copy_states(&mut self, other: &KvCache) {
        for (to, from) in self.layers.iter_mut().zip(&other.layers) {
            to.state.past.copy_from_slice(&from.state.past);
            to.state.state.copy_from_slice(&from.state.state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ops::StateSize;
    use crate::model::kv::{CacheType, LayerShape};

    fn cache() -> KvCache {
        let size = StateSize { n_past: 20, n_state: 24 };
        let heads = LayerShape::Heads { n_head_kv: 1, k_dim: 8, v_dim: 8 };
        let layers = [LayerShape::State(size), heads, LayerShape::State(size)];
        KvCache::new(&layers, 16, CacheType::F32, CacheType::F32)
    }

    /// A pass over positions `past..past + n`, whose states say what they have seen.
    fn pass(cache: &mut KvCache, past: usize, n: usize, layers: [usize; 2]) {
        for layer in layers {
            let mut at = past;
            while at < past + n {
                at += cache.n_to_mark(at).min(past + n - at);
                let delta = cache.state_mut(layer);
                delta.past.fill((100 * layer + at) as f32);
                delta.state.fill(-((100 * layer + at) as f32));
                cache.note_state(layer, at);
            }
        }
    }

    #[test]
    fn states_are_copied_where_they_were_asked_for_and_come_back() {
        [[0, 2], [2, 0]].into_iter().for_each(come_back_noted_in_order);
    }

    fn come_back_noted_in_order(layers: [usize; 2]) {
        let mut cache = cache();
        // Those that other positions have, before the pass and after it, are not there.
        let n_values = cache.n_state_values();
        cache.mark(&[2, 3, 5, 9], n_values);
        pass(&mut cache, 2, 4, layers);
        let states = cache.take_states(n_values);
        assert_eq!(states.iter().map(|states| states.n).collect::<Vec<_>>(), [3, 5]);
        assert_eq!(cache.n_to_mark(2), usize::MAX);
        let (mut back, mut copied) = (self::cache(), self::cache());
        back.restore_states(&states[1].values);
        copied.copy_states(&back);
        for mut cache in [back, copied] {
            let delta = cache.state_mut(2);
            assert!(delta.past.iter().all(|value| *value == 205.0));
            assert!(delta.state.iter().all(|value| *value == -205.0));
            assert!(cache.state_mut(0).state.iter().all(|value| *value == -5.0));
        }
    }
}
