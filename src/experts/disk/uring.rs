//! The link through io_uring: one thread that keeps up to `depth` reads in the kernel.
//!
//! The thread goes round: refill the queue from the source, tell the kernel, hand one landed read
//! to the source (which may copy for a while, with the disk busy meanwhile), collect what else has
//! landed. With nothing to hand over it sleeps in the kernel until a read lands or the bell rings.

use super::link::{AbortOnPanic, IoKind, Link, Read, Setup};
use super::progress::{Progress, Step};
use super::waker::Waker;
use io_uring::{IoUring, opcode, squeue, types};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

/// Tokens of completions: a read's slot, its delay's end, or the bell.
const TIMER: u64 = 1 << 32;
const BELL: u64 = 1 << 33;

pub(super) struct Uring {
    depth: usize,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Uring {
    pub fn start(setup: Arc<Setup>) -> io::Result<Uring> {
        let depth = setup.depth;
        let ring = Ring::new(&setup)?;
        let waker = Arc::new(Waker::new()?);
        let server = Server::new(setup, ring, waker.clone());
        let thread = Builder::new().name("moeba-uring".into()).spawn(move || server.run())?;
        Ok(Uring { depth, waker, thread: Some(thread) })
    }
}

impl Link for Uring {
    fn kind(&self) -> IoKind {
        IoKind::Uring
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn wake(&self) {
        self.waker.wake();
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.wake();
        let thread = self.thread.take().expect("joined once");
        thread.join().expect("a panic in the link has ended the process");
    }
}

/// Whether the kernel has what this link needs.
pub(super) fn works() -> io::Result<()> {
    usable(2).map(drop)
}

/// A ring of the kernel's that can read.
fn usable(entries: u32) -> io::Result<IoUring> {
    let ring = IoUring::new(entries)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    if !probe.is_supported(opcode::Read::CODE) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's is too old"));
    }
    Ok(ring)
}

/// The kernel's end: the ring, which knows the files. It does not know the slots: reads into
/// registered buffers were no faster, and the kernel touches all of a buffer to register it.
struct Ring(IoUring);

impl Ring {
    fn new(setup: &Setup) -> io::Result<Ring> {
        // At most one operation for each read, and the bell: the queue cannot overflow, nor can
        // that of the completions, which is twice as long.
        let entries = u32::try_from(setup.depth + 1).map_err(|_| io::ErrorKind::InvalidInput)?;
        let ring = usable(entries)?;
        let fds: Vec<_> = (0..setup.files.len()).map(|i| setup.files.file(i).as_raw_fd()).collect();
        ring.submitter().register_files(&fds)?;
        Ok(Ring(ring))
    }

    /// Queues the next call of a read.
    fn read(&mut self, progress: &Progress, token: u64) {
        let file = types::Fixed(progress.read.shard as u32);
        let entry = opcode::Read::new(file, progress.dest(), progress.len() as u32);
        let entry = entry.offset(progress.offset()).build();
        // SAFETY: the source leaves these bytes to us until the read is completed (`ReadSource`),
        // which is after the kernel has reported this call's end.
        unsafe { self.push(entry.user_data(token)) };
    }

    /// Reports once the bell is readable.
    fn listen(&mut self, bell: i32) {
        let entry = opcode::PollAdd::new(types::Fd(bell), libc::POLLIN as u32).build();
        // SAFETY: no memory is involved. The bell's descriptor is open as long as the ring is.
        unsafe { self.push(entry.user_data(BELL)) };
    }

    /// # Safety
    /// The memory that the entry points to must be valid until the kernel reports its completion.
    unsafe fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: the caller's promise.
        unsafe { self.0.submission().push(&entry) }.expect("an entry for each read");
    }

    /// Hands queued operations to the kernel; with `wait` returns once something has completed.
    fn enter(&mut self, wait: bool) {
        if !wait && self.0.submission().is_empty() {
            return;
        }
        match self.0.submit_and_wait(wait.into()) {
            Ok(_) => {}
            // Signals, and a kernel short of memory: the thread comes round again.
            Err(e)
                if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
            Err(e) => panic!("io_uring_enter: {e}"),
        }
    }

    /// Moves the completions' tokens and results to `out`.
    fn collect(&mut self, out: &mut Vec<(u64, i32)>) {
        out.extend(self.0.completion().map(|entry| (entry.user_data(), entry.result())));
    }
}

