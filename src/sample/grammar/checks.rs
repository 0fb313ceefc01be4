//! Bounds of a grammar's source that hold before anything recursive sees it.

use super::Grammar;
use crate::{Error, Result};
use regex::Regex;
use serde_json::Value;
use std::sync::LazyLock;

/// Bytes of a grammar, or of a schema written as JSON.
const MAX_BYTES: usize = 512 << 10;

/// Objects and arrays within each other.
const MAX_SCHEMA_DEPTH: usize = 128;

/// Braces within each other in a Lark grammar. llguidance bounds other brackets itself.
const MAX_BRACES: usize = 128;

/// Conjunctions in a Lark grammar. The states of what they conjoin multiply.
const MAX_CONJUNCTIONS: usize = 16;

/// Fails for a grammar that is too large, too deep or empty.
pub fn check(grammar: &Grammar) -> Result<()> {
    let kind = grammar.kind();
    match grammar {
        Grammar::JsonObject => Ok(()),
        Grammar::JsonSchema(schema) => check_schema(schema),
        Grammar::Lark(text) => {
            check_size(kind, text.len())?;
            check_text(kind, text)?;
            check_lark(text)
        }
        Grammar::Regex(text) | Grammar::Gbnf(text) => {
            check_size(kind, text.len())?;
            check_text(kind, text)
        }
    }
}

/// Fails for a schema that is too large or too deep, or none.
pub fn check_schema(schema: &Value) -> Result<()> {
    if !is_shallow(schema) {
        return Err(Error::invalid(format!(
            "the JSON schema is nested more than {MAX_SCHEMA_DEPTH} levels deep"
        )));
    }
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        return Err(Error::invalid("a JSON schema is an object, true or false"));
    }
    check_size("JSON schema", schema.to_string().len())
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

/// A string, a regular expression or a comment of a Lark grammar.
static NO_SYNTAX: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r#""(\\.|[^"\\])*"|/(\\.|[^/\\\n])+/|(#|//)[^\n]*"#).expect("a valid expression")
});

fn check_lark(text: &str) -> Result<()> {
    let text = NO_SYNTAX.replace_all(text, "");
    let (mut open, mut n_conjunctions) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'{' => open += 1,
            b'}' => open = open.saturating_sub(1),
            b'&' => n_conjunctions += 1,
            _ => {}
        }
        if open > MAX_BRACES {
            return Err(Error::invalid(format!(
                "the Lark grammar is nested more than {MAX_BRACES} levels deep"
            )));
        }
    }
    match n_conjunctions <= MAX_CONJUNCTIONS {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "the Lark grammar has more than {MAX_CONJUNCTIONS} conjunctions (&)"
        ))),
    }
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
        let lark = |text: String| check(&Grammar::Lark(text));
        assert!(lark(format!("start: A{}", " & /a/".repeat(MAX_CONJUNCTIONS))).is_ok());
        assert!(lark(format!("start: A{}", " & /a/".repeat(MAX_CONJUNCTIONS + 1))).is_err());
        // Neither counts in strings, regular expressions and comments.
        let text = "&{{\\\"&".repeat(100);
        assert!(lark(format!("start: \"{text}\" /{text}/ // {text}\n# {text}")).is_ok());
    }
}
