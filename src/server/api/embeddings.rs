//! Embeddings, as OpenAI and as llama-server have them.

use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hyper::http::Response;
use serde_json::{Value, json};

use super::prompts::prompts;
use super::sampling::{self, WITHOUT_EFFECT};
use crate::engine::{EUCLIDEAN, Embedding, Pooling};
use crate::server::adapters;
use crate::server::bodies::in_background;
use crate::server::body::Body;
use crate::server::embedding::{Texts, numbers};
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::Fields;
use crate::server::limits::MAX_TEXTS;
use crate::server::models::Lease;
use crate::server::request::Scheduling;
use crate::server::router::{Call, json as response};

/// The largest p of a p-norm.
pub const MAX_NORM: i64 = 1000;

/// `POST /v1/embeddings`
pub async fn openai(call: &mut Call) -> ApiResult<Response<Body>> {
    let app = call.app.clone();
    let (texts, is_base64, width, service) = call
        .with_body(move |body, service| {
            let fields = Fields::of(body, "")?;
            sampling::check_model(&fields, service, app.options.strict_model)?;
            let is_base64 = match fields.string("encoding_format")? {
                None | Some("float") => false,
                Some("base64") => true,
                Some(_) => return Err(fields.wrong("encoding_format", "float or base64")),
            };
            let width = width(&fields, service)?;
            let texts = texts(&fields, "input", service, service.pooling(true)?)?;
            app.note_unknown(&fields);
            Ok((texts, is_base64, width, service.clone()))
        })
        .await?;
    let embeddings = texts.embed(&service, call).await?;
    in_background(move || {
        let data = embeddings.into_iter().enumerate().map(|(i, embedding)| {
            let embedding = shaped(embedding, width);
            let embedding = match is_base64 {
                true => base64(&embedding.values).into(),
                false => numbers(&embedding.values),
            };
            json!({ "object": "embedding", "index": i, "embedding": embedding })
        });
        let n = texts.n_tokens();
        response(&json!({
            "object": "list",
            "data": data.collect::<Vec<_>>(),
            "model": service.info.name(),
            "usage": { "prompt_tokens": n, "total_tokens": n },
        }))
    })
    .await
}

/// `POST /embedding`
pub async fn native(call: &mut Call) -> ApiResult<Response<Body>> {
    let app = call.app.clone();
    let (texts, norm, service) = call
        .with_body(move |body, service| {
            let fields = Fields::of(body, "")?;
            let (content, input) = (fields.get("content"), fields.get("input"));
            let name = if input.is_some() { "input" } else { "content" };
            if content.is_some() && input.is_some() {
                let message = "input: give either content or input";
                return Err(ApiError::invalid("input", message));
            }
            let norm = fields.integer("embd_normalize", -1..=MAX_NORM)?;
            let texts = texts(&fields, name, service, service.pooling(false)?)?;
            app.note_unknown(&fields);
            Ok((texts, norm.map_or(EUCLIDEAN, |norm| norm as i32), service.clone()))
        })
        .await?;
    let embeddings = texts.embed(&service, call).await?;
    // As in llama-server, outputs that are not pooled stay as they are.
    let has_norm = texts.pooling != Pooling::None;
    in_background(move || {
        let all = embeddings.into_iter().enumerate().map(|(i, mut embedding)| {
            if has_norm {
                embedding.normalize(norm);
            }
            let rows: Vec<Value> = embedding.rows().map(numbers).collect();
            json!({ "index": i, "embedding": rows })
        });
        response(&all.collect())
    })
    .await
}

/// The texts of a field.
fn texts(
    fields: &Fields<'_>,
    name: &'static str,
    service: &Arc<Lease>,
    pooling: Pooling,
) -> ApiResult<Texts> {
    let prompts = prompts(fields, name, MAX_TEXTS, service.engine().tokenizer())?;
    let scheduling = scheduling(fields)?;
    fields.ignore(WITHOUT_EFFECT);
    let is_one = prompts.len() == 1;
    let all = prompts.iter().enumerate().map(|(i, prompt)| {
        let path = if is_one { name.to_owned() } else { format!("{name}[{i}]") };
        service.text_tokens(prompt, &path, false)
    });
    Ok(Texts { tokens: all.collect::<ApiResult<_>>()?, pooling, scheduling })
}

/// A request's turn and adapters. Nothing is found in caches, or kept there.
pub fn scheduling(fields: &Fields<'_>) -> ApiResult<Scheduling> {
    Ok(Scheduling {
        is_cached: false,
        priority: fields.integer("priority", i64::MIN..=i64::MAX)?,
        lora: fields.get("lora").map(|list| adapters::list("lora", list)).transpose()?,
        ..Scheduling::default()
    })
}

/// The numbers of an embedding that are asked for.
pub fn width(fields: &Fields<'_>, service: &Lease) -> ApiResult<Option<usize>> {
    let most = service.engine().model().hyper().n_embd;
    let Some(width) = fields.integer("dimensions", 1..=i64::MAX)? else { return Ok(None) };
    match usize::try_from(width).ok().filter(|width| *width <= most) {
        Some(width) => Ok(Some(width)),
        None => {
            let message = format!("dimensions: the model's embeddings have {most}, got {width}");
            Err(ApiError::invalid("dimensions", message))
        }
    }
}

/// An embedding's first `width` numbers, with a Euclidean norm of 1.
pub fn shaped(mut embedding: Embedding, width: Option<usize>) -> Embedding {
    if let Some(width) = width.filter(|width| *width < embedding.width) {
        embedding.shorten(width);
    }
    embedding.normalize(EUCLIDEAN);
    embedding
}

/// The bytes of a row's numbers.
fn base64(row: &[f32]) -> String {
    BASE64_STANDARD.encode(row.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
}
