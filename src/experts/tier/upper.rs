//! Which experts the tier above holds whole. The upper tier writes it and the lower tier reads it,
//! so that both need not hold the same experts. Both do so without a lock: an outdated answer leads
//! to a worse choice of a victim, and to nothing else.

use super::residency::LayerPlan;
use crate::policy::Expert;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

#[derive(Debug)]
pub struct UpperResidency {
    /// By layer and expert.
    whole: Vec<Vec<AtomicBool>>,
    /// Experts that it does not hold whole.
    n_others: AtomicUsize,
}

impl UpperResidency {
    pub fn new(layers: &[LayerPlan]) -> UpperResidency {
        let layer = |plan: &LayerPlan| (0..plan.n_experts).map(|_| AtomicBool::new(false));
        let n_others = AtomicUsize::new(layers.iter().map(|plan| plan.n_experts).sum());
        UpperResidency {
            whole: layers.iter().map(|plan| layer(plan).collect()).collect(),
            n_others,
        }
    }

    fn of(&self, id: Expert) -> &AtomicBool {
        &self.whole[id.layer as usize][id.expert as usize]
    }

    pub fn has(&self, id: Expert) -> bool {
        self.of(id).load(Ordering::Relaxed)
    }

    pub fn set_whole(&self, id: Expert, is_whole: bool) {
        match (self.of(id).swap(is_whole, Ordering::Relaxed), is_whole) {
            (false, true) => drop(self.n_others.fetch_sub(1, Ordering::Relaxed)),
            (true, false) => drop(self.n_others.fetch_add(1, Ordering::Relaxed)),
            _ => {}
        }
    }

    /// Whether it holds every expert.
    pub fn has_all(&self) -> bool {
        self.n_others.load(Ordering::Relaxed) == 0
    }
}
