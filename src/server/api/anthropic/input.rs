//! Conversations as Anthropic writes them, as templates read them.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{blocks, tools};
use crate::chat::reasoning::Think;
use crate::server::api::chat::{effort, variables};
use crate::server::api::parts;
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::{Fields, wrong};
use crate::server::limits::MAX_MESSAGES;
use crate::server::request::Chat;
use crate::server::service::Service;

/// Begins a line of Claude Code's that is another one in each request: with it in the prompt, no
/// prompt would begin like the one before.
const BILLING: &str = "x-anthropic-billing-header:";

/// The conversation of a body.
pub fn chat(fields: &Fields<'_>, service: &Service) -> ApiResult<Chat> {
    let (messages, continues) = messages(fields)?;
    let tools = tools::tools(fields)?;
    let (tool_choice, has_parallel_calls) = tools::choice(fields, &tools)?;
    let (think, reasoning_budget) = thinking(fields)?;
    Ok(Chat {
        messages,
        continues,
        ends_bare: false,
        tools: Arc::new(tools),
        tool_choice,
        has_parallel_calls,
        variables: variables(fields)?,
        think,
        reasoning_budget,
        keeps_reasoning_in_content: service.defaults.keeps_reasoning_in_content,
    })
}

/// Whether and how long the model is to think. Where nothing is said, the template decides.
fn thinking(fields: &Fields<'_>) -> ApiResult<(Option<Think>, Option<usize>)> {
    let mut grade = None;
    if let Some(value) = fields.get("output_config") {
        let path = "output_config.effort";
        let name = Fields::of(value, "output_config")?.string("effort")?;
        grade = name.map(|name| effort(path, name)).transpose()?;
    }
    let Some(value) = fields.get("thinking") else { return Ok((grade, None)) };
    let thinking = Fields::of(value, "thinking")?;
    let budget = thinking.count("budget_tokens")?.flatten();
    match thinking.string("type")? {
        Some("enabled") => Ok((grade.or(Some(Think::On)), budget)),
        Some("adaptive") => Ok((grade, budget)),
        Some("disabled") => Ok((Some(Think::Off), None)),
        _ => Err(thinking.wrong("type", "enabled, disabled or adaptive")),
    }
}

/// Whether an answer leaves thinking out. A summary is all of it: nothing here makes a shorter one.
pub fn omits_thinking(fields: &Fields<'_>) -> ApiResult<bool> {
    let Some(value) = fields.get("thinking") else { return Ok(false) };
    let thinking = Fields::of(value, "thinking")?;
    match thinking.string("display")? {
        None | Some("summarized") => Ok(false),
        Some("omitted") => Ok(true),
        Some(_) => Err(thinking.wrong("display", "summarized or omitted")),
    }
}

/// The messages, and whether the last one is the assistant's.
fn messages(fields: &Fields<'_>) -> ApiResult<(Vec<Value>, bool)> {
    let mut reader = Reader::default();
    if let Some(value) = fields.get("system") {
        let text = reader.system(value, "system")?;
        if !text.is_empty() {
            reader.push("system", text);
        }
    }
    let list = fields.array("messages")?.ok_or_else(|| fields.missing("messages"))?;
    if list.is_empty() || list.len() > MAX_MESSAGES {
        let message = format!("messages: expected 1 to {MAX_MESSAGES} messages");
        return Err(ApiError::invalid("messages", message));
    }
    let roles: Vec<&str> = list.iter().map(role).collect();
    let newest = parts::newest(&roles);
    for (i, value) in list.iter().enumerate() {
        reader.message(value, &format!("messages[{i}]"), newest == Some(i))?;
    }
    if !reader.skipped.is_empty() {
        let kinds: Vec<&str> = reader.skipped.iter().map(String::as_str).collect();
        log::warn!("blocks of these types are left out of a prompt: {}", kinds.join(", "));
    }
    let last = reader.out.last().filter(|last| last["role"] == "assistant");
    if last.is_some_and(|last| last.get("tool_calls").is_some()) {
        let path = format!("messages[{}]", list.len() - 1);
        let message = format!("{path}: a tool_result must follow a tool_use");
        return Err(ApiError::invalid(path, message));
    }
    let continues = last.is_some();
    Ok((reader.out, continues))
}

