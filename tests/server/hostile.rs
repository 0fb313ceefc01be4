use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Server, merged, read, start};

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

/// With the limits that a server has if none are given.
#[test]
fn large_bodies_are_refused() {
    let server = start(&["-c", "64", "--parallel", "1"]);
    let post = |text: &[u8], more: &str| {
        let head = format!("Content-Length: {}\r\n{more}", text.len());
        let head = server.head("POST", "/v1/chat/completions", &head);
        server.send([head.as_bytes(), text].concat())
    };
    let n = 1_000_000;
    post(format!("{}{}", "[".repeat(n), "]".repeat(n)).as_bytes(), "").error(400);
    post("{\"a\":".repeat(n).as_bytes(), "").error(400);
    assert_eq!(post(&vec![b' '; 100_000_000], "").status, 413);
    // A hundredth of its contents; it is not unpacked to be measured.
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    packed.write_all(&vec![b' '; 20_000_000]).unwrap();
    let packed = packed.finish().unwrap();
    assert!(packed.len() < 200_000);
    for encoding in ["gzip", "deflate", "br", "zstd", "identity, gzip"] {
        post(&packed, &format!("Content-Encoding: {encoding}\r\n")).error(415);
    }
    for text in [
        &b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\"}]}"[..],
        b"{\"messages\":[{\"role\":\"user\",\"content\":\"\\ud80\"}]}",
        b"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"temperature\":1e999}",
        b"\xef\xbb\xbf{}",
    ] {
        post(text, "").error(400);
    }
    is_well(&server);
}

/// Grammars that grow when they are compiled or written are refused, or answered within a time.
#[test]
fn grammars_that_explode_are_bounded() {
    let server = start(&["-c", "128", "--parallel", "1"]);
    let twice = |i: usize| {
        let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
        json!({"type": "object", "properties": {"a": next, "b": next}, "required": ["a", "b"]})
    };
    let mut defs: serde_json::Map<_, _> = (0..40).map(|i| (format!("d{i}"), twice(i))).collect();
    defs.insert("d40".into(), json!({"type": "integer"}));
    let patterns = (1..200).map(|i| (format!("^(a|b){{{i}}}$"), json!({"type": "integer"})));
    let patterns: serde_json::Map<_, _> = patterns.collect();
    let enums: Vec<_> = (0..100_000).map(|i| format!("value {i}")).collect();
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000));
    let rules: String = (0..3000).map(|i| format!("r{i} ::= r{0} r{0}\n", i + 1)).collect();
    let schema = |schema: serde_json::Value| {
        let format = json!({"type": "json_object", "schema": schema});
        json!({"response_format": format})
    };
    for changes in [
        schema(json!({"type": "array", "items": {}, "minItems": 1_000_000_000})),
        schema(json!({"type": "string", "minLength": 100_000_000})),
        schema(json!({"type": "string", "pattern": "((a{1,500}){1,500}){1,500}"})),
        schema(json!({"type": "string", "pattern": "(?=a)b"})),
        schema(json!({"$defs": defs, "$ref": "#/$defs/d0"})),
        schema(json!({"$ref": "#"})),
        schema(json!({"allOf": [{"$ref": "#"}, {"$ref": "#"}]})),
        schema(json!({"$ref": "http://127.0.0.1:1/schema"})),
        schema(json!({"enum": enums})),
        schema(json!({"type": "object", "patternProperties": patterns})),
        schema(json!({"type": "integer", "multipleOf": 999_999_937, "minimum": 0})),
        json!({"regex": "(a*)*(b*)*".repeat(2000)}),
        json!({"grammar": deep}),
        json!({"grammar": "root ::= (\"a\"{1,100000}){1,100000}"}),
        json!({"grammar": "root ::= (\"\")*"}),
        json!({"grammar": format!("{rules}r3000 ::= \"a\"\nroot ::= r0")}),
        json!({"lark": format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))}),
        json!({"lark": "start: start start |"}),
    ] {
        let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2});
        let body = merged(body, &changes);
        let start = Instant::now();
        let answer = server.post("/v1/chat/completions", &body);
        let shown = changes.to_string();
        let shown = &shown[..shown.len().min(80)];
        assert!([200, 400].contains(&answer.status), "{shown}: {answer:?}");
        assert!(start.elapsed() < Duration::from_secs(60), "{shown}: {:?}", start.elapsed());
    }
    let status = format!("/proc/{}/status", server.child.id());
    let status = std::fs::read_to_string(status).unwrap();
    let most = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    let kib: u64 = most.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kib < 1 << 20, "{most}");
    is_well(&server);
}

