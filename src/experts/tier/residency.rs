//! The residency of experts: the prefix of each expert's granules that is in memory, their slots,
//! the works that need them, and the load that brings more.

use super::load::Fault;
use super::queue::LoadId;
use crate::policy::Expert;

/// The tier's view of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerPlan {
    /// 0 where the layer has no experts of its own to move.
    pub n_experts: usize,
    /// The number of these that may be here: the others belong to other tiers.
    pub n_own: usize,
    pub n_granules: usize,
    /// The size class of its granules.
    pub class: usize,
}

#[derive(Clone, Debug)]
pub struct Entry {
    pub id: Expert,
    pub class: usize,
    pub n_granules: usize,
    /// Granules of the prefix that have landed.
    pub resident: usize,
    /// Granules that hold slots: `resident`, or more while a load is under way.
    pub held: usize,
    /// The leading ones of these are in the working role; the others are in transit.
    pub working: usize,
    /// Works that will compute it and have not yet.
    pub pins: u32,
    pub load: Option<LoadId>,
    /// The load that a demand waited for has failed. Cleared when no demand waits any more.
    pub fault: Option<Fault>,
    /// Its slots are in its layer's slot table. While the layer is pinned, it is.
    pub is_in_slot_table: bool,
    /// Whether the expert is among the changed ones of its layer.
    is_changed: bool,
    /// The number of its layer's pins when its use was counted last.
    counted_at: u64,
    /// Whether the expert came to fill free room and has not been demanded.
    pub is_filler: bool,
    /// Demands that found it whole, and the others. They wrap around.
    pub n_hits: u32,
    pub n_misses: u32,
    /// Bytes of prefetch that no demand has asked for yet.
    pub unused_bytes: u64,
    /// The number of the last predictions that named it, and its priority in them.
    pub prediction_round: u64,
    pub predicted_priority: f32,
    /// Place among its class's members, while it holds slots.
    pub place: u32,
}

impl Entry {
    pub fn is_whole(&self) -> bool {
        self.resident == self.n_granules
    }

    /// Granules that hold slots in the transit role.
    pub fn in_transit(&self) -> usize {
        self.held - self.working
    }

    /// Whether it is whole, and a part of it is in the transit role.
    pub fn is_whole_in_transit(&self) -> bool {
        self.is_whole() && self.in_transit() > 0
    }
}

/// The state of a layer's experts together.
#[derive(Clone, Debug, Default)]
struct LayerState {
    /// Settled granules.
    working: usize,
    /// Whether a device works by the layer's slot table.
    is_pinned: bool,
    /// The number of times that the layer was pinned.
    n_pins: u64,
    /// Experts whose granules have come, gone or changed their role since the layer was pinned
    /// last, and whole ones in transit: what the slot table says of the others is true.
    changed: Vec<u32>,
}

pub struct Residency {
    /// By expert index: layer after layer.
    entries: Vec<Entry>,
    /// The first entry of each layer.
    first: Vec<u32>,
    /// Granule → slot, `n_granules` for each expert.
    slots: Vec<u32>,
    first_slot: Vec<u32>,
    layers: Vec<LayerState>,
}

const NO_SLOT: u32 = u32::MAX;

impl Residency {
    pub fn new(layers: &[LayerPlan]) -> Residency {
        let (mut entries, mut first, mut first_slot) = (Vec::new(), Vec::new(), Vec::new());
        let mut n_slots = 0;
        for (layer, plan) in layers.iter().enumerate() {
            first.push(entries.len() as u32);
            for expert in 0..plan.n_experts as u32 {
                first_slot.push(n_slots);
                n_slots += plan.n_granules as u32;
                entries.push(Entry {
                    id: Expert { layer: layer as u32, expert },
                    class: plan.class,
                    n_granules: plan.n_granules,
                    resident: 0,
                    held: 0,
                    working: 0,
                    pins: 0,
                    load: None,
                    fault: None,
                    is_in_slot_table: false,
                    is_changed: false,
                    counted_at: 0,
                    is_filler: false,
                    n_hits: 0,
                    n_misses: 0,
                    unused_bytes: 0,
                    prediction_round: 0,
                    predicted_priority: 0.0,
                    place: 0,
                });
            }
        }
        let slots = vec![NO_SLOT; n_slots as usize];
        let layers = vec![LayerState::default(); layers.len()];
        Residency { entries, first, slots, first_slot, layers }
    }

    pub fn index(&self, id: Expert) -> u32 {
        let index = self.first[id.layer as usize] + id.expert;
        assert!(self.entries[index as usize].id == id, "{id:?} is no expert of this model");
        index
    }

    pub fn get(&self, expert: u32) -> &Entry {
        &self.entries[expert as usize]
    }

