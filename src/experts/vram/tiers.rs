//! The tiers of all of a model's devices. Each expert has one device.

use std::sync::Arc;

use super::owners::Owners;
use super::{Fence, VramTier};
use crate::experts::{Counters, PolicyClient, PredictedLayers};
use crate::policy::Schedule;

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

    /// Tiers that hold experts of a layer, with their devices.
    pub fn of_layer(&self, layer: usize) -> impl Iterator<Item = (usize, &VramTier)> {
        let of_device = self.of_device.iter().enumerate();
        let there = of_device.filter_map(|(device, vram)| Some((device, vram.as_deref()?)));
        there.filter(move |(_, vram)| vram.has(layer))
    }

    /// Whether experts of this layer are in VRAM at all.
    pub fn has(&self, layer: usize) -> bool {
        self.of_layer(layer).next().is_some()
    }

    /// See `VramTier::has_everything`, of all.
    pub fn has_everything(&self) -> bool {
        self.iter().all(VramTier::has_everything)
    }

    /// The device that an expert is on, if it is on any.
    pub fn device(&self, layer: usize, expert: u32) -> usize {
        self.owners.as_ref().map_or(0, |owners| owners.device(layer, expert))
    }

    /// Its tier, in a layer that these have.
    pub fn vram(&self, layer: usize, expert: u32) -> &VramTier {
        self.get(self.device(layer, expert)).expect("the owner of an expert has a tier")
    }

    /// The part of an expert that a load would bring.
    pub fn missing_part(&self, layer: usize, expert: u32) -> f64 {
        self.vram(layer, expert).missing_part(layer, expert)
    }

    /// Whether the first device's kernels can read an expert of its own where the tier below has
    /// it.
    pub fn is_readable_below(&self, layer: usize, expert: u32) -> bool {
        let first = self.get(0).filter(|vram| vram.has(layer) && self.device(layer, expert) == 0);
        first.is_some_and(|vram| vram.is_readable_below(layer, expert))
    }

    /// See `VramTier::unpin_layer`, of each.
    pub fn unpin_layer(&self, layer: usize, used: &[u32], end: Option<&Fence>) {
        self.of_layer(layer).for_each(|(_, vram)| vram.unpin_layer(layer, used, end));
    }

    /// See `VramTier::admit`, of each.
    pub fn admit(&self, layer: usize, experts: &[u32]) {
        self.of_layer(layer).for_each(|(_, vram)| vram.admit(layer, experts));
    }

    /// Adds what is predicted and missing of the layers behind `layer`, in all tiers.
    pub fn predicted(&self, layer: usize, out: &mut PredictedLayers) {
        self.iter().for_each(|vram| vram.predicted(layer, out));
    }

    /// See `TierRuntime::prefetch_planned`, of each.
    pub fn prefetch_planned(&self, layer: usize, schedule: &Schedule) {
        self.iter().for_each(|vram| vram.prefetch_planned(layer, schedule));
    }

    /// See `TierRuntime::set_attention_ns`, of each.
    pub fn set_attention_ns(&self, ns: f64) {
        self.iter().for_each(|vram| vram.set_attention_ns(ns));
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

    /// The cost of all together.
    pub fn counters(&self) -> Counters {
        let each = self.iter().map(PolicyClient::counters);
        each.reduce(|all, one| all.beside(&one)).unwrap_or_default()
    }
}