/// The role of a message; one that brings the results of tools is the tools'.
fn role(message: &Value) -> &str {
    let blocks = message["content"].as_array();
    let is_result = |block: &Value| block["type"] == "tool_result";
    match blocks.is_some_and(|blocks| blocks.iter().any(is_result)) {
        true => "tool",
        false => message["role"].as_str().unwrap_or_default(),
    }
}

/// Whether blocks of this type are of tools that Anthropic's servers run, or for them alone.
fn is_of_servers(kind: &str) -> bool {
    kind.ends_with("_tool_use")
        || kind.ends_with("_tool_result")
        || ["redacted_thinking", "container_upload", "compaction"].contains(&kind)
}

/// The place of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// A message of the system's or the assistant's.
    Other,
    /// An earlier message of the user's, or a result of a tool.
    Earlier,
    /// The message that the user sends now.
    New,
}

/// The error of a block that stands where only others do.
fn misplaced(path: &str, expected: &str) -> ApiError {
    ApiError::invalid(path, format!("{path}: expected blocks of {expected} here"))
}

/// A part of a message.
enum Block<'a> {
    Text(Cow<'a, str>),
    Thinking(Cow<'a, str>),
    /// A call, as chats write it.
    ToolUse(Value),
    ToolResult {
        id: &'a str,
        content: Option<&'a Value>,
        /// The content's path in the body.
        path: String,
        is_error: bool,
    },
    /// Something that only the service that made it can read.
    Other,
}

/// Translates messages one by one.
#[derive(Default)]
struct Reader {
    out: Vec<Value>,
    /// Types of blocks that are left out.
    skipped: BTreeSet<String>,
}

impl Reader {
    fn message(&mut self, value: &Value, path: &str, is_new: bool) -> ApiResult<()> {
        let fields = Fields::of(value, path)?;
        let content_path = fields.path("content");
        let role = fields.required("role")?;
        let empty = Value::String(String::new());
        let content = match fields.get("content") {
            Some(content) => content,
            // An answer that was cut in its reasoning.
            None if role == "assistant" || fields.has("content") => &empty,
            None => return Err(fields.missing("content")),
        };
        match role {
            "system" | "developer" => {
                let text = self.system(content, &content_path)?;
                self.push("system", text);
                Ok(())
            }
            "user" => {
                let place = if is_new { Place::New } else { Place::Earlier };
                self.user(content, &content_path, place)
            }
            "assistant" => self.assistant(content, &content_path),
            _ => Err(fields.wrong("role", "user, assistant or system")),
        }
    }

    /// The texts of a system message.
    fn system(&mut self, value: &Value, path: &str) -> ApiResult<String> {
        let mut texts = Vec::new();
        for text in self.texts(value, path, Place::Other)? {
            let is_billing = text.starts_with(BILLING);
            let text = if is_billing { after_line(&text).to_owned() } else { text.into_owned() };
            texts.extend((!is_billing || !text.is_empty()).then_some(text));
        }
        Ok(texts.join("\n"))
    }

    /// The texts of a content that has nothing else.
    fn texts<'a>(
        &mut self,
        value: &'a Value,
        path: &str,
        place: Place,
    ) -> ApiResult<Vec<Cow<'a, str>>> {
        let mut texts = Vec::new();
        for block in self.blocks(value, path, place)? {
            match block {
                Block::Text(text) => texts.push(text),
                Block::Other => {}
                _ => return Err(misplaced(path, "text")),
            }
        }
        Ok(texts)
    }

    /// Texts and results of tools, in their order.
    fn user(&mut self, value: &Value, path: &str, place: Place) -> ApiResult<()> {
        let n_before = self.out.len();
        let mut texts = Vec::new();
        for block in self.blocks(value, path, place)? {
            match block {
                Block::Text(text) => texts.push(text),
                Block::ToolResult { id, content, path, is_error } => {
                    if !texts.is_empty() {
                        self.push("user", std::mem::take(&mut texts).join("\n"));
                    }
                    let text = self.result(content, is_error, &path)?;
                    let result = json!({ "role": "tool", "tool_call_id": id, "content": text });
                    self.out.push(result);
                }
                Block::Other => {}
                _ => return Err(misplaced(path, "text and tool_result")),
            }
        }
        if !texts.is_empty() || self.out.len() == n_before {
            self.push("user", texts.join("\n"));
        }
        Ok(())
    }

    /// The text of a tool's result.
    fn result(&mut self, value: Option<&Value>, is_error: bool, path: &str) -> ApiResult<String> {
        let texts = value.map(|value| self.texts(value, path, Place::Earlier)).transpose()?;
        let text = texts.unwrap_or_default().join("\n");
        // Chats have no other way to say so.
        Ok(if is_error { format!("Error: {text}") } else { text })
    }

    fn assistant(&mut self, value: &Value, path: &str) -> ApiResult<()> {
        let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
        for block in self.blocks(value, path, Place::Other)? {
            match block {
                Block::Text(part) => text.push_str(&part),
                Block::Thinking(part) => reasoning.push_str(&part),
                Block::ToolUse(call) => calls.push(call),
                Block::Other => {}
                Block::ToolResult { .. } => {
                    return Err(misplaced(path, "text, thinking and tool_use"));
                }
            }
        }
        self.push("assistant", text);
        let Some(message) = self.out.last_mut() else { return Ok(()) };
        if !reasoning.is_empty() {
            let before = message["reasoning_content"].as_str().unwrap_or_default();
            message["reasoning_content"] = [before, &reasoning].concat().into();
        }
        if !calls.is_empty() {
            let mut all = message["tool_calls"].as_array().cloned().unwrap_or_default();
            all.append(&mut calls);
            message["tool_calls"] = all.into();
        }
        Ok(())
    }

    /// Adds a message. Turns of one side that follow each other are one.
    fn push(&mut self, role: &str, text: String) {
        let text = match self.out.last_mut() {
            Some(last) if role != "system" && last["role"] == role => {
                let before = last["content"].as_str().unwrap_or_default();
                let between = if before.is_empty() || text.is_empty() { "" } else { "\n" };
                last["content"] = [before, between, &text].concat().into();
                return;
            }
            _ => text,
        };
        self.out.push(Value::Object(Map::from_iter([
            ("role".to_owned(), role.into()),
            ("content".to_owned(), text.into()),
        ])));
    }

    /// The blocks of a content: a text is one.
    fn blocks<'a>(
        &mut self,
        value: &'a Value,
        path: &str,
        place: Place,
    ) -> ApiResult<Vec<Block<'a>>> {
        match value {
            Value::String(text) => Ok(vec![Block::Text(text.into())]),
            Value::Array(list) => {
                let list = list.iter().enumerate();
                list.map(|(i, value)| self.block(value, &format!("{path}[{i}]"), place)).collect()
            }
            other => Err(wrong(path, "a string or an array of blocks", other)),
        }
    }

    fn block<'a>(&mut self, value: &'a Value, path: &str, place: Place) -> ApiResult<Block<'a>> {
        let fields = Fields::of(value, path)?;
        match fields.required("type")? {
            "text" if fields.has("text") => {
                Ok(Block::Text(fields.string("text")?.unwrap_or_default().into()))
            }
            "text" => Err(fields.missing("text")),
            "thinking" => thought(&fields).map(Block::Thinking),
            "tool_use" => tool_use(&fields).map(Block::ToolUse),
            "tool_result" => Ok(Block::ToolResult {
                id: fields.required("tool_use_id")?,
                content: fields.get("content"),
                path: fields.path("content"),
                is_error: fields.flag("is_error")?,
            }),
            kind if is_of_servers(kind) || place == Place::Other && !parts::is_media(kind) => {
                self.skipped.insert(kind.chars().take(40).collect());
                Ok(Block::Other)
            }
            kind => {
                let text = parts::text(value, kind, path, place == Place::New)?;
                Ok(Block::Text(text.into()))
            }
        }
    }
}

