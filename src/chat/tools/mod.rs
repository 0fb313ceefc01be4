//! Tools: functions that a model may ask to have called. Families write calls in their own ways
//! (`table`); which of them a template belongs to is found out by rendering (`choose`).
//!
//! The way of a request:
//!
//! 1. [`ChatTemplate::tool_support`](super::ChatTemplate::tool_support), once a model: the
//!    [`ToolSupport`] of its template.
//! 2. [`Tools::parse`] reads and checks `tools`, [`ToolChoice::parse`] `tool_choice`.
//! 3. [`prepare_messages`] brings the messages into the template's form.
//!    `ChatTemplate::render_contents` renders them with [`ToolSupport::declared`], and
//!    [`encode_chat`](super::encode_chat) makes tokens of the prompt.
//! 4. [`ToolSupport::grammar`] has the grammar for sampling, if there is one. Where `tool_choice`
//!    is `none`, [`ToolFormat::opening_tokens`] are banned.
//! 5. A [`Scanner`] of the answer's text gives [`Event`]s: reasoning, content, and calls with their
//!    arguments as JSON text. The text has the control tokens `ToolFormat::tokens` in it.

mod calls;
mod choose;
mod declared;
mod embedded;
mod grammar;
mod ids;
mod json;
mod messages;
mod scan;
mod table;
mod tagged;
#[cfg(test)]
mod tests;
mod write;

pub use choose::ToolSupport;
pub use declared::{Custom, INPUT, Tool, Tools};
pub use grammar::{Mode, ToolChoice, ToolGrammar};
pub use messages::prepare_messages;
pub use scan::Scanner;
pub use table::{Ids, ToolFormat};

use super::reasoning::control_tokens;
use crate::tokenizer::Tokenizer;
use std::sync::Arc;

/// The calls that an answer may have.
#[derive(Clone, Debug)]
pub struct Calls {
    pub format: &'static ToolFormat,
    pub tools: Arc<Tools>,
    /// The ids of calls follow from it.
    pub seed: u64,
    /// The answer is a call, whatever it begins with.
    pub is_required: bool,
}

/// A part of an answer. The texts of a kind that follow each other are one text in pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Reasoning(String),
    Content(String),
    CallBegin {
        index: usize,
        id: String,
        name: String,
    },
    /// More of the arguments, which are JSON once the call has ended.
    Arguments {
        index: usize,
        text: String,
    },
    CallEnd {
        index: usize,
    },
}

impl ToolFormat {
    /// Control tokens of the markers: they must be in the text that a scanner gets.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        control_tokens(&self.markers(), tokenizer)
    }
}
