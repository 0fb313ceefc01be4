//! Fields that are one prompt, or several.

use serde_json::Value;

use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::{Fields, integer};
use crate::server::request::Prompt;
use crate::tokenizer::{EncodeOptions, Tokenizer};

const EXPECTED: &str = "a string, an array of token ids and strings, or an array of either";

/// The prompts of a field, `most` of them at most, as llama-server reads them: an array with a
/// number in it is one prompt, any other array has a prompt in each item. A prompt is a text, token
/// ids with texts among them, or an object with `prompt_string`.
pub fn prompts(
    fields: &Fields<'_>,
    name: &'static str,
    most: usize,
    tokenizer: &Tokenizer,
) -> ApiResult<Vec<Prompt>> {
    let Some(value) = fields.get(name) else {
        return Err(fields.missing(name));
    };
    let list = match value {
        Value::Array(list) if list.is_empty() => {
            return Err(ApiError::invalid(name, format!("{name}: the array is empty")));
        }
        Value::Array(list) if !list.iter().any(Value::is_number) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    if list.len() > most {
        return Err(ApiError::invalid(name, format!("{name}: at most {most} texts")));
    }
    list.iter().map(|item| prompt(fields, name, item, tokenizer)).collect()
}

fn prompt(
    fields: &Fields<'_>,
    name: &str,
    item: &Value,
    tokenizer: &Tokenizer,
) -> ApiResult<Prompt> {
    match item {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(list) if list.iter().any(|item| item.is_array() || item.is_object()) => {
            Err(fields.wrong(name, EXPECTED))
        }
        Value::Array(list) => {
            let ids = mixed(list, tokenizer).map(Prompt::Tokens);
            ids.ok_or_else(|| fields.wrong(name, EXPECTED))
        }
        Value::Object(map)
            if item["prompt_string"].is_string() || item["prompt_string"].is_array() =>
        {
            let has_media = map.get("multimodal_data").is_some_and(|data| {
                !data.is_null() && data.as_array().is_none_or(|list| !list.is_empty())
            });
            if has_media {
                return Err(ApiError::not_text(name, "multimodal_data"));
            }
            prompt(fields, name, &item["prompt_string"], tokenizer)
        }
        _ => Err(fields.wrong(name, EXPECTED)),
    }
}

/// Token ids, if that is what they are.
pub fn token_ids(list: &[Value]) -> Option<Vec<u32>> {
    list.iter().map(|item| integer(item).and_then(|id| u32::try_from(id).ok())).collect()
}

/// The tokens of a list of token ids and texts.
pub fn mixed(list: &[Value], tokenizer: &Tokenizer) -> Option<Vec<u32>> {
    if let Some(ids) = token_ids(list) {
        return Some(ids);
    }
    let mut out = Vec::new();
    for (i, item) in list.iter().enumerate() {
        match item {
            Value::String(text) => {
                let options = EncodeOptions { add_special: i == 0, parse_special: true };
                out.extend(tokenizer.encode(text, options));
            }
            other => out.push(integer(other).and_then(|id| u32::try_from(id).ok())?),
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::limits::MAX_PROMPTS;
    use crate::server::prompt::tests::tokenizer;
    use serde_json::json;

    fn read(prompt: Value) -> Option<Vec<String>> {
        let body = json!({ "prompt": prompt });
        let fields = Fields::of(&body, "").unwrap();
        let prompts = prompts(&fields, "prompt", MAX_PROMPTS, &tokenizer()).ok()?;
        Some(prompts.iter().map(|prompt| format!("{prompt:?}")).collect())
    }

    #[test]
    fn prompts_are_one_or_several() {
        let one = |text: &str| Some(vec![text.to_owned()]);
        assert_eq!(read(json!("a")), one("Text(\"a\")"));
        assert_eq!(read(json!([1, 2])), one("Tokens([1, 2])"));
        assert_eq!(read(json!([1, "a", 2])), one("Tokens([1, 97, 2])"));
        assert_eq!(read(json!({ "prompt_string": "a" })), one("Text(\"a\")"));
        assert_eq!(
            read(json!({ "prompt_string": "a", "multimodal_data": [] })),
            one("Text(\"a\")")
        );
        let two = read(json!(["a", [1, 2]])).unwrap();
        assert_eq!(two, ["Text(\"a\")", "Tokens([1, 2])"]);
        assert_eq!(read(json!([[1, 2], [1, "a"]])).unwrap().len(), 2);
        assert_eq!(read(json!([{ "prompt_string": [1] }])), one("Tokens([1])"));
        for bad in [
            json!([]),
            json!(5),
            json!(true),
            json!([true]),
            json!([[[1]]]),
            json!([1, [2]]),
            json!([1.5]),
            json!([-1]),
            json!({}),
            json!({ "prompt_string": 5 }),
            json!({ "prompt_string": "a", "multimodal_data": ["AA=="] }),
            json!({ "prompt_string": "a", "multimodal_data": "AA==" }),
            json!(vec!["a"; MAX_PROMPTS + 1]),
        ] {
            assert_eq!(read(bad.clone()), None, "{bad}");
        }
    }
}
