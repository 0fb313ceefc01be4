//! One peer: a thread that asks it one request after the other, and what is known of it. A peer
//! that fails is asked again what it is, until it answers as it should.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use ureq::Agent;

use super::costs::{self, Mean};
use super::facts::{Facts, Greeting};
use super::wire;
use crate::{Error, Result};

/// A request on its way to a peer.
pub struct PeerJob {
    pub ticket: u64,
    pub body: Vec<u8>,
    pub n_pairs: usize,
    pub n_embd: usize,
    /// Units of its work, for the mean of its kind.
    pub units: usize,
    pub is_prompt: bool,
    pub replies: Sender<Reply>,
}

/// The end of a request: a checked answer, or none.
pub struct Reply {
    pub ticket: u64,
    pub body: Option<Vec<u8>>,
}

/// A peer as its head sees it.
pub struct Link {
    pub shared: Arc<Shared>,
    jobs: Sender<PeerJob>,
}

/// The state that a peer's thread and the layer loop share.
pub struct Shared {
    pub url: String,
    token: Option<String>,
    facts: Arc<Facts>,
    /// Whether it answers as it should.
    is_up: AtomicBool,
    /// A request has been given up that it has not answered yet.
    is_late: AtomicBool,
    /// Bytes of its memory for experts.
    memory: AtomicU64,
    n_open: AtomicUsize,
    /// Times of an expert of a decode step, and of a pair of a prompt.
    decode: Mean,
    prompt: Mean,
    /// Changes with the peers that can be asked.
    generation: Arc<AtomicU64>,
}

/// Why a peer cannot be asked.
enum Trouble {
    /// The peer may answer later.
    Away(String),
    /// The peer is the wrong one, or does not let this machine in.
    Refused(String),
}

impl Trouble {
    fn text(&self) -> &str {
        let (Trouble::Away(why) | Trouble::Refused(why)) = self;
        why
    }
}

/// Times between two attempts to reach a peer.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LAST_WAIT: Duration = Duration::from_secs(10);
/// A peer must say what it is within this time.
const GREETING_TIME: Duration = Duration::from_secs(5);

impl Link {
    /// Asks the peer what it is, and starts its thread. An error if it is the wrong one.
    pub fn open(
        url: &str,
        token: Option<String>,
        facts: Arc<Facts>,
        generation: Arc<AtomicU64>,
    ) -> Result<Link> {
        let shared = Arc::new(Shared {
            url: url.to_owned(),
            token,
            facts,
            is_up: AtomicBool::new(false),
            is_late: AtomicBool::new(false),
            memory: AtomicU64::new(0),
            n_open: AtomicUsize::new(0),
            decode: Mean::default(),
            prompt: Mean::default(),
            generation,
        });
        let agent = agent();
        match shared.greet(&agent) {
            Ok(memory) => shared.rise(memory),
            Err(Trouble::Refused(why)) => return Err(Error::Invalid(why)),
            Err(Trouble::Away(why)) => {
                log::warn!("{why}: its experts are computed here until it answers");
            }
        }
        let (jobs, queue) = channel();
        let of_thread = shared.clone();
        let name = "peer".to_owned();
        let thread = std::thread::Builder::new().name(name);
        let started = thread.spawn(move || of_thread.run(&agent, &queue));
        started.map_err(|e| Error::invalid(format!("{url}: no thread for this peer: {e}")))?;
        Ok(Link { shared, jobs })
    }

    /// Queues a request; false if its thread has ended.
    pub fn ask(&self, job: PeerJob) -> bool {
        self.shared.n_open.fetch_add(1, Ordering::SeqCst);
        self.jobs.send(job).is_ok()
    }
}

/// Connections of one peer. It is asked directly, whatever proxy is set for the world.
fn agent() -> Agent {
    Agent::config_builder()
        .user_agent(concat!("moeba/", env!("CARGO_PKG_VERSION")))
        .proxy(None)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        .timeout_connect(Some(GREETING_TIME))
        .max_idle_age(Duration::from_secs(600))
        .build()
        .new_agent()
}

impl Shared {
    /// Bytes of memory of a peer that can be asked now; 0 of one that cannot.
    pub fn share(&self) -> u64 {
        let can = self.is_up.load(Ordering::SeqCst) && !self.is_late.load(Ordering::SeqCst);
        if can { self.memory.load(Ordering::SeqCst) } else { 0 }
    }

    /// Nanoseconds of a unit of work.
    pub fn mean_ns(&self, is_prompt: bool) -> f64 {
        if is_prompt { self.prompt.ns() } else { self.decode.ns() }
    }

    /// When a request that is asked now is given up.
    pub fn deadline(&self, units: usize, is_prompt: bool) -> Instant {
        let before = self.n_open.load(Ordering::SeqCst) as u32;
        let patience = costs::patience(self.mean_ns(is_prompt), units);
        Instant::now() + (patience * (before + 1)).min(costs::MOST)
    }

