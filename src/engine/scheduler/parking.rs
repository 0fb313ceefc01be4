//! Sessions that share memory: gives it to their texts as a [`KvBudget`] says, and parks jobs.
//!
//! A parked job keeps its text as token ids, and all that its sampler and its grammar know. What
//! was computed of it goes to pages, and the rest is computed again when it goes on: the bits of a
//! position depend on the tokens before it alone, so the text is the one that it is without a rest.

use super::job::JobSink;
use super::kv_budget::{Grant, Holder, KvBudget};
use super::pages::Pages;
use super::slot::Slot;
use super::status::Counts;

pub struct Parking<'a, S> {
    pub budget: KvBudget,
    pub slots: &'a mut [Slot<S>],
    pub pages: &'a mut Pages,
    pub counts: &'a mut Counts,
}

impl<S: JobSink> Parking<'_, S> {
    /// Gives room to the texts in decode that need some, the oldest first.
    pub fn grow(&mut self) {
        for i in self.by_age(Slot::wants_decode) {
            let slot = &self.slots[i];
            // An older one may have parked it.
            if !slot.wants_decode() {
                continue;
            }
            let (n_past, n_to_come) = (slot.session.n_past(), slot.n_to_come());
            let grant = self.budget.grow(&self.holders(), slot.id, n_past, n_to_come);
            grant.iter().for_each(|grant| self.apply(i, grant));
        }
    }

    /// Lets parked jobs go on, the oldest first; false if one still has to wait.
    pub fn resume(&mut self) -> bool {
        for i in self.by_age(|slot| slot.is_parked) {
            let Some(job) = &self.slots[i].job else { continue };
            if !self.start(i, job.text().len(), job.n_to_come()) {
                return false;
            }
            self.slots[i].is_parked = false;
            self.slots[i].extend_from_pages(self.pages);
        }
        true
    }

    /// Gives room to a session for a job whose text has `n_text` tokens and may get `n_to_come`
    /// more; false if there is none.
    pub fn start(&mut self, i: usize, n_text: usize, n_to_come: Option<usize>) -> bool {
        let grant = self.budget.start(&self.holders(), self.slots[i].id, n_text, n_to_come);
        grant.iter().for_each(|grant| self.apply(i, grant));
        grant.is_some()
    }

    /// Lets texts in decode have the memory that is free while a prompt's pass is long.
    pub fn lend(&mut self) {
        let free = self.budget.free(&self.holders());
        let takers = self.by_age(|slot| slot.next.is_empty() && slot.wants_decode());
        for i in &takers {
            let slot = &mut self.slots[*i];
            slot.lent = (free / takers.len()).min(self.budget.n_ctx() - slot.room);
            slot.room += slot.lent;
        }
    }

    /// Takes back what was lent and is not used.
    pub fn take_back(&mut self) {
        for slot in &mut *self.slots {
            slot.room = slot.session.n_past().max(slot.room - std::mem::take(&mut slot.lent));
        }
    }

    fn apply(&mut self, i: usize, grant: &Grant) {
        for id in &grant.emptied {
            for slot in self.slots.iter_mut().filter(|slot| slot.id == *id) {
                slot.empty(self.pages);
                self.counts.n_parked += u64::from(slot.is_parked);
            }
        }
        if !grant.emptied.contains(&self.slots[i].id) {
            self.slots[i].room = grant.room;
        }
    }

    fn holders(&self) -> Vec<Holder> {
        self.slots.iter().map(Slot::holder).collect()
    }

    /// Indices of some slots by the age of their jobs.
    fn by_age(&self, which: impl Fn(&Slot<S>) -> bool) -> Vec<usize> {
        let mut found: Vec<usize> =
            (0..self.slots.len()).filter(|i| which(&self.slots[*i])).collect();
        found.sort_by_key(|i| self.slots[*i].last_used);
        found
    }
}
