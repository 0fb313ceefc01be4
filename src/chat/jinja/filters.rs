//! Jinja's filters: `value | upper`. Those of lists are in `lists`.

use super::eval::Interpreter;
use super::ops::{self, MAX_TEXT_BYTES};
use super::value::{Dict, Key, Value};
use super::wrap::{Links, Wrap, without_tags};
use super::{Arguments, Fault, Result, json, lists, methods, numbers, percent, sequences, text};
use std::rc::Rc;

const NAMES: &[&str] = &[
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap",
    "xmlattr",
];

pub fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

/// The value after the filter.
pub fn call(
    interpreter: &mut Interpreter,
    name: &str,
    value: &Value,
    args: &Arguments,
) -> Result<Value> {
    interpreter.spend(1)?;
    if let Some(value) = lists::call(interpreter, name, value, args)? {
        return Ok(value);
    }
    Ok(match name {
        "abs" | "int" | "float" | "round" | "filesizeformat" => numbers::call(name, value, args)?,
        "upper" | "lower" | "capitalize" => method(value, name, args)?,
        "trim" => {
            let chars = args.bind(name, &["chars"], 0)?.some(0).cloned();
            method(value, "strip", &Arguments::of(chars.into_iter().collect()))?
        }
        "center" => {
            let width = args.bind(name, &["width"], 0)?.int(0, 80)?;
            method(value, "center", &Arguments::of(vec![Value::Int(width)]))?
        }
        "title" => {
            args.none(name)?;
            title(&value.print()?).into()
        }
        "attr" => {
            let args = args.bind(name, &["name"], 1)?;
            let found = sequences::attribute(value, args.text(0)?)?;
            found.unwrap_or_else(|| {
                Value::undefined(format!("`{}`", args.text(0).unwrap_or_default()))
            })
        }
        "d" | "default" => {
            let args = args.bind(name, &["default_value", "boolean"], 0)?;
            match value.is_undefined() || args.is_true(1) && !value.is_true() {
                true => args.get(0).cloned().unwrap_or_else(|| "".into()),
                false => value.clone(),
            }
        }
        "string" => {
            args.none(name)?;
            soft(value)?
        }
        "format" => format(value, args)?,
        "replace" => {
            let args = args.bind(name, &["old", "new", "count"], 2)?;
            let count = if args.some(2).is_some() { args.int(2, -1)? } else { -1 };
            let (old, new) = (args.value(0).print()?, args.value(1).print()?);
            methods::replace(&value.print()?, &old, &new, count)?.into()
        }
        "indent" => indent(value, args)?,
        "truncate" => truncate(value, args)?,
        "wordcount" => {
            args.none(name)?;
            let text = value.print()?;
            let words = text.split(|c| !text::is_word(c)).filter(|word| !word.is_empty());
            Value::Int(words.count() as i128)
        }
        "wordwrap" => wordwrap(value, args)?,
        "e" | "escape" | "forceescape" | "safe" | "striptags" | "urlencode" | "urlize"
        | "xmlattr" => html(name, value, args)?,
        "tojson" => json::tojson(value, args)?,
        "pprint" => {
            args.none(name)?;
            pprint(value)?.into()
        }
        "random" => random(value, args)?,
        _ => return Err(Fault::new(format!("unknown filter `{name}`"))),
    })
}

/// The one item; which of several it would be is not known.
fn random(value: &Value, args: &Arguments) -> Result<Value> {
    args.none("random")?;
    match (value.length(), value.items()?.pop()) {
        (Some(0), _) => Ok(Value::undefined("a random item of no items")),
        (Some(1), Some(item)) if !matches!(value, Value::Dict(_)) => Ok(item),
        _ => Err(Fault::new("`random` of several items is not supported")),
    }
}

