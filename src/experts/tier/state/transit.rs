//! Room in transit, and who must leave it: what came in vain, what is predicted to be less urgent,
//! and experts that had to leave the working set. These stay while nothing better wants their
//! room, so that no slot is empty; prompts and prefetches take it from the least valuable first.

use super::State;
use crate::experts::tier::class::Role;
use crate::experts::tier::residency::Entry;

/// A claim to room in transit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    /// Experts that are predicted to be as urgent stay; `None`: none does.
    pub urgency: Option<f32>,
    /// Experts with this priority of the eviction or more stay; `None`: none does.
    pub worth: Option<f64>,
}

impl Claim {
    pub const DEMAND: Claim = Claim { urgency: None, worth: None };

    /// The claim of an expert that nothing predicts, by the eviction's priority.
    pub fn by_worth(worth: f64) -> Claim {
        Claim { urgency: Some(f32::MIN), worth: Some(worth) }
    }
}

impl State {
    /// The claim of a prefetch. Where the eviction knows what the expert is worth, it does not take
    /// the room of one that is worth more: p · gain, in the unit of the eviction's priority, less
    /// the price of the load. Below 0 it is not worth the load.
    pub(super) fn prefetch_claim(&self, e: u32, urgency: f32) -> Claim {
        let is_certain = urgency == f32::INFINITY;
        let worth = self.eviction.expected_priority(self.table.get(e).id);
        let worth = worth.filter(|_| !is_certain).map(|worth| worth - self.prefetch_price);
        Claim { urgency: Some(urgency), worth }
    }

    /// Room for `n` more granules of an expert in transit. False, and nothing has left, if there is
    /// too little that the claim prevails over.
    pub(super) fn make_transit_room(&mut self, e: u32, n: usize, claim: Claim) -> bool {
        let class = self.table.get(e).class;
        let free = self.classes[class].free(Role::Transit);
        if free >= n {
            return true;
        }
        let mut victims = self.transit_victims(class, claim);
        let held: usize = victims.iter().map(|v| self.table.get(v.2).in_transit()).sum();
        if free + held < n {
            return false;
        }
        victims.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        for (_, _, victim) in victims {
            if self.classes[class].free(Role::Transit) >= n {
                break;
            }
            self.drop_transit(victim);
        }
        true
    }

    /// The experts that may leave transit for a claim, each with the urgency that is predicted of
    /// it and its priority.
    fn transit_victims(&self, class: usize, claim: Claim) -> Vec<(f32, f64, u32)> {
        let members = self.classes[class].members().iter().copied();
        let in_transit =
            members.filter(|e| self.table.is_evictable(*e) && self.table.get(*e).in_transit() > 0);
        let victim = |e: u32| {
            let entry = self.table.get(e);
            let urgency = self.prefetch_priority(entry).unwrap_or(f32::NEG_INFINITY);
            let worth = self.eviction.priority(entry.id);
            let leaves = claim.urgency.is_none_or(|claimed| urgency < claimed)
                && claim.worth.is_none_or(|claimed| worth < claimed);
            leaves.then_some((urgency, worth, e))
        };
        in_transit.filter_map(victim).collect()
    }

    /// The last `n` working granules of an expert that must leave the working set go to transit, if
    /// it is whole and there is room or something worth less.
    pub(super) fn demote(&mut self, e: u32, n: usize) -> bool {
        let entry = self.table.get(e);
        let Entry { id, class, .. } = *entry;
        // What the tier above holds is safe there.
        if !entry.is_whole() || self.upper.has(id) {
            return false;
        }
        let claim = Claim::by_worth(self.eviction.priority(id));
        // Its own granules must not be what makes the room.
        self.table.get_mut(e).pins += 1;
        let has_room = self.make_transit_room(e, n, claim);
        self.table.get_mut(e).pins -= 1;
        if has_room {
            self.classes[class].change_role(Role::Working, Role::Transit, n);
            self.table.remove_working(e, n);
        }
        has_room
    }

    /// Granules in transit join the working set, as far as the expert keeps them and there is room.
    pub(super) fn move_to_working(&mut self, e: u32) {
        let Entry { id, class, held, working, .. } = *self.table.get(e);
        let n = held.min(self.share(id, class).keep).saturating_sub(working);
        if n == 0 {
            return;
        }
        // What must leave for them may have their place in transit.
        self.classes[class].begin_move(Role::Transit, n);
        let has_room = self.make_working_room(e, n, None);
        if has_room {
            self.classes[class].end_move(Role::Working, n);
            self.table.add_working(e, n);
        } else {
            let is_back = self.make_transit_room(e, n, Claim::DEMAND);
            assert!(is_back, "what came in the meantime can leave again");
            self.classes[class].end_move(Role::Transit, n);
        }
    }

    /// An expert that a prompt has brought through transit takes the room of the least valuable one
    /// of its layer in the working set, if that is worth less by the eviction's priority. They
    /// exchange roles, so no byte moves; the other stays in transit until its room is wanted. An
    /// eviction that does not hear of prompts exchanges nothing.
    pub(super) fn exchange(&mut self, e: u32) {
        let entry = self.table.get(e);
        let Entry { id, class, n_granules: n, .. } = *entry;
        let is_kept = self.share(id, class).keep >= n && !self.upper.has(id);
        if !self.eviction.hears_of_prompts()
            || !is_kept
            || !entry.is_whole()
            || entry.in_transit() < n
        {
            return;
        }
        let priority = |e: u32| self.eviction.priority(self.table.get(e).id);
        let others = self.experts_of(id.layer as usize).filter(|e| {
            let other = self.table.get(*e);
            self.table.is_evictable(*e) && other.is_whole() && other.working == n
        });
        let least = others.min_by(|a, b| priority(*a).total_cmp(&priority(*b)));
        let Some(least) = least.filter(|least| priority(*least) < priority(e)) else { return };
        // The class has as many granules in each role as before.
        self.table.remove_working(least, n);
        self.table.add_working(e, n);
    }
}
