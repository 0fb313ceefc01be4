//! llama-server's own completion.

use std::sync::Arc;

use hyper::http::Response;
use serde_json::{Value, json};

use super::form;
use super::logprobs::{after_sampling, n_probs, native};
use super::prompts::prompts;
use super::sampling::{self, WITHOUT_EFFECT};
use super::usage::{Live, moeba, timings};
use crate::engine::FinishReason;
use crate::sample::LogitBias;
use crate::server::body::Body;
use crate::server::collect::{Choice, collect};
use crate::server::errors::{ApiError, ApiResult, Wire};
use crate::server::events::{Event, Finish, Token};
use crate::server::fields::Fields;
use crate::server::limits::{MAX_CHOICES, MAX_PROMPTS};
use crate::server::models::Lease;
use crate::server::request::Request;
use crate::server::router::{Call, json as response};
use crate::server::service::{Prepared, Service};
use crate::server::sse::{self, Encoder, Frames};
use crate::server::status::{bias, settings};

/// `POST /completion`
pub async fn answer(call: &mut Call) -> ApiResult<Response<Body>> {
    let app = call.app.clone();
    let (prepared, writer, is_stream, ping) = call
        .with_body(move |body, service| {
            let fields = Fields::of(body, "")?;
            let (requests, style) = read(&fields, service)?;
            let (is_stream, ping) = (fields.flag("stream")?, sampling::ping(&fields)?);
            fields.ignore(WITHOUT_EFFECT);
            app.note_unknown(&fields);
            let settings = settings_of(&requests[0], service);
            let prepared = requests.into_iter().map(|request| service.prepare(request));
            let prepared = prepared.collect::<ApiResult<Vec<_>>>()?;
            let writer = Writer::new(style, settings, &prepared, service);
            Ok((prepared, writer, is_stream, ping))
        })
        .await?;
    let answer = writer.told.service.submit(prepared, &call.client)?;
    let ping = ping.unwrap_or(call.app.options.ping);
    if let Some(report) = call.report.take_if(|_| is_stream) {
        return Ok(sse::respond(answer, Box::new(writer), report, ping));
    }
    let Some(report) = &mut call.report else {
        return Err(ApiError::server("the request was answered before"));
    };
    let choices = collect(answer, writer.states.len(), report).await?;
    let mut all = choices.into_iter().enumerate().filter_map(|(i, choice)| writer.whole(i, choice));
    match (all.next(), all.next()) {
        (Some(one), None) => Ok(response(&one)),
        (Some(one), Some(other)) => {
            Ok(response(&[one, other].into_iter().chain(all).collect::<Value>()))
        }
        (None, _) => Err(ApiError::server("there is no answer")),
    }
}

/// How the answers are written.
struct Style {
    has_tokens: bool,
    has_progress: bool,
    has_timings: bool,
    /// Paths of the members that an answer has; empty: all there are.
    fields: Vec<String>,
    /// Answers to each prompt.
    n_choices: usize,
}

fn read(fields: &Fields<'_>, service: &Arc<Lease>) -> ApiResult<(Vec<Request>, Style)> {
    let tokenizer = service.engine().tokenizer();
    let prompts = prompts(fields, "prompt", MAX_PROMPTS, tokenizer)?;
    let range = 1..=MAX_CHOICES as i64;
    let n_choices = fields.integer("n_cmpl", range.clone())?.or(fields.integer("n", range)?);
    let chosen = fields.strings("response_fields")?.unwrap_or_default();
    let style = Style {
        has_tokens: fields.flag("return_tokens")?,
        has_progress: fields.flag("return_progress")?,
        has_timings: fields.flag("timings_per_token")?,
        fields: chosen.into_iter().map(str::to_owned).collect(),
        n_choices: n_choices.unwrap_or(1) as usize,
    };
    fields.flag("verbose")?;
    let sampling = sampling::sampling(fields, service)?;
    let limits = sampling::limits(fields, service, &["n_predict", "max_tokens"])?;
    let form = form::form(fields, tokenizer)?;
    let (n_logprobs, after_sampling) = (n_probs(fields)?, after_sampling(fields)?);
    let (salt, scheduling) = (sampling::salt(fields)?, sampling::scheduling(fields)?);
    let (prediction, time_limit) = (sampling::prediction(fields)?, sampling::time_limit(fields)?);
    let requests = prompts.into_iter().map(|prompt| Request {
        prompt,
        sampling: sampling.clone(),
        limits: limits.clone(),
        n_choices: style.n_choices,
        form: form.clone(),
        n_logprobs,
        after_sampling,
        salt: salt.clone(),
        scheduling: scheduling.clone(),
        prediction: prediction.clone(),
        wants_progress: style.has_progress,
        wants_tokens: style.has_tokens,
        time_limit,
    });
    Ok((requests.collect(), style))
}

/// A request's settings, but for its seed.
pub fn settings_of(request: &Request, service: &Service) -> Value {
    let mut settings = settings(&request.sampling, request.limits.n_predict);
    if let Some(biases) =
        settings["logit_bias"].as_array_mut().filter(|_| request.limits.ignore_eos)
    {
        let ends = service.engine().tokenizer().eog_ids();
        biases.extend(ends.map(|id| bias(&LogitBias { id, bias: f32::NEG_INFINITY })));
    }
    settings["ignore_eos"] = request.limits.ignore_eos.into();
    settings["stop"] = request.limits.stops.as_slice().into();
    settings["n_probs"] = request.n_logprobs.unwrap_or(0).into();
    settings["post_sampling_probs"] = request.after_sampling.into();
    settings
}

