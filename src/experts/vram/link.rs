//! The RAM→VRAM link: threads with a stream each. A thread takes a granule of a load and queues the
//! copies of its three parts: out of the memory of the tier below where that is pinned
//! (`pinned_tier`); else it packs one part after the other into a pinned buffer that is laid out as
//! the slot, and queues the copy of each as soon as it is packed: one part is on the bus while the
//! next is packed, and one granule while the next is. Packing is the slower half on most machines
//! (a core copies some 10 GB/s), so a second thread helps more than a second copy engine.
//!
//! Ordering. A slot is written only after its last use (`Fences`). A granule is resident, by
//! `end_read`, only when the thread has waited for the event behind its copies: operations queued
//! on any stream after that see the bytes. A buffer is packed again, and an expert of the tier
//! below given back, after the same event.
//!
//! A thread waits for the tier below only when none of its own copies holds room there; the copies
//! themselves end without the host, as fences do.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Instant;

use super::feed::{Feed, Hold};
use super::layout::GranulePart;
use super::mover::Core;
use super::staging::Staging;
use crate::backend::gpu::{Device, Event, PinnedKind, Stream};
use crate::experts::tier::{Fault, Ticket};
use crate::experts::{Access, Dest};
use crate::{Error, Result};

/// Granules of one thread that are on their way: one being packed, one on the bus, and one more so
/// that neither waits for the other.
const RING: usize = 3;

/// A granule on its way.
struct Flight {
    number: u32,
    /// That of the event behind it, and of the buffer that it is in if it was packed.
    buffer: usize,
    n_bytes: u64,
    /// Present while the granule is copied from where it is.
    hold: Option<Hold>,
}

/// Copies of a granule that have been queued.
struct Sent {
    n_bytes: u64,
    hold: Option<Hold>,
}

/// Why a granule does not come.
enum Failure {
    /// The tier below has not got it; a sentence that names it.
    Source(Error),
    Device(Error),
}

struct Worker {
    core: Arc<Core>,
    feed: Feed,
    stream: Stream,
    staging: Staging,
    /// Behind the copies out of each buffer.
    copied: Vec<Event>,
    /// Oldest first.
    flights: VecDeque<Flight>,
    next_buffer: usize,
}

impl Worker {
    fn new(core: &Arc<Core>, gpu: &Device, staging: Staging) -> Result<Worker> {
        Ok(Worker {
            core: core.clone(),
            feed: Feed::new(core.source.clone()),
            stream: Stream::new(gpu)?,
            staging,
            copied: (0..RING).map(|_| Event::restful(gpu)).collect::<Result<_>>()?,
            flights: VecDeque::with_capacity(RING),
            next_buffer: 0,
        })
    }

    /// The thread's life: until the tier is closed and what was on its way has ended.
    fn run(mut self) {
        let mut tickets = Vec::new();
        let mut open = true;
        while open || !self.flights.is_empty() {
            open = self.core.tier.start_reads(1, false, &mut tickets);
            if tickets.is_empty() && self.flights.is_empty() {
                self.feed.close();
                open = self.core.tier.start_reads(1, true, &mut tickets);
            }
            match tickets.pop() {
                Some((number, ticket)) => self.bring(number, &ticket),
                None if !self.flights.is_empty() => self.land(),
                None => {}
            }
        }
    }

    fn bring(&mut self, number: u32, ticket: &Ticket) {
        if self.flights.len() == RING {
            self.land();
        }
        let buffer = self.next_buffer;
        // A ticket that never ends would keep a layer waiting for ever.
        let sent = catch_unwind(AssertUnwindSafe(|| self.send(ticket, buffer)));
        let sent = sent.unwrap_or_else(|_| {
            let why = "a thread that brings experts to the GPU has panicked";
            Err(Failure::Device(Error::Device(why.into())))
        });
        match sent {
            Ok(Sent { n_bytes, hold }) => {
                self.flights.push_back(Flight { number, buffer, n_bytes, hold });
                self.next_buffer = (buffer + 1) % RING;
            }
            Err(failure) => {
                // Parts that were queued must not arrive in a slot that belongs to another granule
                // by then. Should waiting fail too, the device is lost and runs nothing more.
                let _ = self.stream.synchronize();
                self.fail(number, failure);
            }
        }
        self.land_what_is_done();
    }

