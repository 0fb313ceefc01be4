//! OpenAI's chat completions.

use std::sync::Arc;
use std::time::Duration;

use hyper::http::Response;
use serde_json::{Map, Value, json};

use super::chat_stream::ChatStream;
use super::custom;
use super::logprobs::{after_sampling, list, n_logprobs};
use super::native::{Told, settings_of};
use super::responses::token_count;
use super::sampling::{self, WITHOUT_EFFECT};
use super::usage::{moeba, reason, timings, usage};
use super::{form, messages};
use crate::Error;
use crate::chat::RESERVED;
use crate::chat::reasoning::Think;
use crate::chat::tools::{ToolChoice, Tools};
use crate::server::body::Body;
use crate::server::collect::{Call, Choice, collect};
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::Fields;
use crate::server::limits::{MAX_TOOLS, MAX_TOOLS_BYTES};
use crate::server::request::{Chat, Prompt, Request};
use crate::server::router::{self, json as response};
use crate::server::service::Service;
use crate::server::{random, sse};

/// How the answer is written.
#[derive(Clone, Debug, Default)]
pub struct Style {
    pub is_stream: bool,
    pub has_usage: bool,
    /// Usage so far in every chunk.
    pub has_usage_always: bool,
    pub has_timings: bool,
    pub has_progress: bool,
    /// The answer has `__verbose`.
    pub is_verbose: bool,
    pub n_choices: usize,
    /// The tools that may be called.
    pub tools: Arc<Tools>,
    /// The inner `None` is any silence.
    pub ping: Option<Option<Duration>>,
}

/// The members that all objects of an answer share.
#[derive(Clone, Debug)]
pub struct Header {
    pub id: String,
    pub created: u64,
    pub model: String,
    pub fingerprint: String,
}

impl Header {
    pub fn new(prefix: &str, service: &Service) -> Header {
        Header {
            id: random::name(prefix),
            created: random::now(),
            model: service.info.name().to_owned(),
            fingerprint: service.info.fingerprint.clone(),
        }
    }

    /// An object of this kind with these choices.
    pub fn object(&self, object: &str, choices: Value) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), self.id.as_str().into());
        map.insert("object".into(), object.into());
        map.insert("created".into(), self.created.into());
        map.insert("model".into(), self.model.as_str().into());
        map.insert("system_fingerprint".into(), self.fingerprint.as_str().into());
        map.insert("choices".into(), choices);
        map
    }
}

/// `POST /v1/chat/completions`
pub async fn answer(call: &mut router::Call) -> ApiResult<Response<Body>> {
    let app = call.app.clone();
    let (prepared, style, verbose, service) = call
        .with_body(move |body, service| {
            let fields = Fields::of(body, "")?;
            sampling::check_model(&fields, service, app.options.strict_model)?;
            let (request, style) = read(&fields, service)?;
            app.note_unknown(&fields);
            let settings = style.is_verbose.then(|| settings_of(&request, service));
            let prepared = vec![service.prepare(request)?];
            let verbose = settings.map(|settings| Told::new(settings, &prepared, true, service));
            Ok((prepared, style, verbose, service.clone()))
        })
        .await?;
    let answer = service.submit(prepared, &call.client)?;
    let header = Header::new("chatcmpl-", &service);
    let ping = style.ping.unwrap_or(call.app.options.ping);
    if let Some(report) = call.report.take_if(|_| style.is_stream) {
        let stream = ChatStream::new(header, style, verbose, answer.n_prompt, &service);
        return Ok(sse::respond(answer, Box::new(stream), report, ping));
    }
    let Some(report) = &mut call.report else {
        return Err(ApiError::server("the request was answered before"));
    };
    let choices = collect(answer, style.n_choices, report).await?;
    let mut whole = whole(&header, &choices, &style.tools, &service);
    if let (Some(verbose), Some(first)) = (verbose, choices.first())
        && let Some(finish) = &first.finish
    {
        whole["__verbose"] = verbose.object(0, 0, &first.content, &first.tokens, finish);
    }
    Ok(response(&whole))
}

