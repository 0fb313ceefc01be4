//! Several threads that do the same for a while.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// Calls `work` over and over on each of `n_threads` threads for about `time`; the sum of what it
/// answers, a second. A thread's rate is by its own clock, so one that ends late distorts nothing.
pub fn rate(n_threads: usize, time: Duration, work: &(dyn Fn() -> u64 + Sync)) -> f64 {
    let all_are_there = Barrier::new(n_threads);
    let one = || {
        all_are_there.wait();
        let (start, mut done) = (Instant::now(), 0);
        loop {
            done += work();
            let passed = start.elapsed();
            if passed >= time {
                return done as f64 / passed.as_secs_f64();
            }
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(|thread| thread.join().expect("it only measures")).sum()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn all_threads_count() {
        let (calls, millisecond) = (AtomicU64::new(0), Duration::from_millis(1));
        let sleep = || {
            calls.fetch_add(1, Ordering::Relaxed);
            thread::sleep(millisecond);
            1
        };
        let rate = rate(4, 30 * millisecond, &sleep);
        // Four threads, each at most once a millisecond.
        assert!(rate > 4.0 && rate <= 4000.0, "{rate}");
        assert!(calls.load(Ordering::Relaxed) >= 4);
    }
}
