//! The entries of the folder, and the thread that writes them.

use std::collections::{HashMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, OFlags, fadvise};

use super::folder::{KvFolder, UNFINISHED};
use super::format::{self, EntryId, HEADER_BYTES};
use super::index::{Index, Moment, time_of};
use crate::{Error, Result, error};

/// Bytes in memory that wait to be written. A single entry may be larger.
const QUEUE_BYTES: usize = 64 << 20;

/// Bytes between two looks at whether experts are read.
const BLOCK_BYTES: usize = 1 << 20;

/// How long a block waits at most for reads of experts to end: it is written between them, or in
/// the end beside them.
const BLOCK_WAIT: Duration = Duration::from_millis(100);

/// The bytes of an entry.
#[derive(Clone, Debug)]
pub enum Payload {
    Bytes(Vec<u8>),
    /// Little-endian.
    Values(Arc<Vec<f32>>),
}

impl Payload {
    pub fn len(&self) -> usize {
        match self {
            Payload::Bytes(bytes) => bytes.len(),
            Payload::Values(values) => size_of_val(&values[..]),
        }
    }

    /// Calls `take` with the bytes, block by block.
    fn blocks(&self, take: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        match self {
            Payload::Bytes(bytes) => bytes.chunks(BLOCK_BYTES).try_for_each(take),
            Payload::Values(values) => values.chunks(BLOCK_BYTES / 4).try_for_each(|values| {
                take(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
            }),
        }
    }
}

/// Counts since the start, and what there is.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskCounts {
    pub n_entries: usize,
    pub n_bytes: u64,
    /// Entries that were read, and that were asked for and not whole.
    pub n_hits: u64,
    pub n_damaged: u64,
    pub n_written: u64,
    /// Entries that made room for others.
    pub n_evicted: u64,
}

/// The entries of a folder. Dropping it writes what waits.
pub struct KvDisk {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    folder: KvFolder,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether somebody reads who must not wait.
    is_reading: Box<dyn Fn() -> bool + Send + Sync>,
    /// The thread ends once it has written all that waits.
    is_over: AtomicBool,
}

#[derive(Default)]
struct State {
    index: Index,
    queue: VecDeque<Waiting>,
    /// Entries of the queue, and the one that is being written, with their bytes.
    waiting: HashMap<EntryId, usize>,
    waiting_bytes: usize,
    /// Times of use that the files do not have yet.
    touched: HashMap<EntryId, Moment>,
    counts: DiskCounts,
    /// The last file could not be written.
    has_failed: bool,
}

struct Waiting {
    id: EntryId,
    payload: Payload,
    last_used: Moment,
}

impl KvDisk {
    /// Starts the thread. While `is_reading` says so it rests.
    pub fn start(
        mut folder: KvFolder,
        is_reading: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<KvDisk> {
        let index = folder.take_index();
        let shared = Arc::new(Shared {
            folder,
            state: Mutex::new(State { index, ..State::default() }),
            changed: Condvar::new(),
            is_reading: Box::new(is_reading),
            is_over: AtomicBool::new(false),
        });
        shared.make_room(0);
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("moeba-kv-disk".into());
        let thread = thread.spawn(move || of_thread.run());
        let thread = thread.map_err(|e| Error::invalid(format!("cannot start a thread: {e}")))?;
        Ok(KvDisk { shared, thread: Some(thread) })
    }

    /// Whether an entry can be read.
    pub fn has(&self, id: &EntryId) -> bool {
        self.shared.lock().index.has(id)
    }

    /// Whether an entry can be read, or will be.
    pub fn will_have(&self, id: &EntryId) -> bool {
        let state = self.shared.lock();
        state.index.has(id) || state.waiting.contains_key(id)
    }

    /// An entry's bytes. One that is damaged is removed, and was never there.
    pub fn read(&self, id: &EntryId, n_bytes: usize) -> Option<Vec<u8>> {
        if !self.has(id) {
            return None;
        }
        let path = self.shared.folder.file(id);
        let found = read(&path, id, n_bytes);
        let mut state = self.shared.lock();
        match found {
            Ok(bytes) => {
                state.counts.n_hits += 1;
                Some(bytes)
            }
            Err(why) => {
                state.counts.n_damaged += 1;
                state.index.remove(id);
                drop(state);
                log::warn!("{}: {why}: the text is computed again", path.display());
                let _ = fs::remove_file(&path);
                None
            }
        }
    }

    /// The number of entries of `n_bytes` that may be handed over now.
    pub fn n_room(&self, n_bytes: usize) -> usize {
        let waiting = self.shared.lock().waiting_bytes;
        let n = QUEUE_BYTES.saturating_sub(waiting) / n_bytes.max(1);
        if waiting == 0 { n.max(1) } else { n }
    }

    /// Waits until something that waited is written.
    pub fn wait(&self) {
        let state = self.shared.lock();
        let n = state.waiting.len();
        let is_same = |state: &mut State| n > 0 && state.waiting.len() == n;
        drop(self.shared.changed.wait_while(state, is_same));
    }

    /// A text's entries were used, `ids` from its beginning. Returns the time of the first one's
    /// use; each that follows has been used a little earlier.
    pub fn touch(&self, ids: &[EntryId]) -> Moment {
        let mut state = self.shared.lock();
        let last = state.index.moments(ids.len());
        for (moment, id) in (0..=last).rev().zip(ids) {
            if state.index.has(id) {
                state.index.touch(id, moment);
                state.touched.insert(*id, moment);
            }
        }
        self.shared.changed.notify_all();
        last
    }

    /// Writes an entry some time later, unless it is there.
    pub fn write(&self, id: EntryId, payload: Payload, last_used: Moment) {
        let n_bytes = payload.len();
        let mut state = self.shared.lock();
        let is_large = (n_bytes + HEADER_BYTES) as u64 > self.shared.folder.most_bytes();
        if is_large || state.index.has(&id) || state.waiting.contains_key(&id) {
            return;
        }
        state.waiting.insert(id, n_bytes);
        state.waiting_bytes += n_bytes;
        state.queue.push_back(Waiting { id, payload, last_used });
        self.shared.changed.notify_all();
    }

    pub fn counts(&self) -> DiskCounts {
        let state = self.shared.lock();
        let (n_entries, n_bytes) = (state.index.len(), state.index.n_bytes());
        DiskCounts { n_entries, n_bytes, ..state.counts }
    }
}

impl Drop for KvDisk {
    fn drop(&mut self) {
        // Under the lock, so that the thread does not miss it between a look and a wait.
        let state = self.shared.lock();
        self.shared.is_over.store(true, Ordering::Relaxed);
        drop(state);
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in it has been reported by then.
            let _ = thread.join();
        }
    }
}

