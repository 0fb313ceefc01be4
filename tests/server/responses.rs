use std::path::Path;

use common::repo;
use serde_json::{Value, json};

use crate::support::{Answer, Server, merged, start};

fn hello() -> Value {
    json!({ "input": "What is a branch?", "max_output_tokens": 12, "seed": 7 })
}

fn with(changes: Value) -> Value {
    merged(hello(), &changes)
}

/// The events of a stream. Their names, numbers and places are checked.
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.header("content-type").unwrap().starts_with("text/event-stream"));
    let frames = answer.body.split_terminator("\n\n");
    let events = frames.enumerate().map(|(i, frame)| {
        let (name, data) = frame.split_once('\n').unwrap_or_else(|| panic!("{frame}"));
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(event["type"], name.strip_prefix("event: ").unwrap());
        assert_eq!(event["sequence_number"], i, "{event}");
        event
    });
    events.collect()
}

/// The response at the end of a stream whose events come in order and add up to it.
fn followed(answer: &Answer) -> Value {
    let events = events(answer);
    let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(types[..2], ["response.created", "response.in_progress"]);
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[0]["response"]["output"], json!([]));
    let (mut items, mut deltas, mut id) = (Vec::new(), String::new(), Value::Null);
    // A slow machine is silent for so long that the beginning is repeated.
    let is_news = |event: &&Value| event["type"] != "response.in_progress";
    for event in events[2..events.len() - 1].iter().filter(is_news) {
        let kind = event["type"].as_str().unwrap();
        assert_eq!(event["output_index"], items.len(), "{event}");
        match kind {
            "response.output_item.added" => {
                assert_eq!(event["item"]["status"], "in_progress", "{event}");
                id = event["item"]["id"].clone();
                deltas.clear();
            }
            "response.output_item.done" => {
                assert_eq!(event["item"]["id"], id, "{event}");
                items.push(event["item"].clone());
            }
            _ => assert_eq!(event["item_id"], id, "{event}"),
        }
        if let Some(delta) = event["delta"].as_str() {
            assert!(kind.ends_with(".delta"), "{event}");
            deltas.push_str(delta);
        }
        let done = ["text", "arguments", "input"].iter().find_map(|name| event[name].as_str());
        if kind.ends_with("text.done") || kind.contains("call") {
            assert!(done.is_none_or(|text| text == deltas), "{event} {deltas}");
        }
    }
    let last = events.last().unwrap();
    let status = last["response"]["status"].as_str().unwrap();
    assert_eq!(last["type"], format!("response.{status}"));
    assert_eq!(last["response"]["output"], json!(items));
    assert_eq!(last["response"]["id"], events[0]["response"]["id"]);
    last["response"].clone()
}

/// A response without what differs from one to the next.
fn comparable(response: &Value) -> Value {
    let id = response["id"].as_str().unwrap().strip_prefix("resp_").unwrap();
    let mut response: Value = serde_json::from_str(&response.to_string().replace(id, "")).unwrap();
    for name in ["created_at", "completed_at", "moeba"] {
        response[name].take();
    }
    response["usage"]["input_tokens_details"].take();
    response
}

/// The response to a body, which is the same whole and streamed.
fn both(server: &Server, body: &Value) -> Value {
    let whole = server.post("/v1/responses", &merged(body.clone(), &json!({ "stream": false })));
    assert_eq!(whole.status, 200, "{whole:?}");
    let streamed = server.post("/responses", &merged(body.clone(), &json!({ "stream": true })));
    assert_eq!(comparable(&whole.json()), comparable(&followed(&streamed)));
    whole.json()
}

