//! Metadata values: borrowed from a file (`Value`) or owned, to be written (`OwnedValue`).

use byteorder::{ByteOrder, LittleEndian as LE};
use std::fmt;

/// A value's type, numbered as in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

use ValueType as T;

/// (type, name, name of an array of it, bytes a value if that is fixed)
const TABLE: [(T, &str, &str, Option<usize>); 13] = [
    (T::U8, "u8", "array of u8", Some(1)),
    (T::I8, "i8", "array of i8", Some(1)),
    (T::U16, "u16", "array of u16", Some(2)),
    (T::I16, "i16", "array of i16", Some(2)),
    (T::U32, "u32", "array of u32", Some(4)),
    (T::I32, "i32", "array of i32", Some(4)),
    (T::F32, "f32", "array of f32", Some(4)),
    (T::Bool, "bool", "array of bool", Some(1)),
    (T::String, "string", "array of string", None),
    (T::Array, "array", "array of array", None),
    (T::U64, "u64", "array of u64", Some(8)),
    (T::I64, "i64", "array of i64", Some(8)),
    (T::F64, "f64", "array of f64", Some(8)),
];

impl ValueType {
    pub fn from_id(id: u32) -> Option<Self> {
        TABLE.get(usize::try_from(id).ok()?).map(|row| row.0)
    }

    pub fn id(self) -> u32 {
        self as u32
    }

    pub fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    fn array_name(self) -> &'static str {
        TABLE[self as usize].2
    }

    /// Bytes of one value; `None` for strings and arrays.
    pub(super) fn fixed_bytes(self) -> Option<usize> {
        TABLE[self as usize].3
    }

    /// The fewest bytes that one value takes in a file.
    pub(super) fn min_bytes(self) -> usize {
        match self {
            T::String => 8,
            T::Array => 12,
            _ => TABLE[self as usize].3.unwrap_or(1),
        }
    }
}

/// A value as it stands in the file. Strings are bytes: tokens need not be UTF-8.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(&'a [u8]),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// Decodes a value of a fixed-size type from exactly its bytes, or a string from its text.
    pub(super) fn decode(ty: ValueType, bytes: &'a [u8]) -> Value<'a> {
        match ty {
            T::U8 => Value::U8(bytes[0]),
            T::I8 => Value::I8(bytes[0] as i8),
            T::U16 => Value::U16(LE::read_u16(bytes)),
            T::I16 => Value::I16(LE::read_i16(bytes)),
            T::U32 => Value::U32(LE::read_u32(bytes)),
            T::I32 => Value::I32(LE::read_i32(bytes)),
            T::F32 => Value::F32(LE::read_f32(bytes)),
            T::Bool => Value::Bool(bytes[0] != 0),
            T::String => Value::String(bytes),
            T::Array => unreachable!("arrays of arrays are refused when a file is parsed"),
            T::U64 => Value::U64(LE::read_u64(bytes)),
            T::I64 => Value::I64(LE::read_i64(bytes)),
            T::F64 => Value::F64(LE::read_f64(bytes)),
        }
    }

    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => T::U8,
            Value::I8(_) => T::I8,
            Value::U16(_) => T::U16,
            Value::I16(_) => T::I16,
            Value::U32(_) => T::U32,
            Value::I32(_) => T::I32,
            Value::F32(_) => T::F32,
            Value::Bool(_) => T::Bool,
            Value::String(_) => T::String,
            Value::Array(_) => T::Array,
            Value::U64(_) => T::U64,
            Value::I64(_) => T::I64,
            Value::F64(_) => T::F64,
        }
    }

    /// `u32`, `string`, `array of i32`, …
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Array(array) => array.elem_type().array_name(),
            other => other.value_type().name(),
        }
    }

    /// Any integer that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U64(v) => Some(v),
            ref other => u64::try_from(other.as_i64()?).ok(),
        }
    }

    /// Any integer that fits.
    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => i64::try_from(v).ok(),
            Value::I64(v) => Some(v),
            _ => None,
        }
    }

    /// Either floating-point type; an f64 is rounded.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(v) = *self { Some(v) } else { None }
    }

    pub fn as_bytes(&self) -> Option<&'a [u8]> {
        if let Value::String(v) = *self { Some(v) } else { None }
    }

    pub fn as_array(&self) -> Option<Array<'a>> {
        if let Value::Array(v) = *self { Some(v) } else { None }
    }
}

