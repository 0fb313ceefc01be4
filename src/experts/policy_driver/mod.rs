//! Runs a tier's policy. A fast predictor runs on the layer loop's own thread. One that searches,
//! and a splitter, run on a worker thread: the layer loop hands it copies of events and never waits
//! for it; when the worker is too far behind, an event is dropped and counted (FineMoE, section
//! 4.3: searching is decoupled from inference).

mod event;
mod planning;
mod timer;

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use super::counters::Counters;
use super::runtime::Mover;
use crate::experts::policy_driver::event::OwnedEvent;
use crate::policy::{
    Event, Prediction, Predictor, PrefetchPlanner, Profile, Schedule, Splitter, Wants,
};
use planning::Planning;
use timer::Timer;

pub use planning::PredictedLayers;

/// Events that may wait: some tokens of a model of a hundred layers.
const EVENTS_MAX: usize = 512;

/// A predictor, a splitter and what they work with.
struct PolicyState {
    predictor: Option<Box<dyn Predictor>>,
    predictions: Vec<Prediction>,
    splitter: Option<Box<dyn Splitter>>,
    timer: Timer,
    shared: Arc<Shared>,
}

/// The part of the state that is read without its lock, which a slow predictor holds for long.
struct Shared {
    planning: Option<Planning>,
    /// The predictor's `Wants` after the last event that it heard.
    wants: AtomicU8,
    /// Time spent on the policy, by the layer loop and by the worker.
    busy_ns: AtomicU64,
    /// Events that the worker is done with.
    n_done: AtomicU64,
}

const WANTS_AHEAD: u8 = 1;
const WANTS_HIDDEN: u8 = 2;

impl Shared {
    fn new(planner: Option<PrefetchPlanner>) -> Shared {
        Shared {
            planning: planner.map(Planning::new),
            wants: AtomicU8::default(),
            busy_ns: AtomicU64::default(),
            n_done: AtomicU64::default(),
        }
    }

    fn set_wants(&self, Wants { ahead, hidden }: Wants) {
        let bits = u8::from(ahead) * WANTS_AHEAD | u8::from(hidden) * WANTS_HIDDEN;
        self.wants.store(bits, Ordering::Relaxed);
    }

    fn wants(&self) -> Wants {
        let bits = self.wants.load(Ordering::Relaxed);
        Wants { ahead: bits & WANTS_AHEAD != 0, hidden: bits & WANTS_HIDDEN != 0 }
    }

    fn add_busy_since(&self, start: Instant) {
        self.busy_ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
}

impl PolicyState {
    /// `is_last`: no newer event is waiting, so that predicting is worth it.
    fn observe(&mut self, mover: &dyn Mover, event: &Event, step: u64, is_last: bool) {
        let tier = mover.tier();
        if let Event::IterationEnd { phase, timing, .. } = event {
            self.timer.observe(*phase, timing);
            if let Some(planning) = &self.shared.planning {
                planning.set_costs(self.timer.costs(&tier.counters()));
            }
        }
        if let Some(predictor) = &mut self.predictor {
            predictor.observe(event);
            if let Some(planning) = &self.shared.planning {
                planning.observe(event, tier);
            }
            if event.is_step() && is_last {
                predictor.predict(&mut self.predictions);
                self.predictions.retain(|prediction| mover.may_hold(prediction.expert));
                match &self.shared.planning {
                    None => tier.prefetch(&self.predictions, step),
                    Some(planning) => planning.prefetch(&mut self.predictions, step, tier),
                }
                mover.wake_if_startable();
            }
            predictor.emit(&mut |event| tier.observe(event));
            self.shared.set_wants(predictor.wants());
        }
        if let Some(splitter) = &mut self.splitter {
            splitter.observe(event);
            // Between texts no token waits for it.
            if let Event::RequestStart { .. } | Event::RequestEnd { .. } = event {
                let costs = self.timer.costs(&tier.counters()).unwrap_or_default();
                if let Some(shares) = splitter.plan(&costs) {
                    tier.set_shares(&shares);
                }
            }
        }
    }

    /// Measured times are saved with what was learned: alone they are of no use.
    fn save(&self, profile: &mut Profile, counters: &Counters) {
        self.predictor.iter().for_each(|predictor| predictor.save(profile));
        self.splitter.iter().for_each(|splitter| splitter.save(profile));
        if !profile.is_empty() {
            self.timer.measured(counters).iter().for_each(|measured| measured.save(profile));
        }
    }
}

/// The worker thread, and the way to it.
struct PolicyWorker {
    /// `None` once the thread is told to end.
    events: Option<SyncSender<OwnedEvent>>,
    /// Events that the thread is done with, to be filled again.
    spare: Mutex<Receiver<OwnedEvent>>,
    thread: Option<JoinHandle<()>>,
    /// Events handed over; `Shared::n_done` of them are done.
    n_sent: AtomicU64,
    n_dropped: AtomicU64,
}

pub struct PolicyDriver {
    mover: Arc<dyn Mover>,
    state: Arc<Mutex<PolicyState>>,
    shared: Arc<Shared>,
    worker: Option<PolicyWorker>,
}

impl PolicyDriver {
    /// `expert_bytes`: of one expert of each layer, 0 where a layer is dense.
    pub fn new(
        mover: Arc<dyn Mover>,
        predictor: Option<Box<dyn Predictor>>,
        splitter: Option<Box<dyn Splitter>>,
        planner: Option<PrefetchPlanner>,
        expert_bytes: &[u64],
    ) -> PolicyDriver {
        let is_slow = splitter.is_some() || predictor.as_ref().is_some_and(|p| p.is_slow());
        let shared = Arc::new(Shared::new(planner));
        shared.set_wants(predictor.as_ref().map_or(Wants::default(), |p| p.wants()));
        let state = PolicyState {
            predictor,
            predictions: Vec::new(),
            splitter,
            timer: Timer::new(expert_bytes),
            shared: shared.clone(),
        };
        let state = Arc::new(Mutex::new(state));
        let worker = is_slow.then(|| PolicyWorker::start(&mover, &state, &shared));
        PolicyDriver { mover, state, shared, worker }
    }

