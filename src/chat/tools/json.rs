//! JSON that comes in pieces, and values that are written as text.

use serde_json::Value;

/// Finds the end of a JSON value in a text that comes in pieces. Only as strict as that takes.
#[derive(Clone, Debug, Default)]
pub struct Extent {
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    /// A number, `true`, `false` or `null`.
    in_word: bool,
}

/// The result of a look for a value's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The value goes on.
    More,
    /// The value ends after so many bytes.
    End(usize),
    /// Here is a character that is in no JSON.
    Broken(usize),
}

impl Extent {
    /// Reads on in `text`, which begins with the value or goes on with it.
    pub fn read(&mut self, text: &str) -> Found {
        for (at, c) in text.char_indices() {
            if self.in_string {
                match c {
                    _ if self.is_escaped => self.is_escaped = false,
                    '\\' => self.is_escaped = true,
                    '"' => {
                        self.in_string = false;
                        if self.depth == 0 {
                            return Found::End(at + 1);
                        }
                    }
                    _ => {}
                }
                continue;
            }
            let is_word = c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
            if self.in_word && !is_word && self.depth == 0 {
                return Found::End(at);
            }
            match c {
                '"' => self.in_string = true,
                '{' | '[' => self.depth += 1,
                '}' | ']' if self.depth == 0 => return Found::Broken(at),
                '}' | ']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Found::End(at + 1);
                    }
                }
                _ if is_word => self.in_word = self.depth == 0,
                ',' | ':' if self.depth > 0 => {}
                _ if c.is_ascii_whitespace() => {}
                _ => return Found::Broken(at),
            }
        }
        Found::More
    }
}

/// The length of the string literal that `text` begins with, if all of it is there.
pub fn string_length(text: &str) -> Option<usize> {
    match text.starts_with('"').then(|| Extent::default().read(text)) {
        Some(Found::End(n)) => Some(n),
        _ => None,
    }
}

/// `text` as the inside of a JSON string.
pub fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Kinds of JSON values, as bits.
pub type Kinds = u8;

pub const STRING: Kinds = 1;
const NUMBER: Kinds = 2;
const BOOLEAN: Kinds = 4;
const NULL: Kinds = 8;
const ARRAY: Kinds = 16;
const OBJECT: Kinds = 32;
pub const ANY: Kinds = 63;

fn kind(value: &Value) -> Kinds {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(_) => NUMBER,
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
    }
}

/// Schemas within schemas that are looked at.
const MAX_DEPTH: usize = 8;

/// The kinds of values that `schema`, a part of `root`, accepts.
pub fn kinds(schema: &Value, root: &Value) -> Kinds {
    accepted(schema, root, MAX_DEPTH)
}

fn accepted(schema: &Value, root: &Value, depth: usize) -> Kinds {
    let Some(depth) = depth.checked_sub(1) else { return ANY };
    let mut kinds = ANY;
    if let Some(target) = schema["$ref"].as_str().and_then(|to| to.strip_prefix('#')) {
        kinds &= root.pointer(target).map_or(ANY, |target| accepted(target, root, depth));
    }
    let named = |name: &Value| match name.as_str() {
        Some("string") => STRING,
        Some("number" | "integer") => NUMBER,
        Some("boolean") => BOOLEAN,
        Some("null") => NULL,
        Some("array") => ARRAY,
        Some("object") => OBJECT,
        _ => 0,
    };
    match &schema["type"] {
        Value::Array(names) => kinds &= names.iter().map(named).fold(0, |a, b| a | b),
        Value::String(_) => kinds &= named(&schema["type"]),
        _ => {}
    }
    if let Some(values) = schema["enum"].as_array() {
        kinds &= values.iter().map(kind).fold(0, |a, b| a | b);
    }
    if let Some(value) = schema.get("const") {
        kinds &= kind(value);
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(parts) = schema[key].as_array() {
            kinds &= parts.iter().map(|part| accepted(part, root, depth)).fold(0, |a, b| a | b);
        }
    }
    if kinds == 0 { ANY } else { kinds }
}

/// The JSON of a value that is written as text, where strings have no quotes.
pub fn of_text(text: &str, kinds: Kinds) -> String {
    let trimmed = text.trim();
    // As Python prints them.
    let json = match trimmed {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    match serde_json::from_str::<Value>(json) {
        Ok(value) if !value.is_string() && kind(&value) & kinds != 0 => json.to_owned(),
        Ok(Value::String(_)) if kinds & STRING == 0 => json.to_owned(),
        _ => Value::from(text).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_end_of_a_value_is_found() {
        for (text, expected) in [
            (r#"{"a": "}\"", "b": [1]} x"#, Found::End(22)),
            (r#""a\\"b"#, Found::End(5)),
            ("[1, 2", Found::More),
            ("12.5e-1,", Found::End(7)),
            ("null", Found::More),
            ("true}", Found::End(4)),
            ("{\"a\": <b>}", Found::Broken(6)),
            ("}", Found::Broken(0)),
        ] {
            assert_eq!(Extent::default().read(text), expected, "{text}");
        }
        assert_eq!(string_length(r#""ab": 1"#), Some(4));
        assert_eq!([r#""ab"#, "1"].map(string_length), [None, None]);
    }

    #[test]
    fn text_is_read_as_its_schema_says() {
        let root = json!({ "$defs": { "n": { "type": ["integer", "null"] } } });
        let kinds = |schema: Value| kinds(&schema, &root);
        let string = kinds(json!({ "type": "string" }));
        let number = kinds(json!({ "$ref": "#/$defs/n" }));
        let either = kinds(json!({ "anyOf": [{ "type": "string" }, { "type": "null" }] }));
        assert_eq!(string, STRING);
        assert_eq!(kinds(json!({ "enum": ["a", "b"] })), STRING);
        assert_eq!(kinds(json!({})), ANY);
        for (text, kinds, expected) in [
            ("5", string, "\"5\""),
            (" 5\n", number, "5"),
            ("None", number, "null"),
            ("None", string, "\"None\""),
            ("null", either, "null"),
            ("5", either, "\"5\""),
            ("1.0", ANY, "1.0"),
            ("[1, {\"a\": 2}]", ANY, "[1, {\"a\": 2}]"),
            ("five", number, "\"five\""),
            (" a\n", ANY, "\" a\\n\""),
            ("\"a\"", ANY, r#""\"a\"""#),
        ] {
            assert_eq!(of_text(text, kinds), expected, "{text} {kinds}");
        }
    }

    #[test]
    fn a_schema_that_refers_to_itself_is_read() {
        let root = json!({ "$ref": "#" });
        assert_eq!(kinds(&root, &root), ANY);
    }
}
