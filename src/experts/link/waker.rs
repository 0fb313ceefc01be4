//! How a link's thread that sleeps in the kernel learns that there is something to do, and why no
//! wake-up is lost.
//!
//! One word, `state`, changed by atomic swaps only, which therefore happen in one order:
//!
//! - the thread sets AWAKE (`listen`), then asks its source; if there is nothing, it changes AWAKE
//!   to ASLEEP (`fall_asleep`) and only if that succeeds does it sleep;
//! - whoever adds work to the source sets CALLED afterwards (`wake`), and rings the bell if it
//!   replaced ASLEEP.
//!
//! Take one `wake`. If its swap comes before the thread's `listen`, then the swaps from it to
//! `listen` form a chain of acquire and release, so that what was added before is seen by the
//! question after. If it comes after `listen` and before `fall_asleep`, the latter finds CALLED
//! and fails, and the thread asks again. If it comes after `fall_asleep`, it replaces ASLEEP (or
//! another `wake` did and has rung) and the bell ends the sleep, also when it rings before the
//! thread is in the kernel, because the bell counts. No other order exists.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU8, Ordering};

/// The thread is about to ask, or has asked and found work.
const AWAKE: u8 = 0;
/// There may be work that the thread's last question has missed.
const CALLED: u8 = 1;
/// The thread sleeps, or will at once: ring the bell.
const ASLEEP: u8 = 2;

pub(super) struct Waker {
    state: AtomicU8,
    /// An eventfd: readable once it was rung.
    bell: OwnedFd,
}

impl Waker {
    pub fn new() -> io::Result<Waker> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker { state: AtomicU8::new(AWAKE), bell })
    }

    /// After work was added. No system call unless the thread sleeps.
    pub fn wake(&self) {
        if self.state.swap(CALLED, Ordering::AcqRel) == ASLEEP {
            // The one way to fail is a counter at its limit, and then the bell rings already.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
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

    /// The bell, to wait for it to become readable.
    pub fn bell(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    /// Makes the bell silent again.
    pub fn silence(&self) {
        // Nothing to read: it was silent.
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
    }
}
