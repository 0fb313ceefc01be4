//! A client's schema in the keywords and values that llguidance's compiler takes.

use super::disjoint::are_disjoint;
use super::numbers::{Bound, Divisor, bound, count, is_exact};
use super::pattern;
use super::refs::{References, child};
use super::{LeftOut, Refused};
use serde_json::{Map, Value, json};
use std::collections::{HashSet, VecDeque};

/// The types of JSON schemas.
const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

/// Formats that llguidance writes. Another format only tells what a text means.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Keywords that apply other schemas to the same value.
const IN_PLACE: [&str; 10] = [
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "not",
    "dependentSchemas",
    "dependencies",
];

/// Bounds of numbers: the keyword, whether it is a minimum, and the keyword of the open bound.
const BOUNDS: [(&str, &str, bool); 2] =
    [("minimum", "exclusiveMinimum", true), ("maximum", "exclusiveMaximum", false)];

/// Counts.
const COUNTS: [&str; 4] = ["minLength", "maxLength", "minItems", "maxItems"];

/// A translated schema.
pub struct Translation {
    /// Every value that the client's schema allows is allowed.
    pub schema: Value,
    pub left_out: Vec<LeftOut>,
    /// The place of a reference that leads to itself.
    pub circle: Option<String>,
}

/// Translates the part of a schema at the pointer `start`, without what llguidance refused.
pub fn translate(doc: &Value, start: &str, refused: &[Refused]) -> Translation {
    let is_old = doc["$schema"].as_str().is_some_and(|draft| {
        ["draft-04", "draft-06", "draft-07", "draft-03"].iter().any(|old| draft.contains(old))
    });
    let references = References::new(doc, is_old);
    let mut translator = Translator {
        doc,
        references,
        refused,
        is_old,
        left_out: Vec::new(),
        named: HashSet::new(),
        targets: Vec::new(),
        todo: VecDeque::new(),
        checked: HashSet::new(),
        circle: None,
        divisor: None,
    };
    let root =
        doc.pointer(start).map_or(Value::Bool(true), |value| translator.schema(value, start));
    let mut root = match root {
        Value::Object(fields) => fields,
        Value::Bool(true) => Map::new(),
        other => Map::from_iter([("allOf".to_owned(), json!([other]))]),
    };
    let mut definitions = Map::new();
    while let Some((n, at)) = translator.todo.pop_front() {
        let value = doc.pointer(&at).unwrap_or(&Value::Bool(true));
        definitions.insert(n.to_string(), translator.schema(value, &at));
    }
    if !definitions.is_empty() {
        root.insert("$defs".into(), definitions.into());
    }
    let Translator { left_out, circle, .. } = translator;
    Translation { schema: root.into(), left_out, circle }
}

struct Translator<'a> {
    doc: &'a Value,
    references: References<'a>,
    refused: &'a [Refused],
    /// The draft knows no keywords beside `$ref`.
    is_old: bool,
    left_out: Vec<LeftOut>,
    /// Places in `left_out`.
    named: HashSet<String>,
    /// Places that references lead to, and those of them that are not translated yet.
    targets: Vec<String>,
    todo: VecDeque<(usize, String)>,
    /// Schemas that are in no circle.
    checked: HashSet<String>,
    circle: Option<String>,
    /// The least common multiple of all divisors.
    divisor: Option<Divisor>,
}

/// A schema in the making.
struct Node<'a> {
    fields: &'a Map<String, Value>,
    at: String,
    out: Map<String, Value>,
}

impl<'a> Translator<'a> {
    fn leave_out(&mut self, at: &str, why: impl Into<String>) {
        if self.named.insert(at.to_owned()) {
            self.left_out.push(LeftOut { at: at.to_owned(), why: why.into() });
        }
    }

