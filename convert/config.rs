//! config.json as transformers 5.24 reads it: fields that have several names get one value, what is
//! said twice is said once, and what a class assumes is written out. Descriptors read the result.

use serde_json::{Map, Value};

use super::hparams::MAX_LAYERS;
use super::json::{Json, shown};
use crate::Result;
use crate::model::descriptor::{Descriptor, RopeLayers};

/// Names of kinds of layers that newer versions of transformers changed.
const RENAMED_LAYERS: [(&str, &str); 4] = [
    ("attention", "full_attention"),
    ("mamba", "linear_attention"),
    ("deepseek_sparse_attention", "indexed_attention"),
    ("qwen_sparse_attention", "indexed_attention"),
];

const SCALING: &str = "rope_scaling";
const PARAMETERS: &str = "rope_parameters";
const THETA: &str = "rope_theta";
const PARTIAL: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";
const CONTEXT: &str = "max_position_embeddings";
const LAYERS: &str = "per_layer_config";
const LAYER_TYPES: &str = "layer_types";

/// The base of a class that has none of its own.
const USUAL_THETA: f64 = 10_000.0;

/// The config of a model of `class` in one spelling.
pub fn standard(mut config: Json, descriptor: &Descriptor, class: &str) -> Result<Json> {
    let mut text = config.take_text();
    let done = standard_text(&config, &mut text, descriptor, class);
    config.put_text(text);
    done.map(|()| config)
}

fn standard_text(
    file: &Json,
    text: &mut Map<String, Value>,
    descriptor: &Descriptor,
    class: &str,
) -> Result<()> {
    for names in descriptor.convert.synonyms.values() {
        unify(file, text, names)?;
    }
    assume(text, descriptor);
    for name in [LAYER_TYPES, "layers_block_type"] {
        rename_layers(text.get_mut(name));
    }
    list_window(file, text, descriptor)?;
    spread_layers(file, text, descriptor)?;
    join_theta(file, text, descriptor)?;
    let theta = descriptor.convert.theta.get(class).copied().unwrap_or(USUAL_THETA);
    // Where the context has a name of the class's own, its rotary embedding reads none.
    let mut names = descriptor.convert.synonyms.values().flatten();
    let context = names.all(|name| name != CONTEXT).then(|| value(text, CONTEXT).cloned());
    join_rope(file, text, theta, context.flatten())
}

/// A field that is there; "a.b" descends.
fn value<'a>(text: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    let mut parts = name.split('.');
    let first = text.get(parts.next()?)?;
    parts.try_fold(first, |v, part| v.get(part)).filter(|v| !v.is_null())
}

/// Gives all names of a field the one value that there is.
fn unify(file: &Json, text: &mut Map<String, Value>, names: &[String]) -> Result<()> {
    let mut given = names.iter().filter_map(|name| Some((name, value(text, name)?)));
    let Some((first, found)) = given.next() else { return Ok(()) };
    if let Some((other, differs)) = given.find(|(_, other)| *other != found) {
        let expected = format!("{}, as {first}", shown(found));
        return Err(file.fail(other, expected, shown(differs)));
    }
    let found = found.clone();
    for name in names.iter().filter(|name| !name.contains('.')) {
        text.insert(name.clone(), found.clone());
    }
    Ok(())
}

/// Writes out what the classes of a descriptor assume of fields that a config lacks.
fn assume(text: &mut Map<String, Value>, descriptor: &Descriptor) {
    for (name, default) in &descriptor.convert.defaults {
        if !text.contains_key(name) {
            let default = serde_json::to_value(default).expect("TOML values are JSON values");
            text.insert(name.clone(), default);
        }
    }
}

fn rename_layers(list: Option<&mut Value>) {
    for kind in list.and_then(Value::as_array_mut).into_iter().flatten() {
        let new = RENAMED_LAYERS.iter().find(|(old, _)| kind.as_str() == Some(old));
        if let Some((_, new)) = new {
            *kind = Value::from(*new);
        }
    }
}

