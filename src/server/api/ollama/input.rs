//! Requests as Ollama's clients write them.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::Shape;
use crate::chat::reasoning::Think;
use crate::sample::MAX_TOP_LOGPROBS;
use crate::sample::grammar::Grammar;
use crate::server::App;
use crate::server::api::chat::{effort, tool_choice, tools};
use crate::server::api::form::schema;
use crate::server::api::{messages, parts, sampling};
use crate::server::bodies::parsed;
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::Fields;
use crate::server::request::{Chat, Form, Prompt, Request};
use crate::server::service::Service;

/// Fields that are accepted and have no effect: a text that is too long is refused, and the model
/// stays.
pub const UNUSED: &[&str] = &["truncate", "shift", "width", "height", "steps"];

/// Options that are accepted and have no effect: they say how a model is loaded, which the command
/// line does, or belong to samplers of older days.
pub const UNUSED_OPTIONS: &[&str] = &[
    "num_ctx",
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "numa",
    "low_vram",
    "f16_kv",
    "use_mmap",
    "use_mlock",
    "logits_all",
    "vocab_only",
    "embedding_only",
    "draft_num_predict",
    "penalize_newline",
    "tfs_z",
];

/// The request of a body, unless there is nothing to answer.
pub fn request(
    fields: &Fields<'_>,
    shape: Shape,
    service: &Service,
    app: &App,
) -> ApiResult<Option<Request>> {
    let prompt = match shape {
        Shape::Chat => chat(fields, service)?.map(Prompt::Chat),
        Shape::Generate => text(fields, service)?,
    };
    let none = json!({});
    let options = Fields::of(fields.get("options").unwrap_or(&none), "options")?;
    let sampling = sampling::sampling(&options, service)?;
    let limits = sampling::limits(&options, service, &["num_predict"])?;
    options.ignore(UNUSED_OPTIONS);
    app.note_unknown(&options);
    let (form, n_logprobs) = (format(fields)?, n_logprobs(fields)?);
    let (salt, scheduling) = (sampling::salt(fields)?, sampling::scheduling(fields)?);
    let (time_limit, prediction) = (sampling::time_limit(fields)?, sampling::prediction(fields)?);
    fields.ignore(UNUSED);
    Ok(prompt.map(|prompt| Request {
        prompt,
        sampling,
        limits,
        n_choices: 1,
        form,
        n_logprobs,
        after_sampling: false,
        salt,
        scheduling,
        prediction,
        wants_progress: false,
        wants_tokens: false,
        time_limit,
    }))
}

/// The form of the answer: `json`, or a schema.
fn format(fields: &Fields<'_>) -> ApiResult<Option<Form>> {
    match fields.get("format") {
        None => Ok(None),
        Some(Value::String(name)) => match name.as_str() {
            "" => Ok(None),
            "json" => Ok(Some(Form::of(Grammar::JsonObject, "format"))),
            _ => Err(fields.wrong("format", "json or a JSON schema")),
        },
        Some(value) => schema(value, "format", false).map(Some),
    }
}

/// The alternatives to report with each token.
fn n_logprobs(fields: &Fields<'_>) -> ApiResult<Option<usize>> {
    let n_top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS as i64)?;
    Ok(fields.flag("logprobs")?.then_some(n_top.unwrap_or(0) as usize))
}

/// Whether the model is to think; where nothing is said, the template decides.
fn think(fields: &Fields<'_>) -> ApiResult<Option<Think>> {
    match fields.get("think") {
        None => Ok(None),
        Some(Value::Bool(true)) => Ok(Some(Think::On)),
        Some(Value::Bool(false)) => Ok(Some(Think::Off)),
        Some(Value::String(grade)) => effort("think", grade).map(Some),
        Some(_) => Err(fields.wrong("think", "true, false, low, medium, high or max")),
    }
}

/// The time that the model is to stay after its last use; the inner `None` is for ever.
pub fn keep_alive(fields: &Fields<'_>) -> ApiResult<Option<Option<Duration>>> {
    let Some(value) = fields.get("keep_alive") else { return Ok(None) };
    let seconds = match value {
        Value::Number(seconds) => seconds.as_f64(),
        Value::String(time) => seconds(time),
        _ => None,
    };
    let wrong = || fields.wrong("keep_alive", "a number of seconds or a time such as 5m");
    let seconds = seconds.ok_or_else(wrong)?;
    // More than Duration has is for ever as well.
    Ok(Some(Duration::try_from_secs_f64(seconds).ok()))
}

