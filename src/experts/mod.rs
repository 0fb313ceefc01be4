//! Experts as ids and bytes: granules, where they are, who needs them. Nothing here computes; the
//! layer loop asks a store for experts with `acquire`, computes what `next_ready` hands out, and
//! gives them back with `release`. The README beside this file explains it.

mod acquisition;
mod counters;
pub mod disk;
mod hierarchy;
pub(crate) mod layout;
pub mod memory;
pub mod numa;
pub mod peers;
pub(crate) mod policy_driver;
mod resident;
mod runtime;
mod store;
mod sync;
pub(crate) mod tier;
pub mod vram;

pub use acquisition::{Access, Acquisition, GranuleRef, LayerPart};
pub use counters::Counters;
pub use disk::{RamTier, StreamOptions, needs, tier_of};
pub use hierarchy::{ExpertPlace, Hierarchy, PlacedExpert, PrefetchGuard};
pub use layout::geometry::Geometry;
pub use layout::piece::{Dest, Piece};
pub use layout::place::{
    DIRECT_ALIGN, ExpertTensors, LayerExperts, MatrixRows, READ_BYTES, SlotLayout,
};
pub use layout::sizing::{LayerNeeds, Needs};
pub use policy_driver::PredictedLayers;
pub use resident::Resident;
pub use runtime::{PolicyClient, TierRuntime};
pub use store::{ExpertStore, HostMemory, ReadyGranule};
pub use tier::state::State;
pub use tier::{
    ClassPlan, ExpertStatus, LayerPlan, Layout, LinkMeter, Presence, Progress, TierPlan,
    UpperResidency,
};

/// Whether prefetching the next layer as a whole pays for a prompt that uses `n_chosen` of this
/// layer's experts. It uses about as many of the next layer's, so at most a quarter of what is
/// loaded is wasted, on a link that would have been idle.
pub fn prefetch_pays(n_chosen: usize, n_experts: usize) -> bool {
    4 * n_chosen >= 3 * n_experts
}

// Not in `tier`: tests/tier_loom.rs compiles that with a model checker's locks.
#[cfg(test)]
#[path = "tier/tests/mod.rs"]
mod tier_tests;
