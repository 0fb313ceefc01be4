//! llama-server's own completion.

use std::sync::Arc;

use hyper::http::Response;
use serde_json::{Value, json};

use super::completions::token_ids;
use super::form;
use super::logprobs::{native, refuse_post_sampling};
use super::sampling::{self, WITHOUT_EFFECT};
use super::usage::timings;
use crate::engine::FinishReason;
use crate::server::body::Body;
use crate::server::collect::collect;
use crate::server::errors::{ApiError, ApiResult, Wire};
use crate::server::events::{Event, Finish, Token};
use crate::server::fields::{Fields, integer};
use crate::server::request::{Prompt, Request};
use crate::server::router::{Call, json as response};
use crate::server::service::Service;
use crate::server::sse::{self, Encoder, Frames};
use crate::server::status::settings;
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// `POST /completion`
pub async fn answer(call: &mut Call) -> ApiResult<Response<Body>> {
    let app = call.app.clone();
    let (prepared, writer, is_stream, ping, service) = call
        .with_body(move |body, service| {
            let fields = Fields::of(body, "")?;
            let (request, writer) = read(&fields, service)?;
            let is_stream = fields.flag("stream")?;
            let ping = sampling::ping(&fields)?;
            fields.ignore(WITHOUT_EFFECT);
            app.note_unknown(&fields);
            Ok((service.prepare(request)?, writer, is_stream, ping, service.clone()))
        })
        .await?;
    let answer = service.submit(vec![prepared], &call.client)?;
    let ping = ping.unwrap_or(call.app.options.ping);
    if let Some(report) = call.report.take_if(|_| is_stream) {
        return Ok(sse::respond(answer, Box::new(writer), report, ping));
    }
    let Some(report) = &mut call.report else {
        return Err(ApiError::server("the request was answered before"));
    };
    let mut choices = collect(answer, 1, report).await?;
    let choice = choices.remove(0);
    let Some(finish) = choice.finish else { return Err(ApiError::server("there is no answer")) };
    Ok(response(&writer.last(&choice.content, &choice.tokens, &finish)))
}

/// Writes an answer.
struct Writer {
    model: String,
    prompt: String,
    has_tokens: bool,
    /// The settings that the request had, but for its seed.
    settings: Value,
    /// Paths of the members that the answer has; empty: all there are.
    fields: Vec<String>,
    has_newline: bool,
    wants_progress: bool,
    n_generated: usize,
    n_prompt: usize,
    slot: usize,
    service: Arc<Service>,
}

fn read(fields: &Fields<'_>, service: &Arc<Service>) -> ApiResult<(Request, Writer)> {
    if fields.integer("n_discard", 0..=0)?.is_some() {
        log::debug!("n_discard is 0: the context is never shifted");
    }
    let tokenizer = service.engine().tokenizer();
    let prompt = prompt(fields, tokenizer)?;
    let limits = sampling::limits(fields, service, &["n_predict", "max_tokens"])?;
    let text = match &prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Tokens(ids) => tokenizer.decode_lossy(ids, false).unwrap_or_default(),
        Prompt::Chat(_) => String::new(),
    };
    let wants_progress = fields.flag("return_progress")?;
    let has_tokens = fields.flag("return_tokens")?;
    let sampling = sampling::sampling(fields, service)?;
    let mut settings = settings(&sampling, limits.n_predict);
    settings["ignore_eos"] = limits.ignore_eos.into();
    settings["stop"] = limits.stops.as_slice().into();
    let chosen = fields.strings("response_fields")?.unwrap_or_default();
    let n_logprobs = fields.integer("n_probs", 0..=20)?.filter(|n| *n > 0).map(|n| n as usize);
    refuse_post_sampling(fields)?;
    let writer = Writer {
        model: service.info.name().to_owned(),
        prompt: text,
        has_tokens,
        settings,
        fields: chosen.into_iter().map(str::to_owned).collect(),
        has_newline: false,
        wants_progress,
        n_generated: 0,
        n_prompt: 0,
        slot: 0,
        service: service.clone(),
    };
    let request = Request {
        prompt,
        sampling,
        limits,
        n_choices: 1,
        form: form::form(fields, service.engine().tokenizer())?,
        n_logprobs,
        salt: sampling::salt(fields)?,
        scheduling: sampling::scheduling(fields)?,
        prediction: sampling::prediction(fields)?,
        wants_progress,
        wants_tokens: has_tokens,
        time_limit: sampling::time_limit(fields)?,
    };
    fields.flag("timings_per_token")?;
    Ok((request, writer))
}

/// A text, or an array of token ids and texts.
fn prompt(fields: &Fields<'_>, tokenizer: &Tokenizer) -> ApiResult<Prompt> {
    match fields.get("prompt") {
        None => Err(fields.missing("prompt")),
        Some(Value::String(text)) => Ok(Prompt::Text(text.clone())),
        Some(Value::Array(list)) => mixed(list, tokenizer)
            .map(Prompt::Tokens)
            .ok_or_else(|| fields.wrong("prompt", "an array of token ids and strings")),
        Some(_) => Err(fields.wrong("prompt", "a string or an array of token ids and strings")),
    }
}

