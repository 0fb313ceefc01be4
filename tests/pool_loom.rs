//! The gate of the thread pool under a model checker: its very source with loom's primitives in the
//! place of the standard library's, so that loom tries the interleavings of caller and workers one
//! by one. It finds lost wake-ups (here every wait sleeps at once) and, as the region's job is a
//! cell it watches, accesses that nothing orders: what the header of gate.rs argues.

#[path = "../src/backend/cpu/pool/gate.rs"]
mod gate;

mod sync {
    pub use loom::sync::atomic::{AtomicU64, Ordering};
    pub use loom::sync::{Condvar, Mutex};
}

use gate::{Gate, Seen};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

#[derive(Default)]
struct Pool {
    gate: Gate,
    /// Written by the caller before each region, read inside.
    job: UnsafeCell<usize>,
    /// The region's work: who takes it computes the result.
    left: AtomicUsize,
    result: UnsafeCell<usize>,
}

// SAFETY: loom checks the accesses to the cells.
unsafe impl Sync for Pool {}
// SAFETY: as above.
unsafe impl Send for Pool {}

impl Pool {
    fn work(&self) {
        // SAFETY: loom says if somebody writes meanwhile.
        let job = self.job.with(|job| unsafe { *job });
        if self.left.swap(0, Ordering::Relaxed) > 0 {
            // SAFETY: loom says if somebody else has access meanwhile.
            self.result.with_mut(|result| unsafe { *result = job });
        }
    }
}

/// Workers and regions, with fewer preemptions where more workers are; with `spins`, one look at
/// the word goes before each sleep.
fn check(workers: usize, regions: usize, spins: bool) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4 - workers);
    model.check(move || {
        let pool = Arc::new(Pool::default());
        let spin = move |is_so: &dyn Fn() -> bool| spins && is_so();
        let workers: Vec<_> = (0..workers)
            .map(|_| {
                let pool = pool.clone();
                thread::spawn(move || {
                    let mut seen = Seen::default();
                    while pool.gate.enter(&mut seen, spin) {
                        pool.work();
                        pool.gate.leave();
                    }
                })
            })
            .collect();
        for region in 1..=regions {
            // SAFETY: loom says if a worker reads meanwhile.
            pool.job.with_mut(|job| unsafe { *job = region });
            pool.left.store(1, Ordering::Relaxed);
            pool.gate.open();
            pool.work();
            pool.gate.close(spin);
            // SAFETY: loom says if a worker writes meanwhile.
            assert_eq!(pool.result.with(|result| unsafe { *result }), region);
        }
        pool.gate.end();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
}

#[test]
fn a_worker_and_regions() {
    check(1, 1, false);
    check(1, 2, false);
    check(1, 2, true);
}

#[test]
fn two_workers() {
    check(2, 1, false);
    check(2, 1, true);
}
