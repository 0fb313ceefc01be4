//! The model as Ollama's clients look for it.

use std::time::{SystemTime, UNIX_EPOCH};

use hyper::http::{HeaderValue, Response, header};
use serde_json::{Map, Value, json};

use crate::chat::Clock;
use crate::gguf::{Gguf, Value as Metadata};
use crate::server::App;
use crate::server::api::models::catalog;
use crate::server::bodies::{in_background, parsed};
use crate::server::body::{self, Body};
use crate::server::errors::{ApiError, ApiResult, Kind};
use crate::server::fields::Fields;
use crate::server::model::Facts;
use crate::server::models::{Listed, Listing};
use crate::server::router::{Call, json as response};
use crate::server::service::Service;
use crate::server::status::settings;

/// The version of Ollama whose routes these are: clients look at it before they use one.
const VERSION: &str = "0.20.0";

/// A model that is in use for ever.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// Fields of `/api/show` that are accepted and have no effect.
pub const UNUSED: &[&str] = &["system", "template", "options"];

/// `GET /` for clients that are no browsers.
pub fn running() -> Response<Body> {
    let mut response = Response::new(body::whole("Ollama is running"));
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// `GET /api/version`
pub fn version() -> Response<Body> {
    response(&json!({ "version": VERSION, "moeba": env!("CARGO_PKG_VERSION") }))
}

/// `GET /api/tags`
pub async fn tags(app: &App) -> ApiResult<Response<Body>> {
    Ok(response(&json!({ "models": list(&catalog(app).await?) })))
}

/// Each model under each of its names.
pub fn list(models: &[Listing]) -> Vec<Value> {
    let entry = |listing: &Listing, name: &String| {
        let mut entry = json!({
            "name": name,
            "model": name,
            "modified_at": modified(&listing.model),
            "size": listing.model.n_bytes,
        });
        if let Some(facts) = &listing.facts {
            entry["size"] = facts.n_bytes.into();
            entry["digest"] = facts.digest.as_str().into();
            entry["details"] = details(facts);
            entry["capabilities"] = capabilities(facts).into();
        }
        entry
    };
    let entries = |listing| move |name: &String| entry(listing, name);
    models.iter().flat_map(|listing| listing.names.iter().map(entries(listing))).collect()
}

/// `GET /api/ps`: the models that are loaded.
pub fn running_models(app: &App) -> ApiResult<Response<Body>> {
    let all = app.models().map_or_else(|_| Vec::new(), |models| models.list());
    let models: Vec<Value> = all.iter().flat_map(in_use).collect();
    Ok(response(&json!({ "models": models })))
}

fn in_use(listing: &Listing) -> Vec<Value> {
    let Some(service) = &listing.lease else { return Vec::new() };
    let device = service.engine().plan().device.as_ref().map(|part| &part.plan);
    let on_devices = device.map_or(0, |plan| {
        (0..plan.devices.len()).map(|device| plan.planned_bytes(device)).sum::<u64>()
    });
    let facts = &service.info.facts;
    let entry = |name: &String| {
        json!({
            "name": name,
            "model": name,
            "size": facts.n_bytes.max(on_devices),
            "digest": facts.digest,
            "details": details(facts),
            "expires_at": listing.expires.map_or(NEVER.into(), time),
            "size_vram": on_devices,
            "context_length": service.info.n_ctx,
        })
    };
    service.info.names.iter().map(entry).collect()
}

/// `POST /api/show`. A model that is not loaded stays so.
pub async fn show(call: &mut Call) -> ApiResult<Response<Body>> {
    let (app, body) = (call.app.clone(), call.receive().await?);
    let value = in_background(move || {
        let body = parsed(&body.bytes)?;
        let fields = Fields::of(&body, "")?;
        let is_verbose = fields.flag("verbose")?;
        fields.ignore(UNUSED);
        let models = app.open_models()?;
        let name = fields.string("model")?.or(fields.string("name")?);
        let id = models.find(name)?;
        let listing = models.listing(id).ok_or_else(|| models.unknown(name.unwrap_or_default()))?;
        if let Some(service) = &listing.lease {
            // Clients ask whether the model is there.
            check(&fields, service, true)?;
        }
        app.note_unknown(&fields);
        shown(&listing, is_verbose)
    });
    Ok(response(&value.await??))
}

fn shown(listing: &Listing, is_verbose: bool) -> ApiResult<Value> {
    let opened;
    let (gguf, facts) = match &listing.lease {
        Some(service) => (service.engine().gguf(), &service.info.facts),
        None => {
            let gguf = Gguf::open(&listing.model.path).map_err(|e| ApiError::of_run(&e))?;
            opened = (Facts::new(&gguf), gguf);
            (&opened.1, &opened.0)
        }
    };
    let mut shown = json!({
        "parameters": listing.lease.as_ref().map_or_else(String::new, |model| parameters(model)),
        "template": facts.chat_template,
        "details": details(facts),
        "model_info": model_info(gguf, facts, is_verbose),
        "capabilities": capabilities(facts),
        "modified_at": modified(&listing.model),
    });
    if is_verbose {
        let tensors = gguf.tensors().iter().map(
            |tensor| json!({ "name": tensor.name, "type": tensor.ty.name(), "shape": tensor.dims }),
        );
        shown["tensors"] = tensors.collect();
    }
    Ok(shown)
}

fn parameters(service: &Service) -> String {
    let defaults = settings(&service.defaults.sampling, None);
    let names = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty"];
    // A sampler's numbers are f32, whose decimals are fewer.
    let number = |name: &str| defaults[name].as_f64().unwrap_or_default() as f32;
    let lines = names.iter().map(|name| format!("\n{name} {}", number(name)));
    format!("num_ctx {}", service.info.n_ctx) + &lines.collect::<String>()
}

/// The file's metadata. Lists, which may have all of a vocabulary, are there on request.
fn model_info(gguf: &Gguf, facts: &Facts, has_lists: bool) -> Map<String, Value> {
    let value = |value: Metadata<'_>| match value {
        Metadata::Array(_) if !has_lists => Value::Null,
        value => value.json(),
    };
    let is_shown = |key: &str| !["general.name", "tokenizer.chat_template"].contains(&key);
    let keys = gguf.keys().filter(|(key, _)| is_shown(key));
    let mut info: Map<String, Value> = keys.map(|(key, v)| (key.to_owned(), value(v))).collect();
    info.insert("general.parameter_count".into(), facts.n_params.into());
    info
}

