//! A budget in bytes as slots: how many of which size, and how many of them for transit.

use super::place::SlotLayout;
use crate::experts::tier::{ClassPlan, LayerPlan, TierPlan};
use crate::policy::Shape;

/// Transit holds this much, if an eighth of the slots does: enough reads for a disk to work at its
/// full rate on a prompt, or the experts of one token's next layer.
const TRANSIT_BYTES: usize = 32 << 20;

/// Reads that may be staged at once, if a sixteenth of the budget holds them.
const N_STAGING: usize = 16;
const N_STAGING_MIN: usize = 2;

/// The sizes of a layer's experts, whatever memory there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerNeeds {
    pub n_experts: usize,
    pub n_granules: usize,
    /// Experts that a token uses.
    pub k: usize,
    pub slot_bytes: usize,
    pub staging_bytes: usize,
}

impl LayerNeeds {
    pub fn new(layout: &SlotLayout, n_experts: usize, n_granules: usize, k: usize) -> LayerNeeds {
        LayerNeeds {
            n_experts,
            n_granules,
            k: k.min(n_experts),
            slot_bytes: layout.slot_bytes(),
            staging_bytes: layout.staging_bytes(),
        }
    }
}

/// All layers' needs, `None` where a layer's experts are not streamed.
pub struct Needs(pub Vec<Option<LayerNeeds>>);

/// One size class while it is sized.
struct Class {
    slot_bytes: usize,
    /// Granules of one expert at most.
    n_granules: usize,
    /// Granules of one token's experts in a layer, at most.
    n_token: usize,
    /// Granules of all experts.
    n_all: usize,
}

impl Class {
    /// One token's experts and one expert more in transit.
    fn n_min(&self) -> usize {
        (self.n_token + self.n_granules).min(self.n_all)
    }

    fn plan(&self, n_slots: usize) -> ClassPlan {
        let slot_bytes = self.slot_bytes;
        if n_slots >= self.n_all {
            return ClassPlan { n_slots: self.n_all, n_transit: 0, slot_bytes };
        }
        let wanted = self.n_token.max(TRANSIT_BYTES / slot_bytes).min(n_slots / 8);
        let n_transit = wanted.min(n_slots - self.n_token).max(self.n_granules);
        ClassPlan { n_slots, n_transit, slot_bytes }
    }
}

impl Needs {
    fn layers(&self) -> impl Iterator<Item = &LayerNeeds> {
        self.0.iter().flatten()
    }