fn read(path: &Path, id: &EntryId, n_bytes: usize) -> std::result::Result<Vec<u8>, String> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(OFlags::NOFOLLOW.bits() as i32);
    let file = options.open(path).map_err(|e| error::sentence(&e))?;
    let bytes = format::read(id, n_bytes, &mut BufReader::with_capacity(HEADER_BYTES, &file));
    // The session has them now: experts need the memory.
    let _ = fadvise(&file, 0, None, Advice::DontNeed);
    bytes
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Its users change one field after the other and panic nowhere between.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(next) = state.queue.pop_front() {
                drop(state);
                self.write(&next);
                state = self.lock();
                state.waiting_bytes -= state.waiting.remove(&next.id).unwrap_or(0);
                self.changed.notify_all();
            } else if !state.touched.is_empty() {
                let touched = std::mem::take(&mut state.touched);
                drop(state);
                touched.into_iter().for_each(|(id, moment)| self.set_time(&id, moment));
                state = self.lock();
            } else if self.is_over.load(Ordering::Relaxed) {
                return;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn write(&self, entry: &Waiting) {
        let n_bytes = (HEADER_BYTES + entry.payload.len()) as u64;
        self.make_room(n_bytes);
        let path = self.folder.file(&entry.id);
        let mut unfinished = path.clone().into_os_string();
        unfinished.push(UNFINISHED);
        let written = self.write_file(unfinished.as_ref(), entry);
        let written = written.and_then(|()| fs::rename(&unfinished, &path));
        let mut state = self.lock();
        match written {
            Ok(()) => {
                state.has_failed = false;
                state.counts.n_written += 1;
                state.index.insert(entry.id, n_bytes, entry.last_used);
            }
            Err(why) => {
                if !std::mem::replace(&mut state.has_failed, true) {
                    let (path, why) = (self.folder.path().display(), error::sentence(&why));
                    log::warn!("{path}: a text is not kept: {why}");
                }
                drop(state);
                let _ = fs::remove_file(&unfinished);
            }
        }
    }

    /// Writes to the disk, not to the memory that the system would have for it.
    fn write_file(&self, path: &Path, entry: &Waiting) -> io::Result<()> {
        let mut crc = crc32fast::Hasher::new();
        entry.payload.blocks(&mut |block| {
            crc.update(block);
            Ok(())
        })?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        options.custom_flags(OFlags::NOFOLLOW.bits() as i32);
        let mut file = options.open(path)?;
        file.write_all(&format::header(&entry.id, entry.payload.len() as u64, crc.finalize()))?;
        entry.payload.blocks(&mut |block| {
            self.rest();
            file.write_all(block)
        })?;
        self.rest();
        file.sync_data()?;
        let _ = fadvise(&file, 0, None, Advice::DontNeed);
        file.set_modified(time_of(entry.last_used))
    }

    /// Waits while experts are read, for a while.
    fn rest(&self) {
        let start = Instant::now();
        while !self.is_over.load(Ordering::Relaxed)
            && start.elapsed() < BLOCK_WAIT
            && (self.is_reading)()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Removes the files that were used least recently until `n_bytes` more fit.
    fn make_room(&self, n_bytes: u64) {
        let mut state = self.lock();
        while state.index.n_bytes() + n_bytes > self.folder.most_bytes() {
            let Some(oldest) = state.index.oldest() else { return };
            state.index.remove(&oldest);
            state.touched.remove(&oldest);
            state.counts.n_evicted += 1;
            drop(state);
            let _ = fs::remove_file(self.folder.file(&oldest));
            state = self.lock();
        }
    }

    fn set_time(&self, id: &EntryId, moment: Moment) {
        // It may have been removed.
        let Ok(file) = File::options().write(true).open(self.folder.file(id)) else { return };
        let _ = file.set_modified(time_of(moment));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(n: u8) -> EntryId {
        EntryId::page([n; 32])
    }

    fn start(path: &Path, most_bytes: u64) -> KvDisk {
        KvDisk::start(KvFolder::open(path, Some(most_bytes)).unwrap(), || false).unwrap()
    }

    fn keep(disk: &KvDisk, n: u8, n_bytes: usize) {
        let last_used = disk.touch(&[]);
        disk.write(page(n), Payload::Bytes(vec![n; n_bytes]), last_used + u64::from(n));
    }

    #[test]
    fn what_is_written_is_there_the_next_time() {
        let folder = tempfile::tempdir().unwrap();
        let disk = start(folder.path(), 1 << 20);
        keep(&disk, 1, 5000);
        let values = Arc::new(vec![1.5, -2.0, 3.25]);
        let states = EntryId::states([1; 32]);
        disk.write(states, Payload::Values(values.clone()), 0);
        assert!(disk.will_have(&page(1)) && disk.will_have(&states) && !disk.will_have(&page(2)));
        drop(disk);
        let disk = start(folder.path(), 1 << 20);
        assert_eq!(disk.read(&page(1), 5000), Some(vec![1; 5000]));
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(disk.read(&states, 12), Some(bytes));
        assert_eq!(disk.read(&page(2), 5000), None);
        let counts = disk.counts();
        assert_eq!((counts.n_hits, counts.n_damaged, counts.n_entries), (2, 0, 2));
        assert_eq!(counts.n_bytes, 5012 + 2 * HEADER_BYTES as u64);
    }

    #[test]
    fn a_damaged_entry_is_found_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let disk = start(folder.path(), 1 << 20);
        keep(&disk, 1, 5000);
        drop(disk);
        let path = folder.path().join(page(1).file_name());
        let mut bytes = fs::read(&path).unwrap();
        bytes[3000] ^= 4;
        fs::write(&path, bytes).unwrap();
        let disk = start(folder.path(), 1 << 20);
        assert!(disk.has(&page(1)));
        assert_eq!(disk.read(&page(1), 5000), None);
        assert!(!disk.has(&page(1)) && !path.exists());
        assert_eq!(disk.counts().n_damaged, 1);
        // It can be written again.
        keep(&disk, 1, 5000);
        drop(disk);
        assert!(path.exists());
    }

    #[test]
    fn files_stay_within_the_bound_and_the_least_recently_used_go() {
        let folder = tempfile::tempdir().unwrap();
        let most = 100 << 10;
        let disk = start(folder.path(), most);
        let n_bytes = (20 << 10) - HEADER_BYTES;
        for n in 1..8 {
            keep(&disk, n, n_bytes);
            while disk.will_have(&page(n)) && !disk.has(&page(n)) {
                disk.wait();
            }
            disk.touch(&[page(1)]);
        }
        let has = |disk: &KvDisk| (1..8).filter(|n| disk.has(&page(*n))).collect::<Vec<_>>();
        assert_eq!(has(&disk), [1, 4, 5, 6, 7]);
        assert_eq!((disk.counts().n_bytes, disk.counts().n_evicted), (most, 2));
        // One that fits nowhere is not kept, and pushes nothing out.
        keep(&disk, 9, most as usize);
        drop(disk);
        // The order survives, and so does a smaller bound.
        let disk = start(folder.path(), 64 << 10);
        assert_eq!(has(&disk), [1, 6, 7]);
        let files = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap());
        let files = files.filter(|file| file.path().extension().is_some());
        let n_bytes: u64 = files.map(|file| file.metadata().unwrap().len()).sum();
        assert_eq!((n_bytes, disk.counts().n_bytes), (60 << 10, 60 << 10));
    }

    #[test]
    fn the_queue_is_bounded_and_rests_while_experts_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock().unwrap();
        let of_thread = gate.clone();
        let is_reading = move || {
            drop(of_thread.lock().unwrap());
            false
        };
        let path = KvFolder::open(folder.path(), Some(1 << 30)).unwrap();
        let disk = KvDisk::start(path, is_reading).unwrap();
        assert_eq!((disk.n_room(QUEUE_BYTES + 1), disk.n_room(QUEUE_BYTES / 3)), (1, 3));
        disk.write(page(1), Payload::Bytes(vec![1; QUEUE_BYTES / 2]), 1);
        disk.write(page(2), Payload::Bytes(vec![2; 10]), 2);
        assert!(disk.n_room(QUEUE_BYTES / 2) == 0 && !disk.has(&page(1)));
        drop(closed);
        while !disk.has(&page(2)) {
            disk.wait();
        }
        assert!(disk.has(&page(1)));
    }
}