    /// The parts of the next event that the predictor wants; takes no lock.
    pub fn wants(&self) -> Wants {
        self.shared.wants()
    }

    /// Never waits where the policy is slow.
    pub fn observe(&self, event: &Event) {
        let step = self.mover.tier().step();
        match &self.worker {
            Some(worker) => worker.send(event, step),
            None => {
                let start = Instant::now();
                let mut state = self.state.lock().expect("no panic under this lock");
                state.observe(&*self.mover, event, step, true);
                self.shared.add_busy_since(start);
            }
        }
    }

    /// Waits until the policy has heard of everything that has happened.
    pub fn catch_up(&self) {
        let Some(worker) = &self.worker else { return };
        let n_sent = worker.n_sent.load(Ordering::Relaxed);
        while self.shared.n_done.load(Ordering::Acquire) < n_sent {
            std::thread::yield_now();
        }
    }

    // ---- placement across layers ----

    /// Adds the experts of the layers behind `layer` that are predicted and missing; none if each
    /// layer is placed by itself.
    pub fn predicted(&self, layer: usize, out: &mut PredictedLayers) {
        if let Some(planning) = &self.shared.planning {
            planning.predicted(layer, self.mover.tier(), out);
        }
    }

    /// Prefetches what `layer`'s placement has planned of the latest predictions, and no more.
    pub fn prefetch_planned(&self, layer: usize, schedule: &Schedule) {
        if let Some(planning) = &self.shared.planning {
            planning.prefetch_planned(layer, schedule, self.mover.tier());
            self.mover.wake_if_startable();
        }
    }

    /// The time from the end of a layer's experts to the next layer's routing, ns, as whoever
    /// computes the layers has measured it.
    pub fn set_attention_ns(&self, ns: f64) {
        if let Some(planning) = &self.shared.planning {
            planning.set_attention_ns(ns);
        }
    }

    /// Time spent on the policy so far, ns, and events it missed because it was too slow.
    pub fn overhead(&self) -> (u64, u64) {
        let dropped = self.worker.as_ref().map_or(0, |w| w.n_dropped.load(Ordering::Relaxed));
        (self.shared.busy_ns.load(Ordering::Relaxed), dropped)
    }

    /// The decision of the predictor, with its reason.
    pub fn verdict(&self) -> Option<String> {
        self.catch_up();
        let state = self.state.lock().expect("no panic under this lock");
        state.predictor.as_ref().and_then(|predictor| predictor.verdict())
    }

    /// Puts what the policy has learned into the profile.
    pub fn save(&self, profile: &mut Profile) {
        self.catch_up();
        let counters = self.mover.tier().counters();
        self.state.lock().expect("no panic under this lock").save(profile, &counters);
    }
}

impl PolicyWorker {
    fn start(
        mover: &Arc<dyn Mover>,
        state: &Arc<Mutex<PolicyState>>,
        shared: &Arc<Shared>,
    ) -> PolicyWorker {
        let (events, inbox) = sync_channel::<OwnedEvent>(EVENTS_MAX);
        let (outbox, spare) = channel();
        let (mover, state, shared) = (mover.clone(), state.clone(), shared.clone());
        let work = move || run(&*mover, &state, &shared, &inbox, &outbox);
        let thread = std::thread::Builder::new().name("policy".into()).spawn(work);
        PolicyWorker {
            events: Some(events),
            spare: Mutex::new(spare),
            thread: Some(thread.expect("a thread for the policy")),
            n_sent: AtomicU64::new(0),
            n_dropped: AtomicU64::new(0),
        }
    }

    fn send(&self, event: &Event, step: u64) {
        let spare = self.spare.lock().expect("no panic under this lock").try_recv();
        let mut owned = spare.unwrap_or_default();
        owned.take_in(event, step);
        let events = self.events.as_ref().expect("a thread that has not ended");
        match events.try_send(owned) {
            Ok(()) => self.n_sent.fetch_add(1, Ordering::Relaxed),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.n_dropped.fetch_add(1, Ordering::Relaxed)
            }
        };
    }
}

/// The worker thread's life: until the driver is dropped.
fn run(
    mover: &dyn Mover,
    state: &Mutex<PolicyState>,
    shared: &Shared,
    inbox: &Receiver<OwnedEvent>,
    outbox: &Sender<OwnedEvent>,
) {
    let mut next = None;
    while let Some(event) = next.take().or_else(|| inbox.recv().ok()) {
        next = inbox.try_recv().ok();
        let start = Instant::now();
        let mut state = state.lock().expect("no panic under this lock");
        state.observe(mover, &event.event(), event.step, next.is_none());
        drop(state);
        shared.add_busy_since(start);
        shared.n_done.fetch_add(1, Ordering::Release);
        // Fails once the driver is being dropped.
        let _ = outbox.send(event);
    }
}

impl Drop for PolicyWorker {
    fn drop(&mut self) {
        self.events = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
