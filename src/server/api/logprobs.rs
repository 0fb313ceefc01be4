//! Log probabilities of tokens, as each format writes them.

use serde_json::{Map, Value, json};

use crate::sample::{MAX_TOP_LOGPROBS, TokenLogprob};
use crate::server::errors::{ApiError, ApiResult};
use crate::server::events::Token;
use crate::server::fields::Fields;
use crate::server::service::Service;

/// The number that stands for −∞, which JSON does not have.
const NEVER: f32 = -9999.0;

/// The alternatives that a chat asks for.
pub fn n_logprobs(fields: &Fields<'_>) -> ApiResult<Option<usize>> {
    let is_on = fields.flag("logprobs")?;
    let n_top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS as i64)?;
    let n_probs = n_probs(fields)?;
    if n_top.is_some() && !is_on && n_probs.is_none() {
        let message = "top_logprobs: logprobs must be true to have them";
        return Err(ApiError::invalid("top_logprobs", message));
    }
    Ok(is_on.then_some(n_top.unwrap_or(0) as usize).or(n_probs))
}

/// The alternatives that llama-server's own field asks for; 0 is none at all.
pub fn n_probs(fields: &Fields<'_>) -> ApiResult<Option<usize>> {
    let n = fields.integer("n_probs", 0..=MAX_TOP_LOGPROBS as i64)?;
    Ok(n.filter(|n| *n > 0).map(|n| n as usize))
}

/// Whether probabilities are those that the samplers have left.
pub fn after_sampling(fields: &Fields<'_>) -> ApiResult<bool> {
    fields.flag("post_sampling_probs")
}

/// The shortest digits that give the same f32: bits can be compared.
pub fn number(logprob: f32) -> Value {
    let finite = if logprob.is_finite() { logprob } else { NEVER };
    finite.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn bytes(id: u32, service: &Service) -> &[u8] {
    service.engine().tokenizer().piece(id).unwrap_or_default()
}

fn text(id: u32, service: &Service) -> String {
    String::from_utf8_lossy(bytes(id, service)).into_owned()
}

fn all(tokens: &[Token]) -> impl Iterator<Item = &TokenLogprob> {
    tokens.iter().filter_map(|token| token.logprob.as_ref())
}

/// A chat's `logprobs`; `null` if there are none.
pub fn list(tokens: &[Token], service: &Service) -> Value {
    let content = entries(tokens, service);
    match content.is_empty() {
        true => Value::Null,
        false => json!({ "content": content, "refusal": null }),
    }
}

/// The entries without anything around them.
pub fn entries(tokens: &[Token], service: &Service) -> Vec<Value> {
    all(tokens).map(|token| entry(token, service, false)).collect()
}

/// llama-server's `completion_probabilities`.
pub fn native(tokens: &[Token], service: &Service) -> Value {
    all(tokens).map(|token| entry(token, service, true)).collect()
}

fn entry(token: &TokenLogprob, service: &Service, has_ids: bool) -> Value {
    let one = |id, logprob: f32| {
        let mut map = Map::new();
        map.insert("token".into(), text(id, service).into());
        match token.after_sampling {
            true => map.insert("prob".into(), number(logprob.exp())),
            false => map.insert("logprob".into(), number(logprob)),
        };
        map.insert("bytes".into(), bytes(id, service).into());
        if has_ids {
            map.insert("id".into(), id.into());
        }
        map
    };
    let top = token.top.iter().map(|top| Value::Object(one(top.id, top.logprob)));
    let top: Vec<Value> = top.collect();
    let mut map = one(token.id, token.logprob);
    let name = if token.after_sampling { "top_probs" } else { "top_logprobs" };
    map.insert(name.into(), top.into());
    Value::Object(map)
}

/// The `logprobs` of a completion whose text begins `offset` bytes into the answer.
pub fn legacy(tokens: &[Token], mut offset: usize, service: &Service) -> Value {
    let (mut texts, mut numbers, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for token in all(tokens) {
        let top = token.top.iter().map(|top| (text(top.id, service), number(top.logprob)));
        tops.push(Value::Object(top.collect()));
        numbers.push(number(token.logprob));
        offsets.push(offset);
        let text = text(token.id, service);
        offset += text.len();
        texts.push(text);
    }
    match texts.is_empty() {
        true => Value::Null,
        false => json!({
            "tokens": texts,
            "token_logprobs": numbers,
            "top_logprobs": tops,
            "text_offset": offsets,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_few_digits() {
        assert_eq!(number(-0.1).to_string(), "-0.1");
        assert_eq!(number(f32::NEG_INFINITY).to_string(), "-9999.0");
        for x in [-1.234_567_9e-5f32, -7.0, -0.333_333_34] {
            assert_eq!(number(x).as_f64().unwrap() as f32, x);
        }
    }

    #[test]
    fn alternatives_need_logprobs() {
        let read = |body: Value| n_logprobs(&Fields::of(&body, "").unwrap());
        assert_eq!(read(json!({})).unwrap(), None);
        assert_eq!(read(json!({"logprobs": true, "top_logprobs": 3})).unwrap(), Some(3));
        assert_eq!(read(json!({"logprobs": true})).unwrap(), Some(0));
        assert_eq!(read(json!({"n_probs": 2})).unwrap(), Some(2));
        assert_eq!(read(json!({"n_probs": 0})).unwrap(), None);
        assert!(read(json!({"n_probs": "x"})).is_err());
        assert!(read(json!({"top_logprobs": 3})).is_err());
        assert!(read(json!({"logprobs": true, "top_logprobs": 21})).is_err());
    }
}
