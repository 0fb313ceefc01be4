//! What layers and link threads share.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::fence::Fences;
use super::layout::GranuleLayout;
use super::owners::Own;
use super::timer::LinkTimer;
use crate::backend::gpu::{DeviceBuffer, DeviceSlice};
use crate::experts::policy_driver::PolicyTarget;
use crate::experts::tier::Tier;
use crate::experts::{Counters, Dest, ExpertStore, LayerExperts, Layout, Piece, TierPlan};
use crate::policy::{Event, Expert, LayerShare, Prediction};

#[derive(Clone, Copy)]
pub struct Layer {
    pub experts: LayerExperts,
    pub layout: GranuleLayout,
}

/// By layer; `None` where the layer has no experts that move.
pub type Layers = Vec<Option<Layer>>;

/// The tier's pieces are granules: they come from the tier below, and from no place in a file.
pub struct Pieces(pub Layers);

impl Layout for Pieces {
    fn pieces(&self, id: Expert, granules: Range<usize>, out: &mut Vec<Piece>) {
        let layer = self.0[id.layer as usize].as_ref().expect("its experts move");
        out.extend(granules.map(|granule| {
            let n_bytes = layer.experts.granule_bytes(granule);
            let to = Dest::Slot { granule, at: 0 };
            Piece { shard: 0, start: 0, len: n_bytes, need: n_bytes, to }
        }));
    }
}

pub struct Core {
    pub tier: Tier,
    pub plan: TierPlan,
    pub layers: Layers,
    /// The slots of each size class.
    pub arenas: Vec<DeviceBuffer>,
    pub fences: Fences,
    pub timer: LinkTimer,
    /// Experts that may be here; `None`: all.
    pub own: Option<Own>,
    /// The tier below.
    pub source: Arc<dyn ExpertStore>,
    /// Why the device does nothing more.
    pub lost: OnceLock<String>,
}

impl Core {
    pub fn slot(&self, class: usize, slot: u32) -> DeviceSlice<'_> {
        let bytes = self.plan.classes[class].slot_bytes;
        let at = slot as usize * bytes;
        self.arenas[class].slice(at..at + bytes)
    }
}

impl PolicyTarget for Core {
    fn step(&self) -> u64 {
        self.tier.step()
    }

    fn prefetch(&self, predictions: &[Prediction], step: u64) {
        let Some(own) = &self.own else { return self.tier.prefetch(predictions, step) };
        let is_own = |p: &&Prediction| own.has(p.expert.layer as usize, p.expert.expert);
        let predictions: Vec<Prediction> = predictions.iter().filter(is_own).copied().collect();
        self.tier.prefetch(&predictions, step);
    }

    fn observe(&self, event: &Event) {
        self.tier.observe(event);
    }

    fn set_shares(&self, shares: &[LayerShare]) {
        self.tier.set_shares(shares);
    }

    fn counters(&self) -> Counters {
        self.tier.counters()
    }
}
