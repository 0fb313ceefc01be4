//! Figures of an answer.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::engine::{DraftSource, Drafted, FinishReason};
use crate::server::events::{Event, Finish};

/// OpenAI's name of the reason.
pub fn reason(finish: &Finish) -> &'static str {
    match finish.reason {
        FinishReason::Length | FinishReason::ContextFull => "length",
        _ if finish.n_calls > 0 => "tool_calls",
        FinishReason::StopToken | FinishReason::StopString | FinishReason::Cancelled => "stop",
    }
}

/// Tokens of all choices. `n_prompts` prompts were asked for, each with as many choices.
pub fn usage<'a>(finishes: impl IntoIterator<Item = &'a Finish>, n_choices: usize) -> Value {
    let finishes: Vec<&Finish> = finishes.into_iter().collect();
    let sum = |f: fn(&Finish) -> usize| finishes.iter().map(|finish| f(finish)).sum::<usize>();
    // The prompt of several choices counts once.
    let n_choices = n_choices.max(1);
    let n_prompt = sum(|finish| finish.n_prompt) / n_choices;
    let n_generated = sum(|finish| finish.outcome.n_generated);
    let n_cached = sum(|finish| finish.outcome.n_reused) / n_choices;
    let n_accepted = sum(|finish| predicted(finish).n_accepted as usize);
    let n_predicted = sum(|finish| predicted(finish).n as usize);
    json!({
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": { "cached_tokens": n_cached },
        "completion_tokens_details": {
            "reasoning_tokens": sum(|finish| finish.n_reasoning),
            "accepted_prediction_tokens": n_accepted,
            "rejected_prediction_tokens": n_predicted - n_accepted,
        },
    })
}

/// Drafts of the request's prediction.
fn predicted(finish: &Finish) -> Drafted {
    finish.outcome.drafts.of(DraftSource::Prediction)
}

fn ms(time: Duration) -> f64 {
    // Microseconds are enough, and print in few digits.
    time.as_micros() as f64 / 1e3
}

/// Rates of no tokens or of no time are 0, so that JSON can say them.
fn per(amount: f64, of: f64) -> f64 {
    if of > 0.0 { amount / of } else { 0.0 }
}

/// llama-server's figures of one choice.
pub fn timings(finish: &Finish) -> Value {
    let outcome = &finish.outcome;
    let mut timings = Figures {
        n_prompt: finish.n_prompt,
        n_cached: outcome.n_reused,
        n_generated: outcome.n_generated,
        prompt_time: outcome.prompt_time,
        decode_time: outcome.decode_time,
    }
    .timings();
    let drafted = outcome.drafts.all();
    timings["draft_n"] = drafted.n.into();
    timings["draft_n_accepted"] = drafted.n_accepted.into();
    timings
}

/// Tokens of a prompt, those of it that a cache had, tokens of its answer, and the times of both.
struct Figures {
    n_prompt: usize,
    n_cached: usize,
    n_generated: usize,
    prompt_time: Duration,
    decode_time: Duration,
}

impl Figures {
    fn timings(&self) -> Value {
        let n_cached = self.n_cached.min(self.n_prompt);
        let n_prompt = self.n_prompt - n_cached;
        let (prompt_ms, predicted_ms) = (ms(self.prompt_time), ms(self.decode_time));
        // The first token comes with the prompt.
        let n_decoded = self.n_generated.saturating_sub(1) as f64;
        json!({
            "cache_n": n_cached,
            "prompt_n": n_prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": per(prompt_ms, n_prompt as f64),
            "prompt_per_second": per(1e3 * n_prompt as f64, prompt_ms),
            "predicted_n": self.n_generated,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": per(predicted_ms, n_decoded),
            "predicted_per_second": per(1e3 * n_decoded, predicted_ms),
        })
    }
}

/// The figures of one choice while its answer comes.
#[derive(Clone, Debug)]
pub struct Live {
    pub n_prompt: usize,
    pub n_generated: usize,
    n_reused: usize,
    start: Instant,
    first_token: Option<Instant>,
    /// The time of the prompt so far.
    prompt_time: Duration,
    /// Tokens of the prompt that the client knows to be done.
    n_told: Option<usize>,
}

