//! Runs a tier's policy. Parts of it that are fast run on the layer loop's own thread. What
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
    Event, Prediction, Predictor, PrefetchPlanner, Profile, Schedule, Splitter, Wants, divide,
    is_asked,
};
use planning::Planning;
use worker::{Beside, Worker};

pub use planning::PredictedLayers;
pub use timer::Timer;

/// The part that runs on the layer loop's thread.
struct Front {
    predictor: Option<Box<dyn Predictor>>,
    predictions: Vec<Prediction>,
}

impl Front {
    /// Returns the slow part that predicts now, if one does.
    fn observe(
        &mut self,
        mover: &dyn Mover,
        planning: Option<&Planning>,
        happened: Happened<'_>,
    ) -> Option<usize> {
        let (event, predictor) = (happened.event, self.predictor.as_deref_mut()?);
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
        let deputy = predictor.deputy();
        if deputy.is_none() {
            planning.iter().for_each(|planning| planning.observe(event, mover.tier()));
            if is_asked(predictor, event) {
                prefetch(mover, planning, predictor, &mut self.predictions, happened);
            }
        }
        deputy
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
    /// The `Wants` of the predictor on the layer loop's thread, and of the slow part that predicts.
    front_wants: AtomicU8,
    deputy_wants: AtomicU8,
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
        let (predictor, slow) = predictor.map(divide).unzip();
        let slow: Vec<_> = slow.unwrap_or_default();
        let shared = Arc::new(Shared {
            front_wants: AtomicU8::new(0),
            deputy_wants: AtomicU8::new(0),
            front_ns: AtomicU64::new(0),
            worker_ns: AtomicU64::new(0),
            timer: Mutex::new(timer),
            planning: planner.map(Planning::new),
        });
        if let Some(predictor) = &predictor {
            let deputy = predictor.deputy().map_or(Wants::default(), |part| slow[part].wants());
            store_wants(&shared.front_wants, predictor.wants());
            store_wants(&shared.deputy_wants, deputy);
        }
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
        let Shared { front_wants, deputy_wants, .. } = &*self.shared;
        let bits = front_wants.load(Ordering::Relaxed) | deputy_wants.load(Ordering::Relaxed);
        let has = |bit: u8| bits & bit != 0;
        Wants {
            ahead: has(WANTS_AHEAD),
            hidden: has(WANTS_HIDDEN),
            next_token: has(WANTS_NEXT_TOKEN),
        }
    }

    /// Never waits for the slow parts.
    pub fn observe(&self, event: &Event) {
        let start = Instant::now();
        let step = self.mover.tier().step();
        let mut front = self.front();
        let planning = self.shared.planning.as_ref();
        let deputy = front.observe(&*self.mover, planning, Happened { event, step });
        let mut is_for_parts = true;
        if let Some(predictor) = &front.predictor {
            store_wants(&self.shared.front_wants, predictor.wants());
            is_for_parts = deputy.is_some() || predictor.slow_parts_observe();
        }
        drop(front);
        if let Event::IterationEnd { phase, timing, .. } = event {
            let mut timer = self.shared.timer();
            timer.observe(*phase, timing);
            if let Some(planning) = planning {
                planning.set_costs(timer.costs(&self.mover.tier().counters()));
            }
        }
        if let Some(worker) = &self.worker
            && (is_for_parts || worker.has_splitter())
        {
            worker.send(event, step, deputy);
        }
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
        let front = self.front();
        let predictor = front.predictor.as_ref()?;
        let of_deputy = |part| self.worker.as_ref()?.verdict(part);
        predictor.verdict().or_else(|| predictor.deputy().and_then(of_deputy))
    }

    /// The verdict from what the policy has heard by now; `None` while the policy is at work.
    pub fn verdict_if_free(&self) -> Option<String> {
        let front = self.front.try_lock().ok()?;
        let predictor = front.predictor.as_ref()?;
        let of_deputy = |part| self.worker.as_ref()?.verdict_if_free(part);
        predictor.verdict().or_else(|| predictor.deputy().and_then(of_deputy))
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
