//! Peers: other machines that compute experts. A peer is a pure function from experts and rows of
//! activations to a row for each pair; it keeps no text and no state but its tier. The head deals
//! experts to peers by their memory, and can always do without one: what a peer does not answer in
//! time is loaded and computed here, to the same bits.

mod costs;
mod counters;
mod facts;
mod link;
mod owners;
mod wire;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::cancel::Cancel;
use crate::policy::{Expert, mix};
use crate::{Error, Result};
use costs::Mean;
pub use counters::PeerCounters;
use counters::{Counts, add};
pub use facts::{Facts, Greeting};
pub use link::{EXPERTS, GREETING};
use link::{Link, PeerJob, Reply};
use owners::{HEAD, Owners, Share};
pub use wire::{Group, MAX_ANSWER_BYTES, MAX_REQUEST_BYTES, ModelKey, Request};
pub use wire::{answer, answer_bytes};

/// The peers that a head is to ask.
#[derive(Clone, Default)]
pub struct PeerOptions {
    /// Their addresses, as `http://10.0.0.2:8080`.
    pub urls: Vec<String>,
    /// The key that they ask for.
    pub token: Option<String>,
}

impl std::fmt::Debug for PeerOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerOptions").field("urls", &self.urls).finish_non_exhaustive()
    }
}

/// A head's peers.
pub struct Peers {
    key: ModelKey,
    n_experts: Vec<usize>,
    /// The head's own share comes first.
    head: Share,
    links: Vec<Link>,
    owners: RwLock<Dealt>,
    /// Changes with the peers that can be asked.
    generation: Arc<AtomicU64>,
    /// The time that an expert takes that is read here.
    own: [Mean; 2],
    next_ticket: AtomicU64,
    /// Requests that were not worth it; every so many one is sent all the same.
    n_skipped: AtomicU32,
    counts: Counts,
}

/// Owners, and the generation that they were dealt for.
#[derive(Default)]
struct Dealt {
    owners: Owners,
    generation: u64,
}

/// One of so many requests that are not worth it is sent: peers may have become faster.
const TRIES: u32 = 32;

/// Bytes of an answer beyond which experts are asked for in several requests.
const PART_BYTES: usize = 8 << 20;

/// A layer as it is dealt.
pub struct Layer<'a> {
    pub index: usize,
    pub n_embd: usize,
    /// Whether all rows are of prompts.
    pub is_prompt: bool,
    /// Whether an expert is in memory here.
    pub is_here: &'a dyn Fn(Expert) -> bool,
    /// The number of an expert's pairs.
    pub n_pairs: &'a dyn Fn(u32) -> usize,
}

impl Layer<'_> {
    /// One of its experts.
    pub fn id(&self, expert: u32) -> Expert {
        Expert { layer: self.index as u32, expert }
    }
}

/// One layer's experts that peers compute; reused from layer to layer.
#[derive(Default)]
pub struct Remote {
    parts: Vec<PeerShare>,
    channel: Option<(Sender<Reply>, Receiver<Reply>)>,
}

/// Experts that one peer is asked for in one request.
pub struct PeerShare {
    pub experts: Vec<u32>,
    pub n_pairs: usize,
    n_embd: usize,
    is_prompt: bool,
    peer: usize,
    ticket: u64,
    deadline: Instant,
}

impl Remote {
    /// Parts that were dealt and are not answered yet.
    pub fn parts(&self) -> &[PeerShare] {
        &self.parts
    }

    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }
}

impl PeerShare {
    fn units(&self) -> usize {
        if self.is_prompt { self.n_pairs } else { self.experts.len() }
    }
}

/// The end of a part.
pub enum Answered {
    /// A row of f32 for each pair, as bytes.
    Rows(PeerShare, PeerAnswer),
    /// The experts are to be computed here.
    Lost(PeerShare),
}

/// An answer whose checksum and sizes are right.
pub struct PeerAnswer(Vec<u8>);

impl PeerAnswer {
    /// The rows, expert by expert.
    pub fn rows(&self, part: &PeerShare) -> &[u8] {
        let end = self.0.len() - 4;
        &self.0[end - 4 * part.n_pairs * part.n_embd..end]
    }
}

