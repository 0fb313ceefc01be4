//! The attributes and methods of values that are no strings.

use super::methods;
use super::ops::index;
use super::value::{self, Dict, Key, LoopState, Value, View, range_length};
use super::{Arguments, Fault, Result};
use std::rc::Rc;

/// Methods that change what they belong to, which the sandbox keeps out of reach.
fn changes(value: &Value, name: &str) -> bool {
    match value {
        Value::List(_) => {
            ["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"]
                .contains(&name)
        }
        Value::Dict(_) => ["clear", "pop", "popitem", "setdefault", "update"].contains(&name),
        _ => false,
    }
}

/// Methods that are here, and those of Python that are not.
fn methods_of(value: &Value) -> (&'static [&'static str], &'static [&'static str]) {
    match value {
        Value::Str(_) => (methods::KNOWN, methods::OTHERS),
        Value::Markup(_) => (methods::KNOWN, &["encode", "escape", "striptags", "unescape"]),
        Value::List(_) => (&["copy", "count", "index"], &[]),
        Value::Tuple(_) | Value::Group(_) | Value::Range(_) => (&["count", "index"], &[]),
        Value::Dict(_) => (&["copy", "fromkeys", "get", "items", "keys", "values"], &[]),
        Value::Function("dict") => (&["fromkeys"], &[]),
        Value::View(View::Values, _) => (&[], &["mapping"]),
        Value::View(..) => (&[], &["isdisjoint", "mapping"]),
        Value::Int(_) | Value::Bool(_) => (
            &["bit_count", "bit_length", "conjugate", "is_integer", "as_integer_ratio"],
            &["from_bytes", "to_bytes"],
        ),
        Value::Float(_) => {
            (&["conjugate", "is_integer"], &["as_integer_ratio", "from_number", "fromhex", "hex"])
        }
        Value::Cycler(_) => (&["next", "reset"], &[]),
        Value::Loop(_) => (&["changed", "cycle"], &[]),
        Value::Iterator(_) => (&[], &["close", "send", "throw"]),
        _ => (&[], &[]),
    }
}

/// Names that Python's objects have and the sandbox hides.
fn is_hidden(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "add",
        "class",
        "class_getitem",
        "contains",
        "delattr",
        "delitem",
        "dir",
        "doc",
        "eq",
        "format",
        "ge",
        "getattribute",
        "getitem",
        "getnewargs",
        "getstate",
        "gt",
        "hash",
        "iadd",
        "imul",
        "init",
        "init_subclass",
        "ior",
        "iter",
        "le",
        "len",
        "lt",
        "mul",
        "ne",
        "new",
        "or",
        "reduce",
        "reduce_ex",
        "repr",
        "reversed",
        "rmul",
        "ror",
        "setattr",
        "setitem",
        "sizeof",
        "str",
        "subclasshook",
    ];
    let inner = name.strip_prefix("__").and_then(|name| name.strip_suffix("__"));
    inner.is_some_and(|inner| NAMES.contains(&inner))
}

/// Python's `getattr(value, name)` in the sandbox; `None`: there is no such attribute.
pub fn attribute(value: &Value, name: &str) -> Result<Option<Value>> {
    let kind = value.kind();
    if is_hidden(name) || changes(value, name) {
        let what = format!("the sandbox hides the attribute `{name}` of a {kind}, which");
        return Ok(Some(Value::undefined(what)));
    }
    if let Value::Undefined(what) = value {
        return Err(Fault::undefined(what));
    }
    let (known, others) = methods_of(value);
    if others.contains(&name) {
        return Err(Fault::new(format!("the attribute `{name}` of a {kind} is not supported")));
    }
    if known.contains(&name) {
        return Ok(Some(Value::Method(Rc::new((value.clone(), name.into())))));
    }
    Ok(field(value, name))
}

