//! The primitives by which threads share a tier; the concurrency tests (tests/tier_loom.rs) replace
//! them by a model checker's.

pub use std::sync::atomic::{AtomicU8, Ordering};
pub use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Waits for a signal, at most so long: for what comes without a signal, an interruption by the
/// user. Whatever comes with one must not rely on the time's end, so the tests' never ends.
pub fn wait_at_most<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    time: Duration,
) -> MutexGuard<'a, T> {
    condvar.wait_timeout(guard, time).expect("no panic under this lock").0
}
