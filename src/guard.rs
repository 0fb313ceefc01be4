//! Runs foreign code (a template, a grammar) in a thread that can be given up.
//!
//! A template counts its steps, but one step can double a string, and forty of them fill any
//! memory. llguidance counts steps, but one step can double an expression. Nothing in their
//! interfaces bounds that, and a thread cannot be killed from outside. So the program's allocator
//! counts what such a thread holds, and when it holds too much or runs too long its next allocation
//! does not return: the thread sleeps for ever, with what it holds, and its caller is told. That
//! happens only where a model or a request attacks; at most the budget is lost until the program
//! ends.
//!
//! No one else can free that memory. To drop what it holds the thread would have to return or to
//! unwind, and none of our code runs in it but the allocator, which must not unwind; if it answers
//! that there is no memory, the standard library ends the program. Freed from outside, what the
//! thread has put where others find it (a lazy static, the pool of a regular expression) would be
//! freed under them. A thread that is only late, and ends before [`Budget::end`], frees all it had.

use crate::{Error, Result};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Once, mpsc};
use std::time::{Duration, Instant};

/// Bounds of a guarded thread.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    pub bytes: i64,
    /// The caller waits no longer.
    pub time: Duration,
    /// The thread itself is stopped then; what ends in between is lost, but frees its memory.
    pub end: Duration,
    pub stack_bytes: usize,
    /// Counts threads that sleep for ever.
    pub n_lost: &'static AtomicUsize,
}

/// The name of guarded threads.
const THREAD: &str = "guarded";

/// How long a waiting thread sleeps between looks at `GIVEN_UP`.
const LOOK: Duration = Duration::from_millis(20);

/// The system's allocator with the budget of guarded threads. A program that renders templates or
/// compiles grammars of unknown origin declares it as its `#[global_allocator]`; without it time
/// and instructions are bounded, memory is not.
pub struct BoundedAllocator;

#[derive(Clone, Copy)]
struct Meter {
    /// Bytes that may still be allocated; negative: too many are held.
    left: i64,
    end: Instant,
    slot: usize,
    n_lost: &'static AtomicUsize,
}

thread_local! {
    /// `None` in all threads but guarded ones. Constant and without a destructor, so that the
    /// allocator may use it at any time of a thread's life.
    static METER: Cell<Option<Meter>> = const { Cell::new(None) };
}

/// Guarded threads that sleep for ever because of their memory, as bits by their number modulo
/// 64.
static GIVEN_UP: AtomicU64 = AtomicU64::new(0);
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Counts `delta` bytes for this thread; does not return if that is too much.
fn count(delta: i64) {
    // No thread-local storage any more: the thread is ending, and its work is done.
    let _ = METER.try_with(|cell| {
        let Some(mut meter) = cell.get() else { return };
        meter.left -= delta;
        cell.set(Some(meter));
        if delta > 0 && (meter.left < 0 || Instant::now() > meter.end) {
            cell.set(None);
            meter.n_lost.fetch_add(1, Ordering::SeqCst);
            if meter.left < 0 {
                GIVEN_UP.fetch_or(1 << meter.slot, Ordering::SeqCst);
            }
            loop {
                std::thread::sleep(Duration::from_secs(3600));
            }
        }
    });
}

// SAFETY: every request goes to the system's allocator unchanged, and its answer comes back
// unchanged; `count` neither allocates nor unwinds.
unsafe impl GlobalAlloc for BoundedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as above; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Runs `work` within `budget`; `what` is the subject of the error sentences.
pub fn run<T: Send + 'static>(
    what: &str,
    budget: Budget,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    silence_panics();
    let slot = (NEXT.fetch_add(1, Ordering::SeqCst) % 64) as usize;
    let bit = 1 << slot;
    let start = Instant::now();
    let (deadline, end) = (start + budget.time, start + budget.end);
    GIVEN_UP.fetch_and(!bit, Ordering::SeqCst);
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name(THREAD.into())
        .stack_size(budget.stack_bytes)
        .spawn(move || {
            let Budget { bytes, n_lost, .. } = budget;
            METER.set(Some(Meter { left: bytes, end, slot, n_lost }));
            let result = work();
            METER.set(None);
            // This fails if the caller waits no longer.
            let _ = sender.send(result);
        })
        .map_err(|e| Error::Invalid(format!("{what}: no thread to run it: {e}")))?;
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(result) => return result,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(Error::Invalid(format!("{what} made its engine fail")));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        let given_up = GIVEN_UP.fetch_and(!bit, Ordering::SeqCst) & bit != 0;
        if Instant::now() > deadline {
            let seconds = budget.time.as_secs();
            return Err(Error::Invalid(format!("{what} ran for more than {seconds} seconds")));
        }
        if given_up {
            let mib = budget.bytes >> 20;
            return Err(Error::Invalid(format!("{what} used more than {mib} MiB of memory")));
        }
    }
}

/// A panic in a guarded thread becomes an error sentence, so the panic message, which would read
/// like a crash, is left out.
fn silence_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if std::thread::current().name() != Some(THREAD) {
                before(info);
            }
        }));
    });
}
