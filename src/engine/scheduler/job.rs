//! A text to generate, and whoever receives it.

use std::sync::Arc;

use crate::Result;
use crate::cancel::Cancel;
use crate::engine::{Embedding, Generation, Outcome, TextSink};
use crate::sample::TokenLogprob;

/// Receives a job's text and hears how the job goes. Its methods run on the thread that computes:
/// they must not wait.
pub trait JobSink: TextSink {
    /// The job has the session with the number `slot`, which holds the first `n_reused` tokens of
    /// the prompt.
    fn started(&mut self, _slot: usize, _n_reused: usize) {}

    /// Whether the next token can wait: the reader is behind. Other jobs go on meanwhile, and if
    /// that lasts and some wait for a session they get the job's.
    fn is_full(&self) -> bool {
        false
    }

    /// This token was chosen. Its text follows, unless it ends the job. `logprob` is there if it
    /// is to be reported.
    fn token(&mut self, _id: u32, _logprob: Option<&TokenLogprob>) {}

    /// The embedding of a job that asks for one.
    fn embedded(&mut self, _embedding: Embedding) {}

    /// The job has ended. Nothing is called after this.
    fn finished(&mut self, result: Result<Outcome>);
}

/// A sink of any kind, for jobs of different callers.
pub struct AnySink(Box<dyn JobSink + Send>);

impl AnySink {
    pub fn new(sink: impl JobSink + Send + 'static) -> AnySink {
        AnySink(Box::new(sink))
    }
}

impl JobSink for AnySink {
    fn started(&mut self, slot: usize, n_reused: usize) {
        self.0.started(slot, n_reused);
    }

    fn is_full(&self) -> bool {
        self.0.is_full()
    }

    fn token(&mut self, id: u32, logprob: Option<&TokenLogprob>) {
        self.0.token(id, logprob);
    }

    fn embedded(&mut self, embedding: Embedding) {
        self.0.embedded(embedding);
    }

    fn finished(&mut self, result: Result<Outcome>) {
        self.0.finished(result);
    }
}

impl TextSink for AnySink {
    fn text(&mut self, text: &str) -> Result<()> {
        self.0.text(text)
    }

    fn prompt_progress(&mut self, done: usize, total: usize) {
        self.0.prompt_progress(done, total);
    }

    fn forced(&mut self, is_whole: bool) -> Option<u32> {
        self.0.forced(is_whole)
    }
}

/// The owner of a job: time is shared between owners, then between an owner's jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    pub id: u64,
    /// Among owners that want time at once, shares are proportional to their weights.
    pub weight: u32,
}

impl Default for Owner {
    fn default() -> Self {
        Owner { id: 0, weight: 1 }
    }
}

/// A text to generate, or to embed.
pub struct Job<S> {
    /// Names the job in snapshots.
    pub id: u64,
    /// Token ids, at least one; those that `generation` was made for.
    pub prompt: Vec<u32>,
    /// Token ids that the encoder reads, if the model has one.
    pub source: Option<Vec<u32>>,
    pub generation: Generation,
    pub sink: S,
    /// Ends the job early, wherever it is.
    pub cancel: Cancel,
    pub owner: Owner,
    /// Jobs of different salts share no text in the caches. `None` shares none with any: nothing
    /// is taken from a cache, and nothing is kept.
    pub salt: Option<u64>,
    /// The owner's waiting job with the lowest number is next.
    pub priority: i32,
    /// The session that the job gets if it is free.
    pub slot: Option<usize>,
    /// How much of each adapter the text takes, if not as the engine's options say. Jobs of other
    /// numbers have another salt.
    pub adapters: Option<Arc<[f32]>>,
}
