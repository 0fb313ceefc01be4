//! A hub on this machine: a small HTTP server, and a repository for it to serve. Each connection
//! has one request; what is served is a function of it, so that a test can make any of it fail.

use moeba::hub::{Config, Hub, Patience, Token, Wanted};
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const TOKEN: &str = "hf_averysecrettoken";

/// A client's request.
#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub fn is_resolve(&self) -> bool {
        self.path.contains("/resolve/")
    }

    /// The first byte that is asked for.
    pub fn from(&self) -> usize {
        let range = self.header("range").and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-'));
        range.map_or(0, |from| from.parse().unwrap())
    }
}

/// The reply to it.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Leave the body's length out.
    pub chunked: bool,
    /// After the body, keep the connection open and say nothing.
    pub stall: bool,
    /// Before each kilobyte.
    pub delay: Duration,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Reply {
        let (headers, body) = (Vec::new(), body.into());
        Reply { status, headers, body, chunked: false, stall: false, delay: Duration::ZERO }
    }

    pub fn with(mut self, name: &str, value: impl ToString) -> Reply {
        self.headers.push((name.into(), value.to_string()));
        self
    }

    /// Announces the whole body and sends its first `n` bytes.
    pub fn cut(mut self, n: usize) -> Reply {
        let len = self.body.len();
        self.body.truncate(n);
        self.with("Content-Length", len)
    }

    fn send(&self, out: &mut TcpStream) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} Status\r\nConnection: close\r\n", self.status);
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        if self.chunked {
            head += "Transfer-Encoding: chunked\r\n";
        } else if !self.headers.iter().any(|(name, _)| name == "Content-Length") {
            head += &format!("Content-Length: {}\r\n", self.body.len());
        }
        out.write_all(format!("{head}\r\n").as_bytes())?;
        for part in self.body.chunks(1000) {
            thread::sleep(self.delay);
            if self.chunked {
                out.write_all(format!("{:x}\r\n", part.len()).as_bytes())?;
            }
            out.write_all(part)?;
            if self.chunked {
                out.write_all(b"\r\n")?;
            }
        }
        if self.chunked {
            out.write_all(b"0\r\n\r\n")?;
        }
        if self.stall {
            // Until the client has had enough, but not for ever.
            out.set_read_timeout(Some(Duration::from_secs(20)))?;
            let _ = out.read(&mut [0]);
        }
        Ok(())
    }
}

type Handler = dyn Fn(&Request) -> Reply + Send + Sync;

pub struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    closed: Arc<AtomicBool>,
}

impl Server {
    pub fn new(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (requests, closed) =
            (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (log, end): (Arc<Mutex<Vec<Request>>>, _) = (requests.clone(), closed.clone());
        let handler: Arc<Handler> = Arc::new(handler);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if end.load(Ordering::SeqCst) {
                    break;
                }
                let (log, handler) = (log.clone(), handler.clone());
                thread::spawn(move || serve(stream, &log, &*handler));
            }
        });
        Server { address, requests, closed }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The same server under another host's name.
    pub fn other_url(&self) -> String {
        format!("http://localhost:{}", self.address.port())
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// Those for files.
    pub fn resolved(&self) -> Vec<Request> {
        self.requests().into_iter().filter(Request::is_resolve).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts.
        drop(TcpStream::connect(self.address));
    }
}

fn serve(mut stream: TcpStream, log: &Mutex<Vec<Request>>, handler: &Handler) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let path = first.split(' ').nth(1).unwrap().to_owned();
    let headers = lines.by_ref().take_while(|line| !line.is_empty()).map(|line| {
        let (name, value) = line.split_once(':').unwrap();
        (name.to_ascii_lowercase(), value.trim().to_owned())
    });
    let request = Request { path, headers: headers.collect() };
    log.lock().unwrap().push(request.clone());
    // A client may leave before the end.
    let _ = handler(&request).send(&mut stream);
}

/// `user/model` on a hub.
#[derive(Clone)]
pub struct Repo {
    pub files: Vec<(String, Vec<u8>)>,
}

impl Repo {
    pub fn new(files: &[(&str, &[u8])]) -> Repo {
        let files = files.iter().map(|(path, content)| (path.to_string(), content.to_vec()));
        Repo { files: files.collect() }
    }

