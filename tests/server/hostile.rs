use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Server, read, start};

fn is_well(server: &Server) {
    assert_eq!(server.get("/health").status, 200);
    let body = json!({"prompt": "x", "max_tokens": 1});
    assert_eq!(server.post("/v1/completions", &body).status, 200);
}

#[test]
fn bodies_that_mean_harm_are_refused() {
    let server = start(&["-c", "64", "--parallel", "1", "--max-body", "1M"]);
    let post = |text: &str| server.post_text("/v1/chat/completions", text);
    for text in ["", "{", "[]", "5", "\u{0}", "{\"messages\": NaN}", "{\"a\":1}x"] {
        post(text).error(400);
    }
    let deep = format!("{}{}", "[".repeat(300_000), "]".repeat(300_000));
    post(&deep).error(400);
    post(&format!("{{\"messages\": {}", "{\"a\":".repeat(100_000))).error(400);
    let deep_schema =
        format!("{{\"messages\": [], \"x\": {}1{}}}", "[".repeat(200), "]".repeat(200));
    post(&deep_schema).error(400);
    // Too large, by what it says and by what comes.
    let head = "Content-Type: application/json\r\nContent-Length: 100000000\r\n";
    let answer = server.send(server.head("POST", "/v1/chat/completions", head));
    assert_eq!(answer.status, 413);
    let head = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n";
    let mut text = server.head("POST", "/v1/chat/completions", head);
    for _ in 0..40 {
        text.push_str(&format!("10000\r\n{}\r\n", "x".repeat(0x10000)));
    }
    assert_eq!(server.send(&text).status, 413);
    let many = json!({"messages": vec![json!({"role": "user", "content": ""}); 17_000]});
    server.post("/v1/chat/completions", &many).error(400);
    is_well(&server);
}

#[test]
fn requests_that_are_no_http_are_refused() {
    let server = start(&["-c", "64", "--parallel", "1"]);
    for text in [
        "\r\n\r\n\r\n",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}\u{0}",
        "GET /health HTTP/1.1\r\nHost: localhost\r\nHost\r\n\r\n",
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: \
         6\r\n\r\n",
    ] {
        let mut stream = server.connect();
        stream.write_all(text.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let answer = read(&mut stream);
        assert!([0, 400].contains(&answer.status), "{text:?}: {answer:?}");
    }
    let long = format!("X-Long: {}\r\n", "y".repeat(100_000));
    let answer = server.send(server.head("GET", "/health", &long));
    assert!([0, 431].contains(&answer.status), "{answer:?}");
    let many: String = (0..300).map(|i| format!("X-{i}: y\r\n")).collect();
    let answer = server.send(server.head("GET", "/health", &many));
    assert!([0, 431].contains(&answer.status), "{answer:?}");
    is_well(&server);
}

#[test]
fn slow_senders_are_waited_for_and_half_headers_are_not() {
    let server = start(&["-c", "64", "--parallel", "1"]);
    // A byte at a time is slow, but whole.
    let mut slow = server.connect();
    slow.set_nodelay(true).unwrap();
    for byte in server.head("GET", "/health", "").bytes() {
        slow.write_all(&[byte]).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(read(&mut slow).status, 200);
    // Half of a header ends after its time.
    let mut half = server.connect();
    half.write_all(b"GET /health HTTP/1.1\r\nHost: loc").unwrap();
    let start = Instant::now();
    let answer = read(&mut half);
    assert!([0, 408].contains(&answer.status), "{answer:?}");
    assert!((5..20).contains(&start.elapsed().as_secs()), "{:?}", start.elapsed());
    is_well(&server);
}

#[test]
fn an_address_has_so_many_connections() {
    let server = start(&["-c", "64", "--parallel", "1"]);
    let held: Vec<_> = (0..64).map(|_| server.connect()).collect();
    // Those that were opened first are counted when they are accepted.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(server.get("/health").status, 503);
    drop(held);
    std::thread::sleep(Duration::from_millis(300));
    is_well(&server);
}
