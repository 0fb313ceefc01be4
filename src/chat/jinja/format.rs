//! `str.format`: fields, and Python's language of format specifications.

use super::eval::Interpreter;
use super::ops::MAX_TEXT_BYTES;
use super::percent::{ascii, float, precision, width};
use super::value::{self, Value};
use super::{Arguments, Fault, Result};

struct Fields<'a> {
    interpreter: &'a mut Interpreter,
    args: &'a Arguments,
    next: usize,
    /// `Some(true)`: fields have numbers; `Some(false)`: they count by themselves.
    is_numbered: Option<bool>,
}

/// `text.format(*args)`.
pub fn format(interpreter: &mut Interpreter, text: &str, args: &Arguments) -> Result<String> {
    let mut fields = Fields { interpreter, args, next: 0, is_numbered: None };
    fields.format(text, 2)
}

fn fault<T>(message: &str) -> Result<T> {
    Err(Fault::new(format!("`format` of a text: {message}")))
}

impl Fields<'_> {
    fn format(&mut self, text: &str, depth: usize) -> Result<String> {
        let (mut out, mut rest) = (String::new(), text);
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(&rest[..at]);
            let (brace, after) = rest[at..].split_at(1);
            if let Some(after) = after.strip_prefix(brace) {
                out.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return fault("a `}` without its `{`");
            }
            let mut open = 1;
            let end = after.find(|c| {
                open += i32::from(c == '{') - i32::from(c == '}');
                open == 0
            });
            let Some(end) = end else { return fault("a `{` without its `}`") };
            self.field(&after[..end], depth, &mut out)?;
            if out.len() > MAX_TEXT_BYTES {
                return fault("the result is too large");
            }
            rest = &after[end + 1..];
        }
        out.push_str(rest);
        Ok(out)
    }

    fn field(&mut self, field: &str, depth: usize, out: &mut String) -> Result<()> {
        if depth == 0 {
            return fault("fields are nested too deeply");
        }
        // A `:` or a `!` within brackets belongs to the key.
        let mut brackets = 0;
        let end = field.find(|c| {
            brackets += i32::from(c == '[') - i32::from(c == ']');
            brackets <= 0 && (c == ':' || c == '!')
        });
        let (name, rest) = field.split_at(end.unwrap_or(field.len()));
        let (conversion, spec) = match rest.strip_prefix('!') {
            Some(rest) => {
                let mut chars = rest.chars();
                let conversion = chars.next();
                match chars.as_str().strip_prefix(':') {
                    Some(spec) => (conversion, spec),
                    None if chars.as_str().is_empty() => (conversion, ""),
                    None => return fault("expected `:` behind the conversion"),
                }
            }
            None => (None, rest.strip_prefix(':').unwrap_or("")),
        };
        let value = self.value(name)?;
        let value = match conversion {
            None => value,
            Some('s') => value.print()?.into(),
            Some('r') => value.repr()?.into(),
            Some('a') => ascii(&value.repr()?).into(),
            Some(other) => return fault(&format!("`!{other}` is no conversion")),
        };
        let spec = self.format(spec, depth - 1)?;
        out.push_str(&by_spec(&value, &spec)?);
        Ok(())
    }

    fn value(&mut self, name: &str) -> Result<Value> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(end);
        if first.is_empty() && !rest.is_empty() {
            return fault(&format!("`{name}` needs a number or a name at its beginning"));
        }
        let number = if first.is_empty() { Some(self.next) } else { first.parse().ok() };
        let mut value = match number {
            Some(n) => {
                let is_numbered = !first.is_empty();
                if self.is_numbered.replace(is_numbered).is_some_and(|was| was != is_numbered) {
                    return fault("fields with and without numbers");
                }
                self.next += usize::from(!is_numbered);
                self.args.positional.get(n).cloned()
            }
            None => self.args.named.iter().find(|(key, _)| **key == *first).map(|(_, v)| v.clone()),
        };
        while !rest.is_empty() {
            let Some(of) = value else { break };
            if let Some(after) = rest.strip_prefix('.') {
                let end = after.find(['.', '[']).unwrap_or(after.len());
                value = Some(self.interpreter.attribute(&of, &after[..end])?);
                rest = &after[end..];
            } else if let Some((key, after)) = rest[1..].split_once(']') {
                let key = key.parse().map_or_else(|_| key.into(), Value::Int);
                value = Some(self.interpreter.item(&of, &key)?);
                rest = after;
            } else {
                return fault("a `[` without its `]`");
            }
        }
        value.ok_or_else(|| Fault::new(format!("`format` of a text: no value for `{name}`")))
    }
}

