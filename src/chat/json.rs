//! `tojson` as Hugging Face's environment defines it: Python's `json.dumps` with
//! `ensure_ascii=False`, its spacing, and the arguments `indent`, `separators`, `sort_keys` and
//! `ensure_ascii`. Jinja's own filter escapes `<`, `>`, `&` for HTML, which models never saw.

use super::format::python_number;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Deeper values are refused; `json.dumps` stops near 1,000 as well.
const MAX_DEPTH: usize = 500;

struct Style {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

/// The filter. Positional arguments come in the order of the Python function.
pub fn tojson(value: &Value, args: &[Value], kwargs: &Kwargs) -> Result<Value, Error> {
    let argument = |position: usize, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = kwargs.get(name)?;
        let given = args.get(position).cloned().or(named);
        Ok(given.filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = argument(1, "indent")?.map(|v| indent_text(&v)).transpose()?;
    let separators = argument(2, "separators")?;
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    let (item_separator, key_separator) = match separators {
        Some(pair) => (pair.get_item_by_index(0)?, pair.get_item_by_index(1)?),
        None if indent.is_some() => (Value::from(","), Value::from(": ")),
        None => (Value::from(", "), Value::from(": ")),
    };
    let style = Style {
        ensure_ascii,
        sort_keys,
        indent,
        item_separator: item_separator.to_string(),
        key_separator: key_separator.to_string(),
    };
    let mut out = String::new();
    style.write(value, 0, &mut out)?;
    Ok(Value::from(out))
}

fn indent_text(indent: &Value) -> Result<String, Error> {
    match indent.as_str() {
        Some(text) => Ok(text.to_string()),
        None => {
            let n = usize::try_from(indent.clone())?;
            if n > 100 {
                return Err(invalid("tojson: an indent of more than 100".into()));
            }
            Ok(" ".repeat(n))
        }
    }
}

fn invalid(sentence: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, sentence)
}

impl Style {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: the value is nested too deeply".into()));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), out),
            ValueKind::Map => self.write_map(value, depth, out)?,
            ValueKind::Seq | ValueKind::Iterable => self.write_list(value, depth, out)?,
            kind => return Err(invalid(format!("tojson: {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn write_list(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        out.push('[');
        let mut empty = true;
        for item in value.try_iter()? {
            self.separate(&mut empty, depth + 1, out);
            self.write(&item, depth + 1, out)?;
        }
        self.close(empty, depth, ']', out);
        Ok(())
    }

    fn write_map(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        out.push('{');
        let mut empty = true;
        for key in keys {
            self.separate(&mut empty, depth + 1, out);
            match key.kind() {
                ValueKind::String => self.write_string(key.as_str().unwrap_or_default(), out),
                ValueKind::None => out.push_str("\"null\""),
                ValueKind::Bool => out.push_str(match key.is_true() {
                    true => "\"true\"",
                    false => "\"false\"",
                }),
                ValueKind::Number => self.write_string(&number(&key), out),
                kind => return Err(invalid(format!("tojson: {kind} cannot be a key"))),
            }
            out.push_str(&self.key_separator);
            self.write(&value.get_item(&key)?, depth + 1, out)?;
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
fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(x) if x.is_nan() => "NaN".into(),
        Ok(f64::INFINITY) => "Infinity".into(),
        Ok(f64::NEG_INFINITY) => "-Infinity".into(),
        _ => python_number(value),
    }
}
