//! Counts of what peers have done.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::experts::counters;

/// Counts since the head was started, or over a span of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounters {
    pub requests: u64,
    /// Experts that peers were asked for, and those of them that were computed here after all.
    pub experts: u64,
    pub lost: u64,
    /// Rows that peers were asked for.
    pub pairs: u64,
    /// Bytes of bodies to peers, and from them.
    pub sent_bytes: u64,
    pub received_bytes: u64,
    /// Time that passes waited for answers.
    pub wait_ns: u64,
}

impl PeerCounters {
    fn with(&self, other: &PeerCounters, f: impl Fn(u64, u64) -> u64) -> PeerCounters {
        PeerCounters {
            requests: f(self.requests, other.requests),
            experts: f(self.experts, other.experts),
            lost: f(self.lost, other.lost),
            pairs: f(self.pairs, other.pairs),
            sent_bytes: f(self.sent_bytes, other.sent_bytes),
            received_bytes: f(self.received_bytes, other.received_bytes),
            wait_ns: f(self.wait_ns, other.wait_ns),
        }
    }

    /// The counts since `before`.
    pub fn since(&self, before: &PeerCounters) -> PeerCounters {
        self.with(before, |now, before| now - before)
    }

    /// `n` of `total` equal parts.
    pub fn part(&self, n: usize, total: usize) -> PeerCounters {
        self.with(self, |value, _| counters::part(value, n, total))
    }

    /// The sums of two spans.
    pub fn plus(&self, other: &PeerCounters) -> PeerCounters {
        self.with(other, |one, other| one + other)
    }
}

/// Counters that are read while they are written.
#[derive(Debug, Default)]
pub struct Counts {
    pub requests: AtomicU64,
    pub experts: AtomicU64,
    pub lost: AtomicU64,
    pub pairs: AtomicU64,
    pub sent_bytes: AtomicU64,
    pub received_bytes: AtomicU64,
    pub wait_ns: AtomicU64,
}

impl Counts {
    pub fn now(&self) -> PeerCounters {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        PeerCounters {
            requests: read(&self.requests),
            experts: read(&self.experts),
            lost: read(&self.lost),
            pairs: read(&self.pairs),
            sent_bytes: read(&self.sent_bytes),
            received_bytes: read(&self.received_bytes),
            wait_ns: read(&self.wait_ns),
        }
    }
}

pub fn add(count: &AtomicU64, n: usize) {
    count.fetch_add(n as u64, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_add_up() {
        let counts = Counts::default();
        add(&counts.pairs, 3);
        let before = counts.now();
        add(&counts.pairs, 4);
        add(&counts.wait_ns, 1);
        let span = counts.now().since(&before);
        assert_eq!((span.pairs, span.wait_ns, span.experts), (4, 1, 0));
        assert_eq!(before.plus(&span), counts.now());
    }
}
