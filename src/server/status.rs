//! Routes that look at the server. They read snapshots, so they answer while the engine computes.

use std::sync::atomic::Ordering;

use hyper::http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use super::body::{self, Body};
use super::errors::{ApiError, ApiResult, Kind, Wire};
use super::router::json as response;
use super::service::Service;
use super::{App, query};
use crate::engine::scheduler::{SlotStatus, Status};
use crate::engine::{Loading, SpecMode};
use crate::sample::{LogitBias, PARAMETERS, Parameter, SamplerOptions};

/// `GET /health`, of the server or of one of its models.
pub fn health(app: &App, query: &str) -> ApiResult<Response<Body>> {
    let listing = match (app.models.get(), query::value(query, "model")) {
        (Some(models), Some(name)) => {
            models.find_to_look(Some(&name))?.and_then(|id| models.listing(id))
        }
        // The only model, until it was loaded for the first time.
        (Some(models), None) if models.is_single() => {
            models.listing(0).filter(|listing| !listing.was_loaded)
        }
        _ => None,
    };
    let loading = listing.map_or_else(|| app.loading(), |listing| listing.loading);
    let Some(loading) = loading else { return Ok(response(&json!({ "status": "ok" }))) };
    let error = ApiError::loading();
    // The error is the one that all routes have until then.
    let mut body = error.body(Wire::OpenAi, "");
    body["status"] = "loading model".into();
    add_loading(&mut body, loading);
    let mut response = response(&body);
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    Ok(response)
}

/// Tells how far a load is, in thousandths that are done, and the work that it waits for.
pub fn add_loading(to: &mut Value, loading: Loading) {
    to["progress"] = (loading.thousandths() as f64 / 1000.0).into();
    to["phase"] = loading.phase.to_string().into();
}

/// `GET /ready`
pub fn ready(app: &App) -> ApiResult<Response<Body>> {
    match app.is_loaded() {
        _ if app.is_stopping.load(Ordering::Relaxed) => return Err(ApiError::shutting_down()),
        true => {}
        false => return Err(ApiError::loading()),
    }
    // A model that stays cannot be loaded again.
    let stays = app.models.get().filter(|models| !models.can_leave());
    if let Some(model) = stays.and_then(|models| models.look(0)) {
        model.engine().check_files().map_err(|why| ApiError::of_run(&why))?;
    }
    Ok(response(&json!({ "status": "ready" })))
}

/// `GET /metrics`
pub fn metrics(app: &App, query: &str) -> ApiResult<Response<Body>> {
    if !app.options.metrics {
        return Err(ApiError::not_supported("start the server with --metrics to have this route"));
    }
    let (mut all, mut shown, mut has_several) = (Vec::new(), Vec::new(), false);
    if let Ok(models) = app.models() {
        (all, has_several) = (models.list(), !models.is_single());
        shown = match query::value(query, "model") {
            None => models.list(),
            Some(name) => {
                let id = models.find_to_look(Some(&name))?;
                id.and_then(|id| models.listing(id)).into_iter().collect()
            }
        };
    }
    let text = app.metrics.text(&all, &shown, has_several);
    let mut response = Response::new(body::whole(text));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response.headers_mut().insert("process-start-time-unix", app.metrics.started().into());
    Ok(response)
}

/// `GET /slots`
pub fn slots(app: &App, query: &str) -> ApiResult<Response<Body>> {
    if !app.options.slots {
        return Err(ApiError::not_supported("start the server without --no-slots to have this"));
    }
    let service = app.looked_at(query)?.ok_or_else(ApiError::not_loaded)?;
    let status = service.status();
    let is_free = status.slots.iter().any(|slot| slot.job.is_none()) || status.slots.is_empty();
    if query.split('&').any(|part| part.starts_with("fail_on_no_slot")) && !is_free {
        let message = "no slot is free";
        return Err(ApiError::new(Kind::Overloaded, "no_slot", message));
    }
    Ok(response(&slot_list(&service, &status)))
}

/// Each slot of a snapshot.
pub fn slot_list(service: &Service, status: &Status) -> Value {
    let slots = (0..service.info.n_parallel).map(|id| {
        let slot = status.slots.iter().find(|slot| slot.id == id).copied().unwrap_or_default();
        let job = slot.job;
        json!({
            "id": id,
            "id_task": job.map(|job| job.id),
            "n_ctx": service.info.n_ctx,
            "speculative": service.defaults.spec != SpecMode::Off,
            "is_processing": job.is_some(),
            "state": state(&slot),
            "n_past": slot.n_past,
            "n_prompt_tokens": job.map_or(0, |job| job.n_prompt),
            "n_prompt_tokens_processed": job.map_or(0, |job| job.n_prompt_done),
            "n_decoded": job.map_or(0, |job| job.n_generated),
        })
    });
    Value::Array(slots.collect())
}

