//! A pool of threads for the token loop: all of them run one closure and meet at its end. Between
//! regions the workers spin, because the next region of a token follows within microseconds and
//! the next token soon after; after a while without work they park, so that an idle engine costs
//! nothing. As long as they spin, a region takes no lock and makes no call of the system.
//!
//! Threads are not tied to processors: one that spins stays where it is, and one that is tied could
//! not leave a processor that another program fills, while all others wait for it. A user who wants
//! fixed processors bounds the process (`taskset`); `Pool` counts the processors left to it.
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
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time for which a thread spins before a worker parks and the caller offers its core to
/// others: longer than it takes to sample a token and to print it, so that a decode never parks.
const PATIENCE: Duration = Duration::from_millis(2);
/// The same if threads outnumber processors: the awaited thread may need this one.
const PATIENCE_CROWDED: Duration = Duration::from_micros(50);
/// Spins between two looks at the clock: some microseconds.
const SPINS_A_LOOK: usize = 128;

/// Pieces of this length and less stay as they are: 64 rows of 2048 columns in Q4_K are read from
/// memory in about 7 µs.
const SHORTEST: usize = 64;

/// Pieces begin at multiples of this if they are long enough: rows that kernels take at once.
const UNIT: usize = 16;

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
    /// The number of workers that sleep on `wake`, or are about to.
    parked: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is the only field that is not Sync by itself; the ordering argument above says why
// its writes and reads never overlap, and the closure behind it is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is dereferenced only while `run`, which owns the borrow, waits.
unsafe impl Send for Shared {}

/// A thread's part of a region, or what is left of it: where it begins and where it ends, half a
/// word each. On a cache line of its own, as its thread is mostly alone with it.
#[repr(align(128))]
struct Part(AtomicU64);

/// Runs closures on a fixed number of threads, the caller's among them.
pub struct Pool {
    shared: Arc<Shared>,
    /// One a thread, for [`Pool::for_each_chunk`].
    parts: Vec<Part>,
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
        let parts = (0..n_threads).map(|_| Part(AtomicU64::new(0))).collect();
        Pool { shared, parts, workers, is_running: Cell::new(false) }
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

    /// Runs `f(thread, range)` over `0..n` in pieces of at most `chunk`. Each thread has a part,
    /// which it goes through from its beginning, so that what it reads lies in one run; who has
    /// finished takes from the end of another's. Long pieces get shorter towards the end, so that
    /// no thread waits long for another's last. Which thread computes a piece, and where it begins,
    /// must not matter to its result.
    pub fn for_each_chunk(&self, n: usize, chunk: usize, f: &(dyn Fn(usize, Range<usize>) + Sync)) {
        let chunk = chunk.max(1);
        if n <= chunk {
            if n > 0 {
                let _region = self.enter();
                f(0, 0..n);
            }
            return;
        }
        let sizes = Sizes { chunk, unit: UNIT.min(chunk), least: SHORTEST.min(chunk) };
        let parts = &self.parts[..];
        let cut = |i: usize| (n * i / parts.len()).next_multiple_of(sizes.unit).min(n);
        for (i, part) in parts.iter().enumerate() {
            part.set(cut(i)..cut(i + 1));
        }
        self.run(&|thread| {
            while let Some(piece) = parts[thread].take_first(sizes) {
                f(thread, piece);
            }
            for other in (1..parts.len()).map(|i| &parts[(thread + i) % parts.len()]) {
                while let Some(piece) = other.take_last(sizes) {
                    f(thread, piece);
                }
            }
        });
    }
}

/// Sizes of pieces.
#[derive(Clone, Copy)]
struct Sizes {
    chunk: usize,
    unit: usize,
    least: usize,
}

impl Sizes {
    /// The next piece where so much of a part is left.
    fn next(self, left: usize) -> usize {
        (left / 4).next_multiple_of(self.unit).clamp(self.least, self.chunk).min(left)
    }
}

/// Each piece is taken once, because each change is one atomic change of a single word. Memory that
/// a piece reads and writes is ordered by the region's begin and end.
impl Part {
    fn set(&self, range: Range<usize>) {
        assert!(range.end <= u32::MAX as usize);
        self.0.store((range.start as u64) << 32 | range.end as u64, Ordering::Relaxed);
    }

    /// Takes what `piece` says of what is left; the other side of it remains.
    fn take(
        &self,
        piece: impl Fn(Range<usize>) -> (Range<usize>, Range<usize>),
    ) -> Option<Range<usize>> {
        let split = |word: u64| {
            let left = (word >> 32) as usize..word as u32 as usize;
            (!left.is_empty()).then(|| piece(left))
        };
        let change =
            |word| split(word).map(|(_, rest)| (rest.start as u64) << 32 | rest.end as u64);
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change).ok()?;
        split(before).map(|(piece, _)| piece)
    }

    fn take_first(&self, sizes: Sizes) -> Option<Range<usize>> {
        self.take(|left| {
            let cut = left.start + sizes.next(left.len());
            (left.start..cut, cut..left.end)
        })
    }

    fn take_last(&self, sizes: Sizes) -> Option<Range<usize>> {
        self.take(|left| {
            // At a multiple of the unit, which the part begins at.
            let cut = left.end - sizes.next(left.len());
            let cut =
                cut.next_multiple_of(sizes.unit).min((left.end - 1) / sizes.unit * sizes.unit);
            let cut = cut.max(left.start);
            (cut..left.end, left.start..cut)
        })
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
        // SAFETY: a new epoch was acquired, so the cell holds this region's job and no thread
        // writes it until `running` is zero again.
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
        for n_threads in [1, 3, 4] {
            let pool = Pool::new(n_threads);
            for (n, chunk) in
                [(0, 3), (1, 3), (10, 3), (1000, 7), (5, 100), (5000, 320), (129, 64), (33, 32)]
            {
                let hits: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each_chunk(n, chunk, &|_, range| {
                    assert!(range.len() <= chunk && range.start.is_multiple_of(chunk.min(UNIT)));
                    for i in range {
                        hits[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
            }
        }
    }

    /// A thread that is held up in its first piece loses all others to those that are not; a
    /// thread from which nothing is taken goes through its part in order.
    #[test]
    fn who_has_finished_takes_from_others() {
        let (n, pool) = (4000, Pool::new(2));
        let (done, first) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
        let order = Mutex::new(Vec::new());
        pool.for_each_chunk(n, 128, &|thread, range| {
            if thread == 0 {
                first.fetch_min(range.len(), Ordering::Relaxed);
                while done.load(Ordering::Acquire) < n - range.len() {
                    std::hint::spin_loop();
                }
            } else {
                order.lock().unwrap().push(range.start);
            }
            done.fetch_add(range.len(), Ordering::Release);
        });
        assert_eq!(done.into_inner(), n);
        let order = order.into_inner().unwrap();
        let own = order.iter().filter(|start| **start >= n / 2).count();
        assert!(order[..own].is_sorted() && order[own..].is_sorted_by(|a, b| a > b));
        assert!(order.len() > own && order.last() == Some(&first.into_inner()));
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
