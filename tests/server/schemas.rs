use serde_json::{Value, json};

use crate::support::{Server, merged, start};

/// A part of a schema that cannot be enforced, and its place in the schema.
fn parts() -> Vec<(Value, &'static str)> {
    let object = |property: Value| json!({"type": "object", "properties": {"p": property}});
    let needed = |property: Value| merged(object(property), &json!({"required": ["p"]}));
    vec![
        (object(json!({"type": "string", "pattern": "^(?!x)[a-z]+$"})), ".properties.p.pattern"),
        (object(json!({"type": "string", "pattern": "("})), ".properties.p.pattern"),
        (object(json!({"type": "integer", "maximum": i64::MAX})), ".properties.p.maximum"),
        (object(json!({"type": "array", "uniqueItems": true})), ".properties.p.uniqueItems"),
        (object(json!({"type": "any"})), ".properties.p.type"),
        (object(json!({"$ref": "#/$defs/none"})), ".properties.p.$ref"),
        (needed(json!({"enum": []})), ".properties.p.enum"),
        (needed(json!({"type": "integer", "minimum": 5, "maximum": 3})), ".properties.p.minimum"),
        (
            json!({"type": "object", "properties": {}, "propertyNames": {"maxLength": 3}}),
            ".propertyNames",
        ),
    ]
}

/// Schemas all of which is enforced, whatever they look like.
fn whole() -> Vec<Value> {
    let object = |property: Value| json!({"type": "object", "properties": {"p": property}});
    vec![
        object(json!({"type": "string", "format": "password"})),
        object(json!({"type": "string", "pattern": "^\\d{2}\\/\\cJ[^]$"})),
        object(json!({"type": "string", "minLength": 1.0, "pattern": null})),
        object(json!({"type": "number", "maximum": f64::MAX})),
        json!({"type": "object", "properties": {}, "required": null,
            "propertyNames": {"type": "string"}}),
        json!({"type": "object", "properties": {"a/b": {"type": "null"},
            "p": {"$ref": "#/properties/a~1b"}}}),
    ]
}

fn user() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

/// The routes with a tool of this schema, and the place of the schema.
fn with_tool(schema: &Value, is_strict: bool) -> Vec<(&'static str, Value, &'static str)> {
    let good = json!({"type": "object", "properties": {"x": {"type": "string"}}});
    let nested = |name: &str, schema: &Value| {
        let function = json!({"name": name, "parameters": schema, "strict": is_strict});
        json!({"type": "function", "function": function})
    };
    let flat = |name: &str, schema: &Value| {
        let fields = json!({"name": name, "parameters": schema, "strict": is_strict});
        merged(fields, &json!({"type": "function"}))
    };
    let anthropic = |name: &str, schema: &Value| {
        let fields = json!({"name": name, "input_schema": schema});
        merged(fields, &json!({"strict": is_strict}))
    };
    let search = json!({"type": "web_search_20250305", "name": "web_search"});
    vec![
        (
            "/v1/chat/completions",
            json!({"messages": user(), "max_tokens": 3,
                "tools": [nested("good", &good), nested("mail", schema)]}),
            "tools[1].function.parameters",
        ),
        (
            "/v1/responses",
            json!({"input": "hi", "max_output_tokens": 16, "tool_choice": "required",
                "tools": [{"type": "web_search"}, flat("good", &good), flat("mail", schema)]}),
            "tools[2].parameters",
        ),
        (
            "/v1/messages",
            json!({"messages": user(), "max_tokens": 3, "tool_choice": {"type": "any"},
                "tools": [search, anthropic("good", &good), anthropic("mail", schema)]}),
            "tools[2].input_schema",
        ),
    ]
}

/// The routes with a form of this schema, and the place of the schema.
fn with_form(schema: &Value, is_strict: bool) -> Vec<(&'static str, Value, &'static str)> {
    let format = json!({"type": "json_schema", "name": "n", "schema": schema, "strict": is_strict});
    let nested = json!({"type": "json_schema", "json_schema": format});
    let path = "response_format.json_schema.schema";
    vec![
        (
            "/v1/chat/completions",
            json!({"messages": user(), "max_tokens": 3, "response_format": nested}),
            path,
        ),
        (
            "/v1/completions",
            json!({"prompt": "hi", "max_tokens": 3, "response_format": nested}),
            path,
        ),
        (
            "/v1/responses",
            json!({"input": "hi", "max_output_tokens": 16, "text": {"format": format}}),
            "text.format.schema",
        ),
        (
            "/v1/messages",
            json!({"messages": user(), "max_tokens": 3, "output_config": {"format": format}}),
            "output_config.format.schema",
        ),
    ]
}

