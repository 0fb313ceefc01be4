//! Chunks of a chat completion: the role, deltas, the reason of the end, usage, `[DONE]`.

use std::sync::Arc;

use serde_json::{Value, json};

use super::chat::{Header, Style};
use super::logprobs::list;
use super::usage::{moeba, reason, timings, usage};
use crate::server::errors::{ApiError, Wire};
use crate::server::events::{Event, Finish, Piece};
use crate::server::service::Service;
use crate::server::sse::{Encoder, Frames};

pub struct ChatStream {
    header: Header,
    style: Style,
    n_prompt: usize,
    n_generated: usize,
    service: Arc<Service>,
}

impl ChatStream {
    pub fn new(
        header: Header,
        style: Style,
        n_prompt: usize,
        service: &Arc<Service>,
    ) -> ChatStream {
        ChatStream { header, style, n_prompt, n_generated: 0, service: service.clone() }
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

    fn text(&mut self, index: usize, piece: &Piece, delta: &Value, out: &mut Frames) {
        self.n_generated += piece.tokens.len();
        let mut chunk = self.chunk(index, delta, None);
        chunk["choices"][0]["logprobs"] = list(&piece.tokens, &self.service);
        out.data(&chunk);
    }

    fn finish(&mut self, index: usize, finish: &Finish, out: &mut Frames) {
        self.n_generated += finish.tokens.len();
        let mut chunk = self.chunk(index, &json!({}), Some(reason(finish)));
        chunk["moeba"] = moeba(finish);
        if self.style.has_timings || self.style.has_usage {
            chunk["timings"] = timings(finish);
        }
        out.data(&chunk);
    }

    fn progress(&self, index: usize, progress: &Value, out: &mut Frames) {
        let mut chunk = self.chunk(index, &json!({}), None);
        chunk["prompt_progress"] = progress.clone();
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
        match event {
            Event::Reasoning(piece) => {
                let delta = json!({ "reasoning_content": piece.text, "reasoning": piece.text });
                self.text(choice, piece, &delta, out);
            }
            Event::Content(piece) => {
                self.text(choice, piece, &json!({ "content": piece.text }), out);
            }
            Event::CallBegin { index, id, name } => {
                let function = json!({ "name": name, "arguments": "" });
                let call =
                    json!({ "index": index, "id": id, "type": "function", "function": function });
                out.data(&self.chunk(choice, &json!({ "tool_calls": [call] }), None));
            }
            Event::Arguments { index, text } => {
                let call = json!({ "index": index, "function": { "arguments": text } });
                out.data(&self.chunk(choice, &json!({ "tool_calls": [call] }), None));
            }
            Event::Finished(finish) => self.finish(choice, finish, out),
            Event::Started { n_reused, .. } if self.style.has_progress => {
                let (total, cache) = (self.n_prompt, *n_reused);
                let progress =
                    json!({ "total": total, "cache": cache, "processed": cache, "time_ms": 0 });
                self.progress(choice, &progress, out);
            }
            Event::Progress { n_done, n_total, n_reused, time } => {
                let progress = json!({
                    "total": n_total,
                    "cache": n_reused,
                    "processed": n_done,
                    "time_ms": time.as_millis() as u64,
                });
                self.progress(choice, &progress, out);
            }
            Event::Started { .. } | Event::Failed(_) => {}
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
