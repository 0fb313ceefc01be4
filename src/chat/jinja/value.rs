//! The values of templates, which are Python's: their truth, their equality, their order, and how
//! they print.

use super::ast::Macro;
use super::eval::Scope;
use super::text::{self, is_printable};
use super::{Fault, Result, within_bounds};
use indexmap::IndexMap;
use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

/// Deeper values are neither printed nor compared. Python's recursion ends near 1,000.
pub const MAX_DEPTH: usize = 500;

pub type Dict = IndexMap<Key, Value>;

#[derive(Clone)]
pub enum Value {
    /// The thing that is missing, for messages.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    /// Text that is safe in HTML: what is added to it gets escaped.
    Markup(Arc<str>),
    List(Rc<Vec<Value>>),
    Tuple(Rc<Vec<Value>>),
    /// A pair of `groupby`: a tuple with the names `grouper` and `list`.
    Group(Rc<Vec<Value>>),
    Dict(Rc<Dict>),
    /// From, to, and step.
    Range([i64; 3]),
    View(View, Rc<Dict>),
    Iterator(Rc<Iterator>),
    Namespace(Rc<RefCell<Dict>>),
    Macro(Rc<Closure>),
    Function(&'static str),
    Method(Rc<(Value, Rc<str>)>),
    Loop(Rc<LoopState>),
    Joiner(Rc<(Value, Cell<bool>)>),
    Cycler(Rc<(Vec<Value>, Cell<usize>)>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    Keys,
    Values,
    Items,
}

/// Python's iterators and generators, which give each item once.
pub struct Iterator {
    pub items: RefCell<std::vec::IntoIter<Value>>,
    /// The error of the item behind the last one.
    pub fault: RefCell<Option<Fault>>,
}

pub struct Closure {
    pub of: Arc<Macro>,
    pub scope: Rc<Scope>,
}

/// A `loop`: what the body of a `for` reads.
pub struct LoopState {
    pub items: Vec<Value>,
    pub index: Cell<usize>,
    pub depth: usize,
    pub changed: RefCell<Option<Vec<Value>>>,
    /// The loop and its scope, if it is recursive.
    pub recursive: Option<(Arc<super::ast::Loop>, Rc<Scope>)>,
}

/// A value that can be a key: no list and no dictionary.
#[derive(Clone)]
pub struct Key(pub Value);

impl Key {
    pub fn new(value: &Value) -> Result<Self> {
        match value {
            Value::List(_) | Value::Dict(_) | Value::View(..) => {
                Err(Fault::new(format!("unhashable type: {}", value.kind())))
            }
            Value::Tuple(items) | Value::Group(items) => {
                within_bounds()?;
                items.iter().try_for_each(|item| Self::new(item).map(drop))?;
                Ok(Self(value.clone()))
            }
            _ => Ok(Self(value.clone())),
        }
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match &self.0 {
            Value::Str(text) | Value::Markup(text) => text.hash(state),
            Value::Tuple(items) | Value::Group(items) => {
                items.iter().for_each(|item| Self(item.clone()).hash(state));
            }
            Value::Float(x) if x.fract() != 0.0 => x.to_bits().hash(state),
            Value::Float(x) => (*x as i128).hash(state),
            Value::Int(n) => n.hash(state),
            Value::Bool(b) => i128::from(*b).hash(state),
            _ => 0u8.hash(state),
        }
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        equal(&self.0, &other.0, 0).unwrap_or(false)
    }
}

impl Eq for Key {}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Str(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Str(text.into())
    }
}

impl Value {
    pub fn undefined(what: impl Into<Rc<str>>) -> Self {
        Self::Undefined(what.into())
    }

    pub fn list(items: Vec<Value>) -> Self {
        Self::List(Rc::new(items))
    }

    pub fn tuple(items: Vec<Value>) -> Self {
        Self::Tuple(Rc::new(items))
    }

    pub fn iterator(items: Vec<Value>) -> Self {
        Self::Iterator(Rc::new(Iterator {
            items: RefCell::new(items.into_iter()),
            fault: RefCell::default(),
        }))
    }

    pub fn str_key(text: &str) -> Key {
        Key(text.into())
    }