/// Forms that no client can ask to be strict.
fn without_strict(schema: &Value) -> Vec<(&'static str, Value)> {
    let tag = json!({"type": "structural_tag", "format":
        {"type": "json_schema", "json_schema": schema}});
    vec![
        ("/completion", json!({"prompt": "hi", "n_predict": 3, "json_schema": schema})),
        (
            "/api/chat",
            json!({"messages": user(), "stream": false, "options": {"num_predict": 3},
                "format": schema}),
        ),
        (
            "/api/generate",
            json!({"prompt": "hi", "stream": false, "options": {"num_predict": 3},
                "format": schema}),
        ),
        (
            "/api/chat",
            json!({"messages": user(), "stream": false, "options": {"num_predict": 3},
                "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": user(), "max_tokens": 3,
            "response_format": tag}),
        ),
    ]
}

fn accepted(server: &Server, path: &str, body: &Value) {
    let answer = server.post(path, body);
    assert_eq!(answer.status, 200, "{path} {body}: {}", answer.json());
}

#[test]
fn what_cannot_be_enforced_is_left_out_and_named_where_it_is_strict() {
    let server = start(&["-c", "512", "--parallel", "2"]);
    for (schema, at) in parts() {
        for (path, body, _) in with_tool(&schema, false).iter().chain(&with_form(&schema, false)) {
            accepted(&server, path, body);
        }
        for (path, body) in without_strict(&schema) {
            accepted(&server, path, &body);
        }
        for (path, body, place) in with_tool(&schema, true).iter().chain(&with_form(&schema, true))
        {
            let answer = server.post(path, body);
            let (text, place) = (answer.error(400), format!("{place}{at}"));
            assert!(text.starts_with(&place), "{path}: {text}");
            assert!(
                !text.contains("Lark") && (!body["tools"].is_array() || text.contains("`mail`"))
            );
            let param = &answer.json()["error"]["param"];
            assert!(path == &"/v1/messages" || param == &place, "{path}: {param}");
        }
    }
    // Not offered to the model, a tool has no grammar.
    let (schema, _) = &parts()[0];
    let mut none = with_tool(schema, true).remove(0).1;
    none["tool_choice"] = "none".into();
    accepted(&server, "/v1/chat/completions", &none);
    for schema in whole() {
        for is_strict in [false, true] {
            let all = with_tool(&schema, is_strict).into_iter();
            for (path, body, _) in all.chain(with_form(&schema, is_strict)) {
                accepted(&server, path, &body);
            }
        }
    }
}

#[test]
fn a_schema_that_is_itself_is_refused() {
    let server = start(&["-c", "512", "--parallel", "1"]);
    let schema = json!({"type": "object", "properties": {"p": {"$ref": "#/properties/p"}}});
    for is_strict in [false, true] {
        let all = with_tool(&schema, is_strict).into_iter();
        for (path, body, place) in all.chain(with_form(&schema, is_strict)) {
            let text = server.post(path, &body).error(400);
            assert!(text.starts_with(&format!("{place}.properties.p.$ref: ")), "{path}: {text}");
        }
    }
}

/// Calls are JSON of what is left of the schema.
#[test]
fn calls_follow_what_is_left_of_a_schema() {
    let server = start(&["-c", "1024", "--parallel", "1"]);
    let schema = json!({"type": "object", "required": ["to"], "additionalProperties": false,
        "properties": {"to": {"type": "string", "maxLength": 6, "pattern": "^(?!x)[a-z]{2,4}$"}},
        "x-unknown": 1});
    let function = json!({"name": "mail", "parameters": schema});
    for seed in 0..4 {
        let body = json!({"messages": user(), "max_tokens": 60, "seed": seed,
            "tools": [{"type": "function", "function": function}], "tool_choice": "required"});
        let json = server.post("/v1/chat/completions", &body).json();
        let call = &json["choices"][0]["message"]["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        let to = arguments["to"].as_str().unwrap();
        let fits = (2..=4).contains(&to.len()) && to.bytes().all(|b| b.is_ascii_lowercase());
        assert!(fits && arguments.as_object().unwrap().len() == 1, "{arguments}");
    }
}

/// A grammar whose states multiply in the middle of an answer is the client's fault.
#[test]
fn a_grammar_that_becomes_too_complex_is_no_fault_of_the_server() {
    let server = start(&["-c", "1024", "--parallel", "1"]);
    let answer = |seed: u64| {
        let body = json!({"prompt": "abba abbab aabab The cat abab", "n_predict": 600,
            "seed": seed, "temperature": 1.3, "regex": ".*[ab].{40}"});
        server.post("/completion", &body)
    };
    let answers: Vec<_> = (0..8).map(answer).collect();
    let failed: Vec<_> = answers.iter().filter(|answer| answer.status != 200).collect();
    assert!(!failed.is_empty(), "{answers:?}");
    for answer in failed {
        assert!(answer.error(400).contains("too complex"), "{answer:?}");
    }
}
