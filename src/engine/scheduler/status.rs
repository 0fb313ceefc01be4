//! Snapshots of a scheduler: whoever looks at it never waits for a pass.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::engine::kv_disk::DiskCounts;
use crate::engine::speculation::DraftCounts;

use super::histogram::{Histogram, NUMBERS, SHORT_SECONDS};

/// The state of a scheduler at some moment.
#[derive(Clone, Debug, Default)]
pub struct Status {
    pub slots: Vec<SlotStatus>,
    /// Jobs that wait for a session.
    pub n_queued: usize,
    /// Jobs whose readers are behind, without a session.
    pub n_resting: usize,
    /// Pages of texts that no session holds, states of texts, and the bytes of both.
    pub n_pages: usize,
    pub n_checkpoints: usize,
    pub page_bytes: usize,
    pub page_counts: PageCounts,
    /// Present where texts are kept on disk.
    pub disk: Option<DiskCounts>,
    pub counts: Counts,
}

impl Status {
    /// Jobs that have begun and wait: for memory of their sessions, or for their readers.
    pub fn n_parked(&self) -> usize {
        self.slots.iter().filter(|slot| slot.is_parked).count() + self.n_resting
    }
}

/// Counts of pages since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct PageCounts {
    /// Pages of prompts that were there when a session wanted them, and that were not.
    pub n_hits: u64,
    pub n_misses: u64,
    /// Pages that made room for others.
    pub n_evicted: u64,
}

/// Counts since the scheduler was started.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// Tokens of prompts that were computed, and the time of their passes in ns.
    pub n_prompt: u64,
    pub prompt_ns: u64,
    /// Tokens that steps of decode have given, the steps, and their time in ns.
    pub n_decode: u64,
    pub n_steps: u64,
    pub decode_ns: u64,
    /// Jobs that got a session, and tokens of their prompts that it held already.
    pub n_started: u64,
    pub n_reused: u64,
    /// Times that a job was parked, as older ones needed its memory or its reader was behind.
    pub n_parked: u64,
    /// Layers of prompts' passes.
    pub n_prompt_layers: u64,
    /// Tokens that steps of decode have computed as drafts, steps with some, and steps whose
    /// drafts were not worth it.
    pub drafts: DraftCounts,
    pub n_verified: u64,
    pub n_not_drafted: u64,
    /// Texts in a step of decode.
    pub batch_rows: Histogram,
    /// Experts that a layer needed in a step of decode. Not counted on GPUs.
    pub expert_union: Histogram,
    /// Time between two steps of decode of a text whose reader was not behind.
    pub decode_stall: Histogram,
    /// Time that a token's mask took.
    pub mask_time: Histogram,
}

impl Default for Counts {
    fn default() -> Self {
        Counts {
            n_prompt: 0,
            prompt_ns: 0,
            n_decode: 0,
            n_steps: 0,
            decode_ns: 0,
            n_started: 0,
            n_reused: 0,
            n_parked: 0,
            n_prompt_layers: 0,
            drafts: DraftCounts::default(),
            n_verified: 0,
            n_not_drafted: 0,
            batch_rows: Histogram::new(&NUMBERS),
            expert_union: Histogram::new(&NUMBERS),
            decode_stall: Histogram::new(&SHORT_SECONDS),
            mask_time: Histogram::new(&SHORT_SECONDS),
        }
    }
}

impl Counts {
    pub(super) fn add_prompt(&mut self, time: Duration, n: usize) {
        self.n_prompt += n as u64;
        self.prompt_ns += time.as_nanos() as u64;
    }

    /// One step of `n_texts`, which has given them `n_tokens`.
    pub(super) fn add_decode(&mut self, time: Duration, n_texts: usize, n_tokens: usize) {
        self.n_steps += 1;
        self.n_decode += n_tokens as u64;
        self.batch_rows.add(n_texts as f64);
        self.decode_ns += time.as_nanos() as u64;
    }
}

/// A session and its job.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotStatus {
    pub id: usize,
    /// Tokens in the session's cache.
    pub n_past: usize,
    /// Whether the job waits for memory of the session.
    pub is_parked: bool,
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
