//! Experts streamed from disk through a tier of slots: a budget of memory, whatever the size of
//! the model.

mod faults;
mod files;
pub mod link;
mod pread;
mod progress;
#[cfg(target_os = "linux")]
mod sleep;
#[cfg(target_os = "linux")]
mod uring;
#[cfg(target_os = "linux")]
mod waker;

pub use faults::Faults;
pub use files::Files;
pub use link::{IoKind, Link, Read, ReadSource};

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::counters::Counters;
use super::memory::Region;
use super::tier::{Fault, Layout, Stop, Ticket, Tier, TierPlan, UpperResidency};
use super::{ExpertStore, Geometry, ReadyGranule};
use crate::experts::acquisition::{Access, Acquisition, GranuleRef};
use crate::experts::layout::piece::{Dest, Piece};
use crate::experts::layout::place::{LayerExperts, SlotLayout};
use crate::experts::layout::sizing::{LayerNeeds, Needs};
use crate::experts::policy_driver::{PolicyDriver, PolicyTarget};
use crate::gguf::Gguf;
use crate::policy::{Event, Expert, LayerShare, Policy, PolicySpec, Prediction, Profile};
use crate::units::size;
use crate::{Error, Result};

/// How to stream.
#[derive(Clone)]
pub struct StreamOptions {
    /// Bytes of memory for experts.
    pub budget: u64,
    pub io: IoKind,
    pub policy: PolicySpec,
    /// Experts that a token uses in a layer.
    pub k: usize,
    /// What policies have learned of the model before.
    pub profile: Profile,
    /// Whether a layer waits for every prefetch before it to land: hits
    /// then do not depend on time, for tests.
    pub lockstep: bool,
    /// Makes reads fail and wait, for tests.
    pub faults: Option<Arc<dyn Faults>>,
}

/// Layers without routed experts have no layout.
#[derive(Clone)]
struct Layouts(Vec<Option<SlotLayout>>);

impl Layouts {
    fn new(file: &Gguf, layers: &[Option<LayerExperts>]) -> Layouts {
        let layout = |layer: &Option<LayerExperts>| Some(SlotLayout::new(file, layer.as_ref()?));
        Layouts(layers.iter().map(layout).collect())
    }

    fn of(&self, layer: usize) -> &SlotLayout {
        self.0[layer].as_ref().expect("a layer with experts")
    }
}

impl Layout for Layouts {
    fn pieces(&self, expert: Expert, granules: std::ops::Range<usize>, out: &mut Vec<Piece>) {
        self.of(expert.layer as usize).pieces(expert.expert, granules, out);
    }
}

/// What layers and link threads share.
struct Core {
    tier: Tier,
    plan: TierPlan,
    layouts: Layouts,
    /// The slots of each size class.
    arenas: Vec<Region>,
    staging: Region,
}

impl Core {
    fn slot(&self, class: usize, slot: u32) -> *mut u8 {
        let bytes = self.plan.classes[class].slot_bytes;
        let at = slot as usize * bytes;
        assert!(at + bytes <= self.arenas[class].len());
        // SAFETY: in the region, by the assertion.
        unsafe { self.arenas[class].ptr().add(at) }
    }

    fn staging(&self, index: u32) -> *mut u8 {
        let at = index as usize * self.plan.staging_bytes;
        assert!(at + self.plan.staging_bytes <= self.staging.len());
        // SAFETY: in the region, by the assertion.
        unsafe { self.staging.ptr().add(at) }
    }

    fn read(&self, number: u32, ticket: &Ticket) -> Read {
        let Piece { shard, start: offset, len, need, to } = ticket.piece;
        let dest = match to {
            Dest::Slot { granule, at } => {
                assert!(at + len <= self.plan.classes[ticket.class].slot_bytes);
                let slot = ticket.slots[granule - ticket.first_granule];
                // SAFETY: in the slot, by the assertion.
                unsafe { self.slot(ticket.class, slot).add(at) }
            }
            Dest::Rows { .. } => {
                assert!(len <= self.plan.staging_bytes);
                self.staging(ticket.staging.expect("rows are staged"))
            }
        };
        Read { id: number, shard, offset, len, need, dest }
    }

