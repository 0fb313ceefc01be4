//! A session and the job that has it.

use super::job::{JobSink, Owner};
use super::running::Running;
use super::status::SlotStatus;
use crate::engine::{BatchRow, Engine, FinishReason, Session};
use crate::{Error, Result};

pub struct Slot<S> {
    pub id: usize,
    pub session: Session,
    pub job: Option<Running<S>>,
    /// The number of the last job that had it.
    pub last_used: u64,
    /// The job's tokens in the next pass.
    pub next: Vec<u32>,
}

impl<S: JobSink> Slot<S> {
    pub fn new(id: usize, session: Session) -> Slot<S> {
        Slot { id, session, job: None, last_used: 0, next: Vec::new() }
    }

    /// How many tokens of a prompt the session holds.
    pub fn n_common(&self, prompt: &[u32]) -> usize {
        self.session.tokens().iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }

    /// Tokens of the job's text that are not computed.
    pub fn n_left(&self) -> usize {
        self.job.as_ref().map_or(0, |job| job.n_left(&self.session))
    }

    /// Whether the job has a prompt to compute, or a text that the session has lost.
    pub fn has_prompt(&self) -> bool {
        self.job.as_ref().is_some_and(|job| !job.is_decoding(&self.session))
    }

    /// Whether a step of decode may compute the job's next token.
    pub fn can_decode(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.is_decoding(&self.session) && !job.is_full())
    }

    /// Whether the next pass is the job's own.
    pub fn is_alone(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.is_alone)
    }

    /// Reads the job's source text, if the model has an encoder and it was not read.
    pub fn encode(&mut self) -> Result<()> {
        self.job.as_mut().map_or(Ok(()), |job| job.encode(&mut self.session))
    }

    /// Puts at most `n` tokens of the job's text into the next pass.
    pub fn plan(&mut self, n: usize) {
        self.next.clear();
        if let Some(job) = &self.job {
            self.next.extend(job.next_tokens(&self.session, n));
        }
    }

    /// The planned part of a pass, and the job to tell how far it is.
    pub fn part(&mut self) -> Option<Part<'_, S>> {
        let Slot { session, job: Some(job), next, .. } = self else { return None };
        let (phase, want) = job.next_kind(session, next.len());
        let (owner, n_past) = (job.owner, session.n_past());
        Some(Part { row: BatchRow { session, tokens: next, phase, want }, job, owner, n_past })
    }

    /// Hands out a pass's results: the next token, or the job's end.
    pub fn settle(&mut self, engine: &Engine, result: std::result::Result<(), PassError>) {
        let Slot { session, job: Some(job), .. } = self else { return };
        let result = match result {
            Ok(()) => job.commit(session, engine),
            Err(PassError::Shared) => {
                job.is_alone = true;
                Ok(None)
            }
            Err(PassError::Own(why)) => Err(why),
        };
        match result {
            Ok(None) => {}
            Ok(Some(finish)) => self.end(engine, Ok(finish)),
            Err(Error::Interrupted) => self.end(engine, Ok(FinishReason::Cancelled)),
            Err(why) => self.end(engine, Err(why)),
        }
    }

    pub fn end_if_cancelled(&mut self, engine: &Engine) {
        if self.job.as_ref().is_some_and(|job| job.cancel.is_cancelled()) {
            self.end(engine, Ok(FinishReason::Cancelled));
        }
    }

    /// Ends the job; the session keeps its text for the next one.
    pub fn end(&mut self, engine: &Engine, result: Result<FinishReason>) {
        if let Some(job) = self.job.take() {
            job.finish(result, &self.session, engine);
        }
    }

    pub fn status(&self) -> SlotStatus {
        let job = self.job.as_ref().map(|job| job.status(&self.session));
        SlotStatus { id: self.id, n_past: self.session.n_past(), job }
    }
}

/// A slot's part of a pass.
pub struct Part<'a, S> {
    pub row: BatchRow<'a>,
    pub job: &'a mut Running<S>,
    pub owner: Owner,
    /// Tokens in the session before the pass.
    pub n_past: usize,
}

/// Why a pass has failed for a job.
pub enum PassError {
    /// For reasons of its own.
    Own(Error),
    /// For reasons of its own or of another job in the pass.
    Shared,
}
