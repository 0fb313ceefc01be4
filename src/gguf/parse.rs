//! A cursor over a file's first bytes: every read is checked against what is left, and every
//! refusal names the field.

use super::value::{Array, Value, ValueType};
use crate::{Error, Result};
use byteorder::{ByteOrder, LittleEndian as LE};
use std::fmt;
use std::path::Path;

/// The name of a field of the header in errors.
#[derive(Clone, Copy)]
pub(super) enum FieldName<'a> {
    Header(&'static str),
    /// The i-th key.
    Key(u64),
    /// A key's value.
    Value(&'a str),
    /// The i-th tensor's name.
    Name(u64),
    /// A part of a tensor's description.
    Tensor(&'a str, &'static str),
}

impl fmt::Display for FieldName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FieldName::Header(what) => f.write_str(what),
            FieldName::Key(i) => write!(f, "metadata key {i}"),
            FieldName::Value(key) => write!(f, "{}", Shown(key)),
            FieldName::Name(i) => write!(f, "name of tensor {i}"),
            FieldName::Tensor(name, "") => write!(f, "tensor {}", Shown(name)),
            FieldName::Tensor(name, what) => write!(f, "tensor {}: {what}", Shown(name)),
        }
    }
}

/// A name from a file, fit for a message whatever is in it: no control characters, no page of
/// text.
struct Shown<'a>(&'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX_CHARS: usize = 80;
        let mut chars = self.0.chars();
        for c in chars.by_ref().take(MAX_CHARS) {
            if c.is_control() { write!(f, "{}", c.escape_default())? } else { write!(f, "{c}")? }
        }
        if chars.next().is_some() { f.write_str("…") } else { Ok(()) }
    }
}

/// The extent of a value: a slice of the file that `Value` can be made from again at any time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    ty: ValueType,
    /// Element type and count, if `ty` is an array.
    array: Option<(ValueType, usize)>,
    start: usize,
    end: usize,
}

impl Extent {
    /// `bytes` must be those that were parsed.
    pub(super) fn value<'b>(&self, bytes: &'b [u8]) -> Value<'b> {
        let bytes = &bytes[self.start..self.end];
        match self.array {
            Some((ty, len)) => Value::Array(Array::new(ty, len, bytes)),
            None => Value::decode(self.ty, bytes),
        }
    }
}

/// Message for a file that ends too early.
pub(super) const CUT: &str = "the file ends within its header: download it again";

/// No header has a string of so many bytes, or so many of anything: such a length is damage, and
/// not a sign that the file was cut.
const MAX_PLAUSIBLE: u64 = 1 << 32;

pub(super) struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Cursor { path, bytes, at: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(super) fn fail(
        &self,
        field: FieldName<'_>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Error {
        Error::format(self.path, field.to_string(), expected, got)
    }

    /// The file ends before `what`.
    fn cut(&self, field: FieldName<'_>, what: impl fmt::Display) -> Error {
        let got = format!("the end of the file {} bytes later ({CUT})", self.left());
        self.fail(field, format!("{what} at position {}", self.at), got)
    }

    pub(super) fn take(&mut self, n: usize, field: FieldName<'_>) -> Result<&'a [u8]> {
        if n > self.left() {
            return Err(self.cut(field, format_args!("{n} bytes")));
        }
        let slice = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(slice)
    }

    pub(super) fn u32(&mut self, field: FieldName<'_>) -> Result<u32> {
        self.take(4, field).map(LE::read_u32)
    }

    pub(super) fn u64(&mut self, field: FieldName<'_>) -> Result<u64> {
        self.take(8, field).map(LE::read_u64)
    }

    /// A count of things of at least `min_bytes` each, all of which must still be in the file.
    pub(super) fn count(&mut self, field: FieldName<'_>, min_bytes: usize) -> Result<usize> {
        let n = self.u64(field)?;
        let most = self.left() / min_bytes;
        match usize::try_from(n) {
            Ok(n) if n <= most => Ok(n),
            _ if n < MAX_PLAUSIBLE => {
                Err(self.cut(field, format_args!("{n} of at least {min_bytes} bytes each")))
            }
            _ => {
                let expected = format!("at most {most}, as {} bytes are left", self.left());
                Err(self.fail(field, expected, n.to_string()))
            }
        }
    }

    /// A string's bytes; its length stands before it.
    pub(super) fn string(&mut self, field: FieldName<'_>) -> Result<&'a [u8]> {
        let n = self.u64(field)?;
        match usize::try_from(n) {
            Ok(n) if n <= self.left() => self.take(n, field),
            _ if n < MAX_PLAUSIBLE => Err(self.cut(field, format_args!("a string of {n} bytes"))),
            _ => {
                let expected =
                    format!("a string of at most {} bytes (all that is left)", self.left());
                Err(self.fail(field, expected, format!("a length of {n}")))
            }
        }
    }

    /// A key or a name: UTF-8, not empty, of at most `max_bytes`.
    pub(super) fn name(&mut self, field: FieldName<'_>, max_bytes: usize) -> Result<&'a str> {
        let bytes = self.string(field)?;
        if bytes.is_empty() || bytes.len() > max_bytes {
            let got = format!("{} bytes", bytes.len());
            return Err(self.fail(field, format!("1 to {max_bytes} bytes"), got));
        }
        std::str::from_utf8(bytes)
            .map_err(|_| self.fail(field, "UTF-8 text", Value::String(bytes).to_string()))
    }

    fn value_type(&mut self, field: FieldName<'_>) -> Result<ValueType> {
        let id = self.u32(field)?;
        ValueType::from_id(id)
            .ok_or_else(|| self.fail(field, "a value type from 0 to 12", id.to_string()))
    }

    /// Walks over the value of `key` and says where it lies. Nothing is allocated.
    pub(super) fn extent(&mut self, key: &str) -> Result<Extent> {
        let field = FieldName::Value(key);
        let ty = self.value_type(field)?;
        if ty == ValueType::Array {
            return self.array_extent(field);
        }
        let (start, end) = self.scalar(ty, field)?;
        Ok(Extent { ty, array: None, start, end })
    }

    /// Start and end of one value's bytes (of a string, without its length).
    fn scalar(&mut self, ty: ValueType, field: FieldName<'_>) -> Result<(usize, usize)> {
        let bytes = match ty.fixed_bytes() {
            Some(size) => self.take(size, field)?,
            None => self.string(field)?,
        };
        if ty == ValueType::Bool {
            self.check_bools(bytes, field)?;
        }
        Ok((self.at - bytes.len(), self.at))
    }

    fn array_extent(&mut self, field: FieldName<'_>) -> Result<Extent> {
        let ty = self.value_type(field)?;
        if ty == ValueType::Array {
            return Err(self.fail(field, "an array of plain values", "an array of arrays"));
        }
        let len = self.count(field, ty.min_bytes())?;
        let start = self.at;
        match ty.fixed_bytes() {
            // Cannot overflow: `count` has compared len · size with what is left.
            Some(size) => {
                let bytes = self.take(len * size, field)?;
                if ty == ValueType::Bool {
                    self.check_bools(bytes, field)?;
                }
            }
            None => {
                for _ in 0..len {
                    self.string(field)?;
                }
            }
        }
        Ok(Extent { ty: ValueType::Array, array: Some((ty, len)), start, end: self.at })
    }

    fn check_bools(&self, bytes: &[u8], field: FieldName<'_>) -> Result<()> {
        match bytes.iter().find(|&&b| b > 1) {
            Some(b) => Err(self.fail(field, "a bool of 0 or 1", b.to_string())),
            None => Ok(()),
        }
    }
}