#[derive(Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    is_alternate: bool,
    has_zeros: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Spec {
    fn parse(text: &str) -> Result<Self> {
        let mut spec = Self::default();
        let mut rest = text;
        let is_align = |c: &char| "<>=^".contains(*c);
        let mut chars = rest.chars();
        match (chars.next(), chars.next().filter(is_align)) {
            (Some(fill), Some(align)) => {
                (spec.fill, spec.align) = (Some(fill), Some(align));
                rest = chars.as_str();
            }
            (Some(align), None) if is_align(&align) => {
                spec.align = Some(align);
                rest = &rest[1..];
            }
            _ => {}
        }
        let take = |all: &str, rest: &mut &str| {
            let found = rest.chars().next().filter(|c| all.contains(*c));
            *rest = &rest[usize::from(found.is_some())..];
            found
        };
        spec.sign = take("+- ", &mut rest);
        if take("z", &mut rest).is_some() {
            return fault("the option `z` is not supported");
        }
        spec.is_alternate = take("#", &mut rest).is_some();
        spec.has_zeros = take("0", &mut rest).is_some();
        let number = |rest: &mut &str| -> Result<Option<usize>> {
            let n = rest.bytes().take_while(u8::is_ascii_digit).count();
            let (digits, after) = rest.split_at(n);
            *rest = after;
            match digits {
                "" => Ok(None),
                _ => digits.parse().map(Some).or_else(|_| fault("a width too large")),
            }
        };
        spec.width = width(number(&mut rest)?.unwrap_or(0))?;
        spec.grouping = take(",_", &mut rest);
        if let Some(after) = rest.strip_prefix('.') {
            rest = after;
            let Some(n) = number(&mut rest)? else { return fault("a point without a precision") };
            spec.precision = Some(precision(n)?);
        }
        let mut chars = rest.chars();
        spec.kind = chars.next();
        match chars.next() {
            None => Ok(spec),
            Some(_) => fault(&format!("`{text}` is no format specification")),
        }
    }

    fn pad(&self, sign: &str, text: &str, align: char) -> String {
        let n = self.width.saturating_sub(sign.chars().count() + text.chars().count());
        let zero = self.has_zeros.then_some('0');
        let fill = self.fill.or(zero).unwrap_or(' ');
        let fill = |n: usize| std::iter::repeat_n(fill, n).collect::<String>();
        match align {
            '<' => format!("{sign}{text}{}", fill(n)),
            '=' => format!("{sign}{}{text}", fill(n)),
            '^' => format!("{}{sign}{text}{}", fill(n / 2), fill(n - n / 2)),
            _ => format!("{}{sign}{text}", fill(n)),
        }
    }

    fn number(&self, is_negative: bool, prefix: &str, digits: &str) -> Result<String> {
        let sign = match (is_negative, self.sign) {
            (true, _) => "-",
            (_, Some('+')) => "+",
            (_, Some(' ')) => " ",
            _ => "",
        };
        let is_hexadecimal = matches!(self.kind, Some('x' | 'X' | 'o' | 'b'));
        let digits = match self.grouping {
            None => digits.to_string(),
            Some(',') if is_hexadecimal => return fault("`,` goes with decimal digits"),
            Some(mark) => grouped(digits, mark, if is_hexadecimal { 4 } else { 3 }),
        };
        let by_zeros = if self.has_zeros { '=' } else { '>' };
        let align = self.align.unwrap_or(by_zeros);
        if self.grouping.is_some() && align == '=' && self.width > 0 {
            return fault("zeros with grouped digits are not supported");
        }
        Ok(self.pad(&format!("{sign}{prefix}"), &digits, align))
    }
}

