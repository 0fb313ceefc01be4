//! Metadata values as JSON.

use super::Value;
use serde_json::{Value as Json, json};

impl Value<'_> {
    /// The value as JSON where JSON can say it; otherwise `{"bytes": [..]}` for a string that is
    /// not UTF-8 and the text `NaN`, `inf` or `-inf` for a number that is not finite.
    pub fn json(self) -> Json {
        match self {
            Value::String(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => text.into(),
                Err(_) => json!({ "bytes": bytes }),
            },
            Value::Array(array) => array.iter().map(Value::json).collect(),
            Value::Bool(v) => v.into(),
            // By its shortest text, so that 0.1 does not become 0.10000000149011612.
            Value::F32(v) => float(v.to_string().parse().unwrap_or(f64::from(v))),
            Value::F64(v) => float(v),
            Value::U64(v) => v.into(),
            integer => integer.as_i64().into(),
        }
    }
}

fn float(v: f64) -> Json {
    if v.is_finite() { v.into() } else { v.to_string().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_json_cannot_say() {
        assert_eq!(Value::F32(0.1).json(), json!(0.1));
        assert_eq!(Value::F32(f32::NAN).json(), json!("NaN"));
        assert_eq!(Value::F64(f64::NEG_INFINITY).json(), json!("-inf"));
        assert_eq!(Value::U64(u64::MAX).json(), json!(u64::MAX));
        assert_eq!(Value::String(b"\xff").json(), json!({"bytes": [255]}));
        assert_eq!(Value::String(b"text").json(), json!("text"));
    }
}
