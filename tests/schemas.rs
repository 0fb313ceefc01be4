//! Schemas of clients: what is made of them is compiled, allows every value that they allow, and
//! where nothing is left out no other.

use flate2::read::GzDecoder;
use moeba::chat::ChatTemplate;
use moeba::chat::tools::{Mode, ToolChoice, Tools};
use moeba::gguf::Gguf;
use moeba::sample::grammar::schema::{Client, fit};
use moeba::sample::grammar::{Constraint, Grammar, Grammars};
use moeba::tokenizer::{EncodeOptions, Tokenizer};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::LazyLock;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/moeba-demo.gguf");
    Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap()
});
static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| Grammars::new(&TOKENIZER).unwrap());

fn read(name: &str) -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/schemas");
    let file = std::fs::File::open(folder.join(name)).unwrap();
    serde_json::from_reader(GzDecoder::new(file)).unwrap()
}

fn client(schema: &Value, is_strict: bool) -> Client<'_> {
    Client { schema, path: "schema", tool: None, is_strict }
}

fn compiled(client: &Client<'_>) -> moeba::Result<Constraint> {
    let check = |schema: &Value| GRAMMARS.check(&Grammar::JsonSchema(schema.clone()));
    fit(client, |schema| GRAMMARS.constraint(&Grammar::JsonSchema(schema)), check)
}

fn allows(start: &Constraint, text: &str) -> bool {
    let mut constraint = start.clone();
    for id in TOKENIZER.encode(text, EncodeOptions::TEXT) {
        let fits = !constraint.is_complete()
            && constraint.mask().is_ok_and(|mask| mask.is_none_or(|mask| mask.allows(id)));
        if !fits || constraint.accept(id).is_err() {
            return false;
        }
    }
    constraint.can_end().unwrap_or(false)
}

/// The value in the texts that a grammar may have for it: properties in any order, whole numbers
/// without a fraction.
fn texts(value: &Value) -> Vec<String> {
    const MOST: usize = 200;
    match value {
        Value::Array(items) => {
            let all = items.iter().map(texts).fold(vec![String::new()], |all, next| {
                let both = all.iter().flat_map(|before| {
                    next.iter().map(move |item| match before.is_empty() {
                        true => item.clone(),
                        false => format!("{before},{item}"),
                    })
                });
                both.take(MOST).collect()
            });
            all.into_iter().map(|inner| format!("[{inner}]")).collect()
        }
        Value::Object(fields) => {
            let mut orders = vec![Vec::new()];
            for _ in 0..fields.len() {
                let longer = orders.iter().flat_map(|order: &Vec<&String>| {
                    let rest = fields.keys().filter(|key| !order.contains(key));
                    rest.map(|key| [order.as_slice(), &[key]].concat())
                });
                orders = longer.take(MOST).collect();
            }
            let all = orders.iter().flat_map(|order| {
                order.iter().fold(vec![String::new()], |all, key| {
                    let next = texts(&fields[key.as_str()]);
                    let both = all.iter().flat_map(|before| {
                        let comma = if before.is_empty() { "" } else { "," };
                        let key = Value::from(key.as_str());
                        next.iter().map(move |text| format!("{before}{comma}{key}:{text}"))
                    });
                    both.take(MOST).collect()
                })
            });
            all.take(MOST).map(|inner| format!("{{{inner}}}")).collect()
        }
        Value::Number(number) => {
            let number = number.as_f64().filter(|_| number.is_f64());
            let plain = number.map(|number| format!("{number}"));
            plain.into_iter().chain([value.to_string()]).collect()
        }
        other => vec![other.to_string()],
    }
}

#[test]
fn what_the_test_suite_calls_valid_is_allowed_and_all_else_is_not() {
    let (mut found, mut n_whole, mut n) = (Vec::new(), 0, 0);
    for case in read("suite.json.gz") {
        let (file, name) = (case[0].as_str().unwrap(), case[1].as_str().unwrap());
        let schema = &case[2];
        let place = |what: &str| format!("{what} | {file} | {name}");
        let start = match compiled(&client(schema, false)) {
            Ok(start) => start,
            Err(e) => {
                found.push(place(&format!("refused: {e}")));
                continue;
            }
        };
        let is_whole = compiled(&client(schema, true)).is_ok();
        n_whole += usize::from(is_whole);
        n += 1;
        for test in case[3].as_array().unwrap() {
            let (instance, is_valid) = (&test[0], test[1].as_bool().unwrap());
            let is_allowed = texts(instance).iter().any(|text| allows(&start, text));
            let bad = match is_valid {
                true => !is_allowed,
                false => is_whole && is_allowed,
            };
            if bad {
                let what = if is_valid { "valid" } else { "invalid" };
                found.push(place(&format!("{what} {instance}")));
            }
        }
    }
    // Where 1.0 and 1 are one number, draft 4 leaves open what they are.
    found.retain(|place| !place.contains("zeroTerminatedFloats"));
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert!(n > 400 && n_whole > 300, "{n_whole} of {n}");
}