impl Peers {
    /// Asks all peers what they are. Those that do not answer are asked again later; one with
    /// another model or version, or that refuses the key, is an error. `own_memory`: bytes for
    /// experts here; `n_experts`: of each layer.
    pub fn connect(
        options: &PeerOptions,
        facts: Facts,
        own_memory: u64,
        n_experts: Vec<usize>,
    ) -> Result<Peers> {
        let key = facts.key();
        let (facts, generation) = (Arc::new(facts), Arc::new(AtomicU64::new(1)));
        let urls: Vec<&str> = options.urls.iter().map(|url| url.trim_end_matches('/')).collect();
        for (i, url) in urls.iter().enumerate() {
            if !url.starts_with("http://") && !url.starts_with("https://") {
                let why = format!("--peers: {url}: expected an address as http://HOST:PORT");
                return Err(Error::Usage(why));
            }
            if urls[..i].contains(url) {
                return Err(Error::Usage(format!("--peers: {url} is named twice")));
            }
        }
        let links = std::thread::scope(|scope| {
            let open = |url: &'_ &str| {
                let (url, token) = ((*url).to_owned(), options.token.clone());
                let (facts, generation) = (facts.clone(), generation.clone());
                scope.spawn(move || Link::open(&url, token, facts, generation))
            };
            let opening: Vec<_> = urls.iter().map(open).collect();
            let opened = opening.into_iter().map(|thread| match thread.join() {
                Ok(link) => link,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            opened.collect::<Result<Vec<Link>>>()
        })?;
        let peers = Peers {
            key,
            n_experts,
            head: Share { id: 0, memory: own_memory.max(1) },
            links,
            owners: RwLock::default(),
            generation,
            own: Default::default(),
            next_ticket: AtomicU64::new(1),
            n_skipped: AtomicU32::new(0),
            counts: Counts::default(),
        };
        peers.deal_out();
        Ok(peers)
    }

    pub fn key(&self) -> ModelKey {
        self.key
    }

    /// Peers that can be asked now, and all there are.
    pub fn count(&self) -> (usize, usize) {
        let up = self.links.iter().filter(|link| link.shared.share() > 0).count();
        (up, self.links.len())
    }

    /// Whether an expert is the head's own, as long as its peer can be asked.
    pub fn is_own(&self, expert: Expert) -> bool {
        self.dealt().owners.of(expert) == HEAD
    }

    fn dealt(&self) -> std::sync::RwLockReadGuard<'_, Dealt> {
        self.owners.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Deals experts to the peers that can be asked, if these are others than before.
    fn deal_out(&self) {
        let generation = self.generation.load(Ordering::SeqCst);
        if self.dealt().generation == generation {
            return;
        }
        let share = |link: &Link| {
            let id = link.shared.url.bytes().fold(0, |id, byte| mix(id ^ u64::from(byte)));
            Share { id, memory: link.shared.share() }
        };
        let shares: Vec<Share> =
            std::iter::once(self.head).chain(self.links.iter().map(share)).collect();
        let owners = Owners::new(&self.n_experts, &shares);
        *self.owners.write().unwrap_or_else(PoisonError::into_inner) = Dealt { owners, generation };
    }

    /// Takes those experts out of a layer's that peers are to compute, and makes parts of them.
    pub fn deal(&self, layer: &Layer<'_>, experts: &mut Vec<u32>, remote: &mut Remote) {
        remote.parts.clear();
        self.deal_out();
        let dealt = self.dealt();
        let peer_of = |expert: u32| match dealt.owners.of(layer.id(expert)) {
            HEAD => None,
            _ if (layer.is_here)(layer.id(expert)) => None,
            machine => Some(machine - 1),
        };
        let mut asked: Vec<(u32, usize)> =
            experts.iter().filter_map(|e| Some((*e, peer_of(*e)?))).collect();
        let is_worth = |peer: usize| {
            let of_peer = asked.iter().filter(|(_, p)| *p == peer).map(|(e, _)| *e);
            self.is_worth(peer, layer, of_peer)
        };
        let left: Vec<usize> = (0..self.links.len()).filter(|peer| !is_worth(*peer)).collect();
        asked.retain(|(_, peer)| !left.contains(peer));
        experts.retain(|expert| !asked.iter().any(|(e, _)| e == expert));
        for (expert, peer) in asked {
            let n_pairs = (layer.n_pairs)(expert);
            let room = PART_BYTES / (4 * layer.n_embd);
            let fits = |part: &&mut PeerShare| part.peer == peer && part.n_pairs + n_pairs <= room;
            match remote.parts.iter_mut().find(fits) {
                Some(part) => {
                    part.experts.push(expert);
                    part.n_pairs += n_pairs;
                }
                None => remote.parts.push(PeerShare {
                    experts: vec![expert],
                    n_pairs,
                    n_embd: layer.n_embd,
                    is_prompt: layer.is_prompt,
                    peer,
                    ticket: self.next_ticket.fetch_add(1, Ordering::Relaxed),
                    deadline: Instant::now(),
                }),
            }
        }
    }

    /// Whether a peer computes these experts faster than they can be read and computed here.
    fn is_worth(&self, peer: usize, layer: &Layer, experts: impl Iterator<Item = u32>) -> bool {
        let (mut n_experts, mut n_pairs) = (0, 0);
        for expert in experts {
            n_experts += 1;
            n_pairs += (layer.n_pairs)(expert);
        }
        if n_experts == 0 {
            return true;
        }
        let units = if layer.is_prompt { n_pairs } else { n_experts };
        let theirs = self.links[peer].shared.mean_ns(layer.is_prompt) * units as f64;
        let own = self.own[usize::from(layer.is_prompt)].ns() * n_experts as f64;
        costs::is_worth(theirs, own)
            || self.n_skipped.fetch_add(1, Ordering::Relaxed) % TRIES == TRIES - 1
    }

    /// Sends the request of a part; one that is too large is left to this machine.
    pub fn send(&self, remote: &mut Remote, index: usize, body: Vec<u8>) {
        let Remote { parts, channel: replies } = remote;
        let part = &mut parts[index];
        let (replies, _) = replies.get_or_insert_with(channel);
        let shared = &self.links[part.peer].shared;
        part.deadline = shared.deadline(part.units(), part.is_prompt);
        let (n_bytes, n_answer) = (body.len(), wire::answer_bytes(part.n_pairs, part.n_embd));
        add(&self.counts.experts, part.experts.len());
        add(&self.counts.pairs, part.n_pairs);
        let is_sent = n_bytes <= MAX_REQUEST_BYTES && n_answer <= MAX_ANSWER_BYTES && {
            add(&self.counts.requests, 1);
            add(&self.counts.sent_bytes, n_bytes);
            self.links[part.peer].ask(PeerJob {
                ticket: part.ticket,
                body,
                n_pairs: part.n_pairs,
                n_embd: part.n_embd,
                units: part.units(),
                is_prompt: part.is_prompt,
                replies: replies.clone(),
            })
        };
        if !is_sent {
            let _ = replies.send(Reply { ticket: part.ticket, body: None });
        }
    }

    /// Waits for the next part that a peer has computed, or that it will not: none when all have
    /// come. All parts have been sent. An error if the wait is cancelled.
    pub fn next(&self, remote: &mut Remote, cancel: &Cancel) -> Result<Option<Answered>> {
        let Remote { parts, channel } = remote;
        let Some((_, replies)) = channel else { return Ok(None) };
        let start = Instant::now();
        let answered = loop {
            let Some(first) = parts.iter().map(|part| part.deadline).min() else {
                return Ok(None);
            };
            let now = Instant::now();
            if let Some(at) = parts.iter().position(|part| part.deadline <= now) {
                // Its answer may wait to be taken.
                match replies.try_recv() {
                    Ok(reply) => match taken(parts, reply) {
                        Some(answered) => break answered,
                        None => continue,
                    },
                    Err(_) => {
                        let part = parts.swap_remove(at);
                        self.links[part.peer].shared.set_late();
                        break Answered::Lost(part);
                    }
                }
            }
            match replies.recv_timeout((first - now).min(CANCEL_TIME)) {
                // Others are of layers that have been left.
                Ok(reply) => match taken(parts, reply) {
                    Some(answered) => break answered,
                    None => continue,
                },
                Err(RecvTimeoutError::Timeout) if cancel.is_cancelled() => {
                    return Err(Error::Interrupted);
                }
                Err(_) => {}
            }
        };
        add(&self.counts.wait_ns, start.elapsed().as_nanos() as usize);
        match &answered {
            Answered::Rows(_, answer) => add(&self.counts.received_bytes, answer.0.len()),
            Answered::Lost(part) => add(&self.counts.lost, part.experts.len()),
        }
        Ok(Some(answered))
    }

    /// A pass has waited so long for `n` experts that were read here.
    pub fn observe_own(&self, n: usize, stall_ns: u64, is_prompt: bool) {
        if n > 0 {
            self.own[usize::from(is_prompt)].add(Duration::from_nanos(stall_ns), n);
        }
    }

    pub fn counters(&self) -> PeerCounters {
        self.counts.now()
    }
}

/// A wait sees within this time that it is cancelled.
const CANCEL_TIME: Duration = Duration::from_millis(50);

/// The part that a reply is for.
fn taken(parts: &mut Vec<PeerShare>, reply: Reply) -> Option<Answered> {
    let at = parts.iter().position(|part| part.ticket == reply.ticket)?;
    let part = parts.swap_remove(at);
    Some(match reply.body {
        Some(body) => Answered::Rows(part, PeerAnswer(body)),
        None => Answered::Lost(part),
    })
}
