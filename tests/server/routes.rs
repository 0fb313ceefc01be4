use serde_json::{Value, json};

use crate::support::{merged, start};

#[test]
fn small_routes_answer() {
    let server = start(&["-c", "256", "--parallel", "2", "--alias", "demo,other"]);
    for path in ["/health", "/v1/health", "/health/"] {
        assert_eq!(server.get(path).json(), json!({"status": "ok"}));
    }
    assert_eq!(server.get("/ready").status, 200);
    for path in ["/v1/models", "/models"] {
        let models = server.get(path).json();
        assert_eq!(models["data"][0]["id"], "demo");
        assert_eq!(models["data"][1]["id"], "other");
        assert_eq!(models["data"][0]["aliases"], json!(["other"]));
        assert_eq!(models["data"][0]["meta"]["n_vocab"], 8192);
        assert_eq!(models["data"][0]["max_model_len"], 128);
        assert_eq!((&models["has_more"], &models["last_id"]), (&json!(false), &json!("other")));
    }
    assert_eq!(server.get("/v1/models/other").json()["id"], "other");
    server.get("/v1/models/none").error(404);
    let props = server.get("/props").json();
    assert_eq!(props["total_slots"], 2);
    assert_eq!(props["default_generation_settings"]["n_ctx"], 128);
    assert_eq!(props["deterministic"], "exact");
    assert!(props["chat_template"].as_str().unwrap().contains("im_start"));
    let slots = server.get("/slots").json();
    assert_eq!(slots.as_array().unwrap().len(), 2);
    assert_eq!((&slots[1]["id"], &slots[1]["n_ctx"]), (&json!(1), &json!(128)));
    let metrics = server.get("/metrics");
    for name in ["moeba_build_info{", "llamacpp:prompt_tokens_total ", "moeba_requests_total{"] {
        assert!(metrics.body.contains(name), "{name}");
    }
    // Series have a type and a unit's name, and no text of a client's.
    assert!(metrics.body.lines().all(|line| line.starts_with(['#', 'm', 'l'])));
    server.get("/nothing").error(404);
    server.get("//health").error(404);
    server.post("/infill", &json!({})).error(501);
    let wrong = server.get("/v1/chat/completions");
    wrong.error(405);
    assert_eq!(wrong.header("allow"), Some("post, options"));
    let head = server.send(server.head("HEAD", "/health", ""));
    assert_eq!((head.status, head.body.as_str()), (200, ""));
}

#[test]
fn text_becomes_tokens_and_tokens_text() {
    let server = start(&["-c", "128", "--parallel", "1"]);
    let tokens = server.post("/tokenize", &json!({"content": "Hello world é"})).json();
    let back = server.post("/detokenize", &tokens).json();
    assert_eq!(back, json!({"content": "Hello world é"}));
    let body = json!({"content": "Hello <|im_end|>", "with_pieces": true});
    let pieces = server.post("/tokenize", &body).json();
    let last = pieces["tokens"].as_array().unwrap().last().unwrap();
    assert_eq!(*last, json!({"id": 2, "piece": "<|im_end|>"}));
    let body = json!({"content": "<|im_end|>", "parse_special": false});
    let plain = server.post("/tokenize", &body).json();
    assert!(plain["tokens"].as_array().unwrap().len() > 1);
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    let prompt = server.post("/apply-template", &body).json();
    assert!(prompt["prompt"].as_str().unwrap().contains("hi<|im_end|>"), "{prompt}");
    for (path, body) in [
        ("/tokenize", json!({})),
        ("/tokenize", json!({"content": {}})),
        ("/detokenize", json!({"tokens": [1, "x"]})),
        ("/detokenize", json!({"tokens": [99_999_999]})),
        ("/apply-template", json!({"messages": 1})),
    ] {
        let answer = server.post(path, &body);
        answer.error(400);
        assert_eq!(answer.json()["error"]["code"], 400, "{path} {body}");
    }
}

