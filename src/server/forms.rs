//! The forms of answers, compiled: schemas as far as they can be enforced.

use std::sync::PoisonError;
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::api::structural_tag::structural_tag;
use super::errors::{ApiError, ApiResult};
use super::request::{Chat, Form};
use super::service::Service;
use crate::chat::tools::{Tool, ToolGrammar, Tools};
use crate::sample::grammar::schema::{Client, TIME, fit};
use crate::sample::grammar::{Constraint, Grammar, is_refusal};
use crate::{Error, Result};

/// How the schemas of a grammar of calls are made.
#[derive(Clone, Copy)]
enum Effort {
    /// By what is known of them.
    First,
    /// The parts of each that are refused are searched for, until a time.
    Search(Instant),
    /// Tools that need not match theirs keep only the names of arguments.
    Plain,
}

impl Service {
    /// The form that an answer has from its beginning.
    pub(super) fn form(&self, form: &Form) -> ApiResult<Constraint> {
        let compiled = match (form.client(), &form.tag) {
            (Some(client), _) => {
                fit(&client, |schema| self.compile(&Grammar::JsonSchema(schema)), self.checked())
            }
            (None, Some(tag)) => match self.compile(&form.grammar) {
                Err(e) if is_refusal(&e) => return self.of_tag(tag, &form.path),
                other => other,
            },
            (None, None) => self.compile(&form.grammar),
        };
        compiled.map_err(|e| ApiError::of_schema(&e, &form.path))
    }

    /// A structural tag with the parts of its schemas that are not refused.
    fn of_tag(&self, tag: &Value, path: &str) -> ApiResult<Constraint> {
        let until = Instant::now() + TIME;
        let accept = |client: &Client<'_>| client.accepted(until, self.checked());
        let grammar = structural_tag(tag, path, self.engine().tokenizer(), &accept)?;
        let named = |e| ApiError::of_schema(&in_words(e, "structural tag"), path);
        self.compile(&grammar).map_err(named)
    }

    fn compile(&self, form: &Grammar) -> Result<Constraint> {
        let grammars = self.engine().grammars()?;
        let start = Instant::now();
        let constraint = grammars.constraint(form);
        let mut times = self.compile_times.lock().unwrap_or_else(PoisonError::into_inner);
        times.add_time(start.elapsed());
        constraint
    }

    /// Compiles a part of a schema.
    fn checked(&self) -> impl Fn(&Value) -> Result<()> {
        |schema| self.engine().grammars()?.check(&Grammar::JsonSchema(schema.clone()))
    }

    /// The grammar of the calls that a chat allows, or of calls and a form that is JSON.
    pub(super) fn grammar_of_calls(
        &self,
        chat: &Chat,
        form: Option<&Form>,
    ) -> ApiResult<Option<(ToolGrammar, Constraint)>> {
        let mut effort = Effort::First;
        loop {
            let Some(grammar) = self.calls_with(chat, form, effort)? else { return Ok(None) };
            let error = match self.compile(&Grammar::Lark(grammar.lark.clone())) {
                Ok(constraint) => return Ok(Some((grammar, constraint))),
                Err(e) => e,
            };
            effort = match effort {
                Effort::First if is_refusal(&error) => Effort::Search(Instant::now() + TIME),
                Effort::Search(_) if is_refusal(&error) => Effort::Plain,
                _ => return Err(ApiError::of_schema(&in_words(error, "tools' grammar"), "tools")),
            };
        }
    }

    fn calls_with(
        &self,
        chat: &Chat,
        form: Option<&Form>,
        effort: Effort,
    ) -> ApiResult<Option<ToolGrammar>> {
        let (format, tokenizer) = (&self.templates.tools, self.engine().tokenizer());
        let (choice, is_parallel) = (&chat.tool_choice, chat.has_parallel_calls);
        let tools = self.enforced(&choice.among(&chat.tools), effort);
        let tools = tools.map_err(|e| ApiError::of_schema(&e, "tools"))?;
        let Some(form) = form else {
            return Ok(format.grammar(&tools, choice, is_parallel, tokenizer));
        };
        let schema = match (&form.grammar, form.client()) {
            (_, Some(client)) => {
                let schema = self.accepted(&client, effort);
                Some(schema.map_err(|e| ApiError::of_schema(&e, &form.path))?)
            }
            (Grammar::JsonObject, None) => Some(json!({ "type": "object" })),
            _ => None,
        };
        let grammar = schema.and_then(|schema| {
            format.grammar_or_json(&tools, choice, is_parallel, &schema, tokenizer)
        });
        let message = "tools: this model's answer cannot have both calls and this form";
        grammar.map(Some).ok_or_else(|| ApiError::invalid("tools", message))
    }

    /// The tools with schemas that the grammar takes.
    fn enforced(&self, tools: &Tools, effort: Effort) -> Result<Tools> {
        tools.with_schemas(|tool| {
            let schema = self.accepted(&of_tool(tool), effort)?;
            if !matches!(effort, Effort::Plain) || tool.is_strict {
                return Ok(schema);
            }
            log::warn!("the tool `{}`: only the names of its arguments are enforced", tool.name);
            Ok(plain(&schema))
        })
    }

    fn accepted(&self, client: &Client<'_>, effort: Effort) -> Result<Value> {
        match effort {
            Effort::First | Effort::Plain => client.enforced(),
            Effort::Search(until) => client.accepted(until, self.checked()),
        }
    }
}

fn of_tool(tool: &Tool) -> Client<'_> {
    Client {
        schema: &tool.parameters,
        path: &tool.path,
        tool: Some(&tool.name),
        is_strict: tool.is_strict,
    }
}

/// A schema of objects with the same names.
fn plain(schema: &Value) -> Value {
    let names = schema["properties"].as_object().into_iter().flatten();
    let all: Map<String, Value> = names.map(|(name, _)| (name.clone(), true.into())).collect();
    let required = schema.get("required").cloned().unwrap_or_else(|| json!([]));
    json!({ "type": "object", "properties": all, "required": required })
}

/// The message with the client's word for the grammar.
fn in_words(error: Error, name: &str) -> Error {
    match error {
        Error::Invalid(text) => Error::Invalid(text.replace("Lark grammar", name)),
        other => other,
    }
}
