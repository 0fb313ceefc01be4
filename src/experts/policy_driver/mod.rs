//! Who asks the policy. A quick predictor is asked by the layer loop itself; one that searches,
//! and a splitter, run on a thread of their own, to which the layer loop hands events of what
//! happened without ever waiting: when the thread is too far behind, a note is dropped and
//! counted (FineMoE, section 4.3: searching is decoupled from inference).

mod event;
mod timer;

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use super::counters::Counters;
use crate::experts::policy_driver::event::OwnedEvent;
use crate::policy::{Event, LayerShare, Prediction, Predictor, Profile, Splitter, Wants};
use timer::Timer;

/// Notes that may wait: some tokens of a model of a hundred layers.
const EVENTS_MAX: usize = 512;

/// What is advised.
pub trait PolicyTarget: Send + Sync {
    /// Layers' decode steps so far.
    fn step(&self) -> u64;
    fn prefetch(&self, predictions: &[Prediction], step: u64);
    /// Something that the eviction should know.
    fn observe(&self, event: &Event);
    fn set_shares(&self, shares: &[LayerShare]);
    fn counters(&self) -> Counters;
}

/// `Wants` that one thread writes and another reads.
#[derive(Debug)]
struct SharedWants(AtomicU8);

impl SharedWants {
    fn new(wants: Wants) -> SharedWants {
        let shared = SharedWants(AtomicU8::new(0));
        shared.set(wants);
        shared
    }

    // Relaxed: the value stands for itself, nothing is read because of it.
    fn set(&self, wants: Wants) {
        let bits = u8::from(wants.ahead) | u8::from(wants.hidden) << 1;
        self.0.store(bits, Ordering::Relaxed);
    }

    fn get(&self) -> Wants {
        let bits = self.0.load(Ordering::Relaxed);
        Wants { ahead: bits & 1 != 0, hidden: bits & 2 != 0 }
    }
}

/// A predictor, a splitter and what they work with.
struct PolicyState {
    predictor: Option<Box<dyn Predictor>>,
    predictions: Vec<Prediction>,
    splitter: Option<Box<dyn Splitter>>,
    timer: Timer,
    /// The predictor's wants after the last event.
    wants: Arc<SharedWants>,
}

impl PolicyState {
    /// `is_last`: nothing more has happened yet, so that predicting is worth it.
    fn observe(&mut self, tier: &dyn PolicyTarget, event: &Event, step: u64, is_last: bool) {
        if let Event::IterationEnd { phase, timing, .. } = event {
            self.timer.observe(*phase, timing);
        }
        if let Some(predictor) = &mut self.predictor {
            predictor.observe(event);
            self.wants.set(predictor.wants());
            if event.is_step() && is_last {
                predictor.predict(&mut self.predictions);
                tier.prefetch(&self.predictions, step);
            }
            predictor.tell(&mut |event| tier.observe(event));
        }
        if let Some(splitter) = &mut self.splitter {
            splitter.observe(event);
            // Between texts nobody waits.
            if let Event::RequestStart { .. } | Event::RequestEnd { .. } = event {
                let costs = self.timer.costs(&tier.counters()).unwrap_or_default();
                if let Some(shares) = splitter.plan(&costs) {
                    tier.set_shares(&shares);
                }
            }
        }
    }

    /// Times go with what was learned: alone they are of no use to anybody.
    fn save(&self, profile: &mut Profile, counters: &Counters) {
        self.predictor.iter().for_each(|predictor| predictor.save(profile));
        self.splitter.iter().for_each(|splitter| splitter.save(profile));
        if !profile.is_empty() {
            self.timer.measured(counters).iter().for_each(|measured| measured.save(profile));
        }
    }
}

/// The thread beside the layer loop, and the way to it.
struct PolicyWorker {
    /// `None` once the thread is told to end.
    events: Option<SyncSender<OwnedEvent>>,
    /// Notes that have been read, to be written again.
    spare: Mutex<Receiver<OwnedEvent>>,
    thread: Option<JoinHandle<()>>,
    /// Notes handed over, and those done with.
    n_sent: AtomicU64,
    n_done: Arc<AtomicU64>,
    n_dropped: AtomicU64,
}

pub struct PolicyDriver {
    tier: Arc<dyn PolicyTarget>,
    state: Arc<Mutex<PolicyState>>,
    worker: Option<PolicyWorker>,
    /// Wants of the present pass: they change between passes only, so that all layers of a pass
    /// see the same ones.
    wants: SharedWants,
    next_wants: Arc<SharedWants>,
    /// Time spent on the policy, by the layer loop and beside it.
    busy_ns: Arc<AtomicU64>,
}