    pub fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    pub fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(text) | Self::Markup(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_tuple(&self) -> Option<&Rc<Vec<Value>>> {
        match self {
            Self::Tuple(items) | Self::Group(items) => Some(items),
            _ => None,
        }
    }

    /// An integer; `true` and `false` are numbers in Python.
    pub fn as_int(&self) -> Option<i128> {
        match self {
            Self::Int(n) => Some(*n),
            Self::Bool(b) => Some(i128::from(*b)),
            _ => None,
        }
    }

    pub fn as_number(&self) -> Option<f64> {
        match self {
            Self::Float(x) => Some(*x),
            _ => self.as_int().map(|n| n as f64),
        }
    }

    /// The name of the type in Python.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Markup(_) => "Markup",
            Self::List(_) => "list",
            Self::Tuple(_) | Self::Group(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::Range(_) => "range",
            Self::View(View::Keys, _) => "dict_keys",
            Self::View(View::Values, _) => "dict_values",
            Self::View(View::Items, _) => "dict_items",
            Self::Iterator(_) => "generator",
            Self::Namespace(_) => "namespace",
            Self::Macro(_) => "macro",
            Self::Function(_) => "function",
            Self::Method(_) => "method",
            Self::Loop(_) => "loop",
            Self::Joiner(_) => "joiner",
            Self::Cycler(_) => "cycler",
        }
    }

    pub fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(b) => *b,
            Self::Float(x) => *x != 0.0,
            Self::Int(n) => *n != 0,
            _ => self.length().is_none_or(|n| n > 0),
        }
    }

    /// Python's `len`; `None` where it raises an error.
    pub fn length(&self) -> Option<usize> {
        match self {
            Self::Undefined(_) => Some(0),
            Self::Str(text) | Self::Markup(text) => Some(text.chars().count()),
            Self::List(items) | Self::Tuple(items) | Self::Group(items) => Some(items.len()),
            Self::Dict(dict) | Self::View(_, dict) => Some(dict.len()),
            Self::Range(range) => Some(range_length(*range)),
            Self::Loop(state) => Some(state.items.len()),
            _ => None,
        }
    }

    /// The items, as Python iterates over the value; an iterator has none afterwards.
    pub fn items(&self) -> Result<Vec<Value>> {
        Ok(match self {
            Self::Undefined(_) => Vec::new(),
            Self::Str(text) | Self::Markup(text) => {
                text.chars().map(|c| Self::Str(c.to_string().into())).collect()
            }
            Self::List(items) | Self::Tuple(items) | Self::Group(items) => items.to_vec(),
            Self::Dict(dict) => dict.keys().map(|key| key.0.clone()).collect(),
            Self::View(view, dict) => view.items(dict),
            Self::Range([from, _, step]) => {
                let n = range_length(range_of(self)) as i64;
                (0..n).map(|i| Self::Int(i128::from(from + i * step))).collect()
            }
            Self::Iterator(iterator) => {
                let items = iterator.items.borrow_mut().by_ref().collect();
                if let Some(fault) = iterator.fault.take() {
                    return Err(fault);
                }
                items
            }
            _ => return Err(Fault::new(format!("a value of type {} is no list", self.kind()))),
        })
    }

    /// Python's `str(value)`.
    pub fn print(&self) -> Result<String> {
        match self {
            Self::Str(text) | Self::Markup(text) => Ok(text.to_string()),
            Self::Undefined(_) => Ok(String::new()),
            _ => self.repr(),
        }
    }

    /// Python's `repr(value)`.
    pub fn repr(&self) -> Result<String> {
        let mut out = String::new();
        self.write(&mut out, 0)?;
        Ok(out)
    }

    fn write(&self, out: &mut String, depth: usize) -> Result<()> {
        within_bounds()?;
        if depth > MAX_DEPTH {
            return Err(Fault::new("the value is nested too deeply to print"));
        }
        let list = |items: &[Value], open: &str, close: &str, out: &mut String| -> Result<()> {
            out.push_str(open);
            for (n, item) in items.iter().enumerate() {
                out.push_str(if n == 0 { "" } else { ", " });
                item.write(out, depth + 1)?;
            }
            out.push_str(close);
            Ok(())
        };
        match self {
            Self::Undefined(_) => out.push_str("Undefined"),
            Self::None => out.push_str("None"),
            Self::Bool(b) => out.push_str(if *b { "True" } else { "False" }),
            Self::Int(n) => out.push_str(&n.to_string()),
            Self::Float(x) => out.push_str(&float(*x)),
            Self::Str(text) => write_string(text, out),
            Self::Markup(text) => {
                out.push_str("Markup(");
                write_string(text, out);
                out.push(')');
            }
            Self::List(items) => list(items, "[", "]", out)?,
            Self::Tuple(items) | Self::Group(items) => {
                list(items, "(", if items.len() == 1 { ",)" } else { ")" }, out)?;
            }
            Self::Dict(dict) => write_dict(dict, out, depth)?,
            Self::Range([from, to, 1]) => out.push_str(&format!("range({from}, {to})")),
            Self::Range([from, to, step]) => {
                out.push_str(&format!("range({from}, {to}, {step})"));
            }
            Self::View(view, dict) => {
                out.push_str(self.kind());
                list(&view.items(dict), "([", "])", out)?;
            }
            Self::Namespace(fields) => {
                out.push_str("<Namespace ");
                let fields = fields.borrow().clone();
                write_dict(&fields, out, depth)?;
                out.push('>');
            }
            Self::Macro(closure) => match &closure.of.name {
                Some(name) => out.push_str(&format!("<Macro {}>", Self::from(&**name).repr()?)),
                None => out.push_str("<Macro anonymous>"),
            },
            Self::Loop(state) => {
                let index = state.index.get() + 1;
                out.push_str(&format!("<LoopContext {index}/{}>", state.items.len()));
            }
            _ => {
                let kind = self.kind();
                return Err(Fault::new(format!("a value of type {kind} cannot be printed")));
            }
        }
        Ok(())
    }
}

