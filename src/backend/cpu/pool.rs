//! A pool of threads for the token loop: all of them run one closure and meet at its end. Between
//! regions the workers spin, because the next region of a token follows within microseconds and
//! the next token soon after; after a while without work they park, so that an idle engine costs
//! nothing. As long as they spin, a region takes no lock and makes no call of the system.
//!
//! Threads are not tied to processors: one that spins stays where it is, and one that is tied could
//! not leave a processor that somebody else fills, while all others wait for it. Whoever wants
//! places to be fixed bounds the process (`taskset`); `Pool` counts the processors left to it.
//!
//! Ordering argument. A pool is not `Sync` and `enter` refuses a region within a region, so one
//! `run` is under way at a time. The job cell is written only there, while every worker is idle
//! (`running == 0`), and published by the release store to `epoch`; a worker reads it after its
//! acquire load of a new `epoch`. A worker's writes are published by its release decrement of
//! `running`, which `run` acquires before it returns; so the closure's borrows end before the
//! caller's stack frame does.
//!
//! No wake-up is lost: a worker that is about to sleep counts itself in `parked`, then looks at
//! `epoch`; `run` changes `epoch`, then looks at `parked`. All four are SeqCst, so one of the two
//! sees the other. If it is `run`, it passes through the lock, which the worker holds until it
//! waits.

use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread spins before a worker parks and the caller offers its core to others: longer
/// than it takes to sample a token and to print it, so that a decode never parks.
const PATIENCE: Duration = Duration::from_millis(2);
/// The same where threads outnumber processors: who is waited for may need this one.
const PATIENCE_CROWDED: Duration = Duration::from_micros(50);
/// Spins between two looks at the clock: some microseconds.
const SPINS_A_LOOK: usize = 128;

/// Pieces of this length and less stay as they are: 64 rows of 2048 columns in Q4_K are read from
/// memory in about 7 µs.
const SHORTEST: usize = 64;

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Counts regions; a worker that sees a new value has a job.
    epoch: AtomicUsize,
    /// Workers that have not finished the present region.
    running: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    stop: AtomicBool,
    panicked: AtomicBool,
    patience: Duration,
    /// How many workers sleep on `wake`, or are about to.
    parked: AtomicUsize,
    sleep: Mutex<()>,
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
    is_running: Cell<bool>,
}

/// While it lives, its owner's closure is the only one that runs.
struct Region<'a>(&'a Cell<bool>);

impl Drop for Region<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Pool {
    /// `n_threads` counts the calling thread, so `n_threads - 1` are started.
    pub fn new(n_threads: usize) -> Pool {
        assert!(n_threads >= 1, "a pool has at least its caller");
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            patience: if n_threads > processors { PATIENCE_CROWDED } else { PATIENCE },
            parked: AtomicUsize::new(0),
            sleep: Mutex::new(()),
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
        Pool { shared, workers, is_running: Cell::new(false) }
    }

    pub fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// While the answer lives, at most one closure runs under each thread index.
    fn enter(&self) -> Region<'_> {
        assert!(!self.is_running.replace(true), "a region within a region");
        Region(&self.is_running)
    }

    /// Runs `f(thread index)` on every thread and returns when all are done. A panic in any of
    /// them is raised again here.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        let _region = self.enter();
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
        shared.begin_epoch();
        let own = catch_unwind(AssertUnwindSafe(|| f(0)));
        let all_done = || shared.running.load(Ordering::Acquire) == 0;
        if !shared.spin_until(all_done) {
            while !all_done() {
                std::thread::yield_now();
            }
        }
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a worker thread panicked");
    }

    /// Runs `f(range)` over `0..n` in pieces of at most `chunk`, each taken by whichever thread is
    /// free. Long pieces get shorter towards the end, so that no thread waits long for another's
    /// last. Which thread computes a piece, and where it begins, must not matter to its result.
    pub fn for_each_chunk(
        &self,
        n: usize,
        chunk: usize,
        f: &(dyn Fn(usize, std::ops::Range<usize>) + Sync),
    ) {
        let chunk = chunk.max(1);
        if n <= chunk {
            if n > 0 {
                let _region = self.enter();
                f(0, 0..n);
            }
            return;
        }
        let next = AtomicUsize::new(0);
        let shares = 4 * self.n_threads();
        let end_of = |start: usize| -> Option<usize> {
            let share = n.checked_sub(start).filter(|left| *left > 0)? / shares;
            Some(start + share.next_multiple_of(16).clamp(chunk.min(SHORTEST), chunk))
        };
        self.run(&|thread| {
            let take = || next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end_of);
            while let Ok(start) = take() {
                f(thread, start..end_of(start).map_or(n, |end| end.min(n)));
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.begin_epoch();
        for worker in self.workers.drain(..) {
            // A worker catches its panics, so it can only have ended in order.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn begin_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst) > 0 {
            drop(self.sleep.lock());
            self.wake.notify_all();
        }
    }

    /// False if patience was lost before.
    fn spin_until(&self, is_so: impl Fn() -> bool) -> bool {
        let mut since = None;
        loop {
            for _ in 0..SPINS_A_LOOK {
                if is_so() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if since.get_or_insert_with(Instant::now).elapsed() >= self.patience {
                return false;
            }
        }
    }

    fn wait_for_new_epoch(&self, seen: usize) {
        if self.spin_until(|| self.epoch.load(Ordering::Acquire) != seen) {
            return;
        }
        let mut asleep = self.sleep.lock().expect("no panic under this lock");
        self.parked.fetch_add(1, Ordering::SeqCst);
        while self.epoch.load(Ordering::SeqCst) == seen {
            asleep = self.wake.wait(asleep).expect("no panic under this lock");
        }
        self.parked.fetch_sub(1, Ordering::Relaxed);
    }
}

fn worker(shared: &Shared, index: usize) {
    // Epochs follow one another with every worker in each, so it is never more than one behind.
    for seen in 0.. {
        shared.wait_for_new_epoch(seen);
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
        for (n, chunk) in [(0, 3), (1, 3), (10, 3), (1000, 7), (5, 100), (5000, 320), (129, 64)] {
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

    /// The closure of a region cannot hold the pool, which is not `Sync`, but it can find it.
    #[test]
    #[should_panic = "a region within a region"]
    fn a_region_within_a_region_is_refused() {
        thread_local!(static POOL: Pool = Pool::new(1));
        POOL.with(|pool| pool.run(&|_| POOL.with(|pool| pool.for_each_chunk(1, 1, &|_, _| ()))));
    }
}
