//! Messages of a chat as OpenAI writes them, checked and as templates read them.

use serde_json::{Map, Value};

use super::parts;
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
    let roles: Vec<&str> =
        list.iter().map(|value| value["role"].as_str().unwrap_or_default()).collect();
    let newest = parts::newest(&roles);
    let each = list.iter().enumerate();
    let out = each.map(|(i, value)| message(value, &format!("messages[{i}]"), newest == Some(i)));
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

/// `is_new`: the user sends it now.
fn message(value: &Value, path: &str, is_new: bool) -> ApiResult<Value> {
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
    fields.array("tool_calls")?;
    for name in ["reasoning_content", "reasoning", "name", "tool_call_id"] {
        fields.string(name)?;
    }
    let content_path = fields.path("content");
    let content = match fields.get("content") {
        Some(Value::String(text)) => Value::String(text.clone()),
        Some(Value::Array(list)) => {
            let (parts, thoughts) = text_parts(list, &content_path, is_new)?;
            if !thoughts.is_empty() {
                out.entry("reasoning_content").or_insert_with(|| thoughts.into());
            }
            Value::Array(parts)
        }
        Some(other) => return Err(wrong(&content_path, "a string or an array of parts", other)),
        // An answer that was cut in its reasoning, or a tool without a result.
        None if fields.has("content") || ["assistant", "tool"].contains(&role) => "".into(),
        None => return Err(fields.missing("content")),
    };
    out.insert("content".into(), content);
    Ok(Value::Object(out))
}

/// Parts of text, all of the type `text`, and thoughts that stand among them.
fn text_parts(list: &[Value], path: &str, is_new: bool) -> ApiResult<(Vec<Value>, String)> {
    let (mut out, mut thoughts) = (Vec::new(), String::new());
    for (i, part) in list.iter().enumerate() {
        let path = format!("{path}[{i}]");
        let fields = Fields::of(part, &path)?;
        let own = |name| Ok::<_, ApiError>(fields.string(name)?.map(str::to_owned));
        let text = match fields.required("type")? {
            "text" | "input_text" | "output_text" => own("text")?,
            "refusal" => own("refusal")?,
            kind @ ("thinking" | "reasoning" | "redacted_thinking") => {
                let name = if kind == "thinking" { "thinking" } else { "text" };
                thoughts.push_str(fields.string(name)?.unwrap_or_default());
                continue;
            }
            kind => Some(parts::text(part, kind, &path, is_new)?),
        };
        let is_null = ["text", "refusal"].iter().any(|name| fields.has(name));
        let text = text.or_else(|| is_null.then(String::new));
        let text = text.ok_or_else(|| fields.missing("text"))?;
        out.push(serde_json::json!({ "type": "text", "text": text }));
    }
    Ok((out, thoughts))
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
    fn what_says_nothing_is_an_empty_text() {
        let (got, continues) = read(json!([
            {"role": "user", "content": null},
            {"role": "assistant", "content": null, "reasoning_content": "hm"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "a"}]},
            {"role": "tool", "tool_call_id": "a", "content": null},
            {"role": "function", "name": "f"},
            {"role": "assistant"},
        ]))
        .unwrap();
        assert!(continues && got.iter().all(|message| message["content"] == ""), "{got:?}");
        let thoughts = json!([{"type": "thinking", "thinking": "h"},
            {"type": "reasoning", "text": "m"}, {"type": "text", "text": null}]);
        let (got, _) = read(json!([{"role": "assistant", "content": thoughts}])).unwrap();
        let content = json!([{"type": "text", "text": ""}]);
        let expected = json!({"role": "assistant", "content": content, "reasoning_content": "hm"});
        assert_eq!(got, [expected]);
    }

    #[test]
    fn a_note_stands_for_what_cannot_be_read() {
        let image =
            json!([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]);
        let noted = json!([{"type": "text", "text": parts::IMAGE}]);
        let user = |content: &Value| json!({"role": "user", "content": content});
        let call = json!({"role": "assistant", "content": null, "tool_calls": [{"id": "a"}]});
        let result = json!({"role": "tool", "tool_call_id": "a", "content": image});
        let (got, _) = read(json!([user(&image), call, result])).unwrap();
        assert_eq!((&got[0]["content"], &got[2]["content"]), (&noted, &noted));
        let (got, _) = read(json!([user(&image), user(&json!("never mind"))])).unwrap();
        assert_eq!(got[0]["content"], noted);
        let later = json!({"role": "system", "content": "Be brief."});
        let (param, _) = read(json!([user(&json!("a")), user(&image), later])).unwrap_err();
        assert_eq!(param.as_deref(), Some("messages[1].content[0]"));
        let data = "data:text/plain;base64,aGk=";
        let file = json!([{"type": "file", "file": {"filename": "a.txt", "file_data": data}}]);
        let (got, _) = read(json!([user(&file)])).unwrap();
        assert_eq!(got[0]["content"], json!([{"type": "text", "text": "a.txt\nhi"}]));
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
