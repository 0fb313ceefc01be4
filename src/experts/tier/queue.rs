//! The order in which loads get the link. Demand goes first, in the order in which it was asked;
//! prefetch gets the link only while no demand is queued or on its way, most probable first, and
//! only one granule of it at a time, or two where the link lacks much of its rate with one. So a
//! demand load that comes at any moment waits for at most two granules of prefetch. Loads are
//! queued whole and started read by read, which makes every boundary between reads a point of
//! pre-emption.

use std::collections::VecDeque;

pub type LoadId = u32;

/// Granules of prefetch in flight at most, whatever the link's rate: demand may wait for all of
/// them.
pub const PREFETCH_GRANULES_MAX: u64 = 2;

/// Why bytes are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Demand,
    Prefetch,
}

#[derive(Debug)]
pub struct TransferQueue {
    demand: VecDeque<LoadId>,
    /// Most probable first.
    prefetch: Vec<(LoadId, f32)>,
    /// Reads on their way.
    demand_reads: usize,
    prefetch_bytes: u64,
    granule_bytes: u64,
    /// The limit of prefetch in flight, in granules.
    prefetch_granules_max: u64,
}

impl TransferQueue {
    pub fn new(granule_bytes: u64) -> TransferQueue {
        TransferQueue {
            demand: VecDeque::new(),
            prefetch: Vec::new(),
            demand_reads: 0,
            prefetch_bytes: 0,
            granule_bytes,
            prefetch_granules_max: 1,
        }
    }

    pub fn granule_bytes(&self) -> u64 {
        self.granule_bytes
    }

    /// So many granules of prefetch may be in flight together: one or two.
    pub fn set_prefetch_granules(&mut self, n: u64) {
        assert!((1..=PREFETCH_GRANULES_MAX).contains(&n));
        self.prefetch_granules_max = n;
    }

    fn prefetch_bytes_max(&self) -> u64 {
        self.prefetch_granules_max * self.granule_bytes
    }

    pub fn push_demand(&mut self, load: LoadId) {
        self.demand.push_back(load);
    }

    /// `p`: how probable it is that the load will be used.
    pub fn push_prefetch(&mut self, load: LoadId, p: f32) {
        let at = self.prefetch.partition_point(|queued| queued.1 >= p);
        self.prefetch.insert(at, (load, p));
    }

    /// A queued prefetch is more or less urgent than it was. Does nothing to one that has no reads
    /// left to start.
    pub fn reprioritise(&mut self, load: LoadId, p: f32) {
        if self.remove_prefetch(load) {
            self.push_prefetch(load, p);
        }
    }

    /// A prefetch that has been asked for. Does nothing to one that has no reads left to start.
    pub fn promote(&mut self, load: LoadId) {
        if self.remove_prefetch(load) {
            self.demand.push_back(load);
        }
    }

    /// The load has no reads left to start, or must start no more of them.
    pub fn remove(&mut self, load: LoadId) {
        if !self.remove_prefetch(load) {
            self.demand.retain(|queued| *queued != load);
        }
    }

    fn remove_prefetch(&mut self, load: LoadId) -> bool {
        let at = self.prefetch.iter().position(|queued| queued.0 == load);
        at.map(|at| self.prefetch.remove(at)).is_some()
    }

    /// Queued prefetches, most probable first.
    pub fn prefetches(&self) -> impl DoubleEndedIterator<Item = LoadId> {
        self.prefetch.iter().map(|queued| queued.0)
    }

    /// The load whose next read may start now. `bytes` says how long that read is.
    pub fn front(&self, bytes: impl Fn(LoadId) -> u64) -> Option<(LoadId, Cause)> {
        if let Some(load) = self.demand.front() {
            return Some((*load, Cause::Demand));
        }
        let (load, _) = *self.prefetch.first()?;
        let alone = self.demand_reads == 0;
        let fits = self.prefetch_bytes == 0
            || self.prefetch_bytes + bytes(load) <= self.prefetch_bytes_max();
        (alone && fits).then_some((load, Cause::Prefetch))
    }

