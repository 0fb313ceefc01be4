//! Layers of which a device has a table: it looks up by itself where the experts are that its
//! router chooses, so what the table names must stay where it is until the device is through with
//! the layer. The layer is *frozen* meanwhile.
//!
//! Frozen experts never keep a demand waiting: those in transit leave room there for the largest
//! expert of their class, and a demand for any number of experts can pass through that one by one.

use super::State;
use crate::experts::acquisition::{Access, GranuleRef};
use crate::experts::tier::residency::Entry;
use crate::policy::Expert;

#[derive(Debug)]
pub struct Frozen {
    layer: usize,
    /// The layer's last decode step before.
    last_step: u64,
}

impl State {
    /// Pins the layer's whole experts, of those in transit as many as may be, and names their
    /// granules and slots.
    pub fn freeze(&mut self, layer: usize, place: &mut dyn FnMut(GranuleRef)) {
        assert!(self.frozen.iter().all(|f| f.layer != layer), "layer {layer} is frozen");
        let class = self.plan.layers[layer].class;
        let mut room = self.transit_to_freeze(class);
        self.frozen.push(Frozen { layer, last_step: self.last_step[layer] });
        let mut in_transit = Vec::new();
        for e in self.experts_of(layer) {
            let entry = self.table.get_mut(e);
            entry.is_counted = false;
            match entry.held - entry.settled {
                _ if !entry.is_whole() => {}
                0 => self.pin_frozen(e, place),
                n => in_transit.push((self.foretold(self.table.get(e)), n, e)),
            }
        }
        // Most urgent first; those that nothing foretells are last.
        in_transit.sort_by(|a, b| b.0.partial_cmp(&a.0).expect("priorities are numbers"));
        for (_, n, e) in in_transit {
            if n <= room {
                room -= n;
                self.pin_frozen(e, place);
            }
        }
    }

    fn pin_frozen(&mut self, e: u32, place: &mut dyn FnMut(GranuleRef)) {
        let entry = self.table.get_mut(e);
        entry.pins += 1;
        entry.is_frozen = true;
        self.name_granules(e, place);
    }

    fn name_granules(&self, e: u32, place: &mut dyn FnMut(GranuleRef)) {
        let Entry { id: Expert { expert, .. }, n_granules, .. } = *self.table.get(e);
        for granule in 0..n_granules {
            place(GranuleRef { expert, granule, slot: self.table.slot(e, granule) });
        }
    }

    /// The device is through with the layer. `used` are the experts that it needed, whoever
    /// computed them: what was frozen is a hit, and its granules are named while they are pinned;
    /// what was not acquired either is a miss.
    pub fn thaw(&mut self, layer: usize, used: &[u32], hit: &mut dyn FnMut(GranuleRef)) {
        let at = self.frozen.iter().position(|f| f.layer == layer);
        let Frozen { last_step, .. } = self.frozen.swap_remove(at.expect("a frozen layer"));
        if !used.is_empty() && self.last_step[layer] == last_step {
            self.step_over(layer);
        }
        for expert in used {
            let e = self.index(layer, *expert);
            let Entry { is_frozen, is_counted, .. } = *self.table.get(e);
            if is_frozen {
                self.name_granules(e, hit);
            }
            if is_counted {
                continue;
            }
            if is_frozen {
                self.count_use(e);
                self.settle(e);
            } else {
                self.table.get_mut(e).is_counted = true;
                self.counters.misses += 1;
            }
        }
        for e in self.experts_of(layer) {
            let entry = self.table.get_mut(e);
            if std::mem::take(&mut entry.is_frozen) {
                // Whole: it stays until its room is needed.
                self.unpin(e, Access::Decode);
            }
        }
    }

    pub fn is_whole(&self, expert: Expert) -> bool {
        self.table.get(self.table.index(expert)).is_whole()
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

    fn frozen_in_transit(&self, class: usize) -> usize {
        let layers = self.frozen.iter().filter(|f| self.plan.layers[f.layer].class == class);
        let entries = layers.flat_map(|f| self.experts_of(f.layer)).map(|e| self.table.get(e));
        entries.filter(|entry| entry.is_frozen).map(|entry| entry.held - entry.settled).sum()
    }

    /// Granules in transit that may be frozen beside those that are.
    fn transit_to_freeze(&self, class: usize) -> usize {
        let most = self.plan.classes[class].n_transit;
        let most = most.saturating_sub(self.plan.largest_expert(class));
        most - self.frozen_in_transit(class)
    }

    /// Panics if what is frozen could leave, or keep a demand waiting.
    pub(super) fn check_frozen(&self) {
        for entry in self.table.entries() {
            let layer = entry.id.layer as usize;
            let layer_is_frozen = self.frozen.iter().any(|f| f.layer == layer);
            let is_pinned = entry.pins > 0 && entry.is_whole() && layer_is_frozen;
            assert!(!entry.is_frozen || is_pinned, "{:?} is frozen and may leave", entry.id);
        }
        for (class, plan) in self.plan.classes.iter().enumerate() {
            let held = self.frozen_in_transit(class);
            let most = plan.n_transit.saturating_sub(self.plan.largest_expert(class));
            assert!(held <= most, "{held} frozen granules in transit, at most {most}");
        }
    }
}
