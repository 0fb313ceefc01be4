//! The document says what the routes do: it is held to the table of routes, and field by field to
//! what they read.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::repo;
use regex::Regex;
use serde_json::{Map, Value, json};

use crate::support::{Answer, Server, start, start_logged};

/// Without the stream of the experts, which has no end.
const ARGS: &[&str] = &["-c", "512", "--parallel", "1", "--alias", "demo", "--no-slots", "-vvv"];

/// A server that has all routes, and its folder for slots.
fn start_all() -> (tempfile::TempDir, Server) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let server = start(&[ARGS, &["--slot-save-path", path]].concat());
    (folder, server)
}

fn document(server: &Server) -> Value {
    let answer = server.get("/openapi.json");
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

/// The operations: path, method in capitals, object.
fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let mut out = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if method != "parameters" {
                out.push((path.clone(), method.to_uppercase(), operation.clone()));
            }
        }
    }
    out
}

/// The value that a reference leads to, or the value itself.
fn resolved<'a>(document: &'a Value, value: &'a Value) -> &'a Value {
    match value["$ref"].as_str() {
        Some(to) => {
            document.pointer(to.strip_prefix('#').unwrap()).unwrap_or_else(|| panic!("{to}"))
        }
        None => value,
    }
}

/// The schema of an operation's body.
fn body_of<'a>(document: &'a Value, operation: &'a Value) -> Option<&'a Value> {
    let schema = operation.pointer("/requestBody/content/application~1json/schema")?;
    Some(resolved(document, schema))
}

/// A path without its parameter.
fn concrete(path: &str) -> String {
    let path = path.replace("{model}", "demo").replace("{rest}", "x");
    path.replace("{id_slot}", "0?action=save")
}

fn ask(server: &Server, method: &str, path: &str) -> Answer {
    let length = if method == "POST" { "Content-Length: 2\r\n" } else { "" };
    let body = if method == "POST" { "{}" } else { "" };
    server.send(format!("{}{body}", server.head(method, path, length)))
}

