//! Free room is filled while the link has nothing else to do: while the model is loaded, while a
//! prompt is computed, and between a user's requests. The eviction names the best experts that are
//! not here; where it knows of none, one is as good as another, and better than an empty slot.
//!
//! An expert that came this way and was not demanded since is a *filler*. It has no claim to its
//! room: whatever is demanded, by prompts too, takes it if the eviction holds it to be worth more.

use super::State;
use super::allocation::Room;
use crate::experts::acquisition::Access;
use crate::experts::tier::class::Role;
use crate::experts::tier::load::Reason;
use crate::experts::tier::queue::Cause;
use crate::experts::tier::residency::Entry;

/// Experts that are ranked at once. To rank all takes some hundred microseconds for ten thousand.
const RANKED: usize = 64;

/// After whatever is predicted or admitted.
const PRIORITY: f32 = -1.0;

#[derive(Debug, Default)]
pub(super) struct Filling {
    is_on: bool,
    /// The best experts that were absent when they were ranked, the best one last.
    ranked: Vec<u32>,
    /// The clock at which nothing was found.
    found_nothing: Option<u64>,
}

impl Filling {
    /// A demand reports a file that cannot be read; filling does not try it again and again.
    pub fn stop_if(&mut self, has_failed: bool) {
        self.is_on &= !has_failed;
    }
}

impl State {
    /// From now on free room is filled.
    pub fn fill_free_room(&mut self) {
        self.filling.is_on = true;
    }

    /// Whether it is worth looking for an expert to fill free room with.
    pub(super) fn may_fill(&self) -> bool {
        let Filling { is_on, found_nothing, .. } = &self.filling;
        let is_new = *found_nothing != Some(self.clock);
        let has_room = || self.classes.iter().any(|class| class.free(Role::Working) > 0);
        *is_on && is_new && self.n_lacking_slots == 0 && self.queue.is_free() && has_room()
    }

    /// Queues the load of the best expert that there is free room for; whether there is one.
    pub(super) fn fill(&mut self) -> bool {
        if !self.may_fill() {
            return false;
        }
        let Some(e) = self.next_ranked().or_else(|| self.rank().next_ranked()) else {
            self.filling.found_nothing = Some(self.clock);
            return false;
        };
        let n = self.n_fillable(e);
        let entry = self.table.get_mut(e);
        entry.is_filler |= entry.held == 0;
        let room = Room { n_working: n, n_transit: 0 };
        self.begin_load(e, room, Reason { cause: Cause::Prefetch, access: Access::Fill }, PRIORITY);
        true
    }

    fn next_ranked(&mut self) -> Option<u32> {
        while let Some(e) = self.filling.ranked.pop() {
            if self.n_fillable(e) > 0 {
                return Some(e);
            }
        }
        None
    }

    fn rank(&mut self) -> &mut Self {
        let all = 0..self.table.entries().len() as u32;
        // Experts of equal priority are spread over the layers.
        let key = |e: u32| {
            let id = self.table.get(e).id;
            (self.eviction.priority(id), id.expert, id.layer, e)
        };
        let fillable = all.filter(|e| self.n_fillable(*e) > 0);
        let mut ranked: Vec<_> = fillable.map(key).collect();
        let better = |a: &(f64, u32, u32, u32), b: &(f64, u32, u32, u32)| {
            b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2)))
        };
        if ranked.len() > RANKED {
            ranked.select_nth_unstable_by(RANKED, better);
            ranked.truncate(RANKED);
        }
        ranked.sort_unstable_by(better);
        self.filling.ranked.clear();
        self.filling.ranked.extend(ranked.into_iter().rev().map(|found| found.3));
        self
    }

    /// The granules that an expert lacks of those that it may keep, if there is free room for them
    /// and no load brings it.
    fn n_fillable(&self, e: u32) -> usize {
        let entry = self.table.get(e);
        let Entry { id, class, held, working, n_granules, .. } = *entry;
        let is_absent = entry.pins == 0 && entry.load.is_none() && entry.fault.is_none();
        if !is_absent || held != working || self.upper.has(id) || !self.layout.may_hold(id) {
            return 0;
        }
        let n = self.share(id, class).keep.min(n_granules).saturating_sub(held);
        if n > 0 && self.has_free_working_room(e, n) { n } else { 0 }
    }

    /// Evicts fillers that are worth less than an expert until there is room for `n` more working
    /// granules of it; false, and none has left, if there are too few of them.
    pub(super) fn make_room_among_fillers(&mut self, e: u32, n: usize) -> bool {
        let Entry { id, class, .. } = *self.table.get(e);
        let within = self.table.working_of_layer(id.layer) + n <= self.share(id, class).n_slots;
        let least = self.eviction.priority(id);
        let members = self.classes[class].members().iter().copied();
        let mut fillers: Vec<(f64, u32)> = members
            .filter(|member| self.table.is_evictable(*member))
            .filter(|member| self.table.get(*member).is_filler)
            .map(|member| (self.eviction.priority(self.table.get(member).id), member))
            .filter(|(priority, _)| *priority < least)
            .collect();
        let free = self.classes[class].free(Role::Working);
        let room = fillers.iter().map(|(_, filler)| self.table.get(*filler).working);
        if !within || free + room.sum::<usize>() < n {
            return false;
        }
        fillers.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        for (_, filler) in fillers {
            if self.classes[class].free(Role::Working) >= n {
                break;
            }
            self.shrink(filler, 0);
        }
        true
    }
}
