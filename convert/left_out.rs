//! Fields of tokenizer.json that change which tokens a text becomes and that no GGUF key carries:
//! a file with another value than the usual one is refused by the field's name.

use serde_json::Value;

use super::json::{Json, shown};
use super::pre::{flatten, kind};
use super::vocab::AddedToken;
use crate::Result;

/// Checks a tokenizer whose texts begin with `bos` and end with `eos`, if they begin and end with
/// any token at all.
pub fn check(tokenizer: &Json, [bos, eos]: [Option<&str>; 2], added: &[AddedToken]) -> Result<()> {
    for field in ["truncation", "padding"] {
        let expected = "null: callers ask for it where they need it";
        refuse(tokenizer, field, expected, tokenizer.at(field))?;
    }
    let is_set = |v: &&Value| v.as_f64() != Some(0.0) && v.as_str() != Some("");
    for field in ["model.dropout", "model.continuing_subword_prefix", "model.end_of_word_suffix"] {
        refuse(tokenizer, field, "null", tokenizer.at(field).filter(is_set))?;
    }
    if let Some(pre) = tokenizer.at("pre_tokenizer") {
        let mut parts = Vec::new();
        flatten(pre, "pretokenizers", &mut parts);
        let mut parts = parts.into_iter().filter(|part| kind(part) == "ByteLevel");
        let prefix = parts.find_map(|part| {
            part.get("add_prefix_space").filter(|flag| flag.as_bool() == Some(true))
        });
        refuse(tokenizer, "pre_tokenizer.add_prefix_space", "false", prefix)?;
    }
    if let Some(token) = added.iter().find(|token| token.single_word) {
        let field = format!("added_tokens: {:?}: single_word", token.content);
        return Err(tokenizer.fail(&field, "false", "true"));
    }
    check_post(tokenizer, bos, eos)
}

fn refuse(file: &Json, field: &str, expected: &str, value: Option<&Value>) -> Result<()> {
    value.map_or(Ok(()), |value| Err(file.fail(field, expected, shown(value))))
}

/// A post-processor puts one token before a text and one behind it at most.
fn check_post(tokenizer: &Json, bos: Option<&str>, eos: Option<&str>) -> Result<()> {
    const FIELD: &str = "post_processor";
    let Some(post) = tokenizer.at(FIELD) else { return Ok(()) };
    let mut parts = Vec::new();
    flatten(post, "processors", &mut parts);
    for part in parts {
        let single = match kind(part) {
            "ByteLevel" => continue,
            "TemplateProcessing" => part.get("single").and_then(Value::as_array),
            other => {
                let expected = "ByteLevel or TemplateProcessing";
                return Err(tokenizer.fail(FIELD, expected, other));
            }
        };
        let single = single.map_or(&[][..], Vec::as_slice);
        let of_text = |part: &Value| part.get("Sequence").is_some();
        let text = single.iter().position(of_text).unwrap_or(single.len());
        let (before, behind) = (&single[..text], &single[(text + 1).min(single.len())..]);
        for (tokens, role, known) in [(before, "a beginning", bos), (behind, "an end", eos)] {
            let id =
                |part: &Value| part.get("SpecialToken")?.get("id")?.as_str().map(str::to_owned);
            let ids: Vec<String> = tokens.iter().filter_map(id).collect();
            if !(ids.is_empty() || (ids.len() == 1 && Some(ids[0].as_str()) == known)) {
                let known = known.map_or("none".to_owned(), |token| format!("{token} at most"));
                let field = format!("{FIELD}.single");
                let expected = format!("{known} for {role} of a text");
                return Err(tokenizer.fail(&field, expected, ids.join(" ")));
            }
        }
    }
    Ok(())
}
