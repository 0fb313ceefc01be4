//! The tiers of all of a model's devices, each with its own experts: what the rest of the engine
//! asks of them together.

use std::sync::Arc;

use super::owners::Owners;
use super::{Fence, VramTier};
use crate::experts::Counters;
use crate::policy::{Event, Profile};

pub struct VramTiers {
    /// By device; `None` where one holds no experts. Some device does.
    of_device: Vec<Option<Arc<VramTier>>>,
    /// With several devices.
    owners: Option<Arc<Owners>>,
}

impl VramTiers {
    pub fn one(vram: VramTier) -> VramTiers {
        VramTiers { of_device: vec![Some(Arc::new(vram))], owners: None }
    }

    pub fn several(of_device: Vec<Option<Arc<VramTier>>>, owners: Arc<Owners>) -> VramTiers {
        VramTiers { of_device, owners: Some(owners) }
    }

    pub fn get(&self, device: usize) -> Option<&VramTier> {
        self.of_device[device].as_deref()
    }

    pub fn iter(&self) -> impl Iterator<Item = &VramTier> {
        self.of_device.iter().flatten().map(|vram| &**vram)
    }

    /// Those that hold experts of a layer, with their devices.
    pub fn of_layer(&self, layer: usize) -> impl Iterator<Item = (usize, &VramTier)> {
        let of_device = self.of_device.iter().enumerate();
        let there = of_device.filter_map(|(device, vram)| Some((device, vram.as_deref()?)));
        there.filter(move |(_, vram)| vram.has(layer))
    }

    /// Whether experts of this layer are in VRAM at all.
    pub fn has(&self, layer: usize) -> bool {
        self.of_layer(layer).next().is_some()
    }

    /// The device that an expert is on, if it is on any.
    pub fn device(&self, layer: usize, expert: u32) -> usize {
        self.owners.as_ref().map_or(0, |owners| owners.device(layer, expert))
    }

    /// Its tier, in a layer that these have.
    pub fn vram(&self, layer: usize, expert: u32) -> &VramTier {
        self.get(self.device(layer, expert)).expect("the owner of an expert has a tier")
    }

    pub fn is_whole(&self, layer: usize, expert: u32) -> bool {
        self.vram(layer, expert).is_whole(layer, expert)
    }

    /// See `VramTier::unpin_layer`, of each.
    pub fn unpin_layer(&self, layer: usize, used: &[u32], end: Option<&Fence>) {
        self.of_layer(layer).for_each(|(_, vram)| vram.unpin_layer(layer, used, end));
    }

    /// See `VramTier::admit`, of each.
    pub fn admit(&self, layer: usize, experts: &[u32]) {
        self.of_layer(layer).for_each(|(_, vram)| vram.admit(layer, experts));
    }

    /// Prefetches a layer in each tier that has it, and nothing in the others.
    pub fn prefetch_layer(&self, layer: usize) {
        for vram in self.iter() {
            match vram.has(layer) {
                true => vram.prefetch_layer(layer),
                false => vram.cancel_layer_prefetch(),
            }
        }
    }

    pub fn cancel_layer_prefetch(&self) {
        self.iter().for_each(VramTier::cancel_layer_prefetch);
    }

    // ---- the policies: as of `ExpertStore`. Each tier has its own, and hears everything ----

    pub fn looks_ahead(&self, layer: usize) -> Option<usize> {
        self.iter().find_map(|vram| vram.looks_ahead(layer))
    }

    pub fn listens(&self) -> bool {
        self.iter().any(VramTier::listens)
    }

    pub fn wants_hidden(&self) -> bool {
        self.iter().any(VramTier::wants_hidden)
    }

    pub fn observe(&self, event: &Event) {
        for vram in self.iter() {
            if let Some(event) = event.of_layers(&|layer| vram.has(layer as usize)) {
                vram.observe(&event);
            }
        }
    }

    /// The first one's: all have heard the same.
    pub fn verdict(&self) -> Option<String> {
        self.iter().next().and_then(VramTier::verdict)
    }

    /// What the first one has learned, for the same reason.
    pub fn save(&self, profile: &mut Profile) {
        if let Some(vram) = self.iter().next() {
            vram.save(profile);
        }
    }

    /// Of all together.
    pub fn counters(&self) -> Counters {
        let of_each = self.iter().map(VramTier::counters);
        of_each.reduce(|all, one| all.beside(&one)).unwrap_or_default()
    }

    /// Panics if an invariant is broken; answers whether nothing is pinned or on its way.
    pub fn check_integrity(&self) -> bool {
        // All are asked.
        self.iter().filter(|vram| !vram.check_integrity()).count() == 0
    }
}