fn ids(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

/// The members of `whole` at these paths, each under its path. One that is not there is left out.
fn chosen(whole: &Value, paths: &[String]) -> Value {
    let found = paths.iter().filter_map(|path| {
        let value = path.split('/').try_fold(whole, |value, name| value.as_object()?.get(name))?;
        Some((path.clone(), value.clone()))
    });
    Value::Object(found.collect())
}

/// The members of an answer that are the request's or the server's.
pub struct Told {
    settings: Value,
    /// The prompts' texts.
    prompts: Vec<String>,
    has_tokens: bool,
    service: Arc<Lease>,
}

impl Told {
    pub fn new(
        settings: Value,
        prepared: &[Prepared],
        has_tokens: bool,
        service: &Arc<Lease>,
    ) -> Told {
        let prompts = prepared.iter().map(|one| one.prompt_text(service)).collect();
        Told { settings, prompts, has_tokens, service: service.clone() }
    }

    /// The answer of this index, which is to this prompt, or the end of its stream.
    pub fn object(
        &self,
        index: usize,
        prompt: usize,
        content: &str,
        tokens: &[Token],
        finish: &Finish,
    ) -> Value {
        let kind = match finish.reason {
            FinishReason::StopToken => "eos",
            FinishReason::StopString => "word",
            FinishReason::Length | FinishReason::ContextFull | FinishReason::Cancelled => "limit",
        };
        let mut settings = self.settings.clone();
        settings["seed"] = finish.seed.into();
        json!({
            "index": index,
            "content": content,
            "tokens": if self.has_tokens { ids(tokens) } else { Vec::new() },
            "id_slot": finish.slot,
            "stop": true,
            "model": self.service.info.name(),
            "tokens_predicted": finish.outcome.n_generated,
            "tokens_evaluated": finish.n_prompt,
            "generation_settings": settings,
            "prompt": self.prompts.get(prompt),
            "has_new_line": content.contains('\n'),
            "truncated": finish.is_truncated(),
            "stop_type": kind,
            "stopping_word": finish.stop.as_deref().unwrap_or_default(),
            "tokens_cached": finish.n_prompt + finish.outcome.n_generated,
            "completion_probabilities": native(tokens, &self.service),
            "timings": timings(finish),
            "moeba": moeba(finish),
        })
    }
}

/// Writes the answers.
struct Writer {
    told: Told,
    style: Style,
    /// The states of the answers.
    states: Vec<State>,
}

/// An answer while it comes.
struct State {
    live: Live,
    slot: usize,
    has_newline: bool,
}

impl Writer {
    fn new(style: Style, settings: Value, prepared: &[Prepared], service: &Arc<Lease>) -> Writer {
        let n_prompt = |i: usize| prepared[i / style.n_choices].n_prompt();
        let all = (0..prepared.len() * style.n_choices).map(|i| State {
            live: Live::new(n_prompt(i)),
            slot: 0,
            has_newline: false,
        });
        let states = all.collect();
        Writer { told: Told::new(settings, prepared, style.has_tokens, service), style, states }
    }

    /// An answer in one object.
    fn whole(&self, index: usize, mut choice: Choice) -> Option<Value> {
        let finish = choice.finish?;
        choice.tokens.extend(finish.tokens.iter().cloned());
        Some(self.last(index, &choice.content, &choice.tokens, &finish))
    }

    /// An answer, or the end of its stream.
    fn last(&self, index: usize, content: &str, tokens: &[Token], finish: &Finish) -> Value {
        let prompt = index / self.style.n_choices;
        let mut whole = self.told.object(index, prompt, content, tokens, finish);
        if self.states[index].has_newline {
            whole["has_new_line"] = true.into();
        }
        if self.style.fields.is_empty() { whole } else { chosen(&whole, &self.style.fields) }
    }

    fn piece(&self, index: usize, content: &str, tokens: &[Token]) -> Value {
        let state = &self.states[index];
        let mut piece = json!({
            "completion_probabilities": native(tokens, &self.told.service),
            "index": index,
            "content": content,
            "tokens": ids(tokens),
            "stop": false,
            "id_slot": state.slot,
            "tokens_predicted": state.live.n_generated,
            "tokens_evaluated": state.live.n_prompt,
        });
        if self.style.has_timings {
            piece["timings"] = state.live.timings();
        }
        piece
    }
}

impl Encoder for Writer {
    fn begin(&mut self, _out: &mut Frames) {}

    fn event(&mut self, choice: usize, event: &Event, out: &mut Frames) {
        let state = &mut self.states[choice];
        let progress = state.live.see(event);
        match event {
            Event::Started { slot, .. } => state.slot = *slot,
            Event::Content(piece) => {
                state.has_newline |= piece.text.contains('\n');
                out.data(&self.piece(choice, &piece.text, &piece.tokens));
            }
            Event::Finished(finish) => out.data(&self.last(choice, "", &finish.tokens, finish)),
            _ => {}
        }
        if let Some(progress) = progress.filter(|_| self.style.has_progress) {
            let mut chunk = self.piece(choice, "", &[]);
            chunk["prompt_progress"] = progress;
            out.data(&chunk);
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
        let expected = json!({ "content": "x", "a/b/c": 1, "a/d": null });
        assert_eq!(of(&["content", "a/b/c", "a/d"]), expected);
        let expected = json!({ "a/b": { "c": 1 } });
        assert_eq!(of(&["a/x", "e/0", "content/x", "", "a/b"]), expected);
    }
}