    /// The hub's answer.
    pub fn answer(&self, request: &Request) -> Reply {
        let path = request.path.split('?').next().unwrap();
        if path == "/api/models/user/model/revision/main" {
            return Reply::new(200, format!(r#"{{"id": "user/model", "sha": "{COMMIT}"}}"#));
        }
        if path == format!("/api/models/user/model/tree/{COMMIT}") {
            return Reply::new(200, self.tree().to_string());
        }
        let prefix = format!("/user/model/resolve/{COMMIT}/");
        let name = path.strip_prefix(&prefix).unwrap_or_default();
        match self.files.iter().find(|(path, _)| path == name) {
            Some((_, content)) => ranged(content, request.from()),
            None => Reply::new(404, "").with("X-Error-Message", "Entry not found"),
        }
    }

    pub fn tree(&self) -> serde_json::Value {
        let file = |(path, content): &(String, Vec<u8>)| {
            let lfs = serde_json::json!({ "oid": sha256(content), "size": content.len() });
            let oid = "1".repeat(40);
            serde_json::json!({
                "type": "file", "path": path, "oid": oid, "size": content.len(), "lfs": lfs,
            })
        };
        self.files.iter().map(file).collect()
    }
}

/// A file from byte `from` on.
pub fn ranged(content: &[u8], from: usize) -> Reply {
    if from == 0 {
        return Reply::new(200, content);
    }
    if from >= content.len() {
        return Reply::new(416, "").with("Content-Range", format!("bytes */{}", content.len()));
    }
    let range = format!("bytes {from}-{}/{}", content.len() - 1, content.len());
    Reply::new(206, &content[from..]).with("Content-Range", range)
}

pub fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes that look like no others.
pub fn content(n: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..n).map(|_| byte()).collect()
}

/// A cache of a test's own.
pub struct Cache {
    pub dir: TempDir,
}

impl Default for Cache {
    fn default() -> Self {
        Self::new()
    }
}

impl Cache {
    pub fn new() -> Cache {
        Cache { dir: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("hub")
    }

    pub fn repo(&self) -> PathBuf {
        self.path().join("models--user--model")
    }

    pub fn blob(&self, content: &[u8]) -> PathBuf {
        self.repo().join("blobs").join(sha256(content))
    }

    pub fn incomplete(&self, content: &[u8]) -> PathBuf {
        self.repo().join("blobs").join(format!("{}.incomplete", sha256(content)))
    }

    /// The files below the folder that the cache lies in.
    pub fn tree(&self) -> Vec<String> {
        let mut out = Vec::new();
        list(self.dir.path(), self.dir.path(), &mut out);
        out.sort();
        out
    }

    /// Quick to give up, with the token.
    pub fn config(&self, endpoint: &str) -> Config {
        Config {
            endpoint: endpoint.into(),
            cache: self.path(),
            token: Some(Token::new(TOKEN).unwrap()),
            offline: false,
            patience: Patience {
                attempts: 3,
                first_delay: Duration::from_millis(1),
                max_delay: Duration::from_millis(20),
                connect: Duration::from_secs(10),
                stall: Duration::from_millis(500),
            },
        }
    }

    pub fn hub(&self, server: &Server) -> Hub {
        Hub::new(self.config(&server.url()))
    }
}

fn list(root: &Path, folder: &Path, out: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            list(root, &path, out);
        } else {
            out.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
        }
    }
}

pub fn wanted(text: &str) -> Wanted {
    Wanted::parse(text).unwrap()
}

/// Fetches without looking at the progress.
pub fn fetch(hub: &Hub, text: &str) -> moeba::Result<PathBuf> {
    hub.fetch(&wanted(text), &mut |_| Ok(()))
}

/// The sentence of an error, which says all these words.
#[track_caller]
pub fn refused(result: moeba::Result<PathBuf>, words: &[&str]) -> String {
    let sentence = result.unwrap_err().to_string();
    for word in words {
        assert!(sentence.contains(word), "no {word:?} in: {sentence}");
    }
    assert!(!sentence.contains(TOKEN) && sentence.lines().count() == 1, "{sentence}");
    sentence
}