    /// One class a slot size, in order of size.
    fn classes(&self) -> Vec<Class> {
        let mut sizes: Vec<usize> = self.layers().map(|l| l.slot_bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let class = |slot_bytes| {
            let layers = || self.layers().filter(move |l| l.slot_bytes == slot_bytes);
            Class {
                slot_bytes,
                n_granules: layers().map(|l| l.n_granules).max().unwrap_or(0),
                n_token: layers().map(|l| l.k * l.n_granules).max().unwrap_or(0),
                n_all: layers().map(|l| l.n_experts * l.n_granules).sum(),
            }
        };
        sizes.into_iter().map(class).collect()
    }

    fn staging_bytes(&self) -> usize {
        self.layers().map(|l| l.staging_bytes).max().unwrap_or(0)
    }

    /// The least budget, in bytes: in each size class one token's experts of a layer and one
    /// expert more, and two reads that are being scattered.
    pub fn minimum_bytes(&self) -> u64 {
        let slots: usize = self.classes().iter().map(|c| c.n_min() * c.slot_bytes).sum();
        (slots + N_STAGING_MIN * self.staging_bytes()) as u64
    }

    /// A budget with a slot for every granule.
    pub fn all_bytes(&self) -> u64 {
        let slots: usize = self.classes().iter().map(|c| c.n_all * c.slot_bytes).sum();
        (slots + N_STAGING * self.staging_bytes()) as u64
    }

    /// Slots for a budget, which is at least the minimum. Each class gets its minimum and then the
    /// same share of what it lacks.
    pub fn plan(&self, budget: u64) -> TierPlan {
        assert!(budget >= self.minimum_bytes());
        let classes = self.classes();
        let staging_bytes = self.staging_bytes();
        let slots_min: usize = classes.iter().map(|c| c.n_min() * c.slot_bytes).sum();
        let spare = (budget - slots_min as u64) as usize;
        let n_staging = match staging_bytes {
            0 => 0,
            bytes => (spare / 16 / bytes).clamp(N_STAGING_MIN, N_STAGING),
        };
        let spare = spare - n_staging * staging_bytes;
        let lacking: usize = classes.iter().map(|c| (c.n_all - c.n_min()) * c.slot_bytes).sum();
        let plan = |c: &Class| {
            let lacks = c.n_all - c.n_min();
            // Exact and rounded down: the shares together are no more than there is.
            let share = lacks as u128 * spare as u128 / lacking.max(1) as u128;
            c.plan(c.n_min() + lacks.min(share as usize))
        };
        let layer = |needs: &Option<LayerNeeds>| {
            needs.map_or(LayerPlan::default(), |needs| LayerPlan {
                n_experts: needs.n_experts,
                n_own: needs.n_experts,
                n_granules: needs.n_granules,
                class: classes
                    .iter()
                    .position(|class| class.slot_bytes == needs.slot_bytes)
                    .expect("every layer has a class"),
            })
        };
        TierPlan {
            layers: self.0.iter().map(layer).collect(),
            classes: classes.iter().map(plan).collect(),
            n_staging,
            staging_bytes,
        }
    }
}

impl TierPlan {
    /// The tier's shape for policies; `k`: experts that a token uses in a layer.
    pub fn shape(&self, k: usize) -> Shape {
        let layers = || self.layers.iter();
        Shape {
            n_experts: layers().map(|l| l.n_experts).collect(),
            k,
            n_granules: layers().map(|l| l.n_granules).collect(),
            class: layers().map(|l| l.class).collect(),
            n_slots: self.classes.iter().map(|c| c.n_slots - c.n_transit).collect(),
        }
    }

    /// Memory that the plan takes.
    pub fn n_bytes(&self) -> u64 {
        let slots: usize = self.classes.iter().map(|c| c.n_slots * c.slot_bytes).sum();
        (slots + self.n_staging * self.staging_bytes) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(n_experts: usize, n_granules: usize, slot_bytes: usize) -> Option<LayerNeeds> {
        Some(LayerNeeds { n_experts, n_granules, k: 2, slot_bytes, staging_bytes: 8192 })
    }

    fn needs() -> Needs {
        Needs(vec![None, layer(8, 3, 4096), layer(8, 3, 8192), layer(16, 2, 4096)])
    }

    #[test]
    fn the_minimum_is_one_token_and_one_expert_more() {
        let needs = needs();
        assert_eq!(needs.minimum_bytes(), 9 * 4096 + 9 * 8192 + 2 * 8192);
        let plan = needs.plan(needs.minimum_bytes());
        let slots: Vec<_> = plan.classes.iter().map(|c| (c.n_slots, c.n_transit)).collect();
        assert_eq!(slots, [(9, 3), (9, 3)]);
        assert_eq!(plan.layers.iter().map(|l| l.class).collect::<Vec<_>>(), [0, 0, 1, 0]);
    }

    #[test]
    fn no_plan_exceeds_its_budget_and_more_is_never_less() {
        let needs = needs();
        let all = 56 * 4096 + 24 * 8192;
        let mut before = vec![0; 2];
        for budget in (needs.minimum_bytes()..2 * all).step_by(1000) {
            let plan = needs.plan(budget);
            assert!(plan.n_bytes() <= budget, "{budget}: {plan:?}");
            let slots: Vec<_> = plan.classes.iter().map(|c| c.n_slots).collect();
            assert!(slots.iter().zip(&before).all(|(now, before)| now >= before));
            before = slots;
        }
        assert_eq!(before, [56, 24]);
        assert!(needs.plan(2 * all).classes.iter().all(|c| c.n_transit == 0));
    }
}
