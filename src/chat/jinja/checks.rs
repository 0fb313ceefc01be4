//! Jinja's tests: `value is odd`.

use super::ast::{Binary, Comparison};
use super::value::{self, Value};
use super::{Arguments, Fault, Result, filters, methods, ops};

const NAMES: &[&str] = &[
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

pub fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

pub fn call(name: &str, value: &Value, args: &Arguments) -> Result<bool> {
    let comparison = match name {
        "==" | "eq" | "equalto" => Some(Comparison::Eq),
        "!=" | "ne" => Some(Comparison::Ne),
        "<" | "lt" | "lessthan" => Some(Comparison::Lt),
        "<=" | "le" => Some(Comparison::Le),
        ">" | "gt" | "greaterthan" => Some(Comparison::Gt),
        ">=" | "ge" => Some(Comparison::Ge),
        "in" => Some(Comparison::In),
        _ => None,
    };
    if let Some(comparison) = comparison {
        let other = args.bind(name, &[""], 1)?.value(0);
        return ops::compare(comparison, value, &other);
    }
    match name {
        "divisibleby" => {
            let by = args.bind(name, &["num"], 1)?.value(0);
            return is_remainder(value, &by, 0);
        }
        "sameas" => return same(value, &args.bind(name, &["other"], 1)?.value(0)),
        _ => args.none(name)?,
    }
    Ok(match name {
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "none" => value.is_none(),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => value.as_number().is_some(),
        "string" => value.as_str().is_some(),
        "escaped" => matches!(value, Value::Markup(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "callable" => matches!(
            value,
            Value::Function(_)
                | Value::Macro(_)
                | Value::Method(_)
                | Value::Joiner(_)
                | Value::Loop(_)
                | Value::Undefined(_)
        ),
        "iterable" => {
            value.length().is_some() || matches!(value, Value::Iterator(_) | Value::View(..))
        }
        "sequence" => {
            let is_indexed = !matches!(value, Value::View(..));
            value.length().is_some() && is_indexed && !matches!(value, Value::Loop(_))
        }
        "odd" => is_remainder(value, &Value::Int(2), 1)?,
        "even" => is_remainder(value, &Value::Int(2), 0)?,
        "lower" => cased(value, "islower")?,
        "upper" => cased(value, "isupper")?,
        "filter" | "test" => is_name(value, name)?,
        _ => return Err(Fault::new(format!("unknown test `{name}`"))),
    })
}

/// Whether the value is the name of a filter, or of a test.
fn is_name(value: &Value, kind: &str) -> Result<bool> {
    value::Key::new(value)?;
    let is_known = if kind == "filter" { filters::is_known } else { is_known };
    Ok(value.as_str().is_some_and(is_known))
}

fn is_remainder(value: &Value, by: &Value, remainder: i128) -> Result<bool> {
    let rest = ops::binary(Binary::Mod, value, by)?;
    value::equal(&rest, &Value::Int(remainder), 0)
}

fn cased(value: &Value, method: &str) -> Result<bool> {
    Ok(methods::call(&value.print()?, method, &Arguments::default())?.is_true())
}

/// Python's `is`, which for numbers and texts is known in some cases only.
fn same(a: &Value, b: &Value) -> Result<bool> {
    if value::same(a, b) {
        return Ok(true);
    }
    match (a, b) {
        (Value::Int(x), Value::Int(y)) if x != y => Ok(false),
        // Python keeps one object for each of these.
        (Value::Int(-5..=256), Value::Int(_)) => Ok(true),
        (Value::Int(_), Value::Int(_)) | (Value::Float(_), Value::Float(_)) => unknown(),
        (Value::Str(x), Value::Str(y)) if x == y => unknown(),
        (Value::Undefined(_), Value::Undefined(_)) => unknown(),
        _ => Ok(false),
    }
}

fn unknown<T>() -> Result<T> {
    Err(Fault::new("`sameas` of equal numbers or texts is not supported: use `==`"))
}
