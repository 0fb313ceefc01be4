//! Room: who gets slots, in which role, and who gives them up. An expert that a layer's share cuts
//! in two keeps its leading granules, its top segment, and brings the others through transit each
//! time it is used (MoEpic, section 3.1).

use super::State;
use super::transit::Claim;
use crate::experts::acquisition::Access;
use crate::experts::tier::class::Role;
use crate::experts::tier::load::{Load, Reason};
use crate::experts::tier::queue::{Cause, LoadId};
use crate::experts::tier::residency::Entry;
use crate::policy::{Expert, LayerShare};

/// One in so many slots may hold copies of what is whole in the tier above. With fewer, what that
/// tier pushes out is lost; with more, memory holds everything twice.
const COPIES: usize = 3;

/// Room that there is for granules of an expert: its next ones are working ones, those behind them
/// in transit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub n_working: usize,
    pub n_transit: usize,
}

impl State {
    /// The part of a class that an expert's layer may keep.
    pub(super) fn share(&self, id: Expert, class: usize) -> LayerShare {
        let all = LayerShare { n_slots: usize::MAX, keep: usize::MAX };
        // Where there is no transit everything fits, and nothing need leave.
        let is_split = self.plan.classes[class].n_transit > 0;
        let share = self.shares.get(id.layer as usize).filter(|_| is_split);
        share.copied().unwrap_or(all)
    }

    /// Takes slots for all that the expert lacks and queues their load; false: there is no room.
    pub(super) fn start_load(
        &mut self,
        e: u32,
        cause: Cause,
        access: Access,
        priority: f32,
    ) -> bool {
        let Entry { held, n_granules, .. } = *self.table.get(e);
        let n = n_granules - held;
        // The expert's own granules must not be what makes the room.
        self.table.get_mut(e).pins += 1;
        let n_working = self.reserve(e, n, access, cause, priority);
        self.table.get_mut(e).pins -= 1;
        let Some(n_working) = n_working else { return false };
        let room = Room { n_working, n_transit: n - n_working };
        self.begin_load(e, room, Reason { cause, access }, priority);
        true
    }

    /// Takes slots for the next granules of an expert and queues their load.
    pub(super) fn begin_load(&mut self, e: u32, room: Room, reason: Reason, priority: f32) {
        let Entry { id, class, held, .. } = *self.table.get(e);
        let Room { n_working, n_transit } = room;
        let n = n_working + n_transit;
        let end = held + n;
        if held == 0 {
            self.table.get_mut(e).place = self.classes[class].join(e);
        }
        for i in 0..n {
            let role = if i < n_working { Role::Working } else { Role::Transit };
            let slot = self.classes[class].take(role);
            self.table.push_slot(e, slot);
        }
        self.table.add_working(e, n_working);
        let mut pieces = Vec::new();
        self.layout.pieces(id, held..end, &mut pieces);
        let load = self.loads.insert(Load::new(e, held..end, reason, pieces)) as LoadId;
        let entry = self.table.get_mut(e);
        entry.load = Some(load);
        self.clock += 1;
        match reason.cause {
            Cause::Demand => {
                let quarters = (4.0 * self.queue.prefetch_granules()).ceil() as usize;
                let histogram = &mut self.counters.demand_wait_histogram;
                histogram[quarters.min(histogram.len() - 1)] += 1;
                self.queue.push_demand(load);
            }
            Cause::Prefetch => self.queue.push_prefetch(load, priority),
        }
        let resident = self.resident_bytes();
        self.counters.resident_bytes_max = self.counters.resident_bytes_max.max(resident);
    }

    /// Makes room for `n` more granules of an expert; returns how many of them are working ones,
    /// `None` if there is no room. Decode makes room in the working set for the part that the
    /// expert keeps; everything else takes only working slots that are free or hold
    /// fillers, and then transit.
    fn reserve(
        &mut self,
        e: u32,
        n: usize,
        access: Access,
        cause: Cause,
        priority: f32,
    ) -> Option<usize> {
        let Entry { id, class, held, working, .. } = *self.table.get(e);
        let share = self.share(id, class);
        let kept = if held == working { share.keep.saturating_sub(held).min(n) } else { 0 };
        let has_working = kept > 0
            && if access.keeps() {
                self.make_working_room(e, kept, None)
            } else {
                self.has_free_working_room(e, kept) || self.make_room_among_fillers(e, kept)
            };
        let n_working = if has_working { kept } else { 0 };
        if n_working == n {
            return Some(n);
        }
        let claim = match cause {
            Cause::Demand => Claim::DEMAND,
            Cause::Prefetch => self.prefetch_claim(e, priority),
        };
        if claim.worth.is_some_and(|worth| worth < 0.0) {
            // Where idle time is not free, it costs demand more than it is expected to save.
            return None;
        }
        self.make_transit_room(e, n - n_working, claim).then_some(n_working)
    }

