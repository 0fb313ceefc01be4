//! Structural tags, as xgrammar and vLLM have them: tags that hold JSON of a schema, in a text that
//! is free around them.

use serde_json::{Value, json};

use crate::Result;
use crate::chat::lark::{literal, quoted, slashed, text_rule};
use crate::sample::grammar::schema::Client;
use crate::sample::grammar::{Grammar, WHITE_SPACE};
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::{Fields, wrong};
use crate::tokenizer::Tokenizer;

/// Formats within each other.
const MAX_DEPTH: usize = 32;

const FORMATS: &str = "const_string, json_schema, regex, any_text, sequence, or, optional, plus, \
                       star, tag, triggered_tags or tags_with_separator";

/// Any text, also none.
const FREE: &str = "/(?s:.*)/";

/// Makes a client's schema one for a grammar.
pub type Accept<'a> = &'a dyn Fn(&Client<'_>) -> Result<Value>;

/// The grammar of a structural tag: an object with a `format`, an older one with `structures` and
/// `triggers`, or the JSON of one of them.
///
/// `accept` makes a client's schema one for the grammar.
pub fn structural_tag(
    value: &Value,
    path: &str,
    tokenizer: &Tokenizer,
    accept: Accept<'_>,
) -> ApiResult<Grammar> {
    let parsed: Value;
    let value = match value {
        Value::String(text) => {
            let why = |e: serde_json::Error| {
                ApiError::invalid(path, format!("{path}: it is no JSON: {e}"))
            };
            parsed = serde_json::from_str(text).map_err(why)?;
            &parsed
        }
        value => value,
    };
    let fields = Fields::of(value, path)?;
    let mut writer = Writer { tokenizer, accept, rules: Vec::new() };
    let start = match fields.get("format") {
        Some(format) => {
            let place = Place { depth: 0, is_last: true };
            writer.format(format, &fields.path("format"), place)?
        }
        None => {
            let tags = writer.list(&fields, "structures", |writer, value, path| {
                writer.tag(value, path, "schema", MAX_DEPTH)
            })?;
            writer.triggered(&fields, tags, false, false)?
        }
    };
    writer.rules.insert(0, format!("start: {start}"));
    Ok(Grammar::Lark(writer.rules.join("\n") + "\n"))
}

/// The place of a format.
#[derive(Clone, Copy)]
struct Place {
    depth: usize,
    /// Nothing follows it.
    is_last: bool,
}

/// A tag in the making.
struct Tag {
    begin: String,
    /// The path of its beginning in the body.
    path: String,
    /// All that follows the beginning.
    rest: String,
}

/// The grammar in the making.
struct Writer<'a> {
    tokenizer: &'a Tokenizer,
    accept: Accept<'a>,
    rules: Vec<String>,
}

