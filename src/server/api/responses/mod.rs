//! OpenAI's responses. None is stored: each request brings its whole input.

mod input;
mod output;
mod stream;
mod tools;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use self::output::{ItemStyle, Items, is_cut};
use self::stream::ResponseStream;
use self::tools::Offered;
use super::chat::{Header, thinking, variables};
use super::form::format;
use super::sampling::{self, WITHOUT_EFFECT};
use super::usage::moeba;
use crate::sample::MAX_TOP_LOGPROBS;
use crate::server::body::Body;
use crate::server::collect::each;
use crate::server::errors::{ApiError, ApiResult, Kind};
use crate::server::events::Finish;
use crate::server::fields::Fields;
use crate::server::request::{Chat, Form, Prompt, Request};
use crate::server::router::{Call, json as response};
use crate::server::service::Service;
use crate::server::{random, sse};

/// Why nothing refers to an earlier response.
pub const NOT_STORED: &str = "responses are not stored: send the whole conversation in input";

/// Fields beside those of other routes that have no effect here.
pub const IGNORED: &[&str] = &[
    "client_metadata",
    "context_management",
    "max_tool_calls",
    "prompt_cache_retention",
    "stream_options",
    "top_logprobs",
];

/// A request, and how its response is written.
struct Asked {
    request: Request,
    items: ItemStyle,
    /// The members that its response repeats.
    repeated: Map<String, Value>,
    /// Events of the answer's parts have the figures so far.
    has_timings: bool,
    is_stream: bool,
    /// The inner `None` is any silence.
    ping: Option<Option<Duration>>,
}

/// `POST /v1/responses`
pub async fn answer(call: &mut Call) -> ApiResult<hyper::Response<Body>> {
    refuse_websocket(call)?;
    let app = call.app.clone();
    let (prepared, asked, service) = call
        .with_body(move |body, service| {
            let fields = Fields::of(body, "")?;
            sampling::check_model(&fields, service, app.options.strict_model)?;
            let asked = read(&fields, service)?;
            app.note_unknown(&fields);
            let prepared = service.prepare(asked.request.clone()).map_err(of_input)?;
            Ok((prepared, asked, service.clone()))
        })
        .await?;
    let answer = service.submit(vec![prepared], &call.client)?;
    let Asked { request, items, repeated, has_timings, is_stream, ping } = asked;
    let head = Head::new(repeated, &service);
    let mut items = Items::new(items, &head.header.id, &service);
    if let Some(report) = call.report.take_if(|_| is_stream) {
        let has_progress = request.wants_progress;
        let stream = ResponseStream::new(head, items, has_timings, has_progress, answer.n_prompt);
        let ping = ping.unwrap_or(call.app.options.ping);
        return Ok(sse::respond(answer, Box::new(stream), report, ping));
    }
    let Some(report) = &mut call.report else {
        return Err(ApiError::server("the request was answered before"));
    };
    let mut finish = None;
    each(answer, report, |_, event| {
        items.push(&event, &mut Vec::new());
        if let crate::server::events::Event::Finished(end) = event {
            finish = Some(end);
        }
    })
    .await?;
    match finish {
        Some(finish) => Ok(response(&head.ended(items.done(), &finish))),
        None => Err(ApiError::server("the answer has no end")),
    }
}

/// `POST /v1/responses/input_tokens`
pub async fn input_tokens(call: &mut Call) -> ApiResult<hyper::Response<Body>> {
    let app = call.app.clone();
    let value = call.with_body(move |body, service| {
        let fields = Fields::of(body, "")?;
        sampling::check_model(&fields, service, app.options.strict_model)?;
        let asked = read(&fields, service)?;
        Ok(token_count(service.count(&asked.request.prompt)?))
    });
    Ok(response(&value.await?))
}

/// The tokens of a prompt.
pub fn token_count(n: usize) -> Value {
    json!({ "object": "response.input_tokens", "input_tokens": n })
}

/// Clients that try a WebSocket first take this status as a sign to do without.
fn refuse_websocket(call: &Call) -> ApiResult<()> {
    if call.parts.method == hyper::Method::POST {
        return Ok(());
    }
    let upgrade = call.parts.headers.get(hyper::header::UPGRADE);
    if upgrade.is_some_and(|name| name.as_bytes().eq_ignore_ascii_case(b"websocket")) {
        let message = "WebSockets are not served: send POST /v1/responses with \"stream\": true";
        return Err(ApiError::new(Kind::Upgrade, "websocket_not_supported", message));
    }
    let message = "responses are not stored, so there is nothing to list: send POST to get one";
    let error = ApiError::new(Kind::Method, "method_not_allowed", message);
    Err(ApiError { allow: Some("POST, OPTIONS"), ..error })
}

