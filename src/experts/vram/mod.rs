//! Experts in a GPU's memory: a tier of slots in VRAM above whatever holds the experts in the
//! host's memory, and the link between. It is the state machine of `experts::tier` again, with
//! granules for pieces.
//!
//! A decode layer does not ask before it runs. The host *pins* it: what is whole in VRAM then
//! stays there, and a table of its places goes to the device, which looks up what its router
//! chooses. For what the table does not name the host acquires granules, as it does for prompts,
//! or has them computed elsewhere. When the device is through with the layer, it is unpinned.
//!
//! Who hands granules back says up to which point of the device's work they are in use, by a
//! `Fence`: nobody need wait for that. Two rules keep everyone moving. A fence must come to pass
//! without the host, so a layer whose kernels wait for a word of the host's is unpinned after that
//! word. And who holds granules of the tier below must not wait for granules here.

mod feed;
mod fence;
mod layout;
mod link;
mod owners;
mod shared;
mod staging;
mod tiers;
mod timer;

pub use fence::Fence;
pub use layout::{GranuleLayout, Part, needs as slots};
pub use owners::{Dealt, Own, Owners};
pub use tiers::VramTiers;

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::backend::gpu::{Device, DeviceBuffer, DeviceSlice, PinnedKind, no_room};
use crate::experts::policy_driver::{PolicyDriver, PolicyTarget};
use crate::experts::tier::{Fault, Stop, Tier};
use crate::experts::{
    Access, Acquisition, Counters, ExpertStore, GranuleRef, LayerExperts, Needs, TierPlan,
};
use crate::policy::{Event, Expert, Policy, PolicySpec, Profile};
use crate::units::{at_least, at_most, size};
use crate::{Error, Result};
use fence::Fences;
use link::Link;
use shared::{Core, Layer, Layers, Pieces};
use timer::LinkTimer;

