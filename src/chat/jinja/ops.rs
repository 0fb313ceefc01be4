//! Python's operators.

use super::ast::{Binary, Comparison};
use super::value::{self, Value, View, range_length};
use super::{Fault, Result, percent, text};
use std::cmp::Ordering;
use std::rc::Rc;

/// The longest text that one operation makes of a count: a repetition, a padding.
pub const MAX_TEXT_BYTES: usize = 16 << 20;

/// The longest list that one operation makes of a count.
const MAX_ITEMS: usize = 1 << 20;

fn too_large<T>() -> Result<T> {
    Err(Fault::new("an integer of more than 127 bits is not supported"))
}

pub fn mismatch<T>(what: &str, a: &Value, b: &Value) -> Result<T> {
    for value in [a, b] {
        if let Value::Undefined(what) = value {
            return Err(Fault::undefined(what));
        }
    }
    Err(Fault::new(format!("`{what}` does not take values of types {} and {}", a.kind(), b.kind())))
}

pub fn binary(operator: Binary, a: &Value, b: &Value) -> Result<Value> {
    match operator {
        Binary::Add => add(a, b),
        Binary::Mul => multiply(a, b),
        Binary::Mod => match a {
            Value::Str(text) => percent::format(text, b).map(Value::from),
            Value::Markup(_) => Err(Fault::new("`%` on escaped text is not supported")),
            _ => number(operator, a, b),
        },
        _ => number(operator, a, b),
    }
}

fn symbol(operator: Binary) -> &'static str {
    match operator {
        Binary::Add => "+",
        Binary::Sub => "-",
        Binary::Mul => "*",
        Binary::Div => "/",
        Binary::FloorDiv => "//",
        Binary::Mod => "%",
        Binary::Pow => "**",
    }
}

fn add(a: &Value, b: &Value) -> Result<Value> {
    if let (Some(x), Some(y)) = (a.as_str(), b.as_str()) {
        let escaped = |value: &Value, text: &str| match value {
            Value::Markup(_) => text.to_string(),
            _ => text::escape(text),
        };
        return Ok(match (a, b) {
            (Value::Str(_), Value::Str(_)) => Value::from([x, y].concat()),
            _ => Value::Markup((escaped(a, x) + &escaped(b, y)).into()),
        });
    }
    if let (Some(x), Some(y)) = (a.as_tuple(), b.as_tuple()) {
        return Ok(Value::tuple([&x[..], &y[..]].concat()));
    }
    match (a, b) {
        (Value::List(x), Value::List(y)) => Ok(Value::list([&x[..], &y[..]].concat())),
        _ => number(Binary::Add, a, b),
    }
}

/// Text of `n` copies, within bounds.
pub fn repeat(text: &str, n: i128) -> Result<String> {
    let n = n.clamp(0, i128::from(u32::MAX)) as usize;
    match text.len().checked_mul(n).filter(|len| *len <= MAX_TEXT_BYTES) {
        Some(_) => Ok(text.repeat(n)),
        None => Err(Fault::new(format!(
            "a text of {} bytes, {n} times, is too large: at most {MAX_TEXT_BYTES} bytes",
            text.len()
        ))),
    }
}

fn multiply(a: &Value, b: &Value) -> Result<Value> {
    let (sequence, n) = match (a.as_int(), b.as_int()) {
        (None, Some(n)) => (a, n),
        (Some(n), None) => (b, n),
        _ => return number(Binary::Mul, a, b),
    };
    let items = |items: &[Value]| {
        let n = n.clamp(0, i128::from(u32::MAX)) as usize;
        match items.len().checked_mul(n).filter(|len| *len <= MAX_ITEMS) {
            Some(len) => Ok(items.iter().cycle().take(len).cloned().collect()),
            None => Err(Fault::new(format!(
                "a list of {} items, {n} times, is too large: at most {MAX_ITEMS} items",
                items.len()
            ))),
        }
    };
    Ok(match sequence {
        Value::Str(text) => repeat(text, n)?.into(),
        Value::Markup(text) => Value::Markup(repeat(text, n)?.into()),
        Value::List(all) => Value::list(items(all)?),
        Value::Tuple(all) | Value::Group(all) => Value::tuple(items(all)?),
        _ => return number(Binary::Mul, a, b),
    })
}

