//! `%` on strings, and the numbers that it shares with `str.format`.

use super::ops::MAX_TEXT_BYTES;
use super::text::with_exponent;
use super::value::{Key, Value};
use super::{Fault, Result};

/// The widest field. Wider ones fill memory and no prompt.
const MAX_WIDTH: usize = 1 << 20;

/// The most digits behind a point.
const MAX_PRECISION: usize = 1000;

#[derive(Default)]
struct Field {
    is_left: bool,
    has_plus: bool,
    has_space: bool,
    has_zeros: bool,
    is_alternate: bool,
    width: usize,
    precision: Option<usize>,
}

/// A width or a precision that is no attack.
pub fn bounded(what: &str, n: usize, most: usize) -> Result<usize> {
    match n <= most {
        true => Ok(n),
        false => Err(Fault::new(format!("a {what} of {n} is too large: at most {most}"))),
    }
}

pub fn width(n: usize) -> Result<usize> {
    bounded("width", n, MAX_WIDTH)
}

pub fn precision(n: usize) -> Result<usize> {
    bounded("precision", n, MAX_PRECISION)
}

struct Values<'a> {
    given: &'a Value,
    items: Vec<Value>,
    at: usize,
    mapped: bool,
}

impl Values<'_> {
    fn next(&mut self) -> Result<Value> {
        self.at += 1;
        let next = self.items.get(self.at - 1).cloned();
        next.ok_or_else(|| Fault::new("`%` on a text: not enough values for its fields"))
    }
}

/// `text % given`.
pub fn format(text: &str, given: &Value) -> Result<String> {
    let items = match given.as_tuple() {
        Some(items) => items.to_vec(),
        None => vec![given.clone()],
    };
    let mut values = Values { given, items, at: 0, mapped: false };
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        rest = field(rest, &mut values, &mut out)?;
        if out.len() > MAX_TEXT_BYTES {
            return Err(Fault::new("`%` on a text: the result is too large"));
        }
    }
    out.push_str(rest);
    let is_mapping =
        matches!(given, Value::Dict(_) | Value::List(_) | Value::Range(_) | Value::Undefined(_));
    if values.at < values.items.len() && !is_mapping && !values.mapped {
        return Err(Fault::new("`%` on a text: more values than fields"));
    }
    Ok(out)
}

/// Writes the field at the beginning of `rest`, and returns what follows.
fn field<'t>(rest: &'t str, values: &mut Values, out: &mut String) -> Result<&'t str> {
    let mut field = Field::default();
    let mut rest = rest;
    let mut keyed = None;
    if let Some(inner) = rest.strip_prefix('(') {
        let mut depth = 1;
        let end = inner.find(|c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            depth == 0
        });
        let end = end.ok_or_else(|| Fault::new("`%` on a text: a key without its `)`"))?;
        let Value::Dict(dict) = values.given else {
            return Err(Fault::new("`%` on a text with keys expects a mapping"));
        };
        let key = Key(inner[..end].into());
        let missing = || Fault::new(format!("`%` on a text: no value for `{}`", &inner[..end]));
        keyed = Some(dict.get(&key).cloned().ok_or_else(missing)?);
        values.mapped = true;
        rest = &inner[end + 1..];
    }
    while let Some(flag) = rest.chars().next().filter(|c| "-+ 0#".contains(*c)) {
        match flag {
            '-' => field.is_left = true,
            '+' => field.has_plus = true,
            ' ' => field.has_space = true,
            '0' => field.has_zeros = true,
            _ => field.is_alternate = true,
        }
        rest = &rest[1..];
    }
    let (n, after) = count(rest, values)?;
    if let Some(n) = n {
        field.is_left |= n < 0;
        field.width = width(n.unsigned_abs() as usize)?;
    }
    rest = after;
    if let Some(after) = rest.strip_prefix('.') {
        let (n, after) = count(after, values)?;
        field.precision = Some(precision(n.unwrap_or(0).max(0) as usize)?);
        rest = after;
    }
    rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
    let mut chars = rest.chars();
    let Some(kind) = chars.next() else {
        return Err(Fault::new("`%` on a text: a field without its end"));
    };
    if kind == '%' {
        out.push('%');
        return Ok(chars.as_str());
    }
    let value = match keyed {
        Some(value) => value,
        None => values.next()?,
    };
    field.write(kind, &value, out)?;
    Ok(chars.as_str())
}

/// A number, or `*`, which takes one of the values.
fn count<'t>(rest: &'t str, values: &mut Values) -> Result<(Option<i64>, &'t str)> {
    if let Some(after) = rest.strip_prefix('*') {
        let n = values.next()?.as_int().and_then(|n| i64::try_from(n).ok());
        let n = n.ok_or_else(|| Fault::new("`%` on a text: `*` expects an integer"))?;
        return Ok((Some(n), after));
    }
    let n = rest.bytes().take_while(u8::is_ascii_digit).count();
    if n == 0 {
        return Ok((None, rest));
    }
    let number = rest[..n].parse().map_err(|_| Fault::new("`%` on a text: a width too large"))?;
    Ok((Some(number), &rest[n..]))
}

