//! The Jinja environment of Hugging Face's `apply_chat_template`: `trim_blocks`, `lstrip_blocks`,
//! loop controls, Python's string and dictionary methods, `tojson`, `raise_exception`,
//! `strftime_now`; and no access to files or other templates.

use super::clock::Clock;
use super::{format, json, limits};
use crate::{Error, Result};
use minijinja::value::{Kwargs, Rest};
use minijinja::{AutoEscape, Environment, ErrorKind, State, Value};
use minijinja_contrib::pycompat;
use regex::Regex;
use std::collections::HashSet;
use std::sync::{Arc, LazyLock};

/// The name under which the one template of an environment is stored.
pub const NAME: &str = "chat_template";

/// Marks errors that a template raised itself.
pub const RAISED: &str = "raise_exception: ";

/// Compiles a template in a thread of its own, as nesting costs the parser stack.
pub fn compile(source: &str, clock: Clock) -> Result<Arc<Environment<'static>>> {
    if source.len() > limits::MAX_SOURCE_BYTES {
        let (max, got) = (limits::MAX_SOURCE_BYTES, source.len());
        return Err(Error::Invalid(format!(
            "the chat template: expected at most {max} bytes, got {got}"
        )));
    }
    let source = with_list_methods(&without_generation_tags(source));
    limits::guarded(move || {
        let mut environment = environment(clock).map_err(describe)?;
        environment.add_template_owned(NAME, source).map_err(describe)?;
        Ok(Arc::new(environment))
    })
}

/// Names that a template reads and does not make itself. Walking the tree costs stack as parsing it
/// does.
pub fn variables(environment: Arc<Environment<'static>>) -> Result<HashSet<String>> {
    limits::guarded(move || {
        let template = environment.get_template(NAME).map_err(describe)?;
        Ok(template.undeclared_variables(false))
    })
}

/// What went wrong in a template, as one sentence: the innermost error of the engine (includes wrap
/// theirs), and what lies under it (a failed write).
pub fn describe(error: minijinja::Error) -> Error {
    use std::error::Error as _;
    let (mut inner, mut cause) = (&error, None);
    while let Some(source) = inner.source() {
        match source.downcast_ref::<minijinja::Error>() {
            Some(deeper) => inner = deeper,
            None => {
                cause = Some(source.to_string());
                break;
            }
        }
    }
    let detail = inner.detail().unwrap_or_default();
    if let Some(message) = detail.strip_prefix(RAISED) {
        return Error::Invalid(format!("the chat template refuses these messages: {message}"));
    }
    let place = inner.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    let mut sentence = format!("the chat template{place}: {}", inner.kind());
    for part in [detail].into_iter().filter(|d| !d.is_empty()).chain(cause.as_deref()) {
        sentence.push_str(": ");
        sentence.push_str(part);
    }
    Error::Invalid(sentence)
}

fn environment(clock: Clock) -> std::result::Result<Environment<'static>, minijinja::Error> {
    let mut env = Environment::new();
    let mut syntax = minijinja::syntax::SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    env.set_syntax(syntax.build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(pycompat::unknown_method_callback);
    env.set_formatter(format::formatter);
    env.set_fuel(Some(limits::FUEL));
    env.set_recursion_limit(limits::RECURSION);
    env.add_filter("tojson", |value: &Value, args: Rest<Value>, kwargs: Kwargs| {
        json::tojson(value, &args, &kwargs)
    });
    env.add_filter("string", |value: &Value| format::python_str(value));
    env.add_test("iterable", is_iterable);
    env.add_test("sequence", is_sequence);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", move |format: &str| clock.format(format));
    Ok(env)
}

/// Python's `iter(value)` works. minijinja's own test takes `none` for an empty list, and templates
/// ask for `tools is iterable and tools | length > 0`.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Python's `len(value)` and `value[i]` work: strings and dictionaries are sequences too.
fn is_sequence(value: &Value) -> bool {
    use minijinja::value::ValueKind::{Map, Seq, String, Undefined};
    matches!(value.kind(), Map | Seq | String | Undefined)
}

fn raise_exception(_: &State, message: &Value) -> std::result::Result<Value, minijinja::Error> {
    let detail = format!("{RAISED}{}", format::python_str(message)?);
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, detail))
}

/// JSON as the template's values.
pub fn value(json: serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(b),
        Json::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(i), ..) => Value::from(i),
            (_, Some(u), _) => Value::from(u),
            (.., x) => Value::from(x.unwrap_or(f64::NAN)),
        },
        Json::String(s) => Value::from(s),
        Json::Array(items) => items.into_iter().map(value).collect(),
        Json::Object(fields) => Value::from_pairs(fields.into_iter().map(|(k, v)| (k, value(v)))),
    }
}

/// `{% generation %}` marks the assistant's text for training. It becomes a condition that always
/// holds, so that the tag's whitespace control keeps its meaning.
fn without_generation_tags(source: &str) -> String {
    static TAG: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("a valid pattern")
    });
    TAG.replace_all(source, |tag: &regex::Captures| {
        let statement = if tag.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {statement} {}%}}", &tag[1], &tag[3])
    })
    .into_owned()
}

/// Python's lists change in place, Jinja's here do not. `append` and `pop(0)` of a list in a
/// namespace become assignments, which mean the same. Kimi's templates have them.
fn with_list_methods(source: &str) -> String {
    static APPEND: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\{%([-+]?)\s*set\s+\w+\s*=\s*(\w+\.\w+)\.append\((.*?)\)\s*([-+]?)%\}")
            .expect("a valid pattern")
    });
    static POP: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\{%([-+]?)\s*set\s+(\w+)\s*=\s*(\w+\.\w+)\.pop\(0\)\s*([-+]?)%\}")
            .expect("a valid pattern")
    });
    let source = APPEND.replace_all(source, "{%$1 set $2 = $2 + [$3] $4%}");
    POP.replace_all(&source, "{%$1 set $2 = $3[0] -%}{%- set $3 = $3[1:] $4%}").into_owned()
}
