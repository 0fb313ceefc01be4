//! The cost of moving experts: counted by the tier, reported by `cli`.

/// A snapshot. Everything counts from the start on, but `prefetch_pending_bytes` and the resident
/// bytes, which are of the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Experts that were demanded and were there: all of their granules, some, none. One that
    /// serves several tokens of a prompt at once counts once.
    pub hits_whole: u64,
    pub hits_partial: u64,
    pub misses: u64,
    /// Whole hits that a device has found by itself and that a prefetch had brought: predictions
    /// that came in time.
    pub hits_prefetched: u64,
    /// Decode steps of layers whose routing the eviction had not heard of when victims were named
    /// for them. None: whoever computes layers tells it first.
    pub unheard_steps: u64,
    /// Bytes read because they were demanded.
    pub demand_bytes: u64,
    /// Prefetched bytes that a demand found in memory or on their way, and those dropped unused.
    pub prefetch_used_bytes: u64,
    pub prefetch_wasted_bytes: u64,
    /// Prefetched bytes of which it is not known yet.
    pub prefetch_pending_bytes: u64,
    /// Bytes and calls of all reads, padding included.
    pub read_bytes: u64,
    pub n_reads: u64,
    /// Time with at least one read in flight.
    pub busy_ns: u64,
    /// Time that computation waited for experts.
    pub stall_ns: u64,
    /// Time spent on the policy, on whatever thread, the part of it on the layer loop's own, and
    /// events that the policy was too slow for.
    pub policy_ns: u64,
    pub policy_loop_ns: u64,
    pub policy_events_dropped: u64,
    pub resident_bytes: u64,
    pub resident_bytes_max: u64,
    /// Demand loads by the prefetched bytes in flight when they were queued, which they may have
    /// to wait for, in granules: none, up to ¼, ½ and so on to 2, and more than two.
    pub demand_wait_histogram: [u64; 10],
}

/// `n` of `total` equal parts of a count.
pub fn part(value: u64, n: usize, total: usize) -> u64 {
    (u128::from(value) * n as u128 / total.max(1) as u128) as u64
}

impl Counters {
    /// The counts since an earlier snapshot. Momentary values stay as they are.
    pub fn since(&self, earlier: &Counters) -> Counters {
        // Saturating: a snapshot is not taken of all counters at one instant.
        self.with(earlier, u64::saturating_sub)
    }

    /// Both together; what is of the moment is taken of `self`.
    pub fn plus(&self, other: &Counters) -> Counters {
        self.with(other, u64::saturating_add)
    }

    /// `n` of `total` equal parts. Momentary values stay as they are.
    pub fn part(&self, n: usize, total: usize) -> Counters {
        self.with(self, |value, _| part(value, n, total))
    }

    /// The counters of two tiers side by side: what is of the moment is added up, too.
    pub fn beside(&self, other: &Counters) -> Counters {
        let pending = self.prefetch_pending_bytes + other.prefetch_pending_bytes;
        Counters {
            prefetch_pending_bytes: pending,
            resident_bytes: self.resident_bytes + other.resident_bytes,
            resident_bytes_max: self.resident_bytes_max + other.resident_bytes_max,
            ..self.plus(other)
        }
    }

    fn with(&self, other: &Counters, f: impl Fn(u64, u64) -> u64) -> Counters {
        let mut histogram = self.demand_wait_histogram;
        for (mine, others) in histogram.iter_mut().zip(other.demand_wait_histogram) {
            *mine = f(*mine, others);
        }
        Counters {
            hits_whole: f(self.hits_whole, other.hits_whole),
            hits_partial: f(self.hits_partial, other.hits_partial),
            misses: f(self.misses, other.misses),
            hits_prefetched: f(self.hits_prefetched, other.hits_prefetched),
            unheard_steps: f(self.unheard_steps, other.unheard_steps),
            demand_bytes: f(self.demand_bytes, other.demand_bytes),
            prefetch_used_bytes: f(self.prefetch_used_bytes, other.prefetch_used_bytes),
            prefetch_wasted_bytes: f(self.prefetch_wasted_bytes, other.prefetch_wasted_bytes),
            prefetch_pending_bytes: self.prefetch_pending_bytes,
            read_bytes: f(self.read_bytes, other.read_bytes),
            n_reads: f(self.n_reads, other.n_reads),
            busy_ns: f(self.busy_ns, other.busy_ns),
            stall_ns: f(self.stall_ns, other.stall_ns),
            policy_ns: f(self.policy_ns, other.policy_ns),
            policy_loop_ns: f(self.policy_loop_ns, other.policy_loop_ns),
            policy_events_dropped: f(self.policy_events_dropped, other.policy_events_dropped),
            resident_bytes: self.resident_bytes,
            resident_bytes_max: self.resident_bytes_max,
            demand_wait_histogram: histogram,
        }
    }

    /// The part of demanded experts that were there as a whole; NaN where none was demanded.
    pub fn hit_rate(&self) -> f64 {
        self.of_demanded(self.hits_whole)
    }

    /// The part of them of which some granules were there.
    pub fn partial_hit_rate(&self) -> f64 {
        self.of_demanded(self.hits_partial)
    }

    fn of_demanded(&self, n: u64) -> f64 {
        n as f64 / (self.hits_whole + self.hits_partial + self.misses) as f64
    }

    /// The rate of the disk while reads were in flight; NaN if there were none.
    pub fn gb_per_second(&self) -> f64 {
        self.read_bytes as f64 / self.busy_ns as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_keeps_what_is_of_the_moment() {
        let earlier = Counters {
            hits_whole: 1,
            read_bytes: 100,
            resident_bytes: 5,
            resident_bytes_max: 9,
            demand_wait_histogram: [1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            ..Counters::default()
        };
        let now = Counters {
            hits_whole: 4,
            misses: 1,
            read_bytes: 300,
            busy_ns: 100,
            resident_bytes: 7,
            resident_bytes_max: 9,
            demand_wait_histogram: [3, 1, 0, 0, 0, 0, 0, 0, 0, 0],
            ..earlier
        };
        let since = now.since(&earlier);
        assert_eq!((since.hits_whole, since.misses, since.read_bytes), (3, 1, 200));
        assert_eq!((since.resident_bytes, since.resident_bytes_max), (7, 9));
        assert_eq!(since.demand_wait_histogram, [2, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((since.hit_rate(), since.gb_per_second()), (0.75, 2.0));
        let sum = since.plus(&earlier);
        assert_eq!(sum, now);
        let both = now.beside(&now);
        assert_eq!((both.misses, both.resident_bytes, both.resident_bytes_max), (2, 14, 18));
    }

    #[test]
    fn rates_of_nothing_are_no_numbers() {
        let none = Counters::default();
        assert!(none.hit_rate().is_nan() && none.partial_hit_rate().is_nan());
        assert!(none.gb_per_second().is_nan());
    }
}
