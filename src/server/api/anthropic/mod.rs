//! Anthropic's messages.

mod answer;
mod blocks;
mod input;
mod stream;
mod tools;

use hyper::http::Response;
use serde_json::{Value, json};

use self::blocks::{Blocks, Content};
use self::stream::MessageStream;
use super::form::schema;
use super::sampling::{self, WITHOUT_EFFECT};
use crate::engine::Limits;
use crate::server::body::Body;
use crate::server::collect::each;
use crate::server::errors::{ApiError, ApiResult};
use crate::server::events::Event;
use crate::server::fields::Fields;
use crate::server::request::{Form, Prompt, Request};
use crate::server::router::{Call, json as response};
use crate::server::service::Service;
use crate::server::{random, sse};

/// Tokens of an answer where a request does not say.
const MAX_TOKENS: usize = 4096;

/// Further fields that are accepted and have no effect.
pub const UNUSED: &[&str] = &[
    "anthropic_beta",
    "betas",
    "cache_control",
    "container",
    "context_management",
    "inference_geo",
    "mcp_servers",
    "speed",
];

/// `POST /v1/messages`
pub async fn messages(call: &mut Call) -> ApiResult<Response<Body>> {
    let app = call.app.clone();
    let (prepared, mut blocks, is_stream, ping, service) = call
        .with_body(move |body, service| {
            let fields = Fields::of(body, "")?;
            sampling::check_model(&fields, service, app.options.strict_model)?;
            let request = read(&fields, service)?;
            let blocks = Blocks::new(input::omits_thinking(&fields)?);
            let (is_stream, ping) = (fields.flag("stream")?, sampling::ping(&fields)?);
            app.note_unknown(&fields);
            Ok((service.prepare(request)?, blocks, is_stream, ping, service.clone()))
        })
        .await?;
    let answer = service.submit(vec![prepared], &call.client)?;
    let (id, model) = (random::name("msg_"), service.info.name());
    let ping = ping.unwrap_or(call.app.options.ping);
    if let Some(report) = call.report.take_if(|_| is_stream) {
        let (model, n_prompt) = (model.to_owned(), answer.n_prompt);
        let stream = MessageStream::new(id, model, call.id.clone(), n_prompt, blocks);
        return Ok(sse::respond(answer, Box::new(stream), report, ping));
    }
    let Some(report) = &mut call.report else {
        return Err(ApiError::server("the request was answered before"));
    };
    let (mut content, mut end) = (Content::default(), None);
    each(answer, report, |_, event| {
        blocks.push(&event).into_iter().for_each(|step| content.add(step));
        if let Event::Finished(finish) = event {
            end = Some(finish);
        }
    })
    .await?;
    let Some(finish) = end else { return Err(ApiError::server("there is no answer")) };
    Ok(response(&answer::whole(&id, model, content.blocks(), &finish)))
}

/// `POST /v1/messages/count_tokens`: does not wait for the model.
pub async fn count_tokens(call: &mut Call) -> ApiResult<Response<Body>> {
    let app = call.app.clone();
    let n = call.with_body(move |body, service| {
        let fields = Fields::of(body, "")?;
        sampling::check_model(&fields, service, app.options.strict_model)?;
        service.count(&Prompt::Chat(input::chat(&fields, service)?))
    });
    Ok(response(&json!({ "input_tokens": n.await? })))
}

/// The request of a body.
fn read(fields: &Fields<'_>, service: &Service) -> ApiResult<Request> {
    let chat = input::chat(fields, service)?;
    let form = form(fields)?;
    let most = fields.count("max_tokens")?;
    let request = Request {
        prompt: Prompt::Chat(chat),
        sampling: sampling::sampling(fields, service)?,
        limits: Limits {
            n_predict: most.unwrap_or(Some(MAX_TOKENS)),
            ignore_eos: fields.flag("ignore_eos")?,
            stops: sampling::stops(fields, "stop_sequences")?,
            context_shift: sampling::context_shift(fields, service, "n_keep")?,
        },
        n_choices: 1,
        form,
        n_logprobs: None,
        after_sampling: false,
        salt: sampling::salt(fields)?,
        scheduling: sampling::scheduling(fields)?,
        prediction: sampling::prediction(fields)?,
        wants_progress: false,
        wants_tokens: false,
        time_limit: sampling::time_limit(fields)?,
    };
    fields.ignore(WITHOUT_EFFECT);
    fields.ignore(UNUSED);
    Ok(request)
}

/// The form that an answer must have; the field was `output_format` once.
fn form(fields: &Fields<'_>) -> ApiResult<Option<Form>> {
    let config = match fields.get("output_config") {
        Some(value) => Fields::of(value, "output_config")?.get("format"),
        None => None,
    };
    let (format, path) = match (config, fields.get("output_format")) {
        (Some(value), _) => (value, "output_config.format"),
        (None, Some(value)) => (value, "output_format"),
        (None, None) => return Ok(None),
    };
    let format = Fields::of(format, path)?;
    match format.string("type")? {
        Some("json_schema") => {
            let value = format.get("schema").unwrap_or(&Value::Null);
            schema(value, &format.path("schema"), format.flag("strict")?).map(Some)
        }
        _ => Err(format.wrong("type", "json_schema")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::grammar::Grammar;

    #[test]
    fn forms_are_read_wherever_they_stand() {
        let read = |body: &Value| {
            let form = form(&Fields::of(body, "").unwrap());
            form.map(|form| form.map(|form| form.grammar)).map_err(|e| e.param)
        };
        let schema = json!({ "type": "object" });
        let format = json!({ "type": "json_schema", "schema": schema });
        let expected = Ok(Some(Grammar::JsonSchema(schema)));
        assert_eq!(read(&json!({ "output_config": { "format": format } })), expected);
        assert_eq!(read(&json!({ "output_format": format })), expected);
        assert_eq!(read(&json!({ "output_config": { "effort": "low" } })), Ok(None));
        for (format, path) in [
            (json!({ "type": "json_schema" }), "output_format.schema"),
            (json!({ "type": "text" }), "output_format.type"),
            (json!("json"), "output_format"),
        ] {
            let body = json!({ "output_format": format });
            assert_eq!(read(&body), Err(Some(path.to_owned())), "{body}");
        }
    }
}
