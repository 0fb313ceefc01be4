//! The speed of a link: random aligned reads of a model's own file through the very link that
//! streams its experts. A rate to compare with needs the same request size and depth.

use crate::experts::DIRECT_ALIGN;
use crate::experts::disk::link::open_with_depth;
use crate::experts::disk::{Files, IoKind, Read, ReadSource};
use crate::experts::memory::Region;
use crate::{Error, Result};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The kind of reads to measure.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    pub kind: IoKind,
    /// A multiple of `DIRECT_ALIGN`.
    pub read_bytes: usize,
    pub depth: usize,
    pub time: Duration,
    /// The seed of the offsets.
    pub seed: u64,
}

/// The bytes read and the time.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    pub bytes: u64,
    pub seconds: f64,
}

impl Rate {
    /// 10⁹ bytes a second.
    pub fn gb_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e9
    }
}

/// Reads for as long as asked and then until the last read has ended.
pub fn probe(files: Files, ask: &Probe) -> Result<Rate> {
    assert!(ask.read_bytes.is_multiple_of(DIRECT_ALIGN) && ask.read_bytes > 0, "{ask:?}");
    let shards = shards_by_reads(&files, ask.read_bytes)?;
    // A link hands over reads while as many others are on their way.
    let n_buffers = 2 * ask.depth;
    let memory = Region::new(n_buffers * ask.read_bytes)
        .map_err(|e| Error::invalid(format!("cannot allocate memory to measure the disk: {e}")))?;
    let free = (0..n_buffers as u32).collect();
    let state = State { free, seed: ask.seed, closed: false, bytes: 0, failure: None };
    let source = Arc::new(Source {
        shards,
        read_bytes: ask.read_bytes,
        memory,
        state: Mutex::new(state),
        changed: Condvar::new(),
    });
    let link = open_with_depth(ask.kind, ask.depth, files, None, source.clone())?;
    let start = Instant::now();
    source.wait(start + ask.time);
    drop(link);
    let seconds = start.elapsed().as_secs_f64();
    let mut state = source.lock();
    match state.failure.take() {
        Some(e) => Err(Error::invalid(e.to_string())),
        None => Ok(Rate { bytes: state.bytes, seconds }),
    }
}

/// For each shard that has room for one, how many reads fit from its start.
fn shards_by_reads(files: &Files, read_bytes: usize) -> Result<Vec<(usize, u64)>> {
    let mut out = Vec::new();
    for shard in 0..files.len() {
        let n_bytes = files.n_bytes(shard).map_err(|e| Error::io(files.path(shard), e))?;
        // Whole reads at any aligned offset.
        if let Some(last) = n_bytes.checked_sub(read_bytes as u64) {
            out.push((shard, last / DIRECT_ALIGN as u64 + 1));
        }
    }
    if out.is_empty() {
        let why = format!("the model's files are smaller than one read of {read_bytes} bytes");
        return Err(Error::invalid(why));
    }
    Ok(out)
}

struct Source {
    /// Shards with their numbers of offsets.
    shards: Vec<(usize, u64)>,
    read_bytes: usize,
    memory: Region,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Buffers, by number, that no read is on its way to.
    free: Vec<u32>,
    seed: u64,
    closed: bool,
    bytes: u64,
    failure: Option<io::Error>,
}

impl State {
    /// Steele, Lea and Flood's splitmix64.
    fn random(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Source {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until the time is over or a read has failed; then no more reads start.
    fn wait(&self, end: Instant) {
        let mut state = self.lock();
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            if state.failure.is_some() || left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.closed = true;
        drop(state);
        self.changed.notify_all();
    }

    fn random_read(&self, state: &mut State, buffer: u32) -> Read {
        let total: u64 = self.shards.iter().map(|(_, n_offsets)| n_offsets).sum();
        let mut at = state.random() % total;
        let shard = self.shards.iter().find(|(_, n_offsets)| {
            let here = at < *n_offsets;
            at -= if here { 0 } else { *n_offsets };
            here
        });
        Read {
            id: buffer,
            shard: shard.expect("less than their sum").0,
            offset: at * DIRECT_ALIGN as u64,
            len: self.read_bytes,
            need: self.read_bytes,
            dest: self.memory.ptr().wrapping_add(buffer as usize * self.read_bytes),
            node: None,
        }
    }
}

// SAFETY: each read has a buffer of its own in `memory`, from `next` to `complete`, which nothing
// else looks at; the source outlives the link that reads into it.
unsafe impl ReadSource for Source {
    fn next(&self, max: usize, wait: bool, out: &mut Vec<Read>) -> bool {
        let mut state = self.lock();
        while wait && state.free.is_empty() && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        for _ in 0..max {
            let Some(buffer) = state.free.pop().filter(|_| !state.closed) else { break };
            let read = self.random_read(&mut state, buffer);
            out.push(read);
        }
        !state.closed
    }

    fn complete(&self, read: Read, result: io::Result<()>) {
        let mut state = self.lock();
        state.free.push(read.id);
        match result {
            Ok(()) => state.bytes += read.len as u64,
            Err(e) => state.failure = Some(e),
        }
        let failed = state.failure.is_some();
        drop(state);
        // Its own waiters find a free buffer at all times: there are two for each read. The one
        // that waits for the time to be over wants to hear of failures alone.
        if failed {
            self.changed.notify_all();
        }
    }
}