/// Lists the layers of a config that has a period or flags of those with a window.
fn list_window(file: &Json, text: &mut Map<String, Value>, descriptor: &Descriptor) -> Result<()> {
    let Some(window) = &descriptor.convert.window else { return Ok(()) };
    // Files of some architectures do not say which layers rotate: three of four do.
    let by_number = descriptor.parts.rope_layers == RopeLayers::ThreeOfFour;
    let n = value(text, "num_hidden_layers").and_then(Value::as_u64).unwrap_or(0).min(MAX_LAYERS);
    let words = |slides: bool| if slides { "sliding_attention" } else { "full_attention" };
    let list = |slides: &dyn Fn(u64) -> bool| {
        (0..n).map(|layer| Value::from(words(slides(layer)))).collect::<Vec<_>>()
    };
    let flags = window.flags.as_ref().and_then(|field| Some((field, value(text, field)?)));
    let flags = flags.filter(|(_, list)| list.as_array().is_some_and(|list| !list.is_empty()));
    let found = match (flags, value(text, &window.period)) {
        (Some((field, flags)), _) => {
            let flags = flags_of(file, field, flags, n)?;
            let usual = |layer: u64| !(layer + 1).is_multiple_of(4);
            if by_number {
                check_flags(file, field, &flags, usual)?;
            }
            if let Some(field) = &window.rotating
                && let Some(rotating) = value(text, field)
            {
                let slides = flags.contains(&true);
                let rotates = |layer: u64| !slides || flags[layer as usize];
                check_flags(file, field, &flags_of(file, field, rotating, n)?, rotates)?;
            }
            list(&|layer| flags[layer as usize])
        }
        (None, Some(Value::String(letters))) if !letters.is_empty() => {
            let letters: Vec<char> = letters.chars().collect();
            let found = list(&|layer| letters[layer as usize % letters.len()] == 'L');
            if value(text, LAYER_TYPES).is_none() && found.last() == Some(&words(true).into()) {
                let expected = "letters whose last for the model's last layer is G";
                let got = letters.iter().collect::<String>();
                return Err(file.fail(&window.period, expected, got));
            }
            found
        }
        (None, Some(Value::Number(period))) => {
            let period = period.as_u64().unwrap_or(0);
            if by_number && period != 4 {
                return Err(file.fail(&window.period, "4, which files imply", period.to_string()));
            }
            list(&|layer| period == 0 || (layer + 1) % period != 0)
        }
        _ => return Ok(()),
    };
    if value(text, LAYER_TYPES).is_none() {
        text.insert(LAYER_TYPES.into(), found.into());
    }
    Ok(())
}

/// Files have one base of RoPE: a list of bases by layer becomes the base and flags of the layers
/// that rotate.
fn join_theta(file: &Json, text: &mut Map<String, Value>, descriptor: &Descriptor) -> Result<()> {
    let Some(field) = &descriptor.convert.theta_by_layer else { return Ok(()) };
    let Some(Value::Array(bases)) = value(text, field) else { return Ok(()) };
    let bases = bases.iter().map(|base| base.as_f64().unwrap_or(f64::NAN)).collect::<Vec<_>>();
    let joined = bases.iter().copied().find(|base| *base != 0.0);
    if let Some(joined) = joined {
        let other = bases.iter().position(|base| *base != 0.0 && *base != joined);
        let other = other.or_else(|| joined.is_nan().then_some(0));
        if let Some(layer) = other {
            let expected = format!("0 or {joined}, the base of the other layers");
            return Err(file.fail(&format!("{field}.{layer}"), expected, bases[layer].to_string()));
        }
        for name in [SCALING, PARAMETERS] {
            if let Some(Value::Object(group)) = text.get_mut(name) {
                group.remove(THETA);
            }
        }
        text.insert(THETA.into(), joined.into());
    }
    let rotates = bases.iter().map(|base| Value::from(*base != 0.0)).collect::<Vec<_>>();
    text.insert(field.clone(), rotates.into());
    Ok(())
}

/// A list of 0 and 1, one for each of `n` layers.
fn flags_of(file: &Json, field: &str, list: &Value, n: u64) -> Result<Vec<bool>> {
    let flag = |layer: u64| match list.get(layer as usize).map(Value::as_u64) {
        Some(Some(flag @ 0..=1)) => Ok(flag == 1),
        _ => {
            let got = list.get(layer as usize).map_or("nothing".into(), shown);
            Err(file.fail(&format!("{field}.{layer}"), "0 or 1", got))
        }
    };
    (0..n).map(flag).collect()
}

/// Refuses flags of layers that files cannot say.
fn check_flags(
    file: &Json,
    field: &str,
    flags: &[bool],
    implied: impl Fn(u64) -> bool,
) -> Result<()> {
    let other = (0..).zip(flags).find(|(layer, flag)| **flag != implied(*layer));
    let Some((layer, flag)) = other else { return Ok(()) };
    let expected = format!("{}, which files imply", u8::from(!flag));
    Err(file.fail(&format!("{field}.{layer}"), expected, u8::from(*flag).to_string()))
}

