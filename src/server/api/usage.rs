//! Figures of an answer.

use std::time::Duration;

use serde_json::{Value, json};

use crate::engine::{DraftSource, Drafted, FinishReason};
use crate::server::events::Finish;

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
    let n_cached = outcome.n_reused.min(finish.n_prompt);
    let n_prompt = finish.n_prompt - n_cached;
    let n = outcome.n_generated;
    let (prompt_ms, predicted_ms) = (ms(outcome.prompt_time), ms(outcome.decode_time));
    // The first token comes with the prompt.
    let n_decoded = n.saturating_sub(1) as f64;
    let drafted = outcome.drafts.all();
    json!({
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": per(prompt_ms, n_prompt as f64),
        "prompt_per_second": per(1e3 * n_prompt as f64, prompt_ms),
        "predicted_n": n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": per(predicted_ms, n_decoded),
        "predicted_per_second": per(1e3 * n_decoded, predicted_ms),
        "draft_n": drafted.n,
        "draft_n_accepted": drafted.n_accepted,
    })
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
