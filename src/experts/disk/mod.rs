//! The RAM tier: experts streamed from disk through slots. It takes a fixed budget of memory,
//! however large the model is.

mod arena;
mod faults;
mod files;
pub mod link;
mod mover;
mod options;
mod pread;
mod progress;
#[cfg(target_os = "linux")]
mod sleep;
mod toucher;
#[cfg(target_os = "linux")]
mod uring;
#[cfg(target_os = "linux")]
mod waker;

pub use faults::Faults;
pub use files::Files;
pub use link::{IoKind, Link, Read, ReadSource};
pub use mover::DiskMover;
pub use options::StreamOptions;

use std::sync::Arc;

use super::acquisition::{Access, Acquisition, GranuleRef, LayerPart};
use super::layout::place::{LayerExperts, SlotLayout};
use super::layout::sizing::{LayerNeeds, Needs};
use super::runtime::{RuntimeOptions, TierRuntime};
use super::tier::{Layout, TierPlan, UpperResidency};
use super::{ExpertStatus, ExpertStore, Geometry, HostMemory, ReadyGranule};
use crate::gguf::Gguf;
use crate::policy::Expert;
use crate::units::size;
use crate::{Error, Result};
use mover::{Core, Memory, SlotLayouts};

/// The slots that streaming needs for each layer.
pub fn needs(file: &Gguf, layers: &[Option<LayerExperts>], k: usize) -> Needs {
    let layer = |l: &LayerExperts| {
        LayerNeeds::new(&SlotLayout::new(file, l), l.n_experts, l.geometry.n_granules(), k)
    };
    Needs(layers.iter().map(|l| l.as_ref().map(layer)).collect())
}

/// The slots that a budget gives, and the reads that fill them: all that a replay must know of a
/// file to move its bytes. The budget is at least the minimum of `needs`.
pub fn tier_of(
    file: &Gguf,
    layers: &[Option<LayerExperts>],
    k: usize,
    budget: u64,
) -> (TierPlan, Box<dyn Layout>) {
    (needs(file, layers, k).plan(budget), Box::new(SlotLayouts::new(file, layers)))
}

/// Experts in RAM, read from disk.
pub type RamTier = TierRuntime<DiskMover>;

impl RamTier {
    /// Allocates the slots and starts the link. The budget is at least the minimum of `needs`.
    pub fn new(
        file: &Gguf,
        layers: &[Option<LayerExperts>],
        options: &StreamOptions,
    ) -> Result<RamTier> {
        let plan = needs(file, layers, options.k).plan(options.budget);
        let memory = Memory::new(&plan, options.nodes.clone()).map_err(|e| {
            let budget = size(options.budget);
            Error::invalid(format!("no memory for {budget} of experts (--ram): {e}"))
        })?;
        if !memory.nodes.is_empty() {
            log::info!("expert slots on {} nodes of memory", memory.nodes.len());
        }
        let layouts = SlotLayouts::new(file, layers).beside(options.peers.clone());
        let StreamOptions { policy, k, ref profile, lockstep, .. } = *options;
        let runtime = RuntimeOptions { policy, k, profile, lockstep };
        let layout = Box::new(layouts.clone());
        TierRuntime::open(&plan, layout, layers, &runtime, |tier| {
            let core = Core { tier, plan: plan.clone(), layouts, memory };
            DiskMover::open(core, file, options)
        })
    }

    /// The way in which experts are read.
    pub fn io(&self) -> IoKind {
        self.mover.link.kind()
    }
}

impl ExpertStore for RamTier {
    fn geometry(&self, layer: usize) -> Option<Geometry> {
        self.has(layer).then(|| self.mover.core.layouts.of(layer).geometry())
    }

    fn acquire_part(
        &self,
        layer: usize,
        part: LayerPart<'_>,
        access: Access,
        acquisition: &mut Acquisition,
    ) {
        if self.is_lockstep() && access.has_prompt() {
            // The layer prefetch has landed.
            self.wait_for_prefetches();
        }
        self.demand(layer, part, access, acquisition);
    }

    fn next_ready(&self, acquisition: &mut Acquisition) -> Result<bool> {
        self.wait_ready(acquisition)
    }

    fn report(&self, layer: usize, out: &mut Vec<ExpertStatus>) {
        self.tier().report(layer, out);
    }

    fn ready<'a>(&'a self, acquisition: &'a Acquisition, i: usize) -> ReadyGranule<'a> {
        acquisition.check_owner(self.owner());
        let core = &self.mover.core;
        let class = core.plan.layers[acquisition.layer].class;
        let bytes = core.plan.classes[class].slot_bytes;
        let GranuleRef { expert, granule, slot } = acquisition.handed[i];
        // SAFETY: the granule has landed, and the acquisition that was handed it is borrowed, so
        // it can neither ask for more nor be released, which is what would unpin the slot. No link
        // writes to a slot that is pinned.
        let slot =
            unsafe { std::slice::from_raw_parts(core.slot(class, slot).cast_const(), bytes) };
        core.layouts.of(acquisition.layer).view(slot, expert, granule)
    }

    fn release(&self, acquisition: &mut Acquisition) {
        // One that was never acquired has nothing to give back.
        if acquisition.is_open() {
            self.end_demand(acquisition);
        }
    }

    fn is_streamed(&self) -> bool {
        true
    }

    fn is_whole(&self, expert: Expert) -> bool {
        self.tier().is_whole(expert)
    }

    fn memory(&self) -> Vec<HostMemory> {
        self.mover.core.memory.slots()
    }

    fn are_parts_at(&self, layer: usize, align: usize) -> bool {
        self.has(layer) && self.mover.core.layouts.of(layer).are_parts_at(align)
    }

    fn upper_residency(&self) -> Option<Arc<UpperResidency>> {
        Some(self.tier().upper_residency())
    }
}
