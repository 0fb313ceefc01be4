//! The thread that computes, and the door to it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::core::Core;
use super::inbox::Inbox;
use super::job::{AnySink, Job, JobSink};
use super::saved_slots::BetweenPasses;
use super::status::{Board, Counts, Status};
use crate::engine::kv_disk::KvFolder;
use crate::engine::{Engine, FinishReason, Outcome};
use crate::{Error, Result};

/// The interval at which jobs whose readers are behind are checked, if nothing wakes the thread.
const PAUSE: Duration = Duration::from_millis(20);

/// Bounds of the time after which a refused job should come again: clients of OpenAI and Anthropic
/// heed no more than a minute.
const MIN_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(60);

/// The time of a job where none has ended.
const UNKNOWN_TIME: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug)]
pub struct SchedulerOptions {
    /// Texts that are computed at a time; each has a session.
    pub n_parallel: usize,
    /// Jobs that may wait for a session.
    pub n_queue: usize,
    /// Memory for keys and values of texts that no session holds.
    pub page_bytes: usize,
    /// The part of the time, in 0..1, that prompts get while texts are in decode.
    pub prompt_share: f64,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        SchedulerOptions { n_parallel: 1, n_queue: 64, page_bytes: 0, prompt_share: 0.5 }
    }
}

/// Why a job was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The queue is full. About `wait` passes until it has room for this job and for those that
    /// were refused before, as far as the rates so far tell.
    QueueFull { n_queued: usize, wait: Duration },
    /// The scheduler takes no more jobs.
    Closed,
}

