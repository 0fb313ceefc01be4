//! Runs work of unknown cost (a template, a grammar) in a thread of its own, with a stack for deep
//! recursion, and meters it: the program's allocator counts the bytes that the thread holds.
//!
//! The work asks by itself whether it is over its bounds, and ends. Code that cannot ask belongs in
//! a process of its own (`sample::grammar::sandbox`).

use crate::{Error, Result};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::{Once, OnceLock};
use std::time::{Duration, Instant};

/// Bounds of a metered thread.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Held at a time.
    pub bytes: i64,
    pub time: Duration,
    pub stack_bytes: usize,
}

/// The name of metered threads.
const THREAD: &str = "metered";

/// Work that held less leaves nothing worth giving back.
const KEPT_BYTES: i64 = 4 << 20;

/// Questions between two looks at the clock.
const QUESTIONS_PER_LOOK: u32 = 64;

/// The system's allocator, which counts for metered threads. A program that renders templates or
/// compiles grammars of unknown origin declares it as its `#[global_allocator]`; without it nothing
/// bounds their memory.
pub struct CountingAllocator;

#[derive(Clone, Copy)]
struct Meter {
    held: i64,
    peak: i64,
    bytes: i64,
    end: Instant,
    n_questions: u32,
    time: Duration,
}

thread_local! {
    /// `None` in all threads but metered ones. Constant and without a destructor, so that the
    /// allocator may use it at any time of a thread's life.
    static METER: Cell<Option<Meter>> = const { Cell::new(None) };
}

/// Ends the process; set where the metered work cannot ask.
static ON_EXCESS: OnceLock<fn() -> !> = OnceLock::new();

/// Lets `end`, which must not allocate, end the process when a metered thread holds too much.
pub fn on_excess(end: fn() -> !) {
    // A process has one way to end.
    let _ = ON_EXCESS.set(end);
}

/// Counts `delta` bytes for this thread.
fn count(delta: i64) {
    // No thread-local storage any more: the thread is ending, and its work is done.
    let _ = METER.try_with(|cell| {
        if let Some(mut meter) = cell.get() {
            meter.held += delta;
            meter.peak = meter.peak.max(meter.held);
            cell.set(Some(meter));
            if meter.held > meter.bytes
                && let Some(end) = ON_EXCESS.get()
            {
                end();
            }
        }
    });
}

// SAFETY: every request goes to the system's allocator unchanged, and its answer comes back
// unchanged; `count` neither allocates nor unwinds (it may end the process).
unsafe impl GlobalAlloc for CountingAllocator {
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

/// Why this thread's work must end, if it must: it holds too much, or runs too long. Always `None`
/// in a thread that is not metered.
pub fn excess() -> Option<String> {
    let mut meter = METER.get()?;
    meter.n_questions = meter.n_questions.wrapping_add(1);
    METER.set(Some(meter));
    if meter.held > meter.bytes {
        return Some(format!("more than {} MiB of memory", meter.bytes >> 20));
    }
    let looks = meter.n_questions % QUESTIONS_PER_LOOK == 0;
    (looks && Instant::now() > meter.end)
        .then(|| format!("more than {} seconds", meter.time.as_secs()))
}

/// Bytes that this metered thread has allocated and not freed.
pub fn held() -> usize {
    METER.get().map_or(0, |meter| meter.held.max(0) as usize)
}

/// Runs `work` in a metered thread and waits for it; `what` is the subject of the error sentences.
pub fn run<T: Send + 'static>(
    what: &str,
    bounds: Bounds,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    silence_panics();
    let Bounds { bytes, time, stack_bytes } = bounds;
    let thread = std::thread::Builder::new().name(THREAD.into()).stack_size(stack_bytes);
    let thread = thread.spawn(move || {
        let end = Instant::now() + time;
        METER.set(Some(Meter { held: 0, peak: 0, bytes, end, n_questions: 0, time }));
        let result = work();
        let peak = METER.take().map_or(0, |meter| meter.peak);
        if peak > KEPT_BYTES {
            give_back();
        }
        result
    });
    let thread = thread.map_err(|e| Error::Invalid(format!("{what}: no thread to run it: {e}")))?;
    thread.join().unwrap_or_else(|_| Err(Error::Invalid(format!("{what} made its engine fail"))))
}

/// Gives to the system what the allocator keeps of freed memory.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call takes a number and locks what it touches.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// A panic in a metered thread becomes an error sentence, so the panic message, which would read
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