impl Writer<'_> {
    /// The name of a new rule.
    fn rule(&mut self, body: &str) -> String {
        let name = format!("part_{}", self.rules.len());
        self.rules.push(format!("{name}: {body}"));
        name
    }

    /// Any text up to the marker, the marker too.
    fn text(&mut self, marker: &str) -> String {
        let name = format!("part_{}", self.rules.len());
        self.rules.push(text_rule(&name, marker, self.tokenizer));
        name
    }

    /// A text as it is written.
    fn literal(&self, text: &str) -> String {
        match literal(text, self.tokenizer) {
            empty if empty.is_empty() => "\"\"".into(),
            literal => literal,
        }
    }

    fn schema(&mut self, schema: &Value, path: &str) -> ApiResult<String> {
        if !matches!(schema, Value::Object(_) | Value::Bool(true)) {
            return Err(wrong(path, "a JSON schema", schema));
        }
        let client = Client { schema, path, tool: None, is_strict: false };
        let mut schema = (self.accept)(&client).map_err(|e| ApiError::of_schema(&e, path))?;
        if let Some(fields) = schema.as_object_mut() {
            let options = || json!({ "whitespace_pattern": WHITE_SPACE });
            fields.entry("x-guidance").or_insert_with(options);
        }
        Ok(self.rule(&format!("%json {schema}")))
    }

    /// The expression of a format.
    fn format(&mut self, value: &Value, path: &str, place: Place) -> ApiResult<String> {
        let fields = Fields::of(value, path)?;
        if place.depth == MAX_DEPTH {
            let message = format!("{path}: expected at most {MAX_DEPTH} formats within each other");
            return Err(ApiError::invalid(path, message));
        }
        let inner = Place { depth: place.depth + 1, is_last: false };
        let repeated = |writer: &mut Self, sign: &str| -> ApiResult<String> {
            let content = fields.get("content").ok_or_else(|| fields.missing("content"))?;
            Ok(format!("({}){sign}", writer.format(content, &fields.path("content"), inner)?))
        };
        match fields.required("type")? {
            "const_string" => Ok(self.literal(fields.required("value")?)),
            "json_schema" => {
                let schema =
                    fields.get("json_schema").ok_or_else(|| fields.missing("json_schema"))?;
                self.schema(schema, &fields.path("json_schema"))
            }
            "regex" => match fields.required("pattern")? {
                "" => Ok(self.literal("")),
                pattern => Ok(self.rule(&slashed(pattern))),
            },
            "any_text" if place.is_last => Ok(self.rule(FREE)),
            "any_text" => {
                let message =
                    format!("{path}: any_text has no end here: put it last or into a tag");
                Err(ApiError::invalid(path, message))
            }
            "sequence" => {
                let n = fields.array("elements")?.map_or(0, Vec::len);
                let mut i = 0;
                let parts = self.list(&fields, "elements", |writer, value, path| {
                    i += 1;
                    let is_last = place.is_last && i == n;
                    writer.format(value, path, Place { is_last, ..inner })
                })?;
                Ok(format!("({})", parts.join(" ")))
            }
            "or" => {
                let place = Place { is_last: place.is_last, ..inner };
                let parts = self.list(&fields, "elements", |writer, value, path| {
                    writer.format(value, path, place)
                })?;
                Ok(format!("({})", parts.join(" | ")))
            }
            "optional" => repeated(self, "?"),
            "plus" => repeated(self, "+"),
            "star" => repeated(self, "*"),
            "tag" => {
                let tag = self.tag(value, path, "content", place.depth)?;
                Ok(format!("({} {})", self.literal(&tag.begin), tag.rest))
            }
            "tags_with_separator" => self.separated(&fields, place.depth),
            "triggered_tags" if place.is_last => {
                let tags = self.tags(&fields, place.depth)?;
                let flag = |name| fields.flag(name);
                self.triggered(&fields, tags, flag("at_least_one")?, flag("stop_after_first")?)
            }
            "triggered_tags" => {
                let message = format!("{path}: triggered_tags have no end here: put them last");
                Err(ApiError::invalid(path, message))
            }
            _ => Err(fields.wrong("type", FORMATS)),
        }
    }

    /// Reads the items of a list that is not empty.
    fn list<T>(
        &mut self,
        fields: &Fields<'_>,
        name: &'static str,
        mut read: impl FnMut(&mut Self, &Value, &str) -> ApiResult<T>,
    ) -> ApiResult<Vec<T>> {
        let list = fields.array(name)?.ok_or_else(|| fields.missing(name))?;
        let path = fields.path(name);
        if list.is_empty() {
            return Err(ApiError::invalid(path.clone(), format!("{path}: the array is empty")));
        }
        let items = list.iter().enumerate();
        items.map(|(i, value)| read(self, value, &format!("{path}[{i}]"))).collect()
    }

    fn tags(&mut self, fields: &Fields<'_>, depth: usize) -> ApiResult<Vec<Tag>> {
        self.list(fields, "tags", |writer, value, path| writer.tag(value, path, "content", depth))
    }

    /// A tag, whose content is a format or, in older ones, a schema.
    fn tag(
        &mut self,
        value: &Value,
        path: &str,
        name: &'static str,
        depth: usize,
    ) -> ApiResult<Tag> {
        let fields = Fields::of(value, path)?;
        let begin = fields.required("begin")?.to_owned();
        let ends = fields.strings("end")?.ok_or_else(|| fields.missing("end"))?;
        let content = fields.get(name).ok_or_else(|| fields.missing(name))?;
        let content_path = fields.path(name);
        let rest = match ends.as_slice() {
            [end] if !end.is_empty() && content["type"] == "any_text" && name == "content" => {
                self.text(end)
            }
            _ => {
                let content = match name {
                    "schema" => self.schema(content, &content_path)?,
                    _ => {
                        let place = Place { depth: depth + 1, is_last: false };
                        self.format(content, &content_path, place)?
                    }
                };
                let ends: Vec<String> = ends.iter().map(|end| self.literal(end)).collect();
                format!("{content} ({})", ends.join(" | "))
            }
        };
        Ok(Tag { begin, path: fields.path("begin"), rest })
    }

    /// Free text, in which each trigger begins one of its tags.
    fn triggered(
        &mut self,
        fields: &Fields<'_>,
        tags: Vec<Tag>,
        at_least_one: bool,
        stops: bool,
    ) -> ApiResult<String> {
        let path = fields.path("triggers");
        let triggers = fields.strings("triggers")?.ok_or_else(|| fields.missing("triggers"))?;
        if triggers.is_empty() || triggers.contains(&"") {
            let message = format!("{path}: expected texts that are not empty");
            return Err(ApiError::invalid(path, message));
        }
        let mut groups = vec![Vec::new(); triggers.len()];
        for tag in &tags {
            let fits = |(_, trigger): &(usize, &&str)| tag.begin.starts_with(**trigger);
            let mut found = triggers.iter().enumerate().filter(fits);
            let (Some((i, trigger)), None) = (found.next(), found.next()) else {
                let path = &tag.path;
                let message = format!("{path}: expected a text that begins with one trigger");
                return Err(ApiError::invalid(path, message));
            };
            let behind = literal(&tag.begin[trigger.len()..], self.tokenizer);
            groups[i].push(format!("{behind} {}", tag.rest));
        }
        let mut units = Vec::new();
        for (trigger, group) in triggers.iter().zip(&groups).filter(|(_, group)| !group.is_empty())
        {
            let name = format!("part_{}", self.rules.len());
            let literal = self.literal(trigger);
            self.rules.push(match quoted(trigger) == Some(literal) {
                // Lazy: this trigger ends the text, whatever the other texts may go on with.
                true => format!("{name}[suffix={}]: {FREE}", Value::from(*trigger)),
                false => text_rule(&name, trigger, self.tokenizer),
            });
            units.push(format!("{name} ({})", group.join(" | ")));
        }
        let (unit, free) = (self.rule(&units.join(" | ")), self.rule(FREE));
        Ok(match (at_least_one, stops) {
            (false, false) => format!("{unit}* {free}"),
            (true, false) => format!("{} {unit}* {free}", self.one_of(&tags)),
            (false, true) => format!("({unit} | {free})"),
            (true, true) => self.one_of(&tags),
        })
    }

    /// The rule of these tags.
    fn one_of(&mut self, tags: &[Tag]) -> String {
        let tags = tags.iter().map(|tag| format!("{} {}", self.literal(&tag.begin), tag.rest));
        let tags: Vec<String> = tags.collect();
        self.rule(&tags.join(" | "))
    }

    fn separated(&mut self, fields: &Fields<'_>, depth: usize) -> ApiResult<String> {
        let tags = self.tags(fields, depth)?;
        let tag = self.one_of(&tags);
        let separator = self.literal(fields.required("separator")?);
        let all = match fields.flag("stop_after_first")? {
            true => tag,
            false => format!("{tag} ({separator} {tag})*"),
        };
        let sign = if fields.flag("at_least_one")? { "" } else { "?" };
        Ok(format!("({all}){sign}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::grammar::Grammars;
    use crate::server::prompt::tests::{CALL, tokenizer};

    /// Whether an answer of this form may be this text.
    fn allows(tag: &Value, text: &str) -> bool {
        let tokenizer = tokenizer();
        let grammar =
            structural_tag(tag, "tag", &tokenizer, &|client: &Client<'_>| client.enforced())
                .unwrap();
        let grammars = Grammars::new(&tokenizer).unwrap();
        let mut constraint = grammars.constraint(&grammar).unwrap();
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let name = rest.starts_with(CALL).then_some(CALL);
            let ids = name.map_or_else(
                || c.to_string().bytes().map(u32::from).collect(),
                |name| vec![tokenizer.special_id(name).unwrap()],
            );
            rest = &rest[name.map_or(c.len_utf8(), str::len)..];
            for id in ids {
                if constraint.is_complete() || !constraint.mask().unwrap().unwrap().allows(id) {
                    return false;
                }
                constraint.accept(id).unwrap();
            }
        }
        constraint.can_end().unwrap()
    }

    fn check(tag: &Value, good: &[&str], bad: &[&str]) {
        good.iter().for_each(|text| assert!(allows(tag, text), "{tag}: {text:?}"));
        bad.iter().for_each(|text| assert!(!allows(tag, text), "{tag}: {text:?}"));
    }

    fn tag(begin: &str, n: u64) -> Value {
        let content = json!({ "type": "json_schema", "json_schema": { "const": n } });
        json!({ "type": "tag", "begin": begin, "content": content, "end": "</f>" })
    }

    fn structure(begin: &str, n: u64) -> Value {
        json!({ "begin": begin, "schema": { "const": n }, "end": "</f>" })
    }

    #[test]
    fn triggers_begin_tags_in_free_text() {
        let old = json!({ "type": "structural_tag", "triggers": ["<f="],
            "structures": [structure("<f=a>", 1), structure("<f=b>", 2)] });
        let format = |more: Value| {
            let mut format = json!({ "type": "triggered_tags", "triggers": ["<f=", "<g"],
                "tags": [tag("<f=a>", 1), tag("<f=b>", 2), tag("<g>", 3)] });
            format.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({ "type": "structural_tag", "format": format })
        };
        let good = ["", "a < b", "x<f=a>1</f>", "<f=b>2</f> and\n<f=a>1</f>.", "<f"];
        check(&old, &good, &["<f=", "<f=c>1</f>", "<f=a>2</f>", "x<f=a>1</f><f=b>1</f>"]);
        check(&Value::from(old.to_string()), &good, &["<f="]);
        let free = format(json!({}));
        check(&free, &good, &["<f=a>2</f>", "<gg", "<g>1</f>"]);
        check(&free, &["x<g>3</f><f=a>1</f>y"], &[]);
        let first = format(json!({ "at_least_one": true }));
        check(&first, &["<g>3</f>", "<g>3</f> x <f=a>1</f>"], &["", "x<g>3</f>"]);
        let one = format(json!({ "stop_after_first": true }));
        check(&one, &["x", "x<g>3</f>"], &["<g>3</f>x"]);
        let only = format(json!({ "at_least_one": true, "stop_after_first": true }));
        check(&only, &["<g>3</f>"], &["", "x<g>3</f>", "<g>3</f>x"]);
    }

    #[test]
    fn formats_are_put_together() {
        let of = |format: Value| json!({ "format": format });
        let text = |text: &str| json!({ "type": "const_string", "value": text });
        let any = json!({ "type": "any_text" });
        check(&of(any.clone()), &["", "a\n\"<"], &[CALL]);
        let list = json!([text("a"), { "type": "or", "elements": [text("b"), text("")] },
            { "type": "regex", "pattern": "[0-9]/[0-9]" }, any]);
        let sequence = of(json!({ "type": "sequence", "elements": list }));
        check(&sequence, &["ab1/2", "a1/2 and more"], &["a", "ab1", "b1/2"]);
        for (kind, good, bad) in [
            ("optional", "", "<a>1</f><a>1</f>"),
            ("plus", "<a>1</f><a>1</f>", ""),
            ("star", "", "x"),
        ] {
            let format = of(json!({ "type": kind, "content": tag("<a>", 1) }));
            check(&format, &[good, "<a>1</f>"], &[bad]);
        }
        let tagged = json!({ "type": "tag", "begin": "(", "content": any, "end": "</f>" });
        check(&of(tagged), &["(</f>", "(a</b></f>"], &["(a", "(</f>a", "</f>"]);
        // Control tokens stand for themselves.
        let control = json!({ "type": "tag", "begin": CALL, "content": any, "end": CALL });
        let whole = format!("{CALL}a<b{CALL}");
        check(&of(control), &[&whole], &[CALL, "ab", &format!("{whole}a")]);
        let tags = json!([tag("<a>", 1), tag("<b>", 2)]);
        let separated = json!({ "type": "tags_with_separator", "separator": ", ", "tags": tags });
        check(&of(separated.clone()), &["", "<b>2</f>, <a>1</f>"], &["<a>1</f><b>2</f>", "x"]);
        let mut one = separated;
        one["at_least_one"] = true.into();
        one["stop_after_first"] = true.into();
        check(&of(one), &["<b>2</f>"], &["", "<b>2</f>, <a>1</f>"]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let any = json!({ "type": "any_text" });
        let nested =
            (0..40).fold(any.clone(), |inner, _| json!({ "type": "or", "elements": [inner] }));
        for (tag, path) in [
            (json!("{"), "tag"),
            (json!(7), "tag"),
            (json!({}), "tag.structures"),
            (json!({ "structures": [{ "begin": "a", "end": "b" }] }), "tag.structures[0].schema"),
            (json!({ "structures": [], "triggers": ["a"] }), "tag.structures"),
            (
                json!({ "structures": [{ "begin": "a", "schema": {}, "end": "b" }],
                    "triggers": ["b"] }),
                "tag.structures[0].begin",
            ),
            (
                json!({ "structures": [{ "begin": "a", "schema": 1, "end": "b" }],
                    "triggers": ["a"] }),
                "tag.structures[0].schema",
            ),
            (json!({ "format": { "type": "grammar", "grammar": "x" } }), "tag.format.type"),
            (json!({ "format": { "type": "or", "elements": [] } }), "tag.format.elements"),
            (
                json!({ "format": { "type": "sequence", "elements": [any, any] } }),
                "tag.format.elements[0]",
            ),
            (
                json!({ "format": { "type": "triggered_tags", "triggers": [""], "tags": [] } }),
                "tag.format.tags",
            ),
        ] {
            let error =
                structural_tag(&tag, "tag", &tokenizer(), &|client: &Client<'_>| client.enforced())
                    .unwrap_err();
            assert_eq!(error.param.as_deref(), Some(path), "{tag}: {}", error.message);
            assert!(error.message.starts_with(path), "{}", error.message);
        }
        let error = structural_tag(
            &json!({ "format": nested }),
            "tag",
            &tokenizer(),
            &|client: &Client<'_>| client.enforced(),
        )
        .unwrap_err();
        assert!(error.message.contains("at most 32"), "{}", error.message);
    }
}
