//! A server that runs the demo model, and an HTTP client that writes and reads bytes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{moeba, repo};
use moeba::engine::{Engine, EngineOptions};
use moeba::server::{Address, Loaded, LogRequests, ServerOptions};
use serde_json::Value;
use tempfile::TempDir;

/// A server, until it is dropped.
pub struct Server {
    pub child: Child,
    /// As `127.0.0.1:1234`.
    pub address: String,
    folder: TempDir,
}

/// Settings of a server in this process, on a free port.
pub fn options() -> ServerOptions {
    ServerOptions {
        max_body: 1 << 20,
        ping: None,
        grace: Duration::ZERO,
        log_requests: LogRequests::None,
        ..ServerOptions::new(Address::new("127.0.0.1", 0))
    }
}

/// A model for a server in this process, with as many texts at a time as sessions.
pub fn loaded(engine: Arc<Engine>, options: EngineOptions) -> Loaded {
    Loaded { options, ..Loaded::new(engine).unwrap() }
}

/// The answer of a server in this process.
pub fn post_to(url: &str, path: &str, body: &Value) -> Answer {
    let (address, body) = (url.trim_start_matches("http://"), body.to_string());
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(180))).unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
    let more = format!("Content-Length: {}\r\n\r\n{body}", body.len());
    stream.write_all(format!("{head}{more}").as_bytes()).unwrap();
    read(&mut stream)
}

/// A body with these fields instead of its own.
pub fn merged(mut body: Value, changes: &Value) -> Value {
    body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    body
}

pub fn model() -> PathBuf {
    repo().join("models/demo/moeba-demo.gguf")
}

/// `moeba serve` on a free port, with these further arguments.
pub fn command(folder: &TempDir, args: &[&str]) -> Command {
    command_of(&model(), folder, args)
}

/// `moeba serve` of another model.
fn command_of(model: &Path, folder: &TempDir, args: &[&str]) -> Command {
    let mut command = command_of_none(folder, args);
    command.arg(model);
    command
}