/// An error of the prompt by the name that it has here.
fn of_input(error: ApiError) -> ApiError {
    match error.kind {
        Kind::ContextOverflow => ApiError { param: Some("input".into()), ..error },
        _ => error,
    }
}

fn read(fields: &Fields<'_>, service: &Service) -> ApiResult<Asked> {
    refuse_stored(fields)?;
    let offered = Offered::read(fields)?;
    let (messages, continues) = input::messages(fields, &offered)?;
    let (think, reasoning_budget) = thinking(fields)?;
    let chat = Chat {
        messages,
        continues,
        ends_bare: false,
        tools: Arc::new(offered.tools.clone()),
        tool_choice: offered.choice(fields.get("tool_choice"))?,
        has_parallel_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
        variables: variables(fields)?,
        think,
        reasoning_budget,
        keeps_reasoning_in_content: false,
    };
    let (form, written_text) = text(fields, service)?;
    let included = fields.strings("include")?.unwrap_or_default();
    let n_top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS as i64)?.unwrap_or(0);
    let n_top = super::logprobs::n_probs(fields)?.unwrap_or(n_top as usize);
    let has_logprobs = included.contains(&"message.output_text.logprobs") || n_top > 0;
    let request = Request {
        prompt: Prompt::Chat(chat),
        sampling: sampling::sampling(fields, service)?,
        limits: sampling::limits(fields, service, &["max_output_tokens"])?,
        n_choices: 1,
        form,
        n_logprobs: has_logprobs.then_some(n_top),
        after_sampling: super::logprobs::after_sampling(fields)?,
        salt: sampling::salt(fields)?,
        scheduling: sampling::scheduling(fields)?,
        prediction: sampling::prediction(fields)?,
        wants_progress: fields.flag("return_progress")?,
        wants_tokens: false,
        time_limit: sampling::time_limit(fields)?,
    };
    let (reasoning, has_summary) = reasoning(fields)?;
    let mut repeated = repeated(fields, &request)?;
    repeated.insert("text".into(), written_text);
    repeated.insert("reasoning".into(), reasoning);
    let items = ItemStyle {
        offered,
        has_summary,
        has_encrypted: included.contains(&"reasoning.encrypted_content"),
        has_logprobs,
    };
    fields.ignore(WITHOUT_EFFECT);
    fields.ignore(IGNORED);
    let (is_stream, ping) = (fields.flag("stream")?, sampling::ping(fields)?);
    let has_timings = fields.flag("timings_per_token")?;
    Ok(Asked { request, items, repeated, has_timings, is_stream, ping })
}

/// Refuses what would need responses that are stored.
fn refuse_stored(fields: &Fields<'_>) -> ApiResult<()> {
    let wrong = [
        ("previous_response_id", fields.get("previous_response_id").is_some(), NOT_STORED),
        ("conversation", fields.get("conversation").is_some(), NOT_STORED),
        ("prompt", fields.get("prompt").is_some(), "prompts are not stored: send instructions"),
        (
            "background",
            fields.flag("background")?,
            "answers are not made in the background: set stream to true to follow a long one",
        ),
    ];
    match wrong.iter().find(|(_, is_there, _)| *is_there) {
        Some((name, _, why)) => {
            let code = "unsupported_parameter";
            let error = ApiError::new(Kind::Invalid, code, format!("{name}: {why}"));
            Err(ApiError { param: Some((*name).to_owned()), ..error })
        }
        None => Ok(()),
    }
}

/// The form of the text, and `text` as the response repeats it.
fn text(fields: &Fields<'_>, service: &Service) -> ApiResult<(Option<Form>, Value)> {
    let plain = json!({ "type": "text" });
    let Some(value) = fields.get("text") else { return Ok((None, json!({ "format": plain }))) };
    let text = Fields::of(value, "text")?;
    text.string("verbosity")?;
    let given = text.get("format");
    let form = match given {
        Some(value) => format(value, "text.format", service.engine().tokenizer())?,
        None => None,
    };
    let mut written = value.clone();
    written["format"] = given.cloned().unwrap_or(plain);
    Ok((form, written))
}