/// The error for a name that is no method.
fn field(value: &Value, name: &str) -> Option<Value> {
    let int = |n: usize| Value::Int(n as i128);
    match value {
        Value::Int(_) | Value::Bool(_) => match name {
            "real" | "numerator" => value.as_int().map(Value::Int),
            "imag" => Some(int(0)),
            "denominator" => Some(int(1)),
            _ => None,
        },
        Value::Float(_) => match name {
            "real" => Some(value.clone()),
            "imag" => Some(Value::Float(0.0)),
            _ => None,
        },
        Value::Group(items) => match name {
            "grouper" => items.first().cloned(),
            "list" => items.get(1).cloned(),
            _ => None,
        },
        Value::Range([from, to, step]) => match name {
            "start" => Some(Value::Int(i128::from(*from))),
            "stop" => Some(Value::Int(i128::from(*to))),
            "step" => Some(Value::Int(i128::from(*step))),
            _ => None,
        },
        Value::Namespace(fields) => fields.borrow().get(&Value::str_key(name)).cloned(),
        Value::Macro(closure) => {
            let of = &closure.of;
            match name {
                "name" => Some(of.name.as_ref().map_or(Value::None, |name| (&**name).into())),
                "arguments" => {
                    let names = of.parameters.iter().map(|(name, _)| (&**name).into());
                    Some(Value::tuple(names.collect()))
                }
                "catch_varargs" => Some(Value::Bool(of.reads[0])),
                "catch_kwargs" => Some(Value::Bool(of.reads[1])),
                "caller" => Some(Value::Bool(of.reads[2])),
                "explicit_caller" => {
                    Some(Value::Bool(of.parameters.iter().any(|(name, _)| &**name == "caller")))
                }
                _ => None,
            }
        }
        Value::Joiner(state) => match name {
            "sep" => Some(state.0.clone()),
            "used" => Some(Value::Bool(state.1.get())),
            _ => None,
        },
        Value::Cycler(state) => match name {
            "items" => Some(Value::tuple(state.0.clone())),
            "pos" => Some(int(state.1.get())),
            "current" => state.0.get(state.1.get()).cloned(),
            _ => None,
        },
        Value::Loop(state) => of_loop(state, name),
        _ => None,
    }
}

fn of_loop(state: &LoopState, name: &str) -> Option<Value> {
    let int = |n: usize| Value::Int(n as i128);
    let (n, at) = (state.items.len(), state.index.get());
    let item = |at: Option<usize>, what: &str| {
        let item = at.and_then(|at| state.items.get(at)).cloned();
        Some(item.unwrap_or_else(|| Value::undefined(what)))
    };
    match name {
        "index" => Some(int(at + 1)),
        "index0" => Some(int(at)),
        "revindex" => Some(int(n - at)),
        "revindex0" => Some(int(n - at - 1)),
        "first" => Some(Value::Bool(at == 0)),
        "last" => Some(Value::Bool(at + 1 == n)),
        "length" => Some(int(n)),
        "depth" => Some(int(state.depth + 1)),
        "depth0" => Some(int(state.depth)),
        "previtem" => item(at.checked_sub(1), "the item before the first one"),
        "nextitem" => item(Some(at + 1), "the item behind the last one"),
        _ => None,
    }
}

/// Python's `value[key]`; `None`: there is no such item.
pub fn item(value: &Value, key: &Value) -> Result<Option<Value>> {
    if let Value::Undefined(what) = value {
        return Err(Fault::undefined(what));
    }
    Ok(match (value, key.as_int()) {
        // A list is no key, which is no error here.
        (Value::Dict(dict), _) => Key::new(key).ok().and_then(|key| dict.get(&key).cloned()),
        (_, Some(n)) => index(value, n),
        _ => None,
    })
}

/// Calls a method of a value that is no string.
pub fn call(value: &Value, name: &str, args: &Arguments) -> Result<Value> {
    match value {
        Value::Dict(dict) => of_dict(dict, name, args),
        Value::Function(_) => of_dict(&Rc::default(), name, args),
        Value::Cycler(state) => {
            args.none(name)?;
            let at = state.1.get();
            state.1.set(if name == "reset" { 0 } else { (at + 1) % state.0.len() });
            Ok(if name == "reset" { Value::None } else { state.0[at].clone() })
        }
        Value::Loop(state) if name == "cycle" => {
            let items = &args.positional;
            if items.is_empty() || !args.named.is_empty() {
                return Err(Fault::new("`cycle` expects items"));
            }
            Ok(items[state.index.get() % items.len()].clone())
        }
        Value::Loop(state) => {
            let last = state.changed.replace(Some(args.positional.clone()));
            let is_same = match last {
                Some(last) => {
                    value::equal(&Value::list(last), &Value::list(args.positional.clone()), 0)?
                }
                None => false,
            };
            Ok(Value::Bool(!is_same))
        }
        Value::Int(_) | Value::Bool(_) | Value::Float(_) => of_number(value, name, args),
        _ => of_sequence(value, name, args),
    }
}