/// Computes jobs on a thread of its own until it is dropped, which cancels the jobs that are left.
pub struct Scheduler {
    engine: Arc<Engine>,
    inbox: Arc<Inbox<Job<AnySink>>>,
    board: Board,
    options: SchedulerOptions,
    next_id: AtomicU64,
    /// When the last one that was refused should come again.
    last_turn: Mutex<Option<Instant>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Scheduler {
    /// Takes the memory of `n_parallel` sessions and starts the thread.
    pub fn start(engine: &Arc<Engine>, options: SchedulerOptions) -> Result<Scheduler> {
        Scheduler::on_disk(engine, options, None)
    }

    /// A scheduler whose `folder` keeps all texts, for the next scheduler.
    pub fn on_disk(
        engine: &Arc<Engine>,
        options: SchedulerOptions,
        folder: Option<KvFolder>,
    ) -> Result<Scheduler> {
        let n = options.n_parallel.max(1);
        let sessions = (0..n).map(|_| engine.new_session()).collect::<Result<Vec<_>>>()?;
        let (share, page_bytes) = (options.prompt_share, options.page_bytes);
        let core = match folder {
            None => Core::<AnySink>::new(engine, sessions, share, page_bytes),
            Some(folder) => Core::on_disk(engine, sessions, share, page_bytes, folder)?,
        };
        let (inbox, board) = (Arc::new(Inbox::default()), core.board().clone());
        let thread = std::thread::Builder::new().name("scheduler".into());
        let thread = thread.spawn({
            let inbox = inbox.clone();
            move || run(core, &inbox)
        });
        let thread = thread.map_err(|e| Error::invalid(format!("cannot start a thread: {e}")))?;
        Ok(Scheduler {
            engine: engine.clone(),
            inbox,
            board,
            options,
            next_id: AtomicU64::new(1),
            last_turn: Mutex::default(),
            thread: Mutex::new(Some(thread)),
        })
    }

    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub fn options(&self) -> &SchedulerOptions {
        &self.options
    }

    /// A number for a job.
    pub fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Hands jobs over, all or none.
    pub fn submit(&self, jobs: Vec<Job<AnySink>>) -> std::result::Result<(), Refused> {
        let mut inbox = self.inbox.lock();
        if inbox.is_closed {
            return Err(Refused::Closed);
        }
        let cancelled = inbox.take_cancelled();
        let n_queued = inbox.n_queued();
        let n_free = self.options.n_parallel.max(1).saturating_sub(inbox.n_running);
        let has_room = n_queued + jobs.len() <= self.options.n_queue + n_free;
        if has_room {
            inbox.jobs.extend(jobs);
        }
        drop(inbox);
        for mut job in cancelled {
            job.sink.finished(Ok(Outcome::new(FinishReason::Cancelled)));
        }
        if !has_room {
            let wait = self.time_to_wait();
            return Err(Refused::QueueFull { n_queued, wait });
        }
        self.wake();
        Ok(())
    }

    /// Has work done between two passes. It is dropped undone if the scheduler ends before.
    pub fn between_passes(&self, task: BetweenPasses<AnySink>) {
        {
            let mut inbox = self.inbox.lock();
            if !inbox.is_closed {
                inbox.tasks.push(task);
            }
        }
        self.wake();
    }

    /// Makes the thread look at its jobs: one was cancelled, or a reader has caught up.
    pub fn wake(&self) {
        self.inbox.lock().is_woken = true;
        self.inbox.changed.notify_one();
    }

    /// The newest snapshot. Never waits for a pass.
    pub fn status(&self) -> Arc<Status> {
        self.board.read()
    }

    /// Takes no more jobs; those that were taken go on.
    pub fn close(&self) {
        self.inbox.lock().is_closed = true;
    }

    /// The time after which a job that has no place now should come again. Each one that asks is
    /// told a later one: they would all come at once.
    pub fn time_to_wait(&self) -> Duration {
        let (inbox, counts) = (self.inbox.lock(), self.board.read().counts);
        let n_before = inbox.n_queued() + 1;
        drop(inbox);
        let each = time_of_a_job(&counts);
        let now = Instant::now();
        let mut last = self.last_turn.lock().unwrap_or_else(PoisonError::into_inner);
        let first = each.saturating_mul(u32::try_from(n_before).unwrap_or(u32::MAX));
        let behind = last.map_or(Duration::ZERO, |last| last.saturating_duration_since(now) + each);
        let wait = first.max(behind).clamp(MIN_WAIT, MAX_WAIT);
        *last = Some(now + wait);
        wait
    }

    /// Whether no job is left.
    pub fn is_idle(&self) -> bool {
        let inbox = self.inbox.lock();
        let n_begun = inbox.n_running + inbox.n_resting;
        inbox.jobs.is_empty() && inbox.waiting.is_empty() && n_begun == 0
    }
}

impl Scheduler {
    /// Cancels the jobs that are left and ends the thread, once all that is to be kept on disk is
    /// there.
    pub fn end(&self) {
        {
            let mut inbox = self.inbox.lock();
            (inbox.is_closed, inbox.is_over) = (true, true);
        }
        self.wake();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            log::error!("the scheduler's thread has ended with a panic");
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.end();
    }
}

/// The time that a job keeps others waiting, as jobs so far tell.
fn time_of_a_job(counts: &Counts) -> Duration {
    let busy = counts.prompt_ns + counts.decode_ns;
    match busy.checked_div(counts.n_started) {
        Some(ns) if ns > 0 => Duration::from_nanos(ns),
        _ => UNKNOWN_TIME,
    }
}

fn run(mut core: Core<AnySink>, inbox: &Inbox<Job<AnySink>>) {
    loop {
        let tasks = std::mem::take(&mut inbox.lock().tasks);
        tasks.into_iter().for_each(|task| task(&mut core));
        {
            let mut state = inbox.lock();
            if core.is_idle() {
                state = inbox.gather(state, core.n_sessions(), core.time_to_gather());
            }
            while let Some(job) = state.jobs.pop_front() {
                core.submit(job);
            }
            state.look(&core);
            if state.is_over {
                break;
            }
        }
        let is_busy = core.step();
        let mut state = inbox.lock();
        state.look(&core);
        if !is_busy && state.jobs.is_empty() && !state.is_woken && !state.is_over {
            state = match core.is_idle() && !core.is_saving() {
                true => inbox.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                false => {
                    let waited = inbox.changed.wait_timeout(state, PAUSE);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        state.is_woken = false;
    }
    core.cancel_all();
    core.finish_saving();
}
