use serde_json::{Value, json};

use crate::support::{Answer, Server, merged, start};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const NATIVE: &str = "/completion";
const OLLAMA: &str = "/api/chat";

/// Posts a body to a route with little to generate and no stream; its fields win.
fn post(server: &Server, path: &str, body: &Value) -> Answer {
    let short = match path {
        RESPONSES => json!({"max_output_tokens": 2}),
        OLLAMA => json!({"stream": false, "options": {"num_predict": 2}}),
        _ => json!({"max_tokens": 2}),
    };
    server.post(path, &merged(short, body))
}

fn accepted(server: &Server, path: &str, body: &Value) -> Value {
    let answer = post(server, path, body);
    assert_eq!(answer.status, 200, "{path} {body}: {answer:?}");
    answer.json()
}

/// A picture that the user sends now, `new`, is refused; nothing else is.
fn ends_never(server: &Server, path: &str, field: &str, history: &[Value], new: &Value) {
    let mind = &history[history.len() - 1];
    // The history, and each beginning of it that ends with an answer or a result.
    accepted(server, path, &json!({ field: history }));
    accepted(server, path, &json!({ field: history[..3] }));
    // Behind a result it is the tool's, and a refused request ends no conversation.
    let brought = [&history[..3], std::slice::from_ref(new)].concat();
    for list in [brought, vec![new.clone(), mind.clone()]] {
        accepted(server, path, &json!({ field: list }));
    }
    let answer = post(server, path, &json!({ field: [mind, new] }));
    assert_eq!(answer.status, 400, "{path}: {answer:?}");
    assert!(answer.body.contains("describe it in words"), "{path}: {answer:?}");
    assert_eq!(answer.header("x-should-retry"), Some("false"), "{path}");
}

#[test]
fn no_conversation_ends_with_what_cannot_be_read() {
    let server = start(&["-c", "512", "--parallel", "1"]);
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}});
    let odd = json!({"type": "hologram"});
    let data = json!({"type": "base64", "media_type": "image/png", "data": "AA=="});
    let block = json!({"type": "image", "source": data});
    let use_it = json!({"type": "tool_use", "id": "t", "name": "Read", "input": {}});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": [block, odd]});
    let function = json!({"name": "Read", "arguments": "{}"});
    let call = json!({"id": "t", "type": "function", "function": function});
    let said = |content: &Value| json!({"role": "assistant", "content": content});
    let user = |content: &Value| json!({"role": "user", "content": content});
    let mind = user(&json!("never mind"));
    let calls = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    let seen = json!({"role": "tool", "tool_call_id": "t", "content": [image, odd]});
    let own_call = json!({"role": "assistant", "tool_calls":
        [{"function": {"name": "Read", "arguments": {}}}]});
    let input = json!([{"type": "input_image"}, odd]);
    for (path, field, new, history) in [
        (
            CHAT,
            "messages",
            user(&json!([image])),
            vec![user(&json!([image, odd])), calls, seen, said(&json!("ok")), mind.clone()],
        ),
        (
            RESPONSES,
            "input",
            user(&input),
            vec![
                user(&input),
                json!({"type": "function_call", "call_id": "t", "name": "f"}),
                json!({"type": "function_call_output", "call_id": "t", "output": input}),
                mind.clone(),
            ],
        ),
        (
            MESSAGES,
            "messages",
            user(&json!([block])),
            vec![
                user(&json!([block, odd])),
                said(&json!([use_it])),
                user(&json!([result, block])),
                said(&json!("ok")),
                mind.clone(),
            ],
        ),
        (
            OLLAMA,
            "messages",
            json!({"role": "user", "content": "look", "images": ["AA=="]}),
            vec![
                json!({"role": "user", "content": "look", "images": ["AA=="]}),
                own_call,
                json!({"role": "tool", "tool_name": "Read", "content": "x", "images": ["AA=="]}),
                mind.clone(),
            ],
        ),
    ] {
        ends_never(&server, path, field, &history, &new);
    }
}

