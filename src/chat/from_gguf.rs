//! Which template a model uses: the user's choice, the file's own, or ChatML.

use super::{CHATML, ChatTemplate, builtin, named};
use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use std::path::Path;

const KEY: &str = "tokenizer.chat_template";

impl ChatTemplate {
    /// `choice` is `--chat-template`: the name of one of the file's templates or of llama.cpp's, a
    /// file, or a template itself, which has white space or Jinja in it. Without it the file's
    /// default template, and ChatML where there is none.
    pub fn from_gguf(gguf: &Gguf, tokenizer: &Tokenizer, choice: Option<&str>) -> Result<Self> {
        let Some(choice) = choice else { return Self::of_file(gguf, tokenizer) };
        let model = Some(gguf.path());
        let (source, origin) = match gguf.str(&format!("{KEY}.{choice}"))? {
            Some(named) => (named.to_owned(), model),
            None if choice == "default" => {
                let own = gguf.str(KEY)?.ok_or_else(|| unknown(gguf, choice))?;
                (own.to_owned(), model)
            }
            None if choice == "chatml" => (CHATML.to_owned(), None),
            None if is_source(choice) => (choice.to_owned(), None),
            None => match builtin::source(choice) {
                Some(source) => (source, None),
                None => (from_file(gguf, choice)?, Some(Path::new(choice))),
            },
        };
        Self::for_tokenizer(&source, tokenizer, origin)
    }

    fn of_file(gguf: &Gguf, tokenizer: &Tokenizer) -> Result<Self> {
        let source = gguf.str(KEY)?.unwrap_or_else(|| {
            log::info!("the model brings no chat template: using ChatML");
            CHATML
        });
        let mut template = Self::for_tokenizer(source, tokenizer, Some(gguf.path()))?;
        if let Some(source) = gguf.str(&format!("{KEY}.tool_use"))? {
            let other = Self::for_tokenizer(source, tokenizer, Some(gguf.path()))?;
            template.tool_use = Some(other.main);
            template.tool_use_source = Some(other.source);
        }
        Ok(template)
    }

    fn for_tokenizer(source: &str, tokenizer: &Tokenizer, origin: Option<&Path>) -> Result<Self> {
        let origin = origin.map(|path| path.display().to_string());
        let special = tokenizer.special();
        let bos = tokenizer.special_text(special.bos);
        let eos = tokenizer.special_text(special.eos);
        let template = Self::new(source, &bos, &eos).map_err(|e| named(origin.as_deref(), e))?;
        let mut template = Self { origin, ..template };
        for (name, id) in [("pad_token", special.pad), ("unk_token", special.unk)] {
            if id.is_some() {
                template = template.with_token(name, &tokenizer.special_text(id));
            }
        }
        Ok(template)
    }
}

/// Whether a choice is a template itself. A text without Jinja is one, too, but a file's name or a
/// misspelt one is not.
fn is_source(choice: &str) -> bool {
    let is_text = choice.contains(char::is_whitespace) && !choice.ends_with(".jinja");
    choice.contains("{{") || choice.contains("{%") || is_text && !Path::new(choice).exists()
}

/// The names that this file has templates under.
pub fn names(gguf: &Gguf) -> Vec<String> {
    let mut names = vec!["chatml".to_string()];
    if gguf.get(KEY).is_some() {
        names.push("default".into());
    }
    let prefix = format!("{KEY}.");
    names.extend(gguf.keys().filter_map(|(key, _)| key.strip_prefix(&prefix)).map(String::from));
    names
}

fn from_file(gguf: &Gguf, path: &str) -> Result<String> {
    let path = Path::new(path);
    if !path.exists() {
        return Err(unknown(gguf, &path.to_string_lossy()));
    }
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
    String::from_utf8(bytes)
        .map_err(|_| Error::format(path, "the chat template", "UTF-8 text", "other bytes"))
}

fn unknown(gguf: &Gguf, choice: &str) -> Error {
    let own = names(gguf).into_iter();
    let names: Vec<String> = own.chain(builtin::names().map(String::from)).collect();
    let names = names.join("`, `");
    Error::Usage(format!(
        "--chat-template: expected `{names}`, a file or a template, got `{choice}`"
    ))
}
