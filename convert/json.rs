//! The JSON files of a checkpoint: read once, asked by field, with complaints that name both.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{Error, Result};

/// No JSON file of a checkpoint comes near; a larger one is something else.
const MAX_BYTES: u64 = 1 << 28;

#[derive(Debug)]
pub struct Json {
    path: PathBuf,
    value: Value,
}

impl Json {
    pub fn open(path: impl AsRef<Path>) -> Result<Json> {
        let path = path.as_ref().to_owned();
        let n_bytes = fs::metadata(&path).map_err(|e| Error::io(&path, e))?.len();
        if n_bytes > MAX_BYTES {
            let expected = format!("at most {MAX_BYTES} bytes");
            return Err(Error::format(path, "size", expected, n_bytes.to_string()));
        }
        let bytes = fs::read(&path).map_err(|e| Error::io(&path, e))?;
        let value: Value = serde_json::from_slice(&bytes)
            .or_else(|e| serde_json::from_slice(&with_floats(&bytes)).map_err(|_| e))
            .map_err(|e| Error::format(&path, "content", "JSON", e.to_string()))?;
        if !value.is_object() {
            return Err(Error::format(path, "content", "an object", shown(&value)));
        }
        Ok(Json { path, value })
    }

    /// Moves the part of the file that is about text out of it: all, or a nested `text_config`.
    pub fn take_text(&mut self) -> Map<String, Value> {
        match self.text_mut() {
            Value::Object(text) => std::mem::take(text),
            _ => Map::new(),
        }
    }

    pub fn put_text(&mut self, text: Map<String, Value>) {
        *self.text_mut() = text.into();
    }

    fn text_mut(&mut self) -> &mut Value {
        match self.value.get("text_config").is_some_and(Value::is_object) {
            true => &mut self.value["text_config"],
            false => &mut self.value,
        }
    }

    /// `None` where there is no such file.
    pub fn open_optional(path: impl AsRef<Path>) -> Result<Option<Json>> {
        if path.as_ref().exists() { Json::open(path).map(Some) } else { Ok(None) }
    }

    /// Gives fields other names.
    pub fn rename(&mut self, names: &[(&str, &str)]) {
        for (from, to) in names {
            if let Some(fields) = self.value.as_object_mut()
                && let Some(value) = fields.remove(*from)
            {
                fields.insert((*to).into(), value);
            }
        }
    }

    /// Gives a field a value where it has none.
    pub fn set_default(&mut self, name: &str, value: &str) {
        if let Some(fields) = self.value.as_object_mut() {
            fields.entry(name).or_insert_with(|| value.into());
        }
    }