/// `reasoning` as the response repeats it, and whether a summary is asked for.
fn reasoning(fields: &Fields<'_>) -> ApiResult<(Value, bool)> {
    let Some(value) = fields.get("reasoning") else {
        return Ok((json!({ "effort": null, "summary": null }), false));
    };
    let reasoning = Fields::of(value, "reasoning")?;
    let summary = reasoning.string("summary")?.or(reasoning.string("generate_summary")?);
    let has_summary = match summary {
        None | Some("none") => false,
        Some("auto" | "concise" | "detailed") => true,
        Some(_) => return Err(reasoning.wrong("summary", "auto, concise or detailed")),
    };
    let effort = reasoning.string("effort")?;
    Ok((json!({ "effort": effort, "summary": summary }), has_summary))
}

/// The members of a request that its response repeats.
fn repeated(fields: &Fields<'_>, request: &Request) -> ApiResult<Map<String, Value>> {
    match fields.string("truncation")? {
        None | Some("auto" | "disabled") => {}
        Some(_) => return Err(fields.wrong("truncation", "auto or disabled")),
    }
    fields.integer("max_tool_calls", 0..=i64::MAX)?;
    fields.object("metadata")?;
    fields.boolean("store")?;
    let mut all = Map::new();
    for (name, default) in [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("max_tool_calls", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", true.into()),
        ("prompt_cache_key", Value::Null),
        ("safety_identifier", Value::Null),
        ("tool_choice", "auto".into()),
        ("tools", json!([])),
        ("top_logprobs", 0.into()),
        ("truncation", "disabled".into()),
        ("user", Value::Null),
    ] {
        all.insert(name.into(), fields.get(name).cloned().unwrap_or(default));
    }
    let sampling = &request.sampling;
    all.insert("temperature".into(), super::logprobs::number(sampling.temp));
    all.insert("top_p".into(), super::logprobs::number(sampling.top_p));
    Ok(all)
}

/// The type of the last event.
fn end_name(finish: &Finish) -> &'static str {
    if is_cut(finish) { "response.incomplete" } else { "response.completed" }
}

/// The members that all objects of one response share.
struct Head {
    header: Header,
    repeated: Map<String, Value>,
}

impl Head {
    fn new(repeated: Map<String, Value>, service: &Service) -> Head {
        Head { header: Header::new("resp_", service), repeated }
    }

    fn object(&self, status: &str, output: &[Value]) -> Map<String, Value> {
        let header = &self.header;
        let fields = json!({
            "id": header.id,
            "object": "response",
            "created_at": header.created,
            "completed_at": null,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": null,
            "model": header.model,
            "output": output,
            "previous_response_id": null,
            "service_tier": "default",
            "store": false,
            "usage": null,
        });
        let mut object = match fields {
            Value::Object(object) => object,
            _ => Map::new(),
        };
        object.extend(self.repeated.clone());
        object
    }

    /// A response that goes on.
    fn begun(&self) -> Value {
        Value::Object(self.object("in_progress", &[]))
    }

    fn ended(&self, output: &[Value], finish: &Finish) -> Value {
        let status = if is_cut(finish) { "incomplete" } else { "completed" };
        let mut object = self.object(status, output);
        match is_cut(finish) {
            true => {
                let details = json!({ "reason": "max_output_tokens" });
                object.insert("incomplete_details".into(), details);
            }
            false => {
                object.insert("completed_at".into(), random::now().into());
            }
        }
        object.insert("usage".into(), usage(finish));
        object.insert("moeba".into(), moeba(finish));
        Value::Object(object)
    }

    fn failed(&self, output: &[Value], error: &ApiError) -> Value {
        let mut object = self.object("failed", output);
        // Clients know few codes, and try again after this one.
        let code = match error.kind {
            Kind::RateLimit | Kind::ContextOverflow => error.code,
            _ => "server_error",
        };
        object.insert("error".into(), json!({ "code": code, "message": error.message }));
        Value::Object(object)
    }
}

fn usage(finish: &Finish) -> Value {
    let n = finish.outcome.n_generated;
    json!({
        "input_tokens": finish.n_prompt,
        "input_tokens_details": {
            "cached_tokens": finish.outcome.n_reused,
            "cache_write_tokens": 0,
        },
        "output_tokens": n,
        "output_tokens_details": { "reasoning_tokens": finish.n_reasoning },
        "total_tokens": finish.n_prompt + n,
    })
}