    /// Whether an expert can have `n` more working granules and nothing must leave.
    pub(super) fn has_free_working_room(&self, e: u32, n: usize) -> bool {
        let Entry { id, class, .. } = *self.table.get(e);
        let n_slots = self.share(id, class).n_slots;
        let within = n_slots.saturating_sub(self.table.working_of_layer(id.layer));
        self.classes[class].free(Role::Working).min(within) >= n
    }

    /// Evicts until there is room for `n` more working granules of an expert, of which its own
    /// layer's experts make what is beyond the layer's share. With `least` it evicts only what is
    /// worth less, and ends where the next to leave is worth as much.
    pub(super) fn make_working_room(&mut self, e: u32, n: usize, least: Option<f64>) -> bool {
        let Entry { id, class, .. } = *self.table.get(e);
        let n_slots = self.share(id, class).n_slots;
        if n > n_slots {
            return false;
        }
        loop {
            let layer_lacks = (self.table.working_of_layer(id.layer) + n).saturating_sub(n_slots);
            let class_lacks = n.saturating_sub(self.classes[class].free(Role::Working));
            let victim = match (layer_lacks, class_lacks) {
                (0, 0) => return true,
                (0, _) => self.working_victim(class, None),
                (_, _) => self.working_victim(class, Some(id.layer)),
            };
            let Some(victim) = victim else { return false };
            let Entry { id: leaving, working, .. } = *self.table.get(victim);
            if least.is_some_and(|least| self.eviction.priority(leaving) >= least) {
                return false;
            }
            let lacking = if layer_lacks > 0 { layer_lacks } else { class_lacks };
            let n_leaving = lacking.min(working);
            if !self.demote(victim, n_leaving) {
                self.drop_transit(victim);
                self.shrink(victim, working - n_leaving);
            }
        }
    }

    /// The working expert to lose granules: a copy too many of what is in the tier above, then
    /// what holds more than its layer's share lets it keep, then what is in a layer that holds more
    /// than its share, then the least priority. A scan of the class's members: some microseconds
    /// for a thousand, beside the milliseconds of the load that needs the room.
    pub(super) fn working_victim(&self, class: usize, layer: Option<u32>) -> Option<u32> {
        let members = self.classes[class].members().iter().copied();
        let evictable = members.filter(|e| {
            let entry = self.table.get(*e);
            let of_layer = layer.is_none_or(|layer| entry.id.layer == layer);
            of_layer && self.table.is_evictable(*e) && entry.working > 0
        });
        if let Some(copy) = self.hottest_copy(class, evictable.clone()) {
            return Some(copy);
        }
        let key = |e: u32| {
            let Entry { id, working, .. } = *self.table.get(e);
            let share = self.share(id, class);
            let within_keep = working <= share.keep;
            let within_share = self.table.working_of_layer(id.layer) <= share.n_slots;
            (within_keep, within_share, self.eviction.priority(id))
        };
        let less = |a: &(bool, bool, f64), b: &(bool, bool, f64)| {
            (a.0, a.1).cmp(&(b.0, b.1)).then(a.2.total_cmp(&b.2))
        };
        evictable.map(|e| (key(e), e)).min_by(|a, b| less(&a.0, &b.0)).map(|found| found.1)
    }

    /// If copies of experts that the tier above holds whole take more than one in [`COPIES`] slots
    /// of the class: the evictable copy with the highest priority, which stays up there longest.
    /// The others will be needed here once the tier above has evicted them.
    fn hottest_copy(&self, class: usize, evictable: impl Iterator<Item = u32>) -> Option<u32> {
        let is_copy = |e: &u32| self.upper.has(self.table.get(*e).id);
        let working = |e: u32| self.table.get(e).working;
        let copies = self.classes[class].members().iter().copied().filter(is_copy);
        if copies.map(working).sum::<usize>() * COPIES <= self.plan.classes[class].n_slots {
            return None;
        }
        let priority = |e: u32| self.eviction.priority(self.table.get(e).id);
        let copies = evictable.filter(is_copy).map(|e| (priority(e), e));
        copies.max_by(|a, b| a.0.total_cmp(&b.0)).map(|found| found.1)
    }

    pub(super) fn drop_transit(&mut self, e: u32) {
        self.shrink(e, self.table.get(e).working);
    }

    /// The expert keeps the slots of its first `n` granules.
    pub(super) fn shrink(&mut self, e: u32, n: usize) {
        let Entry { class, held, .. } = *self.table.get(e);
        if held == n {
            return;
        }
        self.report_whole(e, false);
        while self.table.get(e).held > n {
            let (slot, working) = self.table.pop_slot(e);
            let role = if working { Role::Working } else { Role::Transit };
            self.classes[class].give(role, slot);
        }
        let entry = self.table.get_mut(e);
        // Bytes that were not asked for while they were here were moved in vain.
        self.counters.prefetch_wasted_bytes += std::mem::take(&mut entry.unused_bytes);
        if n == 0 {
            entry.is_filler = false;
            let place = entry.place;
            if let Some(moved) = self.classes[class].leave(place) {
                self.table.get_mut(moved).place = place;
            }
        }
    }
}
