//! The link on the simulated clock: which read ends when (`LinkCosts` says how).

use std::collections::VecDeque;

use super::costs::LinkCosts;
use crate::policy::mix;

pub struct Link {
    costs: LinkCosts,
    /// End and number of each read in flight. They end in the order in which they have started.
    in_flight: VecDeque<(u64, u32)>,
    /// Reads that were started, and so draws of the jitter.
    n_started: u64,
    busy_since: u64,
    busy_ns: u64,
}

impl Link {
    pub fn new(costs: LinkCosts) -> Link {
        assert!(costs.depth > 0 && costs.bytes_per_second > 0.0);
        Link { costs, in_flight: VecDeque::new(), n_started: 0, busy_since: 0, busy_ns: 0 }
    }

    pub fn has_room(&self) -> bool {
        self.in_flight.len() < self.costs.depth
    }

    pub fn start(&mut self, number: u32, bytes: usize, now: u64) {
        assert!(self.has_room());
        if self.in_flight.is_empty() {
            self.busy_since = now;
        }
        let ready = now + self.costs.latency_ns + self.jitter();
        let free = self.in_flight.back().map_or(0, |last| last.0);
        self.in_flight.push_back((ready.max(free) + self.costs.transfer_ns(bytes), number));
    }

    fn jitter(&mut self) -> u64 {
        self.n_started += 1;
        match self.costs.jitter_ns {
            0 => 0,
            jitter_ns => mix(self.costs.seed ^ mix(self.n_started)) % (jitter_ns + 1),
        }
    }

    /// When the next read ends.
    pub fn next_end(&self) -> Option<u64> {
        self.in_flight.front().map(|read| read.0)
    }

    /// Takes out the read that ends next.
    pub fn end(&mut self) -> u32 {
        let (end, number) = self.in_flight.pop_front().expect("a read in flight");
        if self.in_flight.is_empty() {
            self.busy_ns += end - self.busy_since;
        }
        number
    }

    /// Time with a read in flight, up to `now`.
    pub fn busy_ns(&self, now: u64) -> u64 {
        let current = if self.in_flight.is_empty() { 0 } else { now - self.busy_since };
        self.busy_ns + current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1 byte a ns.
    fn costs(latency_ns: u64, depth: usize) -> LinkCosts {
        LinkCosts::new(1e9, latency_ns, depth)
    }

    fn ends(mut link: Link) -> Vec<u64> {
        std::iter::from_fn(|| link.next_end().inspect(|_| _ = link.end())).collect()
    }

    #[test]
    fn latency_is_paid_once_by_reads_that_are_in_flight_together() {
        let mut link = Link::new(costs(30, 3));
        (0..3).for_each(|i| link.start(i, 100, 1000));
        assert!(!link.has_room());
        assert_eq!(ends(link), [1130, 1230, 1330]);
        // Transfers that are shorter than the latency still take turns.
        let mut link = Link::new(costs(30, 2));
        link.start(0, 10, 0);
        link.start(1, 10, 25);
        assert_eq!(ends(link), [40, 65]);
    }

    #[test]
    fn it_is_busy_while_a_read_is_in_flight() {
        let mut link = Link::new(costs(10, 2));
        link.start(0, 90, 0);
        assert_eq!(link.busy_ns(50), 50);
        link.start(1, 100, 50);
        link.end();
        link.end();
        link.start(2, 10, 1000);
        link.end();
        assert_eq!(link.busy_ns(9999), 200 + 20);
    }

    #[test]
    fn jitter_is_bounded_and_repeatable() {
        let draw = |seed| {
            let mut link = Link::new(LinkCosts { jitter_ns: 50, seed, ..costs(100, 1000) });
            (0..1000).for_each(|i| link.start(i, 0, 10_000 * u64::from(i)));
            let ends = ends(link);
            let draws = ends.iter().enumerate().map(|(i, end)| end - 10_000 * i as u64 - 100);
            draws.collect::<Vec<_>>()
        };
        let draws = draw(1);
        assert!((0..=50).all(|ns| draws.contains(&ns)) && draws.iter().all(|ns| *ns <= 50));
        assert_eq!(draw(1), draws);
        assert_ne!(draw(2), draws);
    }
}
