//! Swaps: while the link has nothing else to do, it brings experts that a predictor expects to be
//! used soon, in the place of the least valuable ones. Both are measured by the eviction's
//! priority. An eviction that is not told of predictions swaps nothing.
//!
//! To rank a layer's experts costs some microseconds. So each layer is ranked twice a token at
//! most, after the predictor has said what it expects of the layer when the token begins and when
//! it has passed, and the best few are kept. A link that has ended a read looks by itself; one that
//! sleeps is given work four times a token.

use super::State;
use super::allocation::Room;
use super::transit::Claim;
use crate::experts::acquisition::Access;
use crate::experts::tier::load::Reason;
use crate::experts::tier::queue::Cause;
use crate::policy::Event;

/// A swap must be worth this much: what leaves will be used as well, only later. On gpt-oss-20b
/// with half of the experts in memory a token reads a fifth less with 0.35, and takes 1 % longer.
const MARGIN: f64 = 0.25;

/// After whatever is predicted or admitted.
const URGENCY: f32 = -1.0;

/// Absent experts of a layer that are kept.
const KEPT: usize = 4;

/// So often a token a sleeping link is given work, if there is some.
const LOOKS: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Swapping {
    is_on: bool,
    /// The layer of the last decode step, within a token.
    reached: Option<usize>,
    /// The best absent experts of each layer when it was ranked.
    best: Vec<Vec<u32>>,
    /// Layers of which something new is expected since.
    due: Vec<usize>,
    /// Nothing was found since the last decode step.
    found_nothing: bool,
}

impl Swapping {
    pub fn new(n_layers: usize) -> Swapping {
        Swapping { best: vec![Vec::new(); n_layers], ..Swapping::default() }
    }

    pub fn on_decode_step(&mut self, layer: usize) {
        (self.reached, self.found_nothing) = (Some(layer), false);
    }

    /// Whether it is time to look for an expert.
    pub fn observe(&mut self, event: &Event<'_>) -> bool {
        let layer = match *event {
            Event::Expected { layer, .. } => layer as usize,
            Event::IterationStart { .. } => {
                self.reached = None;
                return false;
            }
            _ => return false,
        };
        // A layer that has passed is told of again and again.
        if self.reached.is_some_and(|reached| layer != reached) {
            return false;
        }
        self.due.retain(|due| *due != layer);
        self.due.push(layer);
        self.found_nothing = false;
        LOOKS * self.due.len() >= self.best.len()
    }

    /// A demand reports a file that cannot be read; swapping does not try it again and again.
    pub fn stop_if(&mut self, has_failed: bool) {
        self.is_on &= !has_failed;
    }
}

impl State {
    /// From now on an idle link swaps.
    pub fn swap_when_idle(&mut self) {
        self.swapping.is_on = true;
    }

    /// Whether it is worth looking for an expert to bring in the place of another.
    fn may_swap(&self) -> bool {
        let Swapping { is_on, best, due, found_nothing, .. } = &self.swapping;
        let is_known = || !due.is_empty() || best.iter().any(|best| !best.is_empty());
        *is_on && !found_nothing && self.n_lacking_slots == 0 && self.queue.is_free() && is_known()
    }

    /// Queues the load of the best absent expert, if it is worth it; whether it is.
    pub(super) fn swap(&mut self) -> bool {
        if !self.may_swap() {
            return false;
        }
        while let Some(layer) = self.swapping.due.pop() {
            self.rank_absent(layer);
        }
        let known = self.swapping.best.iter().flatten().copied();
        let absent = known.filter_map(|e| Some((self.worth_of_absent(e)?, e)));
        let best = absent.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        let is_begun = best.is_some_and(|(worth, e)| self.swap_in(e, worth));
        self.swapping.found_nothing = !is_begun;
        is_begun
    }

    /// The expected priority of an expert that is not here, or in part, and on no way here.
    fn worth_of_absent(&self, e: u32) -> Option<f64> {
        let entry = self.table.get(e);
        let is_left = entry.pins == 0 && entry.load.is_none() && entry.fault.is_none();
        let is_absent = is_left && !entry.is_whole() && entry.held == entry.working;
        is_absent.then(|| self.eviction.expected_priority(entry.id))?
    }

    fn rank_absent(&mut self, layer: usize) {
        let mut best = std::mem::take(&mut self.swapping.best[layer]);
        let mut ranked: Vec<(f64, u32)> =
            self.experts_of(layer).filter_map(|e| Some((self.worth_of_absent(e)?, e))).collect();
        let better = |a: &(f64, u32), b: &(f64, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if ranked.len() > KEPT {
            ranked.select_nth_unstable_by(KEPT, better);
            ranked.truncate(KEPT);
        }
        best.clear();
        best.extend(ranked.into_iter().map(|(_, e)| e));
        self.swapping.best[layer] = best;
    }

    fn swap_in(&mut self, e: u32, worth: f64) -> bool {
        let entry = self.table.get(e);
        let (id, n) = (entry.id, entry.n_granules - entry.held);
        let is_split = self.share(id, entry.class).keep < entry.n_granules;
        if is_split || self.upper.has(id) || !self.layout.is_at_hand(id) {
            return false;
        }
        // The expert's own granules must not be what makes the room.
        self.table.get_mut(e).pins += 1;
        // On a link whose idle time is not free, a swap must be worth the load that it is.
        let least = worth - MARGIN.max(self.prefetch_price);
        let is_worth_load = worth >= self.prefetch_price;
        let room = is_worth_load.then(|| self.make_swap_room(e, n, least)).flatten();
        self.table.get_mut(e).pins -= 1;
        let Some(room) = room else { return false };
        let reason = Reason { cause: Cause::Prefetch, access: Access::Fill };
        self.begin_load(e, room, reason, URGENCY);
        true
    }

    /// Room for `n` granules of an expert, if all that leaves for it is worth less than `least`:
    /// otherwise what has left would come back in the place of this expert, again and again. What
    /// must leave the working set goes to transit, if something there is worth even less.
    fn make_swap_room(&mut self, e: u32, n: usize, least: f64) -> Option<Room> {
        if self.make_transit_room(e, n, Claim::by_worth(least)) {
            return Some(Room { n_working: 0, n_transit: n });
        }
        let has_working = self.make_working_room(e, n, Some(least));
        has_working.then_some(Room { n_working: n, n_transit: 0 })
    }
}
