//! Runs a tier's policy. A predictor that is fast runs on the layer loop's own thread. One that
//! searches, and a splitter, run on a worker thread (`worker`), which the layer loop never waits
//! for (FineMoE, section 4.3: searching is decoupled from inference).

mod event;
mod planning;
mod timer;
mod worker;

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use super::counters::Counters;
use super::runtime::Mover;
use crate::policy::{
    Event, Prediction, Predictor, PrefetchPlanner, Profile, Schedule, Splitter, Wants, is_asked,
};
use planning::Planning;
use worker::{Beside, Worker};

pub use planning::PredictedLayers;
pub use timer::Timer;

/// The predictor of the layer loop's thread; none, if it is slow.
struct Front {
    predictor: Option<Box<dyn Predictor>>,
    predictions: Vec<Prediction>,
}

impl Front {
    fn observe(&mut self, mover: &dyn Mover, shared: &Shared, happened: Happened<'_>) {
        let Some(predictor) = self.predictor.as_deref_mut() else { return };
        let (event, planning) = (happened.event, shared.planning.as_ref());
        predictor.observe(event);
        let mut has_told = false;
        predictor.emit(&mut |event| {
            mover.tier().observe(event);
            has_told = true;
        });
        if has_told {
            // The link may have been given something to bring.
            mover.wake_if_startable();
        }
        planning.iter().for_each(|planning| planning.observe(event, mover.tier()));
        if is_asked(predictor, event) {
            prefetch(mover, planning, predictor, &mut self.predictions, happened);
        }
        store_wants(&shared.wants, predictor.wants());
    }
}

/// An event and when it happened.
#[derive(Clone, Copy)]
struct Happened<'a> {
    event: &'a Event<'a>,
    /// The tier's step.
    step: u64,
}

/// Has everything brought that the predictor names after this event, or as much of it as is
/// planned; `predictions` is room for it.
fn prefetch(
    mover: &dyn Mover,
    planning: Option<&Planning>,
    predictor: &mut dyn Predictor,
    predictions: &mut Vec<Prediction>,
    Happened { event, step }: Happened<'_>,
) {
    predictor.predict(predictions);
    predictions.retain(|prediction| mover.may_hold(prediction.expert));
    // Prompts are not planned.
    match planning.filter(|_| event.is_step()) {
        None => mover.tier().prefetch(predictions, step),
        Some(planning) => planning.prefetch(predictions, step, mover.tier()),
    }
    mover.wake_if_startable();
}

/// Written by both threads, and read by any.
struct Shared {
    /// The predictor's `Wants`.
    wants: AtomicU8,
    /// Time spent on the policy by the layer loop, and by the worker.
    front_ns: AtomicU64,
    worker_ns: AtomicU64,
    timer: Mutex<Timer>,
    planning: Option<Planning>,
}

const WANTS_AHEAD: u8 = 1;
const WANTS_HIDDEN: u8 = 2;
const WANTS_NEXT_TOKEN: u8 = 4;

fn store_wants(to: &AtomicU8, Wants { ahead, hidden, next_token }: Wants) {
    let bits = (u8::from(ahead) * WANTS_AHEAD)
        | (u8::from(hidden) * WANTS_HIDDEN)
        | (u8::from(next_token) * WANTS_NEXT_TOKEN);
    to.store(bits, Ordering::Relaxed);
}

fn add_since(to: &AtomicU64, start: Instant) {
    to.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
}

impl Shared {
    fn timer(&self) -> MutexGuard<'_, Timer> {
        self.timer.lock().expect("no panic under this lock")
    }
}

pub struct PolicyDriver {
    mover: Arc<dyn Mover>,
    front: Mutex<Front>,
    shared: Arc<Shared>,
    worker: Option<Worker>,
}

