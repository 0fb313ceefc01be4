//! Which way of writing calls a template belongs to. A row of the table is taken if its signs are
//! in the template's source, and if a conversation with calls, rendered by the template, is read
//! back as it was.

use super::ids::call_id;
use super::table::{Call, Ids, ToolFormat, formats, generic};
use super::write::{ToWrite, spaced};
use super::{Calls, Event, Scanner, Tools};
use crate::chat::ChatTemplate;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// How a model is told of tools and how it calls them.
#[derive(Clone, Copy, Debug)]
pub struct ToolSupport {
    pub format: &'static ToolFormat,
    /// The template renders tools, calls and results. Otherwise they are texts.
    pub is_native: bool,
    /// A message may have several calls.
    pub is_parallel: bool,
    pub(super) shape: Shape,
    /// The template renders messages of the system.
    pub(super) has_system: bool,
}

/// How the template wants a message with calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Arguments are JSON text, not objects.
    pub text_arguments: bool,
    /// Without content it is null, not an empty text.
    pub null_content: bool,
}

const QUESTION: &str = "Is seven odd?";

/// The function that the conversation calls.
const NAME: &str = "is_odd";

fn tools() -> Tools {
    let parameters = json!({ "type": "object", "required": ["word", "number"], "properties": {
        "word": { "type": "string", "description": "The word." },
        "number": { "type": "integer", "description": "The number." } } });
    let function = json!({ "name": NAME, "description": "Odd or not.", "parameters": parameters });
    let tools = json!([{ "type": "function", "function": function }]);
    Tools::parse(&tools).expect("the tools are well-formed")
}

fn arguments(index: usize) -> Map<String, Value> {
    Map::from_iter([("word".into(), json!("sé \"7\" <b>")), ("number".into(), (7 + index).into())])
}

/// A question, `n` calls and their results.
fn conversation(ids: Ids, n: usize, shape: Shape) -> Value {
    let id = |index| call_id(ids, 0, index, NAME);
    let call = |index| {
        let arguments = Value::Object(arguments(index));
        let arguments = if shape.text_arguments { spaced(&arguments).into() } else { arguments };
        let function = json!({ "name": NAME, "arguments": arguments });
        json!({ "id": id(index), "type": "function", "function": function })
    };
    let content = if shape.null_content { Value::Null } else { "".into() };
    let calls: Vec<Value> = (0..n).map(call).collect();
    let mut messages = vec![
        json!({ "role": "user", "content": QUESTION }),
        json!({ "role": "assistant", "content": content, "tool_calls": calls }),
    ];
    messages.extend((0..n).map(|index| {
        json!({ "role": "tool", "tool_call_id": id(index), "name": NAME, "content": "yes" })
    }));
    Value::Array(messages)
}

impl ChatTemplate {
    /// How the model that this template belongs to calls tools.
    pub fn tool_support(&self) -> ToolSupport {
        let source = self.tool_use_source.as_deref().unwrap_or(&self.source);
        let signed = |f: &&ToolFormat| f.signs.iter().all(|sign| source.contains(sign));
        let fitting: Vec<_> = formats()
            .iter()
            .filter(signed)
            .filter_map(|format| {
                self.shape_for(format).map(|(shape, exact)| (format, shape, exact))
            })
            .collect();
        let best = fitting.iter().find(|(.., exact)| *exact).or(fitting.first());
        let has_system = self.has_system();
        let support = match best {
            Some(&(format, shape, _)) => {
                let is_parallel = self.reads_back(format, 2, shape).is_some();
                ToolSupport { format, is_native: true, is_parallel, shape, has_system }
            }
            None => ToolSupport::generic(has_system),
        };
        log::debug!("tool calls: {}", support.format.name);
        support
    }

