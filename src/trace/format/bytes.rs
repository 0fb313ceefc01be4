//! The part of some bytes that has not been read yet: every read is checked against what is left,
//! and every refusal says where and why.

use std::fmt::Display;

/// Why bytes are refused; the reader adds the file's name.
#[derive(Debug)]
pub struct Fault {
    pub place: String,
    pub expected: String,
    pub got: String,
}

impl Fault {
    pub fn new(place: impl Display, expected: impl Display, got: impl Display) -> Fault {
        let [place, expected, got] =
            [&place as &dyn Display, &expected, &got].map(|s| s.to_string());
        Fault { place, expected, got }
    }
}

pub struct Bytes<'a> {
    rest: &'a [u8],
    /// Name of these bytes, for messages.
    what: String,
    /// Position of `rest`.
    at: usize,
}

impl<'a> Bytes<'a> {
    pub fn new(what: impl Into<String>, bytes: &'a [u8]) -> Bytes<'a> {
        Bytes { rest: bytes, what: what.into(), at: 0 }
    }

    pub fn at(&self) -> usize {
        self.at
    }

    /// Bytes that are left.
    pub fn len(&self) -> usize {
        self.rest.len()
    }

    /// A refusal of what stands `back` bytes before the present position.
    pub fn fault(&self, back: usize, expected: impl Display, got: impl Display) -> Fault {
        Fault::new(format!("{}byte {}", self.what, self.at - back), expected, got)
    }

    pub fn take(&mut self, n: usize, name: &str) -> Result<&'a [u8], Fault> {
        let Some((head, rest)) = self.rest.split_at_checked(n) else {
            let got = format!("the end after {}", self.len());
            return Err(self.fault(0, format!("{name} ({n} bytes)"), got));
        };
        self.rest = rest;
        self.at += n;
        Ok(head)
    }

    /// `n` values of `width` bytes each, whose product may not fit.
    pub fn many(&mut self, n: usize, width: usize, name: &str) -> Result<&'a [u8], Fault> {
        match n.checked_mul(width) {
            Some(n) => self.take(n, name),
            None => Err(self.fault(0, format!("fewer {name}"), n)),
        }
    }

    pub fn array<const N: usize>(&mut self, name: &str) -> Result<[u8; N], Fault> {
        Ok(self.take(N, name)?.try_into().expect("as many bytes as were taken"))
    }

    pub fn u8(&mut self, name: &str) -> Result<u8, Fault> {
        self.array(name).map(|[byte]| byte)
    }

    pub fn u32(&mut self, name: &str) -> Result<u32, Fault> {
        self.array(name).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, name: &str) -> Result<u64, Fault> {
        self.array(name).map(u64::from_le_bytes)
    }

    /// A u32 that counts something, of which `max` are the most that make sense.
    pub fn count(&mut self, max: usize, name: &str) -> Result<usize, Fault> {
        let n = self.u32(name)? as usize;
        if n > max {
            return Err(self.fault(4, format!("at most {max} as {name}"), n));
        }
        Ok(n)
    }

    /// u16 length, UTF-8.
    pub fn string(&mut self, name: &str) -> Result<&'a str, Fault> {
        let len = u16::from_le_bytes(self.array(name)?);
        let text = self.take(len.into(), name)?;
        std::str::from_utf8(text)
            .map_err(|_| self.fault(text.len(), format!("UTF-8 as {name}"), "something else"))
    }

    /// Nothing may be left.
    pub fn end(&self) -> Result<(), Fault> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(self.fault(0, "the end", format!("{} more bytes", self.len())))
    }
}

/// Writes a string for `Bytes::string`; a long text is cut.
pub fn put_string(text: &str, out: &mut Vec<u8>) {
    let len = (0..=text.len().min(u16::MAX.into())).rev().find(|n| text.is_char_boundary(*n));
    let text = &text[..len.expect("0 is a boundary")];
    out.extend((text.len() as u16).to_le_bytes());
    out.extend(text.as_bytes());
}
