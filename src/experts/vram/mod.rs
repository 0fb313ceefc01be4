//! The VRAM tier: experts in a GPU's memory, above the store that holds them in host memory, and
//! the PCIe link between. It is the state machine of `experts::tier` again, with granules as
//! pieces.
//!
//! A decode layer does not ask before it runs. The host *pins* it: experts that are whole in VRAM
//! stay there, and a table of their slots goes to the device, which looks up the experts that its
//! router chooses. The host acquires granules of experts that the table lacks, as it does for
//! prompts, or has them computed elsewhere. When the device has finished the layer, the host unpins
//! it.
//!
//! A caller that hands granules back says by a `Fence` up to which point of the device's work they
//! are in use, so it need not wait for that. Two rules prevent deadlocks. A fence must be reached
//! without the host, so a layer whose kernels wait for a signal from the host is unpinned after
//! that signal. And a thread that holds granules of the tier below must not wait for granules here.

mod feed;
mod fence;
mod layout;
mod link;
mod mover;
mod owners;
mod pinned_tier;
mod slot_table;
mod staging;
mod tiers;
mod timer;

pub use fence::Fence;
pub use layout::{GranuleLayout, GranulePart, needs as slots};
pub use mover::PcieMover;
pub use owners::{Dealt, Own, Owners};
pub use pinned_tier::PinnedTier;
pub use slot_table::SlotTable;
pub use tiers::VramTiers;

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use super::runtime::{RuntimeOptions, TierRuntime};
use crate::backend::gpu::{Device, DeviceBuffer, DeviceSlice, PinnedKind, no_room};
use crate::experts::{
    Access, Acquisition, ExpertStatus, ExpertStore, GranuleRef, LayerExperts, LayerPart, Needs,
    ReadyGranule, TierPlan,
};
use crate::policy::{Expert, PolicySpec, Profile};
use crate::units::{at_least, at_most, size};
use crate::{Error, Result};
use fence::Fences;
use mover::{Core, Layer, Layers, Pieces};
use timer::LinkTimer;

/// Options for keeping experts in VRAM.
#[derive(Clone)]
pub struct VramOptions {
    /// Bytes of slots.
    pub budget: u64,
    pub policy: PolicySpec,
    /// Experts that a token uses in a layer.
    pub k: usize,
    /// The experts that may be here; all, where one device holds experts.
    pub own: Option<Own>,
    /// The profile that policies have learned for the model.
    pub profile: Profile,
    /// Whether `observe` waits for everything that was predicted to land: hits then do not depend
    /// on time, for tests.
    pub lockstep: bool,
    /// Threads that bring granules up, each with a stream. With one alone, demand may wait for a
    /// prefetch that waits for the tier below.
    pub n_streams: usize,
    /// The kind of the buffers that granules go through.
    pub pinned: PinnedKind,
    /// The tier below, where granules are copied from it directly.
    pub source: Option<Arc<PinnedTier>>,
}

impl VramOptions {
    pub fn new(budget: u64, policy: PolicySpec, k: usize) -> VramOptions {
        VramOptions {
            budget,
            policy,
            k,
            own: None,
            profile: Profile::default(),
            lockstep: false,
            n_streams: 2,
            pinned: PinnedKind::WriteCombined,
            source: None,
        }
    }
}

/// A granule in VRAM.
#[derive(Clone, Copy, Debug)]
pub struct VramGranule<'a> {
    /// Within its layer.
    pub expert: u32,
    /// Within its expert.
    pub granule: usize,
    /// Its slot, which begins at a multiple of 256.
    pub slot: DeviceSlice<'a>,
}

/// Experts in VRAM, copied from host memory.
pub type VramTier = TierRuntime<PcieMover>;

