//! How values print in templates: as Python's `str` does, since that is what models were trained on
//! (`True`, `None`, `['a', 1.0]`, `{'k': 'v'}`).

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Output, State, Value};

const MAX_DEPTH: usize = 500;

/// The environment's formatter: what `{{ value }}` writes.
pub fn formatter(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String | ValueKind::Undefined => minijinja::escape_formatter(out, state, value),
        _ => out.write_str(&python_str(value)?).map_err(Error::from),
    }
}

/// `str(value)`.
pub fn python_str(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    match value.as_str() {
        Some(string) => text.push_str(string),
        None => write_repr(value, 0, &mut text)?,
    }
    Ok(text)
}

fn write_repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        let sentence = "the value is nested too deeply to print";
        return Err(Error::new(ErrorKind::InvalidOperation, sentence));
    }
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&python_number(value)),
        ValueKind::String => write_string(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() { ("(", ")") } else { ("[", "]") };
            out.push_str(open);
            let mut n = 0;
            for item in value.try_iter()? {
                out.push_str(if n == 0 { "" } else { ", " });
                write_repr(&item, depth + 1, out)?;
                n += 1;
            }
            out.push_str(if value.is_tuple() && n == 1 { "," } else { "" });
            out.push_str(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (n, key) in value.try_iter()?.enumerate() {
                out.push_str(if n == 0 { "" } else { ", " });
                write_repr(&key, depth + 1, out)?;
                out.push_str(": ");
                write_repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// `repr` of a string: single quotes unless it has one and no double ones.
fn write_string(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || (0x7f..0xa1).contains(&(c as u32)) => {
                out.push_str(&format!("\\x{:02x}", c as u32));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// `repr` of an int or a float: the shortest digits that read back, in positional notation from
/// 1e-4 to below 1e16.
pub fn python_number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(x) if !value.is_integer() => python_float(x),
        _ => value.to_string(),
    }
}

fn python_float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return (if x > 0.0 { "inf" } else { "-inf" }).into();
    }
    if x != 0.0 && !(1e-4..1e16).contains(&x.abs()) {
        let text = format!("{x:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, size) = match exponent.strip_prefix('-') {
            Some(size) => ('-', size),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{size:0>2}");
    }
    format!("{x:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        for (x, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (2.5e-11, "2.5e-11"),
        ] {
            assert_eq!(python_float(x), expected);
        }
    }

    #[test]
    fn values_print_as_in_python() {
        let value = super::super::environment::value(serde_json::json!({
            "a": [1, 2.0, true, null, "it's", "say \"hi\"", "\n\u{1}é", []], "b": {},
        }));
        assert_eq!(
            python_str(&value).unwrap(),
            r#"{'a': [1, 2.0, True, None, "it's", 'say "hi"', '\n\x01é', []], 'b': {}}"#
        );
    }
}