fn details(facts: &Facts) -> Value {
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": parameter_size(facts.n_params),
        "quantization_level": facts.weight_type,
        "context_length": facts.n_ctx_train,
        "embedding_length": facts.n_embd,
    })
}

/// A number of parameters in its largest unit, as `30.5B`.
fn parameter_size(n: u64) -> String {
    match n {
        1_000_000_000.. => format!("{:.1}B", n as f64 / 1e9),
        1_000_000.. => format!("{:.2}M", n as f64 / 1e6),
        1_000.. => format!("{:.0}K", n as f64 / 1e3),
        _ => n.to_string(),
    }
}

fn capabilities(facts: &Facts) -> Vec<&'static str> {
    if facts.embeds {
        return vec!["embedding"];
    }
    ["completion", "tools"].into_iter().chain(facts.thinks.then_some("thinking")).collect()
}

fn modified(model: &Listed) -> String {
    time(model.modified.unwrap_or(UNIX_EPOCH))
}

/// A time in UTC, to the microsecond.
pub fn time(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = Clock::Second(since.as_secs() as i64).format("%FT%T");
    format!("{seconds}.{:06}Z", since.subsec_micros())
}

/// Refuses a model that is not served, if the server is strict. A name may end with `:latest`.
pub fn check(fields: &Fields<'_>, service: &Service, is_strict: bool) -> ApiResult<()> {
    // The field of older clients.
    let older = fields.string("name")?;
    let Some(name) = fields.string("model")?.or(older).filter(|_| is_strict) else { return Ok(()) };
    let short = name.strip_suffix(":latest").unwrap_or(name);
    if service.info.names.iter().any(|own| own == name || own == short) {
        return Ok(());
    }
    let message = format!("model '{name}' not found: this server has {}", service.info.name());
    let error = ApiError::new(Kind::NotFound, "model_not_found", message);
    Err(ApiError { param: Some("model".into()), ..error })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn sizes_and_times_are_those_of_ollama() {
        let sizes = [999, 135_000, 8_030_000, 30_532_122_624].map(parameter_size);
        assert_eq!(sizes, ["999", "135K", "8.03M", "30.5B"]);
        let at = UNIX_EPOCH + Duration::from_micros(1_795_220_096_000_042);
        assert_eq!(time(at), "2026-11-21T00:14:56.000042Z");
    }
}
