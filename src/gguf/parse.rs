//! A cursor over a file's first bytes: every read is checked against what is left, and every
//! refusal names the place.

use super::value::{Array, Value, ValueType};
use crate::{Error, Result};
use byteorder::{ByteOrder, LittleEndian as LE};
use std::fmt;
use std::path::Path;

/// The place of a read in the header; becomes the `field` of an error.
#[derive(Clone, Copy)]
pub(super) enum Place<'a> {
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

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Header(what) => f.write_str(what),
            Place::Key(i) => write!(f, "metadata key {i}"),
            Place::Value(key) => write!(f, "{}", Shown(key)),
            Place::Name(i) => write!(f, "name of tensor {i}"),
            Place::Tensor(name, "") => write!(f, "tensor {}", Shown(name)),
            Place::Tensor(name, what) => write!(f, "tensor {}: {what}", Shown(name)),
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
        place: Place<'_>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Error {
        Error::format(self.path, place.to_string(), expected, got)
    }

    /// The file ends before `what`.
    fn cut(&self, place: Place<'_>, what: impl fmt::Display) -> Error {
        let got = format!("the end of the file {} bytes later ({CUT})", self.left());
        self.fail(place, format!("{what} at position {}", self.at), got)
    }

    pub(super) fn take(&mut self, n: usize, place: Place<'_>) -> Result<&'a [u8]> {
        if n > self.left() {
            return Err(self.cut(place, format_args!("{n} bytes")));
        }
        let slice = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(slice)
    }

    pub(super) fn u32(&mut self, place: Place<'_>) -> Result<u32> {
        self.take(4, place).map(LE::read_u32)
    }

    pub(super) fn u64(&mut self, place: Place<'_>) -> Result<u64> {
        self.take(8, place).map(LE::read_u64)
    }

    /// A count of things of at least `min_bytes` each, all of which must still be in the file.
    pub(super) fn count(&mut self, place: Place<'_>, min_bytes: usize) -> Result<usize> {
        let n = self.u64(place)?;
        let most = self.left() / min_bytes;
        match usize::try_from(n) {
            Ok(n) if n <= most => Ok(n),
            _ if n < MAX_PLAUSIBLE => {
                Err(self.cut(place, format_args!("{n} of at least {min_bytes} bytes each")))
            }
            _ => {
                let expected = format!("at most {most}, as {} bytes are left", self.left());
                Err(self.fail(place, expected, n.to_string()))
            }
        }
    }

    /// A string's bytes; its length stands before it.
    pub(super) fn string(&mut self, place: Place<'_>) -> Result<&'a [u8]> {
        let n = self.u64(place)?;
        match usize::try_from(n) {
            Ok(n) if n <= self.left() => self.take(n, place),
            _ if n < MAX_PLAUSIBLE => Err(self.cut(place, format_args!("a string of {n} bytes"))),
            _ => {
                let expected =
                    format!("a string of at most {} bytes (all that is left)", self.left());
                Err(self.fail(place, expected, format!("a length of {n}")))
            }
        }
    }

    /// A key or a name: UTF-8, not empty, of at most `max_bytes`.
    pub(super) fn name(&mut self, place: Place<'_>, max_bytes: usize) -> Result<&'a str> {
        let bytes = self.string(place)?;
        if bytes.is_empty() || bytes.len() > max_bytes {
            let got = format!("{} bytes", bytes.len());
            return Err(self.fail(place, format!("1 to {max_bytes} bytes"), got));
        }
        std::str::from_utf8(bytes)
            .map_err(|_| self.fail(place, "UTF-8 text", Value::String(bytes).to_string()))
    }

    fn value_type(&mut self, place: Place<'_>) -> Result<ValueType> {
        let id = self.u32(place)?;
        ValueType::from_id(id)
            .ok_or_else(|| self.fail(place, "a value type from 0 to 12", id.to_string()))
    }

    /// Walks over the value of `key` and says where it lies. Nothing is allocated.
    pub(super) fn extent(&mut self, key: &str) -> Result<Extent> {
        let place = Place::Value(key);
        let ty = self.value_type(place)?;
        if ty == ValueType::Array {
            return self.array_extent(place);
        }
        let (start, end) = self.scalar(ty, place)?;
        Ok(Extent { ty, array: None, start, end })
    }

    /// Start and end of one value's bytes (of a string, without its length).
    fn scalar(&mut self, ty: ValueType, place: Place<'_>) -> Result<(usize, usize)> {
        let bytes = match ty.fixed_bytes() {
            Some(size) => self.take(size, place)?,
            None => self.string(place)?,
        };
        if ty == ValueType::Bool {
            self.check_bools(bytes, place)?;
        }
        Ok((self.at - bytes.len(), self.at))
    }

    fn array_extent(&mut self, place: Place<'_>) -> Result<Extent> {
        let ty = self.value_type(place)?;
        if ty == ValueType::Array {
            return Err(self.fail(place, "an array of plain values", "an array of arrays"));
        }
        let len = self.count(place, ty.min_bytes())?;
        let start = self.at;
        match ty.fixed_bytes() {
            // Cannot overflow: `count` has compared len · size with what is left.
            Some(size) => {
                let bytes = self.take(len * size, place)?;
                if ty == ValueType::Bool {
                    self.check_bools(bytes, place)?;
                }
            }
            None => {
                for _ in 0..len {
                    self.string(place)?;
                }
            }
        }
        Ok(Extent { ty: ValueType::Array, array: Some((ty, len)), start, end: self.at })
    }

    fn check_bools(&self, bytes: &[u8], place: Place<'_>) -> Result<()> {
        match bytes.iter().find(|&&b| b > 1) {
            Some(b) => Err(self.fail(place, "a bool of 0 or 1", b.to_string())),
            None => Ok(()),
        }
    }
}
