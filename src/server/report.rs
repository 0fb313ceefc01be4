//! A line in the log for each request, and its counts.

use std::sync::Arc;
use std::time::Instant;

use super::errors::ApiError;
use super::events::{Event, Finish};
use super::metrics::Metrics;
use super::service::PendingAnswer;

/// The part of requests that goes to the log (`--log-requests`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogRequests {
    None,
    #[default]
    Line,
    /// The line, and the body.
    Full,
}

/// Follows a request to its end. One that is dropped before was given up by its client.
#[derive(Debug)]
pub struct Report {
    metrics: Arc<Metrics>,
    log: LogRequests,
    id: String,
    /// The route's pattern.
    route: &'static str,
    start: Instant,
    n_prompt: usize,
    n_reused: usize,
    n_generated: usize,
    read_bytes: u64,
    has_text: bool,
    /// How far the answer is, if its client goes.
    phase: &'static str,
    is_over: bool,
    /// The name of the client's key.
    client: Option<Arc<str>>,
    /// The name of what was asked for; see `replay`.
    pub request_hash: Option<String>,
}

impl Report {
    pub fn new(metrics: &Arc<Metrics>, log: LogRequests, id: &str, route: &'static str) -> Report {
        Report {
            metrics: metrics.clone(),
            log,
            id: id.to_owned(),
            route,
            start: Instant::now(),
            n_prompt: 0,
            n_reused: 0,
            n_generated: 0,
            read_bytes: 0,
            has_text: false,
            phase: "queue",
            is_over: false,
            client: None,
            request_hash: None,
        }
    }

    pub fn set_client(&mut self, name: Option<Arc<str>>) {
        self.client = name;
    }

    /// An event of the answer has come.
    pub fn see(&mut self, event: &Event) {
        self.phase = match event {
            Event::Started { .. } | Event::Progress { .. } if self.phase == "queue" => "prompt",
            Event::Started { .. } | Event::Progress { .. } | Event::Failed(_) => self.phase,
            _ => "decode",
        };
    }

    /// A choice of an answer has ended.
    pub fn finish(&mut self, finish: &Finish, answer: &PendingAnswer) {
        let outcome = &finish.outcome;
        self.has_text = true;
        self.n_prompt = finish.n_prompt;
        self.n_reused += outcome.n_reused;
        self.n_generated += outcome.n_generated;
        let traffic = outcome.prompt_traffic.plus(&outcome.decode_traffic);
        self.read_bytes += traffic.disk.map_or(0, |counters| counters.read_bytes);
        self.metrics.add_finish(answer.model_name(), finish, answer.age());
    }

    /// All of the answer was written.
    pub fn end(&mut self) {
        self.answered(200);
    }

    /// The answer has failed after it began.
    pub fn fail(&mut self, error: &ApiError) {
        self.metrics.add_rejected(error.code);
        self.answered(error.status(super::errors::Wire::OpenAi));
    }

    /// The request was answered with this status.
    pub fn answered(&mut self, status: u16) {
        self.is_over = true;
        self.metrics.add_request(self.route, status);
        if self.log == LogRequests::None {
            return;
        }
        let Report { id, route, .. } = self;
        let from = self.client.as_ref().map_or(String::new(), |name| format!(" ({name})"));
        let ms = self.start.elapsed().as_millis();
        match self.has_text {
            false => log::info!("{id}{from} {route} {status} {ms} ms"),
            true => log::info!(
                "{id}{from} {route} {status} {} prompt tokens, {} of them cached, {} generated, {} \
                 bytes read, {ms} ms",
                self.n_prompt,
                self.n_reused,
                self.n_generated,
                self.read_bytes,
            ),
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if !self.is_over {
            self.metrics.add_cancelled(self.phase);
            self.answered(499);
        }
    }
}
