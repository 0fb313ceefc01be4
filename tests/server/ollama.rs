use std::io::Read;

use serde_json::{Value, json};

use crate::support::{Answer, Server, merged, read, start};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn hello() -> Value {
    json!({
        "model": "demo",
        "messages": [{"role": "user", "content": "What is a branch?"}],
        "options": {"seed": 7, "num_predict": 12},
    })
}

fn with(changes: Value) -> Value {
    merged(hello(), &changes)
}

fn whole(server: &Server, path: &str, body: &Value) -> Value {
    let answer = server.post(path, &merged(body.clone(), &json!({"stream": false})));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.header("content-type").unwrap().starts_with("application/json"));
    answer.json()
}

/// The sum of a stream's lines: the content, the thinking, the calls, the last line.
fn joined(answer: &Answer) -> (String, String, Vec<Value>, Value) {
    let mut lines = answer.lines();
    let last = lines.pop().unwrap();
    assert!(last["done"] == true && lines.iter().all(|line| line["done"] == false), "{answer:?}");
    let texts = |name: &str| {
        let texts = lines.iter().map(|line| line["message"][name].as_str().unwrap_or_default());
        texts.collect::<String>()
    };
    let calls = lines.iter().filter_map(|line| line["message"]["tool_calls"].as_array());
    (texts("content"), texts("thinking"), calls.flatten().cloned().collect(), last)
}

/// The text of an error, which has this status and nothing else in its body.
fn error(answer: &Answer, status: u16) -> String {
    assert_eq!(answer.status, status, "{answer:?}");
    let json = answer.json();
    assert_eq!(json.as_object().unwrap().len(), 1, "{json}");
    json["error"].as_str().unwrap().to_owned()
}

#[test]
fn an_answer_is_lines_unless_it_is_to_be_whole() {
    let server = start(&["-c", "512", "--parallel", "1", "--alias", "demo"]);
    let json = whole(&server, CHAT, &hello());
    assert_eq!((&json["model"], &json["done"]), (&json!("demo"), &json!(true)));
    assert_eq!(json["message"]["role"], "assistant");
    let created = json["created_at"].as_str().unwrap();
    assert!(created.len() == 27 && created.starts_with("20") && created.ends_with('Z'));
    for name in ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"] {
        assert!(json[name].is_u64(), "{name}: {json}");
    }
    assert!(json["total_duration"].as_u64() > json["prompt_eval_duration"].as_u64(), "{json}");
    assert!(json["prompt_eval_duration"].as_u64().unwrap() > 1_000_000, "{json}");
    assert!((1..=12).contains(&json["eval_count"].as_u64().unwrap()), "{json}");
    // Lines are what comes where nothing is said.
    let streamed = server.post(CHAT, &hello());
    assert!(streamed.lines().len() > 3, "{streamed:?}");
    let (content, _, _, last) = joined(&streamed);
    assert_eq!(json["message"]["content"], content.as_str());
    for name in ["done_reason", "prompt_eval_count", "eval_count"] {
        assert_eq!(last[name], json[name], "{name}");
    }
    assert_eq!(last["message"], json!({"role": "assistant", "content": ""}));
    // The same bytes as from other routes.
    let body = json!({"messages": hello()["messages"], "seed": 7, "max_tokens": 12});
    let chat = server.post("/v1/chat/completions", &body).json();
    assert_eq!(chat["choices"][0]["message"]["content"], content.as_str());
    assert_eq!(chat["usage"]["prompt_tokens"], json["prompt_eval_count"]);
    let reason = &chat["choices"][0]["finish_reason"];
    assert_eq!(reason, &json["done_reason"]);
}

