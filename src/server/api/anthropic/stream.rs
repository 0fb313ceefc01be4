//! Events of a message: its start, each block's start, deltas and stop, the reason of the end, and
//! the stop.

use serde_json::json;

use super::answer::{message, prompt_usage, stop_reason, usage};
use super::blocks::{Blocks, Step};
use crate::server::errors::{ApiError, Wire};
use crate::server::events::{Event, Finish};
use crate::server::sse::{Encoder, Frames};

pub struct MessageStream {
    id: String,
    model: String,
    request_id: String,
    n_prompt: usize,
    is_started: bool,
    blocks: Blocks,
    /// The number of the block that is open, or of the next one.
    index: usize,
}

impl MessageStream {
    pub fn new(
        id: String,
        model: String,
        request_id: String,
        n_prompt: usize,
        blocks: Blocks,
    ) -> MessageStream {
        MessageStream { id, model, request_id, n_prompt, is_started: false, blocks, index: 0 }
    }

    fn start(&mut self, n_reused: usize, out: &mut Frames) {
        if std::mem::replace(&mut self.is_started, true) {
            return;
        }
        let usage = prompt_usage(self.n_prompt, n_reused);
        let message = message(&self.id, &self.model, Vec::new(), usage);
        out.event("message_start", &json!({ "type": "message_start", "message": message }));
    }

    fn step(&mut self, step: Step, out: &mut Frames) {
        let (name, mut data) = match step {
            Step::Begin(block) => ("content_block_start", json!({ "content_block": block })),
            Step::Delta(delta) => ("content_block_delta", json!({ "delta": delta })),
            Step::End => ("content_block_stop", json!({})),
        };
        data["type"] = name.into();
        data["index"] = self.index.into();
        out.event(name, &data);
        self.index += usize::from(name == "content_block_stop");
    }

    fn finish(&self, finish: &Finish, out: &mut Frames) {
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
            Event::Finished(finish) => self.start(finish.outcome.n_reused, out),
            _ => {}
        }
        for step in self.blocks.push(event) {
            self.step(step, out);
        }
        if let Event::Finished(finish) = event {
            self.finish(finish, out);
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
    use serde_json::Value;

    fn piece(text: &str) -> Piece {
        Piece { text: text.into(), tokens: Vec::new() }
    }

    /// The events that these lead to, short.
    fn written(events: &[Event]) -> Vec<String> {
        let mut stream =
            MessageStream::new("msg_1".into(), "m".into(), "req_1".into(), 9, Blocks::new(false));
        let mut out = Frames::default();
        events.iter().for_each(|event| stream.event(0, event, &mut out));
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
        ];
        assert_eq!(written(&events), expected);
    }
}
