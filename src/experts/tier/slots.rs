//! Slots for granules, in one size class. A slot is a number here; the mover knows its memory. All
//! slots of a class have one size, so there is no fragmentation and the budget is their number.

/// A fixed number of slots; `take` and `give` are O(1).
#[derive(Debug)]
pub struct Slots {
    /// A stack: what was given back last is taken next, as it is the likeliest to be in a cache.
    free: Vec<u32>,
    taken: Vec<bool>,
}

impl Slots {
    pub fn new(n: usize) -> Slots {
        let n = u32::try_from(n).expect("fewer than 2^32 slots");
        // Low numbers first, so that memory is touched from its start on.
        Slots { free: (0..n).rev().collect(), taken: vec![false; n as usize] }
    }

    pub fn len(&self) -> usize {
        self.taken.len()
    }

    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    pub fn n_taken(&self) -> usize {
        self.len() - self.n_free()
    }

    pub fn take(&mut self) -> Option<u32> {
        let slot = self.free.pop()?;
        assert!(!std::mem::replace(&mut self.taken[slot as usize], true), "slot {slot} is taken");
        Some(slot)
    }

    pub fn give(&mut self, slot: u32) {
        assert!(std::mem::replace(&mut self.taken[slot as usize], false), "slot {slot} is free");
        self.free.push(slot);
    }

    /// Every slot is free or taken, and once.
    pub fn check_integrity(&self) {
        let mut seen = vec![false; self.len()];
        for &slot in &self.free {
            assert!(!self.taken[slot as usize], "slot {slot} is both free and taken");
            assert!(!std::mem::replace(&mut seen[slot as usize], true), "slot {slot} twice");
        }
        assert_eq!(self.free.len() + self.taken.iter().filter(|t| **t).count(), self.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_taken_once_and_come_back() {
        let mut slots = Slots::new(3);
        let taken: Vec<u32> = std::iter::from_fn(|| slots.take()).collect();
        assert_eq!(taken, [0, 1, 2]);
        assert_eq!(slots.take(), None);
        slots.give(1);
        assert_eq!((slots.n_free(), slots.n_taken(), slots.take()), (1, 2, Some(1)));
        slots.check_integrity();
    }

    #[test]
    #[should_panic(expected = "is free")]
    fn a_slot_is_not_given_back_twice() {
        let mut slots = Slots::new(2);
        let slot = slots.take().unwrap();
        slots.give(slot);
        slots.give(slot);
    }
}