/// How to keep experts in VRAM.
#[derive(Clone)]
pub struct VramOptions {
    /// Bytes of slots.
    pub budget: u64,
    pub policy: PolicySpec,
    /// Experts that a token uses in a layer.
    pub k: usize,
    /// Those that may be here; all, where one device holds experts.
    pub own: Option<Own>,
    /// What policies have learned of the model before.
    pub profile: Profile,
    /// Whether `observe` waits for everything that was predicted to land: hits then do not depend
    /// on time, for tests.
    pub lockstep: bool,
    /// Threads that bring granules up, each with a stream. With one alone, demand may wait for a
    /// prefetch that waits for the tier below.
    pub n_streams: usize,
    /// Of the buffers that granules go through.
    pub pinned: PinnedKind,
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

pub struct VramTier {
    /// Before what it works on: its thread ends first.
    policy: PolicyDriver,
    /// Its threads end next; the core, and with it the slots, last.
    _link: Link,
    core: Arc<Core>,
    next_layer: Vec<usize>,
    lockstep: bool,
}

/// Of the experts that may be here.
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
        let layer = |l: &LayerExperts| Layer { experts: *l, layout: GranuleLayout::new(l) };
        let moving: Layers = layers.iter().map(|l| l.as_ref().map(layer)).collect();
        let shape = plan.shape(options.k);
        let Policy { eviction, predictor, splitter, notes } =
            options.policy.build(&shape, &options.profile);
        notes.iter().for_each(|note| log::warn!("{note}"));
        let core = Arc::new(Core {
            tier: Tier::new(plan.clone(), Box::new(Pieces(moving.clone())), eviction),
            fences: Fences::new(&plan.classes),
            plan,
            layers: moving,
            arenas,
            timer: LinkTimer::new(),
            own: options.own.clone(),
            source,
            lost: OnceLock::new(),
        });
        if let Some(lower) = core.source.upper_residency() {
            core.tier.set_lower_tier(lower);
        }
        let link = Link::open(&core, gpu, options.pinned, options.n_streams)?;
        let bytes = |layer: &Option<LayerExperts>| layer.as_ref().map_or(0, |l| l.expert_bytes());
        let bytes: Vec<u64> = layers.iter().map(|layer| bytes(layer) as u64).collect();
        Ok(VramTier {
            policy: PolicyDriver::new(core.clone(), predictor, splitter, &bytes),
            _link: link,
            core,
            next_layer: shape.next_moe_layers(),
            lockstep: options.lockstep,
        })
    }

    /// Whether experts of this layer are here at all.
    pub fn has(&self, layer: usize) -> bool {
        self.core.layers[layer].is_some()
    }

    pub fn layout(&self, layer: usize) -> GranuleLayout {
        self.layer(layer).layout
    }

    fn layer(&self, layer: usize) -> &Layer {
        self.core.layers[layer].as_ref().expect("a layer with experts in VRAM")
    }

    fn owner(&self) -> usize {
        Arc::as_ptr(&self.core).addr()
    }

    fn class(&self, layer: usize) -> usize {
        self.core.plan.layers[layer].class
    }

    // ---- a layer that looks up by itself ----

    /// Pins what is whole of the layer, but for some of it where the budget is small, and writes
    /// its places to `addresses`, [experts, granules]; 0 is what is not to be relied on. Until
    /// `unpin_layer`.
    pub fn pin_layer(&self, layer: usize, addresses: &mut [u64]) {
        let Layer { experts, layout } = self.layer(layer);
        assert_eq!(addresses.len(), experts.n_experts * layout.n_granules);
        addresses.fill(0);
        let class = self.class(layer);
        self.core.tier.pin_layer(layer, &mut |GranuleRef { expert, granule, slot }| {
            let at = expert as usize * layout.n_granules + granule;
            addresses[at] = self.core.slot(class, slot).address();
        });
    }

    /// The slot at an address that `pin_layer` wrote.
    ///
    /// # Panics
    /// If there is none.
    pub fn slot_at(&self, layer: usize, address: u64) -> DeviceSlice<'_> {
        let class = self.class(layer);
        let offset = address - self.core.arenas[class].all().address();
        let slot_bytes = self.core.plan.classes[class].slot_bytes as u64;
        assert!(offset.is_multiple_of(slot_bytes), "{address:#x} is no slot of layer {layer}");
        self.core.slot(class, (offset / slot_bytes) as u32)
    }

    /// The device is through with a pinned layer, or will be at `end`. `used` are the experts that
    /// its tokens chose: of those that may be here, the pinned ones are counted as hits, those that
    /// were not acquired either as misses. (The policy hears of them all by `observe`.)
    pub fn unpin_layer(&self, layer: usize, used: &[u32], end: Option<&Fence>) {
        let class = self.class(layer);
        self.core.tier.unpin_layer(
            layer,
            &self.own(layer, used),
            &mut |GranuleRef { slot, .. }| {
                if let Some(end) = end {
                    self.core.fences.note(class, [slot].into_iter(), end);
                }
            },
        );
    }

    /// Those that may be here.
    fn own<'a>(&self, layer: usize, experts: &'a [u32]) -> Cow<'a, [u32]> {
        match &self.core.own {
            None => Cow::Borrowed(experts),
            Some(own) => experts.iter().copied().filter(|e| own.has(layer, *e)).collect(),
        }
    }

    /// Whether all granules of an expert are in VRAM.
    pub fn is_whole(&self, layer: usize, expert: u32) -> bool {
        self.core.tier.is_whole(Expert { layer: layer as u32, expert })
    }

    // ---- demand ----

    /// Pins `experts` (distinct) and queues loads of what is missing.
    pub fn acquire(&self, layer: usize, experts: &[u32], access: Access, work: &mut Acquisition) {
        debug_assert_eq!(*self.own(layer, experts), *experts, "experts of another device");
        work.start(self.owner(), layer, experts, access);
        self.core.tier.acquire(work);
    }

    /// Takes back the granules that were handed out, in use until `end` (`None`: no more), and
    /// hands out more that are in VRAM, waiting if there are none; false when all have been. A
    /// failed load is returned here, and so is an interruption by the user.
    pub fn next_ready(&self, work: &mut Acquisition, end: Option<&Fence>) -> Result<bool> {
        work.check_owner(self.owner());
        self.note_handed(work, end);
        let cancel = work.cancel.clone();
        let result = self.core.tier.next_ready(work, &|| cancel.is_cancelled());
        result.map_err(|stop| self.error(stop))
    }

    fn error(&self, stop: Stop) -> Error {
        match (stop, self.core.lost.get()) {
            (Stop::Interrupted, _) => Error::Interrupted,
            (Stop::Failed(_), Some(why)) => Error::Device(why.clone()),
            (Stop::Failed(Fault(sentence)), None) => Error::Load(sentence.to_string()),
        }
    }

    /// Granule `i` of the `Acquisition::n_handed` that are handed out. Granules of one expert are
    /// next to each other and in order.
    pub fn ready(&self, work: &Acquisition, i: usize) -> VramGranule<'_> {
        work.check_owner(self.owner());
        let GranuleRef { expert, granule, slot } = work.handed[i];
        VramGranule { expert, granule, slot: self.core.slot(self.class(work.layer), slot) }
    }

    /// Unpins, at any time. What is handed out is in use until `end` (`None`: no more).
    pub fn release(&self, work: &mut Acquisition, end: Option<&Fence>) {
        // One that was never acquired has nothing to give back.
        if !work.is_open() {
            return;
        }
        work.check_owner(self.owner());
        self.note_handed(work, end);
        self.core.tier.release(work);
    }

    /// See `ExpertStore::prefetch_layer`. The tier below needs no prefetch of its own for it: the
    /// PCIe link demands one expert after the other there.
    pub fn prefetch_layer(&self, layer: usize) {
        let own = self.core.own.as_ref();
        let is_own = |expert| own.is_none_or(|own| own.has(layer, expert));
        self.core.tier.prefetch_layer(layer, &is_own);
    }

    pub fn cancel_layer_prefetch(&self) {
        self.core.tier.cancel_layer_prefetch();
    }

    fn note_handed(&self, work: &Acquisition, end: Option<&Fence>) {
        if let Some(end) = end {
            let slots = work.handed.iter().map(|handed| handed.slot);
            self.core.fences.note(self.class(work.layer), slots, end);
        }
    }

    /// Experts that were computed elsewhere and are worth having here the next time: they come
    /// when the link has nothing else to do, and only in the place of what is worth less. Those
    /// that may not be here are left out.
    pub fn admit(&self, layer: usize, experts: &[u32]) {
        self.core.tier.admit(layer, &self.own(layer, experts));
    }

    // ---- what the link takes ----

    /// One expert of the layer from RAM, by measurement; `None` before the first.
    pub fn load_ns(&self, layer: usize) -> Option<f64> {
        self.core.timer.load_ns(self.layer(layer).experts.expert_bytes() as u64)
    }

    /// What is left of the transfers that are running.
    pub fn delay_ns(&self) -> f64 {
        self.core.timer.delay_ns(Instant::now())
    }

    // ---- the policy: as of `ExpertStore` ----

    /// The layer whose router a predictor wants to see applied to this layer's activation.
    pub fn looks_ahead(&self, layer: usize) -> Option<usize> {
        let wanted = self.policy.wants().ahead && !self.core.tier.has_everything();
        wanted.then(|| self.next_layer[layer])
    }

    pub fn listens(&self) -> bool {
        true
    }

    /// Whether a predictor wants `Routed::hidden`.
    pub fn wants_hidden(&self) -> bool {
        self.policy.wants().hidden
    }

    /// What happened, for the policy.
    pub fn observe(&self, event: &Event) {
        self.core.observe(event);
        // With nothing left to bring there is nothing to ask a policy.
        if self.core.tier.has_everything() {
            return;
        }
        self.policy.observe(event);
        if self.lockstep {
            self.wait_for_link();
        }
    }

    /// Until everything has landed that can.
    fn wait_for_link(&self) {
        self.policy.catch_up();
        while self.core.tier.is_moving() {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// What the policy has decided and why.
    pub fn verdict(&self) -> Option<String> {
        self.policy.verdict()
    }

    /// Puts what the policy has learned into the profile.
    pub fn save(&self, profile: &mut Profile) {
        self.core.tier.save(profile);
        self.policy.save(profile);
    }

    pub fn counters(&self) -> Counters {
        let (policy_ns, policy_events_dropped) = self.policy.overhead();
        Counters { policy_ns, policy_events_dropped, ..self.core.tier.counters() }
    }

    /// Panics if an invariant is broken; answers whether nothing is pinned or on its way.
    pub fn check_integrity(&self) -> bool {
        self.core.tier.check_integrity()
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

impl Drop for VramTier {
    fn drop(&mut self) {
        // The link's threads end when they see it; dropping the link then waits for them.
        self.core.tier.close();
    }
}