/// Filters that make HTML, or read it.
fn html(name: &str, value: &Value, args: &Arguments) -> Result<Value> {
    match name {
        "urlize" => return urlize(value, args),
        "xmlattr" => return xmlattr(value, args),
        _ => args.none(name)?,
    }
    Ok(match (name, value) {
        ("e" | "escape", Value::Markup(_)) => value.clone(),
        ("safe", _) => Value::Markup(value.print()?.into()),
        ("striptags", _) => without_tags(&value.print()?)?.into(),
        ("urlencode", _) => urlencode(value)?.into(),
        _ => Value::Markup(text::escape(&value.print()?).into()),
    })
}

/// A text, safe if the value is, of any value.
fn soft(value: &Value) -> Result<Value> {
    match value {
        Value::Str(_) | Value::Markup(_) => Ok(value.clone()),
        _ => Ok(value.print()?.into()),
    }
}

/// A method of the value's text.
fn method(value: &Value, name: &str, args: &Arguments) -> Result<Value> {
    match soft(value)? {
        Value::Markup(text) => methods::call_safe(&text, name, args),
        text => methods::call(text.as_str().unwrap_or_default(), name, args),
    }
}

/// The value, which must be a text.
fn expect_text<'v>(filter: &str, value: &'v Value) -> Result<&'v str> {
    match (value.as_str(), value) {
        (Some(text), _) => Ok(text),
        (_, Value::Undefined(what)) => Err(Fault::undefined(what)),
        _ => Err(Fault::new(format!("`{filter}` expects a text, got a {}", value.kind()))),
    }
}

/// A capital at the beginning, and behind blanks, `-`, and opening brackets.
fn title(text: &str) -> String {
    let is_mark = |c: char| text::is_space(c) || "-({[<".contains(c);
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|c| is_mark(c) != is_mark(first)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        out.extend(first.to_uppercase());
        out.push_str(&word[first.len_utf8()..].to_lowercase());
        rest = after;
    }
    out
}

fn format(value: &Value, args: &Arguments) -> Result<Value> {
    let given = match (args.positional.is_empty(), args.named.is_empty()) {
        (false, false) => {
            return Err(Fault::new("`format` takes arguments either with or without names"));
        }
        (_, true) => Value::tuple(args.positional.clone()),
        _ => {
            let named = args.named.iter();
            let pairs = named.map(|(name, value)| (Value::str_key(name), value.clone()));
            Value::Dict(Rc::new(pairs.collect()))
        }
    };
    match soft(value)? {
        Value::Markup(_) => Err(Fault::new("`format` of escaped text is not supported")),
        text => Ok(percent::format(text.as_str().unwrap_or_default(), &given)?.into()),
    }
}

fn indent(value: &Value, args: &Arguments) -> Result<Value> {
    let args = args.bind("indent", &["width", "first", "blank"], 0)?;
    let text = expect_text("indent", value)?;
    let indention = match args.get(0) {
        Some(Value::Str(text)) => text.to_string(),
        Some(Value::Markup(_)) => return Err(Fault::new("`indent`: a width of escaped text")),
        _ => {
            let n = args.int(0, 4)?.max(0);
            " ".repeat(percent::width(usize::try_from(n).unwrap_or(usize::MAX))?)
        }
    };
    let (first, blank) = (args.is_true(1), args.is_true(2));
    let whole = format!("{text}\n");
    let lines = text::lines(&whole, false);
    if lines.len().saturating_mul(indention.len()) > MAX_TEXT_BYTES {
        return Err(Fault::new("the result of `indent` is too large"));
    }
    let mut out = String::new();
    for (n, line) in lines.into_iter().enumerate() {
        out.push_str(if n == 0 { "" } else { "\n" });
        if if n == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indention);
        }
        out.push_str(line);
    }
    Ok(match value {
        Value::Markup(_) => Value::Markup(out.into()),
        _ => out.into(),
    })
}

