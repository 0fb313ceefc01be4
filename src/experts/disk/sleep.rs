//! Wakes a link's thread that sleeps in the kernel. The following argument shows that no wake-up is
//! lost.
//!
//! One word, `state`, changed by atomic swaps only, which therefore happen in one order:
//!
//! - the thread sets AWAKE (`listen`), then asks its source; if there is nothing, it changes AWAKE
//!   to ASLEEP (`fall_asleep`) and only if that succeeds does it sleep;
//! - a caller that adds work to the source sets CALLED afterwards (`call`), and rings the bell if
//!   it replaced ASLEEP.
//!
//! Take one `call`. If its swap comes before the thread's `listen`, then the swaps from it to
//! `listen` form a chain of acquire and release, so that what was added before is seen by the
//! question after. If it comes after `listen` and before `fall_asleep`, the latter finds CALLED
//! and fails, and the thread asks again. If it comes after `fall_asleep`, it replaces ASLEEP (or
//! another `call` did and has rung) and the bell ends the sleep, also when it rings before the
//! thread is in the kernel, because the bell counts. No other order exists.

use crate::experts::sync::{AtomicU8, Ordering};

/// The thread is about to ask, or has asked and found work.
const AWAKE: u8 = 0;
/// There may be work that the thread's last question has missed.
const CALLED: u8 = 1;
/// The thread sleeps, or will at once: ring the bell.
const ASLEEP: u8 = 2;

/// Whether the thread is asleep.
#[derive(Debug)]
pub struct Sleep {
    state: AtomicU8,
}

impl Sleep {
    /// Awake.
    pub fn new() -> Sleep {
        Sleep { state: AtomicU8::new(AWAKE) }
    }

    /// After work was added; true: the bell must be rung.
    pub fn call(&self) -> bool {
        self.state.swap(CALLED, Ordering::AcqRel) == ASLEEP
    }

    /// The thread: before it asks its source.
    pub fn listen(&self) {
        self.state.swap(AWAKE, Ordering::AcqRel);
    }

    /// The thread, after its source had nothing: false if it must ask again.
    pub fn fall_asleep(&self) -> bool {
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.state.compare_exchange(AWAKE, ASLEEP, success, failure).is_ok()
    }
}