/// The request of a body.
pub fn read(fields: &Fields<'_>, service: &Service) -> ApiResult<(Request, Style)> {
    let chat = chat(fields, service)?;
    let style = Style { tools: chat.tools.clone(), ..style(fields)? };
    let form = form::form(fields, service.engine().tokenizer())?;
    let names = ["max_completion_tokens", "max_tokens", "n_predict"];
    let request = Request {
        prompt: Prompt::Chat(chat),
        sampling: sampling::sampling(fields, service)?,
        limits: sampling::limits(fields, service, &names)?,
        n_choices: style.n_choices,
        form,
        n_logprobs: n_logprobs(fields)?,
        after_sampling: after_sampling(fields)?,
        salt: sampling::salt(fields)?,
        scheduling: sampling::scheduling(fields)?,
        prediction: sampling::prediction(fields)?,
        wants_progress: style.has_progress,
        wants_tokens: false,
        time_limit: sampling::time_limit(fields)?,
    };
    fields.ignore(WITHOUT_EFFECT);
    refuse_modalities(fields)?;
    Ok((request, style))
}

/// `POST /v1/chat/completions/input_tokens`
pub async fn input_tokens(call: &mut router::Call) -> ApiResult<Response<Body>> {
    let value = call.with_body(|body, service| {
        let prompt = Prompt::Chat(chat(&Fields::of(body, "")?, service)?);
        Ok(token_count(service.count(&prompt)?))
    });
    Ok(response(&value.await?))
}

fn style(fields: &Fields<'_>) -> ApiResult<Style> {
    let mut style = Style {
        is_stream: fields.flag("stream")?,
        has_timings: fields.flag("timings_per_token")?,
        has_progress: fields.flag("return_progress")?,
        is_verbose: fields.flag("verbose")?,
        n_choices: sampling::n_choices(fields)?,
        ping: sampling::ping(fields)?,
        ..Style::default()
    };
    if let Some(value) = fields.get("stream_options") {
        let options = Fields::of(value, "stream_options")?;
        style.has_usage = options.flag("include_usage")?;
        style.has_usage_always = options.flag("continuous_usage_stats")?;
    }
    Ok(style)
}

fn refuse_modalities(fields: &Fields<'_>) -> ApiResult<()> {
    let asked = fields.strings("modalities")?.unwrap_or_default();
    match asked.iter().find(|name| **name != "text") {
        Some(name) => {
            let message = format!("modalities: only text is written, not {name}");
            Err(ApiError::invalid("modalities", message))
        }
        None => Ok(()),
    }
}