#[test]
fn a_response_is_the_same_whole_and_streamed() {
    let server = start(&["-c", "512", "--parallel", "1", "--alias", "demo"]);
    let response = both(&server, &with(json!({ "metadata": { "a": "b" }, "user": "me" })));
    assert!(response["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!((&response["object"], &response["model"]), (&json!("response"), &json!("demo")));
    assert_eq!(response["metadata"], json!({ "a": "b" }));
    assert_eq!((&response["store"], &response["user"]), (&json!(false), &json!("me")));
    assert_eq!(response["moeba"]["seed"], 7);
    let usage = &response["usage"];
    let (n_prompt, n) = (&usage["input_tokens"], usage["output_tokens"].as_u64().unwrap());
    assert_eq!(usage["total_tokens"], json!(n_prompt.as_u64().unwrap() + n));
    let item = &response["output"][0];
    assert_eq!((&item["type"], &item["role"]), (&json!("message"), &json!("assistant")));
    // The same text as a chat's.
    let chat = json!({
        "messages": [{ "role": "user", "content": "What is a branch?" }],
        "max_tokens": 12, "seed": 7,
    });
    let chat = server.post("/v1/chat/completions", &chat).json();
    assert_eq!(item["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    assert_eq!(usage["output_tokens"], chat["usage"]["completion_tokens"]);
    let is_cut = chat["choices"][0]["finish_reason"] == "length";
    let status = if is_cut { "incomplete" } else { "completed" };
    assert_eq!((&response["status"], &item["status"]), (&json!(status), &json!(status)));

    let stopped = both(&server, &with(json!({ "stop": [" "], "instructions": "Be brief." })));
    assert_eq!((&stopped["status"], &stopped["error"]), (&json!("completed"), &Value::Null));
    assert!(stopped["completed_at"].is_u64());
    let cut = both(&server, &with(json!({ "max_output_tokens": 2, "ignore_eos": true })));
    assert_eq!(cut["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(cut["output"][0]["status"], "incomplete");
    let nothing = both(&server, &with(json!({ "max_output_tokens": 0 })));
    assert_eq!(nothing["output"], json!([]));
}

#[test]
fn texts_have_forms_and_log_probabilities() {
    let server = start(&["-c", "512", "--parallel", "1"]);
    let schema = json!({
        "type": "object",
        "properties": { "ok": { "type": "boolean" } },
        "required": ["ok"],
        "additionalProperties": false,
        "x-guidance": { "whitespace_flexible": false },
    });
    let format = json!({ "type": "json_schema", "name": "x", "strict": true, "schema": schema });
    let body = with(json!({ "text": { "format": format, "verbosity": "low" } }));
    let response = both(&server, &body);
    assert_eq!(response["text"]["format"], format);
    let text = response["output"][0]["content"][0]["text"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(value["ok"].is_boolean(), "{text}");

    let body = with(json!({ "top_logprobs": 2, "include": ["message.output_text.logprobs"] }));
    let response = both(&server, &body);
    let part = &response["output"][0]["content"][0];
    let list = part["logprobs"].as_array().unwrap();
    let text: String = list.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(part["text"], text);
    assert_eq!(list[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(response["top_logprobs"], 2);
}

fn agent() -> Value {
    let path = repo().join("tests/fixtures/server/agent.json");
    let text = std::fs::read_to_string(path).unwrap();
    let changes = json!({ "stream": false, "max_output_tokens": 1 });
    merged(serde_json::from_str(&text).unwrap(), &changes)
}

/// A short prompt with tools of all kinds.
fn tools() -> Value {
    let text = |text: &str| {
        json!({ "type": "object", "properties": { "to": { "enum": [text] } },
        "required": ["to"], "additionalProperties": false })
    };
    json!({ "input": "Hi", "max_output_tokens": 60, "temperature": 0, "seed": 1,
        "parallel_tool_calls": false, "tools": [
        { "type": "web_search" },
        { "type": "custom", "name": "patch", "format": { "type": "grammar", "syntax": "lark",
            "definition": "start: \"+\" WORD LF\nWORD: /[a-z\"]{2}/\n%import common.LF" } },
        { "type": "namespace", "name": "mail", "tools":
            [{ "type": "function", "name": "send", "parameters": text("Ann") }] },
        { "type": "local_shell" },
    ] })
}

/// The one item of a response, which a choice of this tool has forced.
fn called(server: &Server, choice: Value) -> Value {
    let response = both(server, &merged(tools(), &json!({ "tool_choice": choice })));
    let output = response["output"].as_array().unwrap();
    assert_eq!(output.len(), 1, "{response}");
    output[0].clone()
}

#[test]
fn tools_of_all_kinds_are_called() {
    let server = start(&["-c", "1024", "--parallel", "1"]);
    let letter = json!({ "type": "function", "namespace": "mail", "name": "send" });
    let call = called(&server, letter);
    assert_eq!((&call["type"], &call["status"]), (&json!("function_call"), &json!("completed")));
    assert_eq!((&call["namespace"], &call["name"]), (&json!("mail"), &json!("send")));
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({ "to": "Ann" }));

    let patch = called(&server, json!({ "type": "custom", "name": "patch" }));
    assert_eq!((&patch["type"], &patch["name"]), (&json!("custom_tool_call"), &json!("patch")));
    let input = patch["input"].as_str().unwrap();
    assert!(input.len() == 4 && input.starts_with('+') && input.ends_with('\n'), "{input:?}");

    let shell = called(&server, json!({ "type": "local_shell" }));
    assert_eq!(
        (&shell["type"], &shell["action"]["type"]),
        (&json!("local_shell_call"), &json!("exec"))
    );
    assert!(shell["action"]["command"].is_array());

    // An answer is calls or has its form.
    let schema = json!({ "enum": ["yes"] });
    let format = json!({ "type": "json_schema", "name": "x", "schema": schema });
    let response = both(&server, &merged(tools(), &json!({ "text": { "format": format } })));
    let item = &response["output"][0];
    let text = item["content"][0]["text"].as_str();
    assert!(text.is_none_or(|text| text == "\"yes\""), "{response}");
    assert!(text.is_some() || item["call_id"].is_string(), "{response}");

    // What was called goes back with its results.
    let mut items = vec![json!({ "role": "user", "content": "Hi" })];
    for call in [&call, &patch, &shell] {
        let kind = call["type"].as_str().unwrap();
        items.push(call.clone());
        let output = json!({ "type": format!("{kind}_output"), "call_id": call["call_id"],
            "output": "done" });
        items.push(output);
    }
    let changes = json!({ "input": items, "tool_choice": "none", "max_output_tokens": 2 });
    assert_eq!(both(&server, &merged(tools(), &changes))["status"], "incomplete");
    for (changes, param) in [
        (json!({ "tools": [{ "type": "function", "name": "a b" }] }), "tools[0].name"),
        (json!({ "tool_choice": { "type": "web_search" } }), "tool_choice"),
        (json!({ "tools": [], "tool_choice": "required" }), "tool_choice"),
    ] {
        let answer = server.post("/v1/responses", &merged(tools(), &changes));
        answer.error(400);
        assert_eq!(answer.json()["error"]["param"], param, "{changes}");
    }
}

const THINKING: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
    {% if m.reasoning_content %}\
    {{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}\
    {{ m.content + '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}";

fn start_thinking(folder: &Path) -> Server {
    let path = folder.join("template.jinja");
    std::fs::write(&path, THINKING).unwrap();
    start(&["-c", "512", "--parallel", "1", "--chat-template-file", path.to_str().unwrap()])
}

#[test]
fn reasoning_is_an_item_that_can_be_given_back() {
    let folder = tempfile::tempdir().unwrap();
    let server = start_thinking(folder.path());
    let body = with(json!({ "reasoning_budget_tokens": 4, "ignore_eos": true }));
    let response = both(&server, &body);
    let (thought, said) = (&response["output"][0], &response["output"][1]);
    assert_eq!((&thought["type"], &said["type"]), (&json!("reasoning"), &json!("message")));
    assert_eq!((&thought["status"], &said["status"]), (&json!("completed"), &json!("incomplete")));
    let text = thought["content"][0]["text"].as_str().unwrap();
    assert!(!text.is_empty() && thought["encrypted_content"].is_null(), "{thought}");
    let n = response["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((1..12).contains(&n), "{response}");

    let body = merged(
        body,
        &json!({ "reasoning": { "summary": "auto" },
        "include": ["reasoning.encrypted_content"] }),
    );
    let response = both(&server, &body);
    let kept = &response["output"][0];
    assert_eq!(kept["summary"], json!([{ "type": "summary_text", "text": text }]));
    assert_eq!(kept["content"], json!([]));
    let count = |thought: Value| {
        let question = json!({ "role": "user", "content": "What is a branch?" });
        let input = json!([question, thought, said, question]);
        let answer = server.post("/v1/responses/input_tokens", &json!({ "input": input }));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["input_tokens"].as_u64().unwrap()
    };
    // All three ways of giving it back are the same prompt.
    let mut encrypted = kept.clone();
    encrypted["summary"] = json!([]);
    let n = count(thought.clone());
    assert_eq!((count(kept.clone()), count(encrypted.clone())), (n, n));
    encrypted["encrypted_content"] = "gAAAA_-".into();
    assert!(count(encrypted) < n);
}

#[test]
fn tokens_of_an_input_are_counted() {
    let server = start(&["-c", "2048", "--parallel", "1"]);
    let count = |path: &str, body: &Value| {
        let json = server.post(path, body).json();
        assert_eq!(json["object"], "response.input_tokens", "{json}");
        json["input_tokens"].clone()
    };
    for body in [hello(), agent()] {
        let response = server.post("/v1/responses", &body).json();
        let used = response["usage"]["input_tokens"].clone();
        assert!(used.as_u64().unwrap() > 8);
        let repeated = |name| [&response[name], &body[name]];
        if let [repeated, given @ Value::Array(_)] = repeated("tools") {
            assert_eq!(repeated, given);
        }
        assert_eq!(count("/v1/responses/input_tokens", &body), used);
    }
    let chat = json!({ "messages": [{ "role": "user", "content": "What is a branch?" }] });
    let expected = count("/responses/input_tokens", &hello());
    assert_eq!(count("/v1/chat/completions/input_tokens", &chat), expected);
    // Also what does not fit.
    let long = "branch ".repeat(20_000);
    let chat = json!({ "messages": [{ "role": "user", "content": long }] });
    let n = count("/v1/chat/completions/input_tokens", &chat);
    assert!(n.as_u64().unwrap() > 2048, "{n}");
    assert_eq!(count("/v1/responses/input_tokens", &json!({ "input": long })), n);
    server.post("/v1/responses/input_tokens", &json!({})).error(400);
}

#[test]
fn what_is_not_served_is_said() {
    let server = start(&["-c", "128", "--parallel", "1"]);
    let upgrade = "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                   Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let answer = server.send(server.head("GET", "/v1/responses", upgrade));
    assert!(answer.error(426).contains("\"stream\": true"), "{answer:?}");
    assert!(answer.header("upgrade").is_some());
    let answer = server.get("/v1/responses");
    answer.error(405);
    assert_eq!(answer.header("allow"), Some("post, options"));
    for path in ["/v1/responses/resp_1", "/v1/responses/resp_1/input_items"] {
        assert!(server.get(path).error(501).contains("not stored"));
    }
    server.send(server.head("DELETE", "/v1/responses/resp_1", "")).error(501);
    server.post("/v1/responses/compact", &hello()).error(501);
    for (changes, param) in [
        (json!({ "previous_response_id": "resp_1" }), "previous_response_id"),
        (json!({ "conversation": { "id": "x" } }), "conversation"),
        (json!({ "prompt": { "id": "x" } }), "prompt"),
        (json!({ "background": true }), "background"),
        (json!({ "truncation": "some" }), "truncation"),
        (json!({ "input": [] }), "input"),
        (json!({ "input": null }), "input"),
        (
            json!({ "input": [{ "role": "user", "content": [{ "type": "input_image" }] }] }),
            "input[0].content[0]",
        ),
        (json!({ "reasoning": { "effort": "huge" } }), "reasoning.effort"),
        (json!({ "reasoning": { "summary": "long" } }), "reasoning.summary"),
        (json!({ "text": { "format": { "type": "sound" } } }), "text.format.type"),
        (json!({ "text": { "format": { "type": "json_schema" } } }), "text.format.schema"),
        (json!({ "metadata": 5 }), "metadata"),
        (json!({ "top_logprobs": 21 }), "top_logprobs"),
        (json!({ "max_output_tokens": 1.5 }), "max_output_tokens"),
        (json!({ "stream": "yes" }), "stream"),
    ] {
        let answer = server.post("/v1/responses", &with(changes.clone()));
        answer.error(400);
        assert_eq!(answer.json()["error"]["param"], param, "{changes}");
    }
    let body = with(json!({ "input": "word ".repeat(4000), "stream": true }));
    let answer = server.post("/v1/responses", &body);
    answer.error(400);
    let error = &answer.json()["error"];
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("context_length_exceeded"), &json!("input"))
    );
}
