//! The server among others: the lines of `src/server/docs/operations.md` for nginx and Prometheus,
//! run by these programs where they are installed; the socket of systemd; a prefix of all paths.

use super::support::{Answer, Server, model, read, start};
use common::repo;
use serde_json::json;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The indented lines of the first block below a heading of that page that begins with
/// `first`.
fn block(heading: &str, first: &str) -> String {
    let text = std::fs::read_to_string(repo().join("src/server/docs/operations.md")).unwrap();
    let (_, below) = text.split_once(&format!("## {heading}\n")).expect("the heading");
    let lines = below.lines().skip_while(|line| line.strip_prefix("    ") != Some(first));
    let block = lines.take_while(|line| line.starts_with("    "));
    let block: String = block.map(|line| format!("{}\n", &line[4..])).collect();
    assert!(!block.is_empty(), "{heading}: no block begins with {first}");
    block
}

/// Whether a program is there; if not, its part of a test is left out.
fn is_there(program: &str) -> bool {
    let is_there = Command::new(program).arg("--help").output().is_ok();
    if !is_there {
        println!("{program} is not installed: its part is left out");
    }
    is_there
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

struct Nginx {
    child: Child,
    port: u16,
    _folder: tempfile::TempDir,
}

impl Nginx {
    fn before(server: &Server, changes: &[(&str, &str)]) -> Nginx {
        let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
        let address = server.address.split('/').next().unwrap();
        let mut block = block("Behind nginx", "upstream moeba {");
        block = block.replace("127.0.0.1:8080", address);
        block = block.replace("listen 80", &format!("listen 127.0.0.1:{port}"));
        for (from, to) in changes {
            assert!(block.contains(from), "{block}");
            block = block.replace(from, to);
        }
        let path = folder.path().display();
        let temp = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let temp = temp.map(|kind| format!("{kind}_temp_path {path}/{kind};")).join("\n");
        let text = format!(
            "daemon off; master_process off; pid {path}/pid; error_log {path}/error;\n\
             events {{}}\nhttp {{\n{temp}\naccess_log off;\n{block}}}\n"
        );
        std::fs::write(folder.path().join("nginx.conf"), text).unwrap();
        let mut command = Command::new("nginx");
        command.arg("-p").arg(folder.path()).arg("-c").arg(folder.path().join("nginx.conf"));
        let child = command.stderr(Stdio::null()).spawn().unwrap();
        let nginx = Nginx { child, port, _folder: folder };
        let end = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < end, "nginx does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        nginx
    }

    fn send(&self, method: &str, path: &str, body: &str) -> Answer {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        read(&mut stream)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The page, its files and a stream, through nginx.
fn check(nginx: &Nginx) {
    let page = nginx.send("GET", "/llm/", "");
    assert_eq!(page.status, 200, "{page:?}");
    let file = nginx.send("GET", "/llm/page/main.js", "");
    assert_eq!(file.status, 200, "{file:?}");
    let body = json!({"prompt": "What", "max_tokens": 3, "stream": true}).to_string();
    let answer = nginx.send("POST", "/llm/v1/completions", &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.frames().last().map(String::as_str), Some("[DONE]"));
}

#[test]
fn the_lines_for_nginx_serve_the_page_and_streams() {
    if !is_there("nginx") {
        return;
    }
    let server = start(&["-c", "128"]);
    check(&Nginx::before(&server, &[]));
    let server = start(&["-c", "128", "--api-prefix", "llm/"]);
    check(&Nginx::before(&server, &[("http://moeba/", "http://moeba")]));
}

#[test]
fn the_lines_for_prometheus_are_right() {
    let server = start(&["-c", "128"]);
    server.get("/health");
    let metrics = server.get("/metrics").body;
    for name in ["moeba_queue_length ", "moeba_requests_total{"] {
        assert!(metrics.lines().any(|line| line.starts_with(name)), "{name}");
    }
    if !is_there("promtool") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let heading = "Watched by Prometheus";
    std::fs::write(file("moeba.rules.yml"), block(heading, "groups:")).unwrap();
    std::fs::write(file("prometheus.yml"), block(heading, "scrape_configs:")).unwrap();
    run_promtool(&["check", "config", "prometheus.yml"], folder.path(), Stdio::null());
    check_with_promtool(&metrics);
}

fn run_promtool(args: &[&str], folder: &Path, stdin: Stdio) {
    let mut command = Command::new("promtool");
    let out = command.args(args).current_dir(folder).stdin(stdin).output().unwrap();
    let said = [&out.stdout[..], &out.stderr].concat();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&said));
}

/// Prometheus reads the text of `/metrics`.
pub fn check_with_promtool(metrics: &str) {
    if !is_there("promtool") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // llama-server's names have colons, which are for the names of rules.
    let own = metrics.lines().filter(|line| !line.contains("llamacpp:"));
    let own: String = own.map(|line| format!("{line}\n")).collect();
    let path = folder.path().join("metrics");
    std::fs::write(&path, own).unwrap();
    let input = std::fs::File::open(&path).unwrap();
    run_promtool(&["check", "metrics"], folder.path(), input.into());
}

#[test]
fn a_prefix_stands_before_all_paths() {
    let server = start(&["-c", "128", "--api-prefix", "/a/b"]);
    let (address, prefix) = server.address.split_once('/').unwrap();
    assert_eq!(prefix, "a/b");
    let status = |path: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        read(&mut stream).status
    };
    for (path, expected) in [
        ("/a/b/health", 200),
        ("/a/b/v1/models", 200),
        ("/a/b/", 200),
        ("/a/b", 308),
        ("/health", 404),
        ("/a/bhealth", 404),
        ("/a/", 404),
    ] {
        assert_eq!(status(path), expected, "{path}");
    }
}

#[test]
fn systemd_is_told_of_the_start_and_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let told = || {
        let mut bytes = [0; 256];
        let n = manager.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..n]).into_owned()
    };
    let mut command = common::cli::moeba();
    command.arg("serve").arg(model()).args(["--port", "0", "-c", "64"]);
    command.env("NOTIFY_SOCKET", &path).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let ready = told();
    assert!(ready.starts_with("READY=1\nSTATUS=serving at http://127.0.0.1:"), "{ready}");
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(told(), "STOPPING=1");
    assert!(child.wait().unwrap().code().is_some());
}
