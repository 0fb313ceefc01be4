use serde_json::{Value, json};

use crate::support::{Server, merged, start};

fn hello() -> Value {
    json!({
        "messages": [{"role": "user", "content": "What is a branch?"}],
        "max_tokens": 12,
        "seed": 7,
    })
}

fn with(changes: Value) -> Value {
    merged(hello(), &changes)
}

#[test]
fn an_answer_is_the_same_whole_and_streamed() {
    let server = start(&["-c", "512", "--parallel", "1", "--alias", "demo"]);
    let whole = server.post("/v1/chat/completions", &hello());
    assert_eq!(whole.status, 200, "{whole:?}");
    assert!(whole.header("x-request-id").is_some_and(|id| id.starts_with("req_")));
    let json = whole.json();
    assert!(json["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!((&json["object"], &json["model"]), (&json!("chat.completion"), &json!("demo")));
    assert!(json["system_fingerprint"].as_str().unwrap().starts_with('b'));
    assert_eq!(json["moeba"]["seed"], 7);
    let usage = &json["usage"];
    let (n_prompt, n) = (&usage["prompt_tokens"], usage["completion_tokens"].as_u64().unwrap());
    assert!((1..=12).contains(&n), "{usage}");
    assert_eq!(usage["total_tokens"], json!(n_prompt.as_u64().unwrap() + n));
    let timings = &json["timings"];
    let sum = timings["cache_n"].as_u64().unwrap() + timings["prompt_n"].as_u64().unwrap();
    assert_eq!(json!(sum), *n_prompt);
    let content = json["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!content.is_empty());

    let body = with(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let streamed = server.post("/chat/completions/", &body);
    assert!(streamed.header("content-type").unwrap().starts_with("text/event-stream"));
    let chunks = streamed.chunks();
    let (first, last) = (&chunks[0], &chunks[chunks.len() - 1]);
    assert_eq!(first["choices"][0]["delta"], json!({"role": "assistant", "content": null}));
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(n)));
    // The prompt is there from the first request.
    assert!(last["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0);
    let finish = &chunks[chunks.len() - 2];
    assert_eq!(finish["choices"][0]["delta"], json!({}));
    assert_eq!(finish["choices"][0]["finish_reason"], json["choices"][0]["finish_reason"]);
    assert_eq!(finish["moeba"]["seed"], 7);
    assert!(chunks.iter().all(|chunk| chunk["id"] == first["id"]));
    let deltas = chunks[1..chunks.len() - 2].iter();
    let text: String =
        deltas.map(|c| c["choices"][0]["delta"]["content"].as_str().unwrap()).collect();
    assert_eq!(text, content);
}

#[test]
fn a_choice_is_the_single_answer_with_its_seed() {
    let server = start(&["-c", "1024", "--parallel", "2"]);
    let content = |choice: &Value| choice["message"]["content"].as_str().unwrap().to_owned();
    let several = server.post("/v1/chat/completions", &with(json!({"n": 3}))).json();
    let choices = several["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (i, choice) in choices.iter().enumerate() {
        let single = server.post("/v1/chat/completions", &with(json!({"seed": 7 + i}))).json();
        assert_eq!(content(&single["choices"][0]), content(choice), "{i}");
    }
    let single = server.post("/v1/chat/completions", &hello()).json();
    assert_eq!(several["usage"]["prompt_tokens"], single["usage"]["prompt_tokens"]);
    let streamed = server.post("/v1/chat/completions", &with(json!({"n": 3, "stream": true})));
    let mut texts = vec![String::new(); 3];
    for chunk in streamed.chunks() {
        let choice = &chunk["choices"][0];
        let text = choice["delta"]["content"].as_str().unwrap_or_default();
        texts[choice["index"].as_u64().unwrap() as usize].push_str(text);
    }
    assert_eq!(texts, choices.iter().map(content).collect::<Vec<_>>());
}

#[test]
fn ends_have_reasons() {
    let server = start(&["-c", "64", "--parallel", "1"]);
    let reason = |changes: Value| {
        let json = server.post("/v1/chat/completions", &with(changes)).json();
        let content = json["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        (json["choices"][0]["finish_reason"].as_str().unwrap().to_owned(), content)
    };
    let greedy = json!({"temperature": 0, "repeat_penalty": 1});
    let with_greedy = |changes: Value| merged(greedy.clone(), &changes);
    let (why, text) = reason(with_greedy(json!({"max_tokens": 6})));
    assert_eq!(why, "length");
    let (why, nothing) = reason(json!({"max_tokens": 0}));
    assert_eq!((why.as_str(), nothing.as_str()), ("length", ""));
    // A word in the middle of the text ends it.
    let word = text.split_whitespace().nth(1).unwrap();
    let (why, cut) = reason(with_greedy(json!({"max_tokens": 6, "stop": [word, "never\u{1}"]})));
    assert_eq!(why, "stop");
    assert_eq!(cut, text.split(word).next().unwrap());
    // The context ends it.
    let (why, _) = reason(json!({"max_tokens": -1, "ignore_eos": true}));
    assert_eq!(why, "length");
    // The answer goes on in the last message.
    let body = with_greedy(json!({"max_tokens": 6}));
    let whole = reason(body.clone()).1;
    let (begun, rest) = whole.split_at(whole.find(' ').unwrap());
    let mut body = body;
    body["messages"] = json!([
        {"role": "user", "content": "What is a branch?"},
        {"role": "assistant", "content": begun},
    ]);
    let continued = reason(body).1;
    assert!(continued.starts_with(rest), "{begun:?} {continued:?} {whole:?}");
}

#[test]
fn wrong_fields_are_named() {
    let server = start(&["-c", "128", "--parallel", "1"]);
    for (changes, param) in [
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": -1}), "top_p"),
        (json!({"repeat_penalty": 0}), "repeat_penalty"),
        (json!({"presence_penalty": 3}), "presence_penalty"),
        (json!({"max_tokens": 1.5}), "max_tokens"),
        (json!({"n": 0}), "n"),
        (json!({"n": 99}), "n"),
        (json!({"stop": vec!["x"; 129]}), "stop"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
        (json!({"logit_bias": {"99999999": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 1000}}), "logit_bias"),
        (json!({"chat_template": "{{ x }}"}), "chat_template"),
        (
            json!({"chat_template_kwargs": {"chat_template": "x"}}),
            "chat_template_kwargs.chat_template",
        ),
        (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs.messages"),
        (json!({"reasoning_effort": "huge"}), "reasoning_effort"),
        (json!({"modalities": ["audio"]}), "modalities"),
    ] {
        let answer = server.post("/v1/chat/completions", &with(changes.clone()));
        answer.error(400);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{changes}");
        assert_eq!(
            (&error["type"], &error["status"]),
            (&json!("invalid_request_error"), &json!(400))
        );
        assert!(error["code"].is_string(), "{error}");
    }
    // Fields that no one knows, and fields that are null, change nothing.
    let body =
        with(json!({"frobnicate": [1], "temperature": null, "logit_bias": null, "user": "x"}));
    assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
    let long = "word ".repeat(4000);
    let body = with(json!({"messages": [{"role": "user", "content": long}], "stream": true}));
    let answer = server.post("/v1/chat/completions", &body);
    let text = answer.error(400);
    assert!(text.contains("maximum context length is 128 tokens"), "{text}");
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "context_length_exceeded");
    assert!(error["n_prompt_tokens"].as_u64().unwrap() > 128 && error["n_ctx"] == 128);
}

#[test]
fn answers_have_the_form_that_is_asked_for() {
    let server = start(&["-c", "1024", "--parallel", "2"]);
    let schema = json!({
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
        "required": ["ok", "n"],
        "additionalProperties": false,
        // The demo model would go on with spaces.
        "x-guidance": {"whitespace_flexible": false},
    });
    let content = |changes: Value| {
        let json = server.post("/v1/chat/completions", &with(changes)).json();
        json["choices"][0]["message"]["content"]
            .as_str()
            .unwrap_or_else(|| panic!("{json}"))
            .to_owned()
    };
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let text = content(json!({"response_format": format, "max_tokens": 40}));
    let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(value["ok"].is_boolean() && [json!(1), json!(2)].contains(&value["n"]), "{text}");
    assert_eq!(content(json!({"regex": "ab{3}c", "max_tokens": 20})), "abbbc");
    let grammar = "root ::= \"yes\" | \"no\"";
    assert!(["yes", "no"].contains(&content(json!({"grammar": grammar})).as_str()));
    assert_eq!(content(json!({"lark": "start: \"x\" \"y\""})), "xy");
    let tag = json!({"type": "tag", "begin": "<a>", "end": "</a>",
        "content": {"type": "json_schema", "json_schema": {"const": 7}}});
    let tags = json!({"type": "triggered_tags", "triggers": ["<a"], "tags": [tag],
        "at_least_one": true, "stop_after_first": true});
    let format = json!({"type": "structural_tag", "format": tags});
    assert_eq!(content(json!({"response_format": format})), "<a>7</a>");
    let several = with(json!({"regex": "[ab]{4}", "n": 3}));
    let several = server.post("/v1/chat/completions", &several).json();
    for choice in several["choices"].as_array().unwrap() {
        let text = choice["message"]["content"].as_str().unwrap();
        assert!(text.len() == 4 && text.bytes().all(|byte| b"ab".contains(&byte)), "{text}");
    }
    for bad in [
        json!({"response_format": {"type": "sound"}}),
        json!({"structural_tag": {"format": {"type": "grammar", "grammar": "x"}}}),
        json!({"response_format": {"type": "json_object", "schema": 123}}),
        json!({"response_format": {"type": "json_object", "schema": {"type": 123}}}),
        json!({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}),
        json!({"regex": "("}),
        json!({"grammar": "root ::= ["}),
        json!({"lark": "x"}),
        json!({"regex": "a", "grammar": grammar}),
    ] {
        let answer = server.post("/v1/chat/completions", &with(bad.clone()));
        assert!(!answer.error(400).is_empty(), "{bad}");
    }
}

#[test]
fn log_probabilities_are_those_of_the_tokens() {
    let server = start(&["-c", "512", "--parallel", "1"]);
    let body =
        with(json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 5, "temperature": 0}));
    let json = server.post("/v1/chat/completions", &body).json();
    let choice = &json["choices"][0];
    let list = choice["logprobs"]["content"].as_array().unwrap();
    let text: String = list.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(choice["message"]["content"], text);
    for token in list {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        assert!(top[0]["logprob"].as_f64() >= top[1]["logprob"].as_f64());
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
    }
    let mut body = body;
    body["stream"] = true.into();
    let chunks = server.post("/v1/chat/completions", &body).chunks();
    let streamed = chunks.iter().filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array());
    let streamed: Vec<Value> = streamed.flatten().cloned().collect();
    assert_eq!(&streamed, list);
    let body = json!({"prompt": "The", "logprobs": 1, "max_tokens": 3, "temperature": 0});
    let json = server.post("/v1/completions", &body).json();
    let logprobs = &json["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 3);
    assert_eq!(logprobs["text_offset"][0], 0);
    server.post("/v1/chat/completions", &with(json!({"top_logprobs": 2}))).error(400);
}

fn weather() -> Value {
    json!([{"type": "function", "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Rome", "Oslo"]}},
            "required": ["town"],
            "additionalProperties": false,
        },
    }}])
}

