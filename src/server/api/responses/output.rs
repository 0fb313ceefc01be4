//! The items of an answer, put together from its events, and the events that tell of them. Whole
//! answers and streams have the same items.

use std::sync::Arc;

use serde_json::{Value, json};

use super::input::encrypted;
use super::tools::{Offered, Origin, shell_action};
use crate::engine::FinishReason;
use crate::server::api::custom::{InputReader, input};
use crate::server::api::logprobs::entries;
use crate::server::events::{Event, Finish, Piece, Token};
use crate::server::models::Lease;

/// An event of the wire: its type, and its other fields.
pub type WireEvent = (&'static str, Value);

/// How the items of an answer are written.
pub struct ItemStyle {
    pub offered: Offered,
    /// Reasoning comes as its own summary.
    pub has_summary: bool,
    /// Reasoning comes once more in a form that clients keep without looking into it.
    pub has_encrypted: bool,
    pub has_logprobs: bool,
}

/// The items so far.
pub struct Items {
    style: ItemStyle,
    service: Arc<Lease>,
    /// Ends the ids of items, so that they differ from those of other responses.
    suffix: String,
    done: Vec<Value>,
    open: Option<Open>,
    /// White space that is the beginning of a message, or nothing.
    space: Piece,
}

/// An item that goes on.
struct Open {
    id: String,
    kind: Kind,
    /// The text, or the arguments of a call.
    text: String,
    logprobs: Vec<Value>,
}

enum Kind {
    Reasoning,
    Message,
    Function { call_id: String, namespace: Option<String>, name: String },
    Custom { call_id: String, namespace: Option<String>, name: String, reader: InputReader },
    Shell { call_id: String },
}

impl Kind {
    fn prefix(&self) -> &'static str {
        match self {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Function { .. } => "fc",
            Kind::Custom { .. } => "ctc",
            Kind::Shell { .. } => "lsh",
        }
    }
}

/// Whether the answer was cut.
pub fn is_cut(finish: &Finish) -> bool {
    matches!(finish.reason, FinishReason::Length | FinishReason::ContextFull)
}

impl Items {
    /// `response_id` is the answer's.
    pub fn new(style: ItemStyle, response_id: &str, service: &Arc<Lease>) -> Items {
        let suffix = response_id.split_once('_').map_or(response_id, |(_, suffix)| suffix);
        Items {
            style,
            service: service.clone(),
            suffix: suffix.to_owned(),
            done: Vec::new(),
            open: None,
            space: Piece::default(),
        }
    }

    /// The items that are complete.
    pub fn done(&self) -> &[Value] {
        &self.done
    }

    /// Takes an event of the answer in; what it says to clients goes to `out`.
    pub fn push(&mut self, event: &Event, out: &mut Vec<WireEvent>) {
        match event {
            Event::Reasoning(piece) => {
                if !matches!(self.open, Some(Open { kind: Kind::Reasoning, .. })) {
                    self.begin(Kind::Reasoning, out);
                }
                self.add(&piece.text, &[], out);
            }
            Event::Content(piece) => self.content(piece, out),
            Event::CallBegin { id, name, .. } => {
                let call_id = id.clone();
                let kind = match self.style.offered.origin(name) {
                    Origin::Function { namespace, name } => {
                        Kind::Function { call_id, namespace, name }
                    }
                    Origin::Custom { namespace, name } => {
                        Kind::Custom { call_id, namespace, name, reader: InputReader::default() }
                    }
                    Origin::LocalShell => Kind::Shell { call_id },
                };
                self.begin(kind, out);
            }
            Event::Arguments { text, .. } => self.add(text, &[], out),
            Event::Finished(finish) => self.end(is_cut(finish), out),
            Event::Started { .. } | Event::Progress { .. } => {}
            Event::Embedded(_) | Event::Failed(_) => {}
        }
    }

    fn content(&mut self, piece: &Piece, out: &mut Vec<WireEvent>) {
        if matches!(self.open, Some(Open { kind: Kind::Message, .. })) {
            self.add(&piece.text, &piece.tokens, out);
            return;
        }
        self.space.text.push_str(&piece.text);
        self.space.tokens.extend(piece.tokens.iter().cloned());
        if self.space.text.trim().is_empty() {
            return;
        }
        let Piece { text, tokens } = std::mem::take(&mut self.space);
        self.begin(Kind::Message, out);
        // A message behind another item is no longer a line of the same text.
        let text = if self.done.is_empty() { text.as_str() } else { text.trim_start() };
        self.add(text, &tokens, out);
    }

    fn begin(&mut self, kind: Kind, out: &mut Vec<WireEvent>) {
        self.end(false, out);
        let id = format!("{}_{}{:02}", kind.prefix(), self.suffix, self.done.len());
        let open = Open { id, kind, text: String::new(), logprobs: Vec::new() };
        let index = self.done.len();
        let item = self.item(&open, "in_progress");
        out.push(("response.output_item.added", json!({ "output_index": index, "item": item })));
        match open.kind {
            Kind::Reasoning if self.style.has_summary => {
                let part = json!({ "type": "summary_text", "text": "" });
                let fields = json!({ "item_id": open.id, "output_index": index,
                    "summary_index": 0, "part": part });
                out.push(("response.reasoning_summary_part.added", fields));
            }
            Kind::Reasoning | Kind::Message => {
                let fields = json!({ "item_id": open.id, "output_index": index,
                    "content_index": 0, "part": self.part(&open) });
                out.push(("response.content_part.added", fields));
            }
            _ => {}
        }
        self.open = Some(open);
    }