fn number(operator: Binary, a: &Value, b: &Value) -> Result<Value> {
    if let (Some(x), Some(y)) = (a.as_int(), b.as_int()) {
        return integers(operator, x, y);
    }
    let (Some(x), Some(y)) = (a.as_number(), b.as_number()) else {
        return mismatch(symbol(operator), a, b);
    };
    if y == 0.0 && matches!(operator, Binary::Div | Binary::FloorDiv | Binary::Mod) {
        return Err(Fault::new("division by zero"));
    }
    Ok(Value::Float(match operator {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        Binary::FloorDiv => floor_division(x, y).0,
        Binary::Mod => floor_division(x, y).1,
        Binary::Pow => return power(x, y),
    }))
}

/// Quotient and remainder, rounded down.
fn floor_division(x: f64, y: f64) -> (f64, f64) {
    let mut remainder = x % y;
    let mut quotient = (x - remainder) / y;
    if remainder != 0.0 {
        if (y < 0.0) != (remainder < 0.0) {
            remainder += y;
            quotient -= 1.0;
        }
    } else {
        remainder = 0.0f64.copysign(y);
    }
    let floor = quotient.floor();
    let floor = if quotient - floor > 0.5 { floor + 1.0 } else { floor };
    (if quotient == 0.0 { 0.0f64.copysign(x / y) } else { floor }, remainder)
}

fn power(x: f64, y: f64) -> Result<Value> {
    if x == 0.0 && y < 0.0 {
        return Err(Fault::new("0 cannot be raised to a negative power"));
    }
    if x < 0.0 && x.is_finite() && y.is_finite() && y.fract() != 0.0 {
        return Err(Fault::new("complex numbers are not supported"));
    }
    match x.powf(y) {
        power if power.is_infinite() && x.is_finite() && y.is_finite() => {
            Err(Fault::new("the result of `**` is too large"))
        }
        power => Ok(Value::Float(power)),
    }
}

fn integers(operator: Binary, x: i128, y: i128) -> Result<Value> {
    let is_division = matches!(operator, Binary::Div | Binary::FloorDiv | Binary::Mod);
    if y == 0 && is_division {
        return Err(Fault::new("division by zero"));
    }
    let result = match operator {
        Binary::Add => x.checked_add(y),
        Binary::Sub => x.checked_sub(y),
        Binary::Mul => x.checked_mul(y),
        Binary::Div => return Ok(Value::Float(x as f64 / y as f64)),
        Binary::FloorDiv => x.checked_div_euclid(y).map(|q| match x.rem_euclid(y) {
            r if y < 0 && r != 0 => q - 1,
            _ => q,
        }),
        Binary::Mod => x.checked_rem_euclid(y).map(|r| if y < 0 && r != 0 { r + y } else { r }),
        Binary::Pow if y < 0 => return power(x as f64, y as f64),
        Binary::Pow => match x {
            0 | 1 => Some(if y == 0 { 1 } else { x }),
            -1 => Some(if y % 2 == 0 { 1 } else { -1 }),
            _ => u32::try_from(y).ok().and_then(|y| x.checked_pow(y)),
        },
    };
    result.map_or_else(too_large, |n| Ok(Value::Int(n)))
}

pub fn negative(value: &Value) -> Result<Value> {
    match (value, value.as_int()) {
        (_, Some(n)) => n.checked_neg().map_or_else(too_large, |n| Ok(Value::Int(n))),
        (Value::Float(x), _) => Ok(Value::Float(-x)),
        _ => mismatch("-", value, value),
    }
}

pub fn positive(value: &Value) -> Result<Value> {
    match (value, value.as_int()) {
        (_, Some(n)) => Ok(Value::Int(n)),
        (Value::Float(_), _) => Ok(value.clone()),
        _ => mismatch("+", value, value),
    }
}

pub fn compare(comparison: Comparison, a: &Value, b: &Value) -> Result<bool> {
    let ordered = |fits: fn(Ordering) -> bool, symbol: &str| -> Result<bool> {
        if a.is_undefined() || b.is_undefined() {
            return mismatch(symbol, a, b);
        }
        Ok(value::order(a, b, 0)?.is_some_and(fits))
    };
    match comparison {
        Comparison::Eq => value::equal(a, b, 0),
        Comparison::Ne => value::equal(a, b, 0).map(|equal| !equal),
        Comparison::Lt => ordered(Ordering::is_lt, "<"),
        Comparison::Le => ordered(Ordering::is_le, "<="),
        Comparison::Gt => ordered(Ordering::is_gt, ">"),
        Comparison::Ge => ordered(Ordering::is_ge, ">="),
        Comparison::In => is_in(a, b),
        Comparison::NotIn => is_in(a, b).map(|is_in| !is_in),
    }
}

