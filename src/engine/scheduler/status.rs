//! Snapshots of a scheduler: whoever looks at it never waits for a pass.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The state of a scheduler at some moment.
#[derive(Clone, Debug, Default)]
pub struct Status {
    pub slots: Vec<SlotStatus>,
    /// Jobs that wait for a session.
    pub n_queued: usize,
    /// Pages of texts that no session holds, states of texts, and the bytes of both.
    pub n_pages: usize,
    pub n_checkpoints: usize,
    pub page_bytes: usize,
    pub counts: Counts,
}

/// Counts since the scheduler was started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Tokens of prompts that were computed, and the time of their passes in ns.
    pub n_prompt: u64,
    pub prompt_ns: u64,
    /// Tokens that steps of decode have computed, the steps, and their time in ns.
    pub n_decode: u64,
    pub n_steps: u64,
    pub decode_ns: u64,
    /// Jobs that got a session, and tokens of their prompts that it held already.
    pub n_started: u64,
    pub n_reused: u64,
}

impl Counts {
    pub(super) fn add_prompt(&mut self, time: Duration, n: usize) {
        self.n_prompt += n as u64;
        self.prompt_ns += time.as_nanos() as u64;
    }

    /// One step.
    pub(super) fn add_decode(&mut self, time: Duration, n: usize) {
        self.n_steps += 1;
        self.n_decode += n as u64;
        self.decode_ns += time.as_nanos() as u64;
    }
}

/// A session and its job.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotStatus {
    pub id: usize,
    /// Tokens in the session's cache.
    pub n_past: usize,
    pub job: Option<JobStatus>,
}

#[derive(Clone, Copy, Debug)]
pub struct JobStatus {
    /// [`super::Job::id`].
    pub id: u64,
    pub n_prompt: usize,
    /// Tokens of the prompt that are computed or were there.
    pub n_prompt_done: usize,
    pub n_generated: usize,
}

/// The newest snapshot.
#[derive(Clone, Debug, Default)]
pub struct Board(Arc<Mutex<Arc<Status>>>);

impl Board {
    pub fn read(&self) -> Arc<Status> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn write(&self, status: Status) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(status);
    }
}
