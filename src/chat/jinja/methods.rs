//! The methods of Python's strings.

use super::arguments::Bound;
use super::ops::MAX_TEXT_BYTES;
use super::value::{Dict, Key, Value};
use super::{Arguments, Fault, Result, percent, text};
use std::rc::Rc;

/// Methods of `str` that are here.
pub const KNOWN: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];

/// Methods of `str` that are not.
pub const OTHERS: &[&str] = &["encode"];

/// Methods whose arguments get escaped, and whose texts are safe, on a text that is.
const ESCAPING: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "expandtabs",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];

/// The method on a text that is safe in HTML.
pub fn call_safe(text: &str, name: &str, args: &Arguments) -> Result<Value> {
    if name.starts_with("format") {
        return Err(Fault::new("`format` of escaped text is not supported"));
    }
    if !ESCAPING.contains(&name) {
        return call(text, name, args);
    }
    let escaped = |value: &Value| match value {
        Value::Str(text) => Value::Markup(text::escape(text).into()),
        other => other.clone(),
    };
    let positional = match (name, args.positional.first()) {
        ("join", Some(items)) => {
            let items = Value::list(items.items()?.iter().map(escaped).collect());
            [&[items], &args.positional[1..]].concat()
        }
        ("split" | "rsplit" | "partition" | "rpartition", _) => args.positional.clone(),
        _ => args.positional.iter().map(escaped).collect(),
    };
    let args = Arguments { positional, named: args.named.clone() };
    let safe = |value: &Value| match value {
        Value::Str(text) => Value::Markup(text.clone()),
        other => other.clone(),
    };
    Ok(match call(text, name, &args)? {
        Value::List(items) => Value::list(items.iter().map(safe).collect()),
        Value::Tuple(items) => Value::tuple(items.iter().map(safe).collect()),
        value => safe(&value),
    })
}

/// The method on a plain text.
pub fn call(text: &str, name: &str, args: &Arguments) -> Result<Value> {
    if let Some(value) = without_arguments(text, name)? {
        args.none(name)?;
        return Ok(value);
    }
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => strip(text, name, args)?.into(),
        "split" | "rsplit" => split(text, name, args)?,
        "splitlines" => {
            let args = args.bind(name, &["keepends"], 0)?;
            let keep = args.int(0, 0)? != 0;
            Value::list(text::lines(text, keep).into_iter().map(Value::from).collect())
        }
        "partition" | "rpartition" => partition(text, name, args)?,
        "startswith" | "endswith" => edge(text, name, args)?,
        "find" | "rfind" | "index" | "rindex" | "count" => find(text, name, args)?,
        "removeprefix" | "removesuffix" => {
            let args = args.bind(name, &[""], 1)?;
            let part = args.text(0)?;
            let rest = match name {
                "removeprefix" => text.strip_prefix(part),
                _ => text.strip_suffix(part),
            };
            rest.unwrap_or(text).into()
        }
        "replace" => {
            let args = args.bind(name, &["", "", ""], 2)?;
            replace(text, args.text(0)?, args.text(1)?, args.int(2, -1)?)?.into()
        }
        "join" => {
            let args = args.bind(name, &[""], 1)?;
            let items = args.value(0).items()?;
            let texts = items.iter().map(|item| {
                let kind = item.kind();
                item.as_str().ok_or_else(|| Fault::new(format!("`join` expects texts, got {kind}")))
            });
            let texts = texts.collect::<Result<Vec<_>>>()?;
            let n_bytes = texts.iter().map(|item| item.len() + text.len()).sum::<usize>();
            if n_bytes > 4 * MAX_TEXT_BYTES {
                return Err(Fault::new("the result of `join` is too large"));
            }
            texts.join(text).into()
        }
        "center" | "ljust" | "rjust" | "zfill" => padded(text, name, args)?.into(),
        "maketrans" => table(args)?,
        "translate" => translate(text, &args.bind(name, &[""], 1)?.value(0))?.into(),
        "expandtabs" => {
            let size = args.bind(name, &["tabsize"], 0)?.int(0, 8)?;
            expand_tabs(text, percent::width(usize::try_from(size).unwrap_or(0))?)?.into()
        }
        _ => return Err(Fault::new(format!("the method `{name}` of a text is not supported"))),
    })
}