/// A template's source is text wherever a request can bring it.
/// Grammars that take all memory give it back, and other clients' grammars are compiled.
#[test]
fn grammars_leave_nothing_behind() {
    let server = start(&["-c", "128", "--parallel", "1"]);
    let ask = |schema: serde_json::Value| {
        let form = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
        let body = json!({"prompt": "x", "max_tokens": 1, "response_format": form});
        server.post("/v1/completions", &body)
    };
    let bad = |n: usize| {
        let part = |i: usize| json!({"pattern": format!("a.{{{i}}}b|{n}")});
        json!({"type": "string", "allOf": (0..60).map(part).collect::<Vec<_>>()})
    };
    let good =
        |n: usize| json!({"type": "object", "properties": {format!("a{n}"): {"type": "integer"}}});
    let resident = || {
        let path = format!("/proc/{}/statm", server.child.id());
        let pages = std::fs::read_to_string(path).unwrap();
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
    };
    ask(bad(0)).error(400);
    assert_eq!(ask(good(0)).status, 200);
    let before = resident();
    for n in 1..=40 {
        let message = ask(bad(n)).error(400);
        assert!(message.contains("compiling the JSON schema took more than"), "{message}");
    }
    let held = resident().saturating_sub(before);
    assert!(held < 64 << 20, "{} MiB stay", held >> 20);
    assert_eq!(ask(good(1)).status, 200);
    is_well(&server);
}

#[test]
fn templates_in_requests_are_text() {
    let server = start(&["-c", "512", "--parallel", "1"]);
    let source = "{% for i in range(1000000000) %}{{ messages }}{% endfor %}{{ 7 * 7 }}";
    let body = json!({
        "messages": [{"role": "user", "content": source, "name": source}],
        "tools": [{"type": "function", "function": {"name": "f", "description": source}}],
        "chat_template_kwargs": {"greeting": source},
    });
    let prompt = server.post("/apply-template", &body).json();
    let prompt = prompt["prompt"].as_str().unwrap_or_else(|| panic!("{prompt}"));
    assert!(prompt.contains(source) && !prompt.contains("49"), "{prompt}");
    let role = json!({"messages": [{"role": "{{ 7 * 7 }}", "content": "x"}]});
    server.post("/v1/chat/completions", &role).error(400);
    for (field, value) in [
        ("chat_template", json!(source)),
        ("chat_template_kwargs", json!({"chat_template": source})),
        ("chat_template_kwargs", json!({"tools": [source]})),
        ("chat_template_kwargs", json!({"bos_token": source})),
    ] {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        body[field] = value;
        server.post("/v1/chat/completions", &body).error(400);
        server.post("/apply-template", &body).error(400);
    }
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
        // Two lengths, of which a proxy could believe the other.
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: \
         chunked\r\nConnection: close\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\
         Connection: close\r\n\r\n0\r\n\r\n",
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n\
         fffffffffffffffff\r\n",
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: \
         6\r\n\r\n",
    ] {
        let mut stream = server.connect();
        stream.write_all(text.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let answer = read(&mut stream);
        assert!([0, 400, 501].contains(&answer.status), "{text:?}: {answer:?}");
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
    let body = "{\"content\": \"slowly\"}";
    let head = server.head("POST", "/tokenize", &format!("Content-Length: {}\r\n", body.len()));
    let mut slow = server.connect();
    slow.write_all(head.as_bytes()).unwrap();
    for byte in body.bytes() {
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