/// Each schema, and all tools of a server together in the ways that models call them.
#[test]
fn tools_of_public_servers_are_compiled() {
    let servers = read("mcp.json.gz");
    assert!(servers.len() >= 20);
    let template = ChatTemplate::new("{{ messages[0].content }}", "", "").unwrap();
    let choice = ToolChoice { mode: Mode::Required, only: None };
    for server in &servers {
        let tools = server["tools"].as_object().unwrap();
        for (name, schema) in tools {
            if let Err(e) = compiled(&client(schema, false)) {
                panic!("{} {name}: {e}\n{schema}", server["source"]);
            }
        }
        let each = tools
            .iter()
            .map(|(name, schema)| json!({"type": "function", "name": name, "parameters": schema}));
        let tools = Tools::parse(&each.collect()).unwrap();
        let tools = tools.with_schemas(|tool| client(&tool.parameters, false).enforced()).unwrap();
        for format in ["hermes", "qwen-xml", "harmony", "deepseek-v3.2"] {
            let support = template.tool_support_as(format).unwrap();
            let grammar = support.grammar(&tools, &choice, true, &TOKENIZER).unwrap();
            if let Err(e) = GRAMMARS.constraint(&Grammar::Lark(grammar.lark)) {
                panic!("{} {format}: {e}", server["source"]);
            }
        }
    }
}

/// A schema, a value that it allows and must still be allowed, a value that is not, and the parts
/// that are named where all of it has to be enforced.
#[test]
fn what_is_left_out_is_as_little_as_can_be() {
    for (schema, good, bad, place) in [
        (
            json!({"type": "object", "required": ["a", "b"], "properties": {
                "a": {"enum": []}, "b": {"type": "integer", "maximum": 9}}}),
            json!({"a": 1, "b": 2}),
            json!({"a": 1, "b": 10}),
            "properties.a.enum",
        ),
        (
            json!({"type": "object", "additionalProperties": false,
                "patternProperties": {"^a(?=b)": {"type": "null"}, "^c": {"type": "null"}}}),
            json!({"ab": null, "c": null}),
            json!({"c": 1}),
            "patternProperties.^a(?=b)",
        ),
        (
            json!({"type": "object", "additionalProperties": false, "required": ["aa"],
                "patternProperties": {"a": {"type": "null"}, "^a": {"type": "null"}}}),
            json!({"aa": null}),
            json!({}),
            "patternProperties",
        ),
        (
            json!({"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "^b"}]}),
            json!("bc"),
            json!(1),
            "allOf[0]",
        ),
        (
            json!({"type": "object", "required": ["id"], "properties": {
                "id": {"enum": [9223372036854775807i64, "x"]},
                "n": {"minimum": -1e30, "type": "number"}}}),
            json!({"id": 9223372036854775807i64}),
            json!({"id": "y"}),
            "properties.id.enum",
        ),
        (
            json!({"oneOf": [{"type": "object", "properties": {"a": {"type": "null"}}},
                {"type": "object", "properties": {"b": {"type": "null"}}}]}),
            json!({"a": null}),
            json!([]),
            "oneOf",
        ),
        (
            json!({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
                "next": {"$ref": "#/$defs/n", "minProperties": 1}}}}}),
            json!({"next": {"next": {}}}),
            json!({"next": 1}),
            "$defs.n.properties.next",
        ),
        (
            json!({"type": "string", "format": "uuid", "maxLength": 3}),
            json!("abc"),
            json!("abcd"),
            "format",
        ),
    ] {
        let start = compiled(&client(&schema, false)).unwrap_or_else(|e| panic!("{schema}: {e}"));
        assert!(texts(&good).iter().any(|text| allows(&start, text)), "{schema}: {good}");
        assert!(!texts(&bad).iter().any(|text| allows(&start, text)), "{schema}: {bad}");
        let error = compiled(&client(&schema, true)).err().unwrap().to_string();
        assert!(error.starts_with(&format!("schema.{place}")), "{schema}: {error}");
    }
}

/// Keywords that allow every value refuse neither a form nor a tool, however strict it is.
#[test]
fn what_says_nothing_is_accepted() {
    for schema in [
        json!({"type": "string", "format": "password"}),
        json!({"type": "object", "propertyNames": {"type": "string"}, "required": null}),
        json!({"type": "array", "items": null, "uniqueItems": false}),
        json!({"type": "array", "maxItems": 1.0, "uniqueItems": true}),
        json!({"type": "number", "minimum": f64::MIN, "maximum": f64::MAX}),
        json!({"type": "object", "properties": {"a": {"not": {}}}}),
        json!({"oneOf": [{"type": "string"}, {"type": "null"}], "if": true}),
        json!({"type": "object", "unevaluatedProperties": false, "properties": {"a": true}}),
        json!({"anything": 1, "discriminator": {}, "nullable": true, "type": "integer"}),
        json!({"type": "string", "pattern": "^(?=.*[a-z]).{2,}$"}),
    ] {
        compiled(&client(&schema, true)).unwrap_or_else(|e| panic!("{schema}: {e}"));
    }
    for circle in [json!({"$ref": "#"}), json!({"anyOf": [{"$ref": "#"}, {"type": "null"}]})] {
        let error = compiled(&client(&circle, false)).err().unwrap().to_string();
        assert!(error.contains("refers to itself"), "{error}");
    }
}

#[test]
fn white_space_has_a_bound() {
    let schema = json!({"type": "array", "items": {"type": "null"}});
    let start = compiled(&client(&schema, true)).unwrap();
    let spaced = |space: &str| allows(&start, &format!("[null,{space}null]"));
    let (most, more) = (format!("\n\n{}", " ".repeat(20)), format!("\n\n{}", " ".repeat(21)));
    assert!(["", " ", "\n", "\t", &most].iter().all(|space| spaced(space)));
    assert!(["  ", "\n\n\n", &more].iter().all(|space| !spaced(space)));
}