    fn why_refused(&self, at: &str) -> Option<&'a str> {
        let refused: &'a [Refused] = self.refused;
        refused.iter().find(|refused| refused.at == at).map(|refused| refused.why.as_str())
    }

    /// A keyword's value and place; `None` for a keyword that is absent, `null` or refused.
    fn get(&mut self, node: &Node<'a>, key: &str) -> Option<(&'a Value, String)> {
        let value = node.fields.get(key).filter(|value| !value.is_null())?;
        let at = child(&node.at, key);
        match self.why_refused(&at) {
            Some(why) => {
                self.leave_out(&at, why);
                None
            }
            None => Some((value, at)),
        }
    }

    fn schema(&mut self, value: &'a Value, at: &str) -> Value {
        if let Some(why) = self.why_refused(at) {
            self.leave_out(at, why);
            return match value["type"].as_str().filter(|name| TYPES.contains(name)) {
                Some(name) => json!({ "type": name }),
                None => true.into(),
            };
        }
        match value {
            Value::Bool(_) => value.clone(),
            Value::Null => true.into(),
            Value::Object(fields) => {
                let mut node = Node { fields, at: at.to_owned(), out: Map::new() };
                match self.is_old && fields.contains_key("$ref") {
                    true => self.references(&mut node),
                    false => self.object(&mut node),
                }
                node.out.into()
            }
            _ => {
                self.leave_out(at, "it is no schema");
                true.into()
            }
        }
    }

    fn object(&mut self, node: &mut Node<'a>) {
        // llguidance joins keywords in their order: those that refer to others stand last.
        self.types(node);
        self.numbers(node);
        self.counts(node);
        self.texts(node);
        self.items(node);
        self.properties(node);
        self.constants(node);
        self.not(node);
        self.combined(node);
        self.references(node);
        self.unsupported(node);
    }

    fn types(&mut self, node: &mut Node<'a>) {
        let Some((value, at)) = self.get(node, "type") else { return };
        match is_type(value) {
            true => drop(node.out.insert("type".into(), value.clone())),
            false => self.leave_out(&at, format!("there is no type {}", shown(value))),
        }
    }

    fn numbers(&mut self, node: &mut Node<'a>) {
        for (closed, open, is_minimum) in BOUNDS {
            let is_open = matches!(node.fields.get(open), Some(Value::Bool(true)));
            for (key, written) in [(closed, if is_open { open } else { closed }), (open, open)] {
                let Some((value, at)) = self.get(node, key) else { continue };
                match bound(value, is_minimum) {
                    Bound::At(value) => drop(node.out.insert(written.into(), value)),
                    Bound::None => {}
                    Bound::TooLarge => self.leave_out(&at, "the number is too large"),
                    Bound::NotNumber if key == open && value.is_boolean() => {}
                    Bound::NotNumber => self.leave_out(&at, "it is no number"),
                }
            }
        }
        let Some((value, at)) = self.get(node, "multipleOf") else { return };
        let divisor = Divisor::new(value);
        let all = divisor.and_then(|one| self.divisor.map_or(Some(one), |all| all.with(one)));
        match all {
            Some(all) => {
                self.divisor = Some(all);
                node.out.insert("multipleOf".into(), value.clone());
            }
            None => self.leave_out(&at, "such a divisor is not supported"),
        }
    }

    fn counts(&mut self, node: &mut Node<'a>) {
        for key in COUNTS {
            let Some((value, at)) = self.get(node, key) else { continue };
            match count(value) {
                Ok(n) => drop(node.out.insert(key.into(), n.into())),
                Err(why) => self.leave_out(&at, why),
            }
        }
    }

    fn texts(&mut self, node: &mut Node<'a>) {
        if let Some((value, _)) = self.get(node, "format")
            && value.as_str().is_some_and(|name| FORMATS.contains(&name))
        {
            node.out.insert("format".into(), value.clone());
        }
        let Some((value, at)) = self.get(node, "pattern") else { return };
        let Some(text) = value.as_str() else { return self.leave_out(&at, "it is no text") };
        match pattern::translate(text) {
            Ok(pattern) => {
                if let Some(why) = pattern.left_out {
                    self.leave_out(&at, why);
                }
                let mut found = pattern.found.into_iter();
                if let Some(first) = found.next() {
                    node.out.insert("pattern".into(), first.into());
                }
                found.for_each(|other| also(node, json!({ "pattern": other })));
            }
            Err(why) => self.leave_out(&at, why),
        }
    }

    fn items(&mut self, node: &mut Node<'a>) {
        let old = matches!(node.fields.get("items"), Some(Value::Array(_)));
        let (first, rest) = match old {
            true => ("items", "additionalItems"),
            false => ("prefixItems", "items"),
        };
        let mut is_whole = true;
        if let Some((value, at)) = self.get(node, first) {
            match value.as_array() {
                Some(list) => {
                    let list = self.list(list, &at);
                    node.out.insert("prefixItems".into(), list.into());
                }
                None => {
                    is_whole = false;
                    self.leave_out(&at, "it is not an array");
                }
            }
        }
        let has_contains = node.fields.contains_key("contains");
        let rest = match node.fields.get("unevaluatedItems") {
            Some(_)
                if !node.fields.contains_key(rest) && !has_contains && is_plain(node.fields) =>
            {
                "unevaluatedItems"
            }
            _ => rest,
        };
        if is_whole && let Some((value, at)) = self.get(node, rest) {
            let items = self.schema(value, &at);
            node.out.insert("items".into(), items);
        }
    }

    fn list(&mut self, list: &'a [Value], at: &str) -> Vec<Value> {
        let each = list.iter().enumerate();
        each.map(|(i, value)| self.schema(value, &format!("{at}/{i}"))).collect()
    }

    fn properties(&mut self, node: &mut Node<'a>) {
        let mut is_whole = true;
        if let Some((value, at)) = self.get(node, "properties") {
            match value.as_object() {
                Some(fields) => {
                    let each = fields.iter();
                    let each = each
                        .map(|(key, value)| (key.clone(), self.schema(value, &child(&at, key))));
                    let properties: Map<_, _> = each.collect();
                    node.out.insert("properties".into(), properties.into());
                }
                None => {
                    is_whole = false;
                    self.leave_out(&at, "it is no object");
                }
            }
        }
        is_whole &= self.pattern_properties(node);
        self.required(node);
        let has_rest = node.fields.contains_key("additionalProperties");
        let rest = match node.fields.contains_key("unevaluatedProperties") {
            true if !has_rest && is_plain(node.fields) => "unevaluatedProperties",
            _ => "additionalProperties",
        };
        // Without a part of the others it would hold for what they allow.
        if let Some((value, at)) = self.get(node, rest) {
            let schema = self.schema(value, &at);
            if is_whole {
                node.out.insert("additionalProperties".into(), schema);
            }
        }
        self.property_counts(node);
    }

    /// Returns whether all of them are enforced.
    fn pattern_properties(&mut self, node: &mut Node<'a>) -> bool {
        let key = "patternProperties";
        let Some((value, at)) = self.get(node, key) else {
            return node.fields.get(key).is_none_or(Value::is_null);
        };
        let Some(fields) = value.as_object() else {
            self.leave_out(&at, "it is no object");
            return false;
        };
        let mut properties = Map::new();
        for (text, value) in fields {
            let at = child(&at, text);
            let pattern = pattern::translate(text);
            match pattern.map(|pattern| (pattern.left_out, pattern.found)) {
                Ok((None, found)) if found.len() == 1 && self.why_refused(&at).is_none() => {
                    let schema = self.schema(value, &at);
                    properties.extend(found.into_iter().map(|found| (found, schema.clone())));
                }
                Ok((None, found)) if found.len() != 1 => {
                    self.leave_out(&at, "look-ahead is not supported");
                }
                Ok((why, _)) => {
                    let why = why.or(self.why_refused(&at)).unwrap_or_default();
                    self.leave_out(&at, why);
                }
                Err(why) => self.leave_out(&at, why),
            }
        }
        let is_whole = properties.len() == fields.len();
        if !properties.is_empty() {
            node.out.insert(key.into(), properties.into());
        }
        is_whole
    }

    fn required(&mut self, node: &mut Node<'a>) {
        let Some((value, at)) = self.get(node, "required") else { return };
        let Some(names) = value.as_array() else {
            return self.leave_out(&at, "it is not an array of names");
        };
        if !names.iter().all(Value::is_string) {
            self.leave_out(&at, "it has members that are no names");
        }
        let names: Vec<Value> = names.iter().filter(|name| name.is_string()).cloned().collect();
        node.out.insert("required".into(), names.into());
    }

    /// llguidance counts properties only where it need not choose among optional ones.
    fn property_counts(&mut self, node: &mut Node<'a>) {
        let mut counts = [None, None];
        for (slot, key) in counts.iter_mut().zip(["minProperties", "maxProperties"]) {
            let Some((value, at)) = self.get(node, key) else { continue };
            match count(value) {
                Ok(0) if key == "minProperties" => {}
                Ok(n) => *slot = Some((key, n, at)),
                Err(why) => self.leave_out(&at, why),
            }
        }
        let names =
            node.out.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let names: HashSet<&str> = names.iter().filter_map(Value::as_str).collect();
        let properties = node.out.get("properties").and_then(Value::as_object);
        let has_optional =
            properties.is_some_and(|all| all.keys().any(|key| !names.contains(&**key)));
        let n_required = names.len() as u64;
        let [least, most] = counts
            .each_ref()
            .map(|count| count.as_ref().map(|(_, n, _)| n.saturating_sub(n_required)));
        let is_closed = node.out.get("additionalProperties") == Some(&Value::Bool(false))
            && !node.out.contains_key("patternProperties");
        let is_one = least.unwrap_or(0) <= 1 && most.unwrap_or(1) == 1;
        let is_counted =
            !has_optional || (is_closed && is_one) || (least.unwrap_or(0) == 0 && most.is_none());
        let n_properties = properties.map_or(0, Map::len) as u64;
        for (key, n, at) in counts.into_iter().flatten() {
            match is_counted {
                _ if key == "maxProperties" && is_closed && n_properties <= n => {}
                true => drop(node.out.insert(key.into(), n.into())),
                false => self.leave_out(&at, "optional properties are not counted"),
            }
        }
    }

    fn constants(&mut self, node: &mut Node<'a>) {
        let mut all = Vec::new();
        if let Some((value, at)) = self.const_of(node) {
            all.push((vec![value], at));
        }
        if let Some((value, at)) = self.get(node, "enum") {
            match value.as_array() {
                Some(values) => all.push((values.iter().collect(), at)),
                None => self.leave_out(&at, "it is not an array"),
            }
        }
        for (values, at) in all {
            let (exact, others): (Vec<&Value>, Vec<&Value>) =
                values.into_iter().partition(|value| is_exact(value));
            if others.is_empty() {
                match node.out.contains_key("enum") {
                    true => also(node, json!({ "enum": exact })),
                    false => drop(node.out.insert("enum".into(), json!(exact))),
                }
                continue;
            }
            self.leave_out(&at, "a number is too large");
            let others = others.iter().map(|value| json!({ "type": type_of(value) }));
            let mut options: Vec<Value> = others.collect();
            options.push(json!({ "enum": exact }));
            also(node, json!({ "anyOf": options }));
        }
    }

    /// `null` is a constant.
    fn const_of(&mut self, node: &Node<'a>) -> Option<(&'a Value, String)> {
        let value = node.fields.get("const")?;
        let at = child(&node.at, "const");
        match self.why_refused(&at) {
            Some(why) => {
                self.leave_out(&at, why);
                None
            }
            None => Some((value, at)),
        }
    }

    /// Only what says all or nothing.
    fn not(&mut self, node: &mut Node<'a>) {
        let Some((value, at)) = self.get(node, "not") else { return };
        match value {
            Value::Bool(false) => {}
            Value::Bool(true) => also(node, false.into()),
            Value::Object(fields) if fields.is_empty() => also(node, false.into()),
            _ => self.leave_out(&at, "`not` is not supported"),
        }
    }

    fn combined(&mut self, node: &mut Node<'a>) {
        for key in ["anyOf", "oneOf", "allOf"] {
            let Some((value, at)) = self.get(node, key) else { continue };
            let Some(list) = value.as_array().filter(|list| !list.is_empty()) else {
                self.leave_out(&at, "it is not an array of schemas");
                continue;
            };
            if key == "oneOf" && !are_disjoint(list, &at, &self.references) {
                self.leave_out(&at, "several of its schemas may hold at once: it is read as anyOf");
            }
            let list = self.list(list, &at);
            match key {
                "allOf" => list.into_iter().for_each(|schema| also(node, schema)),
                _ if !node.out.contains_key("anyOf") => {
                    node.out.insert("anyOf".into(), list.into());
                }
                _ => also(node, json!({ "anyOf": list })),
            }
        }
    }

    fn references(&mut self, node: &mut Node<'a>) {
        for key in ["$ref", "$dynamicRef", "$recursiveRef"] {
            let Some((value, at)) = self.get(node, key) else { continue };
            let Some(text) = value.as_str() else {
                self.leave_out(&at, "it is no text");
                continue;
            };
            let target = match key {
                "$ref" => self.references.resolve(text, &node.at),
                _ => self.references.resolve_dynamic(text, &node.at),
            };
            let Some(target) = target else {
                self.leave_out(&at, format!("there is no schema {}", shown(value)));
                continue;
            };
            if self.references.circle(&target, &mut self.checked).is_some() {
                self.circle.get_or_insert(at);
                continue;
            }
            self.alone(node, &target);
            let reference = json!(format!("#/$defs/{}", self.target(target)));
            match node.out.contains_key("$ref") {
                true => also(node, json!({ "$ref": reference })),
                false => drop(node.out.insert("$ref".into(), reference)),
            }
        }
    }

    /// Leaves out what stands beside a reference to a schema around it: llguidance joins only
    /// schemas that it knows already.
    fn alone(&mut self, node: &mut Node<'a>, target: &str) {
        if node.out.is_empty() || !self.references.reaches(target, &node.at) {
            return;
        }
        let of_target = self.doc.pointer(target).and_then(|value| value.get("type"));
        if node.out.iter().any(|(key, value)| key != "type" || Some(value) != of_target) {
            let why = "keywords beside a reference to a schema around them are not supported";
            self.leave_out(&node.at, why);
        }
        node.out.clear();
    }

    /// The number of a schema that references lead to.
    fn target(&mut self, at: String) -> usize {
        if let Some(n) = self.targets.iter().position(|known| *known == at) {
            return n;
        }
        let n = self.targets.len();
        self.targets.push(at.clone());
        self.todo.push_back((n, at));
        n
    }

    /// Leaves out the keywords that llguidance does not know, unless they allow every value.
    fn unsupported(&mut self, node: &mut Node<'a>) {
        let fields = node.fields;
        let is_short = |most: &Value| most.as_f64().is_some_and(|most| most <= 1.0);
        for (key, value) in fields {
            let says_nothing = match key.as_str() {
                "uniqueItems" => {
                    value == &Value::Bool(false) || fields.get("maxItems").is_some_and(is_short)
                }
                "propertyNames" => allows_names(value),
                "contains" => {
                    fields.get("minContains").is_some_and(|n| n.as_f64() == Some(0.0))
                        && !fields.contains_key("maxContains")
                }
                "if" => !fields.contains_key("then") && !fields.contains_key("else"),
                "dependentRequired" | "dependentSchemas" | "dependencies" => {
                    value.as_object().is_some_and(Map::is_empty)
                }
                "unevaluatedItems" => {
                    allows_all(value) || !fields.contains_key("contains") && is_plain(fields)
                }
                "unevaluatedProperties" => {
                    let is_closed = fields.contains_key("additionalProperties");
                    allows_all(value) || is_closed || is_plain(fields)
                }
                _ => true,
            };
            if !says_nothing && !value.is_null() {
                self.leave_out(&child(&node.at, key), format!("`{key}` is not supported"));
            }
        }
    }
}

