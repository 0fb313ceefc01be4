//! `moeba render`: what a model's chat template makes of a conversation, and nothing else.

use super::model::ModelArg;
use super::reasoning::TemplateArgs;
use super::{out, prompt};
use crate::chat::ChatTemplate;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

#[derive(clap::Args, Debug)]
#[command(after_help = "MOEBA_NOW=YYYY-MM-DD fixes the date that templates see.")]
#[command(allow_missing_positional = true)] // MODEL may come from the environment
pub struct Args {
    #[command(flatten)]
    model: ModelArg,
    /// JSON file (- is stdin): a list of messages, or an object with messages and, optionally,
    /// tools, add_generation_prompt and variables of the template such as enable_thinking
    #[arg(value_name = "MESSAGES.json")]
    messages: PathBuf,
    /// Chat template: one of the model's or of llama.cpp's by name (chatml, llama3, ...), a file,
    /// or the template itself
    #[arg(long, value_name = "NAME|FILE")]
    chat_template: Option<String>,
    /// End with the header of the assistant's answer
    #[arg(long)]
    add_generation_prompt: bool,
    #[command(flatten)]
    variables: TemplateArgs,
}

pub fn run(args: Args) -> Result<()> {
    let gguf = args.model.open()?;
    let tokenizer = Tokenizer::from_gguf(&gguf)?;
    let template = ChatTemplate::from_gguf(&gguf, &tokenizer, args.chat_template.as_deref())?;
    let mut request = Request::read(&args.messages)?;
    request.add_generation_prompt |= args.add_generation_prompt;
    request.kwargs.extend(args.variables.chat_template_kwargs.into_iter().flatten());
    let text = template.render(
        &request.messages,
        request.tools.as_ref(),
        request.add_generation_prompt,
        &request.kwargs,
    )?;
    out::write(text.as_bytes())
}

/// The arguments of Hugging Face's `apply_chat_template`.
struct Request {
    messages: Value,
    tools: Option<Value>,
    add_generation_prompt: bool,
    kwargs: Map<String, Value>,
}

impl Request {
    fn read(path: &Path) -> Result<Self> {
        let text = prompt::read_text(path)?;
        let json = serde_json::from_str(&text).map_err(|e| not_json(path, &e))?;
        let mut fields = match json {
            Value::Array(_) => Map::from_iter([("messages".to_string(), json)]),
            Value::Object(fields) => fields,
            _ => return Err(Error::format(path, "the file", "a list or an object", "neither")),
        };
        let mut messages = fields.remove("messages").ok_or_else(|| {
            Error::format(path, "messages", "a list of messages", "no such field")
        })?;
        check_messages(path, &messages)?;
        // Templates would print `None` for a member that is null, so transformers drops it.
        for message in messages.as_array_mut().into_iter().flatten() {
            message.as_object_mut().into_iter().for_each(|m| m.retain(|_, v| !v.is_null()));
        }
        let add_generation_prompt = match fields.remove("add_generation_prompt") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(yes)) => yes,
            Some(other) => {
                let field = "add_generation_prompt";
                return Err(Error::format(path, field, "true or false", other.to_string()));
            }
        };
        let tools = fields.remove("tools").filter(|tools| !tools.is_null());
        if let Some(Value::Object(more)) = fields.remove("chat_template_kwargs") {
            fields.extend(more);
        }
        Ok(Self { messages, tools, add_generation_prompt, kwargs: fields })
    }
}

fn not_json(path: &Path, error: &serde_json::Error) -> Error {
    let place = format!("line {} column {}", error.line(), error.column());
    let what = error.to_string();
    let what = what.strip_suffix(&format!(" at {place}")).unwrap_or(&what);
    Error::format(path, place, "JSON", what)
}

/// Ways in which an assistant's message says something without `content`.
const INSTEAD_OF_CONTENT: [&str; 4] = ["tool_calls", "reasoning_content", "thinking", "reasoning"];

/// That each message has a role and something to say.
fn check_messages(path: &Path, messages: &Value) -> Result<()> {
    let Some(list) = messages.as_array() else {
        return Err(Error::format(path, "messages", "a list of messages", kind(messages)));
    };
    for (i, message) in list.iter().enumerate() {
        let at = |rest: &str| format!("messages[{i}]{rest}");
        if !message.is_object() {
            return Err(Error::format(path, at(""), "an object", kind(message)));
        }
        if !message["role"].is_string() {
            return Err(Error::format(path, at(".role"), "a text", kind(&message["role"])));
        }
        let content = &message["content"];
        let has_other = INSTEAD_OF_CONTENT.iter().any(|field| !message[*field].is_null());
        if content.is_null() && !(message["role"] == "assistant" && has_other) {
            let expected = "a text or a list of parts";
            return Err(Error::format(path, at(".content"), expected, kind(content)));
        }
        for (n, part) in content.as_array().into_iter().flatten().enumerate() {
            if part["type"] == "text" && !part["text"].is_string() {
                let field = at(&format!(".content[{n}].text"));
                return Err(Error::format(path, field, "a text", kind(&part["text"])));
            }
        }
    }
    Ok(())
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
