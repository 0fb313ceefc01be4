//! config.json → the model's GGUF keys, and the sizes that its tensors must have.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::Value;

use super::expr::{self, Names};
use super::json::{Json, shown};
use crate::backend::ops::Activation;
use crate::gguf::OwnedValue;
use crate::model::descriptor::{
    Descriptor, LayerSize, Layers, MetadataRow, MetadataType, Named, RopeLayers, Window,
};
use crate::{Error, Result};

/// The model's keys, by name.
pub fn keys(config: &Json, descriptor: &Descriptor) -> Result<Vec<(String, OwnedValue)>> {
    check_known(config, descriptor)?;
    let class = hf_class(config)?;
    let mut keys = Vec::new();
    for (key, row) in descriptor.convert.metadata() {
        if !(row.classes.is_empty() || row.classes.contains(&class)) {
            continue;
        }
        if let Some(value) = sizes_row(config, descriptor, row)? {
            keys.push((descriptor.key(key), value));
        } else if let Some(value) = read_row(config, row)? {
            let value = match &row.layers {
                Some(layers) => by_layer(config, descriptor, layers, value)?,
                None => value,
            };
            // These keys have no architecture before them.
            let is_own = key.starts_with("tokenizer.") || key.starts_with("diffusion.");
            let key = if is_own { key.to_owned() } else { descriptor.key(key) };
            keys.push((key, value));
        }
    }
    if let Some(listed) = window_pattern(config, descriptor)? {
        let key = descriptor.key("attention.sliding_window_pattern");
        keys.retain(|(other, _)| *other != key);
        if descriptor.parts.window_is_optional && !listed.contains(&true) {
            let window = descriptor.key("attention.sliding_window");
            keys.retain(|(other, _)| *other != window);
        } else {
            keys.push((key, OwnedValue::from(listed)));
        }
    }
    Ok(keys)
}

/// The sizes of layers that a row names; a number where they are the same.
fn sizes_row(
    config: &Json,
    descriptor: &Descriptor,
    row: &MetadataRow,
) -> Result<Option<OwnedValue>> {
    let Some(name) = &row.layer_size else { return Ok(None) };
    let Some(sizes) = layer_sizes(config, name, &descriptor.convert.layer_sizes[name])? else {
        return Ok(None);
    };
    let sizes: Vec<u32> = sizes.into_iter().map(|n| n as u32).collect();
    Ok(match sizes.first() {
        Some(first) if sizes.iter().all(|size| size == first) => Some((*first).into()),
        _ => Some(sizes.into()),
    })
}

fn read_row(config: &Json, row: &MetadataRow) -> Result<Option<OwnedValue>> {
    for text in &row.from {
        // A field alone may be of any type; with arithmetic about it, it is a number.
        let found = match expr::lone_name(text) {
            Some(field) => config.at(field).map(|v| read_value(config, row, field, v)),
            None => expr::evaluate(text, config)?.map(|x| of_number(config, row, text, x)),
        };
        if let Some(value) = found {
            check_same(config, row, text)?;
            return value.map(Some);
        }
    }
    match row.optional {
        _ if !row.otherwise.is_empty() => Ok(Some(row.otherwise.clone().into())),
        true => Ok(None),
        false => Err(config.fail(&row.from.join(" or "), "a value", "nothing")),
    }
}

/// Fails if a field that stands for the value of `text`, too, has another.
fn check_same(config: &Json, row: &MetadataRow, text: &str) -> Result<()> {
    for other in &row.same {
        let (value, other_value) = (expr::evaluate(text, config)?, expr::evaluate(other, config)?);
        if let (Some(expected), Some(got)) = (value, other_value)
            && expected != got
        {
            return Err(config.fail(other, format!("{expected}, as {text}"), got.to_string()));
        }
    }
    Ok(())
}