    /// Queues the copies of a granule.
    fn send(&mut self, ticket: &Ticket, buffer: usize) -> std::result::Result<Sent, Failure> {
        // It is unknown which copies of a lost device still use the buffers.
        if let Some(why) = self.core.lost.get() {
            return Err(Failure::Device(Error::Device(why.clone())));
        }
        let Dest::Slot { granule, .. } = ticket.piece.to else {
            unreachable!("a granule goes to one slot")
        };
        let keep = ticket.access == Access::Decode;
        if !self.feed.open(ticket.expert, granule, keep) {
            self.land_what_is_held();
        }
        let Worker { core, feed, stream, staging, copied, .. } = self;
        let ready = feed.granule(granule).map_err(Failure::Source)?;
        let slot = ticket.slots[granule - ticket.first_granule];
        core.fences.wait(stream, ticket.class, slot).map_err(Failure::Device)?;
        let layer = core.layers[ticket.expert.layer as usize].as_ref().expect("its experts move");
        let parts = GranulePart::of(&layer.experts, &layer.layout, &ready);
        let in_place = core.in_place(&parts);
        let n_bytes = parts.iter().map(|part| part.range().len() as u64).sum();
        core.timer.start(n_bytes, Instant::now());
        let mut queue = || -> Result<()> {
            for (i, part) in parts.iter().enumerate().filter(|(_, part)| !part.range().is_empty()) {
                let bytes = match &in_place {
                    Some(bytes) => bytes[i],
                    None => {
                        // SAFETY: the last copy out of this buffer has been waited for.
                        let bytes = unsafe { staging.bytes(buffer, part.range()) };
                        part.pack(bytes);
                        bytes
                    }
                };
                let to = core.slot(ticket.class, slot).slice(part.range());
                // SAFETY: this copy has been waited for when the buffer is packed again or the
                // staging memory ends, and when the expert below is let go of.
                unsafe { stream.upload(to, bytes)? };
            }
            stream.record(&copied[buffer])
        };
        queue().map_err(|error| {
            core.timer.end(n_bytes, false, Instant::now());
            Failure::Device(error)
        })?;
        let hold = in_place.is_some().then(|| feed.hold());
        if hold.is_some() {
            core.in_place_bytes.fetch_add(n_bytes, Ordering::Relaxed);
        }
        Ok(Sent { n_bytes, hold })
    }

    /// Waits for the oldest granule.
    fn land(&mut self) {
        let Flight { number, buffer, n_bytes, hold } = self.flights.pop_front().expect("a flight");
        let done = self.copied[buffer].synchronize();
        hold.into_iter().for_each(|hold| self.feed.let_go(hold));
        self.core.timer.end(n_bytes, done.is_ok(), Instant::now());
        match done {
            Ok(()) => self.core.tier.end_read(number, Ok(())),
            Err(error) => self.fail(number, Failure::Device(error)),
        }
    }

    /// Waits until no copy holds room of the tier below.
    fn land_what_is_held(&mut self) {
        while self.flights.iter().any(|flight| flight.hold.is_some()) {
            self.land();
        }
    }

    fn land_what_is_done(&mut self) {
        // A failure to ask is one to wait, which tells it.
        while let Some(flight) = self.flights.front()
            && self.copied[flight.buffer].is_done().unwrap_or(true)
        {
            self.land();
        }
    }

    fn fail(&self, number: u32, failure: Failure) {
        let sentence = match failure {
            Failure::Source(error) => error.to_string(),
            Failure::Device(error) => {
                let why = error.to_string();
                self.core.lost.get_or_init(|| why).clone()
            }
        };
        self.core.tier.end_read(number, Err(Fault(sentence.into())));
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Before the buffers end. Where waiting fails, the device runs nothing more.
        let _ = self.stream.synchronize();
    }
}

/// Its threads end when the tier is closed; dropping it waits for them.
pub struct Link(Vec<JoinHandle<()>>);

impl Link {
    pub fn open(core: &Arc<Core>, gpu: &Device, kind: PinnedKind, n: usize) -> Result<Link> {
        let buffer_bytes = core.plan.classes.iter().map(|c| c.slot_bytes).max().unwrap_or(0);
        let staging = Staging::for_workers(gpu, kind, n, RING, buffer_bytes)?;
        let workers = staging.into_iter().map(|staging| Worker::new(core, gpu, staging));
        let workers = workers.collect::<Result<Vec<_>>>()?;
        let mut link = Link(Vec::new());
        for worker in workers {
            let thread = std::thread::Builder::new().name("upload".into());
            let thread = thread.spawn(move || worker.run()).map_err(|e| {
                core.tier.close();
                Error::Device(format!(
                    "cannot start the thread that copies experts to the GPU: {e}"
                ))
            })?;
            link.0.push(thread);
        }
        Ok(link)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for thread in self.0.drain(..) {
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}