#[test]
fn documents_of_plain_text_are_read() {
    let server = start(&["-c", "512", "--parallel", "1"]);
    let n_tokens = |data: &str| {
        let document = json!({"type": "document", "source": {"type": "text", "data": data}});
        let body = json!({"messages": [{"role": "user", "content": [document]}]});
        let usage = accepted(&server, MESSAGES, &body)["usage"].clone();
        usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap()
    };
    assert!(n_tokens("one two three four five six") > n_tokens("one") + 3);
}

#[test]
fn what_is_missing_or_broken_is_taken() {
    let server = start(&["-c", "512", "--parallel", "1"]);
    let messages = |list: Value| json!({"messages": list});
    let user = json!({"role": "user", "content": "hi"});
    let call = json!({"id": "a", "type": "function",
        "function": {"name": "f", "arguments": "{}"}});
    let calls = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    let empty = json!({"role": "assistant", "content": null});
    for list in [
        json!([user, calls, {"role": "tool", "tool_call_id": "a", "content": null}]),
        json!([user, calls, {"role": "tool", "tool_call_id": "a"}]),
        json!([user, {"role": "assistant", "content": null, "reasoning_content": "hm"}, user]),
        json!([user, empty, user]),
    ] {
        accepted(&server, CHAT, &messages(list));
    }
    accepted(&server, MESSAGES, &messages(json!([user, empty, user])));
    accepted(&server, RESPONSES, &json!({"input": [user, empty, user]}));
    accepted(&server, OLLAMA, &messages(json!([user, empty, user])));
    // Tools without a type, those of servers, and Anthropic's words for a choice.
    let function = json!({"name": "f", "parameters": {"type": "object"}});
    let tools = json!([{"function": function}, {"type": "web_search"}, {"type": "mcp"}]);
    for (path, body) in [
        (CHAT, messages(json!([user]))),
        (RESPONSES, json!({"input": "hi"})),
        (OLLAMA, messages(json!([user]))),
    ] {
        for choice in [json!("any"), json!({"type": "any"}), json!({"type": "auto"}), json!(null)] {
            let wishes = json!({"tools": tools, "tool_choice": choice, "max_tokens": 1});
            accepted(&server, path, &merged(body.clone(), &wishes));
        }
    }
    // Marks in front of the body, and halves of characters.
    for text in [
        "\u{feff}{\"prompt\": \"x\", \"max_tokens\": 1}",
        r#"{"prompt": "x \ud83d y", "max_tokens": 1}"#,
        r#"{"prompt": "x \ude00", "max_tokens": 1, "stop": ["\ud83d"]}"#,
    ] {
        assert_eq!(server.post_text(COMPLETIONS, text).status, 200, "{text}");
    }
}

#[test]
fn values_that_mean_off_are_taken() {
    let server = start(&["-c", "256", "--parallel", "1"]);
    let messages = json!({"messages": [{"role": "user", "content": "hi"}]});
    let bodies = [
        (CHAT, messages.clone()),
        (COMPLETIONS, json!({"prompt": "hi"})),
        (RESPONSES, json!({"input": "hi"})),
        (MESSAGES, messages.clone()),
        (NATIVE, json!({"prompt": "hi"})),
    ];
    for (path, body) in &bodies {
        let stops = if *path == MESSAGES { "stop_sequences" } else { "stop" };
        for changes in [
            json!({"top_k": -1}),
            json!({"top_p": 0}),
            json!({"seed": -7}),
            json!({"seed": u64::MAX}),
            json!({stops: ["", "x", ""]}),
            json!({"logit_bias": {" the": -100, "5": 1}}),
        ] {
            accepted(&server, path, &merged(body.clone(), &changes));
        }
        let most = if *path == RESPONSES { "max_output_tokens" } else { "max_tokens" };
        let endless = json!({most: -2, "grammar": "root ::= \"ab\""});
        let mut endless = merged(body.clone(), &endless);
        // Not all routes have forms.
        if [RESPONSES, MESSAGES].contains(path) {
            endless["t_max_predict_ms"] = 1.into();
        }
        accepted(&server, path, &endless);
        for (changes, name) in [
            (json!({"xtc_probability": -1}), "xtc_probability"),
            (json!({"dry_multiplier": -1}), "dry_multiplier"),
            (json!({"n_discard": -1}), "n_discard"),
            (json!({"n_keep": "x"}), "n_keep"),
            (json!({"min_keep": -1}), "min_keep"),
            (json!({"seed": 1.5}), "seed"),
        ] {
            let answer = post(&server, path, &merged(body.clone(), &changes));
            assert!(answer.error(400).contains(name), "{path} {changes}: {answer:?}");
        }
    }
    for options in [
        json!({"top_k": -1, "top_p": 0, "seed": -7, "stop": [""], "num_predict": 1}),
        json!({"num_predict": -3, "stop": ["e", ""]}),
    ] {
        accepted(&server, OLLAMA, &merged(messages.clone(), &json!({"options": options})));
    }
    let content = |changes: Value| {
        let body = merged(json!({"max_tokens": 8, "seed": 3}), &changes);
        let json = accepted(&server, CHAT, &merged(messages.clone(), &body));
        json["choices"][0]["message"]["content"].clone()
    };
    assert_eq!(content(json!({"top_p": 0})), content(json!({"temperature": 0})));
    assert_eq!(content(json!({"top_k": -1})), content(json!({"top_k": 0})));
}

