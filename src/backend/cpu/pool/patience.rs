//! How long a thread of a pool spins before it sleeps. On processors of its own it spins for long,
//! because a sleeper wakes late. Where other programs want the processors, a thread that spins is
//! taken off its processor when its time slice ends, mostly while it holds work that all others
//! then wait for; one that sleeps keeps its slice for the work. A thread sees which of the two it
//! is by its clock: between two looks at it there is little to do, so where much time has passed,
//! another program ran.
//!
//! A loop of 64 regions of 1,536 rows of 1,152 bytes a token, two processors with a busy program on
//! each and others that compile, medians of five, in shares of one thread's speed in the same run:
//! two threads 0.84 with a patience of 2 ms, 1.6 with 200 µs, 1.7 with 50 µs, 1.3 with 10 µs, 1.7
//! with 2 µs. With a caller that waited for all workers, 0.15 to 0.24.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// On processors of its own: longer than it takes to sample a token and to print it, so that a
/// decode never sleeps.
const ALONE: Duration = Duration::from_millis(2);
/// On processors that others want.
const CROWDED: Duration = Duration::from_micros(50);
/// More than this between two looks at the clock: another program ran.
const GAP: Duration = Duration::from_micros(500);
/// The time for which a pool takes its processors for crowded after a gap.
const MEMORY: Duration = Duration::from_secs(10);

/// Spins between two looks at the clock: some microseconds.
const SPINS_A_LOOK: usize = 128;

pub struct Patience {
    start: Instant,
    /// When processors are no longer taken for crowded, in nanoseconds after `start`.
    crowded_until: AtomicU64,
}

impl Patience {
    /// `is_crowded`: there are more threads than processors, for ever.
    pub fn new(is_crowded: bool) -> Self {
        let until = if is_crowded { u64::MAX } else { 0 };
        Patience { start: Instant::now(), crowded_until: AtomicU64::new(until) }
    }

    /// Spins until something is so. False if patience was lost before.
    pub fn spin_until(&self, is_so: &dyn Fn() -> bool) -> bool {
        let mut looks = None;
        loop {
            for _ in 0..SPINS_A_LOOK {
                if is_so() {
                    return true;
                }
                std::hint::spin_loop();
            }
            let now = self.start.elapsed();
            let (first, last) = *looks.get_or_insert((now, now));
            if self.is_lost(first, last, now) {
                return false;
            }
            looks = Some((first, now));
        }
    }

    /// At a look at the clock, with the first and the last one before it.
    fn is_lost(&self, first: Duration, last: Duration, now: Duration) -> bool {
        if now - last > GAP {
            self.crowded_until.fetch_max(nanos(now + MEMORY), Ordering::Relaxed);
        }
        let is_crowded = nanos(now) < self.crowded_until.load(Ordering::Relaxed);
        now - first >= if is_crowded { CROWDED } else { ALONE }
    }
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_is_short_for_a_while_after_a_gap() {
        let patience = Patience::new(false);
        let at = Duration::from_micros;
        assert!(!patience.is_lost(at(0), at(1900), at(1910)));
        assert!(patience.is_lost(at(0), at(1990), at(2000)));
        // Another program ran for 0.6 ms.
        assert!(patience.is_lost(at(5000), at(5010), at(5610)));
        assert!(!patience.is_lost(at(6000), at(6035), at(6045)));
        assert!(patience.is_lost(at(6000), at(6045), at(6055)));
        assert!(patience.is_lost(at(10_005_000), at(10_005_050), at(10_005_060)));
        assert!(!patience.is_lost(at(10_006_000), at(10_006_050), at(10_006_060)));
    }

    #[test]
    fn more_threads_than_processors_are_a_crowd() {
        let patience = Patience::new(true);
        let hours = |n: u64, micros: u64| Duration::from_micros(n * 3_600_000_000 + micros);
        for n in [0, 1, 100] {
            assert!(!patience.is_lost(hours(n, 0), hours(n, 30), hours(n, 40)));
            assert!(patience.is_lost(hours(n, 0), hours(n, 40), hours(n, 50)));
        }
    }
}