fn truncate(value: &Value, args: &Arguments) -> Result<Value> {
    let args = args.bind("truncate", &["length", "killwords", "end", "leeway"], 0)?;
    let end = args.get(2).map_or(Ok("..."), |_| args.text(2))?;
    let leeway = if args.some(3).is_some() { args.int(3, 5)? } else { 5 };
    let (length, n_end) = (args.int(0, 255)?, end.chars().count() as i128);
    if length < n_end || leeway < 0 {
        return Err(Fault::new("`truncate`: the length or the leeway is too small"));
    }
    let n = value.length().ok_or_else(|| Fault::new("`truncate` expects a text"))?;
    if n as i128 <= length + leeway {
        return Ok(value.clone());
    }
    let Value::Str(text) = value else {
        return Err(Fault::new(format!("`truncate` of a {} is not supported", value.kind())));
    };
    let cut: String = text.chars().take((length - n_end) as usize).collect();
    let kept = match args.is_true(1) {
        true => &cut[..],
        false => cut.rsplit_once(' ').map_or(&cut[..], |(before, _)| before),
    };
    Ok(format!("{kept}{end}").into())
}

fn wordwrap(value: &Value, args: &Arguments) -> Result<Value> {
    const NAMES: &[&str] = &["width", "break_long_words", "wrapstring", "break_on_hyphens"];
    let args = args.bind("wordwrap", NAMES, 0)?;
    let text = expect_text("wordwrap", value)?;
    let wrap = Wrap {
        width: usize::try_from(args.int(0, 79)?).unwrap_or(0),
        break_long_words: args.get(1).is_none_or(Value::is_true),
        break_on_hyphens: args.get(3).is_none_or(Value::is_true),
    };
    let mark = if args.some(2).is_some() { args.text(2)? } else { "\n" };
    let lines = text::lines(text, false).into_iter().map(|line| Ok(wrap.lines(line)?.join(mark)));
    Ok(lines.collect::<Result<Vec<_>>>()?.join(mark).into())
}

