//! Saves what policies learn while the engine runs, so that a process that is killed loses a minute
//! of it at most. A token waits for a copy in memory of what was learned, and never for the file.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::profile::ProfileFile;
use crate::policy::Profile;

/// Time from tokens that are worth a save to the save. It slows the tokens that are computed then,
/// so a short run is left alone.
const INTERVAL: Duration = Duration::from_secs(60);

/// Tokens that are worth a save.
const N_TOKENS: usize = 256;

/// Answers what has been learned so far.
type Learned = dyn Fn() -> Profile + Send + Sync;

/// Saves to one file from time to time, and a last time when it is dropped. Where there is no file
/// yet, the first tokens are saved at once.
pub struct ProfileSaver {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    file: ProfileFile,
    learned: Box<Learned>,
    interval: Duration,
    /// Tokens since the last save began.
    n_tokens: AtomicUsize,
    stop: AtomicBool,
}

impl ProfileSaver {
    pub fn start(
        file: ProfileFile,
        learned: impl Fn() -> Profile + Send + Sync + 'static,
    ) -> ProfileSaver {
        ProfileSaver::with_interval(file, learned, INTERVAL)
    }

    fn with_interval(
        file: ProfileFile,
        learned: impl Fn() -> Profile + Send + Sync + 'static,
        interval: Duration,
    ) -> ProfileSaver {
        let shared = Arc::new(Shared {
            file,
            learned: Box::new(learned),
            interval,
            n_tokens: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let of_thread = shared.clone();
        let thread = thread::Builder::new().name("moeba-profile".into());
        let thread = thread.spawn(move || of_thread.save_from_time_to_time());
        if let Err(e) = &thread {
            log::warn!("the policies' profile is saved at the end only: {e}");
        }
        ProfileSaver { shared, thread: thread.ok() }
    }

    /// Tells that policies have heard of so many more tokens.
    pub fn add_tokens(&self, n: usize) {
        let before = self.shared.n_tokens.fetch_add(n, Ordering::Relaxed);
        if before < N_TOKENS && before + n >= N_TOKENS {
            self.thread().inspect(|thread| thread.unpark());
        }
    }

    fn thread(&self) -> Option<&Thread> {
        self.thread.as_ref().map(JoinHandle::thread)
    }
}

impl Shared {
    fn save_from_time_to_time(&self) {
        let mut is_first = !self.file.exists();
        loop {
            while self.n_tokens.load(Ordering::Relaxed) < N_TOKENS && !self.is_stopped() {
                thread::park();
            }
            if !std::mem::take(&mut is_first) {
                self.rest();
            }
            if self.is_stopped() {
                return;
            }
            self.n_tokens.store(0, Ordering::Relaxed);
            if let Err(why) = self.file.try_save(&(self.learned)()) {
                log::warn!("{why}; the next attempt is at the end");
                return;
            }
        }
    }

    /// Waits for the interval, or less if the engine is dropped.
    fn rest(&self) {
        let start = Instant::now();
        while !self.is_stopped() && start.elapsed() < self.interval {
            thread::park_timeout(self.interval.saturating_sub(start.elapsed()));
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

impl Drop for ProfileSaver {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic in it has been reported by then.
            let _ = thread.join();
        }
        self.shared.file.save(&(self.shared.learned)());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ProfileChoice;
    use std::path::Path;

    const KEY: [u8; 32] = [3; 32];

    fn open(path: &Path) -> ProfileFile {
        let choice = ProfileChoice::At(path.into());
        ProfileFile::open(&choice, Path::new("model.gguf"), KEY).unwrap().unwrap()
    }

    /// A saver of a count of the times that it was asked.
    fn saver(path: &Path, interval: Duration) -> (ProfileSaver, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let learned = move || {
            let n = count.fetch_add(1, Ordering::SeqCst) + 1;
            let mut profile = Profile::default();
            profile.set("count", vec![n as u8]);
            profile
        };
        (ProfileSaver::with_interval(open(path), learned, interval), asked)
    }

    fn wait(until: impl Fn() -> bool) {
        let start = Instant::now();
        while !until() {
            assert!(start.elapsed() < Duration::from_secs(20), "nothing is saved");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_first_tokens_are_saved_at_once_and_the_rest_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        let count = || open(&path).load().get("count").map(|bytes| bytes[0]);
        let (saver, asked) = saver(&path, Duration::from_secs(600));
        saver.add_tokens(N_TOKENS - 1);
        thread::sleep(Duration::from_millis(20));
        assert_eq!(asked.load(Ordering::SeqCst), 0);
        saver.add_tokens(1);
        wait(|| count() == Some(1));
        // Ten minutes have not passed.
        saver.add_tokens(10 * N_TOKENS);
        thread::sleep(Duration::from_millis(20));
        assert_eq!(count(), Some(1));
        drop(saver);
        assert_eq!(count(), Some(2));
        // There is a file now.
        let (saver, asked) = self::saver(&path, Duration::from_secs(600));
        saver.add_tokens(10 * N_TOKENS);
        thread::sleep(Duration::from_millis(20));
        assert_eq!(asked.load(Ordering::SeqCst), 0);
        drop(saver);
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn later_tokens_are_saved_after_the_interval() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        let (saver, asked) = saver(&path, Duration::from_millis(5));
        for n in 1..4 {
            saver.add_tokens(N_TOKENS);
            wait(|| asked.load(Ordering::SeqCst) == n);
        }
    }

    #[test]
    fn a_file_of_others_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        let (saver, asked) = saver(&path, Duration::ZERO);
        std::fs::write(&path, "a letter").unwrap();
        saver.add_tokens(N_TOKENS);
        wait(|| asked.load(Ordering::SeqCst) == 1);
        saver.add_tokens(N_TOKENS);
        drop(saver);
        assert_eq!(std::fs::read(&path).unwrap(), b"a letter");
        assert_eq!(asked.load(Ordering::SeqCst), 2);
    }
}
