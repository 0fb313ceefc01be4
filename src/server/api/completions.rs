//! OpenAI's completions of plain text.

use std::sync::Arc;

use hyper::http::Response;
use serde_json::{Map, Value, json};

use super::chat::{Header, Style};
use super::form;
use super::logprobs::{after_sampling, legacy, n_probs};
use super::native::{Told, settings_of};
use super::prompts::prompts;
use super::sampling::{self, WITHOUT_EFFECT};
use super::usage::{Live, moeba, reason, timings, usage};
use crate::server::body::Body;
use crate::server::collect::{Choice, collect};
use crate::server::errors::{ApiError, ApiResult, Wire};
use crate::server::events::{Event, Finish};
use crate::server::fields::Fields;
use crate::server::limits::MAX_PROMPTS;
use crate::server::models::Lease;
use crate::server::request::{Prompt, Request};
use crate::server::router::{Call, json as response};
use crate::server::service::{Prepared, Service};
use crate::server::sse::{self, Encoder, Frames};

/// `POST /v1/completions`
pub async fn answer(call: &mut Call) -> ApiResult<Response<Body>> {
    let app = call.app.clone();
    let (prepared, writer, service) = call
        .with_body(move |body, service| {
            let fields = Fields::of(body, "")?;
            sampling::check_model(&fields, service, app.options.strict_model)?;
            let (requests, mut writer) = read(&fields, service)?;
            app.note_unknown(&fields);
            let settings = settings_of(&requests[0], service);
            let prepared = requests.into_iter().map(|request| service.prepare(request));
            let prepared = prepared.collect::<ApiResult<Vec<_>>>()?;
            writer.prepare(settings, &prepared);
            Ok((prepared, writer, service.clone()))
        })
        .await?;
    let answer = service.submit(prepared, &call.client)?;
    let ping = writer.style.ping.unwrap_or(call.app.options.ping);
    if let Some(report) = call.report.take_if(|_| writer.style.is_stream) {
        return Ok(sse::respond(answer, Box::new(writer), report, ping));
    }
    let Some(report) = &mut call.report else {
        return Err(ApiError::server("the request was answered before"));
    };
    let n_choices = writer.echoes.len() * writer.style.n_choices;
    let choices = collect(answer, n_choices, report).await?;
    Ok(response(&writer.whole(&choices)))
}

/// Writes an answer.
struct Writer {
    header: Header,
    style: Style,
    /// Texts that stand before the answers to each prompt.
    echoes: Vec<String>,
    /// Bytes of text so far, of each choice.
    n_bytes: Vec<usize>,
    /// Figures so far, of each choice.
    lives: Vec<Live>,
    /// The members of `__verbose`, if it is asked for.
    verbose: Option<Told>,
    service: Arc<Lease>,
}

fn read(fields: &Fields<'_>, service: &Arc<Lease>) -> ApiResult<(Vec<Request>, Writer)> {
    let prompts = prompts(fields, "prompt", MAX_PROMPTS, service.engine().tokenizer())?;
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
        style.has_usage = Fields::of(value, "stream_options")?.flag("include_usage")?;
    }
    if fields.get("suffix").is_some() {
        return Err(ApiError::invalid("suffix", "suffix: the model's text has no suffix"));
    }
    if fields.integer("best_of", 1..=20)?.is_some_and(|n| n as usize != style.n_choices) {
        return Err(ApiError::invalid("best_of", "best_of: it must be the same as n"));
    }
    let is_echo = fields.flag("echo")?;
    let sampling = sampling::sampling(fields, service)?;
    let limits = sampling::limits(fields, service, &["max_tokens", "n_predict"])?;
    let time_limit = sampling::time_limit(fields)?;
    let form = form::form(fields, service.engine().tokenizer())?;
    let n_logprobs = fields.integer("logprobs", 0..=20)?.map(|n| n as usize);
    let n_logprobs = n_logprobs.or(n_probs(fields)?);
    let after_sampling = after_sampling(fields)?;
    if is_echo && n_logprobs.is_some() {
        let message = "logprobs: there are none of the prompt, so echo must be false";
        return Err(ApiError::invalid("logprobs", message));
    }
    fields.ignore(WITHOUT_EFFECT);
    let echo = |prompt: &Prompt| if is_echo { echo(prompt, service) } else { Ok(String::new()) };
    let echoes = prompts.iter().map(echo).collect::<ApiResult<Vec<_>>>()?;
    let n_choices = style.n_choices;
    let salt = sampling::salt(fields)?;
    let scheduling = sampling::scheduling(fields)?;
    let prediction = sampling::prediction(fields)?;
    let requests = prompts.into_iter().map(|prompt| Request {
        prompt,
        sampling: sampling.clone(),
        limits: limits.clone(),
        n_choices,
        form: form.clone(),
        n_logprobs,
        after_sampling,
        salt: salt.clone(),
        scheduling: scheduling.clone(),
        prediction: prediction.clone(),
        wants_progress: style.has_progress,
        wants_tokens: false,
        time_limit,
    });
    let header = Header::new("cmpl-", service);
    Ok((
        requests.collect(),
        Writer {
            header,
            style,
            n_bytes: vec![0; echoes.len() * n_choices],
            lives: Vec::new(),
            verbose: None,
            echoes,
            service: service.clone(),
        },
    ))
}

