//! A pool of threads for the token loop: all of them run one closure and meet at its end. Between
//! regions the workers spin, because the next region of a token follows within microseconds, and
//! after a while without work they park, so that an idle engine costs nothing.
//!
//! Ordering argument. `run` is serialised by `caller`. The job cell is written only there, while
//! every worker is idle (`running == 0`), and published by the release store to `epoch`; a worker
//! reads it after its acquire load of a new `epoch`. A worker's writes are published by its
//! release decrement of `running`, which `run` acquires before it returns; so the closure's
//! borrows end before the caller's stack frame does.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// Spins before a worker parks: some 50 to 100 µs, several layers' worth of regions.
const SPINS_BEFORE_PARK: usize = 20_000;
/// Spins before a waiting caller offers its core to others, for machines with more threads than
/// cores: the worker it waits for may be one of them.
const SPINS_BEFORE_YIELD: usize = 2_000;

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Counts regions; a worker that sees a new value has a job.
    epoch: AtomicUsize,
    /// Workers that have not finished the present region.
    running: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    stop: AtomicBool,
    panicked: AtomicBool,
    /// How many workers sleep (or are about to) on `wake`.
    parked: Mutex<usize>,
    wake: Condvar,
}

// SAFETY: `job` is the only field that is not Sync by itself; the ordering argument above says why
// its writes and reads never overlap, and the closure behind it is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is dereferenced only while `run`, which owns the borrow, waits.
unsafe impl Send for Shared {}

/// Runs closures on a fixed number of threads, the caller's among them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One region at a time, whoever asks: see `lock`.
    caller: Mutex<()>,
}

impl Pool {
    /// `n_threads` counts the calling thread, so `n_threads - 1` are started.
    pub fn new(n_threads: usize) -> Pool {
        assert!(n_threads >= 1, "a pool has at least its caller");
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            parked: Mutex::new(0),
            wake: Condvar::new(),
        });
        let workers = (1..n_threads)
            .map(|index| {
                let shared = shared.clone();
                std::thread::Builder::new()
                    .name(format!("moeba-{index}"))
                    .spawn(move || worker(&shared, index))
                    .expect("the system starts a thread")
            })
            .collect();
        Pool { shared, workers, caller: Mutex::new(()) }
    }

    pub fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// While it is held, at most one closure runs under each thread index.
    fn lock(&self) -> MutexGuard<'_, ()> {
        // A panic in a region leaves nothing behind in the pool, so a poisoned lock is as good.
        self.caller.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Runs `f(thread index)` on every thread and returns when all are done. A panic in any of
    /// them is raised again here.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        let _one_region = self.lock();
        if self.workers.is_empty() {
            return f(0);
        }
        let shared = &*self.shared;
        debug_assert_eq!(shared.running.load(Ordering::Relaxed), 0);
        // SAFETY: only the lifetime is changed; `f` outlives every use because this function
        // returns after the last worker is done.
        let job: Job = unsafe {
            std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(f)
        };
        // SAFETY: no worker reads the cell between regions (ordering argument above).
        unsafe { *shared.job.get() = Some(job) };
        shared.running.store(self.workers.len(), Ordering::Relaxed);
        // SeqCst pairs with the worker's: either it sees the new epoch before it sleeps, or this
        // thread sees it in `parked`.
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if *shared.parked.lock().expect("no panic under this lock") > 0 {
            shared.wake.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(|| f(0)));
        let mut spins = 0;
        while shared.running.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins < SPINS_BEFORE_YIELD {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
        }
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a worker thread panicked");
    }

    /// Runs `f(range)` over `0..n` in pieces of `chunk`, each taken by whichever thread is free.
    /// Which thread computes a piece must not matter to its result.
    pub fn for_each_chunk(
        &self,
        n: usize,
        chunk: usize,
        f: &(dyn Fn(usize, std::ops::Range<usize>) + Sync),
    ) {
        let chunk = chunk.max(1);
        if n <= chunk {
            if n > 0 {
                let _one_region = self.lock();
                f(0, 0..n);
            }
            return;
        }
        let next = AtomicUsize::new(0);
        self.run(&|thread| {
            loop {
                let start = next.fetch_add(chunk, Ordering::Relaxed);
                if start >= n {
                    break;
                }
                f(thread, start..(start + chunk).min(n));
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        drop(self.shared.parked.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches its panics, so it can only have ended in order.
            let _ = worker.join();
        }
    }
}

fn worker(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        seen = wait_for_new_epoch(shared, seen);
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: a new epoch was acquired, so the cell holds this region's job and nobody writes
        // it until `running` is zero again.
        let job = unsafe { (*shared.job.get()).expect("an epoch comes with a job") };
        // SAFETY: `run` keeps the closure alive until this worker's decrement below.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(index) }));
        if result.is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.running.fetch_sub(1, Ordering::Release);
    }
}

fn wait_for_new_epoch(shared: &Shared, seen: usize) -> usize {
    for _ in 0..SPINS_BEFORE_PARK {
        let epoch = shared.epoch.load(Ordering::Acquire);
        if epoch != seen {
            return epoch;
        }
        std::hint::spin_loop();
    }
    let mut parked = shared.parked.lock().expect("no panic under this lock");
    *parked += 1;
    loop {
        let epoch = shared.epoch.load(Ordering::SeqCst);
        if epoch != seen {
            *parked -= 1;
            return epoch;
        }
        parked = shared.wake.wait(parked).expect("no panic under this lock");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_runs_every_region_once() {
        for n in [1, 2, 3, 8] {
            let pool = Pool::new(n);
            let counts: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..500 {
                pool.run(&|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 500));
        }
    }

    #[test]
    fn chunks_cover_the_range_once() {
        let pool = Pool::new(4);
        for (n, chunk) in [(0, 3), (1, 3), (10, 3), (1000, 7), (5, 100)] {
            let hits: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each_chunk(n, chunk, &|_, range| {
                for i in range {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn parked_workers_wake() {
        let pool = Pool::new(3);
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(30));
            let ran = AtomicUsize::new(0);
            pool.run(&|_| {
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.load(Ordering::Relaxed), 3);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        for bad in 0..2 {
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(&|i| assert_ne!(i, bad))));
            assert!(caught.is_err());
        }
        pool.run(&|_| {});
    }
}