fn of_number(value: &Value, name: &str, args: &Arguments) -> Result<Value> {
    args.none(name)?;
    let size = value.as_int().unwrap_or(0).unsigned_abs();
    Ok(match (name, value) {
        ("conjugate", Value::Float(x)) => Value::Float(*x),
        ("conjugate", _) => Value::Int(value.as_int().unwrap_or(0)),
        ("is_integer", Value::Float(x)) => Value::Bool(x.is_finite() && x.fract() == 0.0),
        ("is_integer", _) => Value::Bool(true),
        ("bit_count", _) => Value::Int(i128::from(size.count_ones())),
        ("as_integer_ratio", _) => {
            Value::tuple(vec![Value::Int(value.as_int().unwrap_or(0)), Value::Int(1)])
        }
        _ => Value::Int(i128::from(u128::BITS - size.leading_zeros())),
    })
}

fn of_dict(dict: &Rc<Dict>, name: &str, args: &Arguments) -> Result<Value> {
    Ok(match name {
        "get" => {
            let args = args.bind(name, &["", ""], 1)?;
            let found = dict.get(&Key::new(&args.value(0))?).cloned();
            found.unwrap_or_else(|| args.value(1))
        }
        "fromkeys" => {
            let args = args.bind(name, &["", ""], 1)?;
            let keys = args.value(0).items()?;
            let pairs = keys.iter().map(|key| Ok((Key::new(key)?, args.value(1))));
            Value::Dict(Rc::new(pairs.collect::<Result<_>>()?))
        }
        _ => {
            args.none(name)?;
            match name {
                "keys" => Value::View(View::Keys, dict.clone()),
                "values" => Value::View(View::Values, dict.clone()),
                "items" => Value::View(View::Items, dict.clone()),
                _ => Value::Dict(Rc::new((**dict).clone())),
            }
        }
    })
}

fn of_sequence(value: &Value, name: &str, args: &Arguments) -> Result<Value> {
    let items = value.items()?;
    match name {
        "copy" => {
            args.none(name)?;
            Ok(Value::list(items))
        }
        "count" => {
            let args = args.bind(name, &[""], 1)?;
            let mut n = 0;
            for item in &items {
                n += i128::from(value::contains(std::slice::from_ref(item), &args.value(0))?);
            }
            Ok(Value::Int(n))
        }
        _ => {
            let args = args.bind(name, &["", "", ""], 1)?;
            let n = items.len() as i128;
            let bound = |at: usize, default: i128| -> Result<i128> {
                let i = args.int(at, default)?;
                Ok(if i < 0 { (i + n).max(0) } else { i.min(n) })
            };
            for at in bound(1, 0)?..bound(2, n)? {
                let item = std::slice::from_ref(&items[at as usize]);
                if value::contains(item, &args.value(0))? {
                    return Ok(Value::Int(at));
                }
            }
            Err(Fault::new("`index`: the value is not there"))
        }
    }
}

/// How many items a range of these bounds has, within the sandbox's limit.
pub fn range(args: &Arguments) -> Result<Value> {
    const MAX_ITEMS: usize = 100_000;
    let bound = args.bind("range", &["", "", ""], 1)?;
    let int = |at: usize, default: i128| -> Result<i64> {
        let n = bound.int(at, default)?;
        i64::try_from(n).map_err(|_| Fault::new("a number of `range` is too large"))
    };
    let range = match bound.get(1) {
        None => [0, int(0, 0)?, 1],
        Some(_) => [int(0, 0)?, int(1, 0)?, int(2, 1)?],
    };
    if range[2] == 0 {
        return Err(Fault::new("the step of `range` is 0"));
    }
    match range_length(range) {
        n if n > MAX_ITEMS => {
            Err(Fault::new(format!("a range of {n} items, at most {MAX_ITEMS} are allowed")))
        }
        _ => Ok(Value::Range(range)),
    }
}