/// Python's `value in all`.
pub fn is_in(value: &Value, all: &Value) -> Result<bool> {
    if let Some(text) = all.as_str() {
        return match value.as_str() {
            Some(part) => Ok(text.contains(part)),
            None => Err(Fault::new(format!(
                "`in` a text expects a text, got a value of type {}",
                value.kind()
            ))),
        };
    }
    match all {
        Value::Dict(dict) | Value::View(View::Keys, dict) => {
            Ok(dict.contains_key(&value::Key::new(value)?))
        }
        Value::List(items) | Value::Tuple(items) | Value::Group(items) => {
            value::contains(items, value)
        }
        Value::Iterator(iterator) => loop {
            let next = iterator.items.borrow_mut().next();
            match next {
                Some(item) if value::equal(&item, value, 0)? => return Ok(true),
                Some(_) => {}
                None => return iterator.fault.take().map_or(Ok(false), Err),
            }
        },
        _ => value::contains(&all.items()?, value),
    }
}

/// `value[index]` of a sequence; `None`: there is no such item, or this is no sequence.
pub fn index(value: &Value, index: i128) -> Option<Value> {
    let at = |n: usize| {
        let index = if index < 0 { index + n as i128 } else { index };
        usize::try_from(index).ok().filter(|index| *index < n)
    };
    match value {
        Value::Str(text) => {
            let c = text.chars().nth(at(value.length()?)?)?;
            Some(c.to_string().into())
        }
        Value::Markup(text) => {
            let c = text.chars().nth(at(value.length()?)?)?;
            Some(Value::Markup(c.to_string().into()))
        }
        Value::List(items) | Value::Tuple(items) | Value::Group(items) => {
            Some(items[at(items.len())?].clone())
        }
        Value::Range(range) => {
            let i = at(range_length(*range))? as i64;
            Some(Value::Int(i128::from(range[0] + i * range[2])))
        }
        _ => None,
    }
}

/// The first index of `[from:to:step]` in `n` items, the one to end before, and the step.
fn slice_bounds(n: usize, parts: &[Value; 3]) -> Result<[i128; 3]> {
    let n = n as i128;
    let step = parts[2].as_int().unwrap_or(1);
    if step == 0 {
        return Err(Fault::new("the step of a slice is 0"));
    }
    let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
    let bound = |value: &Value, default: i128| match value.as_int() {
        None => default,
        Some(i) if i < 0 => i.saturating_add(n).clamp(low, high),
        Some(i) => i.clamp(low, high),
    };
    let (start, end) = if step > 0 { (0, n) } else { (n - 1, -1) };
    Ok([bound(&parts[0], start), bound(&parts[1], end), step])
}

fn slice_indices(n: usize, parts: &[Value; 3]) -> Result<Vec<usize>> {
    let [mut i, end, step] = slice_bounds(n, parts)?;
    let mut indices = Vec::new();
    while if step > 0 { i < end } else { i > end } {
        indices.push(i as usize);
        i = i.saturating_add(step);
    }
    Ok(indices)
}

/// `value[from:to:step]`; `None`: this is no sequence, or these are no integers.
pub fn slice(value: &Value, parts: &[Value; 3]) -> Result<Option<Value>> {
    if parts.iter().any(|part| !part.is_none() && part.as_int().is_none()) {
        return Ok(None);
    }
    let text = |text: &str| -> Result<String> {
        let chars: Vec<char> = text.chars().collect();
        Ok(slice_indices(chars.len(), parts)?.into_iter().map(|i| chars[i]).collect())
    };
    let items = |items: &[Value]| -> Result<Rc<Vec<Value>>> {
        let indices = slice_indices(items.len(), parts)?;
        Ok(Rc::new(indices.into_iter().map(|i| items[i].clone()).collect()))
    };
    Ok(Some(match value {
        Value::Str(all) => text(all)?.into(),
        Value::Markup(all) => Value::Markup(text(all)?.into()),
        Value::List(all) => Value::List(items(all)?),
        Value::Tuple(all) | Value::Group(all) => Value::Tuple(items(all)?),
        Value::Range([from, _, step]) => {
            let [first, end, by] = slice_bounds(value.length().unwrap_or(0), parts)?;
            let by = by.clamp(-i128::from(i32::MAX), i128::from(i32::MAX)) as i64;
            Value::Range([from + first as i64 * step, from + end as i64 * step, step * by])
        }
        _ => return Ok(None),
    }))
}
