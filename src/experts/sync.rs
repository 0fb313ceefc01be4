//! What threads share a tier through; the concurrency tests put a model checker's in its place.

pub use std::sync::{Condvar, Mutex, MutexGuard};
