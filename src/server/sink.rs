//! The end of a job on the thread that computes: parts its text and passes events on.

use std::time::{Duration, Instant};

use super::errors::{ApiError, Kind};
use super::events::{Event, Finish, Piece, Sender, Token};
use crate::Result;
use crate::cancel::Cancel;
use crate::chat::reasoning::Budget;
use crate::chat::tools::{self, Scanner};
use crate::engine::scheduler::JobSink;
use crate::engine::{Embedding, FinishReason, Outcome, TextSink};
use crate::sample::TokenLogprob;

pub struct Sink {
    sender: Sender,
    scanner: Scanner,
    budget: Option<Budget>,
    settings: SinkSettings,
    /// Tokens that no piece has had yet.
    tokens: Vec<Token>,
    n_reasoning: usize,
    slot: usize,
    n_reused: usize,
    queue_time: Duration,
    start: Instant,
    /// When the text has to end.
    deadline: Option<Instant>,
    is_finished: bool,
}

/// Facts of a sink's job.
pub struct SinkSettings {
    pub n_prompt: usize,
    pub seed: u64,
    pub wants_progress: bool,
    pub wants_tokens: bool,
    pub time_limit: Option<Duration>,
    pub cancel: Cancel,
    /// Strings that end the text.
    pub stops: Vec<String>,
}

impl Sink {
    pub fn new(
        sender: Sender,
        scanner: Scanner,
        budget: Option<Budget>,
        settings: SinkSettings,
    ) -> Sink {
        Sink {
            sender,
            scanner,
            budget,
            settings,
            tokens: Vec::new(),
            n_reasoning: 0,
            slot: 0,
            n_reused: 0,
            queue_time: Duration::ZERO,
            start: Instant::now(),
            deadline: None,
            is_finished: false,
        }
    }

    fn emit(&mut self, parts: Vec<tools::Event>) {
        for part in parts {
            let mut piece = |text| Piece { text, tokens: std::mem::take(&mut self.tokens) };
            let event = match part {
                tools::Event::Reasoning(text) => Event::Reasoning(piece(text)),
                tools::Event::Content(text) => Event::Content(piece(text)),
                tools::Event::CallBegin { index, id, name } => Event::CallBegin { index, id, name },
                tools::Event::Arguments { index, text } => Event::Arguments { index, text },
                tools::Event::CallEnd { .. } => continue,
            };
            self.sender.send(event);
        }
    }

    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    fn end(&mut self, result: Result<Outcome>) -> Event {
        let mut outcome = match result {
            Ok(outcome) => outcome,
            Err(why) => {
                log::warn!("a request has failed: {why}");
                return Event::Failed(ApiError::of_run(&why));
            }
        };
        if outcome.finish == FinishReason::Cancelled {
            if !self.is_late() {
                return Event::Failed(ApiError::shutting_down());
            }
            outcome.finish = FinishReason::Length;
        }
        Event::Finished(Box::new(Finish {
            reason: outcome.finish,
            stop: outcome.stop.and_then(|i| self.settings.stops.get(i).cloned()),
            tokens: std::mem::take(&mut self.tokens),
            outcome,
            n_prompt: self.settings.n_prompt,
            n_reasoning: self.n_reasoning,
            n_calls: self.scanner.n_calls(),
            seed: self.settings.seed,
            slot: self.slot,
            queue_time: self.queue_time,
        }))
    }
}

impl TextSink for Sink {
    fn text(&mut self, text: &str) -> Result<()> {
        let parts = self.scanner.push(text);
        self.emit(parts);
        Ok(())
    }

    fn prompt_progress(&mut self, done: usize, _total: usize) {
        if self.settings.wants_progress {
            self.sender.send(Event::Progress {
                n_done: self.n_reused + done,
                time: self.start.elapsed().saturating_sub(self.queue_time),
            });
        }
    }

    fn forced(&mut self, is_whole: bool) -> Option<u32> {
        let is_reasoning = self.scanner.is_reasoning();
        self.budget.as_mut().and_then(|budget| budget.next(is_reasoning, is_whole))
    }
}

impl JobSink for Sink {
    fn started(&mut self, slot: usize, n_reused: usize) {
        (self.slot, self.n_reused) = (slot, n_reused);
        self.queue_time = self.start.elapsed();
        self.sender.send(Event::Started { slot, n_reused });
    }

    fn is_full(&self) -> bool {
        self.sender.is_full()
    }

    fn token(&mut self, id: u32, logprob: Option<&TokenLogprob>) {
        if self.settings.wants_tokens && !self.tokens.is_empty() {
            let tokens = std::mem::take(&mut self.tokens);
            self.sender.send(Event::Content(Piece { text: String::new(), tokens }));
        }
        self.n_reasoning += usize::from(self.scanner.is_reasoning());
        self.tokens.push(Token { id, logprob: logprob.cloned() });
        match (self.deadline, self.settings.time_limit) {
            (None, Some(limit)) => self.deadline = Some(Instant::now() + limit),
            (Some(_), _) if self.is_late() => self.settings.cancel.cancel(),
            _ => {}
        }
    }

    fn embedded(&mut self, embedding: Embedding) {
        self.sender.send(Event::Embedded(embedding));
    }

    fn finished(&mut self, result: Result<Outcome>) {
        let is_whole = matches!(&result, Ok(outcome) if outcome.finish == FinishReason::StopToken);
        let rest = if is_whole { self.scanner.finish() } else { self.scanner.cut() };
        self.emit(rest);
        let event = self.end(result);
        self.is_finished = true;
        self.sender.send(event);
    }
}

impl Drop for Sink {
    /// A job that is lost must not leave its client waiting.
    fn drop(&mut self) {
        if !self.is_finished {
            let message = "the engine has stopped: see the server's messages";
            let error = ApiError::new(Kind::Server, "engine_stopped", message);
            self.sender.send(Event::Failed(error));
        }
    }
}
