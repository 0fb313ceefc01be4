//! Experts as ids and bytes: granules, where they are, who needs them. Nothing here computes; the
//! layer loop asks for experts with `acquire`, computes what `next_ready` hands out, and gives
//! them back with `release`.

mod acquisition;
mod counters;
pub mod disk;
pub(crate) mod layout;
pub mod memory;
pub(crate) mod policy_driver;
mod resident;
mod sync;
pub(crate) mod tier;
pub mod vram;

pub use crate::experts::acquisition::{Access, Acquisition, GranuleRef};
pub use crate::experts::disk::{RamTier, StreamOptions, needs, tier_of};
pub use crate::experts::layout::geometry::Geometry;
pub use crate::experts::layout::piece::{Dest, Piece};
pub use crate::experts::layout::place::{
    DIRECT_ALIGN, LayerExperts, Part, Place, READ_BYTES, SlotLayout,
};
pub use crate::experts::layout::sizing::{LayerNeeds, Needs};
pub use counters::Counters;
pub use resident::Resident;
pub use tier::state::State;
pub use tier::{ClassPlan, LayerPlan, Layout, Progress, TierPlan, UpperResidency};

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::experts::disk::IoKind;
use crate::policy::{Event, Profile};

/// Whether `ExpertStore::prefetch_layer` of the next layer pays for a prompt that uses `n_chosen`
/// of a layer's experts. It uses about as many of the next layer's, so at most a quarter of what is
/// loaded is wasted, on a link that would have been idle.
pub fn prefetch_pays(n_chosen: usize, n_experts: usize) -> bool {
    4 * n_chosen >= 3 * n_experts
}

/// A run of intermediate rows of one expert that is in memory, and where.
#[derive(Clone, Debug)]
pub struct ReadyGranule<'a> {
    /// Expert within its layer.
    pub expert: u32,
    /// Granule within its expert.
    pub index: u32,
    /// The intermediate rows it holds.
    pub rows: Range<usize>,
    /// Rows of gate at `gate_stride` bytes; empty where experts have none.
    pub gate: &'a [u8],
    /// Rows of up at `up_stride` bytes.
    pub up: &'a [u8],
    /// The granule's columns of every row of down, at `down_stride` bytes.
    pub down: &'a [u8],
    pub gate_stride: usize,
    pub up_stride: usize,
    pub down_stride: usize,
}

/// Where experts come from. Whoever implements it, the layer loop is the same, and so is the
/// result: granules of one expert come in index order, and sums are taken in that order.
pub trait ExpertStore: Send + Sync {
    /// How the experts of a layer are cut; `None` where the layer has none.
    fn geometry(&self, layer: usize) -> Option<Geometry>;

    /// Pins `experts` (distinct, of one layer) and queues demand loads for what is missing.
    fn acquire(&self, layer: usize, experts: &[u32], access: Access, work: &mut Acquisition);

    /// Takes back the granules that were handed out, as computed, and hands out more that are in
    /// memory, waiting if there are none; false when all have been. A failed load is returned
    /// here, and so is an interruption by the user.
    fn next_ready(&self, work: &mut Acquisition) -> Result<bool>;

    /// Granule `i` of the `Acquisition::n_handed` that are handed out. Granules of one expert are
    /// next to each other. They stay where they are for as long as they are borrowed.
    fn ready<'w>(&'w self, work: &'w Acquisition, i: usize) -> ReadyGranule<'w>;

    /// Unpins, at any time.
    fn release(&self, work: &mut Acquisition);

    /// Queues a layer's experts behind the demand of the layer that is acquired. Called for a
    /// prompt that will use nearly all of them next; replaces the layer prefetch before it.
    fn prefetch_layer(&self, _layer: usize) {}

    /// Gives the layer prefetch up, if there is one.
    fn cancel_layer_prefetch(&self) {}

    /// The layer whose router a predictor wants to see applied to this layer's activation.
    fn looks_ahead(&self, _layer: usize) -> Option<usize> {
        None
    }

    /// Whether anyone hears `observe`.
    fn listens(&self) -> bool {
        false
    }

    /// Whether a predictor wants `Routed::hidden`.
    fn wants_hidden(&self) -> bool {
        false
    }

    /// What happened, for the policy.
    fn observe(&self, _event: &Event) {}

    /// What the policy has decided and why.
    fn verdict(&self) -> Option<String> {
        None
    }

    /// Puts what the policy has learned into the profile.
    fn save(&self, _profile: &mut Profile) {}

    /// Where a tier above reports which experts it holds whole; `None` where nothing moves.
    fn upper_residency(&self) -> Option<Arc<UpperResidency>> {
        None
    }

    /// How experts are read from disk; `None` where they are not.
    fn io(&self) -> Option<IoKind> {
        None
    }

    /// What the cache did so far; `None` where nothing moves.
    fn counters(&self) -> Option<Counters> {
        None
    }

    /// Panics if an invariant is broken; answers whether nothing is pinned or on its way.
    fn check_integrity(&self) -> bool {
        true
    }
}

// Not in `tier`: tests/tier_loom.rs compiles that with a model checker's locks.
#[cfg(test)]
#[path = "tier/tests/mod.rs"]
mod tier_tests;
