//! Routes that turn text into tokens, tokens into text, and messages into a prompt.

use hyper::http::Response;
use serde_json::{Value, json};

use super::chat;
use super::prompts::{mixed, token_ids};
use crate::server::body::Body;
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::Fields;
use crate::server::router::{Call, json as response};
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// `POST /tokenize`
pub async fn tokenize(call: &mut Call) -> ApiResult<Response<Body>> {
    let value = call.with_body(|body, service| {
        let fields = Fields::of(body, "")?;
        let tokenizer = service.engine().tokenizer();
        let options = EncodeOptions {
            add_special: fields.flag("add_special")?,
            parse_special: fields.boolean("parse_special")?.unwrap_or(true),
        };
        let ids = match fields.get("content") {
            None => return Err(fields.missing("content")),
            Some(Value::String(text)) => tokenizer.encode(text, options),
            Some(Value::Array(list)) => {
                let ids = mixed(list, tokenizer);
                ids.ok_or_else(|| fields.wrong("content", "an array of token ids and strings"))?
            }
            Some(_) => return Err(fields.wrong("content", "a string")),
        };
        if !fields.flag("with_pieces")? {
            return Ok(json!({ "tokens": ids }));
        }
        let tokens = ids.iter().map(|id| json!({ "id": id, "piece": piece(tokenizer, *id) }));
        Ok(json!({ "tokens": tokens.collect::<Vec<_>>() }))
    });
    Ok(response(&value.await?))
}

/// A token's text, or its bytes where they are no text.
fn piece(tokenizer: &Tokenizer, id: u32) -> Value {
    let bytes = tokenizer.piece(id).unwrap_or_default();
    std::str::from_utf8(bytes).map_or_else(|_| bytes.into(), Value::from)
}

/// `POST /detokenize`
pub async fn detokenize(call: &mut Call) -> ApiResult<Response<Body>> {
    let value = call.with_body(|body, service| {
        let fields = Fields::of(body, "")?;
        let list = fields.array("tokens")?.ok_or_else(|| fields.missing("tokens"))?;
        let ids = token_ids(list);
        let ids = ids.ok_or_else(|| fields.wrong("tokens", "an array of token ids"))?;
        let text = service.engine().tokenizer().decode_lossy(&ids, false);
        Ok(json!({ "content": text.map_err(|e| ApiError::of_request(&e))? }))
    });
    Ok(response(&value.await?))
}

/// `POST /apply-template`
pub async fn apply_template(call: &mut Call) -> ApiResult<Response<Body>> {
    let value = call.with_body(|body, service| {
        let fields = Fields::of(body, "")?;
        let chat = chat::chat(&fields, service)?;
        Ok(json!({ "prompt": service.templates.render(&chat)? }))
    });
    Ok(response(&value.await?))
}
