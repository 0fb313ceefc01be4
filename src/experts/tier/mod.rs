//! A tier of memory that holds some of the experts' granules: the state machine behind a lock, and
//! who waits for what. Layers wait for granules to land; links wait for reads to start.
//!
//! Ordering argument. All state is behind one mutex, which is never held during I/O, a copy or a
//! computation. A granule's bytes are written by a link thread before it calls `end_read`, which
//! takes the mutex; a layer sees the granule as resident under the same mutex afterwards. A slot
//! is given to another granule only after the layer that computed with it has come back through
//! `next_ready` or `release`, which take the mutex too. So writes and reads of a slot are ordered
//! by the mutex alone.

pub(super) mod class;
pub(super) mod link_meter;
pub(super) mod link_price;
pub(super) mod link_rate;
pub(super) mod load;
pub(super) mod queue;
pub(super) mod residency;
mod slots;
pub(super) mod state;
pub(super) mod status;
pub(super) mod upper;

pub use class::ClassPlan;
pub use link_meter::LinkMeter;
pub use load::Fault;
pub use residency::LayerPlan;
pub use state::{Layout, Progress, Ticket, TierPlan};
pub use status::{ExpertStatus, Presence};
pub use upper::UpperResidency;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::counters::Counters;
use super::sync::{Condvar, Mutex, MutexGuard, wait_at_most};
use crate::experts::acquisition::{Acquisition, GranuleRef};
use crate::policy::{Event, Eviction, Expert, LayerShare, Prediction, Profile};
use state::State;

/// The interval at which a wait checks whether the user has interrupted it.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(50);

/// The reason why a wait for granules ended without them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    Failed(Fault),
    Interrupted,
}

struct Shared {
    state: State,
    is_closed: bool,
    /// The sleepers: a signal costs a system call even if no thread waits for it.
    works_waiting: usize,
    links_waiting: usize,
    /// The time since which reads have been in flight.
    busy_since: Option<Instant>,
    /// The measures of the link, and the start of their clock.
    meter: LinkMeter,
    start: Instant,
}

impl Shared {
    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Whether a link waits that could go on.
    fn wants_links(&self) -> bool {
        self.links_waiting > 0 && self.state.can_start()
    }
}

pub struct Tier {
    shared: Mutex<Shared>,
    landed: Condvar,
    startable: Condvar,
}

impl Tier {
    pub fn new(plan: TierPlan, layout: Box<dyn Layout>, eviction: Box<dyn Eviction>) -> Tier {
        let state = State::new(plan, layout, eviction);
        let meter = LinkMeter::new(&state);
        Tier {
            shared: Mutex::new(Shared {
                state,
                is_closed: false,
                works_waiting: 0,
                links_waiting: 0,
                busy_since: None,
                meter,
                start: Instant::now(),
            }),
            landed: Condvar::new(),
            startable: Condvar::new(),
        }
    }

    /// From now on the link fills free room while it has nothing else to do, and brings what is
    /// expected in the place of what is worth less. `price`: the link's price of prefetch as an
    /// earlier run has measured it.
    pub fn use_idle_link(&self, price: Option<f64>) {
        let mut shared = self.lock();
        let Shared { state, meter, .. } = &mut *shared;
        state.fill_free_room();
        state.swap_when_idle();
        meter.measure_price(state, price);
        self.unlock(shared);
    }

    /// From now on this tier reports to the tier below which experts it holds whole.
    pub fn set_lower_tier(&self, lower: Arc<UpperResidency>) {
        self.lock().state.set_lower_tier(lower);
    }

    /// The record in which the tier above reports which experts it holds whole.
    pub fn upper_residency(&self) -> Arc<UpperResidency> {
        self.lock().state.upper_residency()
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // A panic under the lock is a broken invariant: nothing can go on from there.
        self.shared.lock().expect("no panic under this lock")
    }

    /// Unlocks the state and wakes the threads that may continue. A condition without waiters is
    /// not signalled.
    fn unlock(&self, shared: MutexGuard<'_, Shared>) {
        let (works, links) = (shared.works_waiting > 0, shared.wants_links());
        drop(shared);
        self.signal(works, links);
    }

    fn signal(&self, works: bool, links: bool) {
        if works {
            self.landed.notify_all();
        }
        if links {
            self.startable.notify_one();
        }
    }

