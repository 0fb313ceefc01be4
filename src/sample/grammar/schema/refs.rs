//! References of a schema: where they lead.

use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// The places in a schema that references may name, all as JSON pointers.
pub struct References<'a> {
    doc: &'a Value,
    /// Absolute URIs of identifiers and anchors.
    names: HashMap<String, String>,
    /// Schemas with an identifier, and its absolute URI.
    bases: HashMap<String, String>,
    /// Anchors that dynamic references look for, and how many there are of each.
    n_dynamic: HashMap<String, usize>,
}

/// Keywords whose values are no schemas.
const DATA: &[&str] = &["enum", "const", "default", "examples", "example"];

impl<'a> References<'a> {
    /// Old drafts know no keywords beside `$ref`.
    pub fn new(doc: &'a Value, is_old: bool) -> References<'a> {
        let (names, bases) = (HashMap::new(), HashMap::new());
        let mut out = References { doc, names, bases, n_dynamic: HashMap::new() };
        out.collect(is_old);
        out
    }

    fn collect(&mut self, is_old: bool) {
        let mut todo = vec![(self.doc, String::new(), String::new())];
        while let Some((value, at, base)) = todo.pop() {
            match value {
                Value::Array(items) => {
                    let each = items.iter().enumerate();
                    todo.extend(each.map(|(i, item)| (item, format!("{at}/{i}"), base.clone())));
                }
                Value::Object(fields) => {
                    let text = |key: &str| fields.get(key).and_then(Value::as_str);
                    let mut base = base;
                    let id = text("$id").or(text("id"));
                    if let Some(id) = id.filter(|_| !is_old || text("$ref").is_none()) {
                        let id = joined(&base, id);
                        let id = id.trim_end_matches('#').to_owned();
                        if !id.contains('#') {
                            base.clone_from(&id);
                            self.bases.insert(at.clone(), id.clone());
                        }
                        self.names.entry(id).or_insert_with(|| at.clone());
                    }
                    for key in ["$anchor", "$dynamicAnchor"] {
                        if let Some(name) = text(key) {
                            let name = format!("{base}#{name}");
                            self.names.entry(name).or_insert_with(|| at.clone());
                        }
                    }
                    if let Some(name) = text("$dynamicAnchor") {
                        *self.n_dynamic.entry(name.to_owned()).or_default() += 1;
                    }
                    let inner = fields.iter().filter(|(key, value)| {
                        (value.is_object() || value.is_array()) && !DATA.contains(&key.as_str())
                    });
                    for (key, value) in inner {
                        todo.push((value, child(&at, key), base.clone()));
                    }
                }
                _ => {}
            }
        }
    }

    /// The pointer that a reference at `at` leads to.
    pub fn resolve(&self, reference: &str, at: &str) -> Option<String> {
        let (root, base) = self.resource(at);
        let (_, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let target = joined(base, reference);
        let (uri, _) = target.split_once('#').unwrap_or((&target, ""));
        let fragment = unescaped(fragment);
        let resource = match self.names.get(uri) {
            _ if reference.starts_with('#') => root.to_owned(),
            Some(at) => at.clone(),
            None => return None,
        };
        let pointer = match fragment.as_str() {
            "" => resource,
            "/" if self.doc.pointer(&format!("{resource}/")).is_none() => resource,
            path if path.starts_with('/') => format!("{resource}{path}"),
            name => self.names.get(&format!("{uri}#{name}"))?.clone(),
        };
        self.doc.pointer(&pointer).map(|_| pointer)
    }

    /// The pointer of a dynamic reference, if only one anchor can be meant.
    pub fn resolve_dynamic(&self, reference: &str, at: &str) -> Option<String> {
        let name = reference.split_once('#').map_or("", |(_, name)| name);
        match self.n_dynamic.get(name) {
            Some(2..) => None,
            _ => self.resolve(reference, at),
        }
    }

    /// The schema with an identifier around a place, and its URI.
    fn resource<'b>(&self, at: &'b str) -> (&'b str, &str) {
        let mut end = at.len();
        loop {
            if let Some(base) = self.bases.get(&at[..end]) {
                return (&at[..end], base);
            }
            match at[..end].rfind('/') {
                Some(slash) => end = slash,
                None => return ("", ""),
            }
        }
    }

    /// The reference at `at`, and its target.
    pub fn of(&self, at: &str) -> Option<(&'a str, Option<String>)> {
        let fields = self.doc.pointer(at)?.as_object()?;
        let text = |key: &str| fields.get(key).and_then(Value::as_str);
        if let Some(reference) = text("$ref") {
            return Some((reference, self.resolve(reference, at)));
        }
        let dynamic = text("$dynamicRef").or(text("$recursiveRef"))?;
        Some((dynamic, self.resolve_dynamic(dynamic, at)))
    }

    /// The schema that the reference at `at` leads to, if it is a `$ref`, and its pointer.
    pub fn target(&self, at: &str) -> Option<(&'a Value, String)> {
        let reference = self.doc.pointer(at)?.get("$ref")?.as_str()?;
        let target = self.resolve(reference, at)?;
        Some((self.doc.pointer(&target)?, target))
    }

    /// A schema that holds for itself before it holds for any part of a value; `None` is right.
    /// Schemas in `done` were looked at before.
    pub fn circle(&self, start: &str, done: &mut HashSet<String>) -> Option<String> {
        let mut open = HashSet::new();
        let mut todo = vec![(start.to_owned(), false)];
        while let Some((at, is_left)) = todo.pop() {
            if is_left {
                open.remove(&at);
                done.insert(at);
                continue;
            }
            if done.contains(&at) {
                continue;
            }
            if !open.insert(at.clone()) {
                return Some(at);
            }
            todo.push((at.clone(), true));
            for next in self.in_place(&at) {
                if open.contains(&next) {
                    return Some(at);
                }
                todo.push((next, false));
            }
        }
        None
    }

    /// The schemas that a value of this schema must or may match as a whole.
    fn in_place(&self, at: &str) -> Vec<String> {
        let target = self.of(at).and_then(|(_, target)| target);
        let mut out: Vec<String> = target.into_iter().collect();
        for key in ["allOf", "anyOf", "oneOf"] {
            let items = self.doc.pointer(at).and_then(|value| value.get(key)?.as_array());
            let n = items.map_or(0, Vec::len);
            out.extend((0..n).map(|i| format!("{at}/{key}/{i}")));
        }
        out
    }

    /// Whether a schema has another within it, its references followed.
    pub fn reaches(&self, from: &str, to: &str) -> bool {
        let (mut seen, mut todo) = (HashSet::new(), vec![from.to_owned()]);
        while let Some(root) = todo.pop() {
            if to == root || to.strip_prefix(&root).is_some_and(|rest| rest.starts_with('/')) {
                return true;
            }
            let Some(value) = self.doc.pointer(&root) else { continue };
            let mut inner = vec![(value, root)];
            while let Some((value, at)) = inner.pop() {
                if value.is_object()
                    && let Some((_, Some(target))) = self.of(&at)
                    && seen.insert(target.clone())
                {
                    todo.push(target);
                }
                match value {
                    Value::Array(items) => {
                        let each = items.iter().enumerate();
                        inner.extend(each.map(|(i, item)| (item, format!("{at}/{i}"))));
                    }
                    Value::Object(fields) => {
                        // Definitions are there for references only.
                        let own = fields.iter().filter(|(key, _)| {
                            !DATA.contains(&key.as_str())
                                && *key != "$defs"
                                && *key != "definitions"
                        });
                        inner.extend(own.map(|(key, value)| (value, child(&at, key))));
                    }
                    _ => {}
                }
            }
        }
        false
    }
}

/// The pointer of a member.
pub fn child(at: &str, key: &str) -> String {
    match key.contains(['~', '/']) {
        true => format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")),
        false => format!("{at}/{key}"),
    }
}

/// A reference against the URI that it stands under.
fn joined(base: &str, reference: &str) -> String {
    let scheme = reference.split_once(':').map(|(scheme, _)| scheme);
    let is_absolute = scheme.is_some_and(|scheme| {
        scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
    });
    let base = base.split('#').next().unwrap_or_default();
    let host_end = base
        .find("://")
        .map_or(0, |at| base[at + 3..].find('/').map_or(base.len(), |slash| at + 3 + slash));
    match reference {
        _ if is_absolute => reference.to_owned(),
        _ if reference.is_empty() || reference.starts_with('#') => format!("{base}{reference}"),
        _ if reference.starts_with('/') => format!("{}{reference}", &base[..host_end]),
        _ => {
            let folder = base[host_end..].rfind('/').map_or(host_end, |slash| host_end + slash + 1);
            format!("{}{reference}", &base[..folder])
        }
    }
}

/// A fragment without its percent signs.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let hex = rest.get(1..3).and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.filter(|_| byte == b'%').and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(decoded) => {
                bytes.push(decoded);
                rest = &rest[3..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn references_of_all_kinds_are_resolved() {
        let doc = json!({
            "$id": "https://a.example/folder/main.json",
            "properties": { "a/b": {}, "c%d": {}, "e~f": {} },
            "$defs": {
                "named": { "$anchor": "here", "$dynamicAnchor": "node" },
                "old": { "id": "#old" },
                "other": { "$id": "other.json", "$defs": { "inner": { "$anchor": "in" } } },
                "urn": { "$id": "urn:x:y" },
            },
        });
        let references = References::new(&doc, false);
        for (reference, at, expected) in [
            ("#", "", Some("")),
            ("#/", "", Some("")),
            ("#/properties/a~1b", "", Some("/properties/a~1b")),
            ("#/properties/c%25d", "", Some("/properties/c%d")),
            ("#/properties/e~0f", "", Some("/properties/e~0f")),
            ("#here", "", Some("/$defs/named")),
            ("#old", "", Some("/$defs/old")),
            ("main.json#here", "", Some("/$defs/named")),
            ("https://a.example/folder/main.json", "", Some("")),
            ("/folder/main.json", "", Some("")),
            ("other.json", "", Some("/$defs/other")),
            ("other.json#/$defs/inner", "", Some("/$defs/other/$defs/inner")),
            ("#/$defs/inner", "/$defs/other", Some("/$defs/other/$defs/inner")),
            ("#in", "/$defs/other", Some("/$defs/other/$defs/inner")),
            ("#", "/$defs/other/$defs/inner", Some("/$defs/other")),
            ("urn:x:y", "", Some("/$defs/urn")),
            ("#/$defs/none", "", None),
            ("#none", "", None),
            ("https://elsewhere.example/x", "", None),
        ] {
            assert_eq!(references.resolve(reference, at).as_deref(), expected, "{reference} {at}");
        }
        assert_eq!(references.resolve_dynamic("#node", "").as_deref(), Some("/$defs/named"));
    }

    #[test]
    fn circles_are_found() {
        for (doc, has) in [
            (json!({ "$ref": "#" }), true),
            (json!({ "allOf": [{ "$ref": "#" }] }), true),
            (
                json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/b" },
                "b": { "anyOf": [{ "$ref": "#/$defs/a" }, { "type": "null" }] } } }),
                true,
            ),
            (json!({ "properties": { "a": { "$ref": "#" } } }), false),
            (
                json!({ "allOf": [{ "$ref": "#/$defs/a" }, { "$ref": "#/$defs/a" }],
                "$defs": { "a": {} } }),
                false,
            ),
        ] {
            assert_eq!(
                References::new(&doc, false).circle("", &mut HashSet::new()).is_some(),
                has,
                "{doc}"
            );
        }
        let tree = json!({ "properties": { "a": { "$ref": "#/$defs/n" } },
            "$defs": { "n": { "properties": {
                "next": { "$ref": "#/$defs/n", "minProperties": 1 } } }, "m": {} } });
        let references = References::new(&tree, false);
        assert!(references.reaches("/$defs/n", "/$defs/n/properties/next"));
        assert!(!references.reaches("/$defs/m", "/properties/a"));
    }
}
