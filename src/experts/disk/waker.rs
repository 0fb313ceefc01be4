//! The bell of a link's thread that sleeps in the kernel: an eventfd, rung only while it sleeps.

use super::sleep::Sleep;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

pub(super) struct Waker {
    sleep: Sleep,
    /// An eventfd: readable once it was rung.
    bell: OwnedFd,
}

impl Waker {
    pub fn new() -> io::Result<Waker> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker { sleep: Sleep::new(), bell })
    }

    /// After work was added. No system call unless the thread sleeps.
    pub fn wake(&self) {
        if self.sleep.call() {
            // The one way to fail is a counter at its limit, and then the bell rings already.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// The thread: before it asks its source.
    pub fn listen(&self) {
        self.sleep.listen();
    }

    /// The thread, after its source had nothing: false if it must ask again.
    pub fn fall_asleep(&self) -> bool {
        self.sleep.fall_asleep()
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