    pub fn started(&mut self, cause: Cause, bytes: u64) {
        match cause {
            Cause::Demand => self.demand_reads += 1,
            Cause::Prefetch => self.prefetch_bytes += bytes,
        }
    }

    /// `cause` is what the read was started for.
    pub fn ended(&mut self, cause: Cause, bytes: u64) {
        match cause {
            Cause::Demand => self.demand_reads -= 1,
            Cause::Prefetch => self.prefetch_bytes -= bytes,
        }
    }

    /// Whether reads of demand are left to start.
    pub fn has_demand(&self) -> bool {
        !self.demand.is_empty()
    }

    /// Prefetch on its way, in granules: what a demand load that comes now waits for.
    pub fn prefetch_granules(&self) -> f64 {
        self.prefetch_bytes as f64 / self.granule_bytes as f64
    }

    /// Whether no read is left to start and only prefetch is on its way, which leaves the link some
    /// room.
    pub fn is_free(&self) -> bool {
        let is_empty = self.demand.is_empty() && self.prefetch.is_empty();
        is_empty && self.demand_reads == 0 && self.prefetch_bytes < self.prefetch_bytes_max()
    }

    pub fn is_idle(&self) -> bool {
        self.demand.is_empty()
            && self.prefetch.is_empty()
            && self.demand_reads == 0
            && self.prefetch_bytes == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: u64 = 50;

    fn queue() -> TransferQueue {
        TransferQueue::new(100)
    }

    #[test]
    fn demand_in_order_then_prefetch_by_probability() {
        let mut q = queue();
        q.push_prefetch(1, 0.2);
        q.push_prefetch(2, 0.9);
        q.push_prefetch(3, 0.9);
        q.push_demand(5);
        q.push_demand(4);
        let mut order = Vec::new();
        while let Some((load, _)) = q.front(|_| HALF) {
            order.push(load);
            q.remove(load);
        }
        assert_eq!(order, [5, 4, 2, 3, 1]);
    }

    #[test]
    fn prefetch_waits_for_demand_on_its_way_and_takes_one_granule_of_the_link() {
        let mut q = queue();
        q.push_prefetch(1, 0.5);
        q.started(Cause::Demand, HALF);
        assert_eq!(q.front(|_| HALF), None);
        q.ended(Cause::Demand, HALF);
        for _ in 0..2 {
            assert_eq!(q.front(|_| HALF), Some((1, Cause::Prefetch)));
            q.started(Cause::Prefetch, HALF);
        }
        assert_eq!(q.front(|_| HALF), None);
        assert_eq!(q.prefetch_granules(), 1.0);
        // Two granules, where the link needs them.
        q.set_prefetch_granules(2);
        assert_eq!(q.front(|_| 2 * HALF), Some((1, Cause::Prefetch)));
        assert_eq!(q.front(|_| 3 * HALF), None);
        // Demand never waits for the queue.
        q.push_demand(2);
        assert_eq!(q.front(|_| HALF), Some((2, Cause::Demand)));
    }

    #[test]
    fn a_queued_prefetch_moves_with_its_priority() {
        let mut q = queue();
        q.push_prefetch(1, 0.2);
        q.push_prefetch(2, 0.9);
        q.reprioritise(1, 1.5);
        q.reprioritise(7, 2.0); // is not queued
        assert_eq!(q.prefetches().collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn a_read_longer_than_a_granule_goes_alone() {
        let mut q = queue();
        q.push_prefetch(1, 0.5);
        assert_eq!(q.front(|_| 300), Some((1, Cause::Prefetch)));
        q.started(Cause::Prefetch, 300);
        assert_eq!(q.front(|_| 1), None);
    }

    #[test]
    fn a_promoted_prefetch_is_demand() {
        let mut q = queue();
        q.push_prefetch(1, 0.5);
        q.push_prefetch(2, 0.6);
        q.promote(1);
        assert_eq!(q.front(|_| HALF), Some((1, Cause::Demand)));
        q.promote(7); // has no reads left to start
        q.remove(1);
        q.remove(2);
        assert!(q.is_idle());
    }
}
