//! Arrays of experts: \[tokens, layers, k\].

use super::npy::{self, Array, Values};
use super::{Choice, Fault, Request, Source, Token, zip};
use serde_json::Value;
use std::collections::HashMap;

const UNIT: &str = "token";

/// Names of the array of experts.
const EXPERTS: [&str; 2] = ["ids", "routed_experts"];

pub fn npy(bytes: &[u8], kind: &str) -> Result<Source, Fault> {
    let array = npy::read(bytes, "the array")?;
    let tokens = tokens(&array, "the array")?;
    let requests = vec![Request { kind: kind.into(), tokens }];
    Ok(Source { unit: UNIT, requests, ..Source::default() })
}

/// The tokens of an array of experts, all of them decoded.
pub fn tokens(array: &Array, name: &str) -> Result<Vec<Token>, Fault> {
    let wrong = |got: String| Fault::new(name, "expert numbers [tokens, layers, k]", got);
    let (&[_, n_layers, k], Values::Whole(values)) = (&array.shape[..], &array.values) else {
        let type_ = match array.values {
            Values::Whole(_) => "whole numbers",
            Values::Real(_) => "fractions",
            Values::Text(_) => "text",
        };
        return Err(wrong(format!("{type_} of shape {:?}", array.shape)));
    };
    if n_layers * k == 0 {
        return Err(wrong(format!("shape {:?}", array.shape)));
    }
    let dense = dense_layers(values, n_layers, k);
    let mut tokens = Vec::new();
    for (place, row) in values.chunks_exact(n_layers * k).enumerate() {
        let mut layers = Vec::with_capacity(n_layers);
        for (ids, is_dense) in row.chunks_exact(k).zip(&dense) {
            let ids = if *is_dense { &[] } else { ids };
            let experts: Option<_> = ids.iter().map(|id| u32::try_from(*id).ok()).collect();
            let Some(experts) = experts else {
                let place = format!("{name}, token {place}");
                return Err(Fault::new(place, "expert numbers from 0", format!("{ids:?}")));
            };
            layers.push(Choice { experts, weights: Vec::new() });
        }
        tokens.push(Token { place, layers, ..Token::default() });
    }
    Ok(tokens)
}

/// Recorders leave a layer without a router at one value.
fn dense_layers(values: &[i64], n_layers: usize, k: usize) -> Vec<bool> {
    let is_dense = |layer: usize| {
        let mut rows = values.chunks_exact(k).skip(layer).step_by(n_layers);
        k > 1 && rows.all(|ids| ids.iter().all(|id| *id == ids[0]))
    };
    (0..n_layers).map(is_dense).collect()
}

pub fn npz(bytes: &[u8], kind: &str) -> Result<Source, Fault> {
    let mut arrays = HashMap::new();
    for (file, contents) in zip::entries(bytes)? {
        let name = file.strip_suffix(".npy").unwrap_or(&file).to_owned();
        let array = npy::read(&contents, &name)?;
        arrays.insert(name, array);
    }
    let found = EXPERTS.iter().find_map(|name| Some((*name, arrays.get(*name)?)));
    let Some((name, ids)) = found else {
        let mut names: Vec<&str> = arrays.keys().map(String::as_str).collect();
        names.sort_unstable();
        return Err(Fault::new("the archive", "an array ids or routed_experts", names.join(", ")));
    };
    let mut tokens = tokens(ids, name)?;
    if let Some(weights) = arrays.get("weights") {
        add_weights(&mut tokens, weights, ids)?;
    }
    if let Some(known) = column(&arrays, "tokens", tokens.len())? {
        tokens.iter_mut().zip(known).for_each(|(token, id)| token.id = u32::try_from(*id).ok());
    }
    if let Some(prompt) = column(&arrays, "prompt", tokens.len())? {
        tokens.iter_mut().zip(prompt).for_each(|(token, is)| token.is_prompt = *is != 0);
    }
    let requests = requests(tokens, &arrays, kind)?;
    let n_experts = match arrays.get("experts").map(|array| &array.values) {
        Some(Values::Whole(values)) => values.first().and_then(|n| usize::try_from(*n).ok()),
        _ => None,
    };
    let model = json(&arrays, "meta").and_then(|meta| Some(meta.get("model")?.as_str()?.into()));
    Ok(Source { unit: UNIT, model, n_experts, requests, ..Source::default() })
}

fn add_weights(tokens: &mut [Token], weights: &Array, ids: &Array) -> Result<(), Fault> {
    let (true, Values::Real(values)) = (weights.shape == ids.shape, &weights.values) else {
        let got = format!("shape {:?}", weights.shape);
        return Err(Fault::new("weights", format!("fractions of shape {:?}", ids.shape), got));
    };
    let k = ids.shape[2];
    let mut rows = values.chunks_exact(k);
    for choice in tokens.iter_mut().flat_map(|token| &mut token.layers) {
        let row = rows.next().expect("as many rows as choices");
        if !choice.experts.is_empty() {
            choice.weights.extend(row);
        }
    }
    Ok(())
}

/// An array of whole numbers, one for each of `n` tokens.
fn column<'a>(
    arrays: &'a HashMap<String, Array>,
    name: &str,
    n: usize,
) -> Result<Option<&'a [i64]>, Fault> {
    match arrays.get(name) {
        None => Ok(None),
        Some(Array { values: Values::Whole(values), .. }) if values.len() == n => Ok(Some(values)),
        Some(array) => {
            let got = format!("shape {:?}", array.shape);
            Err(Fault::new(name, format!("a whole number for each of {n} tokens"), got))
        }
    }
}

/// Tokens by request: `starts` has the first of each, `kinds` their kinds of text.
fn requests(
    mut tokens: Vec<Token>,
    arrays: &HashMap<String, Array>,
    kind: &str,
) -> Result<Vec<Request>, Fault> {
    let mut starts = vec![0];
    if let Some(array) = arrays.get("starts") {
        let wrong = || Fault::new("starts", "the first token of each request, ascending", "others");
        let Values::Whole(values) = &array.values else { return Err(wrong()) };
        starts = values.iter().filter_map(|start| usize::try_from(*start).ok()).collect();
        let is_sound = starts.len() == values.len()
            && starts.first() == Some(&0)
            && starts.is_sorted_by(|a, b| a < b)
            && starts.last().is_some_and(|last| *last < tokens.len());
        if !is_sound {
            return Err(wrong());
        }
    }
    let kinds = json(arrays, "kinds");
    let kind_of = |i: usize| kinds.as_ref().and_then(|kinds| kinds.get(i)?.as_str());
    let mut requests = Vec::new();
    for (i, start) in starts.iter().enumerate().rev() {
        let kind = kind_of(i).unwrap_or(kind).to_owned();
        requests.push(Request { kind, tokens: tokens.split_off(*start) });
    }
    requests.reverse();
    Ok(requests)
}

/// JSON that an array of one text holds.
fn json(arrays: &HashMap<String, Array>, name: &str) -> Option<Value> {
    match &arrays.get(name)?.values {
        Values::Text(texts) => serde_json::from_str(texts.first()?).ok(),
        _ => None,
    }
}
