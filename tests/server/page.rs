//! The page at `/` without a browser, and the stream of the experts.

use std::io::{BufRead, BufReader, Write};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Server, start};

const FILES: &[(&str, &str)] = &[
    ("/", "text/html; charset=utf-8"),
    ("/page/style.css", "text/css; charset=utf-8"),
    ("/page/main.js", "text/javascript; charset=utf-8"),
    ("/page/icon.svg", "image/svg+xml"),
    ("/page/third_party/katex.min.js", "text/javascript; charset=utf-8"),
];

/// Browsers ask for it; without it `/` answers as Ollama does.
const HTML: &str = "Accept: text/html,*/*;q=0.8\r\n";

#[test]
fn the_page_has_its_headers_and_needs_no_key() {
    let server = start(&["-c", "64", "--parallel", "1", "--api-key", "first"]);
    for (path, kind) in FILES {
        let answer = server.send(server.head("GET", path, HTML));
        assert_eq!((answer.status, answer.header("content-type")), (200, Some(*kind)), "{path}");
        let policy = answer.header("content-security-policy").unwrap();
        for part in ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"] {
            assert!(policy.split("; ").any(|found| found == part), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
        assert_eq!(answer.header("cross-origin-resource-policy"), Some("same-origin"));
        assert!(answer.body.len() > 100, "{path}");
        let known = format!("If-None-Match: {}\r\n{HTML}", answer.header("etag").unwrap());
        let again = server.send(server.head("GET", path, &known));
        assert_eq!((again.status, again.body.as_str()), (304, ""), "{path}");
    }
    // What the page shows is asked for with the key.
    for path in ["/moeba/experts", "/slots", "/props", "/page/nothing.js"] {
        server.get(path).error(401);
    }
    assert_eq!(server.send(server.head("HEAD", "/", HTML)).status, 200);
    assert_eq!(server.get("/").body, "Ollama is running");
    server.post("/", &json!({})).error(405);
}

#[test]
fn only_own_hosts_get_the_page_and_only_the_page_is_for_other_sites_links() {
    let server = start(&["-c", "64", "--parallel", "1"]);
    let get = |path: &str, host: &str, more: &str| {
        let head =
            format!("GET {path} HTTP/1.1\r\nConnection: close\r\nHost: {host}\r\n{more}\r\n");
        server.send(head).status
    };
    let cross = "Sec-Fetch-Site: cross-site\r\n";
    let link = format!("{HTML}{cross}");
    assert_eq!(get("/", "localhost", HTML), 200);
    assert_eq!(get("/", "localhost", &link), 200);
    assert_eq!(get("/page/main.js", "localhost", cross), 200);
    assert_eq!(get("/", "evil.example", HTML), 403);
    assert_eq!(get("/page/main.js", "evil.example", ""), 403);
    assert_eq!(get("/moeba/experts", "localhost", cross), 403);
    assert_eq!(get("/moeba/experts", "localhost", "Origin: https://evil.example\r\n"), 403);
    assert_eq!(get("/page/nothing.js", "localhost", ""), 404);
    assert_eq!(get("/page/../mod.rs", "localhost", ""), 404);
    server.post("/", &json!({})).error(405);
}

/// The events of a stream, each with its name.
struct Events {
    lines: std::io::Lines<BufReader<std::net::TcpStream>>,
}

impl Events {
    fn open(server: &Server) -> Events {
        let mut stream = server.connect();
        stream.write_all(server.head("GET", "/moeba/experts", "").as_bytes()).unwrap();
        Events { lines: BufReader::new(stream).lines() }
    }

    fn next(&mut self) -> (String, Value) {
        let mut name = String::new();
        loop {
            let line = self.lines.next().expect("the stream has ended").unwrap();
            if let Some(text) = line.strip_prefix("event: ") {
                name = text.to_owned();
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return (name, serde_json::from_str(data).unwrap());
            }
        }
    }
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

/// The digits of all places, layer after layer.
fn places(first: &Value) -> Vec<u64> {
    let bands = first["places"].as_array().unwrap().iter().map(|band| band.as_str().unwrap());
    bands.flat_map(str::chars).map(|digit| u64::from(digit.to_digit(10).unwrap())).collect()
}

#[test]
fn the_stream_of_the_experts_adds_up() {
    let server = start(&["-c", "512", "--parallel", "1", "--ram", "25%"]);
    let mut events = Events::open(&server);
    let (name, first) = events.next();
    assert_eq!(name, "experts");
    let layers = first["layers"].as_array().unwrap();
    let n: u64 = layers.iter().map(|layer| layer["n_experts"].as_u64().unwrap()).sum();
    let (mut places, mut hits, mut misses) =
        (places(&first), numbers(&first["hits"]), numbers(&first["misses"]));
    assert_eq!([places.len(), hits.len(), misses.len()], [n as usize; 3]);
    assert!(
        first["memory"]["budget"].as_u64().unwrap() < first["memory"]["experts"].as_u64().unwrap()
    );
    assert!(first["k"].as_u64().unwrap() > 0 && first["link"].is_null());
    let body = json!({ "prompt": "A branch is", "n_predict": 24, "ignore_eos": true });
    assert_eq!(server.post("/completion", &body).status, 200);
    let start = Instant::now();
    let mut n_events = 0;
    let last = loop {
        let (name, event) = events.next();
        n_events += 1;
        assert_eq!(name, "change");
        for cell in numbers(&event["cells"]).chunks_exact(4) {
            let i = cell[0] as usize;
            places[i] = cell[1];
            hits[i] += cell[2];
            misses[i] += cell[3];
        }
        let is_over = event["decode"]["tokens"].as_u64() >= Some(23);
        if is_over && event["cells"].as_array().unwrap().is_empty() {
            break event;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{event}");
    };
    let disk = &last["disk"];
    let total = |list: &[u64]| list.iter().sum::<u64>();
    assert_eq!(disk["hits"].as_u64(), Some(total(&hits)));
    assert_eq!(
        disk["misses"].as_u64().unwrap() + disk["partial"].as_u64().unwrap(),
        total(&misses)
    );
    assert!(total(&misses) > 0 && places.contains(&0) && places.contains(&3), "{places:?}");
    assert_eq!(last["slots"][0]["state"], "idle");
    // At most ten a second, and one a second where nothing happens.
    let seconds = last["ms"].as_u64().unwrap() as f64 / 1e3;
    assert!(f64::from(n_events) <= 10.0 * seconds + 2.0, "{n_events} in {seconds} s");
}

#[test]
fn experts_in_place_are_in_memory_and_their_uses_are_counted() {
    let server = start(&["-c", "512", "--parallel", "1"]);
    let uses = || {
        let (_, first) = Events::open(&server).next();
        assert!(places(&first).iter().all(|place| *place == 3));
        assert!(first["disk"].is_null() && first["memory"]["budget"].is_null());
        numbers(&first["hits"]).iter().sum::<u64>()
    };
    assert_eq!(uses(), 0);
    let body = json!({ "prompt": "A branch is", "n_predict": 8, "ignore_eos": true });
    assert_eq!(server.post("/completion", &body).status, 200);
    assert!(uses() > 0);
}

#[test]
fn a_server_without_slots_shows_no_experts_and_viewers_are_bounded() {
    let server = start(&["-c", "64", "--parallel", "1", "--no-slots"]);
    server.get("/moeba/experts").error(501);
    assert!(server.send(server.head("GET", "/", HTML)).body.starts_with("<!doctype html>"));
    let server = start(&["-c", "64", "--parallel", "1", "--no-ui"]);
    assert_eq!(server.send(server.head("GET", "/", HTML)).body, "Ollama is running");
    server.get("/page/main.js").error(404);
    let mut open: Vec<Events> = (0..8).map(|_| Events::open(&server)).collect();
    open.iter_mut().for_each(|events| assert_eq!(events.next().0, "experts"));
    server.get("/moeba/experts").error(503);
    // Closing a stream makes room for another.
    open.clear();
    let end = Instant::now() + Duration::from_secs(10);
    while Events::open(&server).lines.next().unwrap().unwrap().contains("503") {
        assert!(Instant::now() < end, "a viewer is counted who has gone");
        std::thread::sleep(Duration::from_millis(50));
    }
}