    /// Pins what a work wants and queues what is missing.
    pub fn acquire(&self, work: &mut Acquisition) {
        let mut shared = self.lock();
        shared.state.acquire(work);
        self.unlock(shared);
    }

    /// Hands out granules that are in memory, waiting if there are none; false: all have been.
    /// `idle` is called before each wait, under the lock; it answers whether to give up.
    pub fn next_ready(
        &self,
        work: &mut Acquisition,
        idle: &dyn Fn() -> bool,
    ) -> Result<bool, Stop> {
        let mut waiting_since = None;
        let mut shared = self.lock();
        let result = loop {
            match shared.state.advance(work) {
                Progress::Ready => break Ok(true),
                Progress::Done => break Ok(false),
                Progress::Failed(fault) => break Err(Stop::Failed(fault)),
                Progress::Waiting if idle() => break Err(Stop::Interrupted),
                Progress::Waiting => {}
            }
            // The first advance may have unpinned what others wait for. Later ones have nothing to
            // unpin, and two works that signal each other whenever they wake never sleep. Any of
            // them may have queued loads that had no room before. Signalled with the lock held:
            // letting go of it first could lose the landing that this work waits for.
            let is_first = waiting_since.is_none();
            self.signal(is_first && shared.works_waiting > 0, shared.wants_links());
            waiting_since.get_or_insert_with(Instant::now);
            shared.works_waiting += 1;
            shared = wait_at_most(&self.landed, shared, INTERRUPT_INTERVAL);
            shared.works_waiting -= 1;
        };
        if let Some(since) = waiting_since {
            let stall_ns = since.elapsed().as_nanos() as u64;
            shared.state.counters.stall_ns += stall_ns;
            work.stall_ns += stall_ns;
        }
        self.unlock(shared);
        result
    }

    pub fn release(&self, work: &mut Acquisition) {
        let mut shared = self.lock();
        shared.state.release(work);
        self.unlock(shared);
    }

    /// Pins what is whole of a layer and names what has changed; see `State::pin_layer`.
    pub fn pin_layer(&self, layer: usize, row: &mut dyn FnMut(u32, &[u32])) {
        self.lock().state.pin_layer(layer, row);
    }

    /// Unpins what was pinned; see `State::unpin_layer`.
    pub fn unpin_layer(&self, layer: usize, used: &[u32], hit: &mut dyn FnMut(GranuleRef)) {
        let mut shared = self.lock();
        shared.state.unpin_layer(layer, used, hit);
        self.unlock(shared);
    }

    /// Whether all granules of an expert are in memory.
    pub fn is_whole(&self, expert: Expert) -> bool {
        self.lock().state.is_whole(expert)
    }

    /// Whether all granules of all experts of a layer are in memory.
    pub fn is_layer_whole(&self, layer: usize) -> bool {
        self.lock().state.is_layer_whole(layer)
    }

    /// The part of an expert's granules that is not in memory, from 0 to 1.
    pub fn missing_part(&self, expert: Expert) -> f64 {
        self.lock().state.missing_part(expert)
    }

    /// Whether a demand waits for an expert, or will.
    pub fn is_demanded(&self, expert: Expert) -> bool {
        self.lock().state.is_demanded(expert)
    }

    /// Whether an expert is neither in memory, here or in the tier above, nor on its way.
    pub fn lacks(&self, expert: Expert) -> bool {
        self.lock().state.lacks(expert)
    }

    /// Whether every granule of every expert is in memory, or in that of the tier above.
    pub fn has_everything(&self) -> bool {
        self.lock().state.has_everything()
    }

    /// Appends the status of each of a layer's experts. One layer at a time: the lock is held for
    /// some microseconds.
    pub fn report(&self, layer: usize, out: &mut Vec<ExpertStatus>) {
        self.lock().state.report(layer, out);
    }

    pub fn observe(&self, event: &Event) {
        let mut shared = self.lock();
        shared.state.observe(event);
        self.unlock(shared);
    }

    /// Layers' decode steps so far.
    pub fn step(&self) -> u64 {
        self.lock().state.step()
    }

