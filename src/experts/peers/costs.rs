//! How long machines take, as measured: what a request may take before it is given up, and whether
//! it is worth asking at all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A mean of times for one unit of work, in which later ones count more. 0: nothing was measured.
#[derive(Debug, Default)]
pub struct Mean(AtomicU64);

/// The weight of a new time.
const NEW: f64 = 0.125;

impl Mean {
    pub fn add(&self, time: Duration, units: usize) {
        let new = time.as_nanos() as f64 / units.max(1) as f64;
        let old = self.ns();
        let mean = if old == 0.0 { new } else { old + NEW * (new - old) };
        self.0.store(mean.to_bits(), Ordering::Relaxed);
    }

    /// Nanoseconds of a unit.
    pub fn ns(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }
}

/// A peer that was never measured has this long, and every peer at least the second.
const FIRST: Duration = Duration::from_secs(5);
const LEAST: Duration = Duration::from_millis(500);
/// A request takes at most so many times as long as the mean, before it is computed here.
const TIMES: f64 = 4.0;
/// After this time a connection is given up, too.
pub const MOST: Duration = Duration::from_secs(60);

/// The time after which work of so many units is given up.
pub fn patience(mean_ns: f64, units: usize) -> Duration {
    if mean_ns == 0.0 {
        return FIRST;
    }
    let usual = Duration::from_nanos((TIMES * mean_ns * units as f64) as u64);
    (LEAST + usual).min(MOST)
}

/// Whether a peer is faster than this machine would be, which has to read the experts. What was
/// not measured is tried.
pub fn is_worth(peer_ns: f64, own_ns: f64) -> bool {
    peer_ns == 0.0 || own_ns == 0.0 || peer_ns <= own_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_follow_what_is_measured() {
        let mean = Mean::default();
        assert_eq!((mean.ns(), patience(mean.ns(), 4)), (0.0, FIRST));
        mean.add(Duration::from_millis(8), 4);
        assert_eq!(mean.ns(), 2e6);
        assert_eq!(patience(mean.ns(), 10), LEAST + Duration::from_millis(80));
        (0..100).for_each(|_| mean.add(Duration::from_secs(2), 1));
        assert!((1.99e9..=2e9).contains(&mean.ns()), "{}", mean.ns());
        assert_eq!(patience(mean.ns(), 100), MOST);
    }

    #[test]
    fn the_slower_machine_is_not_asked() {
        assert!(is_worth(0.0, 1.0) && is_worth(1.0, 0.0) && is_worth(1.0, 2.0));
        assert!(!is_worth(2.0, 1.0));
    }
}
