//! Messages of a chat as OpenAI writes them, checked and as templates read them.

use serde_json::{Map, Value};

use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::{Fields, wrong};
use crate::server::limits::MAX_MESSAGES;

const ROLES: &str = "system, developer, user, assistant, tool or function";

/// The messages, and whether the last one is the assistant's.
pub fn messages(fields: &Fields<'_>) -> ApiResult<(Vec<Value>, bool)> {
    let Some(list) = fields.array("messages")? else {
        return Err(fields.missing("messages"));
    };
    if list.is_empty() || list.len() > MAX_MESSAGES {
        let message = format!("messages: expected 1 to {MAX_MESSAGES} messages");
        return Err(ApiError::invalid("messages", message));
    }
    let each = list.iter().enumerate();
    let out = each.map(|(i, value)| message(value, &format!("messages[{i}]")));
    let out = out.collect::<ApiResult<Vec<Value>>>()?;
    let is_assistant = |value: &Value| value["role"] == "assistant";
    let continues = out.last().is_some_and(is_assistant);
    if continues && out.len() > 1 && is_assistant(&out[out.len() - 2]) {
        let message = "messages: two messages of the assistant stand at the end; an answer can go \
                       on with one";
        return Err(ApiError::invalid("messages", message));
    }
    Ok((out, continues))
}

fn message(value: &Value, path: &str) -> ApiResult<Value> {
    let fields = Fields::of(value, path)?;
    let role = fields.string("role")?;
    let role = match role {
        // The same place and the same meaning.
        Some("developer") => "system",
        Some("function") => "tool",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        Some(other) => {
            let path = fields.path("role");
            let message = format!("{path}: expected {ROLES}, got {other:?}");
            return Err(ApiError::invalid(path, message));
        }
        None => return Err(fields.missing("role")),
    };
    let mut out: Map<String, Value> = value.as_object().cloned().unwrap_or_default();
    out.retain(|_, value| !value.is_null());
    out.insert("role".into(), role.into());
    let has_calls = fields.array("tool_calls")?.is_some_and(|calls| !calls.is_empty());
    for name in ["reasoning_content", "reasoning", "name", "tool_call_id"] {
        fields.string(name)?;
    }
    let content_path = fields.path("content");
    let content = match fields.get("content") {
        Some(Value::String(text)) => Value::String(text.clone()),
        Some(Value::Array(parts)) => Value::Array(text_parts(parts, &content_path)?),
        Some(other) => return Err(wrong(&content_path, "a string or an array of parts", other)),
        None if role == "assistant" && has_calls => Value::String(String::new()),
        None => return Err(fields.missing("content")),
    };
    out.insert("content".into(), content);
    Ok(Value::Object(out))
}

/// Parts of text, all of the type `text`.
fn text_parts(parts: &[Value], path: &str) -> ApiResult<Vec<Value>> {
    let part = |(i, part): (usize, &Value)| {
        let path = format!("{path}[{i}]");
        let fields = Fields::of(part, &path)?;
        let text = match fields.required("type")? {
            "text" | "input_text" | "output_text" => fields.string("text")?,
            "refusal" => fields.string("refusal")?,
            kind @ ("image_url" | "input_image" | "input_audio" | "file" | "input_file") => {
                return Err(ApiError::not_text(&path, kind));
            }
            other => {
                let path = fields.path("type");
                let message = format!("{path}: expected text, got {other:?}");
                return Err(ApiError::invalid(path, message));
            }
        };
        let text = text.ok_or_else(|| fields.missing("text"))?;
        Ok(serde_json::json!({ "type": "text", "text": text }))
    };
    parts.iter().enumerate().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(list: Value) -> Result<(Vec<Value>, bool), (Option<String>, String)> {
        let body = json!({ "messages": list });
        let fields = Fields::of(&body, "").unwrap();
        messages(&fields).map_err(|e| (e.param, e.message))
    }

    #[test]
    fn messages_become_what_templates_read() {
        let (got, continues) = read(json!([
            {"role": "developer", "content": "be brief", "name": null},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]},
            {"role": "function", "content": "7"},
        ]))
        .unwrap();
        assert!(!continues);
        assert_eq!(got[0], json!({"role": "system", "content": "be brief"}));
        assert_eq!(got[1]["content"], json!([{"type": "text", "text": "hi"}]));
        assert_eq!(got[2]["content"], "");
        assert_eq!(got[3]["role"], "tool");
        assert!(read(json!([{"role": "assistant", "content": "So"}])).unwrap().1);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (list, path, words) in [
            (json!([]), "messages", "1 to 16384"),
            (json!([1]), "messages[0]", "an object"),
            (json!([{"content": "x"}]), "messages[0].role", "missing"),
            (json!([{"role": "robot", "content": "x"}]), "messages[0].role", "robot"),
            (json!([{"role": "user"}]), "messages[0].content", "missing"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content", "a string or"),
            (
                json!([{"role": "user", "content": [{"type": "image_url"}]}]),
                "messages[0].content[0]",
                "image input is not supported",
            ),
            (
                json!([
                    {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"},
                ]),
                "messages",
                "two messages",
            ),
        ] {
            let (param, message) = read(list.clone()).unwrap_err();
            assert_eq!(param.as_deref(), Some(path), "{list}");
            assert!(message.contains(words), "{list}: {message}");
        }
    }
}
