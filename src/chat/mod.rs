//! Chat templates: from a list of messages to the prompt text that the model was trained on.
//!
//! Templates are Jinja source in the GGUF file, written for Hugging Face's `apply_chat_template`,
//! so they are rendered as it does: the same whitespace rules, filters, functions and names in
//! scope. They are also programs of unknown origin: see `limits` for what keeps them in bounds.

mod builtin;
mod clock;
mod contents;
mod data;
mod environment;
mod from_gguf;
mod jinja;
pub mod lark;
mod limits;
mod parts;
pub mod reasoning;
pub mod tools;

pub use clock::Clock;
pub use contents::{ControlTexts, Rendered, encode_chat};
pub use from_gguf::names;

use crate::{Error, Result};
use environment::Environment;
use serde_json::{Map, Value};
use std::sync::Arc;

/// The template of the many models that use ChatML, and of those that bring none.
pub const CHATML: &str = "\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}";

/// Names that a template gets from its caller in each call: no variables of a user's.
pub const RESERVED: &[&str] = &[
    "add_generation_prompt",
    "bos_token",
    "chat_template",
    "documents",
    "eos_token",
    "messages",
    "tools",
];

/// A compiled template with the tokens that it may write.
pub struct ChatTemplate {
    source: String,
    main: Arc<Environment>,
    /// The template knows tools by the name `functions` alone.
    reads_functions: bool,
    /// The template named `tool_use`, taken when there are tools, where a model has one.
    tool_use: Option<Arc<Environment>>,
    tool_use_source: Option<String>,
    /// `bos_token`, `eos_token`, … as the template sees them.
    tokens: Map<String, Value>,
    /// The file that the source is from, for messages.
    origin: Option<String>,
}

impl ChatTemplate {
    /// Compiles `source`. `bos` and `eos` are the texts of those tokens; empty: the model has none.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self> {
        Self::with_clock(source, bos, eos, Clock::from_environment()?)
    }

    /// `new` with a fixed time for `strftime_now`.
    pub fn with_clock(source: &str, bos: &str, eos: &str, clock: Clock) -> Result<Self> {
        let mut tokens = Map::new();
        for (name, text) in [("bos_token", bos), ("eos_token", eos)] {
            if !text.is_empty() {
                tokens.insert(name.into(), text.into());
            }
        }
        let main = environment::compile(source, clock)?;
        let reads_functions = source.contains("functions") && {
            let free = environment::variables(main.clone())?;
            free.contains("functions") && !free.contains("tools")
        };
        Ok(Self {
            source: source.to_string(),
            main,
            reads_functions,
            tool_use: None,
            tool_use_source: None,
            tokens,
            origin: None,
        })
    }

    /// The source, and that of the template for requests with tools.
    pub fn source(&self) -> (&str, Option<&str>) {
        (&self.source, self.tool_use_source.as_deref())
    }

    /// Variables that llama.cpp gives beyond Hugging Face's: the date, for templates that do not
    /// ask for `strftime_now`, and the tools as JSON text for those that know them as `functions`.
    pub fn extras(&self, tools: Option<&Value>) -> Map<String, Value> {
        let formats = [("date_string", "%d %b %Y"), ("datetime", "%b %d %Y")];
        let read = formats.iter().filter(|(name, _)| self.source.contains(name));
        let dates = read.map(|(name, format)| ((*name).into(), self.main.date(format).into()));
        let functions = self.reads_functions.then(|| {
            let text = tools.map_or("[]".into(), Value::to_string);
            ("functions".to_owned(), Value::from(text))
        });
        dates.chain(functions).collect()
    }

    /// Adds another token to the names in scope (`pad_token`, `unk_token`).
    pub fn with_token(mut self, name: &str, text: &str) -> Self {
        self.tokens.insert(name.into(), text.into());
        self
    }

    /// The prompt text of `messages`, an array of objects with `role` and `content`, a text or a
    /// list of parts. `kwargs` are further names in scope (`enable_thinking`); they win over ours.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<String> {
        let tools = check_tools(tools)?;
        let messages = with_reasoning_aliases(messages)?;
        let render = |messages: Vec<Value>| {
            self.render_as_given(messages, tools.clone(), add_generation_prompt, kwargs)
        };
        let Some(joined) = parts::joined(&messages) else { return render(messages) };
        match render(messages.clone()) {
            Ok(prompt) if parts::are_read(&prompt, &messages) => Ok(prompt),
            _ => render(joined),
        }
    }

    fn render_as_given(
        &self,
        messages: Vec<Value>,
        tools: Value,
        add_generation_prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<String> {
        let template = match &self.tool_use {
            Some(template) if !tools.is_null() => template.clone(),
            _ => self.main.clone(),
        };
        let mut context = Map::new();
        context.insert("messages".into(), messages.into());
        context.insert("tools".into(), tools);
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        context.extend(self.tokens.iter().chain(kwargs).map(|(k, v)| (k.clone(), v.clone())));
        environment::render(template, context).map_err(|e| named(self.origin.as_deref(), e))
    }
}

/// The error of a template with the file that the template is from.
fn named(origin: Option<&str>, error: Error) -> Error {
    match (origin, error) {
        (Some(file), Error::Invalid(sentence)) => Error::Invalid(format!("{file}: {sentence}")),
        (_, error) => error,
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ChatTemplate")
    }
}

/// Names under which a message's reasoning is passed; most templates read the first, gpt-oss's
/// the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The messages as templates expect them: objects, reasoning under the names that they read.
fn with_reasoning_aliases(messages: &Value) -> Result<Vec<Value>> {
    let list = messages.as_array().ok_or_else(|| shape("messages", "an array", messages))?;
    let mut out = Vec::with_capacity(list.len());
    for message in list {
        let fields = message.as_object().ok_or_else(|| shape("a message", "an object", message))?;
        let reasoning =
            REASONING.iter().filter_map(|name| fields.get(*name)).find(|v| !v.is_null());
        let mut fields = fields.clone();
        if let Some(reasoning) = reasoning.cloned() {
            fields.entry("thinking").or_insert_with(|| reasoning.clone());
            fields.insert(REASONING[0].into(), reasoning);
        }
        out.push(Value::Object(fields));
    }
    Ok(out)
}

fn check_tools(tools: Option<&Value>) -> Result<Value> {
    match tools {
        None => Ok(Value::Null),
        Some(tools) if tools.is_array() => Ok(tools.clone()),
        Some(other) => Err(shape("tools", "an array", other)),
    }
}

fn shape(what: &str, expected: &str, got: &Value) -> Error {
    let got = match got {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    Error::Invalid(format!("{what}: expected {expected}, got {got}"))
}
