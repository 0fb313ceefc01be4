//! Streams that wait for the host. A stream may wait for a word that a thread of the host writes
//! later. Until it is written, a driver may make another thread that allocates or frees memory wait
//! for the device, with locks that the first thread needs. So memory is allocated and freed only
//! while no stream waits for the host.

use super::switch;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// The waits of all devices of a driver.
#[derive(Default)]
pub struct HostWaits {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The thread that ends each wait.
    waiting: Vec<ThreadId>,
    /// The threads that change memory or are about to.
    changing: Vec<ThreadId>,
}

impl HostWaits {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a wait that this thread ends. Threads that change memory come first.
    pub fn begin(self: &Arc<HostWaits>) -> Waiting {
        let thread = std::thread::current().id();
        let mut state = self.lock();
        // A thread that ends an earlier wait must not be held up; one that captures a graph, which
        // must not wait, is told so by the driver.
        let may = |state: &State| state.changing.is_empty() || state.changing.contains(&thread);
        while !(may(&state) || state.waiting.contains(&thread)) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting.push(thread);
        drop(state);
        Waiting { waits: self.clone(), thread }
    }

    /// Waits until no stream waits for the host. None begins to before the result is dropped.
    ///
    /// # Panics
    /// If a stream waits for this thread.
    pub fn change_memory(&self) -> Changing<'_> {
        let thread = std::thread::current().id();
        let mut state = self.lock();
        assert!(
            !state.waiting.contains(&thread),
            "memory of a device is allocated or freed while a stream waits for this thread"
        );
        state.changing.push(thread);
        while !state.waiting.is_empty() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Changing { waits: self, thread }
    }
}

/// A stream waits for the host, until this is dropped: when the operation that ends the wait is
/// queued, or nothing is missing.
pub struct Waiting {
    waits: Arc<HostWaits>,
    thread: ThreadId,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.waits.lock();
        let at = state.waiting.iter().position(|thread| *thread == self.thread);
        state.waiting.swap_remove(at.expect("this wait"));
        self.waits.changed.notify_all();
    }
}

/// No stream begins to wait for the host.
pub struct Changing<'a> {
    waits: &'a HostWaits,
    thread: ThreadId,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let mut state = self.waits.lock();
        let at = state.changing.iter().position(|thread| *thread == self.thread);
        state.changing.swap_remove(at.expect("this change"));
        self.waits.changed.notify_all();
    }
}

/// Whether the user wants streams to wait for the host: `MOEBA_GPU_WAITS` is 0 or 1.
pub fn asked() -> Option<bool> {
    switch("MOEBA_GPU_WAITS")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn memory_changes_between_waits() {
        let waits = Arc::new(HostWaits::default());
        let (first, second) = (waits.begin(), waits.begin());
        let has_changed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _changing = waits.change_memory();
                has_changed.store(true, Ordering::Relaxed);
            });
            drop(first);
            // The second wait is still on, and a third of this thread does not stop for the change.
            let third = waits.begin();
            assert!(!has_changed.load(Ordering::Relaxed));
            drop((second, third));
        });
        assert!(has_changed.load(Ordering::Relaxed));
        drop(waits.begin());
    }

    #[test]
    #[should_panic(expected = "while a stream waits for this thread")]
    fn the_thread_that_ends_a_wait_changes_nothing() {
        let waits = Arc::new(HostWaits::default());
        let _waiting = waits.begin();
        let _never = waits.change_memory();
    }
}