impl PolicyDriver {
    /// `expert_bytes`: of one expert of each layer, 0 where a layer is dense.
    pub fn new(
        tier: Arc<dyn PolicyTarget>,
        predictor: Option<Box<dyn Predictor>>,
        splitter: Option<Box<dyn Splitter>>,
        expert_bytes: &[u64],
    ) -> PolicyDriver {
        let wants = predictor.as_ref().map_or(Wants::default(), |p| p.wants());
        let is_slow = splitter.is_some() || predictor.as_ref().is_some_and(|p| p.is_slow());
        let timer = Timer::new(expert_bytes);
        let next_wants = Arc::new(SharedWants::new(wants));
        let wants = SharedWants::new(wants);
        let state = PolicyState {
            predictor,
            predictions: Vec::new(),
            splitter,
            timer,
            wants: next_wants.clone(),
        };
        let state = Arc::new(Mutex::new(state));
        let busy_ns = Arc::new(AtomicU64::new(0));
        let worker = is_slow.then(|| PolicyWorker::start(&tier, &state, &busy_ns));
        PolicyDriver { tier, state, worker, wants, next_wants, busy_ns }
    }

    pub fn wants(&self) -> Wants {
        self.wants.get()
    }

    /// Never waits where the policy is slow.
    pub fn observe(&self, event: &Event) {
        if let Event::IterationStart { .. } = event {
            self.wants.set(self.next_wants.get());
        }
        match &self.worker {
            Some(worker) => worker.send(event, self.tier.step()),
            None => {
                let start = Instant::now();
                let mut state = self.state.lock().expect("no panic under this lock");
                state.observe(&*self.tier, event, self.tier.step(), true);
                add_since(&self.busy_ns, start);
            }
        }
    }

    /// Waits until the policy has heard of everything that has happened.
    pub fn catch_up(&self) {
        let Some(worker) = &self.worker else { return };
        while worker.n_done.load(Ordering::Acquire) < worker.n_sent.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
    }

    /// Time spent on the policy so far, ns, and events it missed because it was too slow.
    pub fn overhead(&self) -> (u64, u64) {
        let dropped = self.worker.as_ref().map_or(0, |w| w.n_dropped.load(Ordering::Relaxed));
        (self.busy_ns.load(Ordering::Relaxed), dropped)
    }

    /// What the predictor has decided and why.
    pub fn verdict(&self) -> Option<String> {
        self.catch_up();
        let state = self.state.lock().expect("no panic under this lock");
        state.predictor.as_ref().and_then(|predictor| predictor.verdict())
    }

    /// Puts what the policy has learned into the profile.
    pub fn save(&self, profile: &mut Profile) {
        self.catch_up();
        let counters = self.tier.counters();
        self.state.lock().expect("no panic under this lock").save(profile, &counters);
    }
}

impl PolicyWorker {
    fn start(
        tier: &Arc<dyn PolicyTarget>,
        state: &Arc<Mutex<PolicyState>>,
        busy_ns: &Arc<AtomicU64>,
    ) -> PolicyWorker {
        let (events, inbox) = sync_channel::<OwnedEvent>(EVENTS_MAX);
        let (outbox, spare) = channel();
        let n_done = Arc::new(AtomicU64::new(0));
        let (tier, state) = (tier.clone(), state.clone());
        let (busy, done) = (busy_ns.clone(), n_done.clone());
        let work = move || run(&*tier, &state, &inbox, &outbox, (&busy, &done));
        let thread = std::thread::Builder::new().name("policy".into()).spawn(work);
        PolicyWorker {
            events: Some(events),
            spare: Mutex::new(spare),
            thread: Some(thread.expect("a thread for the policy")),
            n_sent: AtomicU64::new(0),
            n_done,
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

/// The thread's life: until nobody can send any more.
fn run(
    tier: &dyn PolicyTarget,
    state: &Mutex<PolicyState>,
    inbox: &Receiver<OwnedEvent>,
    outbox: &Sender<OwnedEvent>,
    (busy_ns, n_done): (&AtomicU64, &AtomicU64),
) {
    let mut next = None;
    while let Some(event) = next.take().or_else(|| inbox.recv().ok()) {
        next = inbox.try_recv().ok();
        let start = Instant::now();
        let mut state = state.lock().expect("no panic under this lock");
        state.observe(tier, &event.event(), event.step, next.is_none());
        drop(state);
        add_since(busy_ns, start);
        n_done.fetch_add(1, Ordering::Release);
        // Nobody may be there any more to write it again.
        let _ = outbox.send(event);
    }
}

fn add_since(sum: &AtomicU64, start: Instant) {
    sum.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
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
