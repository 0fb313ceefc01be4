//! Bounds of a grammar's source that hold before anything recursive sees it.

use super::Grammar;
use crate::{Error, Result};
use serde_json::Value;

/// Bytes of a grammar, or of a schema written as JSON.
const MAX_BYTES: usize = 512 << 10;

/// Objects and arrays within each other.
const MAX_SCHEMA_DEPTH: usize = 128;

/// Braces within each other in a Lark grammar or a regular expression. llguidance bounds other
/// brackets itself.
const MAX_BRACES: usize = 128;

/// Fails for a grammar that is too large, too deep or empty.
pub fn check(grammar: &Grammar) -> Result<()> {
    let kind = grammar.kind();
    match grammar {
        Grammar::JsonObject => Ok(()),
        Grammar::JsonSchema(schema) => {
            if !is_shallow(schema) {
                return Err(Error::invalid(format!(
                    "the JSON schema is nested more than {MAX_SCHEMA_DEPTH} levels deep"
                )));
            }
            if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
                return Err(Error::invalid("a JSON schema is an object, true or false"));
            }
            check_size(kind, schema.to_string().len())
        }
        Grammar::Regex(text) | Grammar::Lark(text) => {
            check_size(kind, text.len())?;
            check_text(kind, text)?;
            match n_braces(text) > MAX_BRACES {
                true => Err(Error::invalid(format!(
                    "the {kind} is nested more than {MAX_BRACES} levels deep"
                ))),
                false => Ok(()),
            }
        }
        Grammar::Gbnf(text) => {
            check_size(kind, text.len())?;
            check_text(kind, text)
        }
    }
}

fn check_size(kind: &str, n_bytes: usize) -> Result<()> {
    match n_bytes <= MAX_BYTES {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "the {kind} has {n_bytes} bytes, more than the {MAX_BYTES} that are allowed"
        ))),
    }
}

fn check_text(kind: &str, text: &str) -> Result<()> {
    match text.trim().is_empty() {
        true => Err(Error::invalid(format!("the {kind} is empty"))),
        false => Ok(()),
    }
}

/// Without recursion: the value may be as deep as its maker liked.
fn is_shallow(schema: &Value) -> bool {
    let mut level = vec![schema];
    for _ in 0..=MAX_SCHEMA_DEPTH {
        let mut inner: Vec<&Value> = Vec::new();
        for value in level {
            match value {
                Value::Array(items) => inner.extend(items),
                Value::Object(fields) => inner.extend(fields.values()),
                _ => {}
            }
        }
        if inner.is_empty() {
            return true;
        }
        level = inner;
    }
    false
}

/// The greatest number of braces open at once. Those in strings and comments count too; one that
/// closes what nothing opened takes none away.
fn n_braces(text: &str) -> usize {
    let (mut open, mut most) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'{' => open += 1,
            b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn nested(n: usize) -> Value {
        (0..n).fold(json!({}), |inner, _| json!({ "properties": inner }))
    }

    #[test]
    fn what_is_too_deep_or_too_long_is_refused() {
        assert!(check(&Grammar::JsonSchema(nested(MAX_SCHEMA_DEPTH))).is_ok());
        assert!(check(&Grammar::JsonSchema(nested(MAX_SCHEMA_DEPTH + 1))).is_err());
        assert!(check(&Grammar::JsonSchema(json!("string"))).is_err());
        let braces = |n| Grammar::Lark(format!("start: {}b{}", "a{".repeat(n), "}".repeat(n)));
        assert!(check(&braces(MAX_BRACES)).is_ok());
        assert!(check(&braces(MAX_BRACES + 1)).is_err());
        for text in [" \n", &"x".repeat(MAX_BYTES + 1)] {
            assert!(check(&Grammar::Gbnf(text.into())).is_err());
            assert!(check(&Grammar::Regex(text.into())).is_err());
        }
        assert!(check(&Grammar::Regex("a{2}".repeat(1000))).is_ok());
    }
}
