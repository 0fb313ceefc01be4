//! LoRA adapters: `GET` and `POST /lora-adapters`, and the field `lora` of requests, as
//! llama-server has them.

use std::sync::{Arc, PoisonError, RwLock};

use hyper::http::{Method, Response};
use serde_json::{Value, json};

use super::body::Body;
use super::errors::{ApiError, ApiResult};
use super::fields::{Fields, wrong};
use super::router::{Call, json as response};
use super::service::Service;
use crate::engine::Engine;

/// How much of each adapter requests take that do not say.
pub struct AdapterScales(RwLock<Arc<[f32]>>);

impl AdapterScales {
    /// The scales of the engine's options.
    pub fn of(engine: &Engine) -> AdapterScales {
        AdapterScales(RwLock::new(engine.adapter_scales().into()))
    }

    fn get(&self) -> Arc<[f32]> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, scales: Arc<[f32]>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = scales;
    }

    /// The scales of a request; an adapter that its list lacks has 0.
    pub fn asked(&self, list: Option<&[(usize, f32)]>) -> ApiResult<Arc<[f32]>> {
        let now = self.get();
        let Some(list) = list else { return Ok(now) };
        let mut scales = vec![0.0; now.len()];
        for (id, scale) in list {
            let Some(place) = scales.get_mut(*id) else {
                let message = match now.len() {
                    0 => format!("lora: there is no adapter {id}: start the server with --lora"),
                    n => format!("lora: there is no adapter {id}, but {n}, numbered from 0"),
                };
                return Err(ApiError::invalid("lora", message));
            };
            *place = *scale;
        }
        Ok(scales.into())
    }
}

/// The texts of other scales than the server began with have a salt of their own.
pub fn salted(salt: &str, engine: &Engine, scales: &[f32]) -> String {
    if *scales == *engine.adapter_scales() {
        return salt.to_owned();
    }
    let bits = scales.iter().map(|scale| format!("\0{:08x}", scale.to_bits()));
    std::iter::once(salt.to_owned()).chain(["\0lora".to_owned()]).chain(bits).collect()
}

/// A list of `{"id": 0, "scale": 1.0}`.
pub fn list(path: &str, value: &Value) -> ApiResult<Vec<(usize, f32)>> {
    let expected = "an array of objects with id and scale";
    let items = value.as_array().ok_or_else(|| wrong(path, expected, value))?;
    items.iter().enumerate().map(|(i, item)| one(&format!("{path}[{i}]"), item)).collect()
}

fn one(path: &str, item: &Value) -> ApiResult<(usize, f32)> {
    let fields = Fields::of(item, path)?;
    let id = fields.integer("id", 0..=i64::MAX)?.ok_or_else(|| fields.missing("id"))?;
    let scale = fields.get("scale").ok_or_else(|| fields.missing("scale"))?;
    let scale = scale.as_f64().map(|x| x as f32).filter(|x| x.is_finite());
    let scale = scale.ok_or_else(|| fields.wrong("scale", "a number"))?;
    match fields.unknown().first() {
        None => Ok((id as usize, scale)),
        Some(name) => Err(wrong(&fields.path(name), "no such field", &item[*name])),
    }
}

/// Serves the route.
pub async fn serve(call: &mut Call) -> ApiResult<Response<Body>> {
    if call.parts.method != Method::POST {
        return Ok(response(&told(&*call.looked_at()?)));
    }
    let set = call.with_body(|body, service| {
        let scales = service.adapters.asked(Some(&list("lora", body)?))?;
        service.adapters.set(scales);
        Ok(json!({ "success": true }))
    });
    set.await.map(|value| response(&value))
}

/// Each adapter with its number, its file and the scale that it has.
fn told(service: &Service) -> Value {
    let scales = service.adapters.get();
    let files = &service.engine().options().adapters;
    let adapters = files.iter().zip(&*scales).enumerate().map(|(id, (file, scale))| {
        json!({ "id": id, "path": file.path.display().to_string(), "scale": scale })
    });
    Value::Array(adapters.collect())
}
