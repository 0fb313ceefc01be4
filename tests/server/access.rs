use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{command, read, start, start_logged};

fn get(server: &crate::support::Server, host: &str, more: &str) -> u16 {
    let head = format!("GET /v1/models HTTP/1.1\r\nConnection: close\r\n{host}{more}\r\n");
    server.send(head).status
}

#[test]
fn foreign_hosts_and_origins_are_refused() {
    let server = start(&["-c", "64", "--parallel", "1", "--allow-host", "box.lan"]);
    let own = "Host: localhost\r\n";
    assert_eq!(get(&server, own, ""), 200);
    assert_eq!(get(&server, "Host: box.lan:8080\r\n", ""), 200);
    assert_eq!(get(&server, "Host: evil.example\r\n", ""), 403);
    assert_eq!(get(&server, "", ""), 400);
    assert_eq!(get(&server, own, own), 400);
    assert_eq!(get(&server, own, "Origin: https://evil.example\r\n"), 403);
    assert_eq!(get(&server, own, "Origin: null\r\n"), 403);
    assert_eq!(get(&server, own, "Sec-Fetch-Site: cross-site\r\n"), 403);
    assert_eq!(get(&server, own, "Origin: http://localhost:3000\r\n"), 200);
    // A target with a host of its own, as a proxy gets it.
    let target = |host: &str| {
        let head =
            format!("GET http://{host}/v1/models HTTP/1.1\r\nConnection: close\r\n{own}\r\n");
        server.send(head).status
    };
    assert_eq!((target("localhost:80"), target("evil.example")), (200, 400));
    // A browser asks before it sends JSON.
    let asks = |origin: &str| {
        let more = format!("Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\n");
        server.send(server.head("OPTIONS", "/v1/chat/completions", &more))
    };
    let allowed = asks("http://localhost:3000");
    assert_eq!(allowed.status, 204);
    assert_eq!(allowed.header("access-control-allow-origin"), Some("http://localhost:3000"));
    assert!(allowed.header("access-control-allow-methods").is_some());
    let refused = asks("https://evil.example");
    assert_eq!((refused.status, refused.header("access-control-allow-origin")), (403, None));
    // Forms of pages come without asking.
    let body = "{\"content\": \"x\"}";
    let length = format!("Content-Length: {}\r\n", body.len());
    let form = |more: &str| {
        let head = server.head("POST", "/tokenize", &format!("{length}{more}"));
        server.send(format!("{head}{body}")).status
    };
    assert_eq!(form("Content-Type: application/x-www-form-urlencoded\r\n"), 200);
    assert_eq!(form("Content-Type: text/plain\r\nOrigin: http://localhost\r\n"), 415);
    assert_eq!(form("Content-Type: multipart/form-data\r\n"), 415);
    assert_eq!(form("Content-Type: application/json\r\nContent-Encoding: gzip\r\n"), 415);
}

#[test]
fn keys_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "# keys\nsecond bob max-parallel=1\n").unwrap();
    let args = ["-c", "64", "--parallel", "1", "--api-key", "first", "--api-key-file"];
    let server = start(&[&args[..], &[file.to_str().unwrap()]].concat());
    let own = "Host: anything.example\r\n";
    assert_eq!(server.get("/health").status, 200);
    let refused = server.get("/v1/models");
    refused.error(401);
    assert_eq!(refused.header("www-authenticate"), Some("bearer"));
    assert_eq!(get(&server, own, "Authorization: Bearer first\r\n"), 200);
    assert_eq!(get(&server, own, "Authorization: bearer second\r\n"), 200);
    assert_eq!(get(&server, own, "X-Api-Key: second\r\n"), 200);
    for wrong in ["firs", "firstt", "First", ""] {
        let header = format!("Authorization: Bearer {wrong}\r\n");
        assert_eq!(get(&server, own, &header), 401, "{wrong}");
    }
    assert_eq!(get(&server, own, "Authorization: Basic first\r\n"), 401);
    assert_eq!(server.get("/nothing").status, 401);
}

#[test]
fn other_machines_need_a_key() {
    let folder = tempfile::tempdir().unwrap();
    let output = command(&folder, &["--host", "0.0.0.0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("--api-key") && text.contains("--insecure"), "{text}");
}

#[test]
fn a_socket_of_this_machine_is_served_and_removed() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("moeba.sock");
    let mut server = start(&["-c", "64", "--parallel", "1", "--host", path.to_str().unwrap()]);
    assert!(server.address.starts_with("unix:"));
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let ask = || {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        read(&mut stream).json()
    };
    assert_eq!(ask(), json!({"status": "ok"}));
    server.signal("TERM");
    assert!(server.child.wait().unwrap().success());
    assert!(!path.exists());
}

#[test]
fn keys_are_read_again_on_sighup() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "first\nsecond\n").unwrap();
    let path = file.display().to_string();
    let mut server = start(&["-c", "64", "--parallel", "1", "--api-key-file", &path]);
    let with = |key: &str| {
        let head = server.head("GET", "/v1/models", &format!("Authorization: Bearer {key}\r\n"));
        server.send(head).status
    };
    let becomes = |key: &str, status: u16| {
        let end = Instant::now() + Duration::from_secs(10);
        while with(key) != status {
            assert!(Instant::now() < end, "{key} is not {status}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    assert_eq!((with("first"), with("third")), (200, 401));
    std::fs::write(&file, "second\nthird\n").unwrap();
    server.signal("HUP");
    becomes("third", 200);
    assert_eq!((with("first"), with("second")), (401, 200));
    // A file that is no such file leaves the keys as they are.
    for wrong in ["", "key weight=0\n"] {
        std::fs::write(&file, wrong).unwrap();
        server.signal("HUP");
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!((with("third"), with("first")), (200, 401));
    }
    server.signal("TERM");
    assert!(server.child.wait().unwrap().success());
}

#[test]
fn bodies_in_the_log_stay_on_their_line() {
    let args = ["-c", "64", "--parallel", "1", "--log-requests", "full", "-v"];
    let mut server = start_logged(&args);
    let mut stderr = server.child.stderr.take().unwrap();
    let text = "{\"content\": \"x\",\n\"\u{1b}[31m\": 0}\nreq_FAKE 200\r\n";
    server.post_text("/tokenize", text);
    server.post_text("/tokenize", "{\"content\": \"x\",\n\"a\\nreq_FAKE2\\u001b\": 0}");
    server.signal("TERM");
    let mut log = String::new();
    stderr.read_to_string(&mut log).unwrap();
    assert!(log.contains("req_FAKE 200\\r\\n") && log.contains("\\u{1b}[31m"), "{log}");
    assert!(!log.contains('\u{1b}'), "{log}");
    assert!(!log.lines().any(|line| line.starts_with("req_FAKE")), "{log}");
}
