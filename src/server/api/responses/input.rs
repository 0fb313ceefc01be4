//! The items of a request's input as messages of a chat. What the assistant has said, thought and
//! called between two other items is one message.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value, json};

use super::tools::{Offered, flat, shell_arguments};
use crate::server::api::parts;
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::{Fields, wrong};
use crate::server::limits::MAX_MESSAGES;

/// The messages, and whether the answer goes on in the last one.
pub fn messages(fields: &Fields<'_>, offered: &Offered) -> ApiResult<(Vec<Value>, bool)> {
    let mut reader = Reader { offered, out: Vec::new(), open: Open::default(), skipped: vec![] };
    if let Some(text) = fields.string("instructions")?.filter(|text| !text.is_empty()) {
        reader.out.push(json!({ "role": "system", "content": text }));
    }
    match fields.get("input") {
        Some(Value::String(text)) => reader.out.push(json!({ "role": "user", "content": text })),
        Some(Value::Array(items)) if (1..=MAX_MESSAGES).contains(&items.len()) => {
            let roles: Vec<&str> = items.iter().map(role).collect();
            let newest = parts::newest(&roles);
            for (i, item) in items.iter().enumerate() {
                reader.item(item, &format!("input[{i}]"), newest == Some(i))?;
            }
        }
        Some(Value::Array(_)) => {
            let message = format!("input: expected 1 to {MAX_MESSAGES} items");
            return Err(ApiError::invalid("input", message));
        }
        Some(other) => return Err(wrong("input", "a string or an array of items", other)),
        None => return Err(fields.missing("input")),
    }
    let continues = reader.open.is_text();
    reader.close();
    if !reader.skipped.is_empty() {
        log::warn!("items of these types were left out: {}", reader.skipped.join(", "));
    }
    match reader.out.is_empty() {
        true => Err(ApiError::invalid("input", "input: there is nothing to answer")),
        false => Ok((reader.out, continues)),
    }
}

/// The role of a message; all else is what the assistant or its tools have done.
fn role(item: &Value) -> &str {
    match item["type"].as_str() {
        None | Some("message") => item["role"].as_str().unwrap_or_default(),
        Some(_) => "tool",
    }
}

/// The text as clients get it that keep no reasoning but what is encrypted. Nothing of it is
/// secret.
pub fn encrypted(reasoning: &str) -> String {
    BASE64_STANDARD.encode(reasoning)
}

/// That text back; `None` if another server has encrypted it.
fn decrypted(text: &str) -> Option<String> {
    String::from_utf8(BASE64_STANDARD.decode(text).ok()?).ok()
}

struct Reader<'a> {
    offered: &'a Offered,
    out: Vec<Value>,
    open: Open,
    /// Types of items without a meaning here.
    skipped: Vec<String>,
}

/// A message of the assistant in the making.
#[derive(Default)]
struct Open {
    reasoning: Option<String>,
    content: Option<String>,
    calls: Vec<Value>,
}

impl Open {
    fn is_text(&self) -> bool {
        self.content.is_some() && self.calls.is_empty()
    }
}

/// Adds a text that begins a line of its own.
fn add_line(all: &mut Option<String>, text: &str) {
    let Some(all) = all else {
        *all = Some(text.to_owned());
        return;
    };
    if !all.is_empty() && !all.ends_with('\n') && !text.starts_with('\n') {
        all.push('\n');
    }
    all.push_str(text);
}

