//! All tiers that hold a model's routed experts, as one: what the layer loops ask and tell.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::disk::{IoKind, RamTier};
use super::peers::Peers;
use super::vram::VramTiers;
use super::{Counters, ExpertStatus, ExpertStore, PolicyClient, Presence, Resident};
use crate::policy::{Event, Profile, Wants};

/// The place of an expert: the best of the tiers that have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertPlace {
    #[default]
    Disk,
    /// On its way to memory.
    InFlight,
    /// A part of it is in host memory.
    PartInRam,
    Ram,
    Vram,
}

/// An expert for those who look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlacedExpert {
    pub place: ExpertPlace,
    /// Demands that found it where it was wanted, and those that had to bring it. They wrap around.
    pub n_hits: u32,
    pub n_misses: u32,
}

/// Routed experts in host memory, and those of them that devices hold.
pub struct Hierarchy {
    host: Arc<dyn ExpertStore>,
    /// `host` where experts are streamed.
    ram: Option<Arc<RamTier>>,
    vram: Option<Arc<VramTiers>>,
    /// Machines that compute experts.
    peers: Option<Arc<Peers>>,
    /// Look-aheads that were computed.
    n_look_aheads: AtomicU64,
}

impl Hierarchy {
    /// Experts are computed in place.
    pub fn in_place(experts: Resident) -> Hierarchy {
        Hierarchy::new(Arc::new(experts), None)
    }

    /// Experts are streamed from disk.
    pub fn streamed(ram: RamTier) -> Hierarchy {
        let ram = Arc::new(ram);
        Hierarchy::new(ram.clone(), Some(ram))
    }

    fn new(host: Arc<dyn ExpertStore>, ram: Option<Arc<RamTier>>) -> Hierarchy {
        Hierarchy { host, ram, vram: None, peers: None, n_look_aheads: AtomicU64::new(0) }
    }

    /// Puts devices' tiers above the host's.
    pub fn set_vram(&mut self, vram: Option<Arc<VramTiers>>) {
        self.vram = vram;
    }

    /// Lets other machines compute experts that are not in memory here.
    pub fn set_peers(&mut self, peers: Option<Arc<Peers>>) {
        self.peers = peers;
    }

    pub fn peers(&self) -> Option<&Peers> {
        self.peers.as_deref()
    }

    /// Every routed expert, in host memory.
    pub fn host(&self) -> &Arc<dyn ExpertStore> {
        &self.host
    }

    /// Tiers with policies, lower ones first.
    fn tiers(&self) -> impl Iterator<Item = &dyn PolicyClient> {
        let ram = self.ram.iter().map(|tier| &**tier as &dyn PolicyClient);
        let vram = self.vram.iter().flat_map(|tiers| tiers.iter());
        ram.chain(vram.map(|tier| tier as &dyn PolicyClient))
    }

    /// The tiers whose policies report and are saved: devices' policies have seen the same events,
    /// so the first one speaks for all.
    fn reporting(&self) -> impl DoubleEndedIterator<Item = &dyn PolicyClient> {
        let ram = self.ram.iter().map(|tier| &**tier as &dyn PolicyClient);
        let vram = self.vram.iter().filter_map(|tiers| tiers.iter().next());
        ram.chain(vram.map(|tier| tier as &dyn PolicyClient))
    }

    // ---- events ----

    /// Whether any policy hears `publish`.
    pub fn has_policies(&self) -> bool {
        self.tiers().next().is_some()
    }

    /// Tells every policy what happened.
    pub fn publish(&self, event: &Event) {
        self.tiers().for_each(|tier| tier.observe(event));
    }

    /// Tells the evictions of all policies what a router chose: before the layer's demand, which
    /// makes them name victims.
    pub fn publish_to_evictions(&self, event: &Event) {
        self.tiers().for_each(|tier| tier.observe_by_eviction(event));
    }

    /// Tells all policies but their evictions what happened.
    pub fn publish_to_predictors(&self, event: &Event) {
        self.tiers().for_each(|tier| tier.observe_by_predictor(event));
    }

    /// The parts of the next event that some policy wants. They may change with every event.
    pub fn wants(&self) -> Wants {
        self.tiers().map(PolicyClient::wants).fold(Wants::default(), Wants::or)
    }

    /// The layer whose router a policy wants to see applied to `layer`'s activation: the next one,
    /// or the one behind it if `is_next_pinned`. The slots of a layer on a device are pinned by the
    /// time that the device's routing of the layer before is told, so that a prefetch for it would
    /// come too late.
    pub fn look_ahead(&self, layer: usize, is_next_pinned: bool) -> Option<usize> {
        let tier = self.tiers().find(|tier| tier.wants().ahead)?;
        let next = tier.next_layer(layer);
        let is_late = is_next_pinned && self.vram.as_ref().is_some_and(|vram| vram.has(next));
        Some(if is_late { tier.next_layer(next) } else { next })
    }

    /// A look-ahead has been computed.
    pub fn count_look_ahead(&self) {
        self.n_look_aheads.fetch_add(1, Ordering::Relaxed);
    }