/// A number in some layers, 0 in the others.
fn by_layer(
    config: &Json,
    descriptor: &Descriptor,
    layers: &Layers,
    value: OwnedValue,
) -> Result<OwnedValue> {
    let counted = first_count(config, &descriptor.convert.sizes["layers"])?;
    let n = counted.map_or(0, |(_, n)| n);
    if n > MAX_LAYERS {
        return Err(config.fail(
            "num_hidden_layers",
            format!("at most {MAX_LAYERS}"),
            n.to_string(),
        ));
    }
    let OwnedValue::U32(number) = value else { return Ok(value) };
    let mut all = vec![0; n as usize];
    match layers {
        Layers::Every([period, first]) => {
            let count = |text: &String| match first_count(config, std::slice::from_ref(text))? {
                Some((_, n)) => Ok(n as usize),
                None => Err(config.fail(text, "an integer", "nothing")),
            };
            let (period, first) = (count(period)?, count(first)?);
            all.iter_mut().skip(first).step_by(period.max(1)).for_each(|of| *of = number);
        }
        Layers::Listed(field) => {
            for listed in config.elements(field)? {
                let at = listed.as_u64().and_then(|at| all.get_mut(at.checked_sub(1)? as usize));
                let expected = || config.fail(field, format!("layers 1 to {n}"), shown(listed));
                *at.ok_or_else(expected)? = number;
            }
        }
    }
    Ok(all.into())
}

fn of_number(config: &Json, row: &MetadataRow, text: &str, x: f64) -> Result<OwnedValue> {
    check_zero(config, row, text, x)?;
    match row.ty {
        MetadataType::F32 => Ok(OwnedValue::F32(x as f32)),
        MetadataType::Bool => Ok(OwnedValue::Bool(x != 0.0)),
        _ => Ok(OwnedValue::U32(whole(config, text, x)? as u32)),
    }
}

/// Readers of GGUF files take a 0 for a factor that a file lacks.
fn check_zero(config: &Json, row: &MetadataRow, text: &str, x: f64) -> Result<()> {
    let is_field = text.starts_with(|c: char| c.is_ascii_alphabetic());
    if x == 0.0 && row.ty == MetadataType::F32 && is_field && !row.zero {
        return Err(config.fail(text, "a number other than 0", "0"));
    }
    Ok(())
}

/// A result that counts something.
fn whole(config: &Json, text: &str, x: f64) -> Result<u64> {
    let is_count = x.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&x);
    let fail = || config.fail(text, "an integer from 0 to 2^32 - 1", x.to_string());
    is_count.then_some(x as u64).ok_or_else(fail)
}

fn read_value(config: &Json, row: &MetadataRow, field: &str, value: &Value) -> Result<OwnedValue> {
    let mut numbers = BTreeMap::new();
    for (text, named) in &row.values {
        let number = match named {
            Named::Number(number) => Some(f64::from(*number)),
            Named::Expression(texts) => alternatives(config, texts)?.map(|(_, x)| x),
        };
        if let Some(number) = number {
            numbers.insert(text.as_str(), whole(config, text, number)? as u32);
        }
    }
    let named = |text: &str| numbers.get(text).copied();
    let u32_of = |v: &Value| match v {
        Value::String(text) => named(text),
        Value::Number(_) | Value::Bool(_) if !numbers.is_empty() => named(&v.to_string()),
        _ => v.as_u64().and_then(|n| u32::try_from(n).ok()),
    };
    let f32_of = |v: &Value| v.as_f64().map(|x| x as f32);
    let flag_of = |v: &Value| match v {
        Value::String(text) => named(text).map(|n| n == 1),
        Value::Number(number) => named(&number.to_string()).map(|n| n == 1),
        _ => v.as_bool(),
    };
    let letters = value.as_str().filter(|_| row.letters);
    let letters =
        letters.map(|text| text.chars().map(|c| Value::from(c.to_string())).collect::<Vec<_>>());
    let most = match row.by_layer {
        true => config.require_count("num_hidden_layers")? as usize,
        false => usize::MAX,
    };
    let list = letters.as_ref().or(value.as_array()).map(|list| {
        let missing = row.pad.saturating_sub(list.len());
        let padded = list.iter().cloned().chain(std::iter::repeat_n(Value::from(0), missing));
        padded.take(most).collect::<Vec<_>>()
    });
    if list.is_none()
        && let Some(x) = value.as_f64()
    {
        check_zero(config, row, field, x)?;
    }
    let found = match row.ty {
        MetadataType::U32 => match list {
            Some(list) => list.iter().map(u32_of).collect::<Option<Vec<_>>>().map(Into::into),
            None => u32_of(value).map(Into::into),
        },
        MetadataType::F32 => match list {
            Some(list) => {
                // A layer without the number has null.
                let is_absent = |v: &Value| row.by_layer && v.is_null();
                let or_zero = |v: &Value| if is_absent(v) { Some(0.0) } else { f32_of(v) };
                list.iter().map(or_zero).collect::<Option<Vec<_>>>().map(Into::into)
            }
            None => f32_of(value).map(Into::into),
        },
        MetadataType::Bool => match list {
            Some(list) => list.iter().map(flag_of).collect::<Option<Vec<_>>>().map(Into::into),
            None => flag_of(value).map(Into::into),
        },
        MetadataType::String => value.as_str().map(Into::into),
    };
    let names: Vec<&str> = row.values.keys().map(String::as_str).collect();
    let expected = match row.ty {
        MetadataType::U32 if !names.is_empty() => names.join(" or "),
        MetadataType::U32 => "an integer from 0 to 2^32 - 1".into(),
        MetadataType::F32 => "a number".into(),
        MetadataType::Bool => "true or false".into(),
        MetadataType::String => "a text".into(),
    };
    found.ok_or_else(|| config.fail(field, expected, shown(value)))
}