    /// Replaces the earlier predictions; see `State::prefetch`.
    pub fn prefetch(&self, predictions: &[Prediction], step: u64) {
        let mut shared = self.lock();
        shared.state.prefetch(predictions, step);
        self.unlock(shared);
    }

    /// Queues a layer's experts for a prompt; see `State::prefetch_layer`.
    pub fn prefetch_layer(&self, layer: usize, is_wanted: &dyn Fn(u32) -> bool) {
        let mut shared = self.lock();
        shared.state.prefetch_layer(layer, is_wanted);
        self.unlock(shared);
    }

    /// Gives the layer prefetch up, if there is one.
    pub fn cancel_layer_prefetch(&self) {
        let mut shared = self.lock();
        shared.state.cancel_layer_prefetch();
        self.unlock(shared);
    }

    /// Admits experts that were used elsewhere and may be worth keeping; see `State::admit`.
    pub fn admit(&self, layer: usize, experts: &[u32]) {
        let mut shared = self.lock();
        shared.state.admit(layer, experts);
        self.unlock(shared);
    }

    /// Limits the granules that each layer may keep from now on.
    pub fn set_shares(&self, shares: &[LayerShare]) {
        self.lock().state.set_shares(shares);
    }

    pub fn save(&self, profile: &mut Profile) {
        self.lock().state.save(profile);
    }

    /// The link's price of prefetch for the profile, if it is known.
    pub fn encode_price(&self) -> Option<Vec<u8>> {
        self.lock().meter.encode_price()
    }

    /// Whether a link that asks now gets a read: not worth waking one otherwise, as a read that
    /// cannot start yet is for the link that ends another to start.
    pub fn can_start(&self) -> bool {
        self.lock().state.can_start()
    }

    /// Whether a read is on its way or could start.
    pub fn is_moving(&self) -> bool {
        let shared = self.lock();
        shared.state.is_reading() || shared.state.can_start()
    }

    /// Starts at most `max` reads, waiting for one if asked to; false: the tier is closed.
    pub fn start_reads(&self, max: usize, wait: bool, out: &mut Vec<(u32, Ticket)>) -> bool {
        let mut shared = self.lock();
        loop {
            if shared.is_closed {
                return false;
            }
            for _ in 0..max {
                let Some(number) = shared.state.start_read() else { break };
                let (now, Shared { state, meter, .. }) = (shared.now_ns(), &mut *shared);
                meter.started(now, number, state);
                out.push((number, state.ticket(number).clone()));
            }
            if !out.is_empty() {
                shared.busy_since.get_or_insert_with(Instant::now);
                // One thread is woken at a time, and wakes the next one if there is more to do.
                if shared.wants_links() {
                    self.startable.notify_one();
                }
                return true;
            }
            if !wait {
                return true;
            }
            shared.links_waiting += 1;
            shared = self.startable.wait(shared).expect("no panic under this lock");
            shared.links_waiting -= 1;
        }
    }

    /// A read that has started and not ended.
    pub fn ticket(&self, number: u32) -> Ticket {
        self.lock().state.ticket(number).clone()
    }

    pub fn end_read(&self, number: u32, result: Result<(), Fault>) {
        let mut shared = self.lock();
        let (now, Shared { state, meter, .. }) = (shared.now_ns(), &mut *shared);
        meter.ended(now, number, state);
        state.end_read(number, result);
        if !shared.state.is_reading() {
            let busy = shared.busy_since.take().map_or(Duration::ZERO, |since| since.elapsed());
            shared.state.counters.busy_ns += busy.as_nanos() as u64;
        }
        self.unlock(shared);
    }

    /// No more reads are started; links end when those on their way have ended.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.startable.notify_all();
    }

    /// Whether a read is on its way.
    pub fn is_reading(&self) -> bool {
        self.lock().state.is_reading()
    }

    pub fn counters(&self) -> Counters {
        let shared = self.lock();
        let mut counters = shared.state.counters();
        if let Some(since) = shared.busy_since {
            counters.busy_ns += since.elapsed().as_nanos() as u64;
        }
        counters
    }

    /// Panics if an invariant of the state does not hold; returns whether nothing is pinned, queued
    /// or on its way.
    pub fn check_integrity(&self) -> bool {
        let shared = self.lock();
        shared.state.check_integrity();
        shared.state.is_idle()
    }
}