/// The slots that the experts of the tier need.
fn needs(layers: &[Option<LayerExperts>], k: usize, own: Option<&Own>) -> Needs {
    let layer = |(l, layer): (usize, &Option<LayerExperts>)| {
        let mut needs = layout::needs(layer.as_ref()?, k);
        needs.n_experts = own.map_or(needs.n_experts, |own| own.n_of(l));
        needs.k = needs.k.min(needs.n_experts);
        Some(needs)
    };
    Needs(layers.iter().enumerate().map(layer).collect())
}

impl VramTier {
    /// The least budget: in each size class one token's experts of a layer and one expert more.
    pub fn minimum_bytes(layers: &[Option<LayerExperts>], k: usize) -> u64 {
        needs(layers, k, None).minimum_bytes()
    }

    /// A budget with a slot for every granule.
    pub fn all_bytes(layers: &[Option<LayerExperts>], k: usize) -> u64 {
        needs(layers, k, None).all_bytes()
    }

    /// Allocates the slots and starts the link. `layers`, as `source` has them, where experts are
    /// to be in VRAM.
    pub fn new(
        gpu: &Device,
        layers: &[Option<LayerExperts>],
        source: Arc<dyn ExpertStore>,
        options: &VramOptions,
    ) -> Result<VramTier> {
        let plan = plan(layers, options)?;
        let arena = |bytes: usize| {
            DeviceBuffer::new(gpu, bytes).map_err(|error| {
                let budget = size(options.budget);
                no_room(gpu, &format!("{budget} of experts (--vram)"), error)
            })
        };
        let sizes = plan.classes.iter().map(|c| c.n_slots * c.slot_bytes);
        let arenas = sizes.map(arena).collect::<Result<Vec<_>>>()?;
        let layer = |(index, l): (usize, &Option<LayerExperts>)| {
            let l = l.as_ref()?;
            let is_readable = source.are_parts_at(index, layout::PART_ALIGN);
            Some(Layer { experts: *l, layout: GranuleLayout::new(l), is_readable })
        };
        let table = |l: &LayerExperts| {
            let n_granules = GranuleLayout::new(l).n_granules;
            Mutex::new(SlotTable::new(l.n_experts * n_granules))
        };
        let tables = layers.iter().map(|l| l.as_ref().map(table)).collect();
        let moving: Layers = layers.iter().enumerate().map(layer).collect();
        let VramOptions { policy, k, ref profile, lockstep, .. } = *options;
        let runtime = RuntimeOptions { policy, k, profile, lockstep };
        let pieces = Box::new(Pieces {
            layers: moving.clone(),
            own: options.own.clone(),
            source: source.clone(),
        });
        TierRuntime::open(&plan, pieces, layers, &runtime, |tier| {
            let core = Core {
                tier,
                fences: Fences::new(&plan.classes),
                plan: plan.clone(),
                layers: moving,
                tables,
                arenas,
                timer: LinkTimer::new(),
                own: options.own.clone(),
                source,
                pinned: options.source.clone(),
                in_place_bytes: AtomicU64::new(0),
                lost: OnceLock::new(),
            };
            PcieMover::open(core, gpu, options)
        })
    }

    fn core(&self) -> &Core {
        &self.mover.core
    }

    /// Bytes that were copied out of the tier below without being packed.
    pub fn in_place_bytes(&self) -> u64 {
        self.core().in_place_bytes.load(Ordering::Relaxed)
    }

    pub fn layout(&self, layer: usize) -> GranuleLayout {
        self.layer(layer).layout
    }

    fn layer(&self, layer: usize) -> &Layer {
        self.core().layers[layer].as_ref().expect("a layer with experts in VRAM")
    }

    fn class(&self, layer: usize) -> usize {
        self.core().plan.layers[layer].class
    }

    // ---- a layer that looks up by itself ----