fn grouped(digits: &str, mark: char, size: usize) -> String {
    let end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
    let (whole, rest) = digits.split_at(end);
    let mut out = String::new();
    for (n, c) in whole.chars().enumerate() {
        if n > 0 && (whole.len() - n) % size == 0 {
            out.push(mark);
        }
        out.push(c);
    }
    out + rest
}

/// `format(value, spec)`.
fn by_spec(value: &Value, spec: &str) -> Result<String> {
    if spec.is_empty() {
        return value.print();
    }
    let kinds = match value {
        Value::Str(_) | Value::Markup(_) => "s",
        Value::Bool(_) | Value::Int(_) => "bcdoxXneEfFgG%",
        Value::Float(_) => "neEfFgG%",
        _ => {
            let kind = value.kind();
            return fault(&format!("a value of type {kind} takes no format specification"));
        }
    };
    let spec = Spec::parse(spec)?;
    if spec.kind.is_some_and(|kind| !kinds.contains(kind)) {
        return fault(&format!("this kind of field does not go with type {}", value.kind()));
    }
    if let Some(text) = value.as_str() {
        if spec.sign.is_some() || spec.align == Some('=') || spec.is_alternate {
            return fault("signs do not go with texts");
        }
        if spec.grouping.is_some() {
            return fault("grouped digits do not go with texts");
        }
        let n = spec.precision.unwrap_or(usize::MAX);
        let text: String = text.chars().take(n).collect();
        return Ok(spec.pad("", &text, spec.align.unwrap_or('<')));
    }
    match (value.as_int(), spec.kind) {
        (Some(n), None | Some('b' | 'c' | 'd' | 'o' | 'x' | 'X' | 'n')) => integer(&spec, n),
        _ => real(&spec, value.as_number().unwrap_or(f64::NAN)),
    }
}

fn integer(spec: &Spec, n: i128) -> Result<String> {
    if spec.precision.is_some() {
        return fault("integers have no precision");
    }
    let size = n.unsigned_abs();
    let (prefix, digits) = match spec.kind {
        Some('b') => ("0b", format!("{size:b}")),
        Some('o') => ("0o", format!("{size:o}")),
        Some('x') => ("0x", format!("{size:x}")),
        Some('X') => ("0X", format!("{size:X}")),
        Some('c') => {
            let c = u32::try_from(n).ok().and_then(char::from_u32);
            let Some(c) = c.filter(|_| spec.sign.is_none()) else {
                return fault("this number is no character");
            };
            return Ok(spec.pad("", &c.to_string(), spec.align.unwrap_or('<')));
        }
        _ => ("", size.to_string()),
    };
    spec.number(n < 0, if spec.is_alternate { prefix } else { "" }, &digits)
}

fn real(spec: &Spec, x: f64) -> Result<String> {
    let size = x.abs();
    let (kind, digits) = (spec.kind, spec.precision);
    let text = match kind {
        None => match digits {
            None => value::float(size),
            Some(n) => without_type(size, n),
        },
        Some('%') => float(size * 100.0, 'f', digits.unwrap_or(6), spec.is_alternate) + "%",
        Some('n') => float(size, 'g', digits.unwrap_or(6), spec.is_alternate),
        Some(kind) => float(size, kind, digits.unwrap_or(6), spec.is_alternate),
    };
    spec.number(x.is_sign_negative() && !x.is_nan(), "", &text)
}

/// A float with a precision and no type: `g` with a digit behind the point at least.
fn without_type(x: f64, n: usize) -> String {
    let text = float(x, 'g', n, false);
    let exponent = format!("{x:.*e}", n.max(1) - 1);
    let exponent: i64 = exponent.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    // One digit less than `g` takes goes to the exponent.
    if text.contains('e') || !x.is_finite() {
        return text;
    }
    if exponent >= n.max(1) as i64 - 1 && exponent > 0 {
        return float(x, 'e', n.max(1) - 1, false).replace(".0e", "e");
    }
    if text.contains('.') { text } else { text + ".0" }
}
