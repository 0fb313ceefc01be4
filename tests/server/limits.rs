use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Answer, Server, read, start};

/// A text that goes on until the context is full.
fn endless() -> Value {
    json!({ "prompt": "Tell me", "max_tokens": -1, "ignore_eos": true, "stream": true })
}

/// Begins a request of a client behind a proxy on this machine.
fn begin_for(server: &Server, client: &str, path: &str, body: &Value) -> TcpStream {
    let body = body.to_string();
    let more = format!("X-Forwarded-For: {client}\r\nContent-Length: {}\r\n", body.len());
    let mut stream = server.connect();
    stream.write_all(format!("{}{body}", server.head("POST", path, &more)).as_bytes()).unwrap();
    stream
}

/// The value of a series.
fn series(server: &Server, name: &str) -> f64 {
    let metrics = server.get("/metrics").body;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} in {metrics}")).parse().unwrap()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A refusal that a client's library understands.
fn is_refusal(answer: &Answer, code: &str) {
    answer.error(503);
    assert_eq!(answer.json()["error"]["code"], code, "{answer:?}");
    assert!(answer.header("x-request-id").is_some_and(|id| id.starts_with("req_")), "{answer:?}");
    let seconds: u64 = answer.header("retry-after").unwrap().parse().unwrap();
    let ms: u64 = answer.header("retry-after-ms").unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds) && (1..=60_000).contains(&ms), "{answer:?}");
}

/// The most memory that the server has had, in KiB.
fn most_memory(server: &Server) -> u64 {
    let status = format!("/proc/{}/status", server.child.id());
    let status = std::fs::read_to_string(status).unwrap();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    most.split_whitespace().next().unwrap().parse().unwrap()
}

/// Bodies of so many bytes: a text, numbers, objects, and what is no JSON.
fn large_bodies(n_bytes: usize) -> Vec<String> {
    let text = format!("{{\"prompt\": \"{}\"}}", "x".repeat(n_bytes - 20));
    let numbers = format!("{{\"prompt\": [1{}]}}", ",1".repeat(n_bytes / 2 - 20));
    let objects = format!("{{\"x\": [{{}}{}]}}", ",{\"\":1}".repeat(n_bytes / 7 - 20));
    let keys: String = (0..n_bytes / 12).map(|i| format!(",\"{i:07}\":1")).collect();
    let keys = format!("{{\"prompt\":\"\"{}}}", &keys[..keys.len().min(n_bytes - 40)]);
    vec![text, numbers, objects, keys, "[".repeat(n_bytes)]
}

#[test]
fn large_bodies_share_their_memory() {
    let args = ["-c", "256", "--parallel", "1", "--body-ram", "64M", "--max-body", "8M"];
    let server = start(&args);
    let head = |body: &str| {
        let length = format!("Content-Length: {}\r\n", body.len());
        server.head("POST", "/v1/completions", &length)
    };
    assert_eq!(server.post("/tokenize", &json!({ "content": "x" })).status, 200);
    let before = most_memory(&server);
    let bodies = large_bodies(8 << 20);
    std::thread::scope(|scope| {
        for i in 0..32 {
            let (server, body, head) = (&server, &bodies[i % bodies.len()], &head);
            scope.spawn(move || {
                let answer = server.send(format!("{}{body}", head(body)));
                let expected = [200, 400, 413, 503].contains(&answer.status);
                assert!(expected, "{i}: {} {}", answer.status, answer.head);
            });
        }
    });
    let taken = (most_memory(&server) - before) >> 10;
    assert!(taken < 64 + 32, "{taken} MiB");
    assert_eq!(server.post("/tokenize", &json!({ "content": "x" })).status, 200);
}

#[test]
fn bodies_that_do_not_come_give_their_memory_to_others() {
    // A quarter is for long bodies.
    let args = ["-c", "256", "--parallel", "1", "--body-ram", "16M", "--max-body", "4M"];
    let server = start(&args);
    let length = format!("Content-Length: {}\r\n", 3 << 20);
    let mut slow = server.connect();
    slow.write_all(server.head("POST", "/tokenize", &length).as_bytes()).unwrap();
    slow.write_all(b"{\"content\": \"").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    // Short ones do not wait.
    let start = Instant::now();
    assert_eq!(server.post("/tokenize", &json!({ "content": "x" })).status, 200);
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    let body = json!({ "content": "x ".repeat(1 << 20) });
    assert_eq!(server.post("/tokenize", &body).status, 200);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert_eq!(read(&mut slow).status, 408);
    // Without a length a body is short until it is longer.
    let body = body.to_string();
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let head = server.head("POST", "/tokenize", "Transfer-Encoding: chunked\r\n");
    assert_eq!(server.send(format!("{head}{chunked}")).status, 200);
}

