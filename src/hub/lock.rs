//! One process writes a blob; the others wait. The file and the kind of lock are the hub's own
//! library's (filelock's `flock`), so that its downloads are waited for, too. The kernel lets go of
//! the lock of a process that ended.

use crate::{Error, Result, interrupt};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::time::Duration;

/// Held until dropped. The file stays: removing it could remove the lock of another process.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "closing the file lets go of the lock")] File);

/// Waits for the lock at `path`; says once, by `what`, that it does.
pub fn acquire(path: &Path, what: &str) -> Result<Lock> {
    let fail = |e| Error::io(path, e);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    }
    let file =
        OpenOptions::new().write(true).create(true).truncate(false).open(path).map_err(fail)?;
    let mut told = false;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Lock(file)),
            Err(Errno::WOULDBLOCK) => {
                if !told {
                    log::warn!("another process is downloading {what}: waiting for it");
                    told = true;
                }
                interrupt::check()?;
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(Errno::INTR) => interrupt::check()?,
            // A file system without locks: what two processes spoil, the checksum finds.
            Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK) => {
                log::warn!("{}: the file system has no locks", path.display());
                return Ok(Lock(file));
            }
            Err(e) => return Err(fail(e.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn the_second_waits_for_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub").join("x.lock");
        let first = acquire(&path, "x").unwrap();
        let (send, receive) = mpsc::channel();
        let second = {
            let path = path.clone();
            std::thread::spawn(move || {
                let lock = acquire(&path, "x").unwrap();
                send.send(()).unwrap();
                drop(lock);
            })
        };
        assert!(receive.recv_timeout(Duration::from_millis(300)).is_err());
        drop(first);
        receive.recv_timeout(Duration::from_secs(60)).unwrap();
        second.join().unwrap();
    }
}