fn strip<'t>(text: &'t str, name: &str, args: &Arguments) -> Result<&'t str> {
    let args = args.bind(name, &[""], 0)?;
    let chars = args.some(0).map(|_| args.text(0)).transpose()?;
    let goes = |c: char| chars.map_or_else(|| text::is_space(c), |all| all.contains(c));
    Ok(match name {
        "strip" => text.trim_matches(goes),
        "lstrip" => text.trim_start_matches(goes),
        _ => text.trim_end_matches(goes),
    })
}

fn partition(text: &str, name: &str, args: &Arguments) -> Result<Value> {
    let args = args.bind(name, &[""], 1)?;
    let mark = separator(&args)?;
    let found = match name {
        "partition" => text.split_once(mark),
        _ => text.rsplit_once(mark),
    };
    let parts = match found {
        Some((before, after)) => [before, mark, after],
        None if name == "partition" => [text, "", ""],
        None => ["", "", text],
    };
    Ok(Value::tuple(parts.map(Value::from).to_vec()))
}

fn padded(text: &str, name: &str, args: &Arguments) -> Result<String> {
    if name == "zfill" {
        let width = args.bind(name, &[""], 1)?.int(0, 0)?;
        let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
        let sign = &text[..text.len() - digits.len()];
        return Ok(sign.to_string() + &pad(digits, "rjust", width - sign.len() as i128, '0')?);
    }
    let args = args.bind(name, &["", ""], 1)?;
    let mut fill = args.get(1).map_or(Ok(" "), |_| args.text(1))?.chars();
    match (fill.next(), fill.next()) {
        (Some(fill), None) => pad(text, name, args.int(0, 0)?, fill),
        _ => Err(Fault::new(format!("`{name}` fills with one character"))),
    }
}

fn without_arguments(text: &str, name: &str) -> Result<Option<Value>> {
    let all = |fits: fn(char) -> bool| Value::Bool(!text.is_empty() && text.chars().all(fits));
    Ok(Some(match name {
        "upper" => text.to_uppercase().into(),
        "lower" => text.to_lowercase().into(),
        "title" => text::title(text).into(),
        "capitalize" => text::capitalize(text).into(),
        "swapcase" => text::swapcase(text).into(),
        "casefold" => match text::casefold(text) {
            Some(folded) => folded.into(),
            None => return Err(Fault::new("`casefold` does not know a character of this text")),
        },
        "isspace" => all(text::is_space),
        "isascii" => Value::Bool(text.is_ascii()),
        "isalpha" => all(text::is_letter),
        "isdecimal" => all(text::is_decimal),
        "isdigit" => all(|c| text::is_decimal(c) || text::is_superscript(c)),
        "isnumeric" => all(text::is_numeric),
        "isalnum" => all(text::is_alphanumeric),
        "isprintable" => Value::Bool(text.chars().all(text::is_printable)),
        "isidentifier" => {
            let mut chars = text.chars();
            let starts = chars.next().is_some_and(|c| c == '_' || text::is_letter(c));
            Value::Bool(starts && chars.all(text::is_word))
        }
        "islower" | "isupper" => {
            let cased = || text.chars().filter(|c| text::is_cased(*c));
            let fits =
                |c: char| if name == "islower" { c.is_lowercase() } else { c.is_uppercase() };
            Value::Bool(cased().next().is_some() && cased().all(fits))
        }
        "istitle" => {
            let has_words = text.chars().any(text::is_cased);
            Value::Bool(has_words && text::title(text) == text)
        }
        _ => return Ok(None),
    }))
}

