//! Fields of a JSON object, read one by one: `null` counts as absent, a wrong type or range is an
//! error that names the field, and what no one has read is known at the end.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::errors::{ApiError, ApiResult};

pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// The object's own path; empty for a body.
    path: String,
    read: RefCell<Vec<&'static str>>,
}

/// The kind of a value, for messages.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A value that is not what it should be.
pub fn wrong(path: &str, expected: &str, got: &Value) -> ApiError {
    let got = match got {
        Value::Bool(_) | Value::Number(_) => got.to_string(),
        other => kind(other).to_owned(),
    };
    ApiError::invalid(path, format!("{path}: expected {expected}, got {got}"))
}

impl<'a> Fields<'a> {
    /// The fields of `value`, which is at `path` of the body.
    pub fn of(value: &'a Value, path: &str) -> ApiResult<Fields<'a>> {
        match value {
            Value::Object(map) => {
                Ok(Fields { map, path: path.to_owned(), read: RefCell::default() })
            }
            other if path.is_empty() => {
                let got = kind(other);
                let message = format!("the request's body: expected an object, got {got}");
                Err(ApiError::new(super::errors::Kind::Invalid, "invalid_json", message))
            }
            other => Err(wrong(path, "an object", other)),
        }
    }

    /// The path of a field.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// A field, unless it is absent or `null`.
    pub fn get(&self, name: &'static str) -> Option<&'a Value> {
        self.read.borrow_mut().push(name);
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Whether the field is there, `null` or not.
    pub fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// Reads over fields that have no meaning here.
    pub fn ignore(&self, names: &[&'static str]) {
        self.read.borrow_mut().extend(names);
    }

    /// A field that is wrong.
    pub fn wrong(&self, name: &str, expected: &str) -> ApiError {
        wrong(&self.path(name), expected, self.map.get(name).unwrap_or(&Value::Null))
    }

    /// A field that is not there and has to be.
    pub fn missing(&self, name: &str) -> ApiError {
        let path = self.path(name);
        ApiError::invalid(path.clone(), format!("{path}: the field is missing"))
    }

    /// A string that has to be there.
    pub fn required(&self, name: &'static str) -> ApiResult<&'a str> {
        self.string(name)?.ok_or_else(|| self.missing(name))
    }

    fn typed<T>(
        &self,
        name: &'static str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> ApiResult<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong(name, expected))
    }

    pub fn string(&self, name: &'static str) -> ApiResult<Option<&'a str>> {
        self.typed(name, "a string", Value::as_str)
    }

    pub fn boolean(&self, name: &'static str) -> ApiResult<Option<bool>> {
        self.typed(name, "a boolean", Value::as_bool)
    }

    /// A boolean that is false where it is absent.
    pub fn flag(&self, name: &'static str) -> ApiResult<bool> {
        Ok(self.boolean(name)?.unwrap_or(false))
    }

    pub fn array(&self, name: &'static str) -> ApiResult<Option<&'a Vec<Value>>> {
        self.typed(name, "an array", Value::as_array)
    }

    pub fn object(&self, name: &'static str) -> ApiResult<Option<&'a Map<String, Value>>> {
        self.typed(name, "an object", Value::as_object)
    }

    pub fn integer(
        &self,
        name: &'static str,
        range: RangeInclusive<i64>,
    ) -> ApiResult<Option<i64>> {
        let (from, to) = (range.start(), range.end());
        let expected = match *to {
            i64::MAX if *from == i64::MIN => "a whole number".to_owned(),
            i64::MAX => format!("a whole number of at least {from}"),
            to => format!("a whole number from {from} to {to}"),
        };
        self.typed(name, &expected, |value| integer(value).filter(|n| range.contains(n)))
    }

    /// A whole number, where negative ones are none.
    pub fn count(&self, name: &'static str) -> ApiResult<Option<Option<usize>>> {
        let n = self.integer(name, i64::MIN..=i64::MAX)?;
        Ok(n.map(|n| usize::try_from(n).ok()))
    }

    /// A seed: any whole number of 64 bits, signed or not. −1 is none.
    pub fn seed(&self, name: &'static str) -> ApiResult<Option<Option<u64>>> {
        self.typed(name, "a whole number of 64 bits", |value| match integer(value) {
            Some(-1) => Some(None),
            Some(n) => Some(Some(n as u64)),
            None => value.as_u64().map(Some),
        })
    }

    /// Strings: one, or a list.
    pub fn strings(&self, name: &'static str) -> ApiResult<Option<Vec<&'a str>>> {
        self.typed(name, "a string or an array of strings", |value| match value {
            Value::String(text) => Some(vec![text.as_str()]),
            Value::Array(list) => list.iter().map(Value::as_str).collect(),
            _ => None,
        })
    }

    /// Names of fields that were not read.
    pub fn unknown(&self) -> Vec<&'a str> {
        let read = self.read.borrow();
        self.map.keys().map(String::as_str).filter(|name| !read.contains(name)).collect()
    }
}

/// A whole number, also one that is written with a decimal point.
pub fn integer(value: &Value) -> Option<i64> {
    let whole = |x: &f64| x.fract() == 0.0 && x.abs() < 9e15;
    value.as_i64().or_else(|| value.as_f64().filter(whole).map(|x| x as i64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_have_types_and_ranges() {
        let value = json!({"a": "x", "n": 3.0, "big": 99, "none": null, "s": ["x", 1]});
        let fields = Fields::of(&value, "outer").unwrap();
        assert_eq!(fields.string("a").unwrap(), Some("x"));
        assert_eq!(fields.integer("n", 0..=5).unwrap(), Some(3));
        assert_eq!(fields.boolean("none").unwrap(), None);
        let seeds = json!({"a": -7, "b": u64::MAX, "c": -1, "d": 1.5, "e": 7.0});
        let seeds = Fields::of(&seeds, "").unwrap();
        assert_eq!(seeds.seed("a").unwrap(), Some(Some(-7i64 as u64)));
        assert_eq!(seeds.seed("b").unwrap(), Some(Some(u64::MAX)));
        assert_eq!((seeds.seed("c").unwrap(), seeds.seed("x").unwrap()), (Some(None), None));
        assert!(seeds.seed("d").is_err());
        assert_eq!(seeds.seed("e").unwrap(), Some(Some(7)));
        assert_eq!(seeds.count("a").unwrap(), Some(None));
        let error = fields.integer("big", 0..=5).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("outer.big"));
        assert_eq!(error.message, "outer.big: expected a whole number from 0 to 5, got 99");
        let error = fields.strings("s").unwrap_err();
        let expected = "outer.s: expected a string or an array of strings, got an array";
        assert_eq!(error.message, expected);
        assert!(fields.string("n").is_err());
        assert_eq!(fields.unknown(), [""; 0]);
        let fields = Fields::of(&value, "").unwrap();
        fields.ignore(&["a", "n"]);
        assert_eq!(fields.unknown(), ["big", "none", "s"]);
    }
}