/// The tokens of a list of token ids and texts.
pub fn mixed(list: &[Value], tokenizer: &Tokenizer) -> Option<Vec<u32>> {
    if let Some(ids) = token_ids(list) {
        return Some(ids);
    }
    let mut out = Vec::new();
    for item in list {
        match item {
            Value::String(text) => {
                let options = EncodeOptions { add_special: out.is_empty(), parse_special: true };
                out.extend(tokenizer.encode(text, options));
            }
            other => out.push(integer(other).and_then(|id| u32::try_from(id).ok())?),
        }
    }
    Some(out)
}

fn ids(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

/// The members of `whole` at these paths, each under the last name of its path. One that is not
/// there is left out.
fn chosen(whole: &Value, paths: &[String]) -> Value {
    let found = paths.iter().filter_map(|path| {
        let value = path.split('/').try_fold(whole, |value, name| value.as_object()?.get(name))?;
        Some((path.rsplit('/').next()?.to_owned(), value.clone()))
    });
    Value::Object(found.collect())
}

impl Writer {
    /// The answer, or the end of a stream.
    fn last(&self, content: &str, tokens: &[Token], finish: &Finish) -> Value {
        let whole = self.end_object(content, tokens, finish);
        if self.fields.is_empty() { whole } else { chosen(&whole, &self.fields) }
    }

    fn end_object(&self, content: &str, tokens: &[Token], finish: &Finish) -> Value {
        let kind = match finish.reason {
            FinishReason::StopToken => "eos",
            FinishReason::StopString => "word",
            FinishReason::Length | FinishReason::ContextFull | FinishReason::Cancelled => "limit",
        };
        let probabilities = native(tokens, &self.service);
        let tokens = if self.has_tokens { ids(tokens) } else { Vec::new() };
        let mut settings = self.settings.clone();
        settings["seed"] = finish.seed.into();
        json!({
            "index": 0,
            "content": content,
            "tokens": tokens,
            "id_slot": finish.slot,
            "stop": true,
            "model": self.model,
            "tokens_predicted": finish.outcome.n_generated,
            "tokens_evaluated": finish.n_prompt,
            "generation_settings": settings,
            "prompt": self.prompt,
            "has_new_line": self.has_newline || content.contains('\n'),
            "truncated": false,
            "stop_type": kind,
            "stopping_word": finish.stop.as_deref().unwrap_or_default(),
            "tokens_cached": finish.n_prompt + finish.outcome.n_generated,
            "completion_probabilities": probabilities,
            "timings": timings(finish),
            "moeba": super::usage::moeba(finish),
        })
    }

    fn piece(&self, content: &str, tokens: &[Token]) -> Value {
        json!({
            "completion_probabilities": native(tokens, &self.service),
            "index": 0,
            "content": content,
            "tokens": ids(tokens),
            "stop": false,
            "id_slot": self.slot,
            "tokens_predicted": self.n_generated,
            "tokens_evaluated": self.n_prompt,
        })
    }
}

impl Encoder for Writer {
    fn begin(&mut self, _out: &mut Frames) {}

    fn event(&mut self, _choice: usize, event: &Event, out: &mut Frames) {
        match event {
            Event::Started { slot, .. } => self.slot = *slot,
            Event::Content(piece) => {
                self.n_generated += piece.tokens.len();
                self.has_newline |= piece.text.contains('\n');
                out.data(&self.piece(&piece.text, &piece.tokens));
            }
            Event::Progress { n_done, n_total, n_reused, time } if self.wants_progress => {
                self.n_prompt = *n_total;
                let mut chunk = self.piece("", &[]);
                chunk["prompt_progress"] = json!({
                    "total": n_total,
                    "cache": n_reused,
                    "processed": n_done,
                    "time_ms": time.as_millis() as u64,
                });
                out.data(&chunk);
            }
            Event::Finished(finish) => {
                self.n_prompt = finish.n_prompt;
                out.data(&self.last("", &finish.tokens, finish));
            }
            _ => {}
        }
    }

    fn end(&mut self, _finishes: &[Finish], _out: &mut Frames) {}

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.body(Wire::Native, ""));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_chosen_by_their_paths() {
        let whole = json!({ "content": "x", "a": { "b": { "c": 1 }, "d": null }, "e": [2] });
        let of = |paths: &[&str]| {
            chosen(&whole, &paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(of(&["content", "a/b/c", "a/d"]), json!({ "content": "x", "c": 1, "d": null }));
        assert_eq!(of(&["a/x", "e/0", "content/x", "", "a/b"]), json!({ "b": { "c": 1 } }));
    }
}
