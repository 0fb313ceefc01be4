//! A pool of threads for the token loop. A region is a closure for whichever threads come: the
//! caller begins at once, workers join it, and it ends when all work is done and those that joined
//! have finished. A worker that does not come in time is not waited for (`gate`).
//!
//! Between regions the workers spin, because the next region of a token follows within
//! microseconds and the next token soon after; after a while without work they park, so that an
//! idle engine costs nothing. As long as they spin, a region takes no lock and makes no call of
//! the system.
//!
//! Threads are not tied to processors: one that spins stays where it is, and one that is tied could
//! not leave a processor that another program fills, while all others wait for it. A user who wants
//! fixed processors bounds the process (`taskset`); `Pool` counts the processors left to it.
//!
//! Ordering argument. A pool is not `Sync` and `enter` refuses a region within a region, so one
//! region is under way at a time. The job cell is written only before the gate opens, while no
//! worker is inside, and read inside. A worker's writes are published when it leaves, which the
//! caller has acquired when the gate is closed; so the closure's borrows end before the caller's
//! stack frame does.

mod gate;
mod patience;

use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use gate::{Gate, Seen};
use patience::Patience;

/// The primitives by which threads share a gate; tests/pool_loom.rs replaces them by a model
/// checker's.
mod sync {
    pub use std::sync::atomic::{AtomicU64, Ordering};
    pub use std::sync::{Condvar, Mutex};
}

/// Pieces of this length and less stay as they are: 64 rows of 2048 columns in Q4_K are read from
/// memory in about 7 µs.
const SHORTEST: usize = 64;

/// Pieces begin at multiples of this if they are long enough: rows that kernels take at once.
const UNIT: usize = 16;

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    gate: Gate,
    job: UnsafeCell<Option<Job>>,
    panicked: AtomicBool,
    patience: Patience,
}

// SAFETY: `job` is the only field that is not Sync by itself; the ordering argument above says why
// its writes and reads never overlap, and the closure behind it is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is dereferenced only while `run`, which owns the borrow, waits.
unsafe impl Send for Shared {}

/// A thread's part of a region, or what is left of it: where it begins and where it ends, half a
/// word each. On a cache line of its own, as its thread is mostly alone with it.
#[repr(align(128))]
struct ThreadShare(AtomicU64);

/// Runs closures on a fixed number of threads, the caller's among them.
pub struct Pool {
    shared: Arc<Shared>,
    /// One a thread, for [`Pool::for_each_chunk`].
    parts: Vec<ThreadShare>,
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
            gate: Gate::default(),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            patience: Patience::new(n_threads > processors),
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
        let parts = (0..n_threads).map(|_| ThreadShare(AtomicU64::new(0))).collect();
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

    /// Runs `f(thread index)` on this thread, and on each worker that comes before this one has
    /// finished; returns when all have. A panic in any of them is raised again here.
    fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        let _region = self.enter();
        if self.workers.is_empty() {
            return f(0);
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime is changed; `f` outlives every use because this function
        // returns after the last worker has left.
        let job: Job = unsafe {
            std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(f)
        };
        // SAFETY: no worker reads the cell outside of the gate (ordering argument above).
        unsafe { *shared.job.get() = Some(job) };
        shared.gate.open();
        let own = catch_unwind(AssertUnwindSafe(|| f(0)));
        shared.gate.close(|is_so| shared.patience.spin_until(is_so));
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
impl ThreadShare {
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
        self.shared.gate.end();
        for worker in self.workers.drain(..) {
            // A worker catches its panics, so it can only have ended in order.
            let _ = worker.join();
        }
    }
}

fn worker(shared: &Shared, index: usize) {
    let mut seen = Seen::default();
    while shared.gate.enter(&mut seen, |is_so| shared.patience.spin_until(is_so)) {
        // SAFETY: this worker is inside, so the cell holds this region's job and no thread writes
        // it until it has left.
        let job = unsafe { (*shared.job.get()).expect("a gate opens with a job") };
        // SAFETY: `run` keeps the closure alive until this worker has left.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(index) }));
        if result.is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.gate.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    /// A region that cannot end before each thread has a part of it.
    fn meet(pool: &Pool) {
        let n = pool.n_threads();
        let (there, seen) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        pool.for_each_chunk(n, 1, &|thread, _| {
            there.fetch_add(1, Ordering::Relaxed);
            seen.lock().unwrap().push(thread);
            while there.load(Ordering::Relaxed) < n {
                std::thread::yield_now();
            }
        });
        let mut seen = seen.into_inner().unwrap();
        seen.sort();
        assert!(seen.into_iter().eq(0..n));
    }

    #[test]
    fn threads_meet_in_every_region() {
        for n in [2, 3, 8] {
            let pool = Pool::new(n);
            (0..200).for_each(|_| meet(&pool));
        }
    }

    #[test]
    fn regions_without_work_may_end_before_workers_come() {
        let pool = Pool::new(2);
        for _ in 0..2000 {
            let ran = AtomicUsize::new(0);
            pool.run(&|_| {
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert!((1..=2).contains(&ran.load(Ordering::Relaxed)));
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
            meet(&pool);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        for bad in 0..2 {
            let has_panicked = AtomicBool::new(false);
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each_chunk(2, 1, &|thread, _| {
                    if thread == bad {
                        has_panicked.store(true, Ordering::Relaxed);
                        panic!("a bad thread");
                    }
                    while !has_panicked.load(Ordering::Relaxed) {
                        std::thread::yield_now();
                    }
                })
            }));
            assert!(caught.is_err());
        }
        meet(&pool);
    }

    /// The closure of a region cannot hold the pool, which is not `Sync`, but it can find it.
    #[test]
    #[should_panic = "a region within a region"]
    fn a_region_within_a_region_is_refused() {
        thread_local!(static POOL: Pool = Pool::new(1));
        POOL.with(|pool| pool.run(&|_| POOL.with(|pool| pool.for_each_chunk(1, 1, &|_, _| ()))));
    }
}
