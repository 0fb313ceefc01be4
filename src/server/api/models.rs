//! The list of models, and the routes that load and unload them.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use hyper::http::Response;
use serde_json::{Value, json};

use super::ollama;
use crate::server::bodies::{find, in_background, parsed};
use crate::server::body::Body;
use crate::server::errors::{ApiError, ApiResult, Kind};
use crate::server::fields::Fields;
use crate::server::models::{Listing, Models};
use crate::server::router::{Call, json as response};
use crate::server::{App, model, query, status};

/// All models that there are now, with facts of their files.
pub async fn catalog(app: &App) -> ApiResult<Vec<Listing>> {
    let models = app.models()?.clone();
    in_background(move || {
        models.refresh();
        models.list_with_facts()
    })
    .await
}

/// `GET /v1/models`
pub async fn list(app: &App) -> ApiResult<Response<Body>> {
    let all = catalog(app).await?;
    let entries = all.iter().flat_map(|listing| listing.names.iter().map(|n| entry(listing, n)));
    let data: Vec<Value> = entries.collect();
    let id = |entry: Option<&Value>| entry.map(|entry| entry["id"].clone());
    let (first, last) = (id(data.first()), id(data.last()));
    Ok(response(&json!({
        "object": "list",
        "data": data,
        // Some clients read Ollama's list.
        "models": ollama::models::list(&all),
        // Anthropic's clients read the list in pages.
        "has_more": false,
        "first_id": first,
        "last_id": last,
    })))
}

/// A model under one of its names, with its state as llama-server tells it.
fn entry(listing: &Listing, name: &str) -> Value {
    let mut entry = match listing.lease.as_ref().filter(|_| listing.state == "loaded") {
        Some(service) => service.info.entry(name),
        None => entry_of_none(listing, name),
    };
    if listing.names.len() > 1 {
        entry["aliases"] = listing.names.iter().filter(|other| *other != name).cloned().collect();
    }
    entry
}

/// The entry of a model that takes no requests now.
fn entry_of_none(listing: &Listing, name: &str) -> Value {
    let since = listing.model.modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let created = since.map_or(0, |since| since.as_secs());
    let mut entry = model::entry(name, created, listing.facts.as_deref());
    entry["status"] = json!({ "value": listing.state });
    if let Some(why) = &listing.failure {
        entry["status"]["failed"] = true.into();
        entry["status"]["error"] = why.as_str().into();
    }
    if let Some(loading) = listing.loading {
        status::add_loading(&mut entry["status"], loading);
    }
    entry
}

/// `GET /v1/models/{id}`
pub async fn one(app: &App, path: &str) -> ApiResult<Response<Body>> {
    let name = query::unescaped(path.strip_prefix("/v1/models/").unwrap_or_default());
    let models = app.models()?.clone();
    let wanted = name.clone();
    let found = in_background(move || {
        models.refresh();
        models.named(&wanted).and_then(|id| models.listing_with_facts(id))
    });
    let found = found.await?;
    found.map(|listing| response(&entry(&listing, &name))).ok_or_else(|| unknown(&name))
}

/// The error for a model that is not served.
pub fn unknown(name: &str) -> ApiError {
    let message = format!("the model {name:?} is not served: see /v1/models");
    let error = ApiError::new(Kind::NotFound, "model_not_found", message);
    ApiError { param: Some("model".into()), ..error }
}

/// `POST /models/load`: begins to load a model, and does not wait for it.
pub async fn load(call: &mut Call) -> ApiResult<Response<Body>> {
    let (models, id) = named(call).await?;
    tokio::spawn(async move { models.take(id).await.map(drop) });
    Ok(response(&json!({ "success": true })))
}

/// `POST /models/unload`: a model leaves as soon as no request uses it.
pub async fn unload(call: &mut Call) -> ApiResult<Response<Body>> {
    let (models, id) = named(call).await?;
    if !models.can_leave() {
        let why = "the server was started with one model, which stays: see --models-dir and \
                   --sleep-idle-seconds";
        return Err(ApiError::not_supported(why));
    }
    match models.unload(id) {
        true => Ok(response(&json!({ "success": true }))),
        false => Err(ApiError::new(Kind::Invalid, "model_not_loaded", "the model is not loaded")),
    }
}

/// The model of a body, by its name.
async fn named(call: &mut Call) -> ApiResult<(Arc<Models>, usize)> {
    let (app, body) = (call.app.clone(), call.receive().await?);
    let body = parsed(&body.bytes)?;
    let fields = Fields::of(&body, "")?;
    let name = fields.required("model")?.to_owned();
    app.note_unknown(&fields);
    let models = app.open_models()?;
    Ok((models.clone(), find(models, Some(name)).await?))
}
