//! How much prefetch an idle link needs in flight to reach its rate: one granule, or two where the
//! time from a read's start to its first byte counts. Measured from reads as they come; the caller
//! brings the clock.

/// A second granule in flight must be worth this: the link's rate with one, in parts of its rate
/// with more. Demand may wait for the second one as well. In replays a token takes 0.4 to 1.8 %
/// less with two granules where one reaches 80 %, and 0.4 to 1.0 % more where one reaches 92 %.
const SHARE: f64 = 0.9;

/// Samples of either kind that are needed, and that count.
const LEAST: f64 = 8.0;
const WINDOW: f64 = 64.0;

/// Sums over the last samples, older ones counting less.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    bytes: f64,
    ns: f64,
    n: f64,
}

impl Rate {
    fn add(&mut self, bytes: u64, ns: u64) {
        let keep = 1.0 - 1.0 / WINDOW;
        self.bytes = keep * self.bytes + bytes as f64;
        self.ns = keep * self.ns + ns as f64;
        self.n = keep * self.n + 1.0;
    }
}

#[derive(Clone, Debug)]
pub struct LinkRate {
    granule_bytes: u64,
    /// Bytes in flight.
    in_flight: u64,
    /// When the last read ended, or the first one of the present burst started.
    mark: u64,
    /// No read of this burst has ended.
    is_first: bool,
    /// With one granule in flight at most, and with more.
    shallow: Rate,
    deep: Rate,
}

impl LinkRate {
    pub fn new(granule_bytes: u64) -> LinkRate {
        let (shallow, deep) = (Rate::default(), Rate::default());
        LinkRate { granule_bytes, in_flight: 0, mark: 0, is_first: true, shallow, deep }
    }

    /// A read has started at `now`, ns.
    pub fn started(&mut self, now: u64, bytes: u64) {
        if self.in_flight == 0 {
            (self.mark, self.is_first) = (now, true);
        }
        self.in_flight += bytes;
    }

    pub fn ended(&mut self, now: u64, bytes: u64) {
        let ns = now.saturating_sub(self.mark);
        match self.in_flight <= self.granule_bytes {
            true => self.shallow.add(bytes, ns),
            // The first one has waited for its first byte, as it would alone.
            false if self.is_first => {}
            false => self.deep.add(bytes, ns),
        }
        self.in_flight -= bytes;
        (self.mark, self.is_first) = (now, false);
    }

    /// The granules of prefetch that may be in flight together.
    pub fn n_granules(&self) -> u64 {
        let LinkRate { shallow, deep, .. } = self;
        let is_known = shallow.n >= LEAST && deep.n >= LEAST;
        // shallow rate < SHARE · deep rate, without a division by no time at all
        let lacks = shallow.bytes * deep.ns < SHARE * deep.bytes * shallow.ns;
        if is_known && lacks { 2 } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link on which a read waits `latency` for its first byte, beside others, and takes 100 ns
    /// for its bytes. Reads of half a granule, at most `depth` at a time.
    fn measure(rate: &mut LinkRate, latency: u64, depth: usize) {
        let mut ends = std::collections::VecDeque::new();
        let (mut now, mut last) = (rate.mark + 1000, 0);
        for _ in 0..40 {
            while ends.len() < depth {
                rate.started(now, 50);
                last = last.max(now + latency) + 100;
                ends.push_back(last);
            }
            now = ends.pop_front().unwrap();
            rate.ended(now, 50);
        }
        while let Some(end) = ends.pop_front() {
            rate.ended(end, 50);
        }
    }

    #[test]
    fn a_link_with_latency_needs_two_granules_in_flight() {
        for (latency, expected) in [(0, 1), (10, 1), (150, 2), (250, 2), (1000, 2)] {
            let mut rate = LinkRate::new(100);
            measure(&mut rate, latency, 2);
            assert_eq!(rate.n_granules(), 1, "not known yet");
            measure(&mut rate, latency, 8);
            assert_eq!(rate.n_granules(), expected, "{latency}");
        }
    }

    #[test]
    fn a_link_that_changes_is_measured_again() {
        let mut rate = LinkRate::new(100);
        for latency in [500, 0] {
            for _ in 0..20 {
                measure(&mut rate, latency, 2);
                measure(&mut rate, latency, 8);
            }
            assert_eq!(rate.n_granules(), if latency > 0 { 2 } else { 1 });
        }
    }
}