    /// A request was given up: no other is sent before it is answered.
    pub fn set_late(&self) {
        if !self.is_late.swap(true, Ordering::SeqCst) {
            log::warn!("{} is late: its experts are computed here until it answers", self.url);
            self.generation.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Notes that the peer has answered, late or not.
    fn answered(&self) {
        if self.is_late.swap(false, Ordering::SeqCst) {
            log::info!("{} answers again", self.url);
            self.generation.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn rise(&self, memory: u64) {
        self.memory.store(memory, Ordering::SeqCst);
        self.is_late.store(false, Ordering::SeqCst);
        self.is_up.store(true, Ordering::SeqCst);
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    fn fall(&self, why: &str) {
        self.is_up.store(false, Ordering::SeqCst);
        self.generation.fetch_add(1, Ordering::SeqCst);
        log::warn!("{why}: its experts are computed here until it answers");
    }

    /// Asks until the head ends.
    fn run(&self, agent: &Agent, queue: &Receiver<PeerJob>) {
        let mut wait = FIRST_WAIT;
        loop {
            if self.is_up.load(Ordering::SeqCst) {
                let Ok(job) = queue.recv() else { return };
                self.serve(agent, job);
                wait = FIRST_WAIT;
                continue;
            }
            match queue.recv_timeout(wait) {
                Ok(job) => self.reply(&job, None),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    match self.greet(agent) {
                        Ok(memory) => {
                            log::info!("{} answers again", self.url);
                            self.rise(memory);
                        }
                        Err(why) => log::debug!("{}", why.text()),
                    }
                    wait = (2 * wait).min(LAST_WAIT);
                }
            }
        }
    }

    fn serve(&self, agent: &Agent, job: PeerJob) {
        let start = Instant::now();
        let body = match self.post(agent, &job) {
            Ok(body) => {
                let mean = if job.is_prompt { &self.prompt } else { &self.decode };
                mean.add(start.elapsed(), job.units);
                self.answered();
                Some(body)
            }
            Err(why) => {
                self.fall(&why);
                None
            }
        };
        self.reply(&job, body);
    }

    /// Whoever asked may have given up.
    fn reply(&self, job: &PeerJob, body: Option<Vec<u8>>) {
        self.n_open.fetch_sub(1, Ordering::SeqCst);
        let _ = job.replies.send(Reply { ticket: job.ticket, body });
    }

    /// The checked answer to a request, or a sentence's first half.
    fn post(&self, agent: &Agent, job: &PeerJob) -> std::result::Result<Vec<u8>, String> {
        let url = &self.url;
        let mut request = agent.post(format!("{url}{EXPERTS}"));
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let request = request.header("Content-Type", "application/octet-stream");
        let request = request.config().timeout_global(Some(costs::MOST)).build();
        let response = request.send(&job.body[..]).map_err(|e| format!("{url}: {e}"))?;
        let status = response.status().as_u16();
        let most = wire::answer_bytes(job.n_pairs, job.n_embd) as u64;
        let limit = if status == 200 { most + 1 } else { MOST_OF_ERROR };
        let body = response.into_body().into_with_config().limit(limit).read_to_vec();
        let body = body.map_err(|e| format!("{url}: its answer did not come whole: {e}"))?;
        if status != 200 {
            return Err(refusal(url, status, &body));
        }
        match wire::read_answer(&body, job.n_pairs, job.n_embd) {
            Ok(_) => Ok(body),
            Err(why) => Err(format!("{url}: its answer {why}")),
        }
    }

    /// The memory of a peer that is the right one.
    fn greet(&self, agent: &Agent) -> std::result::Result<u64, Trouble> {
        let url = &self.url;
        let away = |why: String| Trouble::Away(format!("{url}: {why}"));
        let mut request = agent.get(format!("{url}{GREETING}"));
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let request = request.config().timeout_global(Some(GREETING_TIME)).build();
        let response = request.call().map_err(|e| away(e.to_string()))?;
        let status = response.status().as_u16();
        let body = response.into_body().into_with_config().limit(MOST_OF_ERROR).read_to_vec();
        let body = body.map_err(|e| away(e.to_string()))?;
        match status {
            200 => {}
            // It is being loaded, or has too much to do.
            408 | 429 | 500.. if status != 501 => {
                return Err(Trouble::Away(refusal(url, status, &body)));
            }
            _ => return Err(Trouble::Refused(refusal(url, status, &body))),
        }
        let greeting: Greeting = serde_json::from_slice(&body)
            .map_err(|_| Trouble::Refused(format!("{url}: this is no peer of moeba's")))?;
        match self.facts.difference(&greeting.facts) {
            Some(what) => Err(Trouble::Refused(format!("{url}: this peer has {what}"))),
            None => Ok(greeting.memory),
        }
    }
}

/// Routes of a peer.
pub const GREETING: &str = "/moeba/peer";
pub const EXPERTS: &str = "/moeba/peer/experts";

/// Bytes that are read of an answer that is none.
const MOST_OF_ERROR: u64 = 64 << 10;

/// The sentence about a peer that answers with another status.
fn refusal(url: &str, status: u16, body: &[u8]) -> String {
    let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    match body.pointer("/error/message").and_then(serde_json::Value::as_str) {
        Some(why) => {
            let why: String = why.chars().filter(|c| !c.is_control()).take(500).collect();
            format!("{url}: the peer says: {why}")
        }
        None => format!("{url}: the peer answers with status {status}"),
    }
}
