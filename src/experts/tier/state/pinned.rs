//! Pinned layers. A device that looks up by itself where the experts are that its router chooses
//! does so in a table of slots, so what the table names must stay where it is until the device has
//! finished the layer. The layer is *pinned* meanwhile.
//!
//! A pinned layer never keeps a demand waiting: its experts in transit leave room there for the
//! largest expert of their class, and a demand for any number of experts can pass through that room
//! one by one.

use super::State;
use crate::experts::acquisition::GranuleRef;
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
    /// Pins the layer's whole experts, of those in transit as many as may be. Names the rows of its
    /// slot table that may have changed since it was pinned last: an expert and the slots of its
    /// granules, or none if it is not pinned. No row was named before the first time, and none of
    /// these has slots.
    pub fn pin_layer(&mut self, layer: usize, row: &mut dyn FnMut(u32, &[u32])) {
        assert!(self.pinned_layers.iter().all(|p| p.layer != layer), "layer {layer} is pinned");
        let mut room = self.transit_to_pin(self.plan.layers[layer].class);
        self.pinned_layers.push(PinnedLayer { layer, last_step: self.last_step[layer] });
        for i in 0..self.table.changed(layer).len() {
            let entry = self.table.get_mut(self.table.changed(layer)[i]);
            entry.is_in_slot_table = entry.is_whole() && entry.in_transit() == 0;
        }
        for (n, e) in self.whole_in_transit(layer) {
            if n <= room {
                room -= n;
                self.table.get_mut(e).is_in_slot_table = true;
            }
        }
        for e in self.table.changed(layer) {
            let entry = self.table.get(*e);
            let slots = if entry.is_in_slot_table { self.table.slots(*e) } else { &[] };
            row(entry.id.expert, slots);
        }
        self.table.settle_changes(layer);
        self.table.pin_layer(layer);
    }

    /// The layer's whole experts in transit, and the number of granules there. Most urgent first;
    /// those that nothing predicts are last.
    fn whole_in_transit(&self, layer: usize) -> impl Iterator<Item = (usize, u32)> + use<> {
        let changed = self.table.changed(layer).iter().map(|e| (*e, self.table.get(*e)));
        let mut found = changed
            .filter(|(_, entry)| entry.is_whole_in_transit())
            .map(|(e, entry)| (self.prefetch_priority(entry), entry.in_transit(), e))
            .collect::<Vec<_>>();
        found.sort_unstable_by(|a, b| {
            let by_priority = b.0.partial_cmp(&a.0).expect("priorities are numbers");
            by_priority.then(a.2.cmp(&b.2))
        });
        found.into_iter().map(|(_, n, e)| (n, e))
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
            let is_layer_pinned = self.table.is_layer_pinned(e);
            if is_layer_pinned {
                self.name_granules(e, hit);
            }
            if self.table.is_counted(e) {
                continue;
            }
            if is_layer_pinned {
                self.counters.hits_prefetched += u64::from(self.table.get(e).unused_bytes > 0);
                self.count_use(e);
                self.move_to_working(e);
            } else {
                self.table.set_counted(e);
                let entry = self.table.get_mut(e);
                entry.n_misses = entry.n_misses.wrapping_add(1);
                self.counters.misses += 1;
            }
        }
        // What was pinned is whole: it stays until its room is needed.
        self.table.unpin_layer(layer);
    }

    pub fn is_whole(&self, expert: Expert) -> bool {
        self.table.get(self.table.index(expert)).is_whole()
    }

    pub fn is_layer_whole(&self, layer: usize) -> bool {
        self.experts_of(layer).all(|e| self.table.get(e).is_whole())
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
        // What is pinned in transit is among the changed experts.
        let changed = layers.flat_map(|p| self.table.changed(p.layer));
        let pinned = changed.filter(|e| self.table.is_layer_pinned(**e));
        pinned.map(|e| self.table.get(*e).in_transit()).sum()
    }

    /// Granules in transit that may be pinned beside those that are.
    pub(super) fn transit_to_pin(&self, class: usize) -> usize {
        let most = self.plan.classes[class].n_transit;
        let most = most.saturating_sub(self.plan.largest_expert(class));
        most - self.layer_pins_in_transit(class)
    }

    /// Panics if what is pinned could leave, or keep a demand waiting.
    pub(super) fn check_pinned_layers(&self) {
        for (e, entry) in self.table.entries().iter().enumerate() {
            let (e, layer) = (e as u32, entry.id.layer as usize);
            let is_pinned = self.pinned_layers.iter().any(|p| p.layer == layer);
            let is_layer_pinned = self.table.is_layer_pinned(e);
            assert_eq!(is_layer_pinned, is_pinned && entry.is_in_slot_table);
            assert!(!is_layer_pinned || entry.is_whole(), "{:?} is pinned and may leave", entry.id);
            // The slot table is right about what has not changed.
            let is_settled = entry.is_whole() && entry.in_transit() == 0;
            let is_right = entry.is_in_slot_table == is_settled;
            assert!(is_right || self.table.changed(layer).contains(&e), "{:?}", entry.id);
        }
        for (class, plan) in self.plan.classes.iter().enumerate() {
            let held = self.layer_pins_in_transit(class);
            let most = plan.n_transit.saturating_sub(self.plan.largest_expert(class));
            assert!(held <= most, "{held} pinned granules in transit, at most {most}");
        }
    }
}
