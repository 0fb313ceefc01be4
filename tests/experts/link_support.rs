//! A file whose bytes say where they are, a source that checks them, and faults to inject.

use moeba::experts::disk::link::open_with_depth;
use moeba::experts::disk::{Faults, Files, IoKind, Link, Read, ReadSource};
use moeba::experts::memory::Region;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use tempfile::NamedTempFile;

/// `Auto` is io_uring where there is one: the tests pass where there is none.
pub const KINDS: [IoKind; 2] = [IoKind::Auto, IoKind::Pread];

const PAGE: usize = 4096;
/// Each read has a buffer of its own, by its id.
const BUFFER: usize = 64 * PAGE;
const N_BUFFERS: usize = 512;

/// The test file's byte at an offset.
fn byte(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

pub fn temp_file(dir: Option<&Path>, n_bytes: usize) -> io::Result<NamedTempFile> {
    let mut file = match dir {
        Some(dir) => NamedTempFile::new_in(dir)?,
        None => NamedTempFile::new()?,
    };
    file.write_all(&(0..n_bytes as u64).map(byte).collect::<Vec<_>>())?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// The fault of each read, some times.
#[derive(Clone, Copy, Debug)]
pub enum Bad {
    Eio,
    Eintr,
    Eagain,
    /// A part of what came, of uneven length.
    Short,
}

type Delay = fn(u32) -> Duration;

#[derive(Debug)]
struct Injector {
    bad: Option<(Bad, u32)>,
    delay: Option<Delay>,
    /// Calls so far, by read.
    calls: Mutex<HashMap<u32, u32>>,
}

impl Faults for Injector {
    fn before(&self, read: &Read) -> Duration {
        self.delay.map(|delay| delay(read.id)).unwrap_or_default()
    }

    fn after(&self, read: &Read, result: io::Result<usize>) -> io::Result<usize> {
        let Some((bad, times)) = self.bad else { return result };
        let mut calls = self.calls.lock().unwrap();
        let calls = calls.entry(read.id).or_default();
        *calls += 1;
        if *calls > times {
            return result;
        }
        // Linux's numbers, as a failing disk gives them.
        match bad {
            Bad::Eio => Err(io::Error::from_raw_os_error(5)),
            Bad::Eintr => Err(io::Error::from_raw_os_error(4)),
            Bad::Eagain => Err(io::Error::from_raw_os_error(11)),
            Bad::Short => result.map(|n| (n / 3 + *calls as usize).min(n)),
        }
    }
}

/// The file behind a test: a temporary one, or one that the test keeps itself.
pub struct TestFile {
    temp: Option<NamedTempFile>,
    file: File,
    path: PathBuf,
}

impl TestFile {
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn as_file(&self) -> &File {
        self.temp.as_ref().map_or(&self.file, |temp| temp.as_file())
    }
}

pub struct Case {
    pub file: TestFile,
    n_bytes: usize,
    pub memory: Arc<Region>,
    bad: Option<(Bad, u32)>,
    delay: Option<Delay>,
    /// Reads through the page cache, as where direct ones are refused.
    pub cached: bool,
}

impl Case {
    pub fn new(n_bytes: usize) -> Case {
        let temp = temp_file(None, n_bytes).unwrap();
        let mut case = Case::of(temp.reopen().unwrap(), temp.path(), n_bytes);
        case.file.temp = Some(temp);
        case
    }

    pub fn of(file: File, path: &Path, n_bytes: usize) -> Case {
        let memory = Arc::new(Region::new(N_BUFFERS * BUFFER).unwrap());
        let file = TestFile { temp: None, file, path: path.to_owned() };
        Case { file, n_bytes, memory, bad: None, delay: None, cached: false }
    }

    /// The first `times` calls of every read go wrong.
    pub fn with_fault(self, bad: Bad, times: u32) -> Case {
        Case { bad: Some((bad, times)), ..self }
    }

    pub fn with_delay(self, delay: Delay) -> Case {
        Case { delay: Some(delay), ..self }
    }

    pub fn files(&self) -> Files {
        let file = [(self.file.path(), &self.file.file)];
        if self.cached { Files::through_cache(file) } else { Files::of(file) }.unwrap()
    }

    pub fn read(&self, id: u32, offset: usize, len: usize, need: usize) -> Read {
        assert!((id as usize) < N_BUFFERS && len <= BUFFER);
        let dest = self.memory.ptr().wrapping_add(id as usize * BUFFER);
        Read { id, shard: 0, offset: offset as u64, len, need, dest, node: None }
    }

    /// Reads 0..n of random pages; those at the file's end need less than they ask for.
    pub fn random_reads(&self, n: u32, seed: u64) -> Vec<Read> {
        let mut state = seed;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            (state >> 33) as usize % below
        };
        let n_pages = self.n_bytes.div_ceil(PAGE);
        let read = |id| {
            let at = random(n_pages) * PAGE;
            let len = (1 + random(BUFFER / PAGE)) * PAGE;
            let there = len.min(self.n_bytes - at);
            self.read(id, at, len, there - random(there.min(PAGE)))
        };
        (0..n).map(read).collect()
    }

    pub fn source(&self, reads: Vec<Read>) -> Arc<Source> {
        let state = State { queue: reads.into(), ..State::default() };
        let memory = self.memory.clone();
        Arc::new(Source { memory, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Opens a link, lets it do all of the source's reads, and closes it.
    pub fn serve(&self, kind: IoKind, depth: usize, source: &Arc<Source>) {
        let link = self.open(kind, depth, source.clone());
        link.wake();
        source.wait_all();
        source.close(link);
    }

    pub fn open(&self, kind: IoKind, depth: usize, source: Arc<Source>) -> Box<dyn Link> {
        let files = self.files();
        let faults = (self.bad.is_some() || self.delay.is_some()).then(|| {
            let (bad, delay) = (self.bad, self.delay);
            Arc::new(Injector { bad, delay, calls: Mutex::default() }) as Arc<dyn Faults>
        });
        let link = open_with_depth(kind, depth, files, faults, source).unwrap();
        assert_eq!(link.depth(), depth);
        link
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<Read>,
    closed: bool,
    n_out: usize,
    max_out: usize,
    n_handed_out: usize,
    /// By id; the bytes were compared when it ended.
    results: HashMap<u32, io::Result<()>>,
    /// Ids in the order of their ends.
    order: Vec<u32>,
    wrong: Vec<String>,
    panics: bool,
}

pub struct Source {
    /// The reads' buffers.
    memory: Arc<Region>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Source {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn add(&self, reads: Vec<Read>) {
        let mut state = self.lock();
        reads.iter().for_each(|read| drop(state.results.remove(&read.id)));
        state.queue.extend(reads);
        self.changed.notify_all();
    }

    /// A lost wake-up shows as a failed test, not as one that never ends.
    fn wait_until(&self, done: impl Fn(&State) -> bool) {
        let limit = Duration::from_secs(30);
        let waited = self.changed.wait_timeout_while(self.lock(), limit, |state| !done(state));
        let (mut state, waited) = waited.unwrap();
        if waited.timed_out() {
            // Otherwise dropping the link waits for a source that is never closed.
            state.closed = true;
            drop(state);
            self.changed.notify_all();
            panic!("the link has stopped");
        }
    }

    pub fn wait_all(&self) {
        self.wait_until(|state| state.queue.is_empty() && state.n_out == 0);
    }

    pub fn wait_for(&self, id: u32) {
        self.wait_until(|state| state.results.contains_key(&id));
    }

    pub fn close(&self, link: Box<dyn Link>) {
        self.lock().closed = true;
        self.changed.notify_all();
        drop(link);
    }

    pub fn panic_at_the_end(&self) {
        self.lock().panics = true;
    }

    pub fn result(&self, id: u32) -> io::Result<()> {
        self.lock().results.remove(&id).expect("the read has ended")
    }

    pub fn order(&self) -> Vec<u32> {
        self.lock().order.clone()
    }

    pub fn max_out(&self) -> usize {
        self.lock().max_out
    }

    pub fn n_handed_out(&self) -> usize {
        self.lock().n_handed_out
    }

    pub fn expect_all_right(&self) {
        let state = self.lock();
        assert!(state.wrong.is_empty(), "{:?}", &state.wrong[..state.wrong.len().min(5)]);
    }

    /// The fault of an ended read, if any; and forgets its bytes.
    fn check(&self, read: &Read, result: &io::Result<()>) -> Option<String> {
        if let Err(e) = result {
            return Some(e.to_string());
        }
        // SAFETY: the read's buffer is ours again, and no other read uses it meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts_mut(read.dest, read.need) };
        let at = (0..read.need).find(|&i| bytes[i] != byte(read.offset + i as u64));
        bytes.fill(0);
        at.map(|at| format!("{read:?}: byte {at} is wrong"))
    }
}

// SAFETY: every read has a buffer of its own in `memory`, which lives as long as this. Reads with
// the same id follow one another.
unsafe impl ReadSource for Source {
    fn next(&self, max: usize, wait: bool, out: &mut Vec<Read>) -> bool {
        let mut state = self.lock();
        assert!(max > 0 && !self.memory.is_empty());
        while wait && state.queue.is_empty() && !state.closed {
            state = self.changed.wait(state).unwrap();
        }
        if state.closed {
            return false;
        }
        let n = max.min(state.queue.len());
        let empty_handed = n == 0;
        out.extend(state.queue.drain(..n));
        state.n_out += n;
        state.n_handed_out += n;
        state.max_out = state.max_out.max(state.n_out);
        drop(state);
        if empty_handed {
            // Widens the gap in which a wake-up could be lost: after the answer, before the sleep.
            std::thread::sleep(Duration::from_micros(20));
        }
        true
    }

    fn complete(&self, read: Read, result: io::Result<()>) {
        let wrong = self.check(&read, &result);
        let mut state = self.lock();
        assert!(!state.panics, "the test's panic");
        state.wrong.extend(wrong);
        state.order.push(read.id);
        state.results.insert(read.id, result);
        state.n_out -= 1;
        self.changed.notify_all();
    }
}
