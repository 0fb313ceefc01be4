//! The same request has the same bytes, whatever runs beside it, in whatever slot, with whatever
//! memory, policy, threads and caches. `bench/serve_bytes.py` has the whole matrix.

use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Server, merged, start};

/// Fewer where they are slow.
const N: usize = if cfg!(debug_assertions) { 8 } else { 16 };
const BEGINNING: &str = "You are a patient teacher of programming. Answer in one sentence. ";

/// A request; every eighth is of the same kind.
fn request(i: usize) -> (&'static str, Value) {
    let question = ["What is a branch?", "How do I list files?"][i / 8 % 2];
    let schema = json!({
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["bug", "feature"]}},
        "required": ["ok", "kind"],
        "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false},
    });
    let tool = json!({"type": "function", "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}},
    }});
    let changes = match i % 8 {
        0 => json!({"temperature": 0, "repeat_penalty": 1}),
        1 => json!({"temperature": 1.2, "top_p": 0.9}),
        2 => json!({"response_format": {"type": "json_object", "schema": schema}}),
        3 => json!({"tools": [tool], "tool_choice": "required", "max_tokens": 12}),
        4 => json!({"n": 3}),
        5 => json!({"logprobs": true, "top_logprobs": 3}),
        6 => json!({"messages": [
            {"role": "system", "content": BEGINNING.repeat(4)},
            {"role": "user", "content": question},
        ]}),
        _ => {
            let prompts = [question, "The file"];
            let body = json!({"prompt": prompts, "max_tokens": 4, "seed": i, "logprobs": 2});
            return ("/v1/completions", body);
        }
    };
    let message = json!({"role": "user", "content": question});
    let body = json!({"messages": [message], "max_tokens": 5 + i % 3, "seed": i});
    ("/v1/chat/completions", merged(body, &changes))
}

/// The part of an answer that must not change: texts, log probabilities, calls, counts.
fn ask(server: &Server, i: usize) -> [Value; 4] {
    let (path, body) = request(i);
    let answer = server.post(path, &body);
    assert_eq!(answer.status, 200, "{i}: {answer:?}");
    let mut json = answer.json();
    let usage = json["usage"].clone();
    [
        json["choices"].take(),
        json["system_fingerprint"].take(),
        usage["prompt_tokens"].clone(),
        usage["completion_tokens"].clone(),
    ]
}

/// Clients that leave in the middle of their prompts and answers.
fn come_and_go(server: &Server, is_over: &AtomicBool) {
    for i in 0.. {
        if is_over.load(Ordering::Relaxed) {
            return;
        }
        let body = json!({
            "messages": [{"role": "user", "content": BEGINNING.repeat(i % 3)}],
            "max_tokens": 200,
            "ignore_eos": true,
            "stream": true,
            "seed": i,
        });
        let mut stream = server.begin("/v1/chat/completions", &body);
        stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let _ = stream.read(&mut [0; 64]);
        drop(stream);
        std::thread::sleep(Duration::from_millis(150));
    }
}

#[test]
fn bytes_do_not_depend_on_the_load_or_the_setting() {
    let alone = start(&["-c", "4096", "--parallel", "1", "-t", "1", "--profile", "none"]);
    let expected: Vec<_> = (0..N).map(|i| ask(&alone, i)).collect();
    assert!((1..N).all(|i| expected[i][0] != expected[0][0]));
    drop(alone);
    let settings: [&[&str]; 4] = [
        &["-c", "16384", "--parallel", "4", "-t", "2"],
        &["-c", "4096", "--parallel", "2", "-t", "1", "--ram", "10%", "--kv-ram", "0"],
        &["-c", "4096", "--parallel", "1", "-t", "2", "--ram", "50%", "--policy", "finemoe"],
        &["-c", "640", "--parallel", "4", "-t", "2", "--kv-unified", "--kv-ram", "1M"],
    ];
    for (round, flags) in settings.iter().enumerate() {
        let server = start(&[*flags, &["--queue", "1000", "--profile", "none"]].concat());
        let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= N {
                    return;
                }
                // Another order in each round.
                let i = (n * 5 + round * 3) % N;
                assert_eq!(ask(&server, i), expected[i], "{flags:?}: {i}");
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| come_and_go(&server, &is_over));
            let workers: Vec<_> = (0..8).map(|_| scope.spawn(work)).collect();
            let ends: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
            is_over.store(true, Ordering::Relaxed);
            ends.into_iter().for_each(|end| end.unwrap());
        });
        server.wait_busy(0);
    }
}
