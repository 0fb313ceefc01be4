//! JSON, one value after another: a token each, or a request each.

use super::arrays;
use super::npy::{self, Array, Values};
use super::{Choice, Fault, Request, Source, Token};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Deserializer, Value};
use std::collections::HashMap;

pub fn read(text: &str, kind: &str) -> Result<Source, Fault> {
    let mut source = Source { unit: "line", ..Source::default() };
    let mut names = Names::default();
    let mut values = Deserializer::from_str(text).into_iter::<Value>();
    loop {
        let start = values.byte_offset();
        let line = line_at(text, start);
        let value = match values.next() {
            None => break,
            Some(Ok(value)) => value,
            Some(Err(e)) => {
                return Err(Fault::new(format!("line {}", e.line()), "a JSON value", e));
            }
        };
        let before = source.requests.len();
        match &value {
            Value::Array(all) => {
                all.iter().try_for_each(|one| add(&mut source, &mut names, one, kind, line))?;
            }
            one => add(&mut source, &mut names, one, kind, line)?,
        }
        for request in &mut source.requests[before..] {
            request.tokens.iter_mut().for_each(|token| token.place = line);
        }
    }
    Ok(source)
}

/// The line of the first value behind a position.
fn line_at(text: &str, start: usize) -> usize {
    let rest = &text[start..];
    let at = start + rest.len() - rest.trim_start().len();
    1 + text[..at].matches('\n').count()
}

/// Numbers for tokens that have a text and no number.
#[derive(Default)]
struct Names {
    known: HashMap<String, u32>,
    request: Option<String>,
}

fn add(
    source: &mut Source,
    names: &mut Names,
    value: &Value,
    kind: &str,
    line: usize,
) -> Result<(), Fault> {
    let place = format!("line {line}");
    if value.get("layers").is_some() {
        let mut token = token(value, names, &place)?;
        token.place = line;
        // Another request begins where the value that names it changes.
        let request = value.get("request").map(Value::to_string);
        if source.requests.is_empty() || request != names.request {
            source.requests.push(Request { kind: kind.into(), tokens: Vec::new() });
            names.request = request;
        }
        source.requests.last_mut().expect("there is one").tokens.push(token);
        return Ok(());
    }
    let choices = value.get("choices").and_then(Value::as_array);
    let mut found = false;
    for one in choices.into_iter().flatten().chain([value]) {
        if let Some(experts) = one.get("routed_experts").filter(|experts| !experts.is_null()) {
            let tokens = routed(experts, &place)?;
            let tokens = with_ids(tokens, value, one);
            source.requests.push(Request { kind: kind.into(), tokens });
            found = true;
        }
    }
    let names = || match value {
        Value::Object(fields) => fields.keys().cloned().collect::<Vec<_>>().join(", "),
        _ => "something else".into(),
    };
    match found {
        true => Ok(()),
        false => Err(Fault::new(place, "an object with layers or routed_experts", names())),
    }
}

fn token(value: &Value, names: &mut Names, place: &str) -> Result<Token, Fault> {
    let wrong = || Fault::new(place, "layers: a list of expert numbers for each layer", "others");
    let layers = value["layers"].as_array().ok_or_else(wrong)?;
    let choice = |ids: &Value| {
        let ids = ids.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok());
        Some(Choice { experts: ids.collect::<Option<_>>()?, weights: Vec::new() })
    };
    let layers = layers.iter().map(choice).collect::<Option<_>>().ok_or_else(wrong)?;
    let named = ["tok", "token", "id"].iter().find_map(|key| value.get(key));
    let id = match named {
        Some(Value::String(text)) => {
            let next = names.known.len() as u32;
            Some(*names.known.entry(text.clone()).or_insert(next))
        }
        Some(number) => number.as_u64().and_then(|id| u32::try_from(id).ok()),
        None => None,
    };
    let is_prompt = value.get("prompt").and_then(Value::as_bool).unwrap_or(false);
    Ok(Token { is_prompt, id, layers, ..Token::default() })
}

/// The tokens of a request's `routed_experts`.
fn routed(experts: &Value, place: &str) -> Result<Vec<Token>, Fault> {
    let name = format!("{place}, routed_experts");
    let bytes = |text: &str| {
        let wrong = |e| Fault::new(&name, "base64", e);
        STANDARD.decode(text.trim()).map_err(wrong)
    };
    let array = match experts {
        Value::String(text) => npy::read(&bytes(text)?, &name)?,
        Value::Object(fields) => {
            let text = |key: &str| fields.get(key).and_then(Value::as_str);
            let wrong = || Fault::new(&name, "data, shape and dtype", "others");
            let numbers = |list: &Value| {
                let numbers = list.as_array()?.iter().map(|n| usize::try_from(n.as_u64()?).ok());
                numbers.collect::<Option<Vec<_>>>()
            };
            let shape = fields.get("shape").and_then(numbers).ok_or_else(wrong)?;
            let data = bytes(text("data").ok_or_else(wrong)?)?;
            npy::of_bytes(text("dtype").ok_or_else(wrong)?, shape, &data, &name)?
        }
        lists => nested(lists).ok_or_else(|| {
            Fault::new(&name, "lists of expert numbers [tokens][layers][k]", "others")
        })?,
    };
    arrays::tokens(&array, &name)
}

/// Lists of lists of lists, all of one length at each depth.
fn nested(lists: &Value) -> Option<Array> {
    let tokens = lists.as_array()?;
    let layers = tokens.first()?.as_array()?;
    let shape = vec![tokens.len(), layers.len(), layers.first()?.as_array()?.len()];
    let mut values = Vec::new();
    for token in tokens {
        let token = token.as_array().filter(|layers| layers.len() == shape[1])?;
        for layer in token {
            let layer = layer.as_array().filter(|ids| ids.len() == shape[2])?;
            for id in layer {
                values.push(id.as_i64()?);
            }
        }
    }
    Some(Array { shape, values: Values::Whole(values) })
}

/// The ids of a response's tokens, and how many of them are the prompt's.
fn with_ids(mut tokens: Vec<Token>, response: &Value, choice: &Value) -> Vec<Token> {
    let ids = |key: &str| {
        let list = choice.get(key).or(response.get(key))?.as_array()?;
        list.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect::<Option<Vec<u32>>>()
    };
    let prompt = ids("prompt_token_ids");
    let counted = response.get("usage").and_then(|usage| usage.get("prompt_tokens")?.as_u64());
    let n_prompt = prompt.as_ref().map(Vec::len).or(counted.map(|n| n as usize)).unwrap_or(0);
    tokens.iter_mut().take(n_prompt).for_each(|token| token.is_prompt = true);
    if let (Some(prompt), Some(answer)) = (prompt, ids("token_ids")) {
        let ids = prompt.into_iter().chain(answer);
        tokens.iter_mut().zip(ids).for_each(|(token, id)| token.id = Some(id));
    }
    tokens
}
