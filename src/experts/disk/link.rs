//! The link from disk to memory: many large reads at once, past the page cache, straight into the
//! memory that experts live in. The tier says what to read (`ReadSource`); a link only brings it,
//! in whatever order the disk likes.
//!
//! Two links do the same: `uring`, one thread that keeps a deep queue in the kernel, and `pread`,
//! a pool of threads with one read each, for systems without io_uring.

use super::faults::Faults;
use super::files::Files;
use super::pread;
#[cfg(target_os = "linux")]
use super::uring;
use crate::{Error, Result};
use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;

/// Reads in flight at most. A network disk of ours gave 0.23 GB/s to reads of 1 MiB one at a time
/// and 0.58 to 32 of them; a fast one is busy with 4 of 512 KiB and loses nothing by more. So this
/// is deep enough for the former, and the smaller reads at the edges of granules fill up as well.
/// The tier limits the reads ahead of a demand read. `bench/disk.rs` has the table for a machine.
pub const DEPTH: usize = 32;

/// One read: `len` bytes of a shard from `offset` to `dest`, all multiples of `DIRECT_ALIGN`.
#[derive(Debug)]
pub struct Read {
    /// The source's own name for it; the link only hands it back.
    pub id: u32,
    /// Which of the files.
    pub shard: usize,
    pub offset: u64,
    pub len: usize,
    /// Bytes from `offset` that must arrive; the rest is padding that may lie past the file's end.
    pub need: usize,
    pub dest: *mut u8,
    /// The node of memory that the bytes end in, as the source numbers them, if there are several.
    pub node: Option<usize>,
}

// SAFETY: `dest` is written only by the link that holds the read (`ReadSource`), from any of the
// link's threads.
unsafe impl Send for Read {}

/// The source of a link's reads, implemented by the tier.
///
/// A link's threads call it from the moment the link is opened, several at once where it has
/// several. A panic in it ends the process: reads would otherwise go on into memory whose owner
/// believes otherwise.
///
/// # Safety
/// For each read that `next` hands out, `len` bytes from `dest` must be valid for writes, and
/// nothing else may read or write them, until that read is given to `complete`.
pub unsafe trait ReadSource: Send + Sync {
    /// Appends at most `max` reads that may start now. With `wait` it blocks until there is one or
    /// the source closes; the source wakes these callers itself. False once it is closed: the link
    /// ends what it has and asks no more.
    fn next(&self, max: usize, wait: bool, out: &mut Vec<Read>) -> bool;

    /// Moves the calling thread to a read's node: it will carry this read out alone.
    fn enter(&self, node: usize) {
        let _ = node;
    }

    /// A read has ended: `Ok` where at least `need` bytes are in place, otherwise a sentence that
    /// names the file, the offset and the cause. May take its time; the disk goes on meanwhile,
    /// and so up to twice `depth` reads can be handed out and not completed.
    fn complete(&self, read: Read, result: io::Result<()>);
}

/// A running link. Its threads end once the source is closed and all reads have completed. The
/// owner closes the source first and then drops the link, which waits for the threads: reads on
/// their way into a region end before the region can go.
pub trait Link: Send + Sync {
    fn kind(&self) -> IoKind;

    /// Reads in flight at most.
    fn depth(&self) -> usize;

    /// New reads may start, or the source has closed: called after the source has changed, with
    /// its lock or without. Takes no lock, and costs no system call where the link is awake.
    fn wake(&self);
}

/// The way in which expert bytes come from disk (`--io`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoKind {
    /// io_uring where the kernel has it, otherwise `Pread`.
    #[default]
    Auto,
    Uring,
    Pread,
    /// No link: everything is computed in place on the mapped file.
    Mmap,
}

impl FromStr for IoKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<IoKind> {
        match text {
            "auto" => Ok(IoKind::Auto),
            "uring" => Ok(IoKind::Uring),
            "pread" => Ok(IoKind::Pread),
            "mmap" => Ok(IoKind::Mmap),
            other => {
                let expected = "expected auto, uring, pread or mmap";
                Err(Error::Usage(format!("I/O kind: {expected}, got {other:?}")))
            }
        }
    }
}

impl fmt::Display for IoKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            IoKind::Auto => "auto",
            IoKind::Uring => "uring",
            IoKind::Pread => "pread",
            IoKind::Mmap => "mmap",
        })
    }
}

/// The parameters of a link.
pub(super) struct Setup {
    pub files: Files,
    pub depth: usize,
    pub faults: Option<Arc<dyn Faults>>,
    pub source: Arc<dyn ReadSource>,
}

/// Starts a link that is `DEPTH` deep.
pub fn open(
    kind: IoKind,
    files: Files,
    faults: Option<Arc<dyn Faults>>,
    source: Arc<dyn ReadSource>,
) -> Result<Box<dyn Link>> {
    open_with_depth(kind, DEPTH, files, faults, source)
}

/// Opens a link with a depth of the caller's, for measurements and tests.
pub fn open_with_depth(
    kind: IoKind,
    depth: usize,
    files: Files,
    faults: Option<Arc<dyn Faults>>,
    source: Arc<dyn ReadSource>,
) -> Result<Box<dyn Link>> {
    assert!(kind != IoKind::Mmap, "mapped files are computed in place, without a link");
    assert!(depth > 0, "a link has at least one read in flight");
    let setup = Arc::new(Setup { files, depth, faults, source });
    if kind == IoKind::Pread {
        return open_pread(setup);
    }
    match open_uring(setup.clone()) {
        Ok(link) => {
            log::info!("disk link: io_uring, {depth} reads in flight");
            Ok(link)
        }
        Err(why) if kind == IoKind::Uring => {
            Err(Error::invalid(format!("--io uring: this system refuses io_uring: {why}")))
        }
        Err(why) => {
            log::info!("disk link: no io_uring here ({why})");
            open_pread(setup)
        }
    }
}

fn open_pread(setup: Arc<Setup>) -> Result<Box<dyn Link>> {
    log::info!("disk link: {} threads of pread", setup.depth);
    let link = pread::Pread::start(setup);
    let link = link.map_err(|e| Error::invalid(format!("cannot start the disk link: {e}")))?;
    Ok(Box::new(link))
}

/// Whether `IoKind::Uring` works here, or why not.
#[cfg(target_os = "linux")]
pub fn uring_works() -> io::Result<()> {
    uring::works()
}

#[cfg(not(target_os = "linux"))]
pub fn uring_works() -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "io_uring is Linux's"))
}

#[cfg(target_os = "linux")]
fn open_uring(setup: Arc<Setup>) -> io::Result<Box<dyn Link>> {
    Ok(Box::new(uring::Uring::start(setup)?))
}

#[cfg(not(target_os = "linux"))]
fn open_uring(_setup: Arc<Setup>) -> io::Result<Box<dyn Link>> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "io_uring is Linux's"))
}

/// Lives on a link thread's stack. A panic there would leave reads that are never completed and
/// waiters that wait for ever, so it ends the process, after the panic's own message.
pub(super) struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            log::error!("the disk link's thread panicked: the program cannot go on");
            std::process::abort();
        }
    }
}