impl Names for Json {
    type Error = Error;

    fn number(&self, name: &str) -> Result<Option<f64>> {
        Json::number(self, name)
    }

    fn first(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.at(name) else { return Ok(None) };
        let first = match value {
            Value::String(text) => text.split(',').next().and_then(|n| n.trim().parse().ok()),
            value => value.get(0).and_then(Value::as_f64),
        };
        let expected = "a list of numbers";
        first.map(Some).ok_or_else(|| self.fail(name, expected, shown(value)))
    }

    fn leading(&self, list: &str, word: Option<&str>) -> Result<Option<f64>> {
        if self.at(list).is_none() {
            return Ok(None);
        }
        let all = self.elements(list)?;
        let is = |v: &Value, word: &str| match v {
            Value::Number(number) => number.to_string() == word,
            v => v.as_str() == Some(word),
        };
        let counts = |v: &&Value| word.is_none_or(|word| is(v, word));
        Ok(Some(all.iter().take_while(counts).count() as f64))
    }
}

/// Fields that change what the model computes and that no GGUF key carries.
fn check_known(config: &Json, descriptor: &Descriptor) -> Result<()> {
    // The norm of queries and keys has no weights: nothing in the checkpoint tells of it.
    if let Some(without) = descriptor.parts.plain_qk_norm_unless_experts {
        let experts = config.count("num_local_experts")?.unwrap_or(0);
        let has_norm = experts as usize != without;
        if config.bool("use_qk_norm")?.is_some_and(|said| said != has_norm) {
            let expected = format!("{has_norm} with {experts} experts");
            return Err(config.fail("use_qk_norm", expected, (!has_norm).to_string()));
        }
    }
    if let Some(act) = config.str("hidden_act")? {
        let known = match descriptor.parts.activation {
            Activation::Silu
            | Activation::SiluClamped
            | Activation::SiluLimited
            | Activation::SiluCapped
            | Activation::SiluPlain => ["silu", "swish"],
            Activation::Relu | Activation::ReluGated => ["relu", "relu"],
            Activation::ReluSquared => ["relu2", "relu2"],
            Activation::Gelu => ["gelu_pytorch_tanh", "gelu"],
            Activation::Situ => ["situ", "situ"],
            Activation::GeluPlain => ["gelu", "gelu"],
        };
        if !known.contains(&act) {
            return Err(config.fail("hidden_act", known[0], act));
        }
    }
    if let Some(field) = descriptor.convert.not_null.iter().find(|field| config.is_null(field)) {
        return Err(config.fail(field, "a value", "null"));
    }
    // Steps of Mamba-2 have no bounds but 0; infinity is an object, see `Json::open`.
    if let [least, most] = config.elements("time_step_limit")?
        && (least.as_f64() != Some(0.0) || !most.is_object())
    {
        let got = format!("[{}, {}]", shown(least), shown(most));
        return Err(config.fail("time_step_limit", "[0.0, Infinity]", got));
    }
    let class = hf_class(config)?;
    for (field, expected) in &descriptor.convert.expect {
        let (of_class, field) = field.split_once(": ").unwrap_or((&class, field));
        let Some(value) = config.at(field).filter(|_| of_class == class) else { continue };
        if !expected.iter().any(|known| is_same(known, value)) {
            let known: Vec<String> = expected.iter().map(|v| v.to_string()).collect();
            let known = if known.is_empty() { "nothing".into() } else { known.join(" or ") };
            return Err(config.fail(field, known, shown(value)));
        }
    }
    check_window(config, descriptor)
}

