//! A request in no wire's format: what all of them are translated to.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::chat::reasoning::Think;
use crate::chat::tools::{Mode, ToolChoice, Tools};
use crate::engine::{Limits, SpecMode};
use crate::sample::SamplerOptions;
use crate::sample::grammar::Grammar;
use crate::sample::grammar::schema::Client;

/// A text to generate.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Prompt,
    pub sampling: SamplerOptions,
    pub limits: Limits,
    /// Answers to one prompt. Answer i has the seed of the first plus i.
    pub n_choices: usize,
    /// A form that the answer must have.
    pub form: Option<Form>,
    /// The most probable tokens to report with each token; `None` reports nothing.
    pub n_logprobs: Option<usize>,
    /// The most probable tokens are those that the samplers have left.
    pub after_sampling: bool,
    /// Requests of other salts share no cached text.
    pub salt: String,
    pub scheduling: Scheduling,
    /// The answer that the client expects.
    pub prediction: Option<String>,
    /// Whether events tell how far the prompt is.
    pub wants_progress: bool,
    /// Whether there are events of tokens that have no text yet.
    pub wants_tokens: bool,
    /// Ends the text so long after its first token.
    pub time_limit: Option<Duration>,
}

/// A form that an answer must have.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    /// A schema is the client's.
    pub grammar: Grammar,
    /// The place of the schema in the body.
    pub path: String,
    /// All of the schema has to be enforced.
    pub is_strict: bool,
    /// The structural tag that the grammar was made of.
    pub tag: Option<Value>,
}

impl Form {
    /// A form that is no client's schema.
    pub fn of(grammar: Grammar, path: &str) -> Form {
        Form { grammar, path: path.to_owned(), is_strict: false, tag: None }
    }

    /// The client's schema.
    pub fn client(&self) -> Option<Client<'_>> {
        let Grammar::JsonSchema(schema) = &self.grammar else { return None };
        Some(Client { schema, path: &self.path, tool: None, is_strict: self.is_strict })
    }
}

/// How a request is queued and where it is computed.
#[derive(Clone, Debug)]
pub struct Scheduling {
    /// Whether caches are read and written.
    pub is_cached: bool,
    /// The slot that it gets if that is free.
    pub slot: Option<usize>,
    /// The key's waiting request with the lowest number is next, if the key may say so.
    pub priority: Option<i64>,
    /// When drafts are verified, if not as the server does.
    pub spec: Option<SpecMode>,
    /// Adapters by their numbers, and how much of each, if not as the server does.
    pub lora: Option<Vec<(usize, f32)>>,
}

impl Default for Scheduling {
    fn default() -> Self {
        Scheduling { is_cached: true, slot: None, priority: None, spec: None, lora: None }
    }
}

/// The beginning that a text continues.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Messages, by the model's chat template.
    Chat(Chat),
    /// Text in which control tokens may be written out.
    Text(String),
    Tokens(Vec<u32>),
}

/// A conversation, and how its next message is to be.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    /// Objects with `role` and `content`, as templates read them.
    pub messages: Vec<Value>,
    /// The last message is the assistant's, and the answer goes on in it.
    pub continues: bool,
    /// The prompt ends with the last message, without the beginning of an answer.
    pub ends_bare: bool,
    /// The tools that may be called.
    pub tools: Arc<Tools>,
    pub tool_choice: ToolChoice,
    /// Whether an answer may have several calls.
    pub has_parallel_calls: bool,
    /// Variables of the template that the request sets.
    pub variables: Map<String, Value>,
    pub think: Option<Think>,
    /// Tokens of reasoning before its end is forced.
    pub reasoning_budget: Option<usize>,
    /// Reasoning stays in the content, with its markers.
    pub keeps_reasoning_in_content: bool,
}

impl Chat {
    /// Whether the answer may call tools.
    pub fn may_call(&self) -> bool {
        !self.tools.is_empty() && self.tool_choice.mode != Mode::None
    }
}