#[test]
fn custom_tools_are_called_as_such() {
    let server = start(&["-c", "1024", "--parallel", "1"]);
    let grammar = json!({"type": "grammar", "grammar":
        {"syntax": "regex", "definition": "(ls|pwd)"}});
    let custom = json!({"name": "shell", "description": "Runs it.", "format": grammar});
    let body = json!({
        "messages": [{"role": "user", "content": "Where am I?"}],
        "tools": [{"type": "custom", "custom": custom}],
        "tool_choice": {"type": "custom", "custom": {"name": "shell"}},
        "parallel_tool_calls": false,
        "max_tokens": 80,
        "seed": 7,
    });
    let json = accepted(&server, CHAT, &body);
    let call = &json["choices"][0]["message"]["tool_calls"][0];
    assert_eq!((&call["type"], &call["custom"]["name"]), (&json!("custom"), &json!("shell")));
    assert!(["ls", "pwd"].contains(&call["custom"]["input"].as_str().unwrap()), "{json}");
    assert!(call.get("function").is_none(), "{json}");
    let streamed = server.post(CHAT, &merged(body.clone(), &json!({"stream": true})));
    let chunks = streamed.chunks();
    let deltas = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array());
    let deltas: Vec<&Value> = deltas.flatten().collect();
    assert_eq!((&deltas[0]["id"], &deltas[0]["type"]), (&call["id"], &json!("custom")));
    let input: String =
        deltas.iter().map(|delta| delta["custom"]["input"].as_str().unwrap()).collect();
    assert_eq!(call["custom"]["input"], input);
    // It goes back into the conversation.
    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "/"});
    let user = &body["messages"][0];
    let said = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    let next = json!({"messages": [user, said, result], "tool_choice": "none", "max_tokens": 1});
    accepted(&server, CHAT, &merged(body, &next));
}

#[test]
fn llama_servers_completion_takes_several_prompts() {
    let server = start(&["-c", "512", "--parallel", "2"]);
    let greedy = |prompt: Value| {
        json!({"prompt": prompt, "n_predict": 4, "temperature": 0, "repeat_penalty": 1,
            "n_probs": 2, "ignore_eos": true})
    };
    let one = accepted(&server, NATIVE, &greedy(json!("The first")));
    let other = accepted(&server, NATIVE, &greedy(json!({"prompt_string": "The second"})));
    let ids = server.post("/tokenize", &json!({"content": "The second", "add_special": true}));
    let ids = ids.json()["tokens"].clone();
    for prompts in
        [json!(["The first", ids]), json!(["The first", {"prompt_string": "The second"}])]
    {
        let both = accepted(&server, NATIVE, &greedy(prompts));
        let both = both.as_array().unwrap();
        assert_eq!(both.len(), 2);
        for (i, (got, expected)) in both.iter().zip([&one, &other]).enumerate() {
            assert_eq!(got["index"], i);
            for name in ["content", "prompt", "tokens_evaluated", "completion_probabilities"] {
                assert_eq!(got[name], expected[name], "{name}");
            }
        }
    }
    // An array of one is no array, and one with a number in it is one prompt.
    for prompt in [json!(["The first"]), json!([1, "The first", 2])] {
        assert!(accepted(&server, NATIVE, &greedy(prompt)).is_object());
    }
    let twice = merged(greedy(json!("The first")), &json!({"n_cmpl": 2}));
    assert_eq!(accepted(&server, NATIVE, &twice).as_array().unwrap().len(), 2);
    let body = merged(greedy(json!(["The first", "The second"])), &json!({"stream": true}));
    let mut texts = [String::new(), String::new()];
    for frame in server.post(NATIVE, &body).frames() {
        let chunk: Value = serde_json::from_str(&frame).unwrap();
        texts[chunk["index"].as_u64().unwrap() as usize] += chunk["content"].as_str().unwrap();
    }
    assert_eq!(json!(texts), json!([one["content"], other["content"]]));
    for bad in [json!([]), json!([["x", []]]), json!({}), json!([true])] {
        post(&server, NATIVE, &greedy(bad)).error(400);
    }
}