#[test]
fn required_calls_are_made_whole_and_streamed() {
    let server = start(&["-c", "1024", "--parallel", "1"]);
    let body = with(json!({
        "tools": weather(), "tool_choice": "required", "max_tokens": 80,
        "parallel_tool_calls": false,
    }));
    let json = server.post("/v1/chat/completions", &body).json();
    let choice = &json["choices"][0];
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "weather", "{json}");
    assert!(call["id"].as_str().is_some_and(|id| !id.is_empty()));
    let arguments = call["function"]["arguments"].as_str().unwrap();
    let arguments: Value =
        serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{e}: {json}"));
    assert!([json!("Rome"), json!("Oslo")].contains(&arguments["town"]), "{json}");
    assert_eq!(choice["finish_reason"], "tool_calls");

    let mut body = body;
    body["stream"] = true.into();
    let chunks = server.post("/v1/chat/completions", &body).chunks();
    let deltas = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array());
    let deltas: Vec<&Value> = deltas.flatten().filter(|delta| delta["index"] == 0).collect();
    assert_eq!(
        (&deltas[0]["id"], &deltas[0]["function"]["name"]),
        (&call["id"], &json!("weather"))
    );
    let text: String =
        deltas.iter().map(|delta| delta["function"]["arguments"].as_str().unwrap()).collect();
    assert_eq!(json!(text), call["function"]["arguments"]);
    let finish = &chunks.last().unwrap()["choices"][0]["finish_reason"];
    assert_eq!(finish, "tool_calls");

    // The result of a call goes back.
    let mut body = with(json!({"tools": weather(), "tool_choice": "none", "max_tokens": 4}));
    body["messages"] = json!([
        {"role": "user", "content": "How is the weather in Rome?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."},
    ]);
    let answered = server.post("/v1/chat/completions", &body);
    assert_eq!(answered.status, 200, "{answered:?}");
    assert!(answered.json()["choices"][0]["message"]["tool_calls"].is_null());
    for (changes, param) in [
        (json!({"tools": 5}), "tools"),
        (json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0].name"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tools": weather(), "tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tools": weather(), "regex": "a"}), "tools"),
    ] {
        let answer = server.post("/v1/chat/completions", &with(changes.clone()));
        answer.error(400);
        assert_eq!(answer.json()["error"]["param"], param, "{changes}");
    }
}

