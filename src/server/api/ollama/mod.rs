//! Ollama's chats and texts, and the list of models that its clients ask for.

mod answer;
pub mod downloads;
pub mod embed;
mod input;
pub mod models;

pub use input::{UNUSED, UNUSED_OPTIONS};

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::http::Response;

use self::answer::Writer;
use super::sampling;
use crate::server::bodies::{Held, find};
use crate::server::body::Body;
use crate::server::collect::collect;
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::Fields;
use crate::server::models::Lease;
use crate::server::router::{Call, json as response};
use crate::server::service::Prepared;
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
    /// The time that the model is to stay after its last use; the inner `None` is for ever.
    keep: Option<Option<Duration>>,
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
    let (app, body) = (call.app.clone(), call.receive().await?);
    if let Some(answer) = unloaded(&app, &body, shape).await? {
        return Ok(answer);
    }
    let (asked, service, load_time) = call
        .with_received(body, move |body, service| {
            let load_time = start.elapsed();
            let fields = Fields::of(body, "")?;
            let asked = ask(&fields, shape, service, &app)?;
            Ok((asked, service.clone(), load_time))
        })
        .await?;
    let mut writer = Writer::new(shape, start, load_time, &service);
    let Some(prepared) = asked.prepared else {
        let unloads = asked.keep == Some(Some(Duration::ZERO));
        return Ok(response(&writer.empty(if unloads { "unload" } else { "load" })));
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

/// The answer to a request that lets a model go which is not loaded, and needs it for nothing.
async fn unloaded(app: &App, body: &Held, shape: Shape) -> ApiResult<Option<Response<Body>>> {
    let Some(name) = input::unloads(&body.bytes, shape) else { return Ok(None) };
    let models = app.open_models()?;
    let id = find(models, name).await?;
    let listing = models.listing(id).filter(|listing| listing.lease.is_none());
    Ok(listing.map(|listing| {
        let name = listing.names.first().map_or("", String::as_str);
        response(&answer::empty(shape, name, "unload"))
    }))
}

fn ask(fields: &Fields<'_>, shape: Shape, service: &Arc<Lease>, app: &App) -> ApiResult<Asked> {
    models::check(fields, service, app.options.strict_model)?;
    let request = input::request(fields, shape, service, app)?;
    let keep = input::keep_alive(fields)?;
    let is_stream = fields.boolean("stream")?.unwrap_or(true);
    let ping = sampling::ping(fields)?;
    app.note_unknown(fields);
    let prepared = request.map(|request| service.prepare(request)).transpose()?;
    if let Some(keep) = keep {
        service.keep(keep);
    }
    Ok(Asked { prepared, keep, is_stream, ping })
}
