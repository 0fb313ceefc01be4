//! Least recently used: drops what was used longest ago.

use super::{Event, Eviction, Expert, PerExpert, Routed, Shape};

/// Uses of all layers are in one order. Of the experts that one token chose together the best
/// counts as used last.
#[derive(Clone, Debug)]
pub struct Lru {
    /// Number of the last use; 0 for none.
    last: PerExpert<u64>,
    n_uses: u64,
}

impl Lru {
    pub fn new(shape: &Shape) -> Self {
        Self { last: PerExpert::new(shape), n_uses: 0 }
    }
}

impl Eviction for Lru {
    fn observe(&mut self, event: &Event<'_>) {
        let Event::Routed(Routed { layer, chosen, .. }) = *event else { return };
        for &expert in chosen.iter().rev() {
            self.n_uses += 1;
            self.last[Expert { layer, expert }] = self.n_uses;
        }
    }

    fn priority(&self, expert: Expert) -> f64 {
        self.last[expert] as f64
    }
}