    /// An object whose field `name` is this one.
    pub fn within(self, name: &str) -> Json {
        Json { path: self.path, value: serde_json::json!({ name: self.value }) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The value of a field; "a.b" descends, "a.0" is the first element of a list, and null counts
    /// as absent. What a nested text_config says goes before what stands around it.
    pub fn at(&self, field: &str) -> Option<&Value> {
        let within = |value| field.split('.').try_fold(value, part_of);
        let nested = self.value.get("text_config").and_then(within);
        [nested, within(&self.value)].into_iter().flatten().find(|v| !v.is_null())
    }

    /// Whether a field is there and null.
    pub fn is_null(&self, field: &str) -> bool {
        field.split('.').try_fold(&self.value, part_of).is_some_and(Value::is_null)
    }

    /// The first of several fields that is there, with its name.
    pub fn first<'a>(&self, fields: &'a [impl AsRef<str>]) -> Option<(&'a str, &Value)> {
        fields.iter().find_map(|f| self.at(f.as_ref()).map(|v| (f.as_ref(), v)))
    }

    /// The value of a field of the file's own, whatever is nested in it.
    pub fn at_top(&self, field: &str) -> Option<&Value> {
        self.value.get(field).filter(|v| !v.is_null())
    }

    pub fn fail(&self, field: &str, expected: impl Into<String>, got: impl Into<String>) -> Error {
        Error::format(&self.path, field, expected, got)
    }

    fn typed<'a, X>(
        &'a self,
        field: &str,
        expected: &str,
        take: impl Fn(&'a Value) -> Option<X>,
    ) -> Result<Option<X>> {
        let Some(value) = self.at(field) else { return Ok(None) };
        take(value).map(Some).ok_or_else(|| self.fail(field, expected, shown(value)))
    }

    fn required<X>(&self, field: &str, expected: &str, found: Option<X>) -> Result<X> {
        found.ok_or_else(|| self.fail(field, expected, "nothing"))
    }

    /// A count: a non-negative integer of 32 bits.
    pub fn count(&self, field: &str) -> Result<Option<u64>> {
        let take = |v: &Value| v.as_u64().filter(|n| u32::try_from(*n).is_ok());
        self.typed(field, "an integer from 0 to 2^32 - 1", take)
    }

    pub fn require_count(&self, field: &str) -> Result<u64> {
        self.required(field, "an integer", self.count(field)?)
    }

    pub fn number(&self, field: &str) -> Result<Option<f64>> {
        self.typed(field, "a number", Value::as_f64)
    }

    pub fn require_number(&self, field: &str) -> Result<f64> {
        self.required(field, "a number", self.number(field)?)
    }

    pub fn bool(&self, field: &str) -> Result<Option<bool>> {
        self.typed(field, "true or false", Value::as_bool)
    }

    /// Whether a flag is set, in the text's part or around it.
    pub fn any_bool(&self, field: &str) -> bool {
        let text = self.value.get("text_config");
        let said = |value: &Value| value.get(field).and_then(Value::as_bool) == Some(true);
        said(&self.value) || text.is_some_and(said)
    }

    pub fn str(&self, field: &str) -> Result<Option<&str>> {
        self.typed(field, "a string", Value::as_str)
    }

    /// The entries of an object; none where the field is absent.
    pub fn entries(&self, field: &str) -> Result<Vec<(&str, &Value)>> {
        let map = self.typed(field, "an object", Value::as_object)?;
        Ok(map.into_iter().flatten().map(|(k, v)| (k.as_str(), v)).collect())
    }

    /// The elements of an array; none where the field is absent.
    pub fn elements(&self, field: &str) -> Result<&[Value]> {
        Ok(self.typed(field, "an array", Value::as_array)?.map_or(&[], Vec::as_slice))
    }

    /// All fields of the file.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.value.as_object().into_iter().flatten().map(|(k, v)| (k.as_str(), v))
    }
}

/// JSON with numbers that Python writes and JSON lacks, as transformers 5 writes them: an object.
fn with_floats(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let (mut rest, mut in_text) = (bytes, false);
    while let Some((&byte, after)) = rest.split_first() {
        let float = ["Infinity", "-Infinity", "NaN"].into_iter();
        let float = float.filter(|_| !in_text).find(|name| rest.starts_with(name.as_bytes()));
        if let Some(name) = float {
            out.extend(format!("{{\"__float__\":\"{name}\"}}").into_bytes());
            rest = &rest[name.len()..];
            continue;
        }
        out.push(byte);
        rest = after;
        match (byte, in_text) {
            (b'"', _) => in_text = !in_text,
            (b'\\', true) => {
                out.extend(rest.first());
                rest = rest.get(1..).unwrap_or_default();
            }
            _ => {}
        }
    }
    out
}

/// A field of an object, or an element of a list by its number.
fn part_of<'a>(value: &'a Value, part: &str) -> Option<&'a Value> {
    match value {
        Value::Array(list) => list.get(part.parse::<usize>().ok()?),
        value => value.get(part),
    }
}

/// A value as a message shows it: short, on one line.
pub fn shown(value: &Value) -> String {
    const MOST: usize = 80;
    match value {
        Value::Array(a) if a.len() > 8 => return format!("an array of {}", a.len()),
        Value::Object(o) => return format!("an object of {} fields", o.len()),
        _ => {}
    }
    let text = value.to_string();
    match text.char_indices().nth(MOST) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}