/// The thread's state.
struct Server {
    setup: Arc<Setup>,
    ring: Ring,
    waker: Arc<Waker>,
    /// Reads in the kernel (or held back by a test), by slot.
    flights: Vec<Option<Progress>>,
    /// When a test's delays end, by slot: the kernel reads these.
    timers: Vec<types::Timespec>,
    free: Vec<usize>,
    /// Reads that the disk is done with and the source has not seen.
    landed: VecDeque<(Read, io::Result<()>)>,
    /// The source is.
    open: bool,
    fresh: Vec<Read>,
    completions: Vec<(u64, i32)>,
}

impl Server {
    fn new(setup: Arc<Setup>, ring: Ring, waker: Arc<Waker>) -> Server {
        let depth = setup.depth;
        Server {
            setup,
            ring,
            waker,
            flights: (0..depth).map(|_| None).collect(),
            timers: vec![types::Timespec::new(); depth],
            free: (0..depth).collect(),
            landed: VecDeque::with_capacity(2 * depth),
            open: true,
            fresh: Vec::with_capacity(depth),
            completions: Vec::with_capacity(2 * depth),
        }
    }

    fn run(mut self) {
        let _guard = AbortOnPanic;
        self.ring.listen(self.waker.bell());
        loop {
            let full = !self.refill();
            if !self.open && self.free.len() == self.flights.len() && self.landed.is_empty() {
                return;
            }
            // A full queue waits for its reads alone: the bell would only interrupt.
            let sleep = self.landed.is_empty() && (full || self.waker.fall_asleep());
            self.ring.enter(sleep);
            if let Some((read, result)) = self.landed.pop_front() {
                self.setup.source.complete(read, result);
            }
            self.collect();
        }
    }

    /// Asks the source for as many reads as there is room for; false if there is no room, or no
    /// source any more. What has landed and waits for its completion counts against a depth of its
    /// own, so that a slow source does not pile up reads.
    fn refill(&mut self) -> bool {
        let room = self.free.len().min(self.setup.depth.saturating_sub(self.landed.len()));
        if room == 0 || !self.open {
            return false;
        }
        self.waker.listen();
        let mut fresh = std::mem::take(&mut self.fresh);
        self.open = self.setup.source.next(room, false, &mut fresh);
        fresh.drain(..).for_each(|read| self.launch(read));
        self.fresh = fresh;
        !self.free.is_empty() && self.open
    }

    fn launch(&mut self, read: Read) {
        let slot = self.free.pop().expect("the source keeps to `max`");
        let delay = self.setup.faults.as_ref().map(|f| f.before(&read)).unwrap_or_default();
        let progress = Progress::new(read);
        if delay.is_zero() {
            self.ring.read(&progress, slot as u64);
        } else {
            self.timers[slot] = delay.into();
            let entry = opcode::Timeout::new(&self.timers[slot]).build();
            // SAFETY: the timer is not moved or changed before its slot is free again.
            unsafe { self.ring.push(entry.user_data(slot as u64 | TIMER)) };
        }
        self.flights[slot] = Some(progress);
    }

    /// Takes in everything that the kernel has reported.
    fn collect(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        self.ring.collect(&mut completions);
        for (token, result) in completions.drain(..) {
            let slot = (token & !TIMER) as usize;
            if token == BELL {
                assert!(result >= 0, "polling an eventfd: error {result}");
                self.waker.silence();
                self.ring.listen(self.waker.bell());
            } else if token & TIMER != 0 {
                let flight = self.flights[slot].as_ref().expect("held back in this slot");
                self.ring.read(flight, slot as u64);
            } else {
                self.advance(slot, result);
            }
        }
        self.completions = completions;
    }

    fn advance(&mut self, slot: usize, result: i32) {
        let result = match usize::try_from(result) {
            Ok(n) => Ok(n),
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        };
        let flight = self.flights[slot].as_mut().expect("in flight in this slot");
        match flight.advance(result, &self.setup.files, &self.setup.faults) {
            Step::Again => self.ring.read(flight, slot as u64),
            Step::End(result) => {
                let flight = self.flights[slot].take().expect("it was there just now");
                self.free.push(slot);
                self.landed.push_back((flight.read, result));
            }
        }
    }
}
