//! Parts of a schema that llguidance refuses, found by trying.

use super::refs::{References, child};
use super::translate::translate;
use super::{Client, Refused};
use crate::sample::grammar::is_refusal;
use crate::{Error, Result};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Parts of one schema that are left out; then all of it is.
const MAX_REFUSED: usize = 8;

/// Parts that are tried.
const MAX_TRIALS: usize = 300;

/// The time of a request in which parts are tried.
pub const TIME: Duration = Duration::from_secs(3);

/// Keywords without which a schema allows more, those first that are refused most.
const KEYWORDS: [&str; 28] = [
    "pattern",
    "format",
    "patternProperties",
    "multipleOf",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "enum",
    "const",
    "required",
    "additionalProperties",
    "unevaluatedProperties",
    "additionalItems",
    "unevaluatedItems",
    "not",
    "oneOf",
    "anyOf",
    "allOf",
    "$ref",
    "items",
    "type",
];

/// Compiles a client's schema, without the parts that llguidance refuses. Fails as `compile` does
/// for other reasons, and where the client wants all of the schema.
///
/// `check` compiles a part, and keeps nothing.
pub fn fit<T>(
    client: &Client<'_>,
    compile: impl Fn(Value) -> Result<T>,
    check: impl Fn(&Value) -> Result<()>,
) -> Result<T> {
    match compile(client.enforced()?) {
        Err(e) if is_refusal(&e) => compile(client.accepted(Instant::now() + TIME, check)?),
        other => other,
    }
}

/// The parts of a client's schema that llguidance refuses.
pub(super) fn refused(
    client: &Client<'_>,
    until: Instant,
    compile: impl Fn(&Value) -> Result<()>,
) -> Result<Vec<Refused>> {
    let mut search = Search { client, compile, n_left: MAX_TRIALS, until, refused: Vec::new() };
    search.refused = remembered(client);
    while let Some(why) = search.refusal("")? {
        let is_last = search.refused.len() >= MAX_REFUSED;
        let (at, why) = match is_last {
            true => (String::new(), why),
            false => search.smallest(why)?,
        };
        if search.refused.iter().any(|refused| refused.at == at) {
            // All of it is left out, and that is refused.
            return Err(Error::Invalid(why));
        }
        search.refused.push(Refused { at, why: clause(&why) });
    }
    remember(client, &search.refused);
    Ok(search.refused)
}

struct Search<'a, C> {
    client: &'a Client<'a>,
    compile: C,
    n_left: usize,
    until: Instant,
    refused: Vec<Refused>,
}

impl<C: Fn(&Value) -> Result<()>> Search<'_, C> {
    /// Why a part is refused; `None` if it is not. Other faults are the caller's.
    fn refusal(&mut self, start: &str) -> Result<Option<String>> {
        self.n_left = self.n_left.saturating_sub(1);
        let translation = translate(self.client.schema, start, &self.refused);
        match (self.compile)(&translation.schema) {
            Ok(()) => Ok(None),
            Err(e) if is_refusal(&e) => Ok(Some(e.to_string())),
            Err(e) => Err(e),
        }
    }

    fn is_over(&self) -> bool {
        self.n_left == 0 || Instant::now() > self.until
    }

    /// The smallest part that is refused, a keyword or a schema as a whole, and why.
    fn smallest(&mut self, mut why: String) -> Result<(String, String)> {
        let mut at = String::new();
        let mut seen = HashSet::from([at.clone()]);
        'inward: loop {
            for part in self.parts(&at) {
                if self.is_over() {
                    return Ok((at, why));
                }
                if !seen.insert(part.clone()) {
                    continue;
                }
                if let Some(refusal) = self.refusal(&part)? {
                    (at, why) = (part, refusal);
                    continue 'inward;
                }
            }
            break;
        }
        for part in self.droppable(&at) {
            if self.is_over() {
                break;
            }
            self.refused.push(Refused { at: part.clone(), why: String::new() });
            let is_refused = self.refusal(&at)?.is_some();
            self.refused.pop();
            if !is_refused {
                return Ok((part, why));
            }
        }
        Ok((at, why))
    }

    /// Keywords of a schema, and the schemas that it joins, without which it allows more.
    fn droppable(&self, at: &str) -> Vec<String> {
        let fields = self.client.schema.pointer(at).and_then(Value::as_object);
        let keywords = KEYWORDS.iter().filter_map(|key| Some((*key, fields?.get(*key)?)));
        let each = keywords.flat_map(|(key, value)| {
            let keyword = child(at, key);
            let n = value.as_array().filter(|_| key == "allOf").map_or(0, Vec::len);
            let items: Vec<String> = (0..n).map(|i| format!("{keyword}/{i}")).collect();
            items.into_iter().chain([keyword])
        });
        each.collect()
    }

    /// The schemas within a schema, and that which it refers to.
    fn parts(&self, at: &str) -> Vec<String> {
        let Some(Value::Object(fields)) = self.client.schema.pointer(at) else { return Vec::new() };
        let mut out = Vec::new();
        for (key, value) in fields {
            let at = child(at, key);
            match (key.as_str(), value) {
                ("properties" | "patternProperties", Value::Object(all)) => {
                    out.extend(all.keys().map(|key| child(&at, key)));
                }
                ("prefixItems" | "items" | "allOf" | "anyOf" | "oneOf", Value::Array(all)) => {
                    out.extend((0..all.len()).map(|i| format!("{at}/{i}")));
                }
                (
                    "items"
                    | "additionalItems"
                    | "additionalProperties"
                    | "unevaluatedItems"
                    | "unevaluatedProperties",
                    Value::Object(_),
                ) => out.push(at),
                _ => {}
            }
        }
        let references = References::new(self.client.schema, false);
        out.extend(references.target(at).map(|(_, target)| target));
        out
    }
}

/// The reason in a message of the compiler.
fn clause(message: &str) -> String {
    let clause = message.split_once("cannot be used: ").map_or(message, |(_, clause)| clause);
    let clause = clause.trim_start_matches("failed to compile JSON schema: ");
    match clause.strip_prefix("Unsatisfiable schema: ") {
        Some(clause) => format!("no value matches it: {clause}"),
        None => clause.to_owned(),
    }
}

/// Schemas whose refused parts are remembered, and the bytes of those parts.
const MAX_REMEMBERED: usize = 64;
const MAX_BYTES: usize = 4096;

static REMEMBERED: Mutex<VecDeque<([u8; 32], Vec<Refused>)>> = Mutex::new(VecDeque::new());

fn key(client: &Client<'_>) -> [u8; 32] {
    Sha256::digest(client.schema.to_string()).into()
}

pub(super) fn remembered(client: &Client<'_>) -> Vec<Refused> {
    let all = REMEMBERED.lock().unwrap_or_else(PoisonError::into_inner);
    if all.is_empty() {
        return Vec::new();
    }
    let key = key(client);
    all.iter().find(|(known, _)| *known == key).map_or_else(Vec::new, |(_, parts)| parts.clone())
}

fn remember(client: &Client<'_>, parts: &[Refused]) {
    let n_bytes: usize = parts.iter().map(|part| part.at.len() + part.why.len()).sum();
    if parts.is_empty() || n_bytes > MAX_BYTES {
        return;
    }
    let key = key(client);
    let mut all = REMEMBERED.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|(known, _)| *known != key);
    all.push_back((key, parts.to_vec()));
    while all.len() > MAX_REMEMBERED {
        all.pop_front();
    }
}
