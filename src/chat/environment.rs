//! A compiled template: the environment of Hugging Face's `apply_chat_template`, within bounds.

use super::clock::Clock;
use super::jinja::{Fault, Template};
use super::limits;
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::sync::Arc;

/// A template, and the time that it sees.
#[derive(Debug)]
pub struct Environment {
    template: Template,
    clock: Clock,
}

impl Environment {
    /// The time that the template sees, by `strftime`'s directives.
    pub fn date(&self, format: &str) -> String {
        self.clock.format(format)
    }
}

/// Compiles a template in a thread of its own, as nesting costs the parser stack.
pub fn compile(source: &str, clock: Clock) -> Result<Arc<Environment>> {
    if source.len() > limits::MAX_SOURCE_BYTES {
        let (max, got) = (limits::MAX_SOURCE_BYTES, source.len());
        return Err(Error::Invalid(format!(
            "the chat template: expected at most {max} bytes, got {got}"
        )));
    }
    let source = source.to_string();
    limits::bounded(move || {
        let template = Template::new(&source).map_err(describe)?;
        Ok(Arc::new(Environment { template, clock }))
    })
}

/// Names that a template reads and does not make itself. Walking the tree costs stack as parsing it
/// does.
pub fn variables(environment: Arc<Environment>) -> Result<HashSet<String>> {
    limits::bounded(move || Ok(environment.template.free()))
}

/// The text of the template with these names in scope.
pub fn render(environment: Arc<Environment>, context: Map<String, Value>) -> Result<String> {
    limits::bounded(move || {
        let Environment { template, clock } = &*environment;
        template.render(context, *clock, limits::LIMITS).map_err(describe)
    })
}

/// The fault of a template, as one sentence.
fn describe(fault: Fault) -> Error {
    let Fault { message, line, is_raised } = fault;
    Error::Invalid(match (is_raised, line) {
        (true, _) => format!("the chat template refuses these messages: {message}"),
        (_, 0) => format!("the chat template: {message}"),
        _ => format!("the chat template (line {line}): {message}"),
    })
}