/// `moeba serve` whose arguments say which models there are.
pub fn command_of_none(folder: &TempDir, args: &[&str]) -> Command {
    let mut command = moeba();
    command.arg("serve").args(["--port", "0", "-t", "2", "--ready-file"]);
    command.arg(folder.path().join("url")).args(args);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

pub fn start(args: &[&str]) -> Server {
    let mut server = start_logged(args);
    // A pipe that is not read would fill.
    let mut stderr = server.child.stderr.take().unwrap();
    std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
    server
}

/// The same, whose stderr the caller reads.
pub fn start_logged(args: &[&str]) -> Server {
    start_of(&model(), args)
}

/// A server of another model, whose stderr the caller reads.
pub fn start_of(model: &Path, args: &[&str]) -> Server {
    let folder = tempfile::tempdir().unwrap();
    let command = command_of(model, &folder, args);
    start_command(command, folder)
}

/// A server by this command, whose files are in this folder, and whose stderr the caller reads.
pub fn start_command(mut command: Command, folder: TempDir) -> Server {
    let child = command.spawn().unwrap();
    let mut server = Server { child, address: String::new(), folder };
    let url = server.wait_for_url();
    server.address = url.trim_start_matches("http://").to_owned();
    server
}

impl Server {
    fn wait_for_url(&mut self) -> String {
        let path = self.folder.path().join("url");
        let end = Instant::now() + Duration::from_secs(120);
        while Instant::now() < end {
            if let Ok(url) = std::fs::read_to_string(&path) {
                return url.trim().to_owned();
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                let mut text = String::new();
                self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
                panic!("the server has ended with {status}: {text}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the server does not start");
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send(self.head("GET", path, ""))
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_text(path, &body.to_string())
    }

    pub fn post_text(&self, path: &str, body: &str) -> Answer {
        self.send_body("POST", path, body)
    }

    pub fn send_body(&self, method: &str, path: &str, body: &str) -> Answer {
        let head = format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        self.send(format!("{}{body}", self.head(method, path, &head)))
    }

    /// A request's head; the connection ends with it.
    pub fn head(&self, method: &str, path: &str, more: &str) -> String {
        let host = &self.address;
        format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n")
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(180))).unwrap();
        stream
    }

    /// Writes bytes and reads all that comes.
    pub fn send(&self, text: impl AsRef<[u8]>) -> Answer {
        let mut stream = self.connect();
        // A server that refuses need not read all of it.
        let _ = stream.write_all(text.as_ref());
        read(&mut stream)
    }

    /// Sends a body and leaves the connection open.
    pub fn begin(&self, path: &str, body: &Value) -> TcpStream {
        let body = body.to_string();
        let head = format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        let mut stream = self.connect();
        stream.write_all(format!("{}{body}", self.head("POST", path, &head)).as_bytes()).unwrap();
        stream
    }

    /// Reads what comes, so that the text keeps its slot.
    pub fn drain(mut stream: TcpStream) {
        std::thread::spawn(move || std::io::copy(&mut stream, &mut std::io::sink()));
    }

    /// Slots that compute.
    pub fn n_busy(&self) -> usize {
        let slots = self.get("/slots").json();
        slots.as_array().unwrap().iter().filter(|slot| slot["is_processing"] == true).count()
    }

    /// Waits until so many slots compute.
    pub fn wait_busy(&self, n: usize) -> Duration {
        let start = Instant::now();
        while self.n_busy() != n {
            assert!(start.elapsed() < Duration::from_secs(30), "not {n} slots");
            std::thread::sleep(Duration::from_millis(5));
        }
        start.elapsed()
    }

    pub fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status().unwrap();
        assert!(sent.success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// In lower case.
    pub head: String,
    pub body: String,
}

/// Reads a response to the end of the connection.
pub fn read(stream: &mut impl Read) -> Answer {
    let mut bytes = Vec::new();
    // A connection that is reset has given what there is.
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let head = head.to_ascii_lowercase();
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let body = match head.contains("transfer-encoding: chunked") {
        true => unchunked(body),
        false => body.to_owned(),
    };
    Answer { status, head, body }
}

fn unchunked(mut body: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap_or(0);
        if size == 0 || rest.len() < size {
            break;
        }
        out.push_str(&rest[..size]);
        body = rest[size..].strip_prefix("\r\n").unwrap_or_default();
    }
    out
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The data of a stream's frames.
    pub fn frames(&self) -> Vec<String> {
        let data = self.body.split("\n\n").filter_map(|frame| frame.strip_prefix("data: "));
        data.map(str::to_owned).collect()
    }

    /// The same as JSON, without the last one, which is `[DONE]`.
    pub fn chunks(&self) -> Vec<Value> {
        let mut frames = self.frames();
        assert_eq!(frames.pop().as_deref(), Some("[DONE]"), "{self:?}");
        frames.iter().map(|frame| serde_json::from_str(frame).unwrap()).collect()
    }

    /// The lines of a stream, each JSON.
    pub fn lines(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("application/x-ndjson"), "{self:?}");
        assert!(self.body.ends_with('\n'), "{self:?}");
        self.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The events of a stream whose frames have names.
    pub fn events(&self) -> Vec<(String, Value)> {
        let event = |frame: &str| {
            let (name, data) = frame.strip_prefix("event: ")?.split_once("\ndata: ")?;
            Some((name.to_owned(), serde_json::from_str(data).unwrap()))
        };
        let frames = self.body.split_terminator("\n\n");
        frames.map(|frame| event(frame).unwrap_or_else(|| panic!("{frame:?}"))).collect()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(found, _)| *found == name).map(|(_, value)| value).next()
    }

    /// The text of an error, which has this status.
    pub fn error(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{self:?}");
        let json = self.json();
        let message = json["error"]["message"].as_str();
        message.unwrap_or_else(|| panic!("{self:?}")).to_owned()
    }
}
