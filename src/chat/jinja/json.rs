//! `tojson` as transformers defines it: Python's `json.dumps` with `ensure_ascii=False`, its
//! spacing, and the arguments `indent`, `separators`, `sort_keys` and `ensure_ascii`. Jinja's own
//! filter escapes `<`, `>`, `&` for HTML, which models never saw.

use super::value::{self, Dict, Key, MAX_DEPTH, Value};
use super::{Arguments, Fault, Result, within_bounds};
use serde_json::Value as Json;
use std::rc::Rc;

/// The deepest indent of one level.
const MAX_INDENT: i128 = 100;

struct Style {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

/// The filter.
pub fn tojson(value: &Value, args: &Arguments) -> Result<Value> {
    let args = args.bind("tojson", &["ensure_ascii", "indent", "separators", "sort_keys"], 0)?;
    let indent = match args.some(1) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_string(),
            None => match args.int(1, 0)? {
                n if n > MAX_INDENT => {
                    return Err(Fault::new(format!("tojson: an indent of more than {MAX_INDENT}")));
                }
                n => " ".repeat(n.max(0) as usize),
            },
        }),
    };
    let (item_separator, key_separator) = match args.some(2) {
        Some(pair) => match &pair.items()?[..] {
            [item, key] => match (item.as_str(), key.as_str()) {
                (Some(item), Some(key)) => (item.to_string(), key.to_string()),
                _ => return Err(Fault::new("tojson: the separators are no texts")),
            },
            _ => return Err(Fault::new("tojson: expected two separators")),
        },
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let (ensure_ascii, sort_keys) = (args.is_true(0), args.is_true(3));
    let style = Style { ensure_ascii, sort_keys, indent, item_separator, key_separator };
    let mut out = String::new();
    style.write(value, 0, &mut out)?;
    Ok(out.into())
}

impl Style {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<()> {
        within_bounds()?;
        if depth > MAX_DEPTH {
            return Err(Fault::new("tojson: the value is nested too deeply"));
        }
        match value {
            Value::None => out.push_str("null"),
            Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
            Value::Int(n) => out.push_str(&n.to_string()),
            Value::Float(x) => out.push_str(&number(*x)),
            Value::Str(text) | Value::Markup(text) => self.write_string(text, out),
            Value::Dict(dict) => self.write_dict(dict, depth, out)?,
            Value::List(items) | Value::Tuple(items) | Value::Group(items) => {
                out.push('[');
                let mut empty = true;
                for item in items.iter() {
                    self.separate(&mut empty, depth + 1, out);
                    self.write(item, depth + 1, out)?;
                }
                self.close(empty, depth, ']', out);
            }
            Value::Undefined(what) => {
                return Err(Fault::new(format!("tojson: {what} is undefined")));
            }
            _ => return Err(Fault::new(format!("tojson: a {} is no JSON", value.kind()))),
        }
        Ok(())
    }

    fn write_dict(&self, dict: &Dict, depth: usize, out: &mut String) -> Result<()> {
        let mut pairs: Vec<(&Key, &Value)> = dict.iter().collect();
        if self.sort_keys {
            let mut fault = None;
            pairs.sort_by(|(a, _), (b, _)| {
                value::order(&a.0, &b.0, 0)
                    .map(|order| order.unwrap_or(std::cmp::Ordering::Equal))
                    .unwrap_or_else(|e| {
                        fault = Some(e);
                        std::cmp::Ordering::Equal
                    })
            });
            if let Some(fault) = fault {
                return Err(fault);
            }
        }
        out.push('{');
        let mut empty = true;
        for (key, value) in pairs {
            self.separate(&mut empty, depth + 1, out);
            match &key.0 {
                Value::Str(text) | Value::Markup(text) => self.write_string(text, out),
                Value::None => out.push_str("\"null\""),
                Value::Bool(b) => out.push_str(if *b { "\"true\"" } else { "\"false\"" }),
                Value::Int(n) => out.push_str(&format!("\"{n}\"")),
                Value::Float(x) => self.write_string(&number(*x), out),
                key => return Err(Fault::new(format!("tojson: a {} is no key", key.kind()))),
            }
            out.push_str(&self.key_separator);
            self.write(value, depth + 1, out)?;
        }
        self.close(empty, depth, '}', out);
        Ok(())
    }

    fn separate(&self, empty: &mut bool, depth: usize, out: &mut String) {
        if !std::mem::take(empty) {
            out.push_str(&self.item_separator);
        }
        self.line_break(depth, out);
    }

    fn close(&self, empty: bool, depth: usize, bracket: char, out: &mut String) {
        if !empty {
            self.line_break(depth, out);
        }
        out.push(bracket);
    }

    fn line_break(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Python's JSON names for what is no number, its `repr` for the others.
fn number(x: f64) -> String {
    match x {
        x if x.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        x => value::float(x),
    }
}

/// JSON as a template's value.
pub fn value(json: Json) -> Value {
    match json {
        Json::Null => Value::None,
        Json::Bool(b) => Value::Bool(b),
        Json::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(i), ..) => Value::Int(i.into()),
            (_, Some(u), _) => Value::Int(u.into()),
            (.., x) => Value::Float(x.unwrap_or(f64::NAN)),
        },
        Json::String(text) => text.into(),
        Json::Array(items) => Value::list(items.into_iter().map(value).collect()),
        Json::Object(fields) => Value::Dict(Rc::new(
            fields.into_iter().map(|(key, json)| (Value::str_key(&key), value(json))).collect(),
        )),
    }
}
