//! Ollama's chats and texts, and the list of models that its clients ask for.

mod answer;
mod input;
pub mod models;

pub use input::{UNUSED, UNUSED_OPTIONS};

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::http::Response;

use self::answer::Writer;
use super::sampling;
use crate::server::body::Body;
use crate::server::collect::collect;
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::Fields;
use crate::server::router::{Call, json as response};
use crate::server::service::{Prepared, Service};
use crate::server::{App, sse};

/// The route of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// Messages, and an answer in a message.
    Chat,
    /// A text, and an answer that is one.
    Generate,
}

/// The wishes of a body.
struct Asked {
    /// `None`: nothing is to be answered.
    prepared: Option<Prepared>,
    /// The client wants the model to go when it is not used.
    unloads: bool,
    is_stream: bool,
    /// The inner `None` is any silence.
    ping: Option<Option<Duration>>,
}

/// `POST /api/chat`
pub async fn chat(call: &mut Call) -> ApiResult<Response<Body>> {
    respond(call, Shape::Chat).await
}

/// `POST /api/generate`
pub async fn generate(call: &mut Call) -> ApiResult<Response<Body>> {
    respond(call, Shape::Generate).await
}

async fn respond(call: &mut Call, shape: Shape) -> ApiResult<Response<Body>> {
    let start = Instant::now();
    let app = call.app.clone();
    let (asked, service) = call
        .with_body(move |body, service| {
            let fields = Fields::of(body, "")?;
            let asked = ask(&fields, shape, service, &app)?;
            Ok((asked, service.clone()))
        })
        .await?;
    let mut writer = Writer::new(shape, start, &service);
    let Some(prepared) = asked.prepared else {
        return Ok(response(&writer.empty(if asked.unloads { "unload" } else { "load" })));
    };
    let answer = service.submit(vec![prepared], &call.client)?;
    let ping = asked.ping.unwrap_or(call.app.options.ping);
    if let Some(report) = call.report.take_if(|_| asked.is_stream) {
        return Ok(sse::respond(answer, Box::new(writer), report, ping));
    }
    let Some(report) = &mut call.report else {
        return Err(ApiError::server("the request was answered before"));
    };
    let choice = collect(answer, 1, report).await?.remove(0);
    let Some(finish) = &choice.finish else { return Err(ApiError::server("there is no answer")) };
    Ok(response(&writer.whole(&choice, finish)))
}

fn ask(fields: &Fields<'_>, shape: Shape, service: &Arc<Service>, app: &App) -> ApiResult<Asked> {
    models::check(fields, service, app.options.strict_model)?;
    let request = input::request(fields, shape, service, app)?;
    let unloads = input::unloads(fields)?;
    let is_stream = fields.boolean("stream")?.unwrap_or(true);
    let ping = sampling::ping(fields)?;
    app.note_unknown(fields);
    let prepared = request.map(|request| service.prepare(request)).transpose()?;
    Ok(Asked { prepared, unloads, is_stream, ping })
}
