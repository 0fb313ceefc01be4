//! A peer's routes: keys, wrong bodies, other models and versions, and what is refused.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;

use common::{convert_golden, moeba, repo};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{Engine, PeerOptions};
use moeba::experts::peers::{Group, Request};
use serde_json::{Value, json};

use crate::support::{KEY, Peer, head_options, peer};

/// Status and body of an answer.
fn send(peer: &Peer, method: &str, path: &str, key: &str, kind: &str, body: &[u8]) -> (u16, Value) {
    let host = peer.url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(host).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nAuthorization: Bearer \
         {key}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    // A peer need not read what it refuses.
    let _ = stream.write_all(body);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
    let status = std::str::from_utf8(&answer[9..12]).unwrap().parse().unwrap();
    (status, serde_json::from_slice(&answer[end + 4..]).unwrap_or_default())
}

const BYTES: &str = "application/octet-stream";
const EXPERTS: &str = "/moeba/peer/experts";

fn demo() -> std::path::PathBuf {
    repo().join("models/demo/moeba-demo.gguf")
}

/// Why a head with this peer does not start.
fn refused(path: &Path, url: &str, token: Option<&str>) -> String {
    let peers = PeerOptions { urls: vec![url.into()], token: token.map(str::to_owned) };
    let options = moeba::engine::EngineOptions { peers, ..head_options(path, &[]) };
    Engine::load(path, &options, &mut |_| ()).map(drop).unwrap_err().to_string()
}

#[test]
fn wrong_keys_models_and_addresses_end_in_a_sentence() {
    let peer = peer(&demo(), RamBudget::Auto);
    for token in [None, Some("another")] {
        let why = refused(&demo(), &peer.url, token);
        assert!(why.contains(&peer.url) && why.contains("API key"), "{why}");
        assert!(!why.contains("another"), "{why}");
    }
    let dir = tempfile::tempdir().unwrap();
    let other = convert_golden("qwen3moe", "f32", dir.path());
    let why = refused(&other, &peer.url, Some(KEY));
    assert!(why.contains("this peer has tensors"), "{why}");
    for (url, said) in [("10.0.0.1:80", "http://HOST:PORT"), ("ftp://x", "http://HOST:PORT")] {
        assert!(refused(&demo(), url, None).contains(said), "{url}");
    }
    let twice = head_options(&demo(), &[&peer.url, &format!("{}/", peer.url)]);
    let why = Engine::load(&demo(), &twice, &mut |_| ()).map(drop).unwrap_err().to_string();
    assert!(why.contains("named twice"), "{why}");
}

/// Serves one body to everyone.
fn impostor(status: &'static str, body: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let n = body.len();
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {n}\r\n\r\n");
            let _ = stream.write_all((head + &body).as_bytes());
        }
    });
    url
}

#[test]
fn another_version_or_program_is_refused() {
    let peer = peer(&demo(), RamBudget::Auto);
    let (status, greeting) = send(&peer, "GET", "/moeba/peer", KEY, "", b"");
    assert_eq!(status, 200, "{greeting}");
    assert!(greeting["memory"].as_u64().unwrap() > 1 << 20, "{greeting}");
    for (name, value, said) in [
        ("version", json!("0.0.1"), "version 0.0.1, and this machine"),
        ("arithmetic", json!(99), "arithmetic 99"),
        ("model", json!("00"), "model 00"),
    ] {
        let mut other = greeting.clone();
        other["facts"][name] = value;
        let why = refused(&demo(), &impostor("200 OK", other.to_string()), None);
        assert!(why.contains(said), "{why}");
    }
    let why = refused(&demo(), &impostor("200 OK", "{}".into()), None);
    assert!(why.contains("no peer of moeba's"), "{why}");
    let why = refused(&demo(), &impostor("404 Not Found", "nothing".into()), None);
    assert!(why.contains("status 404"), "{why}");
}

fn request(acts: &[u8]) -> Request<'_> {
    let groups = vec![Group { expert: 0, n_pairs: 1 }];
    Request { key: [0; 32], layer: 1, is_prompt: false, n_rows: 1, groups, rows: vec![0], acts }
}

