//! The form that an answer must have: a schema, a regular expression or a grammar.

use serde_json::Value;

use super::structural_tag::structural_tag;
use crate::sample::grammar::Grammar;
use crate::sample::grammar::schema::Client;
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::{Fields, wrong};
use crate::server::request::Form;
use crate::tokenizer::Tokenizer;

/// The form that a request asks for.
pub fn form(fields: &Fields<'_>, tokenizer: &Tokenizer) -> ApiResult<Option<Form>> {
    let text = |name, of: fn(String) -> Grammar| {
        let text = fields.string(name)?.filter(|text| !text.is_empty());
        Ok::<_, ApiError>(text.map(|text| Form::of(of(text.to_owned()), name)))
    };
    let schema = match fields.get("json_schema") {
        Some(value) => Some(schema(value, "json_schema", false)?),
        None => None,
    };
    let format = match fields.get("response_format") {
        Some(value) => format(value, "response_format", tokenizer)?,
        None => None,
    };
    let tag = fields.get("structural_tag");
    let tag = tag.map(|value| self::tag(value, "structural_tag", tokenizer)).transpose()?;
    let asked = [
        ("response_format", format),
        ("structural_tag", tag),
        ("json_schema", schema),
        ("grammar", text("grammar", Grammar::Gbnf)?),
        ("lark", text("lark", Grammar::Lark)?),
        ("regex", text("regex", Grammar::Regex)?),
    ];
    let mut asked = asked.into_iter().filter_map(|(name, form)| Some((name, form?)));
    match (asked.next(), asked.next()) {
        (Some((one, _)), Some((other, _))) => {
            let message = format!("{other}: an answer has one form, and {one} gives it another");
            Err(ApiError::invalid(other, message))
        }
        (first, _) => Ok(first.map(|(_, form)| form)),
    }
}

/// The form that an object with a `type` at `path` asks for.
pub fn format(value: &Value, path: &str, tokenizer: &Tokenizer) -> ApiResult<Option<Form>> {
    let format = Fields::of(value, path)?;
    match format.required("type")? {
        "text" => Ok(None),
        "json_object" => match format.get("schema") {
            Some(value) => schema(value, &format.path("schema"), format.flag("strict")?).map(Some),
            None => Ok(Some(Form::of(Grammar::JsonObject, path))),
        },
        "json_schema" => {
            // Some clients leave the inner object out.
            let inner = format.get("json_schema");
            let inner = inner.map(|value| Fields::of(value, &format.path("json_schema")));
            let inner = inner.transpose()?.unwrap_or(format);
            let value = inner.get("schema").ok_or_else(|| inner.missing("schema"))?;
            let is_strict = inner.flag("strict")?;
            schema(value, &inner.path("schema"), is_strict).map(Some)
        }
        "structural_tag" => tag(value, path, tokenizer).map(Some),
        _ => Err(format.wrong("type", "text, json_object, json_schema or structural_tag")),
    }
}

/// The schema at a path of the body.
pub fn schema(value: &Value, path: &str, is_strict: bool) -> ApiResult<Form> {
    match value {
        Value::Object(_) | Value::Bool(true) => {
            let form = Form::of(Grammar::JsonSchema(value.clone()), path);
            Ok(Form { is_strict, ..form })
        }
        other => Err(wrong(path, "a JSON schema", other)),
    }
}

fn tag(value: &Value, path: &str, tokenizer: &Tokenizer) -> ApiResult<Form> {
    let grammar = structural_tag(value, path, tokenizer, &|client: &Client<'_>| client.enforced())?;
    Ok(Form { tag: Some(value.clone()), ..Form::of(grammar, path) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::prompt::tests::tokenizer;
    use serde_json::json;

    fn read(body: &Value) -> ApiResult<Option<Grammar>> {
        let form = form(&Fields::of(body, "").unwrap(), &tokenizer())?;
        Ok(form.map(|form| form.grammar))
    }

    #[test]
    fn forms_are_read_wherever_they_stand() {
        let schema = json!({"type": "object"});
        for body in [
            json!({"json_schema": schema}),
            json!({"response_format": {"type": "json_object", "schema": schema}}),
            json!({"response_format": {"type": "json_schema", "schema": schema}}),
            json!({"response_format": {
                "type": "json_schema", "json_schema": {"name": "x", "schema": schema},
            }}),
        ] {
            assert_eq!(read(&body).unwrap(), Some(Grammar::JsonSchema(schema.clone())), "{body}");
        }
        assert_eq!(read(&json!({"response_format": {"type": "text"}})).unwrap(), None);
        assert_eq!(read(&json!({"grammar": "", "regex": null})).unwrap(), None);
        let tag = json!({"type": "structural_tag", "format": {"type": "any_text"}});
        let same = [json!({"response_format": tag}), json!({"structural_tag": tag.to_string()})];
        let [one, other] = same.map(|body| read(&body).unwrap());
        assert!(matches!(&one, Some(Grammar::Lark(_))) && one == other, "{one:?}");
        let body = json!({"regex": "a+"});
        assert_eq!(read(&body).unwrap(), Some(Grammar::Regex("a+".into())));
    }

    #[test]
    fn wrong_forms_are_named() {
        for (body, path) in [
            (json!({"response_format": {"type": "sound"}}), "response_format.type"),
            (json!({"response_format": {"type": 123}}), "response_format.type"),
            (json!({"response_format": "json"}), "response_format"),
            (
                json!({"response_format": {"type": "json_object", "schema": 123}}),
                "response_format.schema",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
                "response_format.json_schema.schema",
            ),
            (json!({"json_schema": []}), "json_schema"),
            (json!({"structural_tag": {}}), "structural_tag.structures"),
            (json!({"regex": "a", "lark": "b"}), "regex"),
        ] {
            assert_eq!(read(&body).unwrap_err().param.as_deref(), Some(path), "{body}");
        }
    }
}