impl View {
    pub fn items(self, dict: &Dict) -> Vec<Value> {
        let pair = |(key, value): (&Key, &Value)| match self {
            Self::Keys => key.0.clone(),
            Self::Values => value.clone(),
            Self::Items => Value::tuple(vec![key.0.clone(), value.clone()]),
        };
        dict.iter().map(pair).collect()
    }
}

fn range_of(value: &Value) -> [i64; 3] {
    match value {
        Value::Range(range) => *range,
        _ => [0, 0, 1],
    }
}

pub fn range_length([from, to, step]: [i64; 3]) -> usize {
    let (from, to, step) = (i128::from(from), i128::from(to), i128::from(step));
    let n = if step > 0 { (to - from + step - 1) / step } else { (from - to - step - 1) / -step };
    n.max(0) as usize
}

fn write_dict(dict: &Dict, out: &mut String, depth: usize) -> Result<()> {
    out.push('{');
    for (n, (key, value)) in dict.iter().enumerate() {
        out.push_str(if n == 0 { "" } else { ", " });
        key.0.write(out, depth + 1)?;
        out.push_str(": ");
        value.write(out, depth + 1)?;
    }
    out.push('}');
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
            c if is_printable(c) => out.push(c),
            c => match c as u32 {
                n @ 0..0x100 => out.push_str(&format!("\\x{n:02x}")),
                n @ 0x100..0x1_0000 => out.push_str(&format!("\\u{n:04x}")),
                n => out.push_str(&format!("\\U{n:08x}")),
            },
        }
    }
    out.push(quote);
}

/// `repr` of a float: the shortest digits that read back, in positional notation from 1e-4 to
/// below 1e16.
pub fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return (if x > 0.0 { "inf" } else { "-inf" }).into();
    }
    if x != 0.0 && !(1e-4..1e16).contains(&x.abs()) {
        return text::with_exponent(&format!("{x:e}"), 'e');
    }
    format!("{x:?}")
}