/// Refuses layers that see a window of the text, where the engine's see all of it.
fn check_window(config: &Json, descriptor: &Descriptor) -> Result<()> {
    const FIELD: &str = "sliding_window";
    let is_plain = descriptor.parts.window == Window::None;
    // Some configs have false for no window.
    let unused = config.bool("use_sliding_window")? == Some(false);
    if !is_plain || unused {
        return Ok(());
    }
    let Some(window) = config.count(FIELD)? else { return Ok(()) };
    let context = config.count("max_position_embeddings")?.unwrap_or(u64::MAX);
    let kinds = config.elements("layer_types")?;
    let slides = |kind: &Value| kind.as_str() == Some("sliding_attention");
    let layer = kinds.iter().position(slides);
    if window < context && (kinds.is_empty() || layer.is_some()) {
        let expected = format!("null, or {context} at least, so that layers see the whole text");
        let of_layer = layer.map_or(String::new(), |layer| format!(" in layer {layer}"));
        return Err(config.fail(FIELD, expected, format!("{window}{of_layer}")));
    }
    Ok(())
}

/// Which layers see a part of the text only, where a config lists others than the period of its
/// architecture does; none where the list is that.
fn window_pattern(config: &Json, descriptor: &Descriptor) -> Result<Option<Vec<bool>>> {
    const FIELD: &str = "layer_types";
    let parts = &descriptor.parts;
    let kinds = config.elements(FIELD)?;
    if parts.window != Window::Pattern || parts.window_period == 0 || kinds.is_empty() {
        return Ok(None);
    }
    let n = config.require_count("num_hidden_layers")? as usize;
    if kinds.len() < n {
        return Err(config.fail(FIELD, format!("{n} layers"), format!("{}", kinds.len())));
    }
    let slides = |(layer, kind): (usize, &Value)| match kind.as_str() {
        Some("sliding_attention" | "chunked_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => {
            let expected = "sliding_attention or full_attention";
            Err(config.fail(&format!("{FIELD}.{layer}"), expected, shown(kind)))
        }
    };
    let listed: Vec<bool> = kinds.iter().take(n).enumerate().map(slides).collect::<Result<_>>()?;
    let full = if parts.window_full_first { 0 } else { parts.window_period - 1 };
    let usual = |layer: usize| layer % parts.window_period != full;
    let Some(other) = (0..n).find(|layer| listed[*layer] != usual(*layer)) else {
        return Ok(None);
    };
    // Which layers rotate follows from their numbers there, and from the list in transformers.
    let rotates_as_listed = descriptor.convert.window.as_ref().is_some_and(|w| w.flags.is_none());
    if parts.rope_layers == RopeLayers::ThreeOfFour && rotates_as_listed {
        let word = if usual(other) { "a window" } else { "full_attention" };
        let expected = format!("{word}, which files of {} imply", descriptor.architecture);
        return Err(config.fail(&format!("{FIELD}.{other}"), expected, shown(&kinds[other])));
    }
    Ok(Some(listed))
}

fn is_same(known: &toml::Value, value: &Value) -> bool {
    match known {
        toml::Value::String(text) => value.as_str() == Some(text),
        toml::Value::Boolean(b) => value.as_bool() == Some(*b),
        toml::Value::Integer(n) => value.as_f64() == Some(*n as f64),
        toml::Value::Float(x) => value.as_f64() == Some(*x),
        _ => false,
    }
}