/// Sizes that `per_layer_config` gives to single layers become fields of the kinds of layers: all
/// layers of a kind must have the size.
fn spread_layers(
    file: &Json,
    text: &mut Map<String, Value>,
    descriptor: &Descriptor,
) -> Result<()> {
    let Some(Value::Object(layers)) = value(text, LAYERS).cloned() else { return Ok(()) };
    let kinds: Vec<Value> = match value(text, LAYER_TYPES) {
        Some(Value::Array(kinds)) => kinds.clone(),
        _ => Vec::new(),
    };
    for layer in layers.keys() {
        if layer.parse::<usize>().ok().is_none_or(|layer| layer >= kinds.len()) {
            let expected = format!("layers 0 to {}", kinds.len().saturating_sub(1));
            return Err(file.fail(LAYERS, expected, layer.as_str()));
        }
    }
    let fields = layers.values().filter_map(Value::as_object).flat_map(Map::keys);
    let fields: std::collections::BTreeSet<&String> = fields.collect();
    for field in fields {
        let of_kinds = descriptor.convert.by_kind.get(field);
        for (at, kind) in kinds.iter().enumerate() {
            let own = layers.get(&at.to_string()).and_then(|layer| layer.get(field));
            let size = own.or_else(|| value(text, field)).cloned().unwrap_or(Value::Null);
            let name = of_kinds.and_then(|names| names.get(kind.as_str()?)).unwrap_or(field);
            // What the first layer of a kind has, the others have.
            let first = kinds.iter().position(|other| other == kind) == Some(at);
            if first && name != field {
                text.insert(name.clone(), size.clone());
            }
            let expected = value(text, name).cloned().unwrap_or(Value::Null);
            if size != expected {
                let name = format!("{LAYERS}.{at}.{field}");
                let expected = format!("{}, as other layers", shown(&expected));
                return Err(file.fail(&name, expected, shown(&size)));
            }
        }
    }
    text.remove(LAYERS);
    Ok(())
}

/// Makes one group of RoPE parameters with all that counts in it: `rope_scaling` goes before
/// `rope_parameters`, and what stands in either before what stands beside it. A stretched context
/// whose original is not given is `context`.
fn join_rope(
    file: &Json,
    text: &mut Map<String, Value>,
    usual: f64,
    context: Option<Value>,
) -> Result<()> {
    let is_said = |v: &Value| !matches!(v, Value::Object(group) if group.is_empty());
    let scaling = value(text, SCALING).filter(|v| is_said(v));
    let name = if scaling.is_some() { SCALING } else { PARAMETERS };
    let mut group = match value(text, name) {
        None => Map::new(),
        Some(Value::Object(group)) => group.clone(),
        Some(other) => return Err(file.fail(name, "an object", shown(other))),
    };
    // A list has a base a layer.
    let theta = value(text, THETA).cloned().unwrap_or_else(|| usual.into());
    let partial = value(text, PARTIAL).cloned();
    let original = value(text, ORIGINAL).cloned();
    let has_parts = group.values().any(Value::is_object);
    let complete = |group: &mut Map<String, Value>, original: Option<Value>| {
        if value(group, "rope_type").is_none() {
            let kind = value(group, "type").cloned();
            group.insert("rope_type".into(), kind.unwrap_or_else(|| "default".into()));
        }
        if value(group, THETA).is_none() && !theta.is_array() {
            group.insert(THETA.into(), theta.clone());
        }
        if let (None, Some(partial)) = (value(group, PARTIAL), &partial) {
            group.insert(PARTIAL.into(), partial.clone());
        }
        let kind = group["rope_type"].as_str().unwrap_or_default();
        if matches!(kind, "llama3" | "yarn" | "longrope" | "su") {
            let given = value(group, ORIGINAL).cloned();
            if let Some(n) = original.or(given).or_else(|| context.clone()) {
                group.insert(ORIGINAL.into(), n);
            }
        }
    };
    text.remove(SCALING);
    text.remove(PARAMETERS);
    if has_parts {
        group.values_mut().filter_map(Value::as_object_mut).for_each(|part| complete(part, None));
        text.insert(PARAMETERS.into(), group.into());
        return Ok(());
    }
    complete(&mut group, original);
    for field in [THETA, PARTIAL] {
        if let Some(found) = value(&group, field) {
            text.insert(field.into(), found.clone());
        }
    }
    text.insert(name.into(), group.into());
    Ok(())
}
