//! A message of the assistant as a whole, and what its stream shares with it.

use serde_json::{Value, json};

use crate::engine::FinishReason;
use crate::server::events::Finish;

/// A message with these blocks; the reason of its end is still missing.
pub fn message(id: &str, model: &str, content: Vec<Value>, usage: Value) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": null,
        "stop_sequence": null,
        "usage": usage,
    })
}

/// The answer in one object.
pub fn whole(id: &str, model: &str, content: Vec<Value>, finish: &Finish) -> Value {
    let mut message = message(id, model, content, usage(finish));
    message["stop_reason"] = stop_reason(finish).into();
    message["stop_sequence"] = finish.stop.as_deref().into();
    message
}

/// Tokens of a prompt, and those of it that a cache had, before the answer.
pub fn prompt_usage(n_prompt: usize, n_reused: usize) -> Value {
    json!({
        "input_tokens": n_prompt.saturating_sub(n_reused),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_reused,
        "output_tokens": 0,
    })
}

/// Tokens of a prompt and of its answer.
pub fn usage(finish: &Finish) -> Value {
    let mut usage = prompt_usage(finish.n_prompt, finish.outcome.n_reused);
    usage["output_tokens"] = finish.outcome.n_generated.into();
    usage["output_tokens_details"] = json!({ "thinking_tokens": finish.n_reasoning });
    usage
}

/// Anthropic's name of the reason.
pub fn stop_reason(finish: &Finish) -> &'static str {
    match finish.reason {
        FinishReason::Length => "max_tokens",
        FinishReason::ContextFull => "model_context_window_exceeded",
        FinishReason::StopString => "stop_sequence",
        FinishReason::StopToken | FinishReason::Cancelled if finish.n_calls > 0 => "tool_use",
        FinishReason::StopToken | FinishReason::Cancelled => "end_turn",
    }
}
