//! Peers and heads for the tests.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::stream::{Answer, Disk, ask};
use moeba::engine::plan::ram::{Place, RamBudget};
use moeba::engine::{Engine, EngineOptions, ExpertsWork, PeerOptions, TestHooks};
use moeba::experts::disk::{Faults, IoKind};
use moeba::server::{Address, Keys, LogRequests, Server, ServerOptions};

pub const KEY: &str = "a-key-for-peers";

/// A peer in this process, until it is dropped.
pub struct Peer {
    pub server: Option<Server>,
    pub url: String,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.server.take().into_iter().for_each(Server::stop);
    }
}

pub fn server_options() -> ServerOptions {
    let mut keys = Keys::default();
    keys.add(KEY).unwrap();
    let options = ServerOptions::of_peer(Address::new("127.0.0.1", 0), keys);
    ServerOptions { log_requests: LogRequests::None, ..options }
}

/// A peer that has so much memory.
pub fn peer(path: &Path, ram: RamBudget) -> Peer {
    let options = EngineOptions {
        n_threads: Some(1),
        ram,
        io: IoKind::Pread,
        ..ExpertsWork::engine_options()
    };
    let engine = Engine::load(path, &options, &mut |_| ()).unwrap_or_else(|e| panic!("{e}"));
    let server = Server::bind(server_options()).unwrap();
    server.open_experts(ExpertsWork::new(engine).unwrap());
    let url = server.url().to_owned();
    Peer { server: Some(server), url }
}

/// Options of a head with the least memory for experts.
pub fn head_options(path: &Path, urls: &[&str]) -> EngineOptions {
    let token = Some(KEY.to_owned());
    EngineOptions {
        n_threads: Some(1),
        ram: least(path),
        io: IoKind::Pread,
        policy: "on-demand".parse().unwrap(),
        peers: PeerOptions { urls: urls.iter().map(|url| (*url).to_owned()).collect(), token },
        ..EngineOptions::default()
    }
}

/// The least memory that streaming works with.
pub fn least(path: &Path) -> RamBudget {
    common::stream::budget(path, 0.0)
}

pub fn head(path: &Path, urls: &[&str]) -> Arc<Engine> {
    common::stream::load(path, &head_options(path, urls))
}

/// Waits until so many peers can be asked.
pub fn wait_for(engine: &Engine, n: usize) {
    let end = Instant::now() + Duration::from_secs(60);
    while engine.n_peers().unwrap().0 != n {
        assert!(Instant::now() < end, "{:?} peers", engine.n_peers());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A head whose disk is so slow that peers are always worth asking.
pub fn slow_head(path: &Path, urls: &[&str]) -> Arc<Engine> {
    let faults = Some(Disk::slow(3) as Arc<dyn Faults>);
    let test = TestHooks { faults, ..TestHooks::default() };
    common::stream::load(path, &EngineOptions { test, ..head_options(path, urls) })
}

/// Bits of a prompt's logits and of some steps of decode behind it.
pub fn answer(engine: &Arc<Engine>, tokens: &[u32], n_decode: usize) -> moeba::Result<Answer> {
    let mut session = engine.new_session()?;
    let mut logits = Vec::new();
    let (prompt, steps) = tokens.split_at(tokens.len() - n_decode);
    for part in [prompt].into_iter().chain(steps.chunks(1)) {
        session.eval_all(part, &mut |_, l| logits.extend(l.iter().map(|l| l.to_bits())))?;
    }
    Ok(Answer { logits, experts: Vec::new() })
}

/// The same with all experts in place, token by token.
pub fn expected(path: &Path, tokens: &[u32]) -> Answer {
    let options = EngineOptions { n_threads: Some(2), io: IoKind::Mmap, ..Default::default() };
    let engine = Engine::load(path, &options, &mut |_| ()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(engine.plan().place, Place::InPlace);
    let Answer { logits, .. } = ask(&engine, tokens, 1).unwrap();
    Answer { logits, experts: Vec::new() }
}

/// `moeba experts` in a process of its own, until it is dropped.
pub struct PeerProcess {
    pub child: Child,
    pub url: String,
    _folder: tempfile::TempDir,
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The command line of a peer, behind `before`, which may lead into a namespace.
pub fn peer_process(before: &[&str], model: &Path, args: &[&str]) -> PeerProcess {
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("url");
    let mut line: Vec<PathBuf> = before.iter().map(PathBuf::from).collect();
    line.extend([common::program(), "experts".into(), model.into()]);
    let mut command = Command::new(&line[0]);
    command.args(&line[1..]).args(["-t", "1", "--api-key", KEY, "--ready-file"]).arg(&ready);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while !ready.exists() {
        if let Some(status) = child.try_wait().unwrap() {
            let mut text = String::new();
            child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
            panic!("the peer has ended with {status}: {text}");
        }
        assert!(Instant::now() < end, "the peer does not start");
        std::thread::sleep(Duration::from_millis(10));
    }
    // A pipe that is not read would fill.
    let mut stderr = child.stderr.take().unwrap();
    std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
    let url = std::fs::read_to_string(&ready).unwrap().trim().to_owned();
    PeerProcess { child, url, _folder: folder }
}

/// Sends a signal to a process of ours.
pub fn signal(child: &Child, signal: i32) {
    // SAFETY: a system call without pointers.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}
