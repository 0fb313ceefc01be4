//! The functions that every template has.

use super::eval::Interpreter;
use super::value::{Dict, Key, Value};
use super::{Arguments, Fault, Result, sequences};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const NAMES: &[&str] = &[
    "cycler",
    "dict",
    "joiner",
    "lipsum",
    "namespace",
    "raise_exception",
    "range",
    "strftime_now",
];

pub fn function(name: &str) -> Option<Value> {
    NAMES.iter().find(|known| **known == name).map(|name| Value::Function(name))
}

/// Fails for a field that a namespace must not have.
pub fn check_field(name: &str) -> Result<()> {
    match name.starts_with('_') {
        true => Err(Fault::new(format!("a namespace has no fields like `{name}`, with `_`"))),
        false => Ok(()),
    }
}

pub fn call(interpreter: &mut Interpreter, name: &str, args: &Arguments) -> Result<Value> {
    Ok(match name {
        "range" => sequences::range(args)?,
        "dict" => Value::Dict(Rc::new(dict(args)?)),
        "namespace" => {
            let fields = dict(args)?;
            for key in fields.keys() {
                check_field(key.0.as_str().unwrap_or_default())?;
            }
            let fields = Rc::new(RefCell::new(fields));
            interpreter.namespaces.push(fields.clone());
            Value::Namespace(fields)
        }
        "joiner" => {
            let args = args.bind(name, &["sep"], 0)?;
            let sep = args.get(0).cloned().unwrap_or_else(|| ", ".into());
            Value::Joiner(Rc::new((sep, Cell::new(false))))
        }
        "cycler" => {
            if args.positional.is_empty() || !args.named.is_empty() {
                return Err(Fault::new("`cycler` expects items"));
            }
            Value::Cycler(Rc::new((args.positional.clone(), Cell::new(0))))
        }
        "raise_exception" => {
            let args = args.bind(name, &["message"], 1)?;
            let message = args.value(0).print()?;
            return Err(Fault { message, line: 0, is_raised: true });
        }
        "strftime_now" => {
            let args = args.bind(name, &["format"], 1)?;
            interpreter.clock.format(args.text(0)?).into()
        }
        _ => {
            return Err(Fault::new(format!("`{name}`, which makes random text, is not supported")));
        }
    })
}

/// Python's `dict(*args)`: a mapping or pairs, and names.
fn dict(args: &Arguments) -> Result<Dict> {
    let mut dict = Dict::default();
    match &args.positional[..] {
        [] => {}
        [Value::Dict(other)] => dict.extend(other.iter().map(|(k, v)| (k.clone(), v.clone()))),
        [Value::Undefined(what)] => return Err(Fault::undefined(what)),
        [pairs] => {
            for pair in pairs.items()? {
                let [key, value] = &pair.items()?[..] else {
                    return Err(Fault::new("`dict` expects pairs"));
                };
                dict.insert(Key::new(key)?, value.clone());
            }
        }
        _ => return Err(Fault::new("`dict` takes one argument without a name")),
    }
    dict.extend(args.named.iter().map(|(name, value)| (Value::str_key(name), value.clone())));
    Ok(dict)
}