impl PolicyDriver {
    pub fn new(
        mover: Arc<dyn Mover>,
        predictor: Option<Box<dyn Predictor>>,
        splitter: Option<Box<dyn Splitter>>,
        planner: Option<PrefetchPlanner>,
        timer: Timer,
    ) -> PolicyDriver {
        let shared = Arc::new(Shared {
            wants: AtomicU8::new(0),
            front_ns: AtomicU64::new(0),
            worker_ns: AtomicU64::new(0),
            timer: Mutex::new(timer),
            planning: planner.map(Planning::new),
        });
        predictor.iter().for_each(|predictor| store_wants(&shared.wants, predictor.wants()));
        let is_slow = predictor.as_ref().is_some_and(|predictor| predictor.is_slow());
        let (predictor, slow) = if is_slow { (None, predictor) } else { (predictor, None) };
        let beside = Beside::new(slow, splitter);
        let worker = beside.map(|beside| Worker::start(&mover, beside, &shared));
        let front = Mutex::new(Front { predictor, predictions: Vec::new() });
        PolicyDriver { mover, front, shared, worker }
    }

    fn front(&self) -> MutexGuard<'_, Front> {
        self.front.lock().expect("no panic under this lock")
    }

    /// The optional events, and parts of the next one, that the predictor wants; takes no lock.
    pub fn wants(&self) -> Wants {
        let bits = self.shared.wants.load(Ordering::Relaxed);
        let has = |bit: u8| bits & bit != 0;
        Wants {
            ahead: has(WANTS_AHEAD),
            hidden: has(WANTS_HIDDEN),
            next_token: has(WANTS_NEXT_TOKEN),
        }
    }

    /// Never waits for the worker.
    pub fn observe(&self, event: &Event) {
        let start = Instant::now();
        let step = self.mover.tier().step();
        self.front().observe(&*self.mover, &self.shared, Happened { event, step });
        if let Event::IterationEnd { phase, timing, .. } = event {
            let mut timer = self.shared.timer();
            timer.observe(*phase, timing);
            if let Some(planning) = &self.shared.planning {
                planning.set_costs(timer.costs(&self.mover.tier().counters()));
            }
        }
        self.worker.iter().for_each(|worker| worker.send(event, step));
        add_since(&self.shared.front_ns, start);
    }

    /// Waits until the policy has heard of everything that has happened.
    pub fn catch_up(&self) {
        self.worker.iter().for_each(Worker::catch_up);
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

    // ---- reports ----

    /// Adds the time that was spent on the policy, and the events that it missed because it was too
    /// slow.
    pub fn count(&self, counters: &mut Counters) {
        let front_ns = self.shared.front_ns.load(Ordering::Relaxed);
        counters.policy_loop_ns = front_ns;
        counters.policy_ns = front_ns + self.shared.worker_ns.load(Ordering::Relaxed);
        counters.policy_events_dropped = self.worker.as_ref().map_or(0, Worker::n_dropped);
    }

    /// The decision of the predictor, with its reason.
    pub fn verdict(&self) -> Option<String> {
        self.catch_up();
        match &self.front().predictor {
            Some(predictor) => predictor.verdict(),
            None => self.worker.as_ref()?.verdict(),
        }
    }

    /// The verdict from what the policy has heard by now; `None` while the policy is at work.
    pub fn verdict_if_free(&self) -> Option<String> {
        match &self.front.try_lock().ok()?.predictor {
            Some(predictor) => predictor.verdict(),
            None => self.worker.as_ref()?.verdict_if_free(),
        }
    }

    /// Puts what the policy has learned into the profile. Measured times are saved with what was
    /// learned: alone they are of no use.
    pub fn save(&self, profile: &mut Profile) {
        self.catch_up();
        self.front().predictor.iter().for_each(|predictor| predictor.save(profile));
        self.worker.iter().for_each(|worker| worker.save(profile));
        if !profile.is_empty() {
            let counters = self.mover.tier().counters();
            self.shared.timer().measured(&counters).iter().for_each(|m| m.save(profile));
        }
    }
}

#[cfg(test)]
mod tests;
