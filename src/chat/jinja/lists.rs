//! Jinja's filters of lists and mappings.

use super::arguments::Bound;
use super::eval::Interpreter;
use super::value::{self, Iterator, Key, Value, View};
use super::{Arguments, Fault, Result, checks, filters, within_bounds};
use std::cell::RefCell;
use std::cmp::Ordering;
use std::collections::HashSet;
use std::rc::Rc;

/// The most items that a count makes of nothing.
const MAX_FILL: i128 = 100_000;

/// The value after the filter; `None`: this filter is none of lists.
pub fn call(
    interpreter: &mut Interpreter,
    name: &str,
    value: &Value,
    args: &Arguments,
) -> Result<Option<Value>> {
    Ok(Some(match name {
        "count" | "length" => {
            args.none(name)?;
            let n = value.length();
            let n = n.ok_or_else(|| Fault::new(format!("a {} has no length", value.kind())))?;
            Value::Int(n as i128)
        }
        "list" => {
            args.none(name)?;
            Value::list(interpreter.items(value)?)
        }
        "items" => {
            args.none(name)?;
            match value {
                Value::Undefined(_) => Value::iterator(Vec::new()),
                Value::Dict(dict) => Value::iterator(View::Items.items(dict)),
                _ => failing("`items` expects a mapping".into()),
            }
        }
        "first" | "last" => {
            args.none(name)?;
            edge(interpreter, name, value)?
        }
        "reverse" => {
            args.none(name)?;
            reverse(interpreter, value)?
        }
        "join" => join(interpreter, value, args)?,
        "sum" => {
            let args = args.bind(name, &["attribute", "start"], 0)?;
            let getter = Getter::new(args.some(0), false)?;
            let items = interpreter.items(value)?;
            let items = items.iter().map(|item| getter.get(interpreter, item));
            let items = items.collect::<Result<Vec<_>>>()?;
            filters::sum(&items, args.get(1).cloned().unwrap_or(Value::Int(0)))?
        }
        "min" | "max" => extreme(interpreter, name, value, args)?,
        "sort" => sort(interpreter, value, args)?,
        "dictsort" => dictsort(interpreter, value, args)?,
        "groupby" => groupby(interpreter, value, args)?,
        "unique" => unique(interpreter, value, args)?,
        "batch" | "slice" => parts(interpreter, name, value, args)?,
        "map" => map(interpreter, value, args),
        "select" | "reject" | "selectattr" | "rejectattr" => select(interpreter, name, value, args),
        _ => return Ok(None),
    }))
}

/// A generator whose items `work` makes; it fails where its first failure would be read.
fn lazily(work: impl FnOnce(&mut Vec<Value>) -> Result<()>) -> Value {
    let mut items = Vec::new();
    let fault = work(&mut items).err();
    let (items, fault) = (RefCell::new(items.into_iter()), RefCell::new(fault));
    Value::Iterator(Rc::new(Iterator { items, fault }))
}

fn failing(message: String) -> Value {
    lazily(|_| Err(Fault::new(message)))
}

/// The path that a filter's `attribute` reads of an item: `a.b`, `0`, and, where that is
/// allowed, `a,b`.
struct Getter {
    paths: Vec<Vec<Value>>,
    default: Option<Value>,
    /// Texts in lower case.
    ignores_case: bool,
}

impl Getter {
    fn new(attribute: Option<&Value>, has_several: bool) -> Result<Self> {
        let path = |text: &str| {
            let parts = text.split('.').map(|part| {
                let is_number = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
                match part.parse() {
                    Ok(n) if is_number => Value::Int(n),
                    _ => part.into(),
                }
            });
            parts.collect()
        };
        let paths = match attribute {
            None => vec![Vec::new()],
            Some(attribute) => match attribute.as_str() {
                Some(text) if has_several => text.split(',').map(path).collect(),
                Some(text) => vec![path(text)],
                None => vec![vec![attribute.clone()]],
            },
        };
        Ok(Self { paths, default: None, ignores_case: false })
    }

    fn ignoring_case(self, ignores_case: bool) -> Self {
        Self { ignores_case, ..self }
    }

