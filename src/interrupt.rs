//! Signals that end the program. The first one asks the running work to end, the second ends it at
//! once; the exit code says which it was: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
//! Long loops call `check`; files that must not survive an abrupt end are announced by `guard`.

use crate::cancel::Cancel;
use crate::{Error, Result, terminal};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// Whether SIGHUP asks for something else than the end, and whether it came.
static HANGUP_IS_TAKEN: AtomicBool = AtomicBool::new(false);
static HANGUP: AtomicBool = AtomicBool::new(false);
static CODE: AtomicI32 = AtomicI32::new(CTRL_C);
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Exit codes are 128 and the signal's number.
const CTRL_C: i32 = 128 + 2;

/// Seconds from SIGTERM or SIGHUP to the end: their sender does not ask twice, but kills, as
/// `docker stop` after ten seconds.
static GRACE: AtomicU64 = AtomicU64::new(5);

/// Sets the time that work has to end after SIGTERM or SIGHUP: a server finishes what it has begun.
pub fn set_grace(time: Duration) {
    GRACE.store(time.as_secs(), Ordering::Relaxed);
}

/// Takes over Ctrl-C, SIGTERM and SIGHUP for the rest of the process. Called once, by `cli`, before
/// there are other threads.
pub fn install() -> Result<()> {
    let failed = |why: String| Error::invalid(format!("cannot handle Ctrl-C: {why}"));
    #[cfg(unix)]
    termination::install().map_err(|e| failed(e.to_string()))?;
    // ctrlc runs this on a thread of its own, so that taking a lock is fine.
    ctrlc::set_handler(|| ask(CTRL_C)).map_err(|e| failed(e.to_string()))
}

fn ask(code: i32) {
    CODE.store(code, Ordering::SeqCst);
    if INTERRUPTED.swap(true, Ordering::SeqCst) {
        end();
    }
}

fn end() -> ! {
    unfinished().iter().for_each(|path| drop(std::fs::remove_file(path)));
    terminal::erase_bar();
    std::process::exit(exit_code());
}

/// ctrlc does not tell these two from Ctrl-C, so they are waited for here.
#[cfg(unix)]
mod termination {
    use super::{GRACE, HANGUP, HANGUP_IS_TAKEN, ask, end};
    use nix::sys::signal::{SigSet, Signal};
    use std::io;
    use std::sync::atomic::Ordering;
    use std::thread::{Builder, sleep};
    use std::time::Duration;

    pub fn install() -> io::Result<()> {
        let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
        let heeded = |signal: &Signal| ignored >> (*signal as u32 - 1) & 1 == 0;
        let signals: SigSet =
            [Signal::SIGTERM, Signal::SIGHUP].into_iter().filter(heeded).collect();
        // Threads inherit this: the signals wait for the one that takes them.
        signals.thread_block()?;
        let wait = move || {
            while let Ok(signal) = signals.wait() {
                if signal == Signal::SIGHUP && HANGUP_IS_TAKEN.load(Ordering::SeqCst) {
                    HANGUP.store(true, Ordering::SeqCst);
                    continue;
                }
                ask(128 + signal as i32);
                // The work may be waiting for a user who types.
                let late = || {
                    sleep(Duration::from_secs(GRACE.load(Ordering::Relaxed)));
                    end()
                };
                if Builder::new().spawn(late).is_err() {
                    end();
                }
            }
        };
        Builder::new().name("moeba-signals".into()).spawn(wait).map(drop)
    }

    /// Bit n is signal n + 1: nohup ignores SIGHUP, and that stays so.
    fn ignored(status: &str) -> u64 {
        let bits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
    }

    #[cfg(test)]
    mod tests {
        #[test]
        fn ignored_signals_are_bits() {
            let status = "Name:\tmoeba\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\n";
            assert_eq!(super::ignored(status), 0x1001);
            assert_eq!(super::ignored("SigIgn:\tx\n"), 0);
        }
    }
}

/// From now on SIGHUP does not end the program: [`take_hangup`] tells of it.
pub fn take_over_hangup() {
    HANGUP_IS_TAKEN.store(true, Ordering::SeqCst);
}

/// Whether SIGHUP came since the last call.
pub fn take_hangup() -> bool {
    HANGUP.swap(false, Ordering::SeqCst)
}

/// Whether a signal came since the start or the last `clear`.
pub fn is_set() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Asks as Ctrl-C does.
pub fn set() {
    INTERRUPTED.store(true, Ordering::SeqCst);
}

/// Ctrl-C was served: a chat goes on after its answer was cut. The other signals mean all of it.
pub fn clear() {
    if exit_code() == CTRL_C {
        INTERRUPTED.store(false, Ordering::SeqCst);
    }
}

/// The exit code of work that was interrupted.
pub fn exit_code() -> i32 {
    CODE.load(Ordering::SeqCst)
}

/// `Err(Interrupted)` once a signal came.
pub fn check() -> Result<()> {
    if is_set() { Err(Error::Interrupted) } else { Ok(()) }
}

/// A token for a request that a signal ends, as it ends the program.
pub fn token() -> Cancel {
    Cancel::with_process(&INTERRUPTED)
}

/// While this lives, an abrupt end removes the file first.
#[derive(Debug)]
pub struct Guard(PathBuf);

/// Announces an unfinished file.
pub fn guard(path: &Path) -> Guard {
    unfinished().push(path.to_owned());
    Guard(path.to_owned())
}

impl Drop for Guard {
    fn drop(&mut self) {
        unfinished().retain(|path| *path != self.0);
    }
}

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    // A list of paths is whole at every moment, so a panic elsewhere cannot have spoilt it.
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}