impl Live {
    pub fn new(n_prompt: usize) -> Live {
        let start = Instant::now();
        Live {
            n_prompt,
            n_generated: 0,
            n_reused: 0,
            start,
            first_token: None,
            prompt_time: Duration::ZERO,
            n_told: None,
        }
    }

    /// Takes an event in. Returns llama-server's `prompt_progress` if there is more of it than
    /// before: what was there comes first, all of the prompt last.
    pub fn see(&mut self, event: &Event) -> Option<Value> {
        match event {
            Event::Started { n_reused, .. } => {
                (self.start, self.n_reused) = (Instant::now(), *n_reused);
                self.progress(*n_reused, Duration::ZERO)
            }
            Event::Progress { n_done, time, .. } => self.progress(*n_done, *time),
            Event::Reasoning(piece) | Event::Content(piece) => {
                self.add(piece.tokens.len());
                None
            }
            Event::Finished(finish) => {
                self.add(finish.tokens.len());
                None
            }
            Event::CallBegin { .. } | Event::Arguments { .. } => None,
            Event::Embedded(_) | Event::Failed(_) => None,
        }
    }

    fn add(&mut self, n_tokens: usize) {
        self.n_generated += n_tokens;
        if n_tokens > 0 && self.first_token.is_none() {
            let now = Instant::now();
            self.first_token = Some(now);
            self.prompt_time = self.prompt_time.max(now.duration_since(self.start));
        }
    }

    fn progress(&mut self, n_done: usize, time: Duration) -> Option<Value> {
        if self.n_told.is_some_and(|n| n_done <= n) {
            return None;
        }
        (self.n_told, self.prompt_time) = (Some(n_done), time);
        Some(json!({
            "total": self.n_prompt,
            "cache": self.n_reused,
            "processed": n_done,
            "time_ms": time.as_millis() as u64,
        }))
    }

    /// [`timings`] so far.
    pub fn timings(&self) -> Value {
        let n_done = self.n_told.filter(|_| self.first_token.is_none());
        Figures {
            n_prompt: n_done.unwrap_or(self.n_prompt),
            n_cached: self.n_reused,
            n_generated: self.n_generated,
            prompt_time: self.prompt_time,
            decode_time: self.first_token.map_or(Duration::ZERO, |first| first.elapsed()),
        }
        .timings()
    }
}

/// Figures that only moeba has.
pub fn moeba(finish: &Finish) -> Value {
    let traffic = finish.outcome.prompt_traffic.plus(&finish.outcome.decode_traffic);
    let experts = traffic.top().map(|counters| {
        json!({
            "hits": counters.hits_whole,
            "misses": counters.misses + counters.hits_partial,
            "read_bytes": traffic.disk.map_or(0, |disk| disk.read_bytes),
            "stall_ms": ms(Duration::from_nanos(counters.stall_ns)),
        })
    });
    json!({
        "seed": finish.seed,
        "queue_ms": ms(finish.queue_time),
        "experts": experts,
        "kv": { "ram_hit_tokens": finish.outcome.n_reused, "disk_hit_tokens": 0 },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_told_once() {
        let mut live = Live::new(49);
        let progress = |n_done| Event::Progress { n_done, time: Duration::from_millis(3) };
        let first = live.see(&Event::Started { slot: 0, n_reused: 8 });
        let expected = json!({ "total": 49, "cache": 8, "processed": 8, "time_ms": 0 });
        assert_eq!(first, Some(expected));
        let timings = live.timings();
        let zeros = ["prompt_n", "prompt_ms", "predicted_n", "predicted_ms"];
        assert!(zeros.iter().all(|name| timings[name].as_f64() == Some(0.0)), "{timings}");
        let mut told = |n_done| live.see(&progress(n_done)).map(|told| told["processed"].clone());
        let expected = [None, Some(20.into()), None, Some(49.into()), None];
        assert_eq!([8, 20, 20, 49, 49].map(&mut told), expected);
        assert_eq!(live.timings()["cache_n"], 8);
        assert_eq!(live.timings()["prompt_n"], 41);
    }
}