    /// Pins what is whole of the layer, but for some of it where the budget is small, until
    /// `unpin_layer`, and makes `table` a copy of the layer's slot table. Returns whether it was
    /// another. If not, this takes two locks and a comparison.
    pub fn pin_layer(&self, layer: usize, table: &mut SlotTable) -> bool {
        let (core, class) = (self.core(), self.class(layer));
        let n_granules = self.layer(layer).layout.n_granules;
        let kept = core.tables[layer].as_ref().expect("a layer with experts in VRAM");
        let mut kept = kept.lock().expect("no panic under this lock");
        core.tier.pin_layer(layer, &mut |expert, slots| {
            let at = expert as usize * n_granules;
            match slots {
                [] => kept.set(at, std::iter::repeat_n(0, n_granules)),
                _ => kept.set(at, slots.iter().map(|slot| core.slot(class, *slot).address())),
            }
        });
        table.update(&kept)
    }

    /// The slot at an address that `pin_layer` wrote.
    ///
    /// # Panics
    /// If there is none.
    pub fn slot_at(&self, layer: usize, address: u64) -> DeviceSlice<'_> {
        let class = self.class(layer);
        let offset = address - self.core().arenas[class].all().address();
        let slot_bytes = self.core().plan.classes[class].slot_bytes as u64;
        assert!(offset.is_multiple_of(slot_bytes), "{address:#x} is no slot of layer {layer}");
        self.core().slot(class, (offset / slot_bytes) as u32)
    }

    /// The device is through with a pinned layer, or will be at `end`. `used` are the experts that
    /// its tokens chose: of those that may be here, the pinned ones are counted as hits, those that
    /// were not acquired either as misses. (The policy hears of them all by `observe`.)
    pub fn unpin_layer(&self, layer: usize, used: &[u32], end: Option<&Fence>) {
        let class = self.class(layer);
        self.core().tier.unpin_layer(
            layer,
            &self.own(layer, used),
            &mut |GranuleRef { slot, .. }| {
                if let Some(end) = end {
                    self.core().fences.note(class, [slot].into_iter(), end);
                }
            },
        );
    }

    /// The experts that may be here.
    fn own<'a>(&self, layer: usize, experts: &'a [u32]) -> Cow<'a, [u32]> {
        match &self.core().own {
            None => Cow::Borrowed(experts),
            Some(own) => experts.iter().copied().filter(|e| own.has(layer, *e)).collect(),
        }
    }

    /// Appends the status of each of a layer's experts.
    pub fn report(&self, layer: usize, out: &mut Vec<ExpertStatus>) {
        self.core().tier.report(layer, out);
    }

    /// Whether all granules of all experts that may be here are in VRAM.
    pub fn has_everything(&self) -> bool {
        self.core().tier.has_everything()
    }

    /// Whether all granules of an expert are in VRAM.
    pub fn is_whole(&self, layer: usize, expert: u32) -> bool {
        self.core().tier.is_whole(Expert { layer: layer as u32, expert })
    }

    /// Whether all granules of all of the layer's experts are in VRAM.
    pub fn is_layer_whole(&self, layer: usize) -> bool {
        self.core().tier.is_layer_whole(layer)
    }

    /// The part of an expert that a load would bring, from 0 to 1.
    pub fn missing_part(&self, layer: usize, expert: u32) -> f64 {
        self.core().tier.missing_part(Expert { layer: layer as u32, expert })
    }

    // ---- demand ----

    /// Pins `experts` (distinct) and queues loads of what is missing.
    pub fn acquire(
        &self,
        layer: usize,
        experts: &[u32],
        access: Access,
        acquisition: &mut Acquisition,
    ) {
        debug_assert_eq!(*self.own(layer, experts), *experts, "experts of another device");
        self.demand(layer, LayerPart::whole(experts), access, acquisition);
    }

    /// Takes back the granules that were handed out, in use until `end` (`None`: no more), and
    /// hands out more that are in VRAM, waiting if there are none; false when all have been.
    /// Returns the error of a failed load, and `Error::Interrupted` if the user interrupts the
    /// wait.
    pub fn next_ready(&self, acquisition: &mut Acquisition, end: Option<&Fence>) -> Result<bool> {
        self.note_handed(acquisition, end);
        self.wait_ready(acquisition)
    }

    /// Granule `i` of the `Acquisition::n_handed` that are handed out. Granules of one expert are
    /// next to each other and in order.
    pub fn ready(&self, acquisition: &Acquisition, i: usize) -> VramGranule<'_> {
        acquisition.check_owner(self.owner());
        let GranuleRef { expert, granule, slot } = acquisition.handed[i];
        VramGranule { expert, granule, slot: self.core().slot(self.class(acquisition.layer), slot) }
    }

    /// Unpins, at any time. What is handed out is in use until `end` (`None`: no more).
    pub fn release(&self, acquisition: &mut Acquisition, end: Option<&Fence>) {
        // One that was never acquired has nothing to give back.
        if acquisition.is_open() {
            self.note_handed(acquisition, end);
            self.end_demand(acquisition);
        }
    }

    /// Notes that the device uses what is handed out until `end`.
    fn note_handed(&self, acquisition: &Acquisition, end: Option<&Fence>) {
        acquisition.check_owner(self.owner());
        if let Some(end) = end {
            let slots = acquisition.handed.iter().map(|handed| handed.slot);
            self.core().fences.note(self.class(acquisition.layer), slots, end);
        }
    }

    /// Experts that were computed elsewhere and are worth having here the next time: they come
    /// when the link has nothing else to do, and only in the place of what is worth less. Those
    /// that may not be here are left out.
    pub fn admit(&self, layer: usize, experts: &[u32]) {
        self.core().tier.admit(layer, &self.own(layer, experts));
    }

    // ---- in place ----

    /// Whether kernels of the first device can read the expert where the tier below has it now.
    pub fn is_readable_below(&self, layer: usize, expert: u32) -> bool {
        let (core, id) = (self.core(), Expert { layer: layer as u32, expert });
        self.layer(layer).is_readable
            && core.pinned.as_ref().is_some_and(|pinned| pinned.is_readable())
            && core.source.is_whole(id)
    }

    /// The parts of a granule of the tier below, gate, up and down, and the addresses at which
    /// kernels of the first device read them, if they can. Gate is empty where experts have none.
    pub fn below<'a>(
        &self,
        layer: usize,
        granule: &ReadyGranule<'a>,
    ) -> Option<([&'a [u8]; 3], [u64; 3])> {
        let Layer { experts, layout, .. } = self.layer(layer);
        let parts = self.core().in_place(&GranulePart::of(experts, layout, granule))?;
        let pinned = self.core().pinned.as_ref()?;
        let address = |bytes: &[u8]| if bytes.is_empty() { Some(0) } else { pinned.address(bytes) };
        let [gate, up, down] = parts.map(address);
        Some((parts, [gate?, up?, down?]))
    }

    /// Bytes of an expert of the layer.
    pub fn expert_bytes(&self, layer: usize) -> usize {
        self.layer(layer).experts.expert_bytes()
    }

    // ---- what the link takes ----

    /// One expert of the layer from RAM, by measurement; `None` before the first.
    pub fn load_ns(&self, layer: usize) -> Option<f64> {
        self.core().timer.load_ns(self.layer(layer).experts.expert_bytes() as u64)
    }

    /// The time that the running transfers still take.
    pub fn delay_ns(&self) -> f64 {
        self.core().timer.delay_ns(Instant::now())
    }
}

fn plan(layers: &[Option<LayerExperts>], options: &VramOptions) -> Result<TierPlan> {
    assert!(options.n_streams > 0);
    let needs = needs(layers, options.k, options.own.as_ref());
    let least = needs.minimum_bytes();
    if options.budget < least {
        let (budget, least) = (at_most(options.budget), at_least(least));
        return Err(Error::invalid(format!(
            "{budget} for experts on the GPU (--vram): at least {least} are needed"
        )));
    }
    let mut plan = needs.plan(options.budget);
    // Experts keep their numbers, whosever they are.
    for (plan, layer) in plan.layers.iter_mut().zip(layers) {
        plan.n_experts = layer.map_or(0, |layer| layer.n_experts);
    }
    Ok(plan)
}
