//! Each layer's experts in the order of their LCP priority, kept as tokens come. If an expert is
//! not activated, only its age changes, and by as much as that of all others: so an activation
//! lifts the activated experts past some others and leaves the rest as they are.

use crate::policy::{Event, Eviction, Expert, Lcp, Routed, Shape};

/// Highest priority first; of equals the lower id.
#[derive(Clone, Debug)]
pub(super) struct LcpOrder {
    lcp: Lcp,
    layers: Vec<LayerOrder>,
    /// Ranks of the experts that an event lifts.
    lifted: Vec<u32>,
}

#[derive(Clone, Debug)]
struct LayerOrder {
    /// Experts by rank.
    order: Vec<u32>,
    /// Ranks by expert: the inverse.
    rank: Vec<u32>,
}

impl LcpOrder {
    pub fn new(shape: &Shape) -> LcpOrder {
        let layer = |n: &usize| {
            let ids: Vec<u32> = (0..*n as u32).collect();
            LayerOrder { order: ids.clone(), rank: ids }
        };
        let layers = shape.n_experts.iter().map(layer).collect();
        LcpOrder { lcp: Lcp::new(shape), layers, lifted: Vec::new() }
    }

    /// How many experts of the layer have a higher priority, by expert.
    pub fn ranks(&self, layer: u32) -> &[u32] {
        &self.layers[layer as usize].rank
    }

    pub fn observe(&mut self, event: &Event<'_>) {
        self.lcp.observe(event);
        let Event::Routed(Routed { layer, chosen, .. }) = *event else { return };
        let LayerOrder { order, rank } = &mut self.layers[layer as usize];
        self.lifted.clear();
        self.lifted.extend(chosen.iter().map(|expert| rank[*expert as usize]));
        // From the top, so that the experts that one is lifted past are in order already.
        self.lifted.sort_unstable();
        for &from in &self.lifted {
            let mut at = from as usize;
            let expert = order[at];
            let standing = self.lcp.standing(Expert { layer, expert });
            while at > 0 {
                let above = order[at - 1];
                let theirs = self.lcp.standing(Expert { layer, expert: above });
                if theirs > standing || (theirs == standing && above < expert) {
                    break;
                }
                order[at] = above;
                rank[above as usize] = at as u32;
                at -= 1;
            }
            order[at] = expert;
            rank[expert as usize] = at as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::papers::moepic::testing::{history, routed, shape};
    use proptest::prelude::*;

    proptest! {
        /// The eviction's own priorities, sorted.
        #[test]
        fn ranks_are_those_of_sorted_priorities(history in history()) {
            let mut order = LcpOrder::new(&shape());
            let mut lcp = Lcp::new(&shape());
            for step in &history {
                order.observe(&routed(step));
                lcp.observe(&routed(step));
                let layer = step.layer;
                let ranks = order.ranks(layer);
                let mut seen = vec![false; ranks.len()];
                ranks.iter().for_each(|rank| seen[*rank as usize] = true);
                prop_assert!(seen.iter().all(|seen| *seen), "{ranks:?}");
                let priority = |expert: u32| lcp.priority(Expert { layer, expert });
                for a in 0..ranks.len() as u32 {
                    for b in 0..ranks.len() as u32 {
                        let above = ranks[a as usize] < ranks[b as usize];
                        // Equals by id; what differs by rounding alone may be either way.
                        if priority(a) == priority(b) && priority(a) == f64::NEG_INFINITY {
                            prop_assert_eq!(above, a < b);
                        } else if priority(a) > priority(b) + 1e-9 {
                            prop_assert!(above, "{a} {b} {ranks:?}");
                        }
                    }
                }
            }
        }
    }
}
