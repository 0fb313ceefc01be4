//! The masks of the states that a text was in lately.
//!
//! A mask takes a walk through the whole vocabulary where nearly every token fits, as inside of a
//! string, and there the text comes back to the same state with each token.

use super::automaton::State;
use llguidance::toktrie::SimpleVob;
use std::collections::VecDeque;
use std::sync::Arc;

/// Masks that are kept: 20 KB each for a vocabulary of 150,000 tokens.
const N_MASKS: usize = 32;

/// The most recently used last. Clones of a text share them.
#[derive(Clone, Default)]
pub struct Masks(VecDeque<(State, Arc<SimpleVob>)>);

impl Masks {
    pub fn get(&mut self, state: State) -> Option<Arc<SimpleVob>> {
        let at = self.0.iter().rposition(|(known, _)| *known == state)?;
        let entry = self.0.remove(at)?;
        let mask = entry.1.clone();
        self.0.push_back(entry);
        Some(mask)
    }

    pub fn put(&mut self, state: State, mask: &SimpleVob) {
        if self.0.len() == N_MASKS {
            self.0.pop_front();
        }
        self.0.push_back((state, Arc::new(mask.clone())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_kept() {
        let mut masks = Masks::default();
        for state in 0..N_MASKS as State + 2 {
            let mut mask = SimpleVob::alloc(1000);
            mask.allow_token(state);
            assert!(masks.get(state).is_none());
            masks.put(state, &mask);
            assert!(masks.get(0).unwrap().is_allowed(0));
        }
        assert!(masks.get(1).is_none() && masks.get(2).is_none());
        assert!(masks.get(3).unwrap().is_allowed(3));
    }
}