#[test]
fn llama_servers_figures_are_told() {
    let server = start(&["-c", "256", "--parallel", "1"]);
    let greedy = json!({"prompt": "What", "temperature": 0, "n_probs": 3, "n_predict": 3});
    let with = |changes: Value| merged(greedy.clone(), &changes);
    // A grammar ends with a token of its own, which has an entry as in a stream.
    let ended = with(json!({"grammar": "root ::= \"ab\"", "n_predict": 20}));
    let whole = accepted(&server, NATIVE, &ended);
    let frames = server.post(NATIVE, &merged(ended, &json!({"stream": true}))).frames();
    let chunks = frames.iter().map(|frame| serde_json::from_str::<Value>(frame).unwrap());
    let entries = |json: &Value| json["completion_probabilities"].as_array().unwrap().clone();
    let streamed: Vec<Value> = chunks.flat_map(|chunk| entries(&chunk)).collect();
    assert_eq!(entries(&whole), streamed);
    assert_eq!(streamed.len() as u64, whole["tokens_predicted"].as_u64().unwrap());
    // Probabilities of what the samplers have left.
    let chances = accepted(&server, NATIVE, &with(json!({"post_sampling_probs": true})));
    for token in entries(&chances) {
        assert_eq!((&token["prob"], &token["top_probs"][0]["prob"]), (&json!(1.0), &json!(1.0)));
        assert!(token.get("logprob").is_none(), "{token}");
    }
    let warm = json!({"post_sampling_probs": true, "temperature": 1.5, "top_k": 3, "top_p": 1,
        "min_p": 0, "seed": 1});
    for token in entries(&accepted(&server, NATIVE, &with(warm))) {
        let top = token["top_probs"].as_array().unwrap();
        let sum: f64 = top.iter().map(|token| token["prob"].as_f64().unwrap()).sum();
        assert!(top.len() == 3 && (sum - 1.0).abs() < 1e-5, "{token}");
    }
    let full = with(json!({"n_predict": -1, "ignore_eos": true, "n_probs": 0}));
    let full = accepted(&server, NATIVE, &full);
    assert_eq!((&full["truncated"], &full["stop_type"]), (&json!(true), &json!("limit")));
    assert_eq!(chances["truncated"], false);
    let biased = with(json!({"logit_bias": [[5, -2.5], [6, false]]}));
    let settings = accepted(&server, NATIVE, &biased)["generation_settings"].clone();
    let expected = json!([{"bias": -2.5, "token": 5}, {"bias": null, "token": 6}]);
    assert_eq!(settings["logit_bias"], expected);
    // `__verbose` of chats and completions.
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "verbose": true});
    let json = accepted(&server, CHAT, &chat);
    let prompt = json["__verbose"]["prompt"].as_str().unwrap();
    assert!(prompt.ends_with("<|im_start|>assistant\n"), "{json}");
    let chunks =
        server.post(CHAT, &merged(chat, &json!({"stream": true, "max_tokens": 1}))).chunks();
    assert_eq!(chunks.iter().filter(|chunk| chunk.get("__verbose").is_some()).count(), 1);
    let json = accepted(&server, COMPLETIONS, &json!({"prompt": "Hi", "verbose": true}));
    assert!(json["__verbose"]["generation_settings"].is_object(), "{json}");
    // A prompt without the beginning of an answer.
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let prompt = |asks: bool| {
        let body = json!({"messages": messages, "add_generation_prompt": asks});
        server.post("/apply-template", &body).json()["prompt"].as_str().unwrap().to_owned()
    };
    assert!(prompt(true).starts_with(&prompt(false)) && !prompt(false).contains("assistant"));
}

