//! Ollama's embeddings.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::http::Response;
use serde_json::json;

use super::answer::ns;
use super::{input, models};
use crate::server::App;
use crate::server::api::embeddings::{scheduling, shaped, width};
use crate::server::bodies::in_background;
use crate::server::body::Body;
use crate::server::embedding::{Texts, numbers};
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::Fields;
use crate::server::limits::MAX_TEXTS;
use crate::server::models::Lease;
use crate::server::request::Prompt;
use crate::server::router::{Call, json as response};

/// Fields that are accepted and have no effect: options say how a model is loaded.
pub const UNUSED: &[&str] = &["options"];

/// The wishes of a body.
struct Asked {
    texts: Texts,
    width: Option<usize>,
    load_time: Duration,
    service: Arc<Lease>,
}

/// `POST /api/embed`
pub async fn embed(call: &mut Call) -> ApiResult<Response<Body>> {
    let start = Instant::now();
    let Asked { texts, width, load_time, service } = asked(call, "input").await?;
    let embeddings = texts.embed(&service, call).await?;
    in_background(move || {
        let rows = embeddings.into_iter().map(|e| numbers(&shaped(e, width).values));
        response(&json!({
            "model": service.info.name(),
            "embeddings": rows.collect::<Vec<_>>(),
            "total_duration": ns(start.elapsed()),
            "load_duration": ns(load_time),
            "prompt_eval_count": texts.n_tokens(),
        }))
    })
    .await
}

/// `POST /api/embeddings`, the older route: one text, and its embedding as it is.
pub async fn embeddings(call: &mut Call) -> ApiResult<Response<Body>> {
    let Asked { texts, service, .. } = asked(call, "prompt").await?;
    let embeddings = texts.embed(&service, call).await?;
    let row = embeddings.first().map_or(&[][..], |one| one.values.as_slice());
    Ok(response(&json!({ "embedding": numbers(row) })))
}

async fn asked(call: &mut Call, name: &'static str) -> ApiResult<Asked> {
    let start = Instant::now();
    let app = call.app.clone();
    call.with_body(move |body, service| {
        let load_time = start.elapsed();
        let fields = Fields::of(body, "")?;
        let asked = read(&fields, name, service, &app)?;
        Ok(Asked { load_time, ..asked })
    })
    .await
}

fn read(
    fields: &Fields<'_>,
    name: &'static str,
    service: &Arc<Lease>,
    app: &App,
) -> ApiResult<Asked> {
    models::check(fields, service, app.options.strict_model)?;
    let is_one = name == "prompt";
    let texts = match is_one {
        true => fields.string(name)?.map(|text| vec![text]),
        false => fields.strings(name)?,
    };
    let texts = texts.unwrap_or_default();
    if texts.len() > MAX_TEXTS {
        return Err(ApiError::invalid(name, format!("{name}: at most {MAX_TEXTS} texts")));
    }
    let cuts = is_one || fields.boolean("truncate")?.unwrap_or(true);
    let width = if is_one { None } else { width(fields, service)? };
    let (scheduling, keep) = (scheduling(fields)?, input::keep_alive(fields)?);
    fields.ignore(UNUSED);
    app.note_unknown(fields);
    let pooling = service.pooling(true)?;
    let is_empty = is_one && texts.iter().all(|text| text.is_empty());
    let texts = texts.into_iter().filter(|_| !is_empty).enumerate().map(|(i, text)| {
        let path = if is_one { name.to_owned() } else { format!("{name}[{i}]") };
        service.text_tokens(&Prompt::Text(text.to_owned()), &path, cuts)
    });
    let tokens = texts.collect::<ApiResult<_>>()?;
    if let Some(keep) = keep {
        service.keep(keep);
    }
    let texts = Texts { tokens, pooling, scheduling };
    Ok(Asked { texts, width, load_time: Duration::ZERO, service: service.clone() })
}
