use std::io::Read;

use serde_json::{Value, json};

use crate::support::{Answer, Server, merged, read, start};

const PATH: &str = "/v1/messages";

fn hello() -> Value {
    json!({
        "model": "claude-something",
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "What is a branch?"}],
        "max_tokens": 12,
        "seed": 7,
    })
}

fn with(changes: Value) -> Value {
    merged(hello(), &changes)
}

/// The tokens of a prompt, by an answer's usage.
fn n_prompt(usage: &Value) -> u64 {
    assert_eq!(usage["cache_creation_input_tokens"], 0);
    usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap()
}

fn count(server: &Server, body: &Value) -> u64 {
    let json = server.post("/v1/messages/count_tokens", body).json();
    json["input_tokens"].as_u64().unwrap_or_else(|| panic!("{json}"))
}

/// The blocks that the events of a stream make up, and the last events' data.
fn blocks(answer: &Answer) -> (Vec<Value>, Value) {
    let events = answer.events();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert!(events.iter().all(|(name, data)| data["type"] == *name), "{names:?}");
    assert_eq!(names.first(), Some(&"message_start"), "{answer:?}");
    assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
    assert_eq!(events[0].1["message"]["content"], json!([]));
    assert_eq!(n_prompt(&events[0].1["message"]["usage"]), n_prompt(&last(&events)["usage"]));
    let mut blocks: Vec<Value> = Vec::new();
    let mut input = String::new();
    for (name, data) in &events[1..events.len() - 2] {
        match name.as_str() {
            "content_block_start" => {
                assert_eq!(data["index"], blocks.len());
                blocks.push(data["content_block"].clone());
                input.clear();
            }
            "content_block_delta" => {
                assert_eq!(data["index"], blocks.len() - 1);
                let (block, delta) = (blocks.last_mut().unwrap(), &data["delta"]);
                for key in ["text", "thinking", "signature"] {
                    if let Some(text) = delta[key].as_str() {
                        block[key] = format!("{}{text}", block[key].as_str().unwrap()).into();
                    }
                }
                input.push_str(delta["partial_json"].as_str().unwrap_or_default());
            }
            "content_block_stop" => {
                assert_eq!(data["index"], blocks.len() - 1);
                if !input.is_empty() {
                    blocks.last_mut().unwrap()["input"] = serde_json::from_str(&input).unwrap();
                }
            }
            "ping" => {}
            other => panic!("{other}"),
        }
    }
    (blocks, last(&events).clone())
}

fn last(events: &[(String, Value)]) -> &Value {
    &events[events.len() - 2].1
}