/// Python's `==`.
pub fn equal(a: &Value, b: &Value, depth: usize) -> Result<bool> {
    within_bounds()?;
    if depth > MAX_DEPTH {
        return Err(Fault::new("the values are nested too deeply to compare"));
    }
    let all = |a: &[Value], b: &[Value]| -> Result<bool> {
        if a.len() != b.len() {
            return Ok(false);
        }
        for (a, b) in a.iter().zip(b) {
            if !same(a, b) && !equal(a, b, depth + 1)? {
                return Ok(false);
            }
        }
        Ok(true)
    };
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return Ok(a == b);
    }
    if let (Some(a), Some(b)) = (a.as_tuple(), b.as_tuple()) {
        return all(a, b);
    }
    Ok(match (a, b) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::List(a), Value::List(b)) => all(a, b)?,
        (Value::Dict(a), Value::Dict(b)) => {
            if a.len() != b.len() {
                return Ok(false);
            }
            for (key, value) in a.iter() {
                let Some(other) = b.get(key) else { return Ok(false) };
                if !equal(value, other, depth + 1)? {
                    return Ok(false);
                }
            }
            true
        }
        (Value::Range(_), Value::Range(_)) => {
            a.items()?.len() == b.items()?.len() && { all(&a.items()?, &b.items()?)? }
        }
        (Value::View(View::Values, _), _) | (_, Value::View(View::Values, _)) => same(a, b),
        (Value::View(_, a), Value::View(_, b)) if a.is_empty() && b.is_empty() => true,
        (Value::View(x, a), Value::View(y, b)) => {
            let (a, b) = (x.items(a), y.items(b));
            let mut is_equal = a.len() == b.len();
            for item in &a {
                is_equal &= contains(&b, item)?;
            }
            is_equal
        }
        _ => match number_order(a, b) {
            Some(order) => order == Some(Ordering::Equal),
            None => same(a, b),
        },
    })
}

/// Whether one of the items is this value.
pub fn contains(items: &[Value], value: &Value) -> Result<bool> {
    for item in items {
        if same(item, value) || equal(item, value, 0)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Python's `is`, for what has an identity.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b),
        (Value::Tuple(a), Value::Tuple(b)) => Rc::ptr_eq(a, b),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        (Value::Str(a), Value::Str(b)) | (Value::Markup(a), Value::Markup(b)) => Arc::ptr_eq(a, b),
        (Value::Iterator(a), Value::Iterator(b)) => Rc::ptr_eq(a, b),
        (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
        (Value::Macro(a), Value::Macro(b)) => Rc::ptr_eq(a, b),
        (Value::Function(a), Value::Function(b)) => a == b,
        (Value::Loop(a), Value::Loop(b)) => Rc::ptr_eq(a, b),
        (Value::Joiner(a), Value::Joiner(b)) => Rc::ptr_eq(a, b),
        (Value::Cycler(a), Value::Cycler(b)) => Rc::ptr_eq(a, b),
        _ => false,
    }
}

/// The order of two numbers, inner `None` with NaN; `None`: these are not two numbers.
fn number_order(a: &Value, b: &Value) -> Option<Option<Ordering>> {
    if let (Some(a), Some(b)) = (a.as_int(), b.as_int()) {
        return Some(Some(a.cmp(&b)));
    }
    let (x, y) = (a.as_number()?, b.as_number()?);
    // An integer that a float does not hold.
    let exact = |n: i128, x: f64| match x.is_finite() && x.abs() < 1e38 {
        true => Some(n.cmp(&(x.trunc() as i128)).then(0.0f64.total_cmp(&x.fract()))),
        false => (n as f64).partial_cmp(&x),
    };
    Some(match (a.as_int(), b.as_int()) {
        (Some(n), _) if y.fract() == 0.0 => exact(n, y),
        (_, Some(n)) if x.fract() == 0.0 => exact(n, x).map(Ordering::reverse),
        _ => x.partial_cmp(&y),
    })
}

/// Python's order; `None` with NaN.
pub fn order(a: &Value, b: &Value, depth: usize) -> Result<Option<Ordering>> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return Ok(Some(a.cmp(b)));
    }
    let lists = match (a, b) {
        (Value::List(a), Value::List(b)) => Some((a, b)),
        _ => a.as_tuple().zip(b.as_tuple()),
    };
    if let Some((a, b)) = lists {
        for (a, b) in a.iter().zip(b.iter()) {
            if !same(a, b) && !equal(a, b, depth + 1)? {
                return order(a, b, depth + 1);
            }
        }
        return Ok(Some(a.len().cmp(&b.len())));
    }
    number_order(a, b).ok_or_else(|| {
        Fault::new(format!("values of types {} and {} have no order", a.kind(), b.kind()))
    })
}
