//! Models that come from a hub, and go, as Ollama's clients ask for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::body::Bytes;
use hyper::http::{HeaderValue, Response, header};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::Error;
use crate::server::App;
use crate::server::bodies::{find, in_background, parsed};
use crate::server::body::Body;
use crate::server::errors::{ApiError, ApiResult, Kind, Wire};
use crate::server::fields::Fields;
use crate::server::models::{Models, Pulled};
use crate::server::router::{Call, json as response};
use crate::server::sse::{Frames, Source, events};

/// Fields that are accepted and have no effect.
pub const UNUSED: &[&str] = &["insecure", "username", "password"];

/// The time between two lines about one file.
const INTERVAL: Duration = Duration::from_millis(100);

/// Lines that a client may be behind.
const MAX_BEHIND: usize = 16;

/// Lines about a download; dropping it ends the download.
struct Lines(mpsc::Receiver<Value>);

impl Source for Lines {
    async fn next(&mut self) -> Option<Bytes> {
        let mut frames = Frames::default();
        frames.line(&self.0.recv().await?);
        Some(frames.take())
    }
}

/// `POST /api/pull`
pub async fn pull(call: &mut Call) -> ApiResult<Response<Body>> {
    let (name, is_stream) = asked(call).await?;
    let models = call.app.open_models()?.clone();
    allowed(&models)?;
    let place = models.place_to_pull()?;
    let (lines, received) = mpsc::channel(MAX_BEHIND);
    let pulled = tokio::task::spawn_blocking(move || {
        let result = download(&models, &name, &lines);
        drop(place);
        let last = match &result {
            Ok(()) => json!({ "status": "success" }),
            Err(why) => ApiError::of_request(why).body(Wire::Ollama, ""),
        };
        // Whoever has asked may have gone.
        let _ = lines.blocking_send(last);
        result
    });
    if is_stream {
        let mut response = events(Bytes::new(), Lines(received));
        let kind = HeaderValue::from_static("application/x-ndjson");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        return Ok(response);
    }
    let mut lines = Lines(received);
    while lines.next().await.is_some() {}
    let pulled = pulled.await.map_err(|_| ApiError::server("the download has failed"))?;
    pulled.map_err(|why| ApiError::of_request(&why))?;
    Ok(response(&json!({ "status": "success" })))
}

/// Downloads a model and tells of it.
fn download(models: &Arc<Models>, name: &str, lines: &mpsc::Sender<Value>) -> crate::Result<()> {
    let gone = |_| Error::invalid("the client has gone");
    lines.blocking_send(json!({ "status": "pulling manifest" })).map_err(gone)?;
    let mut told: Option<(String, Instant)> = None;
    let mut progress = |step: Pulled<'_>| {
        let is_of_file = |told: &&(String, Instant)| told.0 == step.file && step.done < step.total;
        if told.as_ref().filter(is_of_file).is_some_and(|told| told.1.elapsed() < INTERVAL) {
            return match lines.is_closed() {
                true => Err(Error::invalid("the client has gone")),
                false => Ok(()),
            };
        }
        told = Some((step.file.to_owned(), Instant::now()));
        let mut line = json!({ "status": format!("pulling {}", step.file) });
        if let Some(digest) = step.digest {
            line["digest"] = format!("sha256:{digest}").into();
        }
        line["total"] = step.total.into();
        line["completed"] = step.done.into();
        lines.blocking_send(line).map_err(gone)
    };
    let hub = models.hub().ok_or_else(|| Error::invalid(NOT_ALLOWED))?;
    hub.pull(name, &mut progress)?;
    models.refresh();
    Ok(())
}

/// `DELETE /api/delete`
pub async fn delete(call: &mut Call) -> ApiResult<Response<Body>> {
    let (name, _) = asked(call).await?;
    let models = call.app.open_models()?.clone();
    allowed(&models)?;
    let id = find(&models, Some(name)).await?;
    in_background(move || {
        let hub = models.hub().ok_or_else(|| ApiError::not_supported(NOT_ALLOWED))?;
        let n_bytes = hub.remove(&models.model(id)).map_err(|e| ApiError::of_request(&e))?;
        // A loaded one leaves with its file.
        models.refresh();
        Ok(response(&json!({ "status": "success", "freed_bytes": n_bytes })))
    })
    .await?
}

const NOT_ALLOWED: &str = "clients may not download and delete models here: start the server with \
                           --allow-pull and several models, or see moeba pull and rm";

fn allowed(models: &Models) -> ApiResult<()> {
    match models.hub() {
        Some(_) => Ok(()),
        None => Err(ApiError::new(Kind::NotSupported, "not_supported", NOT_ALLOWED)),
    }
}

/// The name in a body, and whether the answer is a stream.
async fn asked(call: &mut Call) -> ApiResult<(String, bool)> {
    let (app, body) = (call.app.clone(), call.receive().await?);
    let body = parsed(&body.bytes)?;
    let fields = Fields::of(&body, "")?;
    let asked = read(&fields, &app)?;
    Ok(asked)
}

fn read(fields: &Fields<'_>, app: &App) -> ApiResult<(String, bool)> {
    let older = fields.string("name")?;
    let name = fields.string("model")?.or(older).ok_or_else(|| fields.missing("model"))?;
    let is_stream = fields.boolean("stream")?.unwrap_or(true);
    fields.ignore(UNUSED);
    app.note_unknown(fields);
    Ok((name.to_owned(), is_stream))
}
