//! Least frequently used: drops what was used by the fewest tokens.

use super::{Event, Eviction, Expert, PerExpert, Routed, Shape};

/// Counts never age, as in the papers that compare with it.
#[derive(Clone, Debug)]
pub struct Lfu {
    uses: PerExpert<u64>,
}

impl Lfu {
    pub fn new(shape: &Shape) -> Self {
        Self { uses: PerExpert::new(shape) }
    }
}

impl Eviction for Lfu {
    fn observe(&mut self, event: &Event<'_>) {
        let Event::Routed(Routed { layer, chosen, .. }) = *event else { return };
        chosen.iter().for_each(|&expert| self.uses[Expert { layer, expert }] += 1);
    }

    fn priority(&self, expert: Expert) -> f64 {
        self.uses[expert] as f64
    }
}
