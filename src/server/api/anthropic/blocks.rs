//! The content of a message, block by block in the order in which the model writes it.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value, json};

use crate::server::events::Event;

/// All signatures begin with it. Thinking that was not shown follows, as in Anthropic's own, so
/// that it is part of the next prompt.
const SIGNER: &str = "moeba";

fn signature(hidden: &str) -> String {
    BASE64_STANDARD.encode([SIGNER, hidden].concat())
}

/// The thinking that a signature has; any other signature has none.
pub fn hidden(signature: &str) -> Option<String> {
    let bytes = BASE64_STANDARD.decode(signature).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    text.strip_prefix(SIGNER).map(str::to_owned)
}

/// A step of a content.
#[derive(Debug)]
pub enum Step {
    /// A block without its content.
    Begin(Value),
    Delta(Value),
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    ToolUse,
}

/// Makes steps of events.
#[derive(Debug, Default)]
pub struct Blocks {
    omits_thinking: bool,
    /// The kind of the block that is being written.
    open: Option<Kind>,
    /// White space that is the beginning of a text, if one follows.
    space: String,
    /// Thinking that is not shown.
    hidden: String,
}

impl Blocks {
    /// Blocks of thinking are empty if it is omitted.
    pub fn new(omits_thinking: bool) -> Blocks {
        Blocks { omits_thinking, ..Blocks::default() }
    }

    pub fn push(&mut self, event: &Event) -> Vec<Step> {
        let mut steps = Vec::new();
        match event {
            Event::Reasoning(piece) => self.thinking(&piece.text, &mut steps),
            Event::Content(piece) => self.text(&piece.text, &mut steps),
            Event::CallBegin { id, name, .. } => {
                let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                self.begin(Kind::ToolUse, block, &mut steps);
            }
            Event::Arguments { text, .. } => {
                let delta = json!({ "type": "input_json_delta", "partial_json": text });
                steps.push(Step::Delta(delta));
            }
            Event::Finished(_) => self.end(&mut steps),
            Event::Started { .. } | Event::Progress { .. } => {}
            Event::Embedded(_) | Event::Failed(_) => {}
        }
        steps
    }

    fn begin(&mut self, kind: Kind, block: Value, steps: &mut Vec<Step>) {
        self.end(steps);
        self.open = Some(kind);
        self.space.clear();
        steps.push(Step::Begin(block));
    }

    fn end(&mut self, steps: &mut Vec<Step>) {
        let Some(kind) = self.open.take() else { return };
        if kind == Kind::Thinking {
            let signature = signature(&std::mem::take(&mut self.hidden));
            let delta = json!({ "type": "signature_delta", "signature": signature });
            steps.push(Step::Delta(delta));
        }
        steps.push(Step::End);
    }

    fn thinking(&mut self, text: &str, steps: &mut Vec<Step>) {
        if self.open != Some(Kind::Thinking) {
            let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
            self.begin(Kind::Thinking, block, steps);
        }
        match self.omits_thinking {
            true => self.hidden.push_str(text),
            false => {
                steps.push(Step::Delta(json!({ "type": "thinking_delta", "thinking": text })));
            }
        }
    }

    /// A text of nothing but white space, as between two calls, is no block.
    fn text(&mut self, text: &str, steps: &mut Vec<Step>) {
        if self.open != Some(Kind::Text) {
            self.space.push_str(text);
            if text.trim().is_empty() {
                return;
            }
            let space = std::mem::take(&mut self.space);
            self.begin(Kind::Text, json!({ "type": "text", "text": "" }), steps);
            steps.push(Step::Delta(json!({ "type": "text_delta", "text": space })));
            return;
        }
        steps.push(Step::Delta(json!({ "type": "text_delta", "text": text })));
    }
}

/// The content as a whole.
#[derive(Debug, Default)]
pub struct Content {
    list: Vec<Value>,
    /// The input of the call that is being written.
    input: String,
}

impl Content {
    pub fn add(&mut self, step: Step) {
        match (step, self.list.last_mut()) {
            (Step::Begin(block), _) => {
                self.list.push(block);
                self.input.clear();
            }
            (Step::Delta(delta), Some(block)) => {
                for name in ["text", "thinking", "signature"] {
                    if let (Some(Value::String(all)), Some(text)) =
                        (block.get_mut(name), delta[name].as_str())
                    {
                        all.push_str(text);
                    }
                }
                self.input.push_str(delta["partial_json"].as_str().unwrap_or_default());
            }
            // Arguments that were cut are left out: an object has no other way to say so.
            (Step::End, Some(block)) if block["type"] == "tool_use" => {
                let input: Map<String, Value> =
                    serde_json::from_str(&self.input).unwrap_or_default();
                block["input"] = input.into();
            }
            (Step::Delta(_) | Step::End, _) => {}
        }
    }

    pub fn blocks(self) -> Vec<Value> {
        self.list
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::events::Piece;

    fn content(omits_thinking: bool, events: &[Event]) -> Value {
        let (mut blocks, mut content) = (Blocks::new(omits_thinking), Content::default());
        events.iter().flat_map(|event| blocks.push(event)).for_each(|step| content.add(step));
        let mut rest = Vec::new();
        blocks.end(&mut rest);
        rest.into_iter().for_each(|step| content.add(step));
        content.blocks().into()
    }

    fn tool(id: &str, input: Value) -> Value {
        json!({ "type": "tool_use", "id": id, "name": "f", "input": input })
    }

    fn piece(text: &str) -> Piece {
        Piece { text: text.into(), tokens: Vec::new() }
    }

    #[test]
    fn blocks_stand_in_the_order_of_their_events() {
        let call = |index, id: &str| Event::CallBegin { index, id: id.into(), name: "f".into() };
        let arguments = |index, text: &str| Event::Arguments { index, text: text.into() };
        let events = [
            Event::Reasoning(piece("h")),
            Event::Reasoning(piece("m")),
            Event::Content(piece("\n")),
            call(0, "a"),
            arguments(0, "{\"n\":"),
            arguments(0, "1}"),
            Event::Content(piece("\n")),
            Event::Content(piece("So")),
            Event::Content(piece(" ")),
            call(1, "b"),
            arguments(1, "{\"n\":"),
        ];
        for (omits_thinking, thinking, signature) in
            [(false, "hm", "bW9lYmE="), (true, "", "bW9lYmFobQ==")]
        {
            let expected = json!([
                { "type": "thinking", "thinking": thinking, "signature": signature },
                tool("a", json!({ "n": 1 })),
                { "type": "text", "text": "\nSo " },
                tool("b", json!({})),
            ]);
            assert_eq!(content(omits_thinking, &events), expected);
        }
    }

    #[test]
    fn signatures_keep_what_is_not_shown() {
        assert_eq!(hidden(&signature("hm\né")).as_deref(), Some("hm\né"));
        assert_eq!(hidden(&signature("")).as_deref(), Some(""));
        for foreign in ["", "EqQBCgIYAhIM", "not base64", "//79"] {
            assert_eq!(hidden(foreign), None, "{foreign}");
        }
    }
}