    /// `tool_support` with the format of this name; `None` if there is none.
    pub fn tool_support_as(&self, name: &str) -> Option<ToolSupport> {
        if name == generic().name {
            return Some(ToolSupport::generic(self.has_system()));
        }
        let format = formats().iter().find(|format| format.name == name)?;
        let (shape, is_native) = match self.shape_for(format) {
            Some((shape, _)) => (shape, true),
            None => (Shape { text_arguments: false, null_content: false }, true),
        };
        let is_parallel = self.reads_back(format, 2, shape).is_some();
        let has_system = self.has_system();
        Some(ToolSupport { format, is_native, is_parallel, shape, has_system })
    }

    fn has_system(&self) -> bool {
        let messages = json!([
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": QUESTION },
        ]);
        let text = self.render(&messages, None, true, &Map::new());
        text.is_ok_and(|text| text.contains("Be brief."))
    }

    /// The first shape of a message with a call that the template renders as this format, and
    /// whether it does to the last space.
    fn shape_for(&self, format: &'static ToolFormat) -> Option<(Shape, bool)> {
        let shapes = [false, true].into_iter().flat_map(|text_arguments| {
            [true, false].map(|null_content| Shape { text_arguments, null_content })
        });
        let mut shapes =
            shapes.filter_map(|shape| Some((shape, self.reads_back(format, 1, shape)?)));
        shapes.next()
    }

    /// Whether `n` calls are read back as they were; `Some(true)`: they are rendered as the format
    /// writes them.
    fn reads_back(&self, format: &'static ToolFormat, n: usize, shape: Shape) -> Option<bool> {
        let tools = tools();
        let messages = conversation(format.ids, n, shape);
        let text = self.render(&messages, tools.declared().as_ref(), false, &Map::new()).ok()?;
        let text = &text[text.rfind(QUESTION)? + QUESTION.len()..];
        let (begin, reasoning) = match format.call {
            Call::Header { .. } => ("<|start|>assistant", Some(self.reasoning()?)),
            _ if format.is_bare() => ("{\"name\"", None),
            _ => (*format.openers().first()?, None),
        };
        let begin =
            format.openers().iter().filter_map(|o| text.find(o)).chain(text.find(begin)).min()?;
        // A template that prints null as Python does would tell the model of nonsense.
        if text[..begin].contains("None") {
            return None;
        }
        let calls = Calls { format, tools: Arc::new(tools), seed: 0, is_required: false };
        let mut scanner = Scanner::new(reasoning, Some(calls), "");
        let mut events = scanner.push(&text[begin..]);
        events.extend(scanner.finish());
        let expected: Vec<_> = (0..n).map(|index| (NAME.to_owned(), arguments(index))).collect();
        let found = whole_calls(&events)?;
        let to_write = expected.iter().enumerate();
        let to_write =
            to_write.map(|(index, (name, arguments))| ToWrite { index, name, arguments });
        let written = format.write(&to_write.collect::<Vec<_>>());
        (found == expected).then(|| text.contains(written.trim()))
    }
}

/// The names and arguments of the calls; `None` if arguments are no object.
fn whole_calls(events: &[Event]) -> Option<Vec<(String, Map<String, Value>)>> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for event in events {
        match event {
            Event::CallBegin { name, .. } => calls.push((name.clone(), String::new())),
            Event::Arguments { text, .. } => calls.last_mut()?.1.push_str(text),
            _ => {}
        }
    }
    let parsed =
        calls.into_iter().map(|(name, text)| Some((name, serde_json::from_str(&text).ok()?)));
    parsed.collect()
}

impl ToolSupport {
    /// For a template that knows nothing of tools.
    fn generic(has_system: bool) -> Self {
        let shape = Shape { text_arguments: false, null_content: false };
        Self { format: generic(), is_native: false, is_parallel: true, shape, has_system }
    }

    /// The `tools` for `ChatTemplate::render`.
    pub fn declared(&self, tools: &Tools) -> Option<Value> {
        tools.declared().filter(|_| self.is_native)
    }
}