/// The sizes that tensor shapes are made of.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Sizes that the config has and that are not 0.
    known: BTreeMap<String, u64>,
    /// Sizes that differ from layer to layer.
    of_layers: BTreeMap<String, Vec<u64>>,
    pub n_layers: u64,
    pub vocab: u64,
    pub heads: u64,
    pub heads_kv: u64,
    pub experts: u64,
}

/// No model is near these; a config that says more is broken, and memory is spent by them.
pub const MAX_LAYERS: u64 = 10_000;
const MAX_EXPERTS: u64 = 65_536;
const MAX_SIZE: u64 = 1 << 24;

impl Sizes {
    pub fn read(config: &Json, descriptor: &Descriptor) -> Result<Sizes> {
        let mut known = BTreeMap::new();
        for (name, texts) in &descriptor.convert.sizes {
            if let Some((text, n)) = first_count(config, texts)? {
                check_size(config, name, text, n)?;
                if n > 0 {
                    known.insert(name.clone(), n);
                }
            }
        }
        let mut of_layers = BTreeMap::new();
        for (name, row) in &descriptor.convert.layer_sizes {
            if let Some(sizes) = layer_sizes(config, name, row)? {
                known.insert(name.clone(), sizes.iter().copied().max().unwrap_or(0));
                of_layers.insert(name.clone(), sizes);
            }
        }
        let require = |name: &str| {
            known.get(name).copied().ok_or_else(|| {
                let fields = descriptor.convert.sizes.get(name).map(|f| f.join(" or "));
                config.fail(&fields.unwrap_or_else(|| name.into()), "an integer", "nothing")
            })
        };
        let heads = known.get("heads").copied().unwrap_or(0);
        let heads_kv = known.get("heads_kv").copied().unwrap_or(heads);
        if heads_kv > heads {
            let expected = format!("1 to {heads}");
            return Err(config.fail("num_key_value_heads", expected, heads_kv.to_string()));
        }
        Ok(Sizes {
            n_layers: require("layers")?,
            vocab: require("vocab")?,
            heads,
            heads_kv,
            experts: known.get("experts").copied().unwrap_or(0),
            known,
            of_layers,
        })
    }

    /// Sizes of a layer. A list that has an element only speaks of all layers.
    pub fn of_layer(&self, layer: u64) -> Cow<'_, Sizes> {
        if self.of_layers.is_empty() {
            return Cow::Borrowed(self);
        }
        let mut own = self.clone();
        for (name, sizes) in &self.of_layers {
            let at = if sizes.len() == 1 { 0 } else { layer as usize };
            if let Some(size) = sizes.get(at) {
                own.known.insert(name.clone(), *size);
            }
        }
        Cow::Owned(own)
    }

    /// That a token uses at least one expert, and no more than there are, of at least one group.
    pub fn check_experts_used(&self, config: &Json, descriptor: &Descriptor) -> Result<()> {
        let mut rows = descriptor.convert.metadata();
        let row = rows.find(|(key, _)| *key == "expert_used_count");
        let given = row.map(|(_, row)| first_count(config, &row.from)).transpose()?.flatten();
        let mut rows = descriptor.convert.metadata();
        let groups = rows.find(|(key, _)| *key == "expert_group_used_count");
        let groups = groups.map(|(_, row)| first_count(config, &row.from)).transpose()?.flatten();
        if let Some((field, 0)) = groups {
            return Err(config.fail(field, "1 group at least", "0"));
        }
        match given {
            Some((field, n)) if self.experts > 0 && !(1..=self.experts).contains(&n) => {
                let expected = format!("1 to {}, the number of experts", self.experts);
                Err(config.fail(field, expected, n.to_string()))
            }
            _ => Ok(()),
        }
    }

    pub fn get(&self, name: &str) -> Option<u64> {
        self.known.get(name).copied()
    }

    /// The numbers of a list of expressions; `None` if one has a size that the config lacks.
    pub fn list(&self, config: &Json, texts: &str) -> Result<Option<Vec<u64>>> {
        texts.split(',').map(|text| self.one(config, text)).collect()
    }

    pub fn one(&self, config: &Json, text: &str) -> Result<Option<u64>> {
        match expr::evaluate(text, self)? {
            Some(x) => whole(config, text.trim(), x).map(Some),
            None => Ok(None),
        }
    }
}

impl Names for Sizes {
    type Error = Error;

