//! Metadata that a user puts in the place of a file's own: `KEY=TYPE:VALUE`, as llama.cpp writes
//! it, the type being int, float, bool or str.

use super::MAX_KEY_BYTES;
use super::value::{Value, ValueType};
use crate::{Error, Result};
use std::path::Path;
use std::str::FromStr;

/// A key and the value that it shall have.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    key: String,
    value: Scalar,
}

#[derive(Clone, Debug, PartialEq)]
enum Scalar {
    /// Anything but text.
    Plain(Value<'static>),
    Text(String),
}

impl Override {
    pub fn key(&self) -> &str {
        &self.key
    }

    pub fn value(&self) -> Value<'_> {
        match &self.value {
            Scalar::Plain(value) => *value,
            Scalar::Text(text) => Value::String(text.as_bytes()),
        }
    }

    /// The override in the type that the file has for the key, if it has one. A value of another
    /// kind, or one that the type cannot hold, is a slip of the user's.
    pub(super) fn fitted(&self, path: &Path, found: Option<Value<'_>>) -> Result<Override> {
        let Some(found) = found else { return Ok(self.clone()) };
        let value = match &self.value {
            Scalar::Plain(value) => cast(*value, found.value_type()).map(Scalar::Plain),
            text => (found.value_type() == ValueType::String).then(|| text.clone()),
        };
        let value = value.ok_or_else(|| {
            let kind = kind(self.value().value_type()).unwrap_or_default();
            let expected = match kind_of(found) {
                Some(expected) if expected == kind => {
                    format!("one that fits {}", found.type_name())
                }
                Some(expected) => {
                    format!("{expected}, as the file has {} {found}", found.type_name())
                }
                None => "another key: arrays cannot be overridden".into(),
            };
            Error::Usage(format!(
                "override of {} in {}: expected {expected}, got {kind} {}",
                self.key,
                path.display(),
                self.value()
            ))
        })?;
        Ok(Override { key: self.key.clone(), value })
    }
}

fn kind_of(value: Value<'_>) -> Option<&'static str> {
    kind(value.value_type())
}

/// The name of a type in `KEY=TYPE:VALUE`.
fn kind(ty: ValueType) -> Option<&'static str> {
    use ValueType as T;
    match ty {
        T::U8 | T::I8 | T::U16 | T::I16 | T::U32 | T::I32 | T::U64 | T::I64 => Some("int"),
        T::F32 | T::F64 => Some("float"),
        T::Bool => Some("bool"),
        T::String => Some("str"),
        T::Array => None,
    }
}

/// The number or truth value as another type of its kind, where that can hold it.
fn cast(value: Value<'static>, ty: ValueType) -> Option<Value<'static>> {
    use ValueType as T;
    match (ty, value) {
        (T::U8, Value::I64(v)) => v.try_into().ok().map(Value::U8),
        (T::I8, Value::I64(v)) => v.try_into().ok().map(Value::I8),
        (T::U16, Value::I64(v)) => v.try_into().ok().map(Value::U16),
        (T::I16, Value::I64(v)) => v.try_into().ok().map(Value::I16),
        (T::U32, Value::I64(v)) => v.try_into().ok().map(Value::U32),
        (T::I32, Value::I64(v)) => v.try_into().ok().map(Value::I32),
        (T::U64, Value::I64(v)) => v.try_into().ok().map(Value::U64),
        (T::I64, Value::I64(_)) | (T::F64, Value::F64(_)) | (T::Bool, Value::Bool(_)) => {
            Some(value)
        }
        (T::F32, Value::F64(v)) => Some(v as f32).filter(|v| v.is_finite()).map(Value::F32),
        _ => None,
    }
}

impl FromStr for Override {
    /// The expected form.
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong =
            || format!("expected KEY=TYPE:VALUE with TYPE int, float, bool or str: {text:?}");
        let (key, value) = text.split_once('=').ok_or_else(wrong)?;
        let (ty, value) = value.split_once(':').ok_or_else(wrong)?;
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            return Err(wrong());
        }
        let expected = |what: &str| format!("{key}: expected {what}, got {value:?}");
        let value = match ty {
            "int" => value.parse().map(Value::I64).map_err(|_| expected("a whole number"))?,
            "float" => match value.parse::<f64>() {
                Ok(number) if number.is_finite() => Value::F64(number),
                _ => return Err(expected("a finite number")),
            },
            "bool" => value.parse().map(Value::Bool).map_err(|_| expected("true or false"))?,
            "str" => {
                return Ok(Override { key: key.into(), value: Scalar::Text(value.into()) });
            }
            _ => return Err(wrong()),
        };
        Ok(Override { key: key.into(), value: Scalar::Plain(value) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Override {
        text.parse().unwrap()
    }

    #[test]
    fn four_types_are_read() {
        assert_eq!(parsed("a.b=int:-7").value(), Value::I64(-7));
        assert_eq!(parsed("a=float:1e-5").value(), Value::F64(1e-5));
        assert_eq!(parsed("a=bool:false").value(), Value::Bool(false));
        let text = parsed("a.b=str:x=y:z");
        assert_eq!((text.key(), text.value()), ("a.b", Value::String(b"x=y:z")));
        assert_eq!(parsed("a=str:").value(), Value::String(b""));
    }

    #[test]
    fn what_is_none_is_told() {
        for bad in ["", "a", "a=", "a=1", "=int:1", "a=INT:1", "a=u32:1", "a=arr:1", "a:int=1"] {
            assert!(bad.parse::<Override>().unwrap_err().contains("KEY=TYPE:VALUE"), "{bad}");
        }
        for bad in ["a=int:", "a=int:1.5", "a=int:9223372036854775808", "a=float:NaN", "a=bool:1"] {
            assert!(bad.parse::<Override>().unwrap_err().contains("a: expected"), "{bad}");
        }
    }

    #[test]
    fn values_take_the_type_that_the_file_has() {
        let fitted = |text: &str, found: Value<'_>| {
            parsed(text).fitted(Path::new("m"), Some(found)).map(|o| o.value().type_name())
        };
        assert_eq!(fitted("a=int:255", Value::U8(0)).unwrap(), "u8");
        assert_eq!(fitted("a=int:-1", Value::I32(0)).unwrap(), "i32");
        assert_eq!(fitted("a=float:0.5", Value::F32(0.0)).unwrap(), "f32");
        assert_eq!(fitted("a=str:x", Value::String(b"y")).unwrap(), "string");
        let refused = [
            ("a=int:256", Value::U8(0), "one that fits u8, got int 256"),
            ("a=int:-1", Value::U64(0), "one that fits u64, got int -1"),
            ("a=float:1e300", Value::F32(0.0), "one that fits f32"),
            ("a=float:1", Value::U32(3), "expected int, as the file has u32 3, got float 1.0"),
            ("a=int:1", Value::F32(0.5), "expected float, as the file has f32 0.5, got int 1"),
            ("a=bool:true", Value::String(b"x"), "expected str, as the file has string \"x\""),
            ("a=str:1", Value::Bool(true), "expected bool, as the file has bool true, got str"),
        ];
        for (text, found, words) in refused {
            let e = fitted(text, found).unwrap_err();
            assert!(matches!(&e, Error::Usage(sentence) if sentence.contains(words)), "{e}");
        }
        assert_eq!(parsed("a=int:1").fitted(Path::new("m"), None).unwrap(), parsed("a=int:1"));
    }
}
