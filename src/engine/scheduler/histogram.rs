//! Counts of values by their size.

use std::time::Duration;

/// Buckets of a histogram, the one above all bounds included.
const N_BUCKETS: usize = 16;

/// Bounds of a histogram of times, in seconds.
pub const SECONDS: [f64; N_BUCKETS - 1] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0];

/// Bounds of a histogram of times that should be short.
pub const SHORT_SECONDS: [f64; N_BUCKETS - 1] =
    [5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// Bounds of a histogram of small numbers.
pub const NUMBERS: [f64; N_BUCKETS - 1] =
    [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0, 512.0];

/// Whoever counts owns it; a copy is a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Histogram {
    /// Upper bounds of all buckets but the last.
    pub bounds: &'static [f64; N_BUCKETS - 1],
    pub counts: [u64; N_BUCKETS],
    pub sum: f64,
}

impl Histogram {
    pub const fn new(bounds: &'static [f64; N_BUCKETS - 1]) -> Histogram {
        Histogram { bounds, counts: [0; N_BUCKETS], sum: 0.0 }
    }

    pub fn add(&mut self, value: f64) {
        self.counts[self.bounds.partition_point(|most| *most < value)] += 1;
        self.sum += value;
    }

    pub fn add_time(&mut self, time: Duration) {
        self.add(time.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_in_the_first_bucket_that_is_not_below_it() {
        let mut rows = Histogram::new(&NUMBERS);
        [1.0, 2.0, 5.0, 6.0, 7.0, 512.0, 513.0].into_iter().for_each(|n| rows.add(n));
        assert_eq!(rows.counts, [1, 1, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(rows.sum, 1046.0);
        let mut times = Histogram::new(&SECONDS);
        times.add_time(Duration::from_millis(250));
        assert_eq!(times.counts[5], 1);
    }

    #[test]
    fn bounds_ascend() {
        for bounds in [SECONDS, SHORT_SECONDS, NUMBERS] {
            assert!(bounds.is_sorted_by(|a, b| a < b));
        }
    }
}
