//! The model as Ollama's clients look for it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::http::{HeaderValue, Response, header};
use serde_json::{Map, Value, json};

use crate::chat::Clock;
use crate::gguf::{Gguf, Value as Metadata};
use crate::server::App;
use crate::server::body::{self, Body};
use crate::server::errors::{ApiError, ApiResult, Kind};
use crate::server::fields::Fields;
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
pub fn tags(app: &App) -> ApiResult<Response<Body>> {
    Ok(response(&json!({ "models": list(&*app.loaded()?) })))
}

/// The model under each of its names.
pub fn list(service: &Service) -> Vec<Value> {
    let entry = |name: &String| {
        json!({
            "name": name,
            "model": name,
            "modified_at": modified(service),
            "size": service.info.n_bytes,
            "digest": service.info.digest,
            "details": details(service),
            "capabilities": capabilities(service),
        })
    };
    service.info.names.iter().map(entry).collect()
}

/// `GET /api/ps`: the model, once it is loaded.
pub fn running_models(app: &App) -> ApiResult<Response<Body>> {
    let models = app.loaded().map_or_else(|_| Vec::new(), |service| in_use(&service));
    Ok(response(&json!({ "models": models })))
}

fn in_use(service: &Service) -> Vec<Value> {
    let device = service.engine().plan().device.as_ref().map(|part| &part.plan);
    let on_devices = device.map_or(0, |plan| {
        (0..plan.devices.len()).map(|device| plan.planned_bytes(device)).sum::<u64>()
    });
    let entry = |name: &String| {
        json!({
            "name": name,
            "model": name,
            "size": service.info.n_bytes.max(on_devices),
            "digest": service.info.digest,
            "details": details(service),
            "expires_at": NEVER,
            "size_vram": on_devices,
            "context_length": service.info.n_ctx,
        })
    };
    service.info.names.iter().map(entry).collect()
}

/// `POST /api/show`
pub async fn show(call: &mut Call) -> ApiResult<Response<Body>> {
    let app = call.app.clone();
    let value = call.with_body(move |body, service| {
        let fields = Fields::of(body, "")?;
        let is_verbose = fields.flag("verbose")?;
        fields.ignore(UNUSED);
        // Clients ask whether the model is there.
        check(&fields, service, true)?;
        app.note_unknown(&fields);
        Ok(shown(service, is_verbose))
    });
    Ok(response(&value.await?))
}

fn shown(service: &Service, is_verbose: bool) -> Value {
    let defaults = settings(&service.defaults.sampling, None);
    let names = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty"];
    let mut parameters = format!("num_ctx {}", service.info.n_ctx);
    for name in names {
        // A sampler's numbers are f32, whose decimals are fewer.
        let value = defaults[name].as_f64().unwrap_or_default() as f32;
        parameters.push_str(&format!("\n{name} {value}"));
    }
    let mut shown = json!({
        "parameters": parameters,
        "template": service.info.chat_template,
        "details": details(service),
        "model_info": model_info(service, is_verbose),
        "capabilities": capabilities(service),
        "modified_at": modified(service),
    });
    if is_verbose {
        let tensors = service.engine().gguf().tensors().iter().map(
            |tensor| json!({ "name": tensor.name, "type": tensor.ty.name(), "shape": tensor.dims }),
        );
        shown["tensors"] = tensors.collect();
    }
    shown
}

/// The file's metadata. Lists, which may have all of a vocabulary, are there on request.
fn model_info(service: &Service, has_lists: bool) -> Map<String, Value> {
    let gguf: &Gguf = service.engine().gguf();
    let value = |value: Metadata<'_>| match value {
        Metadata::Array(_) if !has_lists => Value::Null,
        value => value.json(),
    };
    let is_shown = |key: &str| !["general.name", "tokenizer.chat_template"].contains(&key);
    let keys = gguf.keys().filter(|(key, _)| is_shown(key));
    let mut info: Map<String, Value> = keys.map(|(key, v)| (key.to_owned(), value(v))).collect();
    info.insert("general.parameter_count".into(), service.info.n_params.into());
    info
}

fn details(service: &Service) -> Value {
    let info = &service.info;
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": parameter_size(info.n_params),
        "quantization_level": info.weight_type,
        "context_length": info.n_ctx_train,
        "embedding_length": info.n_embd,
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

fn capabilities(service: &Service) -> Vec<&'static str> {
    let thinks = service.templates.reasoning().is_some();
    ["completion", "tools"].into_iter().chain(thinks.then_some("thinking")).collect()
}

fn modified(service: &Service) -> String {
    time(UNIX_EPOCH + Duration::from_secs(service.info.modified))
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

    #[test]
    fn sizes_and_times_are_those_of_ollama() {
        let sizes = [999, 135_000, 8_030_000, 30_532_122_624].map(parameter_size);
        assert_eq!(sizes, ["999", "135K", "8.03M", "30.5B"]);
        let at = UNIX_EPOCH + Duration::from_micros(1_795_220_096_000_042);
        assert_eq!(time(at), "2026-11-21T00:14:56.000042Z");
    }
}
