//! The thread that computes, and the door to it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::core::Core;
use super::inbox::Inbox;
use super::job::{AnySink, Job, JobSink};
use super::saved_slots::BetweenPasses;
use super::status::{Board, Status};
use crate::engine::kv_disk::KvFolder;
use crate::engine::{Engine, FinishReason, Outcome};
use crate::{Error, Result};

/// The interval at which jobs whose readers are behind are checked, if nothing wakes the thread.
const PAUSE: Duration = Duration::from_millis(20);

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
    /// The queue is full. About `seconds` pass until it has room, as far as the rates so far tell.
    QueueFull { n_queued: usize, seconds: u64 },
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
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Scheduler {
    /// Takes the memory of `n_parallel` sessions and starts the thread.
    pub fn start(engine: &Arc<Engine>, options: SchedulerOptions) -> Result<Scheduler> {
        Scheduler::on_disk(engine, options, None)
    }

    /// The same; `folder` keeps all texts, for the next scheduler.
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
            let seconds = seconds_to_wait(&self.board.read(), n_queued, self.options.n_parallel);
            return Err(Refused::QueueFull { n_queued, seconds });
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

/// Seconds until a session is free for another job, by the time that jobs have taken so far.
fn seconds_to_wait(status: &Status, n_queued: usize, n_parallel: usize) -> u64 {
    let counts = status.counts;
    let busy = (counts.prompt_ns + counts.decode_ns) as f64 / 1e9;
    let each = busy / counts.n_started.max(1) as f64;
    (each * (n_queued + 1) as f64 / n_parallel.max(1) as f64).ceil().clamp(1.0, 120.0) as u64
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