/// Longest piece of a string that a message or listing quotes, in characters.
const QUOTED_CHARS: usize = 60;

/// Short enough for a message: strings are quoted and cut, arrays are their type and length.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => write!(f, "{v}"),
            Value::I8(v) => write!(f, "{v}"),
            Value::U16(v) => write!(f, "{v}"),
            Value::I16(v) => write!(f, "{v}"),
            Value::U32(v) => write!(f, "{v}"),
            Value::I32(v) => write!(f, "{v}"),
            // `{:?}` changes to an exponent where digits would only be zeros.
            Value::F32(v) => write!(f, "{v:?}"),
            Value::Bool(v) => write!(f, "{v}"),
            Value::U64(v) => write!(f, "{v}"),
            Value::I64(v) => write!(f, "{v}"),
            Value::F64(v) => write!(f, "{v:?}"),
            Value::String(v) => write_quoted(f, v),
            Value::Array(v) => write!(f, "{} {}", v.len(), v.elem_type().name()),
        }
    }
}

fn write_quoted(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    // A character has at most 4 bytes, so this is all that can be shown.
    let shown = &bytes[..bytes.len().min(4 * QUOTED_CHARS)];
    let text = String::from_utf8_lossy(shown);
    let cut: String = text.chars().take(QUOTED_CHARS).collect();
    let whole = shown.len() == bytes.len() && cut.len() == text.len();
    write!(f, "{cut:?}{}", if whole { "" } else { "…" })
}

/// An array in the file; elements are decoded as they are asked for.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    ty: ValueType,
    len: usize,
    /// The elements, one behind the other; strings with their length before them.
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// `bytes` must be the extent of `len` elements, as found by the parser.
    pub(super) fn new(ty: ValueType, len: usize, bytes: &'a [u8]) -> Self {
        Array { ty, len, bytes }
    }

    pub fn elem_type(&self) -> ValueType {
        self.ty
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn iter(&self) -> ArrayIter<'a> {
        ArrayIter { ty: self.ty, left: self.len, bytes: self.bytes }
    }

    /// One element: at once, or by a scan from the start if the elements are strings.
    pub fn get(&self, i: usize) -> Option<Value<'a>> {
        if i >= self.len {
            return None;
        }
        match self.ty.fixed_bytes() {
            Some(size) => {
                let bytes = self.bytes.get(i * size..(i + 1) * size)?;
                Some(Value::decode(self.ty, bytes))
            }
            None => self.iter().nth(i),
        }
    }
}

impl<'a> IntoIterator for Array<'a> {
    type Item = Value<'a>;
    type IntoIter = ArrayIter<'a>;

    fn into_iter(self) -> ArrayIter<'a> {
        self.iter()
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[derive(Clone)]
pub struct ArrayIter<'a> {
    ty: ValueType,
    left: usize,
    bytes: &'a [u8],
}

impl<'a> Iterator for ArrayIter<'a> {
    type Item = Value<'a>;

    /// Ends early, rather than panics, should another process have changed a mapped file's string
    /// lengths since they were checked.
    fn next(&mut self) -> Option<Value<'a>> {
        if self.left == 0 {
            return None;
        }
        let (start, size): (usize, usize) = match self.ty.fixed_bytes() {
            Some(size) => (0, size),
            None => (8, usize::try_from(LE::read_u64(self.bytes.get(..8)?)).ok()?),
        };
        let end = start.checked_add(size)?;
        let element = self.bytes.get(start..end)?;
        self.bytes = &self.bytes[end..];
        self.left -= 1;
        Some(Value::decode(self.ty, element))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}

/// A value to be written.
#[derive(Clone, Debug, PartialEq)]
pub enum OwnedValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(Vec<u8>),
    Array(OwnedArray),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array to be written.