    /// Adds to the open item.
    fn add(&mut self, text: &str, tokens: &[Token], out: &mut Vec<WireEvent>) {
        let Some(mut open) = self.open.take() else { return };
        let logprobs = match self.style.has_logprobs {
            true => entries(tokens, &self.service),
            false => Vec::new(),
        };
        open.text.push_str(text);
        let text = match &mut open.kind {
            Kind::Custom { reader, .. } => reader.push(text),
            _ => text.to_owned(),
        };
        let mut fields =
            json!({ "item_id": open.id, "output_index": self.done.len(), "delta": text });
        let name = match &open.kind {
            Kind::Reasoning if self.style.has_summary => {
                fields["summary_index"] = 0.into();
                Some("response.reasoning_summary_text.delta")
            }
            Kind::Reasoning => {
                fields["content_index"] = 0.into();
                Some("response.reasoning_text.delta")
            }
            Kind::Message => {
                fields["content_index"] = 0.into();
                fields["logprobs"] = logprobs.clone().into();
                Some("response.output_text.delta")
            }
            Kind::Function { .. } => Some("response.function_call_arguments.delta"),
            Kind::Custom { .. } => Some("response.custom_tool_call_input.delta"),
            Kind::Shell { .. } => None,
        };
        open.logprobs.extend(logprobs);
        out.extend(name.filter(|_| !text.is_empty()).map(|name| (name, fields)));
        self.open = Some(open);
    }

    /// Ends the open item. `is_cut`: the answer has ended before the item has.
    fn end(&mut self, is_cut: bool, out: &mut Vec<WireEvent>) {
        self.space = Piece::default();
        let Some(mut open) = self.open.take() else { return };
        let is_json = || serde_json::from_str::<serde::de::IgnoredAny>(&open.text).is_ok();
        let is_text = matches!(open.kind, Kind::Reasoning | Kind::Message);
        let is_whole = !is_cut || !is_text && is_json();
        let (id, index) = (open.id.clone(), self.done.len());
        let place = |mut fields: Value| {
            fields["item_id"] = id.as_str().into();
            fields["output_index"] = index.into();
            fields
        };
        if let Kind::Custom { reader, .. } = &mut open.kind {
            let rest = reader.finish();
            if !rest.is_empty() {
                let fields = place(json!({ "delta": rest }));
                out.push(("response.custom_tool_call_input.delta", fields));
            }
        }
        let (text, part) = (&open.text, self.part(&open));
        match &open.kind {
            Kind::Reasoning if self.style.has_summary => {
                let part = json!({ "type": "summary_text", "text": text });
                let fields = place(json!({ "summary_index": 0, "text": text }));
                out.push(("response.reasoning_summary_text.done", fields));
                let fields = place(json!({ "summary_index": 0, "part": part }));
                out.push(("response.reasoning_summary_part.done", fields));
            }
            Kind::Reasoning => {
                let fields = place(json!({ "content_index": 0, "text": text }));
                out.push(("response.reasoning_text.done", fields));
                let fields = place(json!({ "content_index": 0, "part": part }));
                out.push(("response.content_part.done", fields));
            }
            Kind::Message => {
                let logprobs = &open.logprobs;
                let fields =
                    place(json!({ "content_index": 0, "text": text, "logprobs": logprobs }));
                out.push(("response.output_text.done", fields));
                let fields = place(json!({ "content_index": 0, "part": part }));
                out.push(("response.content_part.done", fields));
            }
            Kind::Function { name, .. } => {
                let fields = place(json!({ "name": name, "arguments": text }));
                out.push(("response.function_call_arguments.done", fields));
            }
            Kind::Custom { .. } => {
                let fields = place(json!({ "input": input(text) }));
                out.push(("response.custom_tool_call_input.done", fields));
            }
            Kind::Shell { .. } => {}
        }
        let item = self.item(&open, if is_whole { "completed" } else { "incomplete" });
        out.push(("response.output_item.done", json!({ "output_index": index, "item": item })));
        self.done.push(item);
    }

    /// The one part of a text.
    fn part(&self, open: &Open) -> Value {
        match open.kind {
            Kind::Reasoning => json!({ "type": "reasoning_text", "text": open.text }),
            _ => json!({ "type": "output_text", "annotations": [], "logprobs": open.logprobs,
                "text": open.text }),
        }
    }

    /// The item as it is now.
    fn item(&self, open: &Open, status: &str) -> Value {
        let is_new = status == "in_progress";
        let mut item = match &open.kind {
            Kind::Reasoning => {
                let summary = json!([{ "type": "summary_text", "text": open.text }]);
                let (content, summary) = match (is_new, self.style.has_summary) {
                    (true, _) => (json!([]), json!([])),
                    (false, true) => (json!([]), summary),
                    (false, false) => (json!([self.part(open)]), json!([])),
                };
                let mut item =
                    json!({ "type": "reasoning", "summary": summary, "content": content });
                if self.style.has_encrypted && !is_new {
                    item["encrypted_content"] = encrypted(&open.text).into();
                }
                item
            }
            Kind::Message => {
                let content = if is_new { json!([]) } else { json!([self.part(open)]) };
                json!({ "type": "message", "role": "assistant", "content": content })
            }
            Kind::Function { call_id, name, .. } => json!({ "type": "function_call",
                "call_id": call_id, "name": name, "arguments": open.text }),
            Kind::Custom { call_id, name, .. } => json!({ "type": "custom_tool_call",
                "call_id": call_id, "name": name, "input": input(&open.text) }),
            Kind::Shell { call_id } => json!({ "type": "local_shell_call",
                "call_id": call_id, "action": shell_action(&open.text) }),
        };
        if let Kind::Function { namespace: Some(namespace), .. }
        | Kind::Custom { namespace: Some(namespace), .. } = &open.kind
        {
            item["namespace"] = namespace.as_str().into();
        }
        item["id"] = open.id.as_str().into();
        item["status"] = status.into();
        item
    }
}
