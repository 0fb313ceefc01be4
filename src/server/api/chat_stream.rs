//! Chunks of a chat completion: the role, deltas, the reason of the end, usage, `[DONE]`.

use std::sync::Arc;

use serde_json::{Value, json};

use super::chat::{Header, Style, is_custom};
use super::custom::InputReader;
use super::logprobs::list;
use super::native::Told;
use super::usage::{Live, moeba, reason, timings, usage};
use crate::server::errors::{ApiError, Wire};
use crate::server::events::{Event, Finish, Piece};
use crate::server::models::Lease;
use crate::server::sse::{Encoder, Frames};

pub struct ChatStream {
    header: Header,
    style: Style,
    /// The members of `__verbose`, if it is asked for.
    verbose: Option<Told>,
    n_prompt: usize,
    n_generated: usize,
    /// The states of the choices.
    states: Vec<State>,
    service: Arc<Lease>,
}

/// A choice while it comes.
struct State {
    live: Live,
    /// The number of the custom tool's call that is open, and the reader of its text.
    custom: Option<(usize, InputReader)>,
}

impl ChatStream {
    pub fn new(
        header: Header,
        style: Style,
        verbose: Option<Told>,
        n_prompt: usize,
        service: &Arc<Lease>,
    ) -> ChatStream {
        let state = |_| State { live: Live::new(n_prompt), custom: None };
        let states = (0..style.n_choices).map(state).collect();
        let service = service.clone();
        ChatStream { header, style, verbose, n_prompt, n_generated: 0, states, service }
    }

    fn chunk(&self, index: usize, delta: &Value, reason: Option<&str>) -> Value {
        let choice = json!({
            "index": index,
            "delta": delta,
            "logprobs": null,
            "finish_reason": reason,
        });
        let mut chunk = self.header.object("chat.completion.chunk", json!([choice]));
        if self.style.has_usage_always {
            chunk.insert(
                "usage".into(),
                json!({
                    "prompt_tokens": self.n_prompt,
                    "completion_tokens": self.n_generated,
                    "total_tokens": self.n_prompt + self.n_generated,
                }),
            );
        }
        Value::Object(chunk)
    }

    /// A chunk of an answer that goes on, with the figures so far if they are asked for.
    fn delta(&self, index: usize, delta: &Value) -> Value {
        let mut chunk = self.chunk(index, delta, None);
        if self.style.has_timings {
            chunk["timings"] = self.states[index].live.timings();
        }
        chunk
    }

    fn text(&mut self, index: usize, piece: &Piece, delta: &Value, out: &mut Frames) {
        self.n_generated += piece.tokens.len();
        let mut chunk = self.delta(index, delta);
        chunk["choices"][0]["logprobs"] = list(&piece.tokens, &self.service);
        out.data(&chunk);
    }

    fn call(&self, index: usize, call: &Value, out: &mut Frames) {
        out.data(&self.delta(index, &json!({ "tool_calls": [call] })));
    }

    fn begin_call(&mut self, choice: usize, index: usize, id: &str, name: &str, out: &mut Frames) {
        let call = match is_custom(&self.style.tools, name) {
            true => {
                self.states[choice].custom = Some((index, InputReader::default()));
                let custom = json!({ "name": name, "input": "" });
                json!({ "index": index, "id": id, "type": "custom", "custom": custom })
            }
            false => {
                let function = json!({ "name": name, "arguments": "" });
                json!({ "index": index, "id": id, "type": "function", "function": function })
            }
        };
        self.call(choice, &call, out);
    }

    fn arguments(&mut self, choice: usize, index: usize, text: &str, out: &mut Frames) {
        let call = match &mut self.states[choice].custom {
            Some((_, reader)) => {
                let text = reader.push(text);
                if text.is_empty() {
                    return;
                }
                json!({ "index": index, "custom": { "input": text } })
            }
            None => json!({ "index": index, "function": { "arguments": text } }),
        };
        self.call(choice, &call, out);
    }

    /// Writes what is left of a custom tool's call.
    fn end_call(&mut self, choice: usize, out: &mut Frames) {
        let Some((index, mut reader)) = self.states[choice].custom.take() else { return };
        let rest = reader.finish();
        if !rest.is_empty() {
            self.call(choice, &json!({ "index": index, "custom": { "input": rest } }), out);
        }
    }

    fn finish(&mut self, index: usize, finish: &Finish, out: &mut Frames) {
        self.n_generated += finish.tokens.len();
        let mut chunk = self.chunk(index, &json!({}), Some(reason(finish)));
        chunk["moeba"] = moeba(finish);
        if self.style.has_timings || self.style.has_usage {
            chunk["timings"] = timings(finish);
        }
        if let Some(verbose) = &self.verbose {
            chunk["__verbose"] = verbose.object(index, 0, "", &[], finish);
        }
        out.data(&chunk);
    }
}

impl Encoder for ChatStream {
    fn begin(&mut self, out: &mut Frames) {
        for index in 0..self.style.n_choices {
            let delta = json!({ "role": "assistant", "content": null });
            out.data(&self.chunk(index, &delta, None));
        }
    }

    fn event(&mut self, choice: usize, event: &Event, out: &mut Frames) {
        let progress = self.states[choice].live.see(event);
        if let Some(progress) = progress.filter(|_| self.style.has_progress) {
            let mut chunk = self.delta(choice, &json!({}));
            chunk["prompt_progress"] = progress;
            out.data(&chunk);
        }
        if !matches!(event, Event::Arguments { .. }) {
            self.end_call(choice, out);
        }
        match event {
            Event::Reasoning(piece) => {
                let delta = json!({ "reasoning_content": piece.text, "reasoning": piece.text });
                self.text(choice, piece, &delta, out);
            }
            Event::Content(piece) => {
                self.text(choice, piece, &json!({ "content": piece.text }), out);
            }
            Event::CallBegin { index, id, name } => {
                self.begin_call(choice, *index, id, name, out);
            }
            Event::Arguments { index, text } => self.arguments(choice, *index, text, out),
            Event::Finished(finish) => self.finish(choice, finish, out),
            Event::Started { .. } | Event::Progress { .. } => {}
            Event::Embedded(_) | Event::Failed(_) => {}
        }
    }

    fn end(&mut self, finishes: &[Finish], out: &mut Frames) {
        if self.style.has_usage {
            let mut chunk = self.header.object("chat.completion.chunk", json!([]));
            chunk.insert("usage".into(), usage(finishes, self.style.n_choices));
            if let Some(first) = finishes.first() {
                chunk.insert("timings".into(), timings(first));
            }
            out.data(&Value::Object(chunk));
        }
        out.text("[DONE]");
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.body(Wire::OpenAi, &self.header.id));
    }
}
