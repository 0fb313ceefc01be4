use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Server, read, start};

fn question(text: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": text }], "max_tokens": 2, "seed": 7 })
}

#[test]
fn a_request_without_a_cache_neither_reads_nor_writes_it() {
    let server = start(&["-c", "1024", "--parallel", "1"]);
    let ask = |is_cached: bool| {
        let mut body = question("What is a branch in a tree of versions, and what is it for?");
        body["cache_prompt"] = is_cached.into();
        let answer = server.post("/v1/chat/completions", &body).json();
        let usage = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
        let message = answer["choices"][0]["message"]["content"].clone();
        (usage.as_u64().unwrap() > 0, message)
    };
    let (was_cached, expected) = ask(false);
    assert!(!was_cached);
    for (is_cached, finds) in [(true, false), (true, true), (false, false), (true, false)] {
        // The last one finds nothing: the request before left its session empty of use.
        let found = ask(is_cached);
        assert!(found == (finds, expected.clone()) || !is_cached && !found.0, "{found:?}");
    }
    let mut body = question("x");
    body["cache_prompt"] = "no".into();
    server.post("/v1/chat/completions", &body).error(400);
}

#[test]
fn a_slot_is_a_wish_and_answers_say_which_it_was() {
    let server = start(&["-c", "1024", "--parallel", "3"]);
    for slot in [2, 0, 1] {
        let body = json!({ "prompt": "A queue is", "n_predict": 2, "id_slot": slot });
        assert_eq!(server.post("/completion", &body).json()["id_slot"], slot);
        let mut body = body.clone();
        body["stream"] = true.into();
        let frames = server.post("/completion", &body).frames();
        let slots = frames.iter().map(|text| serde_json::from_str::<Value>(text).unwrap());
        assert!(slots.into_iter().all(|chunk| chunk["id_slot"] == slot));
    }
    // One that there is not is no wish.
    let body = json!({ "prompt": "A queue is", "n_predict": 2, "id_slot": 77 });
    assert!(server.post("/completion", &body).json()["id_slot"].as_u64().unwrap() < 3);
}

/// Three requests wait for the only slot: in which order they are answered.
fn order(server: &Server, headers: [&str; 3], priorities: [i64; 3]) -> Vec<usize> {
    let endless = json!({ "prompt": "A", "n_predict": -1, "ignore_eos": true, "stream": true });
    let running = server.begin("/completion", &endless);
    server.wait_busy(1);
    let mut waiting = Vec::new();
    for (i, (header, priority)) in headers.iter().zip(priorities).enumerate() {
        // Long enough that whoever is answered first also knows it first.
        let mut body =
            json!({ "prompt": format!("Text {i}"), "n_predict": 64, "ignore_eos": true });
        if priority != 0 {
            body["priority"] = priority.into();
        }
        let body = body.to_string();
        let head =
            format!("Content-Type: application/json\r\n{header}Content-Length: {}\r\n", body.len());
        let request = format!("{}{body}", server.head("POST", "/completion", &head));
        let address = server.address.clone();
        waiting.push(std::thread::spawn(move || {
            use std::io::Write;
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            assert_eq!(read(&mut stream).status, 200);
            (Instant::now(), i)
        }));
        let end = Instant::now() + Duration::from_secs(20);
        let waits = format!("moeba_queue_length {}", i + 1);
        while !server.get("/metrics").body.contains(&waits) {
            assert!(Instant::now() < end, "{i} does not wait");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    drop(running);
    let mut ends: Vec<_> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
    ends.sort();
    ends.into_iter().map(|(_, i)| i).collect()
}

#[test]
fn priorities_order_the_queue_where_they_are_allowed() {
    let args = ["-c", "60000", "--parallel", "1"];
    let server = start(&[&args[..], &["--allow-priority"]].concat());
    assert_eq!(order(&server, ["", "", ""], [5, 0, -5]), [2, 1, 0]);
    let headers = ["X-Priority: 50\r\n", "X-Priority: -50\r\n", "X-Priority: -99\r\n"];
    assert_eq!(order(&server, headers, [0, 0, 7]), [1, 2, 0]);
    let body = json!({ "prompt": "x", "priority": 101 });
    assert!(server.post("/completion", &body).error(400).contains("from -100 to 100"));
    let server = start(&args);
    assert_eq!(order(&server, ["", "", headers[2]], [5, 0, -5]), [0, 1, 2]);
    assert_eq!(
        server
            .post("/completion", &json!({ "prompt": "x", "n_predict": 1, "priority": 101 }))
            .status,
        200
    );
}