/// The conversation of a body.
pub fn chat(fields: &Fields<'_>, service: &Service) -> ApiResult<Chat> {
    let (messages, ends_with_assistant) = messages::messages(fields)?;
    let asks = fields.boolean("add_generation_prompt")?;
    let continues = fields.boolean("continue_final_message")?;
    if asks == Some(true) && continues == Some(true) {
        let message = "continue_final_message: it cannot be set together with \
                       add_generation_prompt";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    let continues = continues.unwrap_or(asks != Some(true)) && ends_with_assistant;
    let (think, reasoning_budget) = thinking(fields)?;
    let tools = tools(fields.array("tools")?.cloned().unwrap_or_default())?;
    let tool_choice = tool_choice(fields, &tools)?;
    let keeps = match fields.string("reasoning_format")? {
        None => service.defaults.keeps_reasoning_in_content,
        Some("none") => true,
        Some("auto" | "deepseek") => false,
        Some(_) => return Err(fields.wrong("reasoning_format", "auto, deepseek or none")),
    };
    Ok(Chat {
        messages,
        continues,
        ends_bare: asks == Some(false) && !continues,
        tools: Arc::new(tools),
        tool_choice,
        has_parallel_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
        variables: variables(fields)?,
        think,
        reasoning_budget,
        keeps_reasoning_in_content: keeps,
    })
}

/// Tools in the form of a chat's `tools`.
pub fn tools(list: Vec<Value>) -> ApiResult<Tools> {
    let n = list.len();
    let value = Value::Array(list);
    if n > MAX_TOOLS || value.to_string().len() > MAX_TOOLS_BYTES {
        let message = format!(
            "tools: expected at most {MAX_TOOLS} tools of {MAX_TOOLS_BYTES} bytes together"
        );
        return Err(ApiError::invalid("tools", message));
    }
    Tools::parse(&value).map_err(|e| {
        let message = e.to_string();
        let path = message.split(": ").next().unwrap_or("tools").to_owned();
        ApiError::invalid(path, message)
    })
}

/// Which of the tools may be called.
pub fn tool_choice(fields: &Fields<'_>, tools: &Tools) -> ApiResult<ToolChoice> {
    let choice = fields.get("tool_choice").unwrap_or(&Value::Null);
    let invalid = |e: Error| ApiError::invalid("tool_choice", e.to_string());
    ToolChoice::parse(choice, tools).map_err(invalid)
}

/// Variables of the template, without those that are the server's.
pub fn variables(fields: &Fields<'_>) -> ApiResult<Map<String, Value>> {
    if fields.get("chat_template").is_some() {
        let message = "chat_template: a request cannot bring a template: see --chat-template";
        return Err(ApiError::invalid("chat_template", message));
    }
    let Some(variables) = fields.object("chat_template_kwargs")? else { return Ok(Map::new()) };
    if let Some(name) = RESERVED.iter().find(|name| variables.contains_key(**name)) {
        let path = format!("chat_template_kwargs.{name}");
        let message = format!("{path}: the server sets this variable");
        return Err(ApiError::invalid(path, message));
    }
    Ok(variables.clone())
}

/// Whether and how long the model is to think.
pub fn thinking(fields: &Fields<'_>) -> ApiResult<(Option<Think>, Option<usize>)> {
    let mut think = fields.string("reasoning_effort")?.map(|text| effort("reasoning_effort", text));
    if let Some(value) = fields.get("reasoning") {
        let reasoning = Fields::of(value, "reasoning")?;
        let nested = reasoning.string("effort")?;
        think = think.or(nested.map(|text| effort("reasoning.effort", text)));
    }
    let mut budget = fields.count("reasoning_budget_tokens")?;
    budget = budget.or(fields.count("thinking_budget_tokens")?);
    let mut think = think.transpose()?;
    if let Some(value) = fields.get("thinking") {
        let thinking = Fields::of(value, "thinking")?;
        budget = budget.or(thinking.count("budget_tokens")?);
        match thinking.string("type")? {
            Some("enabled") => think = think.or(Some(Think::On)),
            Some("disabled") => think = think.or(Some(Think::Off)),
            Some("adaptive") | None => {}
            Some(_) => return Err(thinking.wrong("type", "enabled, disabled or adaptive")),
        }
    }
    Ok((think, budget.flatten()))
}

/// The grade of thinking that a name stands for.
pub fn effort(path: &str, text: &str) -> ApiResult<Think> {
    match text {
        "none" => Ok(Think::Off),
        "minimal" | "low" => Ok(Think::Low),
        "medium" => Ok(Think::Medium),
        "high" | "xhigh" | "max" => Ok(Think::High),
        other => {
            let message = format!(
                "{path}: expected none, minimal, low, medium, high or xhigh, got {other:?}"
            );
            Err(ApiError::invalid(path, message))
        }
    }
}

/// Whether a call of this name is one of a custom tool, which takes a text.
pub fn is_custom(tools: &Tools, name: &str) -> bool {
    tools.get(name).is_some_and(|tool| tool.custom.is_some())
}

/// A call of a tool.
fn call(call: &Call, tools: &Tools) -> Value {
    if is_custom(tools, &call.name) {
        let custom = json!({ "name": call.name, "input": custom::input(&call.arguments) });
        return json!({ "id": call.id, "type": "custom", "custom": custom });
    }
    json!({
        "id": call.id,
        "type": "function",
        "function": { "name": call.name, "arguments": call.arguments },
    })
}

/// The answer in one object.
fn whole(header: &Header, choices: &[Choice], tools: &Tools, service: &Service) -> Value {
    let list = choices.iter().enumerate().map(|(i, choice)| {
        let mut message = json!({
            "role": "assistant",
            "content": choice.content,
            "refusal": null,
        });
        if !choice.reasoning.is_empty() {
            message["reasoning_content"] = choice.reasoning.as_str().into();
            message["reasoning"] = choice.reasoning.as_str().into();
        }
        if !choice.calls.is_empty() {
            if choice.content.is_empty() {
                message["content"] = Value::Null;
            }
            message["tool_calls"] = choice.calls.iter().map(|one| call(one, tools)).collect();
        }
        json!({
            "index": i,
            "message": message,
            "logprobs": list(&choice.tokens, service),
            "finish_reason": choice.finish.as_ref().map(reason),
        })
    });
    let mut object = header.object("chat.completion", Value::Array(list.collect()));
    let finishes = || choices.iter().filter_map(|choice| choice.finish.as_ref());
    object.insert("usage".into(), usage(finishes(), choices.len()));
    if let Some(first) = finishes().next() {
        object.insert("timings".into(), timings(first));
        object.insert("moeba".into(), moeba(first));
    }
    Value::Object(object)
}
