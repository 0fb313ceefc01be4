//! Filters of numbers.

use super::value::{self, Value};
use super::{Arguments, Fault, Result, text};
use std::cmp::Ordering;

pub fn call(name: &str, value: &Value, args: &Arguments) -> Result<Value> {
    Ok(match name {
        "abs" => {
            args.none(name)?;
            match (value, value.as_int()) {
                (_, Some(n)) => Value::Int(n.abs()),
                (Value::Float(x), _) => Value::Float(x.abs()),
                _ => return expected("abs", value),
            }
        }
        "int" => {
            let args = args.bind(name, &["default", "base"], 0)?;
            let default = args.get(0).cloned().unwrap_or(Value::Int(0));
            int(value, args.int(1, 10)?)?.unwrap_or(default)
        }
        "float" => {
            let args = args.bind(name, &["default"], 0)?;
            let default = args.get(0).cloned().unwrap_or(Value::Float(0.0));
            float(value)?.map_or(default, Value::Float)
        }
        "round" => round(value, args)?,
        _ => size(value, args.bind(name, &["binary"], 0)?.is_true(0))?.into(),
    })
}

fn expected<T>(filter: &str, value: &Value) -> Result<T> {
    match value {
        Value::Undefined(what) => Err(Fault::undefined(what)),
        _ => Err(Fault::new(format!("`{filter}` expects a number, got a {}", value.kind()))),
    }
}

/// Python's `float(value)`; `None` where it is no number.
fn float(value: &Value) -> Result<Option<f64>> {
    if let Value::Undefined(what) = value {
        return Err(Fault::undefined(what));
    }
    let Some(text) = value.as_str() else { return Ok(value.as_number()) };
    Ok(plain_digits(text)?.and_then(|text| text.parse().ok()))
}

/// A number's text without blanks around it and underscores between its digits.
fn plain_digits(text: &str) -> Result<Option<String>> {
    let text = text.trim_matches(text::is_space);
    let bytes = text.as_bytes();
    let is_digit =
        |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_some_and(u8::is_ascii_alphanumeric);
    let is_plain = bytes
        .iter()
        .enumerate()
        .all(|(at, byte)| *byte != b'_' || is_digit(at.checked_sub(1)) && is_digit(Some(at + 1)));
    if text.chars().any(|c| !c.is_ascii() && text::is_decimal(c)) {
        return Err(Fault::new("numbers of other digits than 0 to 9 are not supported"));
    }
    Ok((is_plain && text.is_ascii()).then(|| text.replace('_', "")))
}

/// Python's `int(value)`, or else `int(float(value))`.
fn int(value: &Value, base: i128) -> Result<Option<Value>> {
    let whole = |x: f64| match x.abs() < 1e38 {
        true => Ok(Some(Value::Int(x as i128))),
        false => Err(Fault::new("`int`: the number has more than 127 bits")),
    };
    if let Some(text) = value.as_str() {
        if let Some(n) = parsed(text, base)? {
            return Ok(Some(Value::Int(n)));
        }
        return match float(value)? {
            Some(x) if x.is_finite() => whole(x),
            _ => Ok(None),
        };
    }
    match (value, value.as_int()) {
        (Value::Undefined(what), _) => Err(Fault::undefined(what)),
        (_, Some(n)) => Ok(Some(Value::Int(n))),
        (Value::Float(x), _) if x.is_infinite() => Err(Fault::new("`int` of an infinite number")),
        (Value::Float(x), _) if x.is_nan() => Ok(None),
        (Value::Float(x), _) => whole(*x),
        _ => Ok(None),
    }
}

