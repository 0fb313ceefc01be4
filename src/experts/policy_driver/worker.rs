//! The worker thread of a policy: a slow predictor and its splitter. The layer loop hands it copies
//! of events and never waits for it; when it is too far behind, events are dropped and counted.
//! Events that nothing is predicted from are handed over together, so that a splitter alone does
//! not cost the layer loop a call to wake the thread at every layer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use super::event::OwnedEvent;
use super::{Happened, Shared, add_since, prefetch, store_wants};
use crate::experts::runtime::Mover;
use crate::policy::{Event, Prediction, Predictor, Profile, Splitter, is_asked, is_time_to_split};

/// Events that may wait: some tokens of a model of a hundred layers.
const EVENTS_MAX: usize = 512;

/// Events that are handed over together at most.
const BATCH_MAX: usize = 128;

/// The parts of a policy that run beside the layer loop.
pub struct Beside {
    predictor: Option<Box<dyn Predictor>>,
    predictions: Vec<Prediction>,
    splitter: Option<Box<dyn Splitter>>,
}

impl Beside {
    /// `None` if there is nothing to run.
    pub fn new(
        predictor: Option<Box<dyn Predictor>>,
        splitter: Option<Box<dyn Splitter>>,
    ) -> Option<Beside> {
        let is_needed = predictor.is_some() || splitter.is_some();
        is_needed.then(|| Beside { predictor, predictions: Vec::new(), splitter })
    }

    /// `is_last`: no newer event is waiting, so that predicting is worth it.
    fn observe(&mut self, mover: &dyn Mover, shared: &Shared, owned: &OwnedEvent, is_last: bool) {
        let event = &owned.event();
        if let Some(predictor) = self.predictor.as_deref_mut() {
            let planning = shared.planning.as_ref();
            predictor.observe(event);
            predictor.emit(&mut |event| mover.tier().observe(event));
            planning.iter().for_each(|planning| planning.observe(event, mover.tier()));
            if is_last && is_asked(predictor, event) {
                let happened = Happened { event, step: owned.step };
                prefetch(mover, planning, predictor, &mut self.predictions, happened);
            }
            store_wants(&shared.wants, predictor.wants());
        }
        if let Some(splitter) = &mut self.splitter {
            splitter.observe(event);
            if is_time_to_split(event) && splitter.is_due() {
                let costs = shared.timer().costs(&mover.tier().counters()).unwrap_or_default();
                if let Some(shares) = splitter.plan(&costs) {
                    mover.tier().set_shares(&shares);
                    mover.wake_if_startable();
                }
            }
        }
    }
}

/// The thread, and the way to it.
pub struct Worker {
    outbox: Mutex<Outbox>,
    beside: Arc<Mutex<Beside>>,
    has_predictor: bool,
    thread: Option<JoinHandle<()>>,
    /// Events handed over, and those that the thread is done with.
    n_sent: AtomicU64,
    n_done: Arc<AtomicU64>,
    n_dropped: AtomicU64,
}

struct Outbox {
    /// Events that are not handed over yet.
    batch: Vec<OwnedEvent>,
    /// `None` once the thread is told to end.
    events: Option<SyncSender<OwnedEvent>>,
    /// Events that the thread is done with, to be filled again.
    spare: Receiver<OwnedEvent>,
}

impl Worker {
    pub fn start(mover: &Arc<dyn Mover>, beside: Beside, shared: &Arc<Shared>) -> Worker {
        let has_predictor = beside.predictor.is_some();
        let (events, inbox) = sync_channel::<OwnedEvent>(EVENTS_MAX);
        let (done, spare) = channel();
        let (beside, n_done) = (Arc::new(Mutex::new(beside)), Arc::new(AtomicU64::new(0)));
        let run = Run {
            mover: mover.clone(),
            beside: beside.clone(),
            shared: shared.clone(),
            inbox,
            done,
            n_done: n_done.clone(),
        };
        let thread = std::thread::Builder::new().name("policy".into()).spawn(move || run.run());
        Worker {
            outbox: Mutex::new(Outbox { batch: Vec::new(), events: Some(events), spare }),
            beside,
            has_predictor,
            thread: Some(thread.expect("a thread for the policy")),
            n_sent: AtomicU64::new(0),
            n_done,
            n_dropped: AtomicU64::new(0),
        }
    }

    /// The layer loop's alone, but for moments of `catch_up`.
    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().expect("no panic under this lock")
    }

    fn beside(&self) -> MutexGuard<'_, Beside> {
        self.beside.lock().expect("no panic under this lock")
    }

    pub fn send(&self, event: &Event, step: u64) {
        let mut outbox = self.outbox();
        let mut owned = outbox.spare.try_recv().unwrap_or_default();
        owned.take_in(event, step);
        outbox.batch.push(owned);
        let is_next = matches!(event, Event::NextToken { .. });
        let is_within_pass = is_next || event.is_step() || event.is_prompt_step();
        if self.has_predictor || !is_within_pass || outbox.batch.len() == BATCH_MAX {
            self.hand_over(&mut outbox);
        }
    }

    fn hand_over(&self, outbox: &mut Outbox) {
        let Outbox { batch, events, .. } = outbox;
        let events = events.as_ref().expect("a thread that has not ended");
        for owned in batch.drain(..) {
            match events.try_send(owned) {
                Ok(()) => self.n_sent.fetch_add(1, Ordering::Relaxed),
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                    self.n_dropped.fetch_add(1, Ordering::Relaxed)
                }
            };
        }
    }

    pub fn catch_up(&self) {
        self.hand_over(&mut self.outbox());
        let n_sent = self.n_sent.load(Ordering::Relaxed);
        while self.n_done.load(Ordering::Acquire) < n_sent {
            std::thread::yield_now();
        }
    }

    pub fn n_dropped(&self) -> u64 {
        self.n_dropped.load(Ordering::Relaxed)
    }

    pub fn verdict(&self) -> Option<String> {
        self.beside().predictor.as_ref()?.verdict()
    }

    /// The verdict, or `None` while the thread is at work.
    pub fn verdict_if_free(&self) -> Option<String> {
        self.beside.try_lock().ok()?.predictor.as_ref()?.verdict()
    }

    pub fn save(&self, profile: &mut Profile) {
        let beside = self.beside();
        beside.predictor.iter().for_each(|predictor| predictor.save(profile));
        beside.splitter.iter().for_each(|splitter| splitter.save(profile));
    }
}

/// The thread's side.
struct Run {
    mover: Arc<dyn Mover>,
    beside: Arc<Mutex<Beside>>,
    shared: Arc<Shared>,
    inbox: Receiver<OwnedEvent>,
    /// The way back of events, and their number.
    done: Sender<OwnedEvent>,
    n_done: Arc<AtomicU64>,
}

impl Run {
    /// Until the driver is dropped.
    fn run(&self) {
        let mut next = None;
        while let Some(event) = next.take().or_else(|| self.inbox.recv().ok()) {
            next = self.inbox.try_recv().ok();
            let start = Instant::now();
            let mut beside = self.beside.lock().expect("no panic under this lock");
            beside.observe(&*self.mover, &self.shared, &event, next.is_none());
            drop(beside);
            add_since(&self.shared.worker_ns, start);
            self.n_done.fetch_add(1, Ordering::Release);
            // Fails once the driver is being dropped.
            let _ = self.done.send(event);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.outbox().events = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}