    /// Look-aheads for policies so far, of a layer each.
    pub fn n_look_aheads(&self) -> u64 {
        self.n_look_aheads.load(Ordering::Relaxed)
    }

    // ---- whole-layer prefetch ----

    /// Prefetches a layer that a prompt will use nearly all experts of, into VRAM where it has a
    /// place there. RAM needs no prefetch of its own then: the PCIe link demands its experts.
    pub fn prefetch_layer(&self, layer: usize) {
        if let Some(vram) = &self.vram {
            vram.prefetch_layer(layer);
        }
        let in_vram = self.vram.as_ref().is_some_and(|vram| vram.has(layer));
        match &self.ram {
            Some(ram) if in_vram => ram.cancel_layer_prefetch(),
            Some(ram) => ram.prefetch_layer(layer),
            None => {}
        }
    }

    pub fn cancel_layer_prefetch(&self) {
        if let Some(vram) = &self.vram {
            vram.cancel_layer_prefetch();
        }
        if let Some(ram) = &self.ram {
            ram.cancel_layer_prefetch();
        }
    }

    /// Held by a pass, which may end early.
    pub fn prefetch_guard(&self) -> PrefetchGuard<'_> {
        PrefetchGuard(self)
    }

    // ---- reports ----

    /// The cost so far of moving experts from disk to memory; `None` where they are in place.
    pub fn disk_counters(&self) -> Option<Counters> {
        self.ram.as_ref().map(|tier| tier.counters())
    }

    /// Whether experts are read from disk at this moment.
    pub fn is_reading_disk(&self) -> bool {
        self.ram.as_ref().is_some_and(|tier| tier.is_reading())
    }

    /// The cost so far of moving experts from memory to devices, all together; `None` where no
    /// device has experts.
    pub fn link_counters(&self) -> Option<Counters> {
        self.vram.as_ref().map(|tiers| tiers.counters())
    }

    /// The way in which experts are read from disk; `None` if they are in place.
    pub fn io(&self) -> Option<IoKind> {
        self.ram.as_ref().map(|tier| tier.io())
    }

    /// Appends where each of a layer's experts is; nothing if it has none. Takes each tier's lock
    /// for some microseconds.
    pub fn report(&self, layer: usize, out: &mut Vec<PlacedExpert>) {
        let mut statuses = Vec::new();
        self.host.report(layer, &mut statuses);
        let first = out.len();
        out.extend(statuses.iter().map(in_host));
        let upper = self.vram.iter().flat_map(|tiers| tiers.of_layer(layer));
        let upper: Vec<_> = upper.map(|(_, vram)| vram).collect();
        let out = &mut out[first..];
        if self.ram.is_none() && !upper.is_empty() {
            // Without a tier in host memory every use was counted there as well.
            out.iter_mut().for_each(|expert| (expert.n_hits, expert.n_misses) = (0, 0));
        }
        for vram in upper {
            statuses.clear();
            vram.report(layer, &mut statuses);
            for (expert, above) in out.iter_mut().zip(&statuses) {
                expert.n_hits = expert.n_hits.wrapping_add(above.n_hits);
                if self.ram.is_none() {
                    expert.n_misses = expert.n_misses.wrapping_add(above.n_misses);
                }
                match above.presence {
                    Presence::Whole => expert.place = ExpertPlace::Vram,
                    Presence::InFlight if expert.place != ExpertPlace::Vram => {
                        expert.place = ExpertPlace::InFlight;
                    }
                    _ => {}
                }
            }
        }
    }

    /// The verdict as of now, or `None` while the policy is at work.
    pub fn verdict_if_free(&self) -> Option<String> {
        self.reporting().rev().find_map(PolicyClient::verdict_if_free)
    }

    /// The decision of the uppermost tier's policy, with its reason.
    pub fn verdict(&self) -> Option<String> {
        self.reporting().rev().find_map(PolicyClient::verdict)
    }

    /// The policies' profile.
    pub fn learned(&self) -> Profile {
        let mut profile = Profile::default();
        self.reporting().for_each(|tier| tier.save(&mut profile));
        profile
    }

    /// Panics if an invariant of a tier is broken; returns whether nothing is pinned or on its way.
    pub fn check_integrity(&self) -> bool {
        // Every tier is checked.
        self.tiers().filter(|tier| !tier.check_integrity()).count() == 0
    }
}

/// The expert as the host's store has it.
fn in_host(status: &ExpertStatus) -> PlacedExpert {
    let place = match status.presence {
        Presence::Absent => ExpertPlace::Disk,
        Presence::InFlight => ExpertPlace::InFlight,
        Presence::Part => ExpertPlace::PartInRam,
        Presence::Whole => ExpertPlace::Ram,
    };
    PlacedExpert { place, n_hits: status.n_hits, n_misses: status.n_misses }
}

/// Cancels the layer prefetch when dropped: at the end of a pass, and when it fails.
pub struct PrefetchGuard<'a>(&'a Hierarchy);

impl Drop for PrefetchGuard<'_> {
    fn drop(&mut self) {
        self.0.cancel_layer_prefetch();
    }
}
