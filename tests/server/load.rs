use std::io::Read;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{read, start};

/// A text that goes on until the context is full.
fn endless() -> Value {
    json!({
        "messages": [{"role": "user", "content": "Tell me everything."}],
        "max_tokens": -1,
        "ignore_eos": true,
        "stream": true,
    })
}

#[test]
fn a_client_that_goes_frees_its_slot() {
    let server = start(&["-c", "60000", "--parallel", "1"]);
    for is_stream in [true, false] {
        let mut body = endless();
        body["stream"] = is_stream.into();
        let mut stream = server.begin("/v1/chat/completions", &body);
        if is_stream {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
        }
        server.wait_busy(1);
        drop(stream);
        let time = server.wait_busy(0);
        assert!(time < Duration::from_secs(2), "{time:?}");
    }
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("moeba_cancelled_total{"), "{metrics}");
}

#[test]
fn a_full_queue_says_so_and_when_to_come_again() {
    let server = start(&["-c", "60000", "--parallel", "1", "--queue", "1"]);
    let path = "/v1/chat/completions";
    let running = server.begin(path, &endless());
    server.wait_busy(1);
    let waiting = server.begin(path, &endless());
    let end = Instant::now() + Duration::from_secs(20);
    while !server.get("/metrics").body.contains("moeba_queue_length 1") {
        assert!(Instant::now() < end, "no one waits");
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut many = endless();
    many["n"] = 3.into();
    server.post(path, &many).error(400);
    let refused = server.post(path, &endless());
    refused.error(503);
    assert_eq!(refused.json()["error"]["code"], "server_overloaded");
    let seconds: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=120).contains(&seconds));
    // Whoever looks is answered at once.
    let start = Instant::now();
    for path in ["/health", "/metrics", "/slots", "/props"] {
        assert_eq!(server.get(path).status, 200);
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(server.get("/slots?fail_on_no_slot=1").status, 503);
    drop(running);
    drop(waiting);
    server.wait_busy(0);
}

#[test]
fn a_signal_lets_running_requests_end() {
    let mut server = start(&["-c", "1024", "--parallel", "1", "--grace", "300"]);
    let body = json!({
        "messages": [{"role": "user", "content": "Tell me everything."}],
        "max_tokens": 400,
        "ignore_eos": true,
        "stream": true,
    });
    let mut running = server.begin("/v1/chat/completions", &body);
    server.wait_busy(1);
    server.signal("TERM");
    let answer = read(&mut running);
    assert_eq!(answer.frames().last().map(String::as_str), Some("[DONE]"), "{answer:?}");
    assert!(server.child.wait().unwrap().success());
}

#[test]
fn requests_that_take_longer_than_the_grace_are_told() {
    let mut server = start(&["-c", "60000", "--parallel", "1", "--grace", "0"]);
    let mut running = server.begin("/v1/chat/completions", &endless());
    server.wait_busy(1);
    server.signal("INT");
    let frames = read(&mut running).frames();
    let last: Value = serde_json::from_str(frames.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "shutting_down", "{last}");
    assert!(server.child.wait().unwrap().success());
}

#[test]
fn requests_have_a_time() {
    let server = start(&["-c", "60000", "--parallel", "1", "--timeout", "2"]);
    let mut body = endless();
    body["stream"] = false.into();
    let answer = server.post("/v1/chat/completions", &body);
    answer.error(503);
    assert_eq!(answer.json()["error"]["code"], "timeout");
    server.wait_busy(0);
    // A text's own time ends it as its length does.
    let mut body = endless();
    body["t_max_predict_ms"] = 200.into();
    let chunks = server.post("/v1/chat/completions", &body).chunks();
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
}