/// Percent signs for all that addresses do not have.
fn quoted(value: &Value, for_query: bool) -> Result<String> {
    let mut out = String::new();
    for byte in value.print()?.bytes() {
        match byte {
            b'/' if !for_query => out.push('/'),
            b' ' if for_query => out.push('+'),
            b'_' | b'.' | b'-' | b'~' => out.push(char::from(byte)),
            byte if byte.is_ascii_alphanumeric() => out.push(char::from(byte)),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    Ok(out)
}

fn urlencode(value: &Value) -> Result<String> {
    let pair = |key: &Value, value: &Value| -> Result<String> {
        Ok(format!("{}={}", quoted(key, true)?, quoted(value, true)?))
    };
    let pairs: Result<Vec<String>> = match value {
        Value::Dict(dict) => dict.iter().map(|(key, value)| pair(&key.0, value)).collect(),
        _ if value.as_str().is_some() => return quoted(value, false),
        _ => match value.items() {
            Err(_) => return quoted(value, false),
            Ok(items) => items
                .iter()
                .map(|item| match &item.items()?[..] {
                    [key, value] => pair(key, value),
                    _ => Err(Fault::new("`urlencode` expects pairs")),
                })
                .collect(),
        },
    };
    Ok(pairs?.join("&"))
}

fn urlize(value: &Value, args: &Arguments) -> Result<Value> {
    const NAMES: &[&str] = &["trim_url_limit", "nofollow", "target", "rel", "extra_schemes"];
    let args = args.bind("urlize", NAMES, 0)?;
    let limit = match args.some(0) {
        None => None,
        Some(_) => Some(usize::try_from(args.int(0, 0)?).unwrap_or(0)),
    };
    let rel = if args.some(3).is_some() { args.text(3)? } else { "" };
    let mut parts: Vec<&str> = rel.split(text::is_space).filter(|part| !part.is_empty()).collect();
    parts.push("noopener");
    parts.extend(args.is_true(1).then_some("nofollow"));
    parts.sort_unstable();
    parts.dedup();
    let mut attributes = format!(" rel=\"{}\"", text::escape(&parts.join(" ")));
    if args.some(2).is_some() && !args.text(2)?.is_empty() {
        attributes += &format!(" target=\"{}\"", text::escape(args.text(2)?));
    }
    let items = args.some(4).map_or(Ok(Vec::new()), Value::items)?;
    let schemes: Vec<&str> = items.iter().filter_map(Value::as_str).collect();
    for scheme in &schemes {
        let name = scheme.trim_end_matches('/').strip_suffix(':').unwrap_or_default();
        let fits = |c: char| text::is_word(c) || ".+-".contains(c);
        if name.chars().count() < 2 || !name.chars().all(fits) || scheme.len() > name.len() + 3 {
            return Err(Fault::new(format!("`urlize`: `{scheme}` is no scheme of addresses")));
        }
    }
    match value {
        Value::Markup(_) => Err(Fault::new("`urlize` of escaped text is not supported")),
        _ => Ok(Links { limit, attributes, schemes }.around(&value.print()?).into()),
    }
}

fn xmlattr(value: &Value, args: &Arguments) -> Result<Value> {
    let args = args.bind("xmlattr", &["autospace"], 0)?;
    let Value::Dict(dict) = value else {
        return Err(Fault::new(format!("`xmlattr` expects a mapping, got a {}", value.kind())));
    };
    let escaped = |value: &Value| -> Result<String> {
        match value {
            Value::Markup(text) => Ok(text.to_string()),
            _ => Ok(text::escape(&value.print()?)),
        }
    };
    let mut items = Vec::new();
    for (key, value) in dict.iter() {
        if value.is_none() || value.is_undefined() {
            continue;
        }
        let name = expect_text("xmlattr", &key.0)?;
        if name.contains(|c: char| matches!(c, '\t'..='\r' | ' ' | '/' | '>' | '=')) {
            return Err(Fault::new(format!("`xmlattr`: `{name}` is no name of an attribute")));
        }
        items.push(format!("{}=\"{}\"", escaped(&key.0)?, escaped(value)?));
    }
    let text = items.join(" ");
    let space = args.get(0).is_none_or(Value::is_true) && !text.is_empty();
    Ok((if space { " " } else { "" }.to_string() + &text).into())
}

/// Python's `pprint.pformat`, as long as it is one line.
fn pprint(value: &Value) -> Result<String> {
    const WIDTH: usize = 80;
    let text = sorted(value, 0)?.repr()?;
    match text.chars().count() <= WIDTH {
        true => Ok(text),
        false => Err(Fault::new(format!("`pprint` of more than {WIDTH} characters"))),
    }
}

/// The value with each mapping in the order of its keys.
fn sorted(value: &Value, depth: usize) -> Result<Value> {
    if depth > super::value::MAX_DEPTH {
        return Err(Fault::new("`pprint`: the value is nested too deeply"));
    }
    let all = |items: &[Value]| -> Result<Vec<Value>> {
        items.iter().map(|item| sorted(item, depth + 1)).collect()
    };
    Ok(match value {
        Value::List(items) => Value::list(all(items)?),
        Value::Tuple(items) | Value::Group(items) => Value::tuple(all(items)?),
        Value::Dict(dict) => {
            let mut keys: Vec<&Key> = dict.keys().collect();
            if keys.len() > 1 && !keys.iter().all(|key| key.0.as_str().is_some()) {
                return Err(Fault::new("`pprint` of keys that are no texts is not supported"));
            }
            keys.sort_by(|a, b| a.0.as_str().cmp(&b.0.as_str()));
            let pairs =
                keys.into_iter().map(|key| Ok((key.clone(), sorted(&dict[key], depth + 1)?)));
            Value::Dict(Rc::new(pairs.collect::<Result<Dict>>()?))
        }
        other => other.clone(),
    })
}

/// `start` and the items, added up.
pub fn sum(items: &[Value], start: Value) -> Result<Value> {
    if start.as_str().is_some() {
        return Err(Fault::new("`sum` does not add texts"));
    }
    items.iter().try_fold(start, |sum, item| ops::binary(super::ast::Binary::Add, &sum, item))
}