impl Reader<'_> {
    fn item(&mut self, item: &Value, path: &str, is_new: bool) -> ApiResult<()> {
        let fields = Fields::of(item, path)?;
        match fields.string("type")? {
            Some("message") => self.message(&fields, is_new)?,
            None if item.get("role").is_some() => self.message(&fields, is_new)?,
            Some("reasoning") => self.reasoning(&fields)?,
            Some("function_call") => {
                let arguments = match fields.get("arguments") {
                    Some(Value::String(text)) => text.clone(),
                    Some(other) => other.to_string(),
                    None => "{}".to_owned(),
                };
                let function = json!({ "name": self.name(&fields)?, "arguments": arguments });
                self.call(&fields, "function", function)?;
            }
            Some("custom_tool_call") => {
                let input = fields.string("input")?.unwrap_or_default();
                let custom = json!({ "name": self.name(&fields)?, "input": input });
                self.call(&fields, "custom", custom)?;
            }
            Some("local_shell_call") => {
                let action = fields.get("action").unwrap_or(&Value::Null);
                let arguments = shell_arguments(action);
                let function = json!({ "name": self.offered.shell(), "arguments": arguments });
                self.call(&fields, "function", function)?;
            }
            Some(
                "function_call_output" | "custom_tool_call_output" | "local_shell_call_output",
            ) => {
                self.output(&fields)?;
            }
            Some("item_reference") => {
                let message = format!(
                    "{path}: items are not stored, so there is nothing to refer to: send the item"
                );
                return Err(ApiError::invalid(path, message));
            }
            // The server that has searched gave no result with it.
            Some("web_search_call") => {}
            Some(other) => {
                if !self.skipped.iter().any(|name| name == other) {
                    self.skipped.push(other.chars().take(64).collect());
                }
            }
            None => return Err(fields.missing("type")),
        }
        Ok(())
    }

    fn message(&mut self, fields: &Fields<'_>, is_new: bool) -> ApiResult<()> {
        let role = fields.required("role")?;
        let path = fields.path("content");
        let texts = match fields.get("content") {
            Some(value) => texts(value, &path, is_new)?,
            None if role == "assistant" || fields.has("content") => Vec::new(),
            None => return Err(fields.missing("content")),
        };
        match role {
            "assistant" => add_line(&mut self.open.content, &texts.concat()),
            "user" => self.push("user", content(texts)),
            "system" | "developer" => self.push("system", content(texts)),
            other => {
                let path = fields.path("role");
                let expected = "system, developer, user or assistant";
                let message = format!("{path}: expected {expected}, got {other:?}");
                return Err(ApiError::invalid(path, message));
            }
        }
        Ok(())
    }

    fn reasoning(&mut self, fields: &Fields<'_>) -> ApiResult<()> {
        let list = |name| Ok::<_, ApiError>(fields.array(name)?.map_or(&[][..], Vec::as_slice));
        let joined = |list: &[Value], between: &str| {
            let texts: Vec<&str> = list.iter().filter_map(|part| part["text"].as_str()).collect();
            Some(texts.join(between)).filter(|text| !text.is_empty())
        };
        let content = joined(list("content")?, "");
        let kept = fields.string("encrypted_content")?.and_then(decrypted);
        let summary = joined(list("summary")?, "\n\n");
        if let Some(text) = content.or(kept).or(summary) {
            add_line(&mut self.open.reasoning, &text);
        }
        Ok(())
    }

    /// The function's name of a call.
    fn name(&self, fields: &Fields<'_>) -> ApiResult<String> {
        let name = fields.required("name")?;
        Ok(flat(fields.string("namespace")?, name))
    }

    fn call(&mut self, fields: &Fields<'_>, kind: &str, tool: Value) -> ApiResult<()> {
        let id = call_id(fields)?;
        self.open.calls.push(json!({ "id": id, "type": kind, kind: tool }));
        Ok(())
    }

    fn output(&mut self, fields: &Fields<'_>) -> ApiResult<()> {
        let id = call_id(fields)?;
        let output = match fields.get("output") {
            None => Value::from(""),
            Some(Value::Array(parts)) => {
                content(texts(&Value::Array(parts.clone()), &fields.path("output"), false)?)
            }
            Some(Value::String(text)) => text.as_str().into(),
            // Older clients wrap the text.
            Some(other) => match other["content"].as_str() {
                Some(text) => text.into(),
                None => other.to_string().into(),
            },
        };
        self.close();
        self.out.push(json!({ "role": "tool", "tool_call_id": id, "content": output }));
        Ok(())
    }

    fn push(&mut self, role: &str, content: Value) {
        self.close();
        self.out.push(json!({ "role": role, "content": content }));
    }

    /// Ends the assistant's message. Reasoning that has led to nothing is left out.
    fn close(&mut self) {
        let Open { reasoning, content, calls } = std::mem::take(&mut self.open);
        if content.is_none() && calls.is_empty() {
            return;
        }
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        message.insert("content".into(), content.unwrap_or_default().into());
        if let Some(text) = reasoning {
            message.insert("reasoning_content".into(), text.into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".into(), calls.into());
        }
        self.out.push(Value::Object(message));
    }
}

