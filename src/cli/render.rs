//! `moeba render`: what a model's chat template makes of a conversation, and nothing else.

use super::model::ModelArg;
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
    /// JSON: a list of messages, or an object with messages and, as they are wanted, tools,
    /// add_generation_prompt and names for the template (enable_thinking); - is stdin
    #[arg(value_name = "MESSAGES.json")]
    messages: PathBuf,
    /// Name of one of the model's templates, chatml, or a file
    #[arg(long, value_name = "NAME|FILE")]
    chat_template: Option<String>,
    /// End with the beginning of the assistant's answer
    #[arg(long)]
    add_generation_prompt: bool,
}

pub fn run(args: Args) -> Result<()> {
    let gguf = args.model.open()?;
    let tokenizer = Tokenizer::from_gguf(&gguf)?;
    let template = ChatTemplate::from_gguf(&gguf, &tokenizer, args.chat_template.as_deref())?;
    let mut request = Request::read(&args.messages)?;
    request.add_generation_prompt |= args.add_generation_prompt;
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
        let json = serde_json::from_str(&text).map_err(|e| {
            let place = format!("line {} column {}", e.line(), e.column());
            Error::format(path, place, "JSON", e.to_string())
        })?;
        let mut fields = match json {
            Value::Array(_) => Map::from_iter([("messages".to_string(), json)]),
            Value::Object(fields) => fields,
            _ => return Err(Error::format(path, "the file", "a list or an object", "neither")),
        };
        let messages = fields.remove("messages").ok_or_else(|| {
            Error::format(path, "messages", "a list of messages", "no such field")
        })?;
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