#[test]
fn options_change_the_answer() {
    let server = start(&["-c", "512", "--parallel", "1", "--alias", "demo"]);
    let greedy = |options: Value| {
        let own = json!({"temperature": 0, "repeat_penalty": 1, "num_predict": 8, "num_ctx": 4096,
            "num_thread": 2, "tfs_z": 1.0});
        with(json!({"options": merged(own, &options)}))
    };
    let json = whole(&server, CHAT, &greedy(json!({})));
    let text = json["message"]["content"].as_str().unwrap();
    assert_eq!((&json["done_reason"], &json["eval_count"]), (&json!("length"), &json!(8)));
    let word = text.split_whitespace().nth(1).unwrap();
    let stopped = whole(&server, CHAT, &greedy(json!({"stop": [word]})));
    assert_eq!(stopped["message"]["content"], text.split(word).next().unwrap());
    assert_eq!(stopped["done_reason"], "stop");
    // Without a limit the model ends by itself or the context does.
    let form = json!({"format": {"enum": [5]}});
    let endless = merged(greedy(json!({"num_predict": -1})), &form);
    let json = whole(&server, CHAT, &endless);
    assert_eq!((&json["message"]["content"], &json["done_reason"]), (&json!("5"), &json!("stop")));
    let body = merged(greedy(json!({"num_predict": 200})), &json!({"format": "json"}));
    let json = whole(&server, CHAT, &body);
    let content = json["message"]["content"].as_str().unwrap();
    assert!(content.trim_start().starts_with('{'), "{json}");
    // The model's own probabilities, with each token and in each line.
    let logprobs = json!({"logprobs": true, "top_logprobs": 2});
    let body = merged(greedy(json!({})), &logprobs);
    let json = whole(&server, CHAT, &body);
    let list = json["logprobs"].as_array().unwrap();
    assert_eq!(list.len(), 8, "{json}");
    assert!(list.iter().all(|entry| entry["top_logprobs"].as_array().unwrap().len() == 2));
    assert!(list[0]["logprob"].as_f64().unwrap() <= 0.0 && list[0]["bytes"].is_array());
    let lines = server.post(CHAT, &body).lines();
    let parts = lines.iter().filter_map(|line| line["logprobs"].as_array()).flatten();
    assert_eq!(parts.cloned().collect::<Vec<_>>(), *list);
    // The answer goes on in the last message.
    let (begun, rest) = text.split_at(text.find(' ').unwrap());
    let messages = json!([
        {"role": "user", "content": "What is a branch?"},
        {"role": "assistant", "content": begun},
    ]);
    let body = merged(greedy(json!({})), &json!({"messages": messages}));
    let json = whole(&server, CHAT, &body);
    let continued = json["message"]["content"].as_str().unwrap();
    assert!(continued.starts_with(rest), "{begun:?} {continued:?} {text:?}");
}

#[test]
fn arguments_of_calls_are_objects() {
    let server = start(&["-c", "1024", "--parallel", "1", "--alias", "demo"]);
    let tools = json!([{
        "function": {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"enum": ["Rome", "Oslo"]}},
                "required": ["town"],
                "additionalProperties": false,
            },
        },
    }]);
    let body = with(json!({
        "tools": tools, "tool_choice": "required", "parallel_tool_calls": false,
        "options": {"seed": 7, "num_predict": 80},
    }));
    let json = whole(&server, CHAT, &body);
    let calls = json["message"]["tool_calls"].as_array().unwrap();
    let function = &calls[0]["function"];
    assert_eq!((&function["name"], &function["index"]), (&json!("weather"), &json!(0)));
    let town = &function["arguments"]["town"];
    assert!([json!("Rome"), json!("Oslo")].contains(town), "{json}");
    assert_eq!(json["done_reason"], "stop");
    let (content, _, streamed, _) = joined(&server.post(CHAT, &body));
    assert_eq!(&streamed, calls);
    assert_eq!(json["message"]["content"], content.as_str());
    // A call that is cut has no arguments, and is not there.
    let cut = merged(body.clone(), &json!({"options": {"seed": 7, "num_predict": 8}}));
    let json = whole(&server, CHAT, &cut);
    assert_eq!(
        (&json["done_reason"], &json["message"]["tool_calls"]),
        (&json!("length"), &json!(null))
    );
    assert_eq!(joined(&server.post(CHAT, &cut)).2, Vec::<Value>::new());
    // A result finds its call by the tool's name, as older clients send it.
    let mut call = calls[0].clone();
    call.as_object_mut().unwrap().remove("id");
    let n_prompt = |result: Value| {
        let messages = json!([
            {"role": "user", "content": "How is the weather?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            result,
        ]);
        let body = with(json!({"messages": messages, "tools": tools}));
        whole(&server, CHAT, &body)["prompt_eval_count"].clone()
    };
    let named = n_prompt(json!({"role": "tool", "tool_name": "weather", "content": "Sunny."}));
    assert_eq!(n_prompt(json!({"role": "tool", "content": "Sunny."})), named);
}