    fn along(&self, path: &[Value], interpreter: &mut Interpreter, item: &Value) -> Result<Value> {
        let mut value = item.clone();
        for part in path {
            interpreter.spend(1)?;
            value = interpreter.item(&value, part)?;
            if let (true, Some(default)) = (value.is_undefined(), &self.default) {
                value = default.clone();
            }
        }
        Ok(match (self.ignores_case, value.as_str()) {
            (true, Some(text)) => text.to_lowercase().into(),
            _ => value,
        })
    }

    fn get(&self, interpreter: &mut Interpreter, item: &Value) -> Result<Value> {
        interpreter.spend(1)?;
        match &self.paths[..] {
            [path] => self.along(path, interpreter, item),
            paths => {
                let all = paths.iter().map(|path| self.along(path, interpreter, item));
                Ok(Value::list(all.collect::<Result<_>>()?))
            }
        }
    }
}

/// The items in the order of their keys; equal ones stay in their order.
fn sorted(mut pairs: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<(Value, Value)>> {
    let mut fault = None;
    pairs.sort_by(|(a, _), (b, _)| {
        let (a, b) = if reverse { (b, a) } else { (a, b) };
        match value::order(a, b, 0) {
            Ok(order) => order.unwrap_or(Ordering::Equal),
            Err(e) => {
                fault.get_or_insert(e);
                Ordering::Equal
            }
        }
    });
    fault.map_or(Ok(pairs), Err)
}

fn keyed(
    interpreter: &mut Interpreter,
    getter: &Getter,
    items: Vec<Value>,
) -> Result<Vec<(Value, Value)>> {
    interpreter.spend(items.len() * (items.len().max(1).ilog2() as usize + 1))?;
    items.into_iter().map(|item| Ok((getter.get(interpreter, &item)?, item))).collect()
}

fn edge(interpreter: &mut Interpreter, name: &str, value: &Value) -> Result<Value> {
    if let (Value::Iterator(iterator), "first") = (value, name) {
        let next = iterator.items.borrow_mut().next();
        return match (next, iterator.fault.take()) {
            (Some(first), fault) => {
                *iterator.fault.borrow_mut() = fault;
                Ok(first)
            }
            (None, Some(fault)) => Err(fault),
            (None, None) => Ok(Value::undefined("the first item of no items")),
        };
    }
    if matches!(value, Value::Iterator(_)) {
        return Err(Fault::new("`last` of a generator"));
    }
    let mut items = interpreter.items(value)?;
    let item = match name {
        "first" if items.is_empty() => None,
        "first" => Some(items.swap_remove(0)),
        _ => items.pop(),
    };
    Ok(item.unwrap_or_else(|| Value::undefined(format!("the {name} item of no items"))))
}

fn reverse(interpreter: &mut Interpreter, value: &Value) -> Result<Value> {
    let reversed = |text: &str| text.chars().rev().collect::<String>();
    match value {
        Value::Str(text) => return Ok(reversed(text).into()),
        Value::Markup(text) => return Ok(Value::Markup(reversed(text).into())),
        _ => {}
    }
    let mut items = interpreter.items(value)?;
    items.reverse();
    Ok(match value {
        Value::Iterator(_) => Value::list(items),
        _ => Value::iterator(items),
    })
}

fn join(interpreter: &mut Interpreter, value: &Value, args: &Arguments) -> Result<Value> {
    let args = args.bind("join", &["d", "attribute"], 0)?;
    let getter = Getter::new(args.some(1), false)?;
    let mark = args.get(0).map_or(Ok(String::new()), Value::print)?;
    let mut out = String::new();
    for (n, item) in interpreter.items(value)?.iter().enumerate() {
        within_bounds()?;
        out.push_str(if n == 0 { "" } else { &mark });
        out.push_str(&getter.get(interpreter, item)?.print()?);
    }
    Ok(out.into())
}

fn extreme(
    interpreter: &mut Interpreter,
    name: &str,
    value: &Value,
    args: &Arguments,
) -> Result<Value> {
    let args = args.bind(name, &["case_sensitive", "attribute"], 0)?;
    let getter = Getter::new(args.some(1), false)?.ignoring_case(!args.is_true(0));
    let mut best: Option<(Value, Value)> = None;
    for item in interpreter.items(value)? {
        let key = getter.get(interpreter, &item)?;
        let is_better = match &best {
            None => true,
            Some((best, _)) => {
                let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
                value::order(&key, best, 0)? == Some(wanted)
            }
        };
        if is_better {
            best = Some((key, item));
        }
    }
    Ok(best.map_or_else(|| Value::undefined(format!("the {name} of no items")), |(_, item)| item))
}

fn sort(interpreter: &mut Interpreter, value: &Value, args: &Arguments) -> Result<Value> {
    let args = args.bind("sort", &["reverse", "case_sensitive", "attribute"], 0)?;
    let getter = Getter::new(args.some(2), true)?.ignoring_case(!args.is_true(1));
    let items = interpreter.items(value)?;
    let pairs = keyed(interpreter, &getter, items)?;
    // Keys are lists, so that equal ones need no order.
    let pairs = match getter.paths.len() {
        1 => pairs.into_iter().map(|(key, item)| (Value::list(vec![key]), item)).collect(),
        _ => pairs,
    };
    let pairs = sorted(pairs, args.int(0, 0)? != 0)?;
    Ok(Value::list(pairs.into_iter().map(|(_, item)| item).collect()))
}

fn dictsort(interpreter: &mut Interpreter, value: &Value, args: &Arguments) -> Result<Value> {
    let args = args.bind("dictsort", &["case_sensitive", "by", "reverse"], 0)?;
    let Value::Dict(dict) = value else {
        return Err(Fault::new(format!("`dictsort` expects a mapping, got a {}", value.kind())));
    };
    let at = match args.get(1).map_or(Ok("key"), |_| args.text(1))? {
        "key" => 0,
        "value" => 1,
        _ => return Err(Fault::new("`dictsort` sorts by `key` or by `value`")),
    };
    let getter = Getter::new(Some(&Value::Int(at)), false)?.ignoring_case(!args.is_true(0));
    let pairs = keyed(interpreter, &getter, View::Items.items(dict))?;
    let pairs = sorted(pairs, args.int(2, 0)? != 0)?;
    Ok(Value::list(pairs.into_iter().map(|(_, item)| item).collect()))
}

fn groupby(interpreter: &mut Interpreter, value: &Value, args: &Arguments) -> Result<Value> {
    let args = args.bind("groupby", &["attribute", "default", "case_sensitive"], 1)?;
    let default = args.some(1).cloned();
    let getter = Getter { default, ..Getter::new(args.some(0), false)? };
    let getter = getter.ignoring_case(!args.is_true(2));
    let items = interpreter.items(value)?;
    let pairs = sorted(keyed(interpreter, &getter, items)?, false)?;
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for (key, item) in pairs {
        match groups.last_mut() {
            Some((last, items)) if value::equal(last, &key, 0)? => items.push(item),
            _ => groups.push((key, vec![item])),
        }
    }
    let getter = getter.ignoring_case(false);
    let groups = groups.into_iter().map(|(_, items)| {
        let key = getter.get(interpreter, &items[0])?;
        Ok(Value::Group(Rc::new(vec![key, Value::list(items)])))
    });
    Ok(Value::list(groups.collect::<Result<_>>()?))
}

/// Keys are hashed by what they hold, and nothing changes a value while they are compared.
#[allow(clippy::mutable_key_type)]
fn unique(interpreter: &mut Interpreter, value: &Value, args: &Arguments) -> Result<Value> {
    let args = args.bind("unique", &["case_sensitive", "attribute"], 0)?;
    let getter = Getter::new(args.some(1), false)?.ignoring_case(!args.is_true(0));
    Ok(lazily(|out| {
        let mut seen = HashSet::new();
        for item in interpreter.items(value)? {
            let key = getter.get(interpreter, &item)?;
            if seen.insert(Key::new(&key)?) {
                out.push(item);
            }
        }
        Ok(())
    }))
}

/// `batch`, which makes lists of so many items, and `slice`, which makes so many lists.
fn parts(
    interpreter: &mut Interpreter,
    name: &str,
    value: &Value,
    args: &Arguments,
) -> Result<Value> {
    let names: &[&str] =
        if name == "batch" { &["linecount", "fill_with"] } else { &["slices", "fill_with"] };
    let args = args.bind(name, names, 1)?;
    Ok(lazily(|out| {
        let items = interpreter.items(value)?;
        let n = args.int(0, 0)?;
        if n > MAX_FILL {
            return Err(Fault::new(format!("`{name}`: {n} is too large, at most {MAX_FILL}")));
        }
        match name {
            "batch" => batch(items, n, &args, out),
            _ => slice(&items, n, &args, out),
        }
    }))
}

fn batch(items: Vec<Value>, n: i128, args: &Bound, out: &mut Vec<Value>) -> Result<()> {
    let mut part = Vec::new();
    for item in items {
        if part.len() as i128 == n {
            out.push(Value::list(std::mem::take(&mut part)));
        }
        part.push(item);
    }
    if !part.is_empty() {
        if let Some(fill) = args.some(1) {
            let n = part.len().max(usize::try_from(n).unwrap_or(0));
            part.resize(n, fill.clone());
        }
        out.push(Value::list(part));
    }
    Ok(())
}

fn slice(items: &[Value], n: i128, args: &Bound, out: &mut Vec<Value>) -> Result<()> {
    let n = match usize::try_from(n) {
        Ok(0) => return Err(Fault::new("division by zero")),
        Ok(n) => n,
        Err(_) => return Ok(()),
    };
    let (size, longer) = (items.len() / n, items.len() % n);
    let mut from = 0;
    for at in 0..n {
        let end = from + size + usize::from(at < longer);
        let mut part = items[from..end].to_vec();
        if at >= longer {
            part.extend(args.some(1).cloned());
        }
        out.push(Value::list(part));
        from = end;
    }
    Ok(())
}

fn map(interpreter: &mut Interpreter, value: &Value, args: &Arguments) -> Value {
    lazily(|out| {
        if !value.is_true() {
            return Ok(());
        }
        let named = |name: &str| args.named.iter().find(|(other, _)| **other == *name);
        let attribute = named("attribute").filter(|_| args.positional.is_empty());
        if let Some((_, attribute)) = attribute {
            let others = ["attribute", "default"];
            if args.named.iter().any(|(name, _)| !others.contains(&&**name)) {
                return Err(Fault::new("`map` takes `attribute` and `default`"));
            }
            let default = named("default").map(|(_, value)| value.clone());
            let default = default.filter(|value| !value.is_none());
            let attribute = Some(attribute).filter(|attribute| !attribute.is_none());
            let getter = Getter { default, ..Getter::new(attribute, false)? };
            for item in interpreter.items(value)? {
                out.push(getter.get(interpreter, &item)?);
            }
            return Ok(());
        }
        let Some((filter, rest)) = args.positional.split_first() else {
            return Err(Fault::new("`map` expects a filter or an `attribute`"));
        };
        let filter = filter.as_str().unwrap_or_default();
        let args = Arguments { positional: rest.to_vec(), named: args.named.clone() };
        for item in interpreter.items(value)? {
            out.push(filters::call(interpreter, filter, &item, &args)?);
        }
        Ok(())
    })
}

fn select(interpreter: &mut Interpreter, name: &str, value: &Value, args: &Arguments) -> Value {
    lazily(|out| {
        if !value.is_true() {
            return Ok(());
        }
        let (mut rest, mut getter) = (&args.positional[..], Getter::new(None, false)?);
        if name.ends_with("attr") {
            let Some((attribute, others)) = rest.split_first() else {
                return Err(Fault::new(format!("`{name}` expects an attribute")));
            };
            let attribute = Some(attribute).filter(|attribute| !attribute.is_none());
            (rest, getter) = (others, Getter::new(attribute, false)?);
        }
        let test = rest.split_first().map(|(test, rest)| {
            let args = Arguments { positional: rest.to_vec(), named: args.named.clone() };
            (test.as_str().unwrap_or_default(), args)
        });
        for item in interpreter.items(value)? {
            let tested = getter.get(interpreter, &item)?;
            let holds = match &test {
                Some((test, args)) => checks::call(test, &tested, args)?,
                None => tested.is_true(),
            };
            if holds == name.starts_with("select") {
                out.push(item);
            }
        }
        Ok(())
    })
}
