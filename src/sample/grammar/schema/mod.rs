//! Schemas as clients send them, and what of them llguidance can enforce.
//!
//! A client's schema is translated (`translate`) into one whose keywords and values llguidance's
//! compiler takes: what it cannot enforce is left out, so that every value the client's schema
//! allows stays allowed. What llguidance refuses all the same is found by trying parts of the
//! schema, and left out too ([`fit()`]). A client that asks for a strict reading gets an error that
//! names the keyword instead, any other one an answer and a line in the log.

mod charset;
mod disjoint;
mod fit;
mod numbers;
mod pattern;
mod refs;
mod translate;

pub use fit::{TIME, fit};

use super::checks;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A part of a schema that is not enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Its JSON pointer.
    pub at: String,
    /// Why, as a clause.
    pub why: String,
}

/// A part of a schema that llguidance refuses.
pub type Refused = LeftOut;

/// A client's schema.
#[derive(Clone, Copy, Debug)]
pub struct Client<'a> {
    pub schema: &'a Value,
    /// Its place in the request, as `response_format.json_schema.schema`.
    pub path: &'a str,
    /// The tool whose arguments it describes.
    pub tool: Option<&'a str>,
    /// All of it has to be enforced.
    pub is_strict: bool,
}

impl Client<'_> {
    /// The schema as llguidance takes it. Fails for one that leads to itself or is of an unknown
    /// type, and for one that must be enforced and cannot be.
    pub fn enforced(&self) -> Result<Value> {
        self.without(&fit::remembered(self))
    }

    /// The schema as llguidance takes it, without the parts that `compile` refuses, which are
    /// searched for until a time.
    pub fn accepted(
        &self,
        until: Instant,
        compile: impl Fn(&Value) -> Result<()>,
    ) -> Result<Value> {
        self.without(&fit::refused(self, until, compile)?)
    }

    fn without(&self, refused: &[Refused]) -> Result<Value> {
        checks::check_schema(self.schema)?;
        let translation = translate::translate(self.schema, "", refused);
        if let Some(at) = translation.circle {
            return Err(self.error(&at, "the schema refers to itself"));
        }
        for LeftOut { at, why } in &translation.left_out {
            if at == "/type" && translate::is_unknown_type(self.schema) {
                return Err(self.error(at, why));
            }
            if self.is_strict {
                return Err(self.error(at, &format!("`strict` asks for it, but {why}")));
            }
            self.warn(at, why);
        }
        let mut schema = translation.schema;
        let options = self.schema.get("x-guidance").filter(|options| are_options(options));
        if let (Some(options), Some(fields)) = (options, schema.as_object_mut()) {
            fields.insert("x-guidance".into(), options.clone());
        }
        Ok(schema)
    }

    fn error(&self, at: &str, why: &str) -> Error {
        let tool = self.tool.map(|name| format!("the tool `{name}`: ")).unwrap_or_default();
        Error::Invalid(format!("{}: {tool}{why}", self.place(at)))
    }

    /// Once for each place, or nearly: agents send their tools again and again.
    fn warn(&self, at: &str, why: &str) {
        static TOLD: Mutex<Option<HashSet<u64>>> = Mutex::new(None);
        let mut hasher = DefaultHasher::new();
        (self.tool, self.path, at, why).hash(&mut hasher);
        let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
        let told = told.get_or_insert_default();
        if told.len() >= MAX_TOLD {
            told.clear();
        }
        if told.insert(hasher.finish()) {
            let tool = self.tool.map(|name| format!("the tool `{name}`: ")).unwrap_or_default();
            let place: String = self.place(at).chars().take(MAX_PLACE).collect();
            log::warn!("{tool}{place} is not enforced: {why}");
        }
    }

    /// A place in the request by a pointer in the schema.
    fn place(&self, at: &str) -> String {
        let mut out = self.path.to_owned();
        let (mut value, mut known) = (Some(self.schema), String::new());
        for part in at.split('/').skip(1) {
            let is_index = value.is_some_and(Value::is_array);
            known = format!("{known}/{part}");
            value = self.schema.pointer(&known);
            let part = part.replace("~1", "/").replace("~0", "~");
            match is_index {
                true => out.push_str(&format!("[{part}]")),
                false if out.is_empty() => out.push_str(&part),
                false => out.push_str(&format!(".{part}")),
            }
        }
        if out.is_empty() { "the JSON schema".into() } else { out }
    }
}

/// Places that the log has told of.
const MAX_TOLD: usize = 1024;

/// Characters of a place in the log.
const MAX_PLACE: usize = 200;

/// Whether llguidance takes these options of a schema.
fn are_options(options: &Value) -> bool {
    let known = json!({
        "item_separator": "", "key_separator": "", "whitespace_pattern": "",
        "json_allowed_escapes": "", "whitespace_flexible": true, "coerce_one_of": true,
        "lenient": true, "json_allow_general_unicode_escapes": true,
    });
    let fits = |(key, value): (&String, &Value)| {
        let known = known.get(key);
        known.is_some_and(|known| known.is_string() == value.is_string())
            && (value.is_string() || value.is_boolean())
    };
    options.as_object().is_some_and(|options| options.iter().all(fits))
}