/// A template whose models think, unless they are told not to.
const THINKS: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
    {% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}\
    {% endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\\n<think>\\n' }}\
    {% if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}\
    {% endif %}";

#[test]
fn thinking_is_apart() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("thinks.jinja");
    std::fs::write(&template, THINKS).unwrap();
    let args = ["-c", "512", "--parallel", "1", "--reasoning-budget", "4", "--chat-template"];
    let server = start(&[args.as_slice(), &[template.to_str().unwrap()]].concat());
    let json = whole(&server, CHAT, &with(json!({"think": true})));
    let thinking = json["message"]["thinking"].as_str().unwrap();
    assert!(!thinking.is_empty() && !json["message"]["content"].as_str().unwrap().is_empty());
    let (content, streamed, _, _) = joined(&server.post(CHAT, &with(json!({"think": true}))));
    assert_eq!((&json["message"]["content"], streamed.as_str()), (&json!(content), thinking));
    let json = whole(&server, CHAT, &with(json!({"think": false})));
    assert_eq!(json["message"]["thinking"], json!(null), "{json}");
    let body = json!({"prompt": "What is a branch?", "options": {"seed": 7, "num_predict": 12}});
    let same = whole(&server, GENERATE, &merged(body, &json!({"think": true})));
    assert_eq!((&same["thinking"], &same["response"]), (&json!(thinking), &json!(content)));
    // It is a part of the next prompt.
    let n_prompt = |changes: Value| {
        let mut said = json!({"role": "assistant", "content": "So."});
        said = merged(said, &changes);
        let body = with(json!({"messages": [hello()["messages"][0], said,
            {"role": "user", "content": "Go on."}]}));
        whole(&server, CHAT, &body)["prompt_eval_count"].as_u64().unwrap()
    };
    assert!(n_prompt(json!({"thinking": thinking})) > n_prompt(json!({})));
    let shown = server.post("/api/show", &json!({"model": "moeba-demo"})).json();
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
}

#[test]
fn texts_are_generated_with_and_without_the_template() {
    let server = start(&["-c", "512", "--parallel", "1", "--alias", "demo"]);
    let options = json!({"seed": 7, "num_predict": 12});
    let with = |changes: Value| merged(json!({"options": options}), &changes);
    let json = whole(&server, GENERATE, &with(json!({"prompt": "What is a branch?"})));
    let chat = whole(&server, CHAT, &hello());
    assert_eq!(json["response"], chat["message"]["content"]);
    assert_eq!(json["prompt_eval_count"], chat["prompt_eval_count"]);
    assert_eq!((&json["message"], &json["context"]), (&json!(null), &json!(null)));
    let lines = server.post(GENERATE, &with(json!({"prompt": "What is a branch?"}))).lines();
    let text: String = lines.iter().map(|line| line["response"].as_str().unwrap()).collect();
    assert_eq!(json["response"], text.as_str());
    let body = with(json!({"prompt": "What is a branch?", "system": "Be brief."}));
    let json = whole(&server, GENERATE, &body);
    assert!(json["prompt_eval_count"].as_u64() > chat["prompt_eval_count"].as_u64());
    let raw = whole(&server, GENERATE, &with(json!({"prompt": "The package", "raw": true})));
    let body = json!({"prompt": "The package", "seed": 7, "n_predict": 12});
    assert_eq!(raw["response"], server.post("/completion", &body).json()["content"]);
    // Nothing to answer: clients load models so, and unload them.
    for (path, body, reason) in [
        (GENERATE, json!({}), "load"),
        (GENERATE, json!({"prompt": "", "keep_alive": "5m"}), "load"),
        (CHAT, json!({"messages": [], "keep_alive": 0}), "unload"),
        (CHAT, json!({"model": "demo"}), "load"),
    ] {
        let json = server.post(path, &body).json();
        assert_eq!((&json["done"], &json["done_reason"]), (&json!(true), &json!(reason)), "{body}");
    }
}

#[test]
fn the_model_is_told_as_ollama_does() {
    let server = start(&["-c", "256", "--parallel", "2", "--alias", "demo,other"]);
    let root = server.get("/");
    assert_eq!((root.status, root.body.as_str()), (200, "Ollama is running"));
    assert_eq!(server.send(server.head("HEAD", "/", "")).status, 200);
    let version = server.get("/api/version").json();
    let parts = version["version"].as_str().unwrap().split('.').map(str::parse::<u32>);
    assert_eq!(parts.filter(|part| part.is_ok()).count(), 3, "{version}");
    let tags = server.get("/api/tags").json();
    let entry = &tags["models"][0];
    assert_eq!((&entry["name"], &tags["models"][1]["model"]), (&json!("demo"), &json!("other")));
    assert_eq!(entry["digest"].as_str().unwrap().len(), 64);
    let n_bytes = std::fs::metadata(crate::support::model()).unwrap().len();
    assert_eq!(entry["size"], n_bytes);
    assert!(entry["modified_at"].as_str().unwrap().starts_with("20"), "{entry}");
    assert_eq!(entry["details"]["format"], "gguf");
    assert_eq!(server.get("/v1/models").json()["models"], tags["models"]);
    let ps = server.get("/api/ps").json();
    let used = &ps["models"][0];
    assert_eq!((&used["context_length"], &used["size_vram"]), (&json!(128), &json!(0)));
    for body in [json!({"model": "demo"}), json!({"name": "other:latest"})] {
        let shown = server.post("/api/show", &body).json();
        let info = &shown["model_info"];
        let architecture = info["general.architecture"].as_str().unwrap();
        assert!(info[format!("{architecture}.context_length")].as_u64().unwrap() > 0);
        assert!(
            info["tokenizer.ggml.tokens"].is_null() && info["tokenizer.chat_template"].is_null()
        );
        assert!(shown["template"].as_str().unwrap().contains("im_start"));
        assert!(shown["parameters"].as_str().unwrap().starts_with("num_ctx 128\n"), "{shown}");
        assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
        assert_eq!(shown["tensors"], json!(null));
    }
    let verbose = server.post("/api/show", &json!({"model": "demo", "verbose": true})).json();
    let tokens = &verbose["model_info"]["tokenizer.ggml.tokens"];
    assert_eq!(tokens.as_array().unwrap().len(), 8192);
    assert!(verbose["tensors"][0]["shape"].is_array());
    let unknown = server.post("/api/show", &json!({"model": "none"}));
    assert!(error(&unknown, 404).contains("model 'none' not found"));
}

