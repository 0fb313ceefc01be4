//! The invariants of the state, for tests and for callers of `check_integrity`.

use super::State;
use crate::experts::tier::class::Role;
#[cfg(test)]
use crate::experts::tier::residency::Entry;

impl State {
    /// Whether nothing is pinned, queued or on its way, and no free room is left to fill.
    pub fn is_idle(&self) -> bool {
        self.queue.is_idle()
            && !self.may_fill()
            && self.tickets.is_empty()
            && self.loads.is_empty()
            && (0..self.table.entries().len() as u32).all(|e| !self.table.is_pinned(e))
    }

    #[cfg(test)]
    pub fn entries(&self) -> &[Entry] {
        self.table.entries()
    }

    /// Whether a load has not been given up.
    #[cfg(test)]
    pub fn is_bringing(&self, load: super::LoadId) -> bool {
        !self.loads[load as usize].stopped
    }

    /// Works of which a demand waits for room.
    #[cfg(test)]
    pub fn n_lacking_slots(&self) -> usize {
        self.n_lacking_slots
    }

    /// Granules held in a role.
    #[cfg(test)]
    pub fn held(&self, role: Role) -> usize {
        self.classes.iter().map(|class| class.held(role)).sum()
    }

    /// A layer's slot table if it were pinned now, made of all of its experts: those that are in
    /// it, and the slots of their granules.
    #[cfg(test)]
    pub fn rebuilt_slot_table(&self, layer: usize) -> Vec<(u32, Vec<u32>)> {
        let mut room = self.transit_to_pin(self.plan.layers[layer].class);
        let whole = self.experts_of(layer).filter(|e| self.table.get(*e).is_whole());
        let (in_transit, mut experts): (Vec<u32>, Vec<u32>) =
            whole.partition(|e| self.table.get(*e).in_transit() > 0);
        let urgency = |e: &u32| self.prefetch_priority(self.table.get(*e));
        let mut most_urgent_first = in_transit;
        most_urgent_first.sort_by(|a, b| urgency(b).partial_cmp(&urgency(a)).unwrap());
        for e in most_urgent_first {
            let n = self.table.get(e).in_transit();
            if n <= room {
                room -= n;
                experts.push(e);
            }
        }
        experts.sort_unstable();
        let row = |e| (self.table.get(e).id.expert, self.table.slots(e).to_vec());
        experts.into_iter().map(row).collect()
    }

    /// Panics if an invariant does not hold.
    pub fn check_integrity(&self) {
        let mut held = vec![[0; 2]; self.classes.len()];
        let mut working = vec![0; self.plan.layers.len()];
        for (e, entry) in self.table.entries().iter().enumerate() {
            assert!(entry.working <= entry.held && entry.held <= entry.n_granules);
            assert!(entry.resident <= entry.held);
            match entry.load {
                Some(load) => {
                    let load = &self.loads[load as usize];
                    assert!(load.expert == e as u32 && load.granules.end == entry.held);
                    assert!(load.granules.contains(&entry.resident) || load.is_over());
                }
                None => {
                    assert_eq!(entry.resident, entry.held, "{:?}", entry.id);
                    let in_parts = entry.in_transit() > 0 && !entry.is_whole();
                    assert!(!in_parts || entry.fault.is_some(), "{:?}", entry.id);
                }
            }
            if let Some(lower) = &self.lower {
                assert!(lower.has(entry.id) || !entry.is_whole(), "{:?}", entry.id);
            }
            held[entry.class][0] += entry.working;
            working[entry.id.layer as usize] += entry.working;
            held[entry.class][1] += entry.in_transit();
            if entry.held > 0 {
                let members = self.classes[entry.class].members();
                assert_eq!(members[entry.place as usize], e as u32);
            }
        }
        for (layer, working) in working.into_iter().enumerate() {
            assert_eq!(working, self.table.working_of_layer(layer as u32));
        }
        for (class, held) in self.classes.iter().zip(held) {
            class.check_integrity();
            assert_eq!(held, [class.held(Role::Working), class.held(Role::Transit)]);
        }
        self.check_pinned_layers();
        self.check_prefetches();
        let staged = self.tickets.iter().filter(|(_, t)| t.staging.is_some()).count();
        assert_eq!(self.staging.len() + staged, self.plan.n_staging);
    }
}