#[test]
fn each_route_is_in_the_document_and_nothing_else() {
    let (_folder, server) = start_all();
    let document = document(&server);
    assert_eq!(document["openapi"], "3.1.0");
    let source = std::fs::read_to_string(repo().join("src/server/router.rs")).unwrap();
    let call = Regex::new(r#"\broute\(\s*"([^"]+)""#).unwrap();
    let program = source.split("#[cfg(test)]").next().unwrap();
    let routed: BTreeSet<String> = call.captures_iter(program).map(|c| c[1].to_owned()).collect();
    let parameter = Regex::new(r"\{\w+\}$").unwrap();
    let paths = document["paths"].as_object().unwrap();
    let told: BTreeSet<String> =
        paths.keys().map(|path| parameter.replace(path, "*").into_owned()).collect();
    assert_eq!(told, routed);
    for path in paths.keys() {
        let told = operations(&document);
        let told: Vec<&str> =
            told.iter().filter(|(p, ..)| p == path).map(|(_, m, _)| m.as_str()).collect();
        for method in ["GET", "POST", "DELETE", "PUT"] {
            let answer = ask(&server, method, &concrete(path));
            let is_there = answer.status != 405 || path.ends_with("responses") && method == "GET";
            assert_eq!(told.contains(&method), is_there, "{method} {path}: {answer:?}");
        }
    }
}

#[test]
fn the_document_is_whole() {
    let (_folder, server) = start_all();
    let document = document(&server);
    for (path, method, operation) in operations(&document) {
        let name = format!("{method} {path}");
        assert!(!operation["summary"].as_str().unwrap().is_empty(), "{name}");
        let has_parameter = document["paths"][&path]["parameters"].is_array();
        assert_eq!(path.contains('{'), has_parameter, "{name}");
        let responses = operation["responses"].as_object().unwrap();
        for (status, response) in responses {
            assert!((200..600).contains(&status.parse::<u16>().unwrap()), "{name}");
            assert!(response["description"].is_string(), "{name} {status}");
            for (_, content) in response["content"].as_object().into_iter().flatten() {
                assert!(resolved(&document, &content["schema"]).is_object(), "{name} {status}");
            }
        }
        if let Some(schema) = body_of(&document, &operation) {
            let example = &schema["examples"][0];
            for field in schema["required"].as_array().into_iter().flatten() {
                assert!(!example[field.as_str().unwrap()].is_null(), "{name}: {field}");
            }
        }
        fill_slot(&server, &path);
        // What comes is told, with the members that are told.
        let body = body_of(&document, &operation).map(|schema| &schema["examples"][0]);
        let answer = match body {
            Some(body) => {
                let body = without_stream(&path, body).to_string();
                server.send_body(&method, &concrete(&path), &body)
            }
            None => ask(&server, &method, &concrete(&path)),
        };
        let response = &responses.get(&answer.status.to_string());
        let response = response.unwrap_or_else(|| panic!("{name}: {answer:?}"));
        if let Some(content) = response["content"].get("application/json") {
            let json = answer.json();
            let schema = resolved(&document, &content["schema"]);
            for member in schema["required"].as_array().into_iter().flatten() {
                assert!(json.get(member.as_str().unwrap()).is_some(), "{name}: {member}: {json}");
            }
        }
        let expected = if responses.contains_key("200") { 200 } else { 400 };
        assert!(answer.status == expected || answer.status > 400, "{name}: {answer:?}");
    }
}

/// The slot to save has a text: an embedding leaves none.
fn fill_slot(server: &Server, path: &str) {
    if path.starts_with("/slots/") {
        let body = json!({"prompt": "Hello", "n_predict": 1});
        assert_eq!(server.post("/completion", &body).status, 200);
    }
}

/// Ollama's routes stream unless they are told not to.
fn without_stream(path: &str, body: &Value) -> Value {
    let mut body = body.clone();
    if path.starts_with("/api/") {
        body["stream"] = false.into();
    }
    body
}

/// A value that is none of these types.
fn other(types: &[&str]) -> Value {
    let all = [
        ("integer", json!(5)),
        ("string", json!("x")),
        ("boolean", json!(true)),
        ("array", json!([])),
        ("object", json!({})),
    ];
    let takes = |name| types.contains(&name) || name == "integer" && types.contains(&"number");
    all.into_iter().find(|(name, _)| !takes(*name)).unwrap().1
}

/// Values that a field does not take, by its schema.
fn wrong_values(schema: &Value) -> Vec<Value> {
    let types = match &schema["type"] {
        Value::String(name) => vec![name.as_str()],
        Value::Array(names) => names.iter().map(|name| name.as_str().unwrap()).collect(),
        _ => return Vec::new(),
    };
    let mut out = vec![other(&types)];
    out.extend(schema["minimum"].as_i64().map(|least| json!(least - 1)));
    out.extend(schema["maximum"].as_i64().map(|most| json!(most + 1)));
    out
}

#[test]
fn fields_have_the_types_that_the_document_says() {
    let (_folder, server) = start_all();
    let document = document(&server);
    for (path, method, operation) in operations(&document) {
        let schema = body_of(&document, &operation).filter(|schema| schema["type"] != "array");
        let Some(schema) = schema else { continue };
        let example = &schema["examples"][0];
        let mut cases = Vec::new();
        for (name, field) in schema["properties"].as_object().unwrap() {
            let wrong = wrong_values(field).into_iter();
            cases.extend(wrong.map(|value| (name.clone(), name.clone(), value)));
            for (inner, field) in field["properties"].as_object().into_iter().flatten() {
                for value in wrong_values(field) {
                    // Anthropic's has to say whether it is on.
                    let mut object = match name.as_str() {
                        "thinking" => json!({ "type": "disabled" }),
                        _ => json!({}),
                    };
                    object[inner] = value;
                    cases.push((name.clone(), format!("{name}.{inner}"), object));
                }
            }
        }
        assert!(!cases.is_empty(), "{method} {path}");
        for (name, told, value) in cases {
            let mut body = example.clone();
            body[&name] = value.clone();
            let answer = server.send_body(&method, &concrete(&path), &body.to_string());
            assert_eq!(answer.status, 400, "{path} {told} {value}: {answer:?}");
            assert!(answer.body.contains(&told), "{path} {told} {value}: {answer:?}");
        }
    }
}

/// Names that the server's sources have in quotes: those of all fields are among them.
fn literals() -> BTreeSet<String> {
    let name = Regex::new(r#""([a-z][a-z0-9_]*)""#).unwrap();
    let mut names = BTreeSet::new();
    let mut folders = vec![repo().join("src/server"), repo().join("src/sample")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(path).unwrap();
                names.extend(name.captures_iter(&text).map(|found| found[1].to_owned()));
            }
        }
    }
    names
}