/// Whether it is the name of a type, or a list of them.
fn is_type(value: &Value) -> bool {
    let is_known = |name: &Value| name.as_str().is_some_and(|name| TYPES.contains(&name));
    match value {
        Value::Array(names) => !names.is_empty() && names.iter().all(is_known),
        name => is_known(name),
    }
}

/// Whether values of this schema are of an unknown type: nothing is left of it.
pub fn is_unknown_type(schema: &Value) -> bool {
    schema.get("type").is_some_and(|value| !value.is_null() && !is_type(value))
}

/// Adds a schema that holds too.
fn also(node: &mut Node<'_>, schema: Value) {
    let all = node.out.entry("allOf").or_insert_with(|| json!([]));
    if let Value::Array(all) = all {
        all.push(schema);
    }
}

/// Whether no other schema holds for the same value.
fn is_plain(fields: &Map<String, Value>) -> bool {
    !IN_PLACE.iter().any(|key| fields.contains_key(*key))
}

fn allows_all(value: &Value) -> bool {
    match value {
        Value::Object(fields) => fields.is_empty(),
        other => other == &Value::Bool(true),
    }
}

/// Whether a schema of properties' names allows all of them.
fn allows_names(value: &Value) -> bool {
    let Value::Object(fields) = value else { return allows_all(value) };
    fields.iter().all(|(key, value)| match key.as_str() {
        "type" => {
            let names = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            names.iter().any(|name| name == "string")
        }
        "minLength" => value.as_f64() == Some(0.0),
        "title" | "description" | "$comment" | "format" | "default" | "examples" => true,
        key => key.starts_with("x-"),
    })
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// A value in a message.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