#[test]
fn errors_have_ollamas_form() {
    let server = start(&["-c", "128", "--parallel", "1", "--alias", "demo", "--strict-model"]);
    let image = json!([{"role": "user", "content": "x", "images": ["aGk="]}]);
    for (changes, words) in [
        (json!({"messages": image}), "messages[0].images: image input is not supported"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role: "),
        (json!({"messages": {}}), "messages: "),
        (json!({"format": "xml"}), "format: "),
        (json!({"format": {"type": "hiccup"}}), "hiccup"),
        (json!({"options": {"temperature": "hot"}}), "options.temperature: "),
        (json!({"options": {"num_predict": 1.5}}), "options.num_predict: "),
        (json!({"options": []}), "options: "),
        (json!({"think": "deep"}), "think: "),
        (json!({"top_logprobs": 21}), "top_logprobs: "),
        (json!({"tools": [{"function": {}}]}), "tools[0].name: "),
        (json!({"keep_alive": {}}), "keep_alive: "),
        (json!({"stream": "yes"}), "stream: "),
    ] {
        let text = error(&server.post(CHAT, &with(changes.clone())), 400);
        assert!(text.contains(words), "{changes}: {text}");
    }
    for (body, words) in [
        (json!({"prompt": "x", "suffix": "y"}), "suffix: moeba has no infilling"),
        (json!({"prompt": "x", "template": "{{ .Prompt }}"}), "template: "),
        (json!({"prompt": "x", "context": [1, 2]}), "context: "),
        (json!({"prompt": "x", "images": ["aGk="]}), "images: image input is not supported"),
        (json!({"prompt": "x", "raw": true, "system": "y"}), "system: "),
        (json!({"prompt": 5}), "prompt: "),
    ] {
        let text = error(&server.post(GENERATE, &body), 400);
        assert!(text.contains(words), "{body}: {text}");
    }
    let long = json!({"messages": [{"role": "user", "content": "word ".repeat(200)}]});
    assert!(error(&server.post(CHAT, &with(long)), 400).contains("maximum context length is 128"));
    let other = server.post(CHAT, &with(json!({"model": "other"})));
    assert!(error(&other, 404).contains("model 'other' not found"));
    assert_eq!(server.post(CHAT, &with(json!({"model": "demo:latest"}))).status, 200);
    error(&server.post_text(CHAT, "{"), 400);
    let pull = server.post("/api/pull", &json!({"model": "user/model"}));
    assert!(error(&pull, 501).contains("--allow-pull"));
    for path in ["push", "create", "copy", "blobs/sha256:1"] {
        let text = error(&server.post(&format!("/api/{path}"), &json!({})), 501);
        assert!(text.starts_with("moeba "), "{path}: {text}");
    }
    error(&server.get("/api/other"), 404);
    error(&server.get(CHAT), 405);
}

#[test]
fn a_stream_that_waits_has_empty_lines_and_ends_with_its_error() {
    let server = start(&["-c", "60000", "--parallel", "1", "--queue-timeout", "2"]);
    let endless = with(json!({"options": {"num_predict": -1, "ignore_eos": true}}));
    let mut first = server.begin(CHAT, &endless);
    first.read_exact(&mut [0]).unwrap();
    Server::drain(first);
    server.wait_busy(1);
    let lines = read(&mut server.begin(CHAT, &with(json!({"sse_ping_interval": 1})))).lines();
    assert_eq!(lines[0]["message"], json!({"role": "assistant", "content": ""}));
    assert_eq!(lines[0]["done"], false);
    let last = lines.last().unwrap();
    assert!(last["error"].as_str().unwrap().contains("waited"), "{last}");
}