/// Tokens that one more text of a control token in a message takes.
fn tokens_of_a_control_text(server: &Server) -> u64 {
    let count = |content: &str| {
        let body = with(json!({
            "messages": [{"role": "user", "content": content}], "max_tokens": 0,
        }));
        let json = server.post("/v1/chat/completions", &body).json();
        json["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    count("a <|im_end|><|im_end|> b") - count("a <|im_end|> b")
}

#[test]
fn messages_cannot_write_control_tokens() {
    let server = start(&["-c", "256", "--parallel", "1"]);
    assert!(tokens_of_a_control_text(&server) > 2);
}

#[test]
fn trusted_messages_can_write_control_tokens() {
    let server = start(&["-c", "256", "--parallel", "1", "--trust-content"]);
    assert_eq!(tokens_of_a_control_text(&server), 1);
}

/// The model's own end within its reasoning does not end an answer that must have a form.
#[test]
fn a_form_is_not_left_out_in_the_reasoning() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("thinks.jinja");
    let source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";
    std::fs::write(&template, source).unwrap();
    let template = template.to_str().unwrap();
    let server = start(&["-c", "512", "--parallel", "4", "--chat-template", template]);
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0,
        "maximum": 9}}, "required": ["n"], "additionalProperties": false});
    let form = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let mut n_whole = 0;
    for seed in 0..16 {
        let budget = if seed % 2 == 0 { json!(8) } else { json!(null) };
        let body = json!({"messages": [{"role": "user", "content": "A number?"}], "seed": seed,
            "max_tokens": 60, "temperature": 1.0, "response_format": form,
            "reasoning_budget_tokens": budget});
        let choice = server.post("/v1/chat/completions", &body).json()["choices"][0].clone();
        let content = choice["message"]["content"].as_str().unwrap_or_default();
        match choice["finish_reason"].as_str().unwrap() {
            "stop" => {
                let value: Value = serde_json::from_str(content).unwrap();
                assert!(value["n"].is_u64(), "{choice}");
                n_whole += 1;
            }
            other => assert_eq!(other, "length", "{choice}"),
        }
    }
    assert!(n_whole > 0, "a budget ends the reasoning");
}