#[test]
fn bodies_are_checked_before_anything_is_computed() {
    let peer = peer(&demo(), RamBudget::Auto);
    let post = |kind: &str, body: &[u8]| send(&peer, "POST", EXPERTS, KEY, kind, body);
    let (status, _) = send(&peer, "POST", EXPERTS, "wrong", BYTES, b"");
    assert_eq!(status, 401);
    assert_eq!(post("application/json", b"{}").0, 415);
    for (body, said) in [
        (Vec::new(), "too short"),
        (vec![0; 400], "damaged"),
        (request(&[0; 8]).to_bytes(), "another model"),
    ] {
        let (status, answer) = post(BYTES, &body);
        let why = answer["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(status == 400 && why.contains(said), "{status} {answer}");
    }
    let head = format!(
        "POST {EXPERTS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\
                        Content-Type: {BYTES}\r\nContent-Length: 99999999\r\n\r\n"
    );
    let mut stream = TcpStream::connect(peer.url.trim_start_matches("http://")).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert!(answer.ends_with(b"413"), "{answer:?}");
}

/// Layers, experts and sizes that do not fit the model, from someone who knows its key.
#[test]
fn numbers_that_do_not_fit_the_model_are_named() {
    let path = demo();
    let peer = peer(&path, RamBudget::Auto);
    // A head learns the key from what it has in common with its peer.
    let (_, greeting) = send(&peer, "GET", "/moeba/peer", KEY, "", b"");
    let facts: moeba::experts::peers::Facts =
        serde_json::from_value(greeting["facts"].clone()).unwrap();
    let says = |change: &dyn Fn(&mut Request)| {
        let mut wrong = Request { key: facts.key(), ..request(&[]) };
        change(&mut wrong);
        let (status, answer) = send(&peer, "POST", EXPERTS, KEY, BYTES, &wrong.to_bytes());
        assert_eq!(status, 400, "{answer}");
        answer["error"]["message"].as_str().unwrap().to_owned()
    };
    assert!(says(&|r| r.layer = 999).contains("layer 999"));
    assert!(says(&|r| r.groups[0].expert = 4000).contains("expert 4000"));
    let twice = |r: &mut Request| {
        r.groups.push(r.groups[0]);
        r.rows.push(0);
    };
    assert!(says(&twice).contains("twice"));
    assert!(says(&|_| ()).contains("0 bytes for 1 rows"), "{}", says(&|_| ()));
    let many = |r: &mut Request| {
        r.groups[0].n_pairs = 200_000;
        r.rows = vec![0; 200_000];
    };
    let why = says(&many);
    assert!(why.contains("bytes for 1 rows") || why.contains("200000"), "{why}");
}

#[test]
fn a_peer_answers_no_texts_and_a_server_computes_no_experts() {
    let peer = peer(&demo(), RamBudget::Auto);
    let chat = json!({ "messages": [{ "role": "user", "content": "hi" }] }).to_string();
    let path = "/v1/chat/completions";
    let (status, answer) = send(&peer, "POST", path, KEY, "application/json", chat.as_bytes());
    assert_eq!(status, 501);
    assert!(answer.to_string().contains("moeba experts"), "{answer}");
    assert_eq!(send(&peer, "GET", "/health", "", "", b"").0, 200);
    assert_eq!(send(&peer, "GET", "/ready", "", "", b"").0, 200);
}

#[test]
fn the_program_refuses_what_makes_no_sense() {
    let dir = tempfile::tempdir().unwrap();
    let dense = convert_golden("qwen3", "f32", dir.path());
    let run = |model: &Path, args: &[&str]| {
        let output = moeba().arg("experts").arg(model).args(args).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, why) = run(&dense, &["--port", "0"]);
    assert!(code == Some(1) && why.contains("no experts to compute"), "{code:?} {why}");
    let (code, why) = run(&demo(), &["--host", "0.0.0.0", "--port", "0"]);
    assert!(code == Some(2) && why.contains("--api-key"), "{code:?} {why}");
    let (code, why) = run(&demo(), &["--dry-run", "--ram", "25%"]);
    assert_eq!(code, Some(0), "{why}");
    let output = moeba()
        .args(["run", "-p", "hi", "-n", "1", "--ram", "25%", "--peers", "nowhere"])
        .arg(demo())
        .output()
        .unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && why.contains("http://HOST:PORT"), "{why}");
}
