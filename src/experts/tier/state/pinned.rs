//! Pinned layers. A device that looks up by itself where the experts are that its router chooses
//! does so in a table of slots, so what the table names must stay where it is until the device has
//! finished the layer. The layer is *pinned* meanwhile.
//!
//! A pinned layer never keeps a demand waiting: its experts in transit leave room there for the
//! largest expert of their class, and a demand for any number of experts can pass through that room
//! one by one.

use super::State;
use crate::experts::acquisition::{Access, GranuleRef};
use crate::experts::tier::residency::Entry;
use crate::experts::tier::status::ExpertStatus;
use crate::policy::Expert;

#[derive(Debug)]
pub struct PinnedLayer {
    layer: usize,
    /// The layer's last decode step before.
    last_step: u64,
}

impl State {
    /// Pins the layer's whole experts, of those in transit as many as may be, and names their
    /// granules and slots.
    pub fn pin_layer(&mut self, layer: usize, place: &mut dyn FnMut(GranuleRef)) {
        assert!(self.pinned_layers.iter().all(|p| p.layer != layer), "layer {layer} is pinned");
        let class = self.plan.layers[layer].class;
        let mut room = self.transit_to_pin(class);
        self.pinned_layers.push(PinnedLayer { layer, last_step: self.last_step[layer] });
        let mut in_transit = Vec::new();
        for e in self.experts_of(layer) {
            let entry = self.table.get_mut(e);
            entry.is_counted = false;
            match entry.in_transit() {
                _ if !entry.is_whole() => {}
                0 => self.pin_with_layer(e, place),
                n => in_transit.push((self.prefetch_priority(self.table.get(e)), n, e)),
            }
        }
        // Most urgent first; those that nothing predicts are last.
        in_transit.sort_by(|a, b| b.0.partial_cmp(&a.0).expect("priorities are numbers"));
        for (_, n, e) in in_transit {
            if n <= room {
                room -= n;
                self.pin_with_layer(e, place);
            }
        }
    }

    fn pin_with_layer(&mut self, e: u32, place: &mut dyn FnMut(GranuleRef)) {
        let entry = self.table.get_mut(e);
        entry.pins += 1;
        entry.is_layer_pinned = true;
        self.name_granules(e, place);
    }

    fn name_granules(&self, e: u32, place: &mut dyn FnMut(GranuleRef)) {
        let Entry { id: Expert { expert, .. }, n_granules, .. } = *self.table.get(e);
        for granule in 0..n_granules {
            place(GranuleRef { expert, granule, slot: self.table.slot(e, granule) });
        }
    }

    /// The device is through with the layer. `used` are the experts that it needed, whoever
    /// computed them: what was pinned is a hit, and its granules are named while they are pinned;
    /// what was not acquired either is a miss.
    pub fn unpin_layer(&mut self, layer: usize, used: &[u32], hit: &mut dyn FnMut(GranuleRef)) {
        let at = self.pinned_layers.iter().position(|p| p.layer == layer);
        let PinnedLayer { last_step, .. } =
            self.pinned_layers.swap_remove(at.expect("a pinned layer"));
        if !used.is_empty() && self.last_step[layer] == last_step {
            self.on_decode_step(layer);
        }
        for expert in used {
            let e = self.index(layer, *expert);
            let Entry { is_layer_pinned, is_counted, .. } = *self.table.get(e);
            if is_layer_pinned {
                self.name_granules(e, hit);
            }
            if is_counted {
                continue;
            }
            if is_layer_pinned {
                self.counters.hits_prefetched += u64::from(self.table.get(e).unused_bytes > 0);
                self.count_use(e);
                self.move_to_working(e);
            } else {
                let entry = self.table.get_mut(e);
                entry.is_counted = true;
                entry.n_misses = entry.n_misses.wrapping_add(1);
                self.counters.misses += 1;
            }
        }
        for e in self.experts_of(layer) {
            let entry = self.table.get_mut(e);
            if std::mem::take(&mut entry.is_layer_pinned) {
                // Whole: it stays until its room is needed.
                self.unpin(e, Access::Decode);
            }
        }
    }

    pub fn is_whole(&self, expert: Expert) -> bool {
        self.table.get(self.table.index(expert)).is_whole()
    }

    /// The part of an expert's granules that has not landed, from 0 to 1.
    pub fn missing_part(&self, expert: Expert) -> f64 {
        let entry = self.table.get(self.table.index(expert));
        (entry.n_granules - entry.resident) as f64 / entry.n_granules as f64
    }

    /// Appends the status of each of the layer's experts.
    pub fn report(&self, layer: usize, out: &mut Vec<ExpertStatus>) {
        out.extend(self.experts_of(layer).map(|e| ExpertStatus::of(self.table.get(e))));
    }

    pub(super) fn experts_of(&self, layer: usize) -> std::ops::Range<u32> {
        match self.plan.layers[layer].n_experts as u32 {
            0 => 0..0,
            n => {
                let first = self.index(layer, 0);
                first..first + n
            }
        }
    }

    fn layer_pins_in_transit(&self, class: usize) -> usize {
        let layers = self.pinned_layers.iter().filter(|p| self.plan.layers[p.layer].class == class);
        let entries = layers.flat_map(|p| self.experts_of(p.layer)).map(|e| self.table.get(e));
        entries.filter(|entry| entry.is_layer_pinned).map(|entry| entry.in_transit()).sum()
    }

    /// Granules in transit that may be pinned beside those that are.
    fn transit_to_pin(&self, class: usize) -> usize {
        let most = self.plan.classes[class].n_transit;
        let most = most.saturating_sub(self.plan.largest_expert(class));
        most - self.layer_pins_in_transit(class)
    }

    /// Panics if what is pinned could leave, or keep a demand waiting.
    pub(super) fn check_pinned_layers(&self) {
        for entry in self.table.entries() {
            let layer = entry.id.layer as usize;
            let layer_is_pinned = self.pinned_layers.iter().any(|p| p.layer == layer);
            let is_pinned = entry.pins > 0 && entry.is_whole() && layer_is_pinned;
            assert!(!entry.is_layer_pinned || is_pinned, "{:?} is pinned and may leave", entry.id);
        }
        for (class, plan) in self.plan.classes.iter().enumerate() {
            let held = self.layer_pins_in_transit(class);
            let most = plan.n_transit.saturating_sub(self.plan.largest_expert(class));
            assert!(held <= most, "{held} pinned granules in transit, at most {most}");
        }
    }
}