#[test]
fn progress_and_times_are_in_all_streams() {
    let server = start(&["-c", "512", "--parallel", "1", "-ub", "16"]);
    let text = "This is a test. ".repeat(12);
    let wishes = json!({"stream": true, "return_progress": true, "timings_per_token": true});
    let messages = json!([{"role": "user", "content": text}]);
    for (path, body) in [
        (CHAT, json!({"messages": messages})),
        (RESPONSES, json!({"input": text})),
        (COMPLETIONS, json!({"prompt": text})),
        (NATIVE, json!({"prompt": text})),
    ] {
        let body = merged(body, &merged(wishes.clone(), &json!({"cache_prompt": false})));
        let answer = post(&server, path, &body);
        let chunks: Vec<Value> = match path {
            RESPONSES => answer.events().into_iter().map(|(_, data)| data).collect(),
            NATIVE => answer.frames().iter().map(|f| serde_json::from_str(f).unwrap()).collect(),
            _ => answer.chunks(),
        };
        let of = |chunk: &Value, name: &str| chunk["prompt_progress"][name].as_u64().unwrap();
        let progress = chunks.iter().filter(|chunk| chunk.get("prompt_progress").is_some());
        let progress: Vec<&Value> = progress.collect();
        assert!(progress.len() > 1, "{path}: {answer:?}");
        let (first, last) = (progress[0], progress[progress.len() - 1]);
        assert_eq!(of(first, "processed"), of(first, "cache"), "{path}");
        assert_eq!(of(last, "processed"), of(last, "total"), "{path}");
        let done: Vec<u64> = progress.iter().map(|chunk| of(chunk, "processed")).collect();
        assert!(done.is_sorted_by(|a, b| a < b), "{path}: {done:?}");
        assert!(progress.iter().all(|chunk| chunk["timings"].is_object()), "{path}");
        let is_last = |chunk: &&Value| chunk["timings"]["predicted_n"] == 2;
        assert!(chunks.iter().any(|chunk| is_last(&chunk)), "{path}: {answer:?}");
    }
}

#[test]
fn a_slot_is_free_when_its_answer_is_there() {
    let server = start(&["-c", "256", "--parallel", "1"]);
    for i in 0..20 {
        let stream = i % 2 == 0;
        let body = json!({"prompt": "x", "max_tokens": 3, "seed": i, "stream": stream});
        assert_eq!(server.post(COMPLETIONS, &body).status, 200);
        assert_eq!(server.n_busy(), 0, "{i}");
        let metrics = server.get("/metrics");
        assert!(metrics.body.contains("\nllamacpp:requests_processing 0\n"), "{i}");
        let started = metrics.header("process-start-time-unix").unwrap();
        assert!(started.parse::<u64>().unwrap() > 1_700_000_000);
        for name in ["prompt_tokens_cached_total", "spec_decode_num_drafts_total"] {
            assert!(metrics.body.contains(&format!("\nllamacpp:{name} ")), "{name}");
        }
    }
}

#[test]
fn templates_have_names_or_are_given_themselves() {
    let messages = json!({"messages": [
        {"role": "system", "content": "Book"}, {"role": "user", "content": "Hi"},
    ]});
    for (template, expected) in [
        (
            "llama3",
            "<|start_header_id|>system<|end_header_id|>\n\nBook<|eot_id|><|start_header_id|>user\
             <|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("This is not a chat template, it is", "This is not a chat template, it is"),
        ("{{ date_string }} {{ datetime | length }}", " 11"),
    ] {
        let server = start(&["-c", "256", "--parallel", "1", "--chat-template", template]);
        let prompt = server.post("/apply-template", &messages).json()["prompt"].clone();
        let prompt = prompt.as_str().unwrap();
        assert!(prompt.ends_with(expected), "{template}: {prompt}");
        accepted(&server, CHAT, &messages);
    }
}