#[test]
fn a_message_is_the_same_whole_and_streamed() {
    let server = start(&["-c", "512", "--parallel", "1", "--alias", "demo"]);
    let whole = server.post("/v1/messages?beta=true", &hello());
    assert_eq!(whole.status, 200, "{whole:?}");
    assert!(whole.header("request-id").is_some_and(|id| id.starts_with("req_")), "{whole:?}");
    assert_eq!(whole.header("request-id"), whole.header("x-request-id"));
    let json = whole.json();
    assert!(json["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!((&json["type"], &json["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!((&json["model"], &json["timings"]), (&json!("demo"), &Value::Null));
    let content = json["content"].as_array().unwrap();
    assert_eq!((content.len(), &content[0]["type"]), (1, &json!("text")));
    assert!((1..=12).contains(&json["usage"]["output_tokens"].as_u64().unwrap()));
    assert_eq!(json["usage"]["cache_read_input_tokens"], 0);

    let streamed = server.post(PATH, &with(json!({"stream": true})));
    assert!(streamed.header("content-type").unwrap().starts_with("text/event-stream"));
    assert!(streamed.header("request-id").is_some());
    let (blocks, end) = blocks(&streamed);
    assert_eq!(&blocks, content);
    assert_eq!(end["delta"]["stop_reason"], json["stop_reason"]);
    assert_eq!(end["usage"]["output_tokens"], json["usage"]["output_tokens"]);
    // The prompt is there from the first request.
    assert!(end["usage"]["cache_read_input_tokens"].as_u64().unwrap() > 0);
    assert_eq!(n_prompt(&end["usage"]), n_prompt(&json["usage"]));
    let mut body = hello();
    body.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(count(&server, &body), n_prompt(&json["usage"]));
}

#[test]
fn ends_have_reasons() {
    let server = start(&["-c", "64", "--parallel", "1"]);
    let greedy = |changes: Value| {
        let body = with(json!({"temperature": 0, "repeat_penalty": 1, "max_tokens": 6}));
        merged(body, &changes)
    };
    let json = server.post(PATH, &greedy(json!({}))).json();
    assert_eq!(
        (&json["stop_reason"], &json["stop_sequence"]),
        (&json!("max_tokens"), &json!(null))
    );
    let text = json["content"][0]["text"].as_str().unwrap();
    // A word in the middle of the text ends it, and is told.
    let word = text.split_whitespace().nth(1).unwrap();
    let stops = json!({"stop_sequences": ["never\u{1}", word]});
    let json = server.post(PATH, &greedy(stops.clone())).json();
    assert_eq!(
        (&json["stop_reason"], &json["stop_sequence"]),
        (&json!("stop_sequence"), &json!(word))
    );
    assert_eq!(json["content"][0]["text"], text.split(word).next().unwrap());
    let mut body = greedy(stops);
    body["stream"] = true.into();
    let (_, end) = blocks(&server.post(PATH, &body));
    let expected = json!({"stop_reason": "stop_sequence", "stop_sequence": word});
    assert_eq!(end["delta"], expected);
    // The context ends it.
    let body = greedy(json!({"max_tokens": 4096, "ignore_eos": true}));
    let json = server.post(PATH, &body).json();
    assert_eq!(json["stop_reason"], "model_context_window_exceeded");
    // The grammar ends it: the model's own end.
    let format = json!({"type": "json_schema", "schema": {"enum": [5]}});
    let json = server.post(PATH, &greedy(json!({"output_config": {"format": format}}))).json();
    assert_eq!(
        (&json["stop_reason"], &json["content"][0]["text"]),
        (&json!("end_turn"), &json!("5"))
    );
    // The answer goes on in the last message.
    let (begun, rest) = text.split_at(text.find(' ').unwrap());
    let messages = json!([
        {"role": "user", "content": "What is a branch?"},
        {"role": "assistant", "content": [{"type": "text", "text": begun}]},
    ]);
    let json = server.post(PATH, &greedy(json!({"messages": messages}))).json();
    let continued = json["content"][0]["text"].as_str().unwrap();
    assert!(continued.starts_with(rest), "{begun:?} {continued:?} {text:?}");
}

#[test]
fn calls_go_round() {
    let server = start(&["-c", "1024", "--parallel", "1"]);
    let tools = json!([
        {"type": "web_search_20250305", "name": "web_search"},
        {
            "name": "weather",
            "description": "The weather of a town.",
            "input_schema": {
                "type": "object",
                "properties": {"town": {"enum": ["Rome", "Oslo"]}},
                "required": ["town"],
                "additionalProperties": false,
            },
            "cache_control": {"type": "ephemeral"},
        },
    ]);
    let choice = json!({"type": "any", "disable_parallel_tool_use": true});
    let body = with(json!({"tools": tools, "tool_choice": choice, "max_tokens": 80}));
    let json = server.post(PATH, &body).json();
    assert_eq!(json["stop_reason"], "tool_use", "{json}");
    let content = json["content"].as_array().unwrap();
    let call = content.last().unwrap();
    assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &json!("weather")));
    assert!([json!("Rome"), json!("Oslo")].contains(&call["input"]["town"]), "{json}");
    assert_eq!(count(&server, &body), n_prompt(&json["usage"]));
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let (blocks, end) = blocks(&server.post(PATH, &streamed));
    assert_eq!(&blocks, content);
    assert_eq!(end["delta"]["stop_reason"], "tool_use");
    // Later calls have other ids, also with the same seed.
    let result = json!({"type": "tool_result", "tool_use_id": call["id"], "content": "Sunny."});
    let messages = json!([
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]);
    let mut body = body;
    body["messages"] = messages;
    let next = server.post(PATH, &body).json();
    assert_eq!(next["content"].as_array().unwrap().last().unwrap()["type"], "tool_use", "{next}");
    assert_ne!(next["content"].as_array().unwrap().last().unwrap()["id"], call["id"]);
    assert_eq!(count(&server, &body), n_prompt(&next["usage"]));
    body["tool_choice"] = json!({"type": "none"});
    body["max_tokens"] = 4.into();
    let json = server.post(PATH, &body).json();
    assert_eq!(json["content"][0]["type"], "text", "{json}");
}

