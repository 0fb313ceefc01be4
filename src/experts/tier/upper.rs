//! Which experts the tier above holds whole. The upper tier writes it and the lower tier reads it,
//! so that both need not hold the same experts. Both do so without a lock: an outdated answer leads
//! to a worse choice of a victim, and to nothing else.

use super::residency::LayerPlan;
use crate::policy::Expert;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Debug)]
pub struct UpperResidency {
    /// By layer and expert.
    whole: Vec<Vec<AtomicBool>>,
}

impl UpperResidency {
    pub fn new(layers: &[LayerPlan]) -> UpperResidency {
        let layer = |plan: &LayerPlan| (0..plan.n_experts).map(|_| AtomicBool::new(false));
        UpperResidency { whole: layers.iter().map(|plan| layer(plan).collect()).collect() }
    }

    fn of(&self, id: Expert) -> &AtomicBool {
        &self.whole[id.layer as usize][id.expert as usize]
    }

    pub fn has(&self, id: Expert) -> bool {
        self.of(id).load(Ordering::Relaxed)
    }

    pub fn set_whole(&self, id: Expert, is_whole: bool) {
        self.of(id).store(is_whole, Ordering::Relaxed);
    }
}