    /// Copies staged rows of down to the granules they hold columns of.
    fn scatter(&self, ticket: &Ticket) {
        let Some(staging) = ticket.staging else { return };
        let slots: Vec<*mut u8> =
            ticket.slots.iter().map(|slot| self.slot(ticket.class, *slot)).collect();
        let granules = ticket.first_granule..ticket.first_granule + slots.len();
        // SAFETY: the read that filled this buffer has ended and its ticket has not, so nobody
        // else has the buffer; the slots belong to a load that is under way, so nobody reads
        // them, and other reads of the load write other bytes of them.
        unsafe {
            let staged = std::slice::from_raw_parts(self.staging(staging), ticket.piece.need);
            let layout = self.layouts.of(ticket.expert.layer as usize);
            layout.scatter(&ticket.piece, staged, granules, &slots);
        }
    }
}

// SAFETY: a read's bytes are those of a slot of a load that is under way, or of a staging buffer
// that its ticket holds; the state machine gives neither to anyone else before `end_read`, which
// `complete` calls last. The regions live as long as the core, which the link holds.
unsafe impl ReadSource for Core {
    fn next(&self, max: usize, wait: bool, out: &mut Vec<Read>) -> bool {
        let mut tickets = Vec::new();
        let open = self.tier.start_reads(max, wait, &mut tickets);
        out.extend(tickets.iter().map(|(number, ticket)| self.read(*number, ticket)));
        open
    }

    fn complete(&self, read: Read, result: io::Result<()>) {
        let ticket = self.tier.ticket(read.id);
        let result = match result {
            Ok(()) => {
                self.scatter(&ticket);
                Ok(())
            }
            Err(error) => {
                let Expert { layer, expert } = ticket.expert;
                Err(Fault(format!("expert {expert} of layer {layer}: {error}").into()))
            }
        };
        self.tier.end_read(read.id, result);
    }
}

/// The tier and the link that serves it.
struct Moving {
    core: Arc<Core>,
    link: Box<dyn Link>,
}

impl Moving {
    /// After a change: a link that sleeps is woken by a call of the system, so for a read alone.
    fn wake_link(&self) {
        if self.core.tier.can_start() {
            self.link.wake();
        }
    }
}

impl PolicyTarget for Moving {
    fn step(&self) -> u64 {
        self.core.tier.step()
    }

    fn prefetch(&self, predictions: &[Prediction], step: u64) {
        self.core.tier.prefetch(predictions, step);
        self.wake_link();
    }

    fn observe(&self, event: &Event) {
        self.core.tier.observe(event);
    }

    fn set_shares(&self, shares: &[LayerShare]) {
        self.core.tier.set_shares(shares);
    }

    fn counters(&self) -> Counters {
        self.core.tier.counters()
    }
}

pub struct RamTier {
    /// Before what it works on: its thread ends first.
    policy: PolicyDriver,
    moving: Arc<Moving>,
    geometry: Vec<Option<Geometry>>,
    /// For each layer the next one with routed experts, around the end to the next token's first.
    next_layer: Vec<usize>,
    lockstep: bool,
}

/// What streaming needs of each layer.
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
    (needs(file, layers, k).plan(budget), Box::new(Layouts::new(file, layers)))
}

impl RamTier {
    /// Allocates the slots and starts the link. The budget is at least the minimum of `needs`.
    pub fn new(
        file: &Gguf,
        layers: &[Option<LayerExperts>],
        options: &StreamOptions,
    ) -> Result<RamTier> {
        let plan = needs(file, layers, options.k).plan(options.budget);
        let region = |bytes: usize| {
            Region::new(bytes).map_err(|e| {
                let budget = size(options.budget);
                Error::invalid(format!("no memory for {budget} of experts (--ram): {e}"))
            })
        };
        let sizes = plan.classes.iter().map(|c| c.n_slots * c.slot_bytes);
        let arenas = sizes.map(region).collect::<Result<Vec<_>>>()?;
        let staging = region(plan.n_staging * plan.staging_bytes)?;
        let layouts = Layouts::new(file, layers);
        let shape = plan.shape(options.k);
        let policy = options.policy.build(&shape, &options.profile);
        let Policy { eviction, predictor, splitter, notes } = policy;
        notes.iter().for_each(|note| log::warn!("{note}"));
        let tier = Tier::new(plan.clone(), Box::new(layouts.clone()), eviction);
        let core = Arc::new(Core { tier, plan, layouts, arenas, staging });
        let regions = core.arenas.iter().chain([&core.staging]);
        let regions: Vec<_> = regions.map(|region| (region.ptr(), region.len())).collect();
        let link = link::open(
            options.io,
            Files::new(file)?,
            &regions,
            options.faults.clone(),
            core.clone(),
        )?;
        let moving = Arc::new(Moving { core, link });
        let bytes = |layer: &Option<LayerExperts>| layer.as_ref().map_or(0, |l| l.expert_bytes());
        let bytes: Vec<u64> = layers.iter().map(|layer| bytes(layer) as u64).collect();
        Ok(RamTier {
            policy: PolicyDriver::new(moving.clone(), predictor, splitter, &bytes),
            moving,
            geometry: layers.iter().map(|l| l.as_ref().map(|l| l.geometry)).collect(),
            next_layer: shape.next_moe_layers(),
            lockstep: options.lockstep,
        })
    }

