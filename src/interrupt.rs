//! Ctrl-C: the first press asks the running work to end, the second ends the program (130).
//! Long loops call `check`; files that must not survive an abrupt end are announced by `guard`.

use crate::{Error, Result, terminal};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Exit code after Ctrl-C: 128 + SIGINT.
pub const EXIT_CODE: i32 = 130;

/// Takes over Ctrl-C (and SIGTERM, SIGHUP) for the rest of the process. Called once, by `cli`.
pub fn install() -> Result<()> {
    // ctrlc runs this on a thread of its own, so that taking a lock is fine.
    ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::SeqCst) {
            unfinished().iter().for_each(|path| drop(std::fs::remove_file(path)));
            terminal::erase_bar();
            std::process::exit(EXIT_CODE);
        }
    })
    .map_err(|e| Error::invalid(format!("cannot handle Ctrl-C: {e}")))
}

/// Whether Ctrl-C was pressed since the start or the last `clear`.
pub fn is_set() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Asks as Ctrl-C does.
pub fn set() {
    INTERRUPTED.store(true, Ordering::SeqCst);
}

/// The request was served: a chat goes on after its answer was cut.
pub fn clear() {
    INTERRUPTED.store(false, Ordering::SeqCst);
}

/// `Err(Interrupted)` once Ctrl-C was pressed.
pub fn check() -> Result<()> {
    if is_set() { Err(Error::Interrupted) } else { Ok(()) }
}

/// While this lives, a second Ctrl-C removes the file before it ends the program.
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