impl Field {
    fn write(&self, kind: char, value: &Value, out: &mut String) -> Result<()> {
        let refuse =
            || Err(Fault::new(format!("`%{kind}` does not take a value of type {}", value.kind())));
        if let Value::Undefined(what) = value
            && !"sra".contains(kind)
        {
            return Err(Fault::undefined(what));
        }
        let text = match kind {
            's' => value.print()?,
            'r' => value.repr()?,
            'a' => ascii(&value.repr()?),
            'c' => match (value.as_str(), value.as_int()) {
                (Some(text), _) if text.chars().count() == 1 => text.to_string(),
                (_, Some(n)) => match u32::try_from(n).ok().and_then(char::from_u32) {
                    Some(c) => c.to_string(),
                    None => return refuse(),
                },
                _ => return refuse(),
            },
            'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
                let n = match value {
                    Value::Float(x) if x.is_finite() && x.abs() < 1e38 && "diu".contains(kind) => {
                        *x as i128
                    }
                    _ => match value.as_int() {
                        Some(n) => n,
                        None => return refuse(),
                    },
                };
                return self.write_integer(kind, n, out);
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
                let Some(x) = value.as_number() else { return refuse() };
                let digits = float(x.abs(), kind, self.precision.unwrap_or(6), self.is_alternate);
                self.write_number(x.is_sign_negative() && !x.is_nan(), "", digits, out);
                return Ok(());
            }
            other => return Err(Fault::new(format!("`%{other}` is no field of a text"))),
        };
        let text = match self.precision {
            Some(n) if kind != 'c' => text.chars().take(n).collect(),
            _ => text,
        };
        self.pad(&text, out);
        Ok(())
    }

    fn pad(&self, text: &str, out: &mut String) {
        let n = self.width.saturating_sub(text.chars().count());
        if self.is_left {
            out.push_str(text);
        }
        out.extend(std::iter::repeat_n(' ', n));
        if !self.is_left {
            out.push_str(text);
        }
    }

    fn write_integer(&self, kind: char, n: i128, out: &mut String) -> Result<()> {
        let size = n.unsigned_abs();
        let (prefix, digits) = match kind {
            'x' => ("0x", format!("{size:x}")),
            'X' => ("0X", format!("{size:X}")),
            'o' => ("0o", format!("{size:o}")),
            _ => ("", size.to_string()),
        };
        let prefix = if self.is_alternate { prefix } else { "" };
        let zeros = self.precision.unwrap_or(0).saturating_sub(digits.len());
        self.write_number(n < 0, prefix, "0".repeat(zeros) + &digits, out);
        Ok(())
    }

    fn write_number(&self, is_negative: bool, prefix: &str, digits: String, out: &mut String) {
        let sign = match (is_negative, self.has_plus, self.has_space) {
            (true, ..) => "-",
            (_, true, _) => "+",
            (_, _, true) => " ",
            _ => "",
        };
        let n = sign.len() + prefix.len() + digits.len();
        let zeros = match self.has_zeros && !self.is_left {
            true => self.width.saturating_sub(n),
            false => 0,
        };
        self.pad(&format!("{sign}{prefix}{}{digits}", "0".repeat(zeros)), out);
    }
}

/// The digits of a number that is not negative, as C prints them for this conversion.
pub fn float(x: f64, kind: char, precision: usize, is_alternate: bool) -> String {
    let is_upper = kind.is_ascii_uppercase();
    let text = if x.is_nan() {
        "nan".into()
    } else if x.is_infinite() {
        "inf".into()
    } else {
        match kind.to_ascii_lowercase() {
            'f' => {
                let text = format!("{x:.precision$}");
                if is_alternate && precision == 0 { text + "." } else { text }
            }
            'e' => with_exponent(&format!("{x:.precision$e}"), 'e'),
            _ => general(x, precision.max(1), is_alternate),
        }
    };
    if is_upper { text.to_uppercase() } else { text }
}

fn general(x: f64, precision: usize, is_alternate: bool) -> String {
    let scientific = format!("{x:.*e}", precision - 1);
    let exponent: i64 =
        scientific.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or_default();
    let plain = |text: &str| match text.contains('.') && !is_alternate {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text.to_string(),
    };
    if (-4..precision as i64).contains(&exponent) {
        let digits = (precision as i64 - 1 - exponent) as usize;
        return plain(&format!("{x:.digits$}"));
    }
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    with_exponent(&format!("{}e{exponent}", plain(digits)), 'e')
}

/// `repr` with escapes for all that is not ASCII.
pub fn ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c as u32 {
            0..0x80 => out.push(c),
            n @ 0x80..0x100 => out.push_str(&format!("\\x{n:02x}")),
            n @ 0x100..0x1_0000 => out.push_str(&format!("\\u{n:04x}")),
            n => out.push_str(&format!("\\U{n:08x}")),
        }
    }
    out
}