    fn owner(&self) -> usize {
        Arc::as_ptr(&self.moving).addr()
    }

    /// Until everything has landed that can.
    fn wait_for_link(&self) {
        self.policy.catch_up();
        while self.tier().is_moving() {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn tier(&self) -> &Tier {
        &self.moving.core.tier
    }
}

impl ExpertStore for RamTier {
    fn geometry(&self, layer: usize) -> Option<Geometry> {
        self.geometry[layer]
    }

    fn acquire(&self, layer: usize, experts: &[u32], access: Access, work: &mut Acquisition) {
        if self.lockstep && access == Access::Prompt {
            // The layer prefetch has landed.
            self.wait_for_link();
        }
        work.start(self.owner(), layer, experts, access);
        self.tier().acquire(work);
        self.moving.wake_link();
    }

    fn next_ready(&self, work: &mut Acquisition) -> Result<bool> {
        work.check_owner(self.owner());
        let cancel = work.cancel.clone();
        let result = self.tier().next_ready(work, &|| {
            // Loads that had no room before may have been queued.
            self.moving.link.wake();
            cancel.is_cancelled()
        });
        self.moving.wake_link();
        result.map_err(|stop| match stop {
            Stop::Failed(Fault(sentence)) => Error::Load(sentence.to_string()),
            Stop::Interrupted => Error::Interrupted,
        })
    }

    fn ready<'w>(&'w self, work: &'w Acquisition, i: usize) -> ReadyGranule<'w> {
        work.check_owner(self.owner());
        let core = &self.moving.core;
        let layout = core.layouts.of(work.layer);
        let class = core.plan.layers[work.layer].class;
        let bytes = core.plan.classes[class].slot_bytes;
        let GranuleRef { expert, granule, slot } = work.handed[i];
        // SAFETY: the granule has landed, and the work that was handed it is borrowed, so it can
        // neither ask for more nor release, which is what would unpin the slot. No link writes to
        // a slot that is pinned.
        let slot =
            unsafe { std::slice::from_raw_parts(core.slot(class, slot).cast_const(), bytes) };
        layout.view(slot, expert, granule)
    }

    fn release(&self, work: &mut Acquisition) {
        // One that was never acquired has nothing to give back.
        if !work.is_open() {
            return;
        }
        work.check_owner(self.owner());
        self.tier().release(work);
        // Prefetches that waited for the loads given up here.
        self.moving.wake_link();
    }

    fn prefetch_layer(&self, layer: usize) {
        self.tier().prefetch_layer(layer, &|_| true);
        self.moving.wake_link();
    }

    fn cancel_layer_prefetch(&self) {
        self.tier().cancel_layer_prefetch();
        self.moving.wake_link();
    }

    fn looks_ahead(&self, layer: usize) -> Option<usize> {
        let wanted = self.policy.wants().ahead && !self.tier().has_everything();
        wanted.then(|| self.next_layer[layer])
    }

    fn listens(&self) -> bool {
        true
    }

    fn wants_hidden(&self) -> bool {
        self.policy.wants().hidden
    }

    fn observe(&self, event: &Event) {
        self.moving.observe(event);
        // With nothing left to bring there is nothing to ask a policy.
        if self.tier().has_everything() {
            return;
        }
        self.policy.observe(event);
        if self.lockstep {
            self.wait_for_link();
        }
    }

    fn verdict(&self) -> Option<String> {
        self.policy.verdict()
    }

    fn io(&self) -> Option<IoKind> {
        Some(self.moving.link.kind())
    }

    fn save(&self, profile: &mut Profile) {
        self.tier().save(profile);
        self.policy.save(profile);
    }

    fn upper_residency(&self) -> Option<Arc<UpperResidency>> {
        Some(self.tier().upper_residency())
    }

    fn counters(&self) -> Option<Counters> {
        let (policy_ns, policy_events_dropped) = self.policy.overhead();
        Some(Counters { policy_ns, policy_events_dropped, ..self.tier().counters() })
    }

    fn check_integrity(&self) -> bool {
        self.tier().check_integrity()
    }
}

impl Drop for RamTier {
    fn drop(&mut self) {
        // The link's threads end when they see it; dropping the link then waits for them.
        self.tier().close();
        self.moving.link.wake();
    }
}
