//! Documents in the order in which they answer a query, as Jina, Cohere and llama-server have it.

use std::sync::Arc;

use hyper::http::Response;
use serde_json::{Value, json};

use super::embeddings::scheduling;
use super::sampling::{self, WITHOUT_EFFECT};
use crate::engine::Pooling;
use crate::server::body::Body;
use crate::server::embedding::{Texts, numbers};
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::Fields;
use crate::server::limits::MAX_TEXTS;
use crate::server::models::Lease;
use crate::server::router::{Call, json as response};

/// How the results are written.
struct Style {
    /// An array of them is the whole answer, as of text-embeddings-inference.
    is_bare: bool,
    has_documents: bool,
    /// Results at most.
    most: usize,
    documents: Vec<String>,
}

/// `POST /v1/rerank`
pub async fn answer(call: &mut Call) -> ApiResult<Response<Body>> {
    let app = call.app.clone();
    let (texts, style, service) = call
        .with_body(move |body, service| {
            let fields = Fields::of(body, "")?;
            sampling::check_model(&fields, service, app.options.strict_model)?;
            let query = fields.required("query")?;
            let style = style(&fields)?;
            let scheduling = scheduling(&fields)?;
            fields.ignore(WITHOUT_EFFECT);
            app.note_unknown(&fields);
            let engine = service.engine();
            engine.check_ranks().map_err(|e| ApiError::not_supported(e.to_string()))?;
            let all = style.documents.iter().enumerate().map(|(i, document)| {
                service.rank_tokens(query, document, &format!("documents[{i}]"))
            });
            let tokens = all.collect::<ApiResult<_>>()?;
            let texts = Texts { tokens, pooling: Pooling::Rank, scheduling };
            Ok((texts, style, service.clone()))
        })
        .await?;
    let scores = texts.embed(&service, call).await?;
    let mut order: Vec<(usize, f32)> =
        scores.iter().map(|scores| scores.values[0]).enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    order.truncate(style.most);
    Ok(response(&written(&order, &style, &texts, &service)))
}

fn style(fields: &Fields<'_>) -> ApiResult<Style> {
    let (documents, texts) = (fields.array("documents")?, fields.array("texts")?);
    let is_bare = documents.is_none() && texts.is_some();
    let name = if is_bare { "texts" } else { "documents" };
    let list = documents.or(texts).ok_or_else(|| fields.missing(name))?;
    if list.is_empty() || list.len() > MAX_TEXTS {
        let message = format!("{name}: expected 1 to {MAX_TEXTS} texts, got {}", list.len());
        return Err(ApiError::invalid(name, message));
    }
    let document = |item: &Value| {
        let text = item.as_str().or_else(|| item["text"].as_str());
        text.map(str::to_owned)
            .ok_or_else(|| fields.wrong(name, "an array of strings or of objects with a text"))
    };
    let documents = list.iter().map(document).collect::<ApiResult<Vec<_>>>()?;
    let (of_jina, of_bare) = (fields.flag("return_documents")?, fields.flag("return_text")?);
    let most = fields.integer("top_n", 1..=i64::MAX)?;
    Ok(Style {
        is_bare,
        has_documents: of_jina || of_bare,
        most: most.map_or(documents.len(), |n| usize::try_from(n).unwrap_or(usize::MAX)),
        documents,
    })
}

/// The results, the best first.
fn written(order: &[(usize, f32)], style: &Style, texts: &Texts, service: &Arc<Lease>) -> Value {
    let (score_name, text_name) = match style.is_bare {
        true => ("score", "text"),
        false => ("relevance_score", "document"),
    };
    let results = order.iter().map(|(i, score)| {
        let mut result = json!({ "index": i, score_name: numbers(&[*score])[0] });
        if style.has_documents {
            let text = &style.documents[*i];
            result[text_name] = if style.is_bare { json!(text) } else { json!({ "text": text }) };
        }
        result
    });
    let results: Vec<Value> = results.collect();
    if style.is_bare {
        return results.into();
    }
    let n = texts.n_tokens();
    json!({
        "object": "list",
        "model": service.info.name(),
        "results": results,
        "usage": { "prompt_tokens": n, "total_tokens": n },
    })
}