#[test]
fn plain_text_is_continued() {
    let server = start(&["-c", "512", "--parallel", "2"]);
    let sampling = json!({"temperature": 0, "repeat_penalty": 1, "max_tokens": 5});
    let with = |changes: serde_json::Value| merged(sampling.clone(), &changes);
    let one = server.post("/v1/completions", &with(json!({"prompt": "The package"}))).json();
    assert_eq!(one["object"], "text_completion");
    let text = one["choices"][0]["text"].as_str().unwrap().to_owned();
    assert!(!text.is_empty());
    let ids = server.post("/tokenize", &json!({"content": "The package"})).json()["tokens"].clone();
    let both = with(json!({"prompt": [ids, "The file"], "echo": true, "n": 2}));
    let both = server.post("/v1/completions", &both).json();
    let choices = both["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    assert_eq!(choices[1]["text"], format!("The package{text}"));
    assert!(choices[3]["text"].as_str().unwrap().starts_with("The file"));

    let native = with(json!({"prompt": "The package", "n_predict": 5, "return_tokens": true}));
    let native = server.post("/completion", &native).json();
    assert_eq!(native["content"], text);
    assert_eq!((&native["stop"], &native["stop_type"]), (&json!(true), &json!("limit")));
    assert_eq!(native["tokens"].as_array().unwrap().len(), 5);
    let body = with(json!({"prompt": "The package", "n_predict": 5, "stream": true}));
    let streamed = server.post("/completions", &body);
    let frames = streamed.frames();
    let chunks = frames.iter().map(|f| serde_json::from_str::<serde_json::Value>(f).unwrap());
    let chunks: Vec<_> = chunks.collect();
    let joined: String = chunks.iter().map(|c| c["content"].as_str().unwrap()).collect();
    assert_eq!(joined, text);
    assert_eq!(chunks.last().unwrap()["stop"], true);
    let streamed =
        server.post("/v1/completions", &with(json!({"prompt": "The package", "stream": true})));
    let joined: String =
        streamed.chunks().iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(joined, text);
    // The word that has ended a text is told.
    let word = text.split_whitespace().nth(1).unwrap();
    let body = json!({"prompt": "The package", "n_predict": 5, "stop": ["never\u{1}", word]});
    let stopped = server.post("/completion", &with(body)).json();
    assert_eq!((&stopped["stop_type"], &stopped["stopping_word"]), (&json!("word"), &json!(word)));
    assert_eq!(native["stopping_word"], "");
    // An answer may have some members only.
    let fields = json!(["content", "generation_settings/n_predict", "timings/none"]);
    let body = json!({"prompt": "The package", "n_predict": 5, "response_fields": fields});
    let few = server.post("/completion", &with(body)).json();
    assert_eq!(few, json!({"content": text, "generation_settings/n_predict": 5}));
    // Tokens are told before it is known whether their text ends the answer.
    let stop = format!("{}\u{1}", &text[..text.len() - 1]);
    let chunks = |has_tokens: bool| {
        let body = json!({"prompt": "The package", "n_predict": 5, "stop": stop, "stream": true,
            "return_tokens": has_tokens});
        let frames = server.post("/completion", &with(body)).frames();
        let chunks = frames.iter().map(|f| serde_json::from_str::<serde_json::Value>(f).unwrap());
        chunks.map(|chunk| chunk["tokens"].as_array().unwrap().clone()).collect::<Vec<_>>()
    };
    assert!(chunks(false).iter().any(|tokens| tokens.len() > 1));
    let single = chunks(true);
    assert!(single.iter().all(|tokens| tokens.len() < 2), "{single:?}");
    assert_eq!(json!(single.concat()), native["tokens"]);
    server.post("/v1/completions", &with(json!({"prompt": []}))).error(400);
    server.post("/v1/completions", &with(json!({"prompt": [[1, -1]]}))).error(400);
    server.post("/completion", &with(json!({}))).error(400);
}

/// The value of a series.
fn series(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} in {metrics}")).parse().unwrap()
}

#[test]
fn what_the_scheduler_does_is_counted() {
    let server = start(&["-c", "512", "--parallel", "1"]);
    let body = |text: &str| json!({ "prompt": text, "n_predict": 6, "ignore_eos": true });
    let long = "A queue is a list of things that wait. ".repeat(16);
    for text in [&long, "Something else", &long] {
        assert_eq!(server.post("/completion", &body(text)).status, 200);
    }
    let form = json!({ "prompt": "x", "grammar": "root ::= [ab]{4}", "n_predict": 4 });
    assert_eq!(server.post("/completion", &form).status, 200);
    let metrics = server.get("/metrics").body;
    let value = |name: &str| series(&metrics, name);
    // The first token of a text comes from its prompt's pass.
    let steps = value("moeba_batch_rows_count");
    assert!((15.0..=19.0).contains(&steps), "{steps}");
    assert_eq!(value("moeba_batch_rows_sum"), steps);
    assert_eq!(value("moeba_batch_rows_bucket{le=\"1\"}"), steps);
    assert!(value("moeba_expert_union_sum") >= value("moeba_expert_union_count"));
    assert!(value("moeba_expert_union_count") >= steps);
    assert!((11.0..steps).contains(&value("moeba_decode_stall_seconds_count")));
    assert!(value("moeba_prefill_layers_total") >= 4.0);
    assert_eq!(value("moeba_queue_wait_seconds_count"), 4.0);
    assert!(value("moeba_page_hits_total{tier=\"ram\"}") >= 1.0);
    assert!(value("moeba_page_misses_total{tier=\"ram\"}") >= 1.0);
    assert_eq!(value("moeba_page_evictions_total{tier=\"ram\"}"), 0.0);
    assert!(value("moeba_prefix_tokens_reused_total") >= 64.0);
    assert_eq!(value("moeba_state_checkpoints"), 0.0);
    assert_eq!(value("moeba_grammar_compile_seconds_count"), 1.0);
    assert!(value("moeba_grammar_mask_seconds_count") >= 1.0);
}

#[test]
fn answers_have_the_name_of_what_was_asked() {
    let server = start(&["-c", "256", "--parallel", "1"]);
    let ask = |path: &str, body: Value| {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        let hash = answer.header("x-moeba-request-hash").expect("a hash").to_owned();
        assert_eq!(hash.len(), 64);
        hash
    };
    let body = |seed: i64, is_stream: bool| {
        let messages = json!([{ "role": "user", "content": "Why?" }]);
        json!({ "messages": messages, "seed": seed, "max_tokens": 2, "stream": is_stream })
    };
    let path = "/v1/chat/completions";
    let first = ask(path, body(1, false));
    assert_eq!(ask(path, body(1, true)), first);
    assert_ne!(ask(path, body(2, false)), first);
    // A seed that the server has chosen is one, too.
    assert_ne!(ask(path, body(-1, false)), ask(path, body(-1, false)));
    let plain = json!({ "prompt": "Why?", "seed": 1, "max_tokens": 2 });
    assert_ne!(ask("/v1/completions", plain), first);
    assert_eq!(server.get("/health").header("x-moeba-request-hash"), None);
}