    fn number(&self, name: &str) -> Result<Option<f64>> {
        Ok(self.get(name).map(|n| n as f64))
    }

    fn first(&self, _: &str) -> Result<Option<f64>> {
        Ok(None)
    }

    fn leading(&self, _: &str, _: Option<&str>) -> Result<Option<f64>> {
        Ok(None)
    }
}

/// The first expression whose fields are there, with its value.
pub fn first_count<'a>(config: &Json, texts: &'a [String]) -> Result<Option<(&'a str, u64)>> {
    for text in texts {
        if let Some(x) = expr::evaluate(text, config)? {
            return Ok(Some((text, whole(config, text, x)?)));
        }
    }
    Ok(None)
}

/// A size of each layer, or one of all; `None` if the config has no such field.
fn layer_sizes(config: &Json, name: &str, row: &LayerSize) -> Result<Option<Vec<u64>>> {
    let found = row.from.iter().find_map(|field| Some((field, config.at(field)?)));
    let Some((field, value)) = found else { return Ok(None) };
    let elements = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let size = |element: &Value| {
        let text = element.as_str().map_or_else(|| element.to_string(), str::to_owned);
        let named = row.values.get(&text).map(|texts| alternatives(config, texts));
        let size = match named.transpose()?.flatten() {
            Some((text, size)) => Some(whole(config, text, size)?),
            None if row.values.is_empty() => element.as_u64(),
            None => None,
        };
        let expected = || match row.values.is_empty() {
            true => "an integer".to_owned(),
            false => row.values.keys().map(String::as_str).collect::<Vec<_>>().join(" or "),
        };
        let size = size.ok_or_else(|| config.fail(field, expected(), shown(element)))?;
        check_size(config, name, field, size)?;
        Ok(size)
    };
    let mut sizes = elements.iter().map(size).collect::<Result<Vec<u64>>>()?;
    if let Some(last) = &row.last
        && config.bool(&last.when)? == Some(true)
    {
        let count = |text: &String| match first_count(config, std::slice::from_ref(text))? {
            Some((_, n)) => Ok(n),
            None => Err(config.fail(text, "an integer", "nothing")),
        };
        let (n, size) = (count(&last.n)? as usize, count(&last.size)?);
        check_size(config, name, &last.size, size)?;
        sizes.iter_mut().rev().take(n).for_each(|of| *of = size);
    }
    Ok(Some(sizes))
}

/// The value of the first of expressions with ` or ` between them whose fields are there.
fn alternatives<'a>(config: &Json, texts: &'a str) -> Result<Option<(&'a str, f64)>> {
    for text in texts.split(" or ") {
        if let Some(x) = expr::evaluate(text, config)? {
            return Ok(Some((text, x)));
        }
    }
    Ok(None)
}

/// Refuses sizes that are not sizes, and sizes beyond all reason.
fn check_size(config: &Json, name: &str, text: &str, n: u64) -> Result<()> {
    let (least, most) = match name {
        "layers" => (1, MAX_LAYERS),
        // Dense models of families that also route say 0.
        "experts" => (0, MAX_EXPERTS),
        "heads" | "heads_kv" => (1, 1 << 16),
        _ => (0, MAX_SIZE),
    };
    let least = if name == "vocab" || name == "head_dim" { 1 } else { least };
    if !(least..=most).contains(&n) {
        return Err(config.fail(text, format!("{least} to {most}"), n.to_string()));
    }
    if matches!(name, "head_dim" | "nope") && !n.is_multiple_of(2) {
        return Err(config.fail(text, "an even number", n.to_string()));
    }
    Ok(())
}

/// `architectures[0]`.
pub fn hf_class(config: &Json) -> Result<String> {
    let first = config.at_top("architectures").and_then(|v| v.get(0)).and_then(Value::as_str);
    let fail = || -> Error {
        let got = config.at_top("architectures").map_or("nothing".into(), shown);
        config.fail("architectures", "a list of one class name", got)
    };
    first.map(str::to_owned).ok_or_else(fail)
}

/// The `model_type` of the text's part of a model that also sees pictures.
pub fn text_model(config: &Json) -> Option<&str> {
    config.at_top("text_config")?.get("model_type")?.as_str()
}