/// The id of a call, of older clients that of its item.
fn call_id<'a>(fields: &Fields<'a>) -> ApiResult<&'a str> {
    let id = fields.string("call_id")?.or(fields.string("id")?);
    id.ok_or_else(|| fields.missing("call_id"))
}

/// One text, or parts.
fn content(mut texts: Vec<String>) -> Value {
    match texts.len() {
        0 => "".into(),
        1 => texts.remove(0).into(),
        _ => texts.iter().map(|text| json!({ "type": "text", "text": text })).collect(),
    }
}

/// The texts of a content, which the user sends now if `is_new`.
fn texts(content: &Value, path: &str, is_new: bool) -> ApiResult<Vec<String>> {
    let parts = match content {
        Value::String(text) => return Ok(vec![text.clone()]),
        Value::Array(parts) => parts,
        other => return Err(wrong(path, "a string or an array of parts", other)),
    };
    let part = |(i, part): (usize, &Value)| {
        let path = format!("{path}[{i}]");
        let fields = Fields::of(part, &path)?;
        match fields.required("type")? {
            "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text" => {
                match fields.string("text")? {
                    None if !fields.has("text") => Err(fields.missing("text")),
                    text => Ok(text.unwrap_or_default().to_owned()),
                }
            }
            "refusal" => Ok(fields.string("refusal")?.unwrap_or_default().to_owned()),
            kind => parts::text(part, kind, &path, is_new),
        }
    };
    parts.iter().enumerate().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &Value) -> Result<(Vec<Value>, bool), (Option<String>, String)> {
        let fields = Fields::of(body, "").unwrap();
        let offered = Offered::read(&fields).unwrap();
        messages(&fields, &offered).map_err(|e| (e.param, e.message))
    }

    fn user(text: &str) -> Value {
        json!({ "role": "user", "content": text })
    }

    #[test]
    fn items_between_others_are_one_message_of_the_assistant() {
        let body = json!({
            "instructions": "Be brief.",
            "input": [
                { "type": "message", "role": "developer", "content":
                    [{ "type": "input_text", "text": "No jokes." }] },
                { "role": "user", "content":
                    [{ "type": "input_text", "text": "a" }, { "type": "text", "text": "b" }] },
                { "type": "reasoning", "summary": [{ "type": "summary_text", "text": "short" }],
                    "content": [{ "type": "reasoning_text", "text": "long" }] },
                { "type": "message", "role": "assistant", "content":
                    [{ "type": "output_text", "text": "I look." }] },
                { "type": "function_call", "call_id": "1", "name": "look", "arguments": "{}" },
                { "type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x\ny" },
                { "type": "ghost_snapshot" },
                { "type": "function_call_output", "call_id": "1", "output": "seen" },
                { "type": "custom_tool_call_output", "call_id": "2", "output":
                    [{ "type": "input_text", "text": "done" }, { "type": "input_image" }] },
                { "type": "reasoning", "summary": [], "encrypted_content": encrypted("hm") },
                { "type": "local_shell_call", "id": "3", "call_id": "3", "status": "completed",
                    "action": { "type": "exec", "command": ["ls"], "env": {} } },
                { "type": "local_shell_call_output", "id": "3", "output": "files" },
                { "type": "function_call", "call_id": "4", "namespace": "mail", "name": "send" },
                { "type": "function_call_output", "call_id": "4", "output":
                    { "content": "sent", "success": true } },
                { "type": "web_search_call", "status": "completed" },
                { "type": "reasoning", "summary": [{ "type": "summary_text", "text": "lost" }] },
                { "type": "message", "role": "user", "content": "c" },
            ],
        });
        let (got, continues) = read(&body).unwrap();
        assert!(!continues);
        let call = |id: &str, name: &str, arguments: &str| {
            let function = json!({ "name": name, "arguments": arguments });
            json!({ "id": id, "type": "function", "function": function })
        };
        let result = |id: &str, out: Value| {
            let mut message = json!({ "role": "tool", "tool_call_id": id });
            message["content"] = out;
            message
        };
        let text = |text: &str| json!({ "type": "text", "text": text });
        let custom = json!({ "name": "patch", "input": "x\ny" });
        let expected = [
            json!({ "role": "system", "content": "Be brief." }),
            json!({ "role": "system", "content": "No jokes." }),
            json!({ "role": "user", "content": [text("a"), text("b")] }),
            json!({ "role": "assistant", "content": "I look.", "reasoning_content": "long",
                "tool_calls": [call("1", "look", "{}"),
                    { "id": "2", "type": "custom", "custom": custom }] }),
            result("1", "seen".into()),
            result("2", json!([text("done"), text(parts::IMAGE)])),
            json!({ "role": "assistant", "content": "", "reasoning_content": "hm",
                "tool_calls": [call("3", "shell", "{\"command\":[\"ls\"]}")] }),
            result("3", "files".into()),
            json!({ "role": "assistant", "content": "",
                "tool_calls": [call("4", "mail__send", "{}")] }),
            result("4", "sent".into()),
            user("c"),
        ];
        assert_eq!(got, expected);
    }

    #[test]
    fn a_text_is_a_message_and_the_assistants_last_one_goes_on() {
        assert_eq!(read(&json!({ "input": "hi" })).unwrap(), (vec![user("hi")], false));
        let said = |text: &str| json!({ "role": "assistant", "content": text });
        let body = json!({ "input": [user("a"), said("b"), said("c")] });
        assert_eq!(read(&body).unwrap(), (vec![user("a"), said("b\nc")], true));
        let body = json!({ "input": [user("a"), said("b"),
            { "type": "function_call", "call_id": "1", "name": "f", "arguments": "{}" }] });
        assert!(!read(&body).unwrap().1);
    }

    #[test]
    fn images_are_refused_in_the_last_message_and_noted_in_others() {
        let image = json!({ "role": "user", "content": [{ "type": "input_image" }] });
        let (param, message) = read(&json!({ "input": [image] })).unwrap_err();
        assert_eq!(param.as_deref(), Some("input[0].content[0]"));
        assert!(message.contains("image input is not supported"), "{message}");
        let got = read(&json!({ "input": [image, user("a")] })).unwrap().0;
        assert_eq!(got, [user(parts::IMAGE), user("a")]);
        let call = json!({ "type": "function_call", "call_id": "1", "name": "f" });
        let odd = json!({ "role": "user", "content": [{ "type": "hologram" }] });
        let got = read(&json!({ "input": [image, odd, call] })).unwrap().0;
        assert_eq!(got[0], user(parts::IMAGE));
        let file = json!({ "type": "input_file", "filename": "a.txt",
            "file_data": "data:text/plain;base64,aGk=" });
        let got = read(&json!({ "input": [{ "role": "user", "content": [file] }] })).unwrap().0;
        assert_eq!(got, [user("a.txt\nhi")]);
        let said = json!({ "role": "assistant", "content": null });
        let got = read(&json!({ "input": [user("a"), said, user("b")] })).unwrap().0;
        assert_eq!(got[1], json!({ "role": "assistant", "content": "" }));
    }

    #[test]
    fn reasoning_of_other_servers_is_not_read() {
        for text in ["gAAAAAB_x-y=", "//79", "not base64"] {
            assert_eq!(decrypted(text), None, "{text}");
        }
        assert_eq!(decrypted(&encrypted("hm, é")).as_deref(), Some("hm, é"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, path) in [
            (json!({}), "input"),
            (json!({ "input": 5 }), "input"),
            (json!({ "input": [] }), "input"),
            (json!({ "input": [5] }), "input[0]"),
            (json!({ "input": [{}] }), "input[0].type"),
            (json!({ "input": [{ "type": "ghost" }] }), "input"),
            (json!({ "input": [{ "type": "message", "content": "x" }] }), "input[0].role"),
            (json!({ "input": [{ "role": "robot", "content": "x" }] }), "input[0].role"),
            (json!({ "input": [{ "role": "user" }] }), "input[0].content"),
            (
                json!({ "input": [{ "role": "user", "content": [{ "type": "x" }] }] }),
                "input[0].content[0].type",
            ),
            (json!({ "input": [{ "type": "function_call", "call_id": "1" }] }), "input[0].name"),
            (json!({ "input": [{ "type": "function_call", "name": "f" }] }), "input[0].call_id"),
            (json!({ "input": [{ "type": "item_reference", "id": "x" }] }), "input[0]"),
            (json!({ "instructions": 5, "input": "x" }), "instructions"),
        ] {
            assert_eq!(read(&body).unwrap_err().0.as_deref(), Some(path), "{body}");
        }
    }
}
