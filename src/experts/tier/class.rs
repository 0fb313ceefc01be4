//! One size class of slots and who may hold how many. Slots are held in one of two roles:
//! *working* granules serve decode and are evicted by policy; *transit* granules are on their way
//! to be used once (a prompt's experts) or perhaps (prefetched ones). Transit is bounded, so
//! neither a prompt nor a wrong prediction can push out the working set: the ring of the design.
//! A role is a matter of counting; changing it moves no byte.

use super::slots::Slots;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Working,
    Transit,
}

/// The slots of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassPlan {
    pub n_slots: usize,
    /// The number of these that transit may hold.
    pub n_transit: usize,
    pub slot_bytes: usize,
}

#[derive(Debug)]
pub struct Class {
    pub slots: Slots,
    plan: ClassPlan,
    working: usize,
    transit: usize,
    /// Experts that hold slots, in no order: where victims are looked for.
    members: Vec<u32>,
}

impl Class {
    pub fn new(plan: ClassPlan) -> Class {
        assert!(plan.n_transit <= plan.n_slots);
        let slots = Slots::new(plan.n_slots);
        Class { slots, plan, working: 0, transit: 0, members: Vec::new() }
    }

    pub fn slot_bytes(&self) -> usize {
        self.plan.slot_bytes
    }

    /// The number of slots that can be added to `role` before another role must give one up.
    pub fn free(&self, role: Role) -> usize {
        match role {
            Role::Working => self.plan.n_slots - self.plan.n_transit - self.working,
            Role::Transit => self.plan.n_transit - self.transit,
        }
    }

    /// Takes a slot. The caller has checked `free`.
    pub fn take(&mut self, role: Role) -> u32 {
        assert!(self.free(role) > 0, "no room for another {role:?} granule");
        *self.count(role) += 1;
        self.slots.take().expect("both roles together hold fewer slots than there are")
    }

    pub fn give(&mut self, role: Role, slot: u32) {
        *self.count(role) -= 1;
        self.slots.give(slot);
    }

    /// `n` slots change their role. The caller has checked `free`.
    pub fn change_role(&mut self, from: Role, to: Role, n: usize) {
        assert!(self.free(to) >= n, "no room for {n} more {to:?} granules");
        *self.count(from) -= n;
        *self.count(to) += n;
    }

    /// `n` slots begin to change their role: until `end_move` they have none.
    pub fn begin_move(&mut self, from: Role, n: usize) {
        *self.count(from) -= n;
    }

    /// The caller has checked `free`.
    pub fn end_move(&mut self, to: Role, n: usize) {
        assert!(self.free(to) >= n, "no room for {n} more {to:?} granules");
        *self.count(to) += n;
    }

    fn count(&mut self, role: Role) -> &mut usize {
        match role {
            Role::Working => &mut self.working,
            Role::Transit => &mut self.transit,
        }
    }

    pub fn members(&self) -> &[u32] {
        &self.members
    }

    /// Answers the place that the entry must remember.
    pub fn join(&mut self, expert: u32) -> u32 {
        self.members.push(expert);
        self.members.len() as u32 - 1
    }

    /// Removes the member at `place`; answers who has that place now, if anyone.
    pub fn leave(&mut self, place: u32) -> Option<u32> {
        self.members.swap_remove(place as usize);
        self.members.get(place as usize).copied()
    }

    pub fn check_integrity(&self) {
        self.slots.check_integrity();
        assert_eq!(self.working + self.transit, self.slots.n_taken());
        assert!(self.transit <= self.plan.n_transit);
        assert!(self.working <= self.plan.n_slots - self.plan.n_transit);
    }

    /// Granules held in a role, for checks.
    pub fn held(&self, role: Role) -> usize {
        match role {
            Role::Working => self.working,
            Role::Transit => self.transit,
        }
    }
}
