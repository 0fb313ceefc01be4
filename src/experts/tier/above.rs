//! Which experts are whole in the tier above: what one tier tells the one below it, so that they
//! need not both hold the same. Told without a lock and read by a policy: what is out of date makes
//! a worse choice of a victim and nothing else.

use super::residency::LayerPlan;
use crate::policy::Expert;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Debug)]
pub struct Above {
    /// By layer and expert.
    whole: Vec<Vec<AtomicBool>>,
}

impl Above {
    pub fn new(layers: &[LayerPlan]) -> Above {
        let layer = |plan: &LayerPlan| (0..plan.n_experts).map(|_| AtomicBool::new(false));
        Above { whole: layers.iter().map(|plan| layer(plan).collect()).collect() }
    }

    fn of(&self, id: Expert) -> &AtomicBool {
        &self.whole[id.layer as usize][id.expert as usize]
    }

    pub fn has(&self, id: Expert) -> bool {
        self.of(id).load(Ordering::Relaxed)
    }

    pub fn tell(&self, id: Expert, is_whole: bool) {
        self.of(id).store(is_whole, Ordering::Relaxed);
    }
}