#[test]
fn idle_connections_and_slow_bodies_make_room() {
    let server = start(&["-c", "64", "--parallel", "1", "--max-connections", "24"]);
    let half = "GET /health HTTP/1.1\r\nHost: loc";
    let body = server.head("POST", "/tokenize", "Content-Length: 1000\r\n");
    for begin in ["", half, &body] {
        let held: Vec<_> = (0..24)
            .map(|_| {
                let mut stream = server.connect();
                stream.write_all(begin.as_bytes()).unwrap();
                stream
            })
            .collect();
        let start = Instant::now();
        wait_until("a place", || server.get("/health").status == 200);
        assert!(start.elapsed() < Duration::from_secs(4), "{begin:?} {:?}", start.elapsed());
        drop(held);
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn connections_without_a_place_are_told_so() {
    let server = start(&["-c", "60000", "--parallel", "1", "--max-connections", "2"]);
    let held: Vec<_> = (0..2).map(|_| server.begin("/v1/completions", &endless())).collect();
    std::thread::sleep(Duration::from_millis(500));
    is_refusal(&server.post("/v1/completions", &endless()), "too_many_connections");
    let anthropic = server.post("/v1/messages", &json!({}));
    assert_eq!(anthropic.status, 529, "{anthropic:?}");
    assert_eq!(anthropic.json()["error"]["type"], "overloaded_error");
    drop(held);
    wait_until("a place", || server.get("/health").status == 200);
}

#[test]
fn clients_behind_a_proxy_have_a_limit_each() {
    let args = ["-c", "60000", "--parallel", "1", "--max-connections-per-address", "2"];
    let server = start(&args);
    let path = "/v1/completions";
    let held: Vec<_> =
        (0..2).map(|_| begin_for(&server, "203.0.113.7", path, &endless())).collect();
    server.wait_busy(1);
    std::thread::sleep(Duration::from_millis(300));
    let of = |client: &str| read(&mut begin_for(&server, client, path, &json!({})));
    is_refusal(&of("203.0.113.7"), "too_many_connections");
    // What the client says itself comes first.
    is_refusal(&of("198.51.100.1, 203.0.113.7"), "too_many_connections");
    for other in ["203.0.113.8", "127.0.0.1", "nonsense"] {
        of(other).error(400);
    }
    // This machine's own programs have none.
    let own: Vec<_> = (0..8).map(|_| server.begin(path, &endless())).collect();
    assert_eq!(server.get("/health").status, 200);
    drop((held, own));
    wait_until("an end", || of("203.0.113.7").status == 400);
}

#[test]
fn as_many_wait_as_the_queue_says() {
    let server = start(&["-c", "60000", "--parallel", "1", "--queue", "300"]);
    let held: Vec<_> = (0..301).map(|_| server.begin("/v1/completions", &endless())).collect();
    wait_until("300 wait", || series(&server, "moeba_queue_length") == 300.0);
    is_refusal(&server.post("/v1/completions", &endless()), "server_overloaded");
    drop(held);
    server.wait_busy(0);
}

/// A stream whose frames are large, so that what sockets hold is soon full.
fn long_text() -> Value {
    json!({
        "messages": [{"role": "user", "content": "Tell me everything."}],
        "max_tokens": 2500, "ignore_eos": true, "stream": true, "seed": 7,
        "logprobs": true, "top_logprobs": 20,
    })
}

fn content(answer: &Answer) -> String {
    let chunks = answer.chunks();
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect()
}

#[test]
fn a_text_that_is_not_read_gives_its_slot_to_another() {
    let server = start(&["-c", "8000", "--parallel", "1", "--kv-ram", "64M"]);
    let path = "/v1/chat/completions";
    let expected = content(&server.post(path, &long_text()));
    let n_steps = || series(&server, "moeba_n_decode_total");
    let short = json!({ "prompt": "A queue is", "n_predict": 5 });
    for _ in 0..2 {
        let mut unread = server.begin(path, &long_text());
        server.wait_busy(1);
        let mut before = -1.0;
        wait_until("the reader is behind", || {
            std::thread::sleep(Duration::from_millis(200));
            std::mem::replace(&mut before, n_steps()) == before
        });
        let start = Instant::now();
        assert_eq!(server.post("/completion", &short).status, 200);
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        assert_eq!(series(&server, "moeba_requests_parked"), 1.0);
        assert_eq!(server.get("/props").json()["n_parked"], 1);
        // Others have it at once.
        let start = Instant::now();
        assert_eq!(server.post("/completion", &short).status, 200);
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        let answer = read(&mut unread);
        assert_eq!(content(&answer), expected, "the text without a rest");
    }
    // One that goes while it rests leaves nothing behind.
    let unread = server.begin(path, &long_text());
    wait_until("it rests", || {
        server.post("/completion", &short).status == 200
            && series(&server, "moeba_requests_parked") == 1.0
    });
    drop(unread);
    wait_until("nothing rests", || series(&server, "moeba_requests_parked") == 0.0);
}

#[test]
fn each_request_counts_its_own_reads() {
    let args = ["-c", "1024", "--parallel", "2", "--ram", "20%", "--policy", "on-demand"];
    let server = start(&args);
    let read_bytes = |answer: &Value| answer["moeba"]["experts"]["read_bytes"].as_u64().unwrap();
    let total = || series(&server, "moeba_expert_read_bytes_total{tier=\"disk\"}") as u64;
    let ask = |n: usize, word: &str| {
        let body = json!({ "prompt": word, "max_tokens": n, "ignore_eos": true });
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        read_bytes(&answer.json())
    };
    let before = total();
    let (long, short) = std::thread::scope(|scope| {
        let long = scope.spawn(|| ask(300, "one"));
        server.wait_busy(1);
        let short = ask(20, "two");
        (long.join().unwrap(), short)
    });
    let all = total() - before;
    assert!(long + short <= all && long + short > all / 10 * 9, "{long} + {short} of {all}");
    assert!(short < all / 3, "{short} of {all}");
}

#[test]
fn bodies_of_other_codings_are_refused() {
    let server = start(&["-c", "64", "--parallel", "1"]);
    let of = |lines: &str| {
        let head = format!(
            "POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n0\r\n\r\n\
             GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        );
        let mut stream = server.connect();
        stream.write_all(head.as_bytes()).unwrap();
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        (read(&mut text.as_bytes()).status, text.matches("HTTP/1.1 ").count())
    };
    assert_eq!(of("Transfer-Encoding: gzip, chunked\r\n"), (501, 1));
    assert_eq!(of("Transfer-Encoding: chunked, chunked\r\n"), (400, 1));
    assert_eq!(of("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"), (400, 1));
    assert_eq!(of("Transfer-Encoding: chunked\r\n").1, 2);
}