/// Lines that a server logs.
fn log_of(child: &mut Child) -> Receiver<String> {
    let (sender, receiver) = channel();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    std::thread::spawn(move || {
        stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    receiver
}

/// The names that the server says have no meaning.
fn unknown(log: &Receiver<String>) -> BTreeSet<String> {
    loop {
        let line = log.recv_timeout(Duration::from_secs(30)).expect("a line of the log");
        if let Some((_, names)) = line.split_once("fields without a meaning: ") {
            return names.split(", ").map(str::to_owned).collect();
        }
    }
}

/// An object with all of these names: those that it lacks are null.
fn with_all(object: &Value, names: &BTreeSet<String>) -> Value {
    let nulls = names.iter().map(|name| (name.clone(), Value::Null));
    let mut all: Map<String, Value> = nulls.collect();
    all.extend(object.as_object().unwrap().clone());
    all.insert("no_such_field".into(), Value::Null);
    Value::Object(all)
}

#[test]
fn routes_read_the_fields_of_the_document_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let mut server = start_logged(&[ARGS, &["--slot-save-path", path]].concat());
    let log = log_of(&mut server.child);
    let document = document(&server);
    let literals = literals();
    let mut n_checked = 0;
    for (path, method, operation) in operations(&document) {
        let schema = body_of(&document, &operation).filter(|schema| schema["type"] != "array");
        let Some(schema) = schema else { continue };
        // Routes that count tokens take a request's other fields, too.
        if ["tokens", "tokenize", "template"].iter().any(|end| path.ends_with(end)) {
            continue;
        }
        let told = |schema: &Value| -> BTreeSet<String> {
            schema["properties"].as_object().unwrap().keys().cloned().collect()
        };
        let example = without_stream(&path, &schema["examples"][0]);
        let options = &schema["properties"]["options"];
        let mut bodies = vec![(with_all(&example, &(&literals | &told(schema))), told(schema))];
        if options["properties"].is_object() {
            let mut body = example.clone();
            body["options"] = with_all(&example["options"], &(&literals | &told(options)));
            bodies.push((body, told(options)));
        }
        for (body, told) in bodies {
            fill_slot(&server, &path);
            let answer = server.send_body(&method, &concrete(&path), &body.to_string());
            // This server has one model, which stays.
            let is_of_several = ["/models/unload", "/api/pull", "/api/delete"].contains(&&*path);
            // Nor does the model rank.
            let expected = if is_of_several || path.contains("rerank") { 501 } else { 200 };
            assert_eq!(answer.status, expected, "{path}: {answer:?}");
            let unknown = unknown(&log);
            let candidates = &literals | &told;
            let read: BTreeSet<String> = candidates.difference(&unknown).cloned().collect();
            let missing: Vec<_> = read.difference(&told).collect();
            let idle: Vec<_> = told.difference(&read).collect();
            assert!(missing.is_empty() && idle.is_empty(), "{path}: {missing:?} {idle:?}");
            n_checked += 1;
        }
    }
    // Five wires' routes, two of them under several paths, and two sets of options.
    assert!(n_checked >= 11, "{n_checked}");
}