/// A template whose models think, and that refuses system messages behind others.
const THINKS: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
    {{ raise_exception('The system comes first.') }}{% endif %}\
    {{ '<|im_start|>' + m.role + '\\n' }}{% if m.reasoning_content %}\
    {{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}\
    {{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}";

#[test]
fn thinking_comes_first_and_goes_back() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("thinks.jinja");
    std::fs::write(&template, THINKS).unwrap();
    let template = template.to_str().unwrap();
    let server = start(&["-c", "512", "--parallel", "1", "--chat-template", template]);
    let body = with(json!({"thinking": {"type": "enabled", "budget_tokens": 4}}));
    let json = server.post(PATH, &body).json();
    let content = json["content"].as_array().unwrap();
    assert_eq!(content.len(), 2, "{json}");
    assert_eq!((&content[0]["type"], &content[1]["type"]), (&json!("thinking"), &json!("text")));
    assert!(!content[0]["thinking"].as_str().unwrap().is_empty());
    assert!(!content[0]["signature"].as_str().unwrap().is_empty());
    let n_thinking = json["usage"]["output_tokens_details"]["thinking_tokens"].as_u64().unwrap();
    assert!((1..12).contains(&n_thinking), "{json}");
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let answer = server.post(PATH, &streamed);
    assert_eq!(&blocks(&answer).0, content);
    let events = answer.events();
    let deltas = events.iter().filter(|(_, data)| data["index"] == 0);
    let kinds: Vec<&str> = deltas.filter_map(|(_, data)| data["delta"]["type"].as_str()).collect();
    assert_eq!(kinds.last(), Some(&"signature_delta"), "{kinds:?}");
    // Thinking that is omitted is an empty block, and its signature brings it back.
    let omitted = |stream: bool| {
        let thinking = json!({"type": "enabled", "budget_tokens": 4, "display": "omitted"});
        server.post(PATH, &with(json!({"thinking": thinking, "stream": stream})))
    };
    let hidden = omitted(false).json()["content"].clone();
    assert_eq!((&hidden[0]["thinking"], &hidden[1]), (&json!(""), &content[1]));
    let answer = omitted(true);
    assert_eq!(json!(blocks(&answer).0), hidden);
    assert!(!answer.body.contains("thinking_delta"), "{answer:?}");
    // Thinking is part of the next prompt, whatever its signature is.
    let turn = |content: &Value| {
        with(json!({"messages": [
            {"role": "user", "content": "What is a branch?"},
            {"role": "assistant", "content": content},
            {"role": "user", "content": "Go on."},
        ]}))
    };
    let mut foreign = json!(content);
    foreign[0]["signature"] = "EqQBCgIYAhIM".into();
    let without = count(&server, &turn(&json!([content[1]])));
    assert!(count(&server, &turn(&json!(content))) > without);
    for same in [foreign, hidden] {
        assert_eq!(count(&server, &turn(&same)), count(&server, &turn(&json!(content))));
    }
    // What this template refuses of the system, the user says.
    let mut body = turn(&json!(content));
    let late = json!({"role": "system", "content": "Hurry."});
    body["messages"].as_array_mut().unwrap().insert(2, late);
    assert_eq!(server.post(PATH, &body).status, 200);
    let prompt = json!({"messages": [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
    ]});
    let prompt = server.post("/apply-template", &prompt).json();
    let prompt = prompt["prompt"].as_str().unwrap();
    assert!(prompt.starts_with("<|im_start|>user\na\n\nb\n\nc<|im_end|>"), "{prompt}");
}

/// Claude Code's first line is another one in each request.
#[test]
fn a_second_turn_is_cached_whatever_the_billing_line_says() {
    let server = start(&["-c", "1024", "--parallel", "1"]);
    let system = |n: u64| {
        json!([
            {"type": "text", "text": format!("x-anthropic-billing-header: cch=0000{n};")},
            {"type": "text", "text": "You help with branches, packages and files. ".repeat(8),
             "cache_control": {"type": "ephemeral"}},
        ])
    };
    let first = server.post(PATH, &with(json!({"system": system(1)}))).json();
    let usage = &first["usage"];
    let n_first = n_prompt(usage) + usage["output_tokens"].as_u64().unwrap();
    let messages = json!([
        {"role": "user", "content": "What is a branch?"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "And a package?"},
    ]);
    let body = with(json!({"system": system(2), "messages": messages}));
    let second = server.post(PATH, &body).json();
    let n_cached = second["usage"]["cache_read_input_tokens"].as_u64().unwrap();
    assert!(n_cached + 16 >= n_first, "{n_cached} of {n_first}: {second}");
    assert_eq!(count(&server, &body), n_prompt(&second["usage"]));
}

/// A coding agent's session: between two turns it counts tokens and asks for a title, and each
/// request has a billing line of its own.
#[test]
fn a_coding_agents_conversation_is_found_at_every_turn() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("kv").display().to_string();
    let start = || start(&["-c", "2048", "--parallel", "1", "--kv-disk", &folder]);
    let mut server = start();
    let tool = json!({"name": "read", "description": "Reads a file of the project.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}});
    let mut messages = Vec::new();
    let mut n_before = 0;
    for i in 0..4 {
        let message = format!("Step {i}: what is in file {i}? {}", "More words. ".repeat(8));
        messages.push(json!({"role": "user", "content": [{"type": "text", "text": message}]}));
        let body = with(json!({
            "system": [
                {"type": "text", "text": format!("x-anthropic-billing-header: cch=0000{i};")},
                {"type": "text", "text": "Read before you write. ".repeat(12)},
            ],
            "tools": [tool],
            "tool_choice": {"type": "none"},
            "messages": messages,
        }));
        let n = count(&server, &body);
        let title = json!({
            "system": "Write a title of five words.",
            "messages": [{"role": "user", "content": format!("{i} {message}").repeat(3)}],
            "max_tokens": 4,
        });
        assert_eq!(server.post(PATH, &title).status, 200);
        // The last turn is another server's.
        if i == 3 {
            server.signal("TERM");
            assert!(server.child.wait().unwrap().success());
            server = start();
        }
        let answer = server.post(PATH, &body).json();
        let n_cached = answer["usage"]["cache_read_input_tokens"].as_u64().unwrap();
        assert!(n_cached + 63 >= n_before, "turn {i}: {n_cached} of {n_before}: {answer}");
        assert_eq!(n_prompt(&answer["usage"]), n);
        n_before = n;
        messages.push(json!({"role": "assistant", "content": answer["content"]}));
    }
}

#[test]
fn errors_have_anthropics_form() {
    let server = start(&["-c", "128", "--parallel", "1"]);
    let image = json!([{"type": "image", "source": {"type": "url", "url": "http://x"}}]);
    for (changes, words) in [
        (json!({"messages": []}), "messages: "),
        (json!({"messages": [{"role": "user", "content": image}]}), "image input is not supported"),
        (json!({"max_tokens": 1.5}), "max_tokens: "),
        (json!({"stop_sequences": 5}), "stop_sequences: "),
        (json!({"temperature": "hot"}), "temperature: "),
        (json!({"thinking": {"type": "much"}}), "thinking.type: "),
        (json!({"thinking": {"type": "adaptive", "display": "none"}}), "thinking.display: "),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice: "),
        (json!({"chat_template": "{{ x }}"}), "chat_template: "),
        (json!({"stream": "yes"}), "stream: "),
    ] {
        let answer = server.post(PATH, &with(changes.clone()));
        assert!(answer.error(400).contains(words), "{changes}: {answer:?}");
        let json = answer.json();
        assert_eq!(
            (&json["type"], &json["error"]["type"]),
            (&json!("error"), &json!("invalid_request_error"))
        );
        let id = json["request_id"].as_str().unwrap();
        assert_eq!(answer.header("request-id"), Some(id.to_ascii_lowercase().as_str()));
    }
    let long = json!({"messages": [{"role": "user", "content": "word ".repeat(200)}]});
    let answer = server.post(PATH, &with(long.clone()));
    let n = count(&server, &with(long));
    assert_eq!(answer.error(400), format!("prompt is too long: {n} tokens > 128 maximum"));
    assert_eq!(server.post("/v1/messages/count_tokens", &json!({})).status, 400);
    server.post("/v1/messages/batches", &json!({})).error(501);
    server.get(PATH).error(405);
    server.post("/v1/messages/other", &json!({})).error(404);
    // All that newer clients add changes nothing.
    let body = with(json!({
        "metadata": {"user_id": "x"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive"},
        "betas": ["x"],
        "top_k": null,
        "service_tier": "auto",
        "container": null,
    }));
    assert_eq!(server.post(PATH, &body).status, 200);
}

#[test]
fn a_stream_that_waits_is_pinged_and_told_why_it_fails() {
    let server = start(&["-c", "60000", "--parallel", "1", "--queue-timeout", "2"]);
    let endless = with(json!({"max_tokens": 60000, "ignore_eos": true, "stream": true}));
    let mut first = server.begin(PATH, &endless);
    first.read_exact(&mut [0]).unwrap();
    Server::drain(first);
    server.wait_busy(1);
    let body = with(json!({"stream": true, "sse_ping_interval": 1}));
    let events = read(&mut server.begin(PATH, &body)).events();
    assert_eq!(events[0], ("ping".to_owned(), json!({"type": "ping"})));
    let (name, data) = events.last().unwrap();
    assert_eq!((name.as_str(), &data["error"]["type"]), ("error", &json!("overloaded_error")));
    assert!(data["request_id"].as_str().unwrap().starts_with("req_"));
    // A count does not wait.
    assert!(count(&server, &hello()) > 0);
    assert_eq!(server.n_busy(), 1);
}