/// A time such as `1h30m`, `-1s` or `300` in seconds.
fn seconds(text: &str) -> Option<f64> {
    const UNITS: [(&str, f64); 6] =
        [("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9), ("h", 3600.0), ("m", 60.0), ("s", 1.0)];
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    let number = |digits: &str| digits.parse::<f64>().ok().filter(|x| x.is_finite());
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    if rest.chars().all(is_number) {
        return number(rest).map(|x| sign * x);
    }
    let mut sum = 0.0;
    while !rest.is_empty() {
        let (digits, behind) = rest.split_at(rest.find(|c| !is_number(c))?);
        let (unit, factor) = UNITS.iter().find(|(unit, _)| behind.starts_with(unit))?;
        sum += number(digits)? * factor;
        rest = &behind[unit.len()..];
    }
    Some(sign * sum)
}

/// A body that lets a model go and asks for nothing else: the name of the model.
pub fn unloads(body: &[u8], shape: Shape) -> Option<Option<String>> {
    // The field is rare.
    const FIELD: &[u8] = b"keep_alive";
    if !body.windows(FIELD.len()).any(|part| part == FIELD) {
        return None;
    }
    let body = parsed(body).ok()?;
    let fields = Fields::of(&body, "").ok()?;
    let is_empty = match shape {
        Shape::Chat => fields.array("messages").ok()?.is_none_or(Vec::is_empty),
        Shape::Generate => fields.string("prompt").ok()?.is_none_or(str::is_empty),
    };
    let goes = keep_alive(&fields).ok()? == Some(Some(Duration::ZERO));
    let name = fields.string("model").ok()?.or(fields.string("name").ok()?);
    (is_empty && goes).then(|| name.map(str::to_owned))
}

/// A conversation; `None` if there are no messages.
fn chat(fields: &Fields<'_>, service: &Service) -> ApiResult<Option<Chat>> {
    let none = Vec::new();
    let list = fields.array("messages")?.unwrap_or(&none);
    let list = read_messages(list)?;
    let tools = tools(fields.array("tools")?.cloned().unwrap_or_default())?;
    let tool_choice = tool_choice(fields, &tools)?;
    let has_parallel_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let think = think(fields)?;
    if list.is_empty() {
        return Ok(None);
    }
    let body = json!({ "messages": list });
    let (messages, continues) = messages::messages(&Fields::of(&body, "")?)?;
    Ok(Some(Chat {
        continues: continues && messages.last().is_some_and(|last| last["tool_calls"].is_null()),
        messages,
        tools: Arc::new(tools),
        tool_choice,
        has_parallel_calls,
        think,
        keeps_reasoning_in_content: service.defaults.keeps_reasoning_in_content,
        ..Chat::default()
    }))
}

/// The prompt of `/api/generate`; `None` if there is no text.
fn text(fields: &Fields<'_>, service: &Service) -> ApiResult<Option<Prompt>> {
    let given = |name| Ok::<_, ApiError>(fields.string(name)?.filter(|text| !text.is_empty()));
    let (prompt, system) = (given("prompt")?, given("system")?);
    let is_raw = fields.flag("raw")?;
    let think = think(fields)?;
    if n_images(fields)? > 0 {
        return Err(ApiError::not_text("images", "an image"));
    }
    if given("suffix")?.is_some() {
        let message = "suffix: moeba has no infilling: send a raw prompt with the model's tokens";
        return Err(ApiError::invalid("suffix", message));
    }
    if given("template")?.is_some() {
        let message = "template: a request cannot bring a template: see --chat-template";
        return Err(ApiError::invalid("template", message));
    }
    if fields.array("context")?.is_some_and(|context| !context.is_empty()) {
        let message = "context: no conversation is kept: send its messages to /api/chat";
        return Err(ApiError::invalid("context", message));
    }
    if is_raw && system.is_some() {
        let message = "system: a raw prompt has no system message";
        return Err(ApiError::invalid("system", message));
    }
    let Some(prompt) = prompt else { return Ok(None) };
    if is_raw {
        return Ok(Some(Prompt::Text(prompt.to_owned())));
    }
    let message = |role: &str, text: &str| json!({ "role": role, "content": text });
    let mut messages: Vec<Value> = system.map(|text| message("system", text)).into_iter().collect();
    messages.push(message("user", prompt));
    Ok(Some(Prompt::Chat(Chat {
        messages,
        think,
        keeps_reasoning_in_content: service.defaults.keeps_reasoning_in_content,
        ..Chat::default()
    })))
}

fn n_images(fields: &Fields<'_>) -> ApiResult<usize> {
    Ok(fields.array("images")?.map_or(0, Vec::len))
}

/// Messages in the form of chats.
fn read_messages(list: &[Value]) -> ApiResult<Vec<Value>> {
    let mut reader = Reader::default();
    let roles: Vec<String> = list
        .iter()
        .map(|value| value["role"].as_str().unwrap_or_default().to_ascii_lowercase())
        .collect();
    let newest = parts::newest(&roles.iter().map(String::as_str).collect::<Vec<_>>());
    let each = list.iter().enumerate();
    let read = |(i, value): (usize, &Value)| {
        reader.message(value, &format!("messages[{i}]"), newest == Some(i))
    };
    each.map(read).collect()
}

/// Translates messages one by one.
#[derive(Default)]
struct Reader {
    n_calls: usize,
    /// Ids and names of calls without a result.
    open: Vec<(String, String)>,
}

impl Reader {
    /// `is_new`: the user sends it now.
    fn message(&mut self, value: &Value, path: &str, is_new: bool) -> ApiResult<Value> {
        let fields = Fields::of(value, path)?;
        let n_images = n_images(&fields)?;
        if n_images > 0 && is_new {
            return Err(ApiError::not_text(&fields.path("images"), "an image"));
        }
        let role = fields.required("role")?.to_ascii_lowercase();
        let mut out = Map::new();
        let mut content = fields.get("content").cloned().unwrap_or_else(|| "".into());
        if let Some(text) = content.as_str().filter(|_| n_images > 0) {
            let mut lines = vec![parts::IMAGE; n_images];
            lines.extend((!text.is_empty()).then_some(text));
            content = lines.join("\n").into();
        }
        out.insert("content".into(), content);
        if let Some(text) = fields.string("thinking")?.filter(|text| !text.is_empty()) {
            out.insert("reasoning_content".into(), text.into());
        }
        let calls = fields.array("tool_calls")?.filter(|calls| !calls.is_empty());
        if let Some(calls) = calls {
            let each = calls.iter().enumerate();
            let calls = each.map(|(i, call)| self.call(call, &format!("{path}.tool_calls[{i}]")));
            let calls = calls.collect::<ApiResult<Vec<Value>>>()?;
            out.insert("tool_calls".into(), calls.into());
        }
        let (name, id) = (fields.string("tool_name")?, fields.string("tool_call_id")?);
        if role == "tool" {
            let id = self.answered(id, name);
            out.extend(id.map(|id| ("tool_call_id".to_owned(), id.into())));
            out.extend(name.map(|name| ("name".to_owned(), name.into())));
        }
        out.insert("role".into(), role.into());
        Ok(Value::Object(out))
    }

    /// A call of a tool. One without an id gets one.
    fn call(&mut self, value: &Value, path: &str) -> ApiResult<Value> {
        let call = Fields::of(value, path)?;
        let function = call.get("function").ok_or_else(|| call.missing("function"))?;
        let function = Fields::of(function, &call.path("function"))?;
        let name = function.required("name")?;
        let arguments = function.object("arguments")?.cloned().unwrap_or_default();
        let id = call.string("id")?.filter(|id| !id.is_empty()).map(str::to_owned);
        let id = id.unwrap_or_else(|| format!("call_{}", self.n_calls));
        self.n_calls += 1;
        self.open.push((id.clone(), name.to_owned()));
        Ok(json!({
            "id": id,
            "type": "function",
            "function": { "name": name, "arguments": arguments },
        }))
    }

    /// The id of the call that a result belongs to: of its id, else the first one of the tool, else
    /// the first one.
    fn answered(&mut self, id: Option<&str>, name: Option<&str>) -> Option<String> {
        let position = |by: &dyn Fn(&(String, String)) -> bool| self.open.iter().position(by);
        let at = match (id, name) {
            (Some(id), _) => position(&|call| call.0 == id),
            (None, Some(name)) => position(&|call| call.1 == name),
            (None, None) => position(&|_| true),
        };
        let known = at.map(|at| self.open.remove(at).0);
        id.map(str::to_owned).or(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_ollama() {
        for (text, expected) in [
            ("300", 300.0),
            ("5m", 300.0),
            ("1h30m", 5400.0),
            ("1.5h0.5s", 5400.5),
            ("250ms", 0.25),
            ("-1", -1.0),
            ("-1m", -60.0),
            ("0", 0.0),
        ] {
            assert_eq!(seconds(text), Some(expected), "{text}");
        }
        for bad in ["", "-", "m", "5x", "5m3", "1..2s", "5 m", "--1", "inf", "nan"] {
            assert_eq!(seconds(bad), None, "{bad}");
        }
        let keep = |value: Value| {
            let body = json!({ "keep_alive": value });
            keep_alive(&Fields::of(&body, "").unwrap())
        };
        assert_eq!(keep(json!("5m")).unwrap(), Some(Some(Duration::from_secs(300))));
        assert_eq!(keep(json!(0)).unwrap(), Some(Some(Duration::ZERO)));
        assert_eq!(keep(json!(-1)).unwrap(), Some(None));
        assert_eq!(keep(json!(1e300)).unwrap(), Some(None));
        assert_eq!(keep(json!(null)).unwrap(), None);
        assert!(keep(json!(true)).is_err());
        let unload = |body: &str, shape| unloads(body.as_bytes(), shape);
        let named = Some(Some("m".to_owned()));
        assert_eq!(unload(r#"{"model": "m", "keep_alive": "0s"}"#, Shape::Chat), named);
        assert_eq!(unload(r#"{"keep_alive": 0, "prompt": ""}"#, Shape::Generate), Some(None));
        assert_eq!(unload(r#"{"keep_alive": 0, "prompt": "x"}"#, Shape::Generate), None);
        assert_eq!(unload(r#"{"model": "m", "keep_alive": 5}"#, Shape::Chat), None);
    }

    #[test]
    fn messages_become_those_of_chats() {
        let call = |name: &str| json!({ "function": { "name": name, "arguments": { "n": 1 } } });
        let got = read_messages(&[
            json!({ "role": "User", "content": "hi", "images": [] }),
            json!({ "role": "assistant", "thinking": "hm", "tool_calls":
                [call("f"), call("g"), { "id": "x", "function": { "name": "h" } }] }),
            json!({ "role": "tool", "content": "b", "tool_name": "g" }),
            json!({ "role": "tool", "content": "c", "tool_call_id": "x" }),
            json!({ "role": "tool", "content": "a" }),
            json!({ "role": "tool", "content": "d" }),
        ]);
        let got = got.unwrap();
        let calls = |name: &str, id: &str, arguments: Value| {
            let function = json!({ "name": name, "arguments": arguments });
            json!({ "id": id, "type": "function", "function": function })
        };
        let n = json!({ "n": 1 });
        let expected = json!([
            { "content": "hi", "role": "user" },
            { "content": "", "reasoning_content": "hm", "role": "assistant", "tool_calls": [
                calls("f", "call_0", n.clone()), calls("g", "call_1", n),
                calls("h", "x", json!({})),
            ] },
            { "content": "b", "tool_call_id": "call_1", "name": "g", "role": "tool" },
            { "content": "c", "tool_call_id": "x", "role": "tool" },
            { "content": "a", "tool_call_id": "call_0", "role": "tool" },
            { "content": "d", "role": "tool" },
        ]);
        assert_eq!(Value::Array(got), expected);
        let image = json!({ "role": "user", "content": "look", "images": ["aGk=", "aGk="] });
        let got = read_messages(&[image.clone(), json!({ "role": "user", "content": "x" })]);
        let noted = [parts::IMAGE, parts::IMAGE, "look"].join("\n");
        assert_eq!(got.unwrap()[0], json!({ "content": noted, "role": "user" }));
        assert!(read_messages(&[image]).is_err());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (message, path) in [
            (json!(1), "messages[0]"),
            (json!({ "content": "x" }), "messages[0].role"),
            (json!({ "role": "user", "images": ["aGk="] }), "messages[0].images"),
            (json!({ "role": "assistant", "thinking": 1 }), "messages[0].thinking"),
            (
                json!({ "role": "assistant", "tool_calls": [{}] }),
                "messages[0].tool_calls[0].function",
            ),
            (
                json!({ "role": "assistant", "tool_calls":
                    [{ "function": { "name": "f", "arguments": "{}" } }] }),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ] {
            let error = read_messages(std::slice::from_ref(&message)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(path), "{message}");
        }
    }

    #[test]
    fn forms_thoughts_and_times_are_read() {
        let read = |body: Value| {
            let form = format(&Fields::of(&body, "").unwrap());
            form.map(|form| form.map(|form| form.grammar)).map_err(|e| e.message)
        };
        let schema = json!({ "type": "object" });
        assert_eq!(read(json!({ "format": "json" })), Ok(Some(Grammar::JsonObject)));
        assert_eq!(read(json!({ "format": "" })), Ok(None));
        assert_eq!(
            read(json!({ "format": schema })),
            Ok(Some(Grammar::JsonSchema(schema.clone())))
        );
        assert!(read(json!({ "format": "xml" })).unwrap_err().starts_with("format: expected json"));
        let read = |body: Value| think(&Fields::of(&body, "").unwrap()).ok();
        assert_eq!(read(json!({})), Some(None));
        assert_eq!(read(json!({ "think": true })), Some(Some(Think::On)));
        assert_eq!(read(json!({ "think": "max" })), Some(Some(Think::High)));
        assert_eq!(read(json!({ "think": 1 })), None);
    }
}
