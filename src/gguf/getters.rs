//! Typed access to metadata. A missing key is `None` (or an error by `require_…`); a value of
//! another type, or one that does not fit, is an error that says what stands there.

use super::file::Gguf;
use super::value::{Array, Value};
use crate::{Error, Result};

fn as_u32(value: Value<'_>) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

fn as_i32(value: Value<'_>) -> Option<i32> {
    i32::try_from(value.as_i64()?).ok()
}

impl Gguf {
    fn typed<'a, X>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(Value<'a>) -> Option<X>,
    ) -> Result<Option<X>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match convert(value) {
            Some(x) => Ok(Some(x)),
            None => {
                let got = match value {
                    Value::Array(_) => format!("an array of {value}"),
                    _ => format!("{} {value}", value.type_name()),
                };
                Err(Error::format(self.path(), key, expected, got))
            }
        }
    }

    fn required<X>(&self, key: &str, expected: &str, found: Result<Option<X>>) -> Result<X> {
        found?.ok_or_else(|| Error::format(self.path(), key, expected, "nothing"))
    }

    fn elements<'a, X>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl Fn(Value<'a>) -> Option<X>,
    ) -> Result<Option<Vec<X>>> {
        let all = |array: Array<'a>| {
            // Element by element the array is inside the file, so this is bounded by its size.
            let mut out = Vec::with_capacity(array.len());
            for value in array {
                out.push(convert(value)?);
            }
            Some(out)
        };
        self.typed(key, expected, |value| all(value.as_array()?))
    }

    /// Any non-negative integer that fits.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "an integer from 0 to 2^32 - 1", as_u32)
    }

    /// Any non-negative integer.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "an integer from 0", |v| v.as_u64())
    }

    /// Any integer that fits.
    pub fn i64(&self, key: &str) -> Result<Option<i64>> {
        self.typed(key, "an integer below 2^63", |v| v.as_i64())
    }

    /// An f32, or an f64 rounded to one.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        self.typed(key, "a floating-point number", |v| v.as_f32())
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a bool", |v| v.as_bool())
    }

    /// A string that is UTF-8.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a UTF-8 string", |v| std::str::from_utf8(v.as_bytes()?).ok())
    }

    /// An array of strings, which need not be UTF-8.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&[u8]>>> {
        self.elements(key, "an array of strings", |v| v.as_bytes())
    }

    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.elements(key, "an array of floating-point numbers", |v| v.as_f32())
    }

    /// An array of any integers that all fit.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>> {
        self.elements(key, "an array of 32-bit integers", as_i32)
    }

    /// An array of any non-negative integers that all fit.
    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>> {
        self.elements(key, "an array of integers from 0 to 2^32 - 1", as_u32)
    }

    /// An array of any non-negative integers.
    pub fn u64s(&self, key: &str) -> Result<Option<Vec<u64>>> {
        self.elements(key, "an array of integers from 0", |v| v.as_u64())
    }

    pub fn bools(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.elements(key, "an array of bools", |v| v.as_bool())
    }

    pub fn require_u32(&self, key: &str) -> Result<u32> {
        self.required(key, "an integer", self.u32(key))
    }

    pub fn require_u64(&self, key: &str) -> Result<u64> {
        self.required(key, "an integer", self.u64(key))
    }

    pub fn require_f32(&self, key: &str) -> Result<f32> {
        self.required(key, "a floating-point number", self.f32(key))
    }

    pub fn require_str(&self, key: &str) -> Result<&str> {
        self.required(key, "a string", self.str(key))
    }

    pub fn require_strings(&self, key: &str) -> Result<Vec<&[u8]>> {
        self.required(key, "an array of strings", self.strings(key))
    }

    pub fn require_u32s(&self, key: &str) -> Result<Vec<u32>> {
        self.required(key, "an array of integers", self.u32s(key))
    }
}
