//! The list of models.

use hyper::http::Response;
use serde_json::{Value, json};

use super::ollama;
use crate::server::App;
use crate::server::body::Body;
use crate::server::errors::{ApiError, ApiResult, Kind};
use crate::server::router::json as response;

/// `GET /v1/models`
pub fn list(app: &App) -> ApiResult<Response<Body>> {
    let service = app.loaded()?;
    let names = &service.info.names;
    let data: Vec<Value> = names.iter().map(|name| service.info.entry(name)).collect();
    Ok(response(&json!({
        "object": "list",
        "data": data,
        // Some clients read Ollama's list.
        "models": ollama::models::list(&service),
        // Anthropic's clients read the list in pages.
        "has_more": false,
        "first_id": names.first(),
        "last_id": names.last(),
    })))
}

/// `GET /v1/models/{id}`
pub fn one(app: &App, path: &str) -> ApiResult<Response<Body>> {
    let service = app.loaded()?;
    let name = path.strip_prefix("/v1/models/").unwrap_or_default();
    match service.info.names.iter().find(|own| *own == name) {
        Some(name) => Ok(response(&service.info.entry(name))),
        None => Err(unknown(name)),
    }
}

/// The error for a model that is not served.
pub fn unknown(name: &str) -> ApiError {
    let message = format!("the model {name:?} is not served: see /v1/models");
    let error = ApiError::new(Kind::NotFound, "model_not_found", message);
    ApiError { param: Some("model".into()), ..error }
}