    pub fn get_mut(&mut self, expert: u32) -> &mut Entry {
        &mut self.entries[expert as usize]
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The slot of a granule that holds one.
    pub fn slot(&self, expert: u32, granule: usize) -> u32 {
        assert!(granule < self.get(expert).held);
        self.slots[self.first_slot[expert as usize] as usize + granule]
    }

    /// The slots of all granules of a whole expert.
    pub fn slots(&self, expert: u32) -> &[u32] {
        let entry = self.get(expert);
        assert!(entry.is_whole());
        &self.slots[self.first_slot[expert as usize] as usize..][..entry.n_granules]
    }

    /// The next granule of the expert gets a slot, in transit.
    pub fn push_slot(&mut self, expert: u32, slot: u32) {
        let entry = &mut self.entries[expert as usize];
        assert!(entry.held < entry.n_granules);
        self.slots[self.first_slot[expert as usize] as usize + entry.held] = slot;
        entry.held += 1;
    }

    /// `n` more leading granules of the expert are working ones.
    pub fn add_working(&mut self, expert: u32, n: usize) {
        let entry = &mut self.entries[expert as usize];
        entry.working += n;
        assert!(entry.working <= entry.held);
        self.layers[entry.id.layer as usize].working += n;
        self.note_change(expert);
    }

    /// The last `n` working granules of the expert are in transit from now on.
    pub fn remove_working(&mut self, expert: u32, n: usize) {
        let entry = &mut self.entries[expert as usize];
        entry.working -= n;
        self.layers[entry.id.layer as usize].working -= n;
        self.note_change(expert);
    }

    /// Working granules of a layer's experts.
    pub fn working_of_layer(&self, layer: u32) -> usize {
        self.layers[layer as usize].working
    }

    /// Whether its slots may be taken from it.
    pub fn is_evictable(&self, expert: u32) -> bool {
        let entry = self.get(expert);
        !self.is_pinned(expert) && entry.load.is_none() && entry.held > 0
    }

    /// Whether its granules must stay: for works, or for a device.
    pub fn is_pinned(&self, expert: u32) -> bool {
        self.get(expert).pins > 0 || self.is_layer_pinned(expert)
    }

    // ---- slot tables ----

    /// Whether a device works by a slot table that it is in.
    pub fn is_layer_pinned(&self, expert: u32) -> bool {
        let entry = self.get(expert);
        entry.is_in_slot_table && self.layers[entry.id.layer as usize].is_pinned
    }

    /// Pins the layer: what is in its slot table stays until `unpin_layer`.
    pub fn pin_layer(&mut self, layer: usize) {
        let layer = &mut self.layers[layer];
        layer.is_pinned = true;
        layer.n_pins += 1;
    }

    pub fn unpin_layer(&mut self, layer: usize) {
        self.layers[layer].is_pinned = false;
    }

    /// Whether the expert's use has been counted since its layer was pinned.
    pub fn is_counted(&self, expert: u32) -> bool {
        let entry = self.get(expert);
        entry.counted_at == self.layers[entry.id.layer as usize].n_pins
    }

    pub fn set_counted(&mut self, expert: u32) {
        let entry = &mut self.entries[expert as usize];
        entry.counted_at = self.layers[entry.id.layer as usize].n_pins;
    }

    /// The layer's slot table may be wrong about the expert.
    pub fn note_change(&mut self, expert: u32) {
        let entry = &mut self.entries[expert as usize];
        if !std::mem::replace(&mut entry.is_changed, true) {
            self.layers[entry.id.layer as usize].changed.push(expert);
        }
    }

    /// The layer's experts that its slot table may be wrong about.
    pub fn changed(&self, layer: usize) -> &[u32] {
        &self.layers[layer].changed
    }

    /// The slot table is right again; what is whole in transit stays among the changed experts.
    pub fn settle_changes(&mut self, layer: usize) {
        let Residency { entries, layers, .. } = self;
        layers[layer].changed.retain(|e| {
            let entry = &mut entries[*e as usize];
            entry.is_changed = entry.is_whole_in_transit();
            entry.is_changed
        });
    }

    /// The last granule that holds a slot gives it up; true: it was a working one.
    pub fn pop_slot(&mut self, expert: u32) -> (u32, bool) {
        assert!(!self.is_layer_pinned(expert));
        self.note_change(expert);
        let entry = &mut self.entries[expert as usize];
        assert!(entry.held > 0 && entry.pins == 0 || entry.resident < entry.held);
        let working = entry.working == entry.held;
        entry.held -= 1;
        if working {
            entry.working -= 1;
            self.layers[entry.id.layer as usize].working -= 1;
        }
        entry.resident = entry.resident.min(entry.held);
        let place = self.first_slot[expert as usize] as usize + entry.held;
        (std::mem::replace(&mut self.slots[place], NO_SLOT), working)
    }
}