fn separator(args: &Bound) -> Result<&str> {
    match args.text(0)? {
        "" => Err(Fault::new("an empty separator")),
        mark => Ok(mark),
    }
}

fn split(text: &str, name: &str, args: &Arguments) -> Result<Value> {
    let args = args.bind(name, &["sep", "maxsplit"], 0)?;
    let most = usize::try_from(args.int(1, -1)?).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    let is_left = name == "split";
    if args.some(0).is_some() {
        let mark = separator(&args)?;
        let n = most.saturating_add(1);
        match is_left {
            true => parts.extend(text.splitn(n, mark)),
            false => parts.extend(text.rsplitn(n, mark)),
        }
    } else {
        let mut rest = text;
        loop {
            rest = match is_left {
                true => rest.trim_start_matches(text::is_space),
                false => rest.trim_end_matches(text::is_space),
            };
            if rest.is_empty() {
                break;
            }
            let split = match is_left {
                true => rest.find(text::is_space).map(|at| rest.split_at(at)),
                false => {
                    rest.char_indices().rev().find(|(_, c)| text::is_space(*c)).map(|(at, c)| {
                        let (before, after) = rest.split_at(at + c.len_utf8());
                        (after, before)
                    })
                }
            };
            match split.filter(|_| parts.len() < most) {
                Some((part, after)) => {
                    parts.push(part);
                    rest = after;
                }
                None => {
                    parts.push(rest);
                    break;
                }
            }
        }
    }
    if !is_left {
        parts.reverse();
    }
    Ok(Value::list(parts.into_iter().map(Value::from).collect()))
}

/// The part of a text from one character to another, and how many characters are before it.
fn window<'t>(text: &'t str, args: &Bound) -> Result<Option<(usize, &'t str)>> {
    let n = text.chars().count() as i128;
    let bound = |at: usize, default: i128| -> Result<i128> {
        let i = if args.some(at).is_some() { args.int(at, default)? } else { default };
        Ok(if i < 0 { (i + n).max(0) } else { i })
    };
    let (start, end) = (bound(1, 0)?, bound(2, n)?.min(n));
    if start > end {
        return Ok(None);
    }
    let byte = |i: i128| text.char_indices().nth(i as usize).map_or(text.len(), |(at, _)| at);
    Ok(Some((start as usize, &text[byte(start)..byte(end)])))
}

fn edge(text: &str, name: &str, args: &Arguments) -> Result<Value> {
    let args = args.bind(name, &["", "", ""], 1)?;
    let Some((_, part)) = window(text, &args)? else { return Ok(Value::Bool(false)) };
    let fits = |edge: &str| match name {
        "startswith" => part.starts_with(edge),
        _ => part.ends_with(edge),
    };
    let first = args.value(0);
    let Some(edges) = first.as_tuple() else { return Ok(Value::Bool(fits(args.text(0)?))) };
    for edge in edges.iter() {
        let text = edge.as_str();
        let text = text.ok_or_else(|| Fault::new(format!("`{name}` expects texts")))?;
        if fits(text) {
            return Ok(Value::Bool(true));
        }
    }
    Ok(Value::Bool(false))
}

fn find(text: &str, name: &str, args: &Arguments) -> Result<Value> {
    let args = args.bind(name, &["", "", ""], 1)?;
    let part = args.text(0)?;
    let window = window(text, &args)?;
    if name == "count" {
        let n = window.map_or(0, |(_, text)| match part {
            "" => text.chars().count() + 1,
            part => text.matches(part).count(),
        });
        return Ok(Value::Int(n as i128));
    }
    let found = window.and_then(|(before, text)| {
        let at = if name.starts_with('r') { text.rfind(part) } else { text.find(part) };
        at.map(|at| before + text[..at].chars().count())
    });
    match found {
        Some(at) => Ok(Value::Int(at as i128)),
        None if name.ends_with("find") => Ok(Value::Int(-1)),
        None => Err(Fault::new(format!("`{name}`: the text is not there"))),
    }
}