#[derive(Clone, Debug, PartialEq)]
pub enum OwnedArray {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<Vec<u8>>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

/// The match over all numeric types, once for scalars' and arrays' encoding.
macro_rules! numeric {
    ($($variant:ident $ty:ty),*) => {
        impl OwnedValue {
            pub fn value_type(&self) -> ValueType {
                match self {
                    $(OwnedValue::$variant(_) => T::$variant,)*
                    OwnedValue::Bool(_) => T::Bool,
                    OwnedValue::String(_) => T::String,
                    OwnedValue::Array(_) => T::Array,
                }
            }

            /// Appends type and value as a file has them.
            pub(super) fn encode(&self, out: &mut Vec<u8>) {
                out.extend(self.value_type().id().to_le_bytes());
                match self {
                    $(OwnedValue::$variant(v) => out.extend(v.to_le_bytes()),)*
                    OwnedValue::Bool(v) => out.push(u8::from(*v)),
                    OwnedValue::String(v) => put_string(out, v),
                    OwnedValue::Array(v) => v.encode(out),
                }
            }
        }

        impl OwnedArray {
            pub fn elem_type(&self) -> ValueType {
                match self {
                    $(OwnedArray::$variant(_) => T::$variant,)*
                    OwnedArray::Bool(_) => T::Bool,
                    OwnedArray::String(_) => T::String,
                }
            }

            pub fn len(&self) -> usize {
                match self {
                    $(OwnedArray::$variant(v) => v.len(),)*
                    OwnedArray::Bool(v) => v.len(),
                    OwnedArray::String(v) => v.len(),
                }
            }

            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            fn encode(&self, out: &mut Vec<u8>) {
                out.extend(self.elem_type().id().to_le_bytes());
                out.extend((self.len() as u64).to_le_bytes());
                match self {
                    $(OwnedArray::$variant(v) => {
                        v.iter().for_each(|x| out.extend(x.to_le_bytes()));
                    })*
                    OwnedArray::Bool(v) => out.extend(v.iter().map(|&x| u8::from(x))),
                    OwnedArray::String(v) => v.iter().for_each(|x| put_string(out, x)),
                }
            }
        }

        $(impl From<$ty> for OwnedValue {
            fn from(v: $ty) -> Self { OwnedValue::$variant(v) }
        }

        impl From<Vec<$ty>> for OwnedValue {
            fn from(v: Vec<$ty>) -> Self { OwnedValue::Array(OwnedArray::$variant(v)) }
        })*

        impl From<Value<'_>> for OwnedValue {
            fn from(value: Value<'_>) -> Self {
                match value {
                    $(Value::$variant(v) => OwnedValue::$variant(v),)*
                    Value::Bool(v) => OwnedValue::Bool(v),
                    Value::String(v) => OwnedValue::String(v.to_vec()),
                    Value::Array(v) => OwnedValue::Array(v.into()),
                }
            }
        }

        impl From<Array<'_>> for OwnedArray {
            fn from(array: Array<'_>) -> Self {
                match array.elem_type() {
                    $(T::$variant => OwnedArray::$variant(collect(array, |v| match v {
                        Value::$variant(v) => Some(v),
                        _ => None,
                    })),)*
                    T::Bool => OwnedArray::Bool(collect(array, |v| v.as_bool())),
                    T::String => {
                        OwnedArray::String(collect(array, |v| v.as_bytes().map(<[u8]>::to_vec)))
                    }
                    T::Array => unreachable!("arrays of arrays are refused by the parser"),
                }
            }
        }
    };
}

numeric!(U8 u8, I8 i8, U16 u16, I16 i16, U32 u32, I32 i32, F32 f32, U64 u64, I64 i64, F64 f64);

fn collect<'a, X>(array: Array<'a>, take: impl Fn(Value<'a>) -> Option<X>) -> Vec<X> {
    array.iter().filter_map(take).collect()
}

impl From<bool> for OwnedValue {
    fn from(v: bool) -> Self {
        OwnedValue::Bool(v)
    }
}

impl From<&str> for OwnedValue {
    fn from(v: &str) -> Self {
        OwnedValue::String(v.into())
    }
}

impl From<String> for OwnedValue {
    fn from(v: String) -> Self {
        OwnedValue::String(v.into_bytes())
    }
}

impl From<Vec<bool>> for OwnedValue {
    fn from(v: Vec<bool>) -> Self {
        OwnedValue::Array(OwnedArray::Bool(v))
    }
}

impl From<Vec<String>> for OwnedValue {
    fn from(v: Vec<String>) -> Self {
        OwnedValue::Array(OwnedArray::String(v.into_iter().map(String::into_bytes).collect()))
    }
}

impl From<Vec<&str>> for OwnedValue {
    fn from(v: Vec<&str>) -> Self {
        OwnedValue::Array(OwnedArray::String(v.into_iter().map(Vec::from).collect()))
    }
}

impl From<Vec<Vec<u8>>> for OwnedValue {
    fn from(v: Vec<Vec<u8>>) -> Self {
        OwnedValue::Array(OwnedArray::String(v))
    }
}