/// `parked`: the request waits for memory that older ones have.
fn state(slot: &SlotStatus) -> &'static str {
    match slot.job {
        None => "idle",
        Some(_) if slot.is_parked => "parked",
        Some(_) => "processing",
    }
}

/// `GET /props`
pub fn props(app: &App, query: &str) -> ApiResult<Response<Body>> {
    let Some(service) = app.looked_at(query)? else { return props_of_none(app, query) };
    let tokenizer = service.engine().tokenizer();
    let special = tokenizer.special();
    let plan = service.engine().plan();
    Ok(response(&json!({
        "default_generation_settings": {
            "n_ctx": service.info.n_ctx,
            "params": settings(&service.defaults.sampling, service.defaults.n_predict),
        },
        "total_slots": service.info.n_parallel,
        "kv_unified": plan.shares_kv(),
        "n_ctx_all": plan.n_ctx_all,
        "n_parked": service.status().n_parked(),
        "model_alias": service.info.name(),
        "model_path": service.info.path,
        "modalities": { "vision": false, "audio": false },
        "chat_template": service.info.facts.chat_template,
        "bos_token": tokenizer.special_text(special.bos),
        "eos_token": tokenizer.special_text(special.eos),
        "build_info": format!("{}-{}", env!("CARGO_PKG_VERSION"), service.info.fingerprint),
        "deterministic": deterministic(&service),
        "identity": service.info.identity,
        "is_sleeping": false,
    })))
}

/// The settings of a model that is not loaded; without a name, those of a server with several.
fn props_of_none(app: &App, query: &str) -> ApiResult<Response<Body>> {
    let models = app.models()?;
    let name = query::value(query, "model");
    let id = models.find_to_look(name.as_deref())?;
    let Some(listing) = id.and_then(|id| models.listing(id)) else {
        return Ok(response(&json!({
            "role": "router",
            "models_autoload": true,
            "max_instances": models.most(),
            "model_alias": "moeba",
            "model_path": "none",
            "default_generation_settings": { "params": {} },
            "build_info": env!("CARGO_PKG_VERSION"),
        })));
    };
    Ok(response(&json!({
        "model_alias": listing.names.first(),
        "model_path": listing.model.path,
        "default_generation_settings": { "params": {} },
        "build_info": env!("CARGO_PKG_VERSION"),
        "is_sleeping": true,
    })))
}

/// How far an answer's bits depend on its request alone: `load` where it matters how the prompt was
/// computed.
pub fn deterministic(service: &Service) -> &'static str {
    if service.engine().is_exact() { "exact" } else { "load" }
}

/// A bias as llama-server tells it: `null` for a ban.
pub fn bias(bias: &LogitBias) -> Value {
    json!({ "bias": (!bias.is_ban()).then_some(bias.bias), "token": bias.id })
}

/// Each sampling parameter, by the name of its field, and the most tokens of an answer.
pub fn settings(sampling: &SamplerOptions, n_predict: Option<usize>) -> Value {
    let value = |p: &Parameter| match p.is_whole() {
        true => json!(p.get(sampling) as i64),
        false => json!(p.get(sampling) as f32),
    };
    let numbers = PARAMETERS.iter().map(|p| (super::api::sampling::field(p).to_owned(), value(p)));
    let mut settings: serde_json::Map<String, Value> = numbers.collect();
    let n_predict = n_predict.map_or(-1, |n| n as i64);
    let seed = sampling.seed.map_or(-1, |seed| seed as i64);
    settings.insert("n_predict".into(), n_predict.into());
    settings.insert("seed".into(), seed.into());
    let min_keep = sampling.min_keep as i64;
    let samplers: Vec<&str> = sampling.samplers.iter().map(|kind| kind.name()).collect();
    settings.insert("samplers".into(), samplers.into());
    settings.insert("logit_bias".into(), sampling.logit_bias.iter().map(bias).collect());
    let breakers = sampling.dry.breakers.as_slice();
    settings.insert("dry_sequence_breakers".into(), breakers.into());
    for (name, value) in
        [("max_tokens", n_predict), ("n_keep", 0), ("n_discard", 0), ("min_keep", min_keep)]
    {
        settings.insert(name.into(), value.into());
    }
    Value::Object(settings)
}