fn parsed(text: &str, base: i128) -> Result<Option<i128>> {
    let Some(text) = plain_digits(text)? else { return Ok(None) };
    let digits = text.strip_prefix(['-', '+']).unwrap_or(&text);
    let is_negative = text.starts_with('-');
    let lower = digits.to_ascii_lowercase();
    let prefixed = [("0x", 16), ("0o", 8), ("0b", 2)]
        .into_iter()
        .find(|(prefix, radix)| lower.starts_with(prefix) && (base == 0 || base == *radix));
    let (digits, radix) = match prefixed {
        Some((_, radix)) => (&digits[2..], radix as u32),
        None if base == 0 && digits.len() > 1 && digits.starts_with('0') => {
            return Ok(digits.bytes().all(|byte| byte == b'0').then_some(0));
        }
        None if base == 0 => (digits, 10),
        None => match u32::try_from(base).ok().filter(|base| (2..=36).contains(base)) {
            Some(base) => (digits, base),
            None => return Ok(None),
        },
    };
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return Ok(None);
    }
    match i128::from_str_radix(digits, radix) {
        Ok(n) => Ok(Some(if is_negative { -n } else { n })),
        Err(_) => Err(Fault::new("`int`: the number has more than 127 bits")),
    }
}

fn round(value: &Value, args: &Arguments) -> Result<Value> {
    let args = args.bind("round", &["precision", "method"], 0)?;
    let method = args.get(1).map_or(Ok("common"), |_| args.text(1))?;
    let Some(x) = value.as_number() else { return expected("round", value) };
    if args.get(0).is_some_and(Value::is_none) && method == "common" {
        return match x.is_finite() && x.abs() < 1e38 {
            true => Ok(Value::Int(x.round_ties_even() as i128)),
            false => Err(Fault::new("`round` of a number that is not finite")),
        };
    }
    let precision = args.int(0, 0)?;
    let Ok(precision) = i32::try_from(precision) else {
        return Err(Fault::new("`round`: the precision is too large"));
    };
    if method == "common" {
        return common(value, x, precision);
    }
    let scale = 10f64.powi(precision);
    let scaled = x * scale;
    let rounded = match method {
        "ceil" => scaled.ceil(),
        "floor" => scaled.floor(),
        _ => return Err(Fault::new("`round`: the method is `common`, `ceil` or `floor`")),
    };
    match rounded.is_finite() {
        true => Ok(Value::Float((rounded + 0.0) / scale)),
        false => Err(Fault::new("`round` of a number that is not finite")),
    }
}

/// Python's `round`: halves go to the even neighbour.
fn common(value: &Value, x: f64, precision: i32) -> Result<Value> {
    let to_tens = |n: i128| -> Option<i128> {
        let unit = 10i128.checked_pow(precision.unsigned_abs())?;
        let (quotient, rest) = (n.div_euclid(unit), n.rem_euclid(unit));
        let up = rest * 2 > unit || rest * 2 == unit && quotient % 2 != 0;
        Some((quotient + i128::from(up)) * unit)
    };
    if let Some(n) = value.as_int() {
        return Ok(Value::Int(if precision >= 0 { n } else { to_tens(n).unwrap_or(0) }));
    }
    if precision >= 0 {
        let digits = precision.min(400) as usize;
        let text = if x.is_finite() { format!("{x:.digits$}") } else { x.to_string() };
        return Ok(Value::Float(text.parse().unwrap_or(x)));
    }
    if x.fract() != 0.0 || x.abs() > 1e15 {
        return Err(Fault::new("`round` of a fraction to tens is not supported"));
    }
    Ok(Value::Float((to_tens(x as i128).unwrap_or(0) as f64).copysign(x)))
}

/// `filesizeformat`.
fn size(value: &Value, is_binary: bool) -> Result<String> {
    const PREFIXES: [char; 8] = ['k', 'M', 'G', 'T', 'P', 'E', 'Z', 'Y'];
    let Some(bytes) = float(value)? else { return expected("filesizeformat", value) };
    let base = if is_binary { 1024 } else { 1000 };
    if bytes == 1.0 {
        return Ok("1 Byte".into());
    }
    if bytes < base as f64 {
        return Ok(format!("{} Bytes", bytes as i128));
    }
    let mut unit: i128 = base;
    for (n, prefix) in PREFIXES.into_iter().enumerate() {
        unit *= base;
        let is_less = value::order(&Value::Float(bytes), &Value::Int(unit), 0)?;
        if is_less == Some(Ordering::Less) || n + 1 == PREFIXES.len() {
            let prefix = match is_binary {
                true => format!("{}i", prefix.to_ascii_uppercase()),
                false => prefix.to_string(),
            };
            return Ok(format!("{:.1} {prefix}B", base as f64 * bytes / unit as f64));
        }
    }
    expected("filesizeformat", value)
}
