//! The link of systems without io_uring: as many threads as reads may be in flight, each with one
//! read at a time. A thread that copies what it has read does not read, so a little of the depth is
//! lost.

use super::link::{AbortOnPanic, IoKind, Link, Read, Setup};
use super::progress::{Progress, Step};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

pub(super) struct Pread {
    threads: Vec<JoinHandle<()>>,
}

impl Pread {
    pub fn start(setup: Arc<Setup>) -> io::Result<Pread> {
        let mut threads = Vec::with_capacity(setup.depth);
        for index in 0..setup.depth {
            let of_thread = setup.clone();
            let thread = Builder::new().name(format!("moeba-pread-{index}"));
            match thread.spawn(move || serve(&of_thread)) {
                Ok(thread) => threads.push(thread),
                // Those that run are waiting in the source, and serve it.
                Err(e) if !threads.is_empty() => {
                    log::warn!("disk link: {index} threads instead of {}: {e}", setup.depth);
                    break;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(Pread { threads })
    }
}

impl Link for Pread {
    fn kind(&self) -> IoKind {
        IoKind::Pread
    }

    fn depth(&self) -> usize {
        self.threads.len()
    }

    /// The threads wait in the source, which wakes them itself.
    fn wake(&self) {}
}

impl Drop for Pread {
    fn drop(&mut self) {
        for thread in self.threads.drain(..) {
            thread.join().expect("a panic in the link has ended the process");
        }
    }
}

fn serve(setup: &Setup) {
    let _guard = AbortOnPanic;
    let mut reads = Vec::with_capacity(1);
    loop {
        let open = setup.source.next(1, true, &mut reads);
        for read in reads.drain(..) {
            carry(setup, read);
        }
        if !open {
            return;
        }
    }
}

/// One read from its start to `complete`.
fn carry(setup: &Setup, read: Read) {
    if let Some(faults) = &setup.faults {
        std::thread::sleep(faults.before(&read));
    }
    if let Some(node) = read.node {
        setup.source.enter(node);
    }
    let mut progress = Progress::new(read);
    let file = setup.files.file(progress.read.shard);
    let result = loop {
        // SAFETY: the source leaves these bytes to us until `complete` (`ReadSource`). They were
        // zero at first, so that they are initialised whatever has happened to them.
        let dest = unsafe { std::slice::from_raw_parts_mut(progress.dest(), progress.len()) };
        let result = file.read_at(dest, progress.offset());
        if let Step::End(result) = progress.advance(result, &setup.files, &setup.faults) {
            break result;
        }
    };
    setup.source.complete(progress.read, result);
}
