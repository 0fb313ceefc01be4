//! Whether schemas hold for no common value, so that one of them is any of them.

use super::refs::{References, child};
use serde_json::{Map, Value};

/// Schemas of one list that are compared with each other.
const MAX_SCHEMAS: usize = 64;

/// Schemas within each other that are looked into.
const MAX_DEPTH: usize = 6;

const NULL: u8 = 1;
const BOOLEAN: u8 = 2;
const INTEGER: u8 = 4;
const FRACTION: u8 = 8;
const STRING: u8 = 16;
const ARRAY: u8 = 32;
const OBJECT: u8 = 64;
const ALL: u8 = 127;

/// Whether no value matches two of the schemas of the list at `at`.
pub fn are_disjoint(list: &[Value], at: &str, references: &References<'_>) -> bool {
    let place = |i: usize| Place { value: &list[i], at: format!("{at}/{i}") };
    list.len() <= MAX_SCHEMAS
        && (0..list.len())
            .all(|i| (0..i).all(|j| Compare { references }.pair(&place(i), &place(j), MAX_DEPTH)))
}

struct Compare<'a> {
    references: &'a References<'a>,
}

#[derive(Clone)]
struct Place<'a> {
    value: &'a Value,
    at: String,
}

impl<'a> Compare<'a> {
    /// A schema without keywords but a reference is what that leads to.
    fn resolved(&self, place: &Place<'a>) -> Place<'a> {
        let mut place = place.clone();
        for _ in 0..MAX_DEPTH {
            match self.references.target(&place.at) {
                Some((value, at)) => place = Place { value, at },
                None => break,
            }
        }
        place
    }

    fn pair(&self, one: &Place<'a>, other: &Place<'a>, depth: usize) -> bool {
        let (one, other) = (self.resolved(one), self.resolved(other));
        if one.value == &Value::Bool(false) || other.value == &Value::Bool(false) {
            return true;
        }
        let (Some(a), Some(b)) = (one.value.as_object(), other.value.as_object()) else {
            return false;
        };
        if kinds(a) & kinds(b) == 0 {
            return true;
        }
        if let (Some(a), Some(b)) = (constants(a), constants(b)) {
            return !a.iter().any(|value| b.contains(value));
        }
        depth > 0 && kinds(a) & kinds(b) == OBJECT && {
            let keys = [required(a), required(b)].concat();
            keys.into_iter().any(|key| {
                let property = |place: &Place<'a>| -> Option<Place<'a>> {
                    let value = place.value.get("properties")?.get(key)?;
                    let at = child(&child(&place.at, "properties"), key);
                    Some(Place { value, at })
                };
                match (property(&one), property(&other)) {
                    (Some(a), Some(b)) => self.pair(&a, &b, depth - 1),
                    (Some(_), None) => is_closed(b),
                    (None, Some(_)) => is_closed(a),
                    _ => false,
                }
            })
        }
    }
}

/// Whether an object has no properties but those that are listed.
fn is_closed(fields: &Map<String, Value>) -> bool {
    fields.get("additionalProperties") == Some(&Value::Bool(false))
        && !fields.contains_key("patternProperties")
}

fn required(fields: &Map<String, Value>) -> Vec<&str> {
    let names = fields.get("required").and_then(Value::as_array);
    names.into_iter().flatten().filter_map(Value::as_str).collect()
}

fn constants(fields: &Map<String, Value>) -> Option<Vec<&Value>> {
    match (fields.get("const"), fields.get("enum").and_then(Value::as_array)) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(values)) => Some(values.iter().collect()),
        _ => None,
    }
    // Numbers are equal however they are written, which texts do not show.
    .filter(|values| values.iter().all(|value| matches!(value, Value::String(_) | Value::Bool(_))))
}

/// The types of values that a schema may allow, by its own keywords.
fn kinds(fields: &Map<String, Value>) -> u8 {
    let named = |name: &Value| match name.as_str() {
        Some("null") => NULL,
        Some("boolean") => BOOLEAN,
        Some("integer") => INTEGER,
        Some("number") => INTEGER | FRACTION,
        Some("string") => STRING,
        Some("array") => ARRAY,
        Some("object") => OBJECT,
        _ => ALL,
    };
    let of_type = match fields.get("type") {
        None | Some(Value::Null) => ALL,
        Some(Value::Array(names)) if !names.is_empty() => {
            names.iter().fold(0, |all, name| all | named(name))
        }
        Some(name) => named(name),
    };
    let kind = |value: &Value| match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(_) => INTEGER | FRACTION,
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
    };
    let of_const = fields.get("const").map_or(ALL, kind);
    let of_enum = match fields.get("enum") {
        Some(Value::Array(values)) => values.iter().fold(0, |all, value| all | kind(value)),
        _ => ALL,
    };
    of_type & of_const & of_enum
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn schemas_of_different_values_are_disjoint() {
        let tagged = |kind: &str| {
            json!({ "type": "object", "required": ["kind"],
            "properties": { "kind": { "const": kind } } })
        };
        for (list, expected) in [
            (json!([{ "type": "string" }, { "type": "null" }]), true),
            (json!([{ "type": "integer" }, { "type": "number" }]), false),
            (json!([{ "enum": ["a", "b"] }, { "const": "c" }]), true),
            (json!([{ "enum": ["a", "b"] }, { "const": "b" }]), false),
            (json!([{ "const": 1 }, { "const": 1.0 }]), false),
            (json!([tagged("a"), tagged("b"), { "type": "null" }]), true),
            (json!([tagged("a"), tagged("a")]), false),
            (json!([{ "required": ["a"] }, { "required": ["b"] }]), false),
            (json!([{ "$ref": "#/$defs/a" }, { "$ref": "#/$defs/b" }]), true),
            (json!([{ "$ref": "#/$defs/a" }, { "$ref": "#/$defs/a" }]), false),
            (json!([true, { "type": "null" }]), false),
            (json!([false, true]), true),
        ] {
            let doc = json!({ "oneOf": list, "$defs": { "a": tagged("a"), "b": tagged("b") } });
            let list = list.as_array().unwrap();
            let references = References::new(&doc, false);
            assert_eq!(are_disjoint(list, "/oneOf", &references), expected, "{list:?}");
        }
    }
}
