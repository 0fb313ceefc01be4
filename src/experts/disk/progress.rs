//! The progress of one read, for every kind of link: short reads continue where they ended,
//! interrupted ones start again, failing ones are retried a few times, and a final failure becomes
//! a sentence.

use super::faults::Faults;
use super::files::Files;
use super::link::Read;
use crate::experts::DIRECT_ALIGN;
use std::io;
use std::sync::Arc;

/// A disk's EIO can pass (a path that fails over, a sector that is remapped): tried so often again.
const RETRIES: u32 = 3;
/// Interrupted or postponed calls say nothing about the disk, but they must not go on for ever.
const INTERRUPTIONS: u32 = 1000;
/// The most that one read call is asked for; the kernel itself ends at 2 GiB less a page.
const MAX_CALL: usize = 1 << 30;

/// A read and how far it has come.
#[derive(Debug)]
pub(crate) struct Progress {
    pub read: Read,
    /// Bytes from the start that have arrived.
    arrived: usize,
    failures: u32,
    interruptions: u32,
}

/// The next step of a read after a call has returned.
pub(crate) enum Step {
    /// Call again, with `offset`, `dest` and `len` as they are now.
    Again,
    End(io::Result<()>),
}

impl Progress {
    pub fn new(read: Read) -> Progress {
        let aligned = read.offset | read.len as u64 | read.dest as u64;
        assert!(aligned.is_multiple_of(DIRECT_ALIGN as u64) && read.need <= read.len, "{read:?}");
        Progress { read, arrived: 0, failures: 0, interruptions: 0 }
    }

    /// The start of the next call, relative to the read's start. After a short read it goes back to
    /// a multiple of the alignment, as direct reads need it.
    fn resume(&self) -> usize {
        self.arrived - self.arrived % DIRECT_ALIGN
    }

    pub fn offset(&self) -> u64 {
        self.read.offset + self.resume() as u64
    }

    pub fn dest(&self) -> *mut u8 {
        self.read.dest.wrapping_add(self.resume())
    }

    pub fn len(&self) -> usize {
        (self.read.len - self.resume()).min(MAX_CALL)
    }

    /// Takes in what a call has returned, or what a test wants it to have returned.
    pub fn advance(
        &mut self,
        result: io::Result<usize>,
        files: &Files,
        faults: &Option<Arc<dyn Faults>>,
    ) -> Step {
        let result = match faults {
            Some(faults) => faults.after(&self.read, result),
            None => result,
        };
        match result {
            Ok(n) => self.take(n, files),
            Err(e) => self.fail(e, files),
        }
    }

    fn take(&mut self, n: usize, files: &Files) -> Step {
        let arrived = self.resume() + n;
        if arrived >= self.read.need {
            files.drop_cached(self.read.shard, self.read.offset, self.read.len);
            return Step::End(Ok(()));
        }
        if arrived > self.arrived {
            self.arrived = arrived;
            return Step::Again;
        }
        // Nothing new: the file ends here, or claims not to.
        let end = files.n_bytes(self.read.shard).unwrap_or(0);
        if end >= self.read.offset + self.read.need as u64 {
            return self.fail(io::Error::other("the read returned no data"), files);
        }
        let cause = format!("the file now ends at byte {end}: it was truncated");
        Step::End(Err(self.error(io::Error::new(io::ErrorKind::UnexpectedEof, cause), files)))
    }

    fn fail(&mut self, cause: io::Error, files: &Files) -> Step {
        let (count, limit) = match cause.kind() {
            io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {
                (&mut self.interruptions, INTERRUPTIONS)
            }
            _ => (&mut self.failures, RETRIES),
        };
        *count += 1;
        if *count <= limit {
            log::debug!("{}", self.error(cause, files));
            return Step::Again;
        }
        Step::End(Err(self.error(cause, files)))
    }

    /// One sentence: what was read, where, and why it failed.
    fn error(&self, cause: io::Error, files: &Files) -> io::Error {
        let Read { shard, offset, need, .. } = self.read;
        let path = files.path(shard).display();
        let text = format!("{path}: reading {need} bytes at offset {offset}: {cause}");
        io::Error::new(cause.kind(), text)
    }
}
