//! Events of a message: its start, each block's start, deltas and stop, the reason of the end, and
//! the stop.

use serde_json::{Value, json};

use super::answer::{SIGNATURE, message, prompt_usage, stop_reason, usage};
use crate::server::errors::{ApiError, Wire};
use crate::server::events::{Event, Finish};
use crate::server::sse::{Encoder, Frames};

/// The kind of the block that is being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    ToolUse,
}

pub struct MessageStream {
    id: String,
    model: String,
    request_id: String,
    n_prompt: usize,
    is_started: bool,
    /// The number of the block that is open, or of the next one.
    index: usize,
    open: Option<Block>,
    /// White space that is the beginning of a text, if one follows.
    space: String,
}

impl MessageStream {
    pub fn new(id: String, model: String, request_id: String, n_prompt: usize) -> MessageStream {
        MessageStream {
            id,
            model,
            request_id,
            n_prompt,
            is_started: false,
            index: 0,
            open: None,
            space: String::new(),
        }
    }

    fn start(&mut self, n_reused: usize, out: &mut Frames) {
        if std::mem::replace(&mut self.is_started, true) {
            return;
        }
        let usage = prompt_usage(self.n_prompt, n_reused);
        let message = message(&self.id, &self.model, Vec::new(), usage);
        out.event("message_start", &json!({ "type": "message_start", "message": message }));
    }

    fn begin_block(&mut self, kind: Block, block: &Value, out: &mut Frames) {
        self.end_block(out);
        self.open = Some(kind);
        self.space.clear();
        out.event(
            "content_block_start",
            &json!({ "type": "content_block_start", "index": self.index, "content_block": block }),
        );
    }

    fn delta(&self, delta: &Value, out: &mut Frames) {
        out.event(
            "content_block_delta",
            &json!({ "type": "content_block_delta", "index": self.index, "delta": delta }),
        );
    }

    fn end_block(&mut self, out: &mut Frames) {
        let Some(kind) = self.open.take() else { return };
        if kind == Block::Thinking {
            self.delta(&json!({ "type": "signature_delta", "signature": SIGNATURE }), out);
        }
        let stop = json!({ "type": "content_block_stop", "index": self.index });
        out.event("content_block_stop", &stop);
        self.index += 1;
    }

    fn thinking(&mut self, text: &str, out: &mut Frames) {
        if self.open != Some(Block::Thinking) {
            let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
            self.begin_block(Block::Thinking, &block, out);
        }
        self.delta(&json!({ "type": "thinking_delta", "thinking": text }), out);
    }

    /// A text of nothing but white space, as between two calls, is no block.
    fn text(&mut self, text: &str, out: &mut Frames) {
        if self.open == Some(Block::Text) {
            self.delta(&json!({ "type": "text_delta", "text": text }), out);
            return;
        }
        self.space.push_str(text);
        if text.trim().is_empty() {
            return;
        }
        let text = std::mem::take(&mut self.space);
        self.begin_block(Block::Text, &json!({ "type": "text", "text": "" }), out);
        self.delta(&json!({ "type": "text_delta", "text": text }), out);
    }

    fn finish(&mut self, finish: &Finish, out: &mut Frames) {
        self.start(finish.outcome.n_reused, out);
        self.end_block(out);
        let delta = json!({ "stop_reason": stop_reason(finish), "stop_sequence": finish.stop });
        let usage = usage(finish);
        out.event(
            "message_delta",
            &json!({ "type": "message_delta", "delta": delta, "usage": usage }),
        );
    }
}

impl Encoder for MessageStream {
    /// The message starts when it is known what a cache had of its prompt.
    fn begin(&mut self, _out: &mut Frames) {}

    fn event(&mut self, _choice: usize, event: &Event, out: &mut Frames) {
        match event {
            Event::Started { n_reused, .. } => self.start(*n_reused, out),
            Event::Reasoning(piece) => self.thinking(&piece.text, out),
            Event::Content(piece) => self.text(&piece.text, out),
            Event::CallBegin { id, name, .. } => {
                let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                self.begin_block(Block::ToolUse, &block, out);
            }
            Event::Arguments { text, .. } => {
                self.delta(&json!({ "type": "input_json_delta", "partial_json": text }), out);
            }
            Event::Finished(finish) => self.finish(finish, out),
            Event::Progress { .. } | Event::Failed(_) => {}
        }
    }

    fn end(&mut self, _finishes: &[Finish], out: &mut Frames) {
        out.event("message_stop", &json!({ "type": "message_stop" }));
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        out.event("error", &error.body(Wire::Anthropic, &self.request_id));
    }

    fn ping(&mut self, out: &mut Frames) {
        out.event("ping", &json!({ "type": "ping" }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::events::Piece;

    fn piece(text: &str) -> Piece {
        Piece { text: text.into(), tokens: Vec::new() }
    }

    /// The events that these lead to, short.
    fn written(events: &[Event]) -> Vec<String> {
        let mut stream = MessageStream::new("msg_1".into(), "m".into(), "req_1".into(), 9);
        let mut out = Frames::default();
        events.iter().for_each(|event| stream.event(0, event, &mut out));
        stream.end_block(&mut out);
        let text = String::from_utf8(out.take().to_vec()).unwrap();
        let frames = text.split_terminator("\n\n").map(|frame| {
            let (name, data) = frame.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            let name = name.strip_prefix("event: ").unwrap();
            assert_eq!(data["type"], name);
            let kind = data["content_block"]["type"].as_str().or(data["delta"]["type"].as_str());
            let delta = data["delta"].as_object().into_iter().flatten().nth(1);
            let text = delta.and_then(|(_, value)| value.as_str()).unwrap_or_default();
            let what = kind.unwrap_or_default();
            format!("{} {name} {what} {text}", data["index"]).trim().to_owned()
        });
        frames.collect()
    }

    #[test]
    fn blocks_follow_each_other() {
        let call = |index, id: &str| Event::CallBegin { index, id: id.into(), name: "f".into() };
        let arguments = |index, text: &str| Event::Arguments { index, text: text.into() };
        let events = [
            Event::Started { slot: 0, n_reused: 4 },
            Event::Reasoning(piece("hm")),
            Event::Content(piece("\n")),
            Event::Content(piece("So")),
            Event::Content(piece(" ")),
            call(0, "a"),
            arguments(0, "{\"n\""),
            arguments(0, ":1}"),
            Event::Content(piece("\n")),
            call(1, "b"),
        ];
        let expected = [
            "null message_start",
            "0 content_block_start thinking",
            "0 content_block_delta thinking_delta hm",
            "0 content_block_delta signature_delta bW9lYmE=",
            "0 content_block_stop",
            "1 content_block_start text",
            "1 content_block_delta text_delta \nSo",
            "1 content_block_delta text_delta",
            "1 content_block_stop",
            "2 content_block_start tool_use",
            "2 content_block_delta input_json_delta {\"n\"",
            "2 content_block_delta input_json_delta :1}",
            "2 content_block_stop",
            "3 content_block_start tool_use",
            "3 content_block_stop",
        ];
        assert_eq!(written(&events), expected);
    }
}