/// `text.replace(old, new, count)`; a negative count is all of them.
pub fn replace(text: &str, old: &str, new: &str, count: i128) -> Result<String> {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let n = if old.is_empty() { text.len() + 1 } else { text.matches(old).count() };
    let added = n.min(count).saturating_mul(new.len().saturating_sub(old.len()));
    if added > 4 * MAX_TEXT_BYTES {
        return Err(Fault::new("the result of `replace` is too large"));
    }
    Ok(text.replacen(old, new, count))
}

/// The text in a field of `width` characters; `name` is the method.
pub fn pad(text: &str, name: &str, width: i128, fill: char) -> Result<String> {
    let width = percent::width(usize::try_from(width.max(0)).unwrap_or(usize::MAX))?;
    let n = width.saturating_sub(text.chars().count());
    let left = match name {
        "ljust" => 0,
        "rjust" => n,
        // Python's rule for an odd number of them.
        _ => n / 2 + (n & width & 1),
    };
    let fill = |n: usize| std::iter::repeat_n(fill, n).collect::<String>();
    Ok(fill(left) + text + &fill(n - left))
}

/// `str.maketrans`: what each character becomes, by its number.
fn table(args: &Arguments) -> Result<Value> {
    let args = args.bind("maketrans", &["", "", ""], 1)?;
    let number = |c: char| Value::Int(i128::from(u32::from(c)));
    let mut table = Dict::default();
    if let (Value::Dict(dict), None) = (args.value(0), args.get(1)) {
        for (key, value) in dict.iter() {
            let mut chars = key.0.as_str().map(str::chars);
            let first = chars.as_mut().and_then(Iterator::next);
            let key = match (first, chars.and_then(|mut chars| chars.next())) {
                (Some(c), None) => number(c),
                (None, _) if key.0.as_int().is_some() => key.0.clone(),
                _ => return Err(Fault::new("`maketrans` expects single characters")),
            };
            table.insert(Key::new(&key)?, value.clone());
        }
        return Ok(Value::Dict(Rc::new(table)));
    }
    let (from, to) = (args.text(0)?, args.text(1)?);
    if from.chars().count() != to.chars().count() {
        return Err(Fault::new("`maketrans` expects texts of one length"));
    }
    for (from, to) in from.chars().zip(to.chars()) {
        table.insert(Key(number(from)), number(to));
    }
    for c in args.get(2).map_or(Ok(""), |_| args.text(2))?.chars() {
        table.insert(Key(number(c)), Value::None);
    }
    Ok(Value::Dict(Rc::new(table)))
}

fn translate(text: &str, table: &Value) -> Result<String> {
    let Value::Dict(table) = table else {
        return Err(Fault::new("`translate` expects a mapping of characters' numbers"));
    };
    let mut out = String::new();
    for c in text.chars() {
        match table.get(&Key(Value::Int(i128::from(u32::from(c))))) {
            None => out.push(c),
            Some(Value::None) => {}
            Some(Value::Str(text)) => out.push_str(text),
            Some(value) => {
                let code = value.as_int().and_then(|n| u32::try_from(n).ok());
                let c = code.and_then(char::from_u32);
                out.push(c.ok_or_else(|| Fault::new("`translate`: this is no character"))?);
            }
        }
        if out.len() > MAX_TEXT_BYTES {
            return Err(Fault::new("the result of `translate` is too large"));
        }
    }
    Ok(out)
}

fn expand_tabs(text: &str, size: usize) -> Result<String> {
    let (mut out, mut column) = (String::new(), 0);
    for c in text.chars() {
        match c {
            '\t' => {
                let n = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', n));
                column += n;
            }
            c => {
                out.push(c);
                column = if c == '\n' || c == '\r' { 0 } else { column + 1 };
            }
        }
        if out.len() > MAX_TEXT_BYTES {
            return Err(Fault::new("the result of `expandtabs` is too large"));
        }
    }
    Ok(out)
}
