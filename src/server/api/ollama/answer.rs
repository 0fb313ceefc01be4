//! Answers as Ollama writes them: objects with a part of the text each, and one with the figures.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Map, Value, json};

use super::Shape;
use super::models::time;
use crate::engine::FinishReason;
use crate::server::api::logprobs::entries;
use crate::server::collect::{Call, Choice};
use crate::server::errors::{ApiError, Wire};
use crate::server::events::{Event, Finish, Token};
use crate::server::models::Lease;
use crate::server::sse::{Encoder, Frames};

pub struct Writer {
    shape: Shape,
    model: String,
    start: Instant,
    /// The time until the model was there.
    load_time: Duration,
    /// The call whose arguments come.
    call: Option<Call>,
    n_calls: usize,
    service: Arc<Lease>,
}

/// The part of an answer that an object tells.
#[derive(Default)]
struct AnswerPart<'a> {
    content: &'a str,
    thinking: &'a str,
    calls: Vec<Value>,
    tokens: &'a [Token],
}

impl Writer {
    pub fn new(shape: Shape, start: Instant, load_time: Duration, service: &Arc<Lease>) -> Writer {
        let (model, service) = (service.info.name().to_owned(), service.clone());
        Writer { shape, model, start, load_time, call: None, n_calls: 0, service }
    }

    fn object(&self, part: AnswerPart<'_>, is_done: bool) -> Map<String, Value> {
        let logprobs = entries(part.tokens, &self.service);
        let mut map = object(self.shape, &self.model, part, is_done);
        if !logprobs.is_empty() {
            map.insert("logprobs".into(), logprobs.into());
        }
        map
    }

    /// The answer to a request without a text.
    pub fn empty(&self, reason: &str) -> Value {
        empty(self.shape, &self.model, reason)
    }

    /// The answer in one object.
    pub fn whole(&mut self, choice: &Choice, finish: &Finish) -> Value {
        let calls = choice.calls.iter().filter_map(|call| self.written(call)).collect();
        let (content, thinking) = (choice.content.as_str(), choice.reasoning.as_str());
        self.last(AnswerPart { content, thinking, calls, tokens: &choice.tokens }, finish)
    }

    /// An object with the reason of the end and the figures.
    fn last(&self, part: AnswerPart<'_>, finish: &Finish) -> Value {
        let outcome = &finish.outcome;
        let mut object = self.object(part, true);
        let figures = json!({
            "done_reason": match finish.reason {
                FinishReason::Length | FinishReason::ContextFull => "length",
                _ => "stop",
            },
            "total_duration": ns(self.start.elapsed()),
            "load_duration": ns(self.load_time + finish.queue_time),
            "prompt_eval_count": finish.n_prompt,
            "prompt_eval_duration": ns(outcome.prompt_time),
            "eval_count": outcome.n_generated,
            "eval_duration": ns(outcome.decode_time),
        });
        object.extend(figures.as_object().cloned().unwrap_or_default());
        Value::Object(object)
    }

    /// A call as Ollama has it; `None` if the answer was cut within its arguments.
    fn written(&mut self, call: &Call) -> Option<Value> {
        let arguments = if call.arguments.is_empty() { "{}" } else { &call.arguments };
        let arguments: Map<String, Value> = serde_json::from_str(arguments).ok()?;
        let index = self.n_calls;
        self.n_calls += 1;
        let function = json!({ "index": index, "name": call.name, "arguments": arguments });
        Some(json!({ "id": call.id, "function": function }))
    }

    /// Writes the call whose arguments are complete by now.
    fn end_call(&mut self, out: &mut Frames) {
        let call = self.call.take();
        if let Some(call) = call.and_then(|call| self.written(&call)) {
            self.part(AnswerPart { calls: vec![call], ..AnswerPart::default() }, out);
        }
    }

    fn part(&self, part: AnswerPart<'_>, out: &mut Frames) {
        out.line(&Value::Object(self.object(part, false)));
    }
}

fn object(shape: Shape, model: &str, part: AnswerPart<'_>, is_done: bool) -> Map<String, Value> {
    let mut map = Map::new();
    map.insert("model".into(), model.into());
    map.insert("created_at".into(), time(SystemTime::now()).into());
    let mut text = Map::new();
    let content = match shape {
        Shape::Chat => "content",
        Shape::Generate => "response",
    };
    text.insert(content.into(), part.content.into());
    if !part.thinking.is_empty() {
        text.insert("thinking".into(), part.thinking.into());
    }
    if !part.calls.is_empty() {
        text.insert("tool_calls".into(), part.calls.into());
    }
    match shape {
        Shape::Chat => {
            text.shift_insert(0, "role".into(), "assistant".into());
            map.insert("message".into(), text.into());
        }
        Shape::Generate => map.extend(text),
    }
    map.insert("done".into(), is_done.into());
    map
}

/// The answer of this model to a request without a text.
pub fn empty(shape: Shape, model: &str, reason: &str) -> Value {
    let mut object = object(shape, model, AnswerPart::default(), true);
    object.insert("done_reason".into(), reason.into());
    Value::Object(object)
}

pub fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Encoder for Writer {
    fn begin(&mut self, _out: &mut Frames) {}

    fn event(&mut self, _choice: usize, event: &Event, out: &mut Frames) {
        match event {
            Event::Reasoning(piece) => {
                self.part(AnswerPart { thinking: &piece.text, ..AnswerPart::default() }, out);
            }
            Event::Content(piece) => {
                self.end_call(out);
                let (content, tokens) = (piece.text.as_str(), piece.tokens.as_slice());
                self.part(AnswerPart { content, tokens, ..AnswerPart::default() }, out);
            }
            Event::CallBegin { id, name, .. } => {
                self.end_call(out);
                let (id, name) = (id.clone(), name.clone());
                self.call = Some(Call { id, name, arguments: String::new() });
            }
            Event::Arguments { text, .. } => {
                if let Some(call) = &mut self.call {
                    call.arguments.push_str(text);
                }
            }
            Event::Finished(finish) => {
                self.end_call(out);
                out.line(&self.last(AnswerPart::default(), finish));
            }
            Event::Started { .. } | Event::Progress { .. } => {}
            Event::Embedded(_) | Event::Failed(_) => {}
        }
    }

    fn end(&mut self, _finishes: &[Finish], _out: &mut Frames) {}

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        out.line(&error.body(Wire::Ollama, ""));
    }

    /// Lines have no comments.
    fn ping(&mut self, out: &mut Frames) {
        self.part(AnswerPart::default(), out);
    }

    fn content_type(&self) -> &'static str {
        "application/x-ndjson"
    }
}