/// The text of a prompt, which stands before its answers.
fn echo(prompt: &Prompt, service: &Service) -> ApiResult<String> {
    match prompt {
        Prompt::Text(text) => Ok(text.clone()),
        Prompt::Tokens(ids) => {
            let text = service.engine().tokenizer().decode_lossy(ids, false);
            text.map_err(|e| ApiError::of_request(&e))
        }
        Prompt::Chat(_) => Ok(String::new()),
    }
}

impl Writer {
    fn echo(&self, choice: usize) -> &str {
        &self.echoes[choice / self.style.n_choices]
    }

    /// Takes in what is known once the prompts are tokens.
    fn prepare(&mut self, settings: Value, prepared: &[Prepared]) {
        let n_choices = self.style.n_choices;
        let each = (0..prepared.len() * n_choices).map(|i| &prepared[i / n_choices]);
        self.lives = each.map(|prepared| Live::new(prepared.n_prompt())).collect();
        let told = || Told::new(settings, prepared, false, &self.service);
        self.verbose = self.style.is_verbose.then(told);
    }

    /// `__verbose` of a choice.
    fn verbose(&self, choice: usize, content: &str, finish: &Finish) -> Option<Value> {
        let prompt = choice / self.style.n_choices;
        Some(self.verbose.as_ref()?.object(choice, prompt, content, &[], finish))
    }

    fn object(&self, choices: Value) -> Map<String, Value> {
        self.header.object("text_completion", choices)
    }

    fn whole(&self, choices: &[Choice]) -> Value {
        let list = choices.iter().enumerate().map(|(i, choice)| {
            json!({
                "index": i,
                "text": format!("{}{}", self.echo(i), choice.content),
                "logprobs": legacy(&choice.tokens, 0, &self.service),
                "finish_reason": choice.finish.as_ref().map(reason),
            })
        });
        let mut object = self.object(Value::Array(list.collect()));
        let finishes = || choices.iter().filter_map(|choice| choice.finish.as_ref());
        object.insert("usage".into(), usage(finishes(), self.style.n_choices));
        if let Some(first) = finishes().next() {
            object.insert("timings".into(), timings(first));
            object.insert("moeba".into(), moeba(first));
            let verbose = self.verbose(0, &choices[0].content, first);
            object.extend(verbose.map(|verbose| ("__verbose".to_owned(), verbose)));
        }
        Value::Object(object)
    }

    fn chunk(&self, index: usize, text: &str, reason: Option<&str>) -> Map<String, Value> {
        let choice =
            json!({ "index": index, "text": text, "logprobs": null, "finish_reason": reason });
        self.object(json!([choice]))
    }
}

impl Encoder for Writer {
    fn begin(&mut self, out: &mut Frames) {
        let n_choices = self.style.n_choices * self.echoes.len();
        for i in (0..n_choices).filter(|i| !self.echo(*i).is_empty()) {
            out.data(&Value::Object(self.chunk(i, self.echo(i), None)));
        }
    }

    fn event(&mut self, choice: usize, event: &Event, out: &mut Frames) {
        let progress = self.lives[choice].see(event);
        if let Some(progress) = progress.filter(|_| self.style.has_progress) {
            let mut chunk = self.chunk(choice, "", None);
            chunk.insert("prompt_progress".into(), progress);
            if self.style.has_timings {
                chunk.insert("timings".into(), self.lives[choice].timings());
            }
            out.data(&Value::Object(chunk));
        }
        match event {
            Event::Content(piece) => {
                let mut chunk = Value::Object(self.chunk(choice, &piece.text, None));
                if self.style.has_timings {
                    chunk["timings"] = self.lives[choice].timings();
                }
                let logprobs = legacy(&piece.tokens, self.n_bytes[choice], &self.service);
                chunk["choices"][0]["logprobs"] = logprobs;
                self.n_bytes[choice] += piece.text.len();
                out.data(&chunk);
            }
            Event::Finished(finish) => {
                let mut chunk = self.chunk(choice, "", Some(reason(finish)));
                chunk.insert("moeba".into(), moeba(finish));
                if self.style.has_timings || self.style.has_usage {
                    chunk.insert("timings".into(), timings(finish));
                }
                let verbose = self.verbose(choice, "", finish);
                chunk.extend(verbose.map(|verbose| ("__verbose".to_owned(), verbose)));
                out.data(&Value::Object(chunk));
            }
            _ => {}
        }
    }

    fn end(&mut self, finishes: &[Finish], out: &mut Frames) {
        if self.style.has_usage {
            let mut chunk = self.object(json!([]));
            chunk.insert("usage".into(), usage(finishes, self.style.n_choices));
            out.data(&Value::Object(chunk));
        }
        out.text("[DONE]");
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.body(Wire::OpenAi, &self.header.id));
    }
}