/// A thought: what is shown of it, or else what its signature has. Whose it is is of no matter: any
/// signature will do.
fn thought<'a>(fields: &Fields<'a>) -> ApiResult<Cow<'a, str>> {
    let shown = fields.string("thinking")?.unwrap_or_default();
    let signature = fields.get("signature").and_then(Value::as_str).filter(|_| shown.is_empty());
    Ok(signature.and_then(blocks::hidden).map_or(shown.into(), Cow::from))
}

/// A call as chats write it. Its id stays as it is.
fn tool_use(fields: &Fields<'_>) -> ApiResult<Value> {
    let input = fields.object("input")?.cloned().unwrap_or_default();
    Ok(json!({
        "id": fields.required("id")?,
        "type": "function",
        "function": { "name": fields.required("name")?, "arguments": input },
    }))
}

/// The text behind the first line and the empty lines that follow it.
fn after_line(text: &str) -> &str {
    text.split_once('\n').map_or("", |(_, rest)| rest.trim_start_matches(['\r', '\n']))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &Value) -> Result<(Vec<Value>, bool), (String, String)> {
        let fields = Fields::of(body, "").unwrap();
        messages(&fields).map_err(|e| (e.param.unwrap_or_default(), e.message))
    }

    fn user(text: &str) -> Value {
        json!({ "role": "user", "content": text })
    }

    #[test]
    fn blocks_become_messages_in_their_order() {
        let body = json!({
            "system": [
                { "type": "text", "text": "A", "cache_control": { "type": "ephemeral" } },
                { "type": "text", "text": "B" },
            ],
            "messages": [
                user("q"),
                { "role": "assistant", "content": [
                    { "type": "thinking", "thinking": "h", "signature": 7 },
                    { "type": "thinking", "thinking": "", "signature": "bW9lYmFt" },
                    { "type": "redacted_thinking", "data": "x" },
                    { "type": "text", "text": "So " },
                    { "type": "text", "text": "be it" },
                    { "type": "tool_use", "id": "toolu_1", "name": "f", "input": { "n": 1 } },
                    { "type": "tool_use", "id": "toolu_2", "name": "g", "input": {} },
                ] },
                { "role": "user", "content": [
                    { "type": "tool_result", "tool_use_id": "toolu_2", "content": [
                        { "type": "text", "text": "c" }, { "type": "text", "text": "d" },
                    ] },
                    { "type": "tool_result", "tool_use_id": "toolu_1", "is_error": true,
                      "content": "no" },
                    { "type": "text", "text": "e" },
                    { "type": "text", "text": "f" },
                ] },
                { "role": "system", "content": "now" },
                user("go"),
            ],
        });
        let call = |id: &str, name: &str, input: Value| {
            let function = json!({ "name": name, "arguments": input });
            json!({ "id": id, "type": "function", "function": function })
        };
        let expected = json!([
            { "role": "system", "content": "A\nB" },
            user("q"),
            { "role": "assistant", "content": "So be it", "reasoning_content": "hm",
              "tool_calls":
                [call("toolu_1", "f", json!({ "n": 1 })), call("toolu_2", "g", json!({}))] },
            { "role": "tool", "tool_call_id": "toolu_2", "content": "c\nd" },
            { "role": "tool", "tool_call_id": "toolu_1", "content": "Error: no" },
            user("e\nf"),
            { "role": "system", "content": "now" },
            user("go"),
        ]);
        let (got, continues) = read(&body).unwrap();
        assert_eq!((Value::Array(got), continues), (expected, false));
    }

    #[test]
    fn a_note_stands_for_what_cannot_be_read() {
        let image = json!({ "type": "image", "source":
            { "type": "base64", "media_type": "image/png", "data": "AA==" } });
        let text = json!({ "type": "text", "text": "look" });
        let call = json!({ "role": "assistant", "content":
            [{ "type": "tool_use", "id": "t1", "name": "Read", "input": {} }] });
        let result = json!({ "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "t1", "content": [image] },
            { "type": "hologram" },
        ] });
        let now = json!({ "role": "user", "content": [text, image] });
        let messages = json!([now, call, result]);
        let (got, _) = read(&json!({ "messages": messages })).unwrap();
        assert_eq!(got[0], user(&format!("look\n{}", parts::IMAGE)));
        assert_eq!(got[2]["content"], parts::IMAGE);
        assert!(got[3]["content"].as_str().unwrap().contains("of the type hologram"));
        let (param, why) = read(&json!({ "messages": [user("a"), now] })).unwrap_err();
        assert_eq!(param, "messages[1].content[1]");
        assert!(why.contains("describe it in words"), "{why}");
        let document = json!({ "type": "document", "title": "T", "source":
            { "type": "text", "media_type": "text/plain", "data": "abc" } });
        let messages = json!([{ "role": "user", "content": [document, text] }]);
        let (got, _) = read(&json!({ "messages": messages })).unwrap();
        assert_eq!(got, [user("T\nabc\nlook")]);
    }

    #[test]
    fn what_says_nothing_is_an_empty_text() {
        let body = json!({ "messages": [
            user("a"),
            { "role": "assistant", "content": null },
            { "role": "user", "content": [{ "type": "text", "text": null }] },
            { "role": "assistant" },
        ] });
        let said = json!({ "role": "assistant", "content": "" });
        let (got, continues) = read(&body).unwrap();
        assert_eq!((got, continues), (vec![user("a"), said.clone(), user(""), said], true));
    }

    #[test]
    fn turns_of_one_side_are_one() {
        let assistant = |text: &str| json!({ "role": "assistant", "content": text });
        let body = json!({ "messages": [user("a"), user("b"), assistant("c"), assistant("d")] });
        let (got, continues) = read(&body).unwrap();
        assert_eq!((got, continues), (vec![user("a\nb"), assistant("c\nd")], true));
    }

    #[test]
    fn a_billing_line_is_no_part_of_the_prompt() {
        let line = "x-anthropic-billing-header: cc_version=2; cch=00a1b;";
        let block = |text: &str| json!({ "type": "text", "text": text });
        for system in [
            json!([block(line), block("You help.")]),
            json!([block(&format!("{line}\nYou help."))]),
            json!(format!("{line}\n\nYou help.")),
        ] {
            let (got, _) = read(&json!({ "system": system, "messages": [user("a")] })).unwrap();
            assert_eq!(got[0], json!({ "role": "system", "content": "You help." }), "{system}");
        }
        let (got, _) = read(&json!({ "system": line, "messages": [user("a")] })).unwrap();
        assert_eq!(got, [user("a")]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let with = |block: Value| json!([{ "role": "user", "content": [block] }]);
        for (messages, path, words) in [
            (json!([]), "messages", "1 to"),
            (json!([{ "role": "user" }]), "messages[0].content", "missing"),
            (json!([{ "content": "x" }]), "messages[0].role", "missing"),
            (json!([{ "role": "robot", "content": "x" }]), "messages[0].role", "assistant"),
            (json!([{ "role": "user", "content": 5 }]), "messages[0].content", "blocks"),
            (with(json!({ "text": "x" })), "messages[0].content[0].type", "missing"),
            (with(json!({ "type": "text" })), "messages[0].content[0].text", "missing"),
            (with(json!({ "type": "image" })), "messages[0].content[0]", "image input is not"),
            (with(json!({ "type": "document" })), "messages[0].content[0]", "document"),
            (
                with(json!({ "type": "tool_result", "content": "x" })),
                "messages[0].content[0].tool_use_id",
                "missing",
            ),
            (
                with(json!({ "type": "thinking", "thinking": "x" })),
                "messages[0].content",
                "text and tool_result here",
            ),
            (
                json!([{ "role": "assistant", "content":
                    [{ "type": "tool_use", "id": "a", "name": "f", "input": "x" }] }]),
                "messages[0].content[0].input",
                "an object",
            ),
            (
                json!([user("a"), { "role": "assistant", "content":
                    [{ "type": "tool_use", "id": "a", "name": "f", "input": {} }] }]),
                "messages[1]",
                "tool_result",
            ),
        ] {
            let (param, message) = read(&json!({ "messages": messages })).unwrap_err();
            assert_eq!(param, path, "{messages}");
            assert!(message.contains(words), "{messages}: {message}");
        }
    }

    #[test]
    fn thinking_has_grades_and_a_budget() {
        let read = |body: Value| thinking(&Fields::of(&body, "").unwrap()).ok();
        let think = |value: Value| json!({ "thinking": value });
        assert_eq!(read(json!({})), Some((None, None)));
        let enabled = think(json!({ "type": "enabled", "budget_tokens": 9 }));
        assert_eq!(read(enabled), Some((Some(Think::On), Some(9))));
        let disabled = think(json!({ "type": "disabled" }));
        assert_eq!(read(disabled), Some((Some(Think::Off), None)));
        assert_eq!(read(think(json!({ "type": "adaptive" }))), Some((None, None)));
        let graded =
            json!({ "thinking": { "type": "adaptive" }, "output_config": { "effort": "max" } });
        assert_eq!(read(graded), Some((Some(Think::High), None)));
        assert_eq!(read(think(json!({ "type": "deep" }))), None);
    }
}
