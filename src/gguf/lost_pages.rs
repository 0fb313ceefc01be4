//! A mapped file that loses pages, since it is cut short or its disk fails, ends the program at the
//! next touch of one (SIGBUS). This says which file it was instead of ending without a word.

use memmap2::Mmap;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// A map. Never freed: the handler may read it at any time. A program maps a few files.
struct Entry {
    start: usize,
    end: usize,
    /// The file's name, for a terminal.
    name: Box<[u8]>,
}

/// Maps that can be told apart.
const N_MAPS: usize = 256;

static MAPS: [AtomicPtr<Entry>; N_MAPS] = [const { AtomicPtr::new(ptr::null_mut()) }; N_MAPS];
static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

/// A map that the handler knows, until this is dropped.
#[derive(Debug)]
pub struct Known(Option<&'static AtomicPtr<Entry>>);

impl Known {
    /// Memory that no file is behind.
    pub fn none() -> Known {
        Known(None)
    }

    /// Announces a map. Nothing happens in programs that have not called [`install`].
    pub fn new(path: &Path, map: &Mmap) -> Known {
        if !IS_INSTALLED.load(Ordering::SeqCst) {
            return Known(None);
        }
        let start = map.as_ptr() as usize;
        let name = path.display().to_string().escape_debug().to_string();
        let entry = Entry { start, end: start + map.len(), name: name.into_bytes().into() };
        let entry = Box::into_raw(Box::new(entry));
        let free = MAPS.iter().find(|place| {
            let (null, order) = (ptr::null_mut(), Ordering::SeqCst);
            place.compare_exchange(null, entry, order, order).is_ok()
        });
        Known(free)
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        self.0.iter().for_each(|place| place.store(ptr::null_mut(), Ordering::SeqCst));
    }
}

#[cfg(unix)]
pub use handler::install;

#[cfg(unix)]
mod handler {
    use super::{Entry, IS_INSTALLED, MAPS};
    use nix::libc::{self, c_int, c_void, siginfo_t};
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering;

    /// The handler before, which the standard library has for overflows of a stack.
    static BEFORE: OnceLock<SigAction> = OnceLock::new();

    const BEGIN: &[u8] = b"error: ";
    const END: &[u8] = b": a part of the file is gone or cannot be read: it was cut short or its \
        disk failed while it was in use. Put the file back and start again; with --no-mmap or \
        --ram the model does not stay mapped\n";

    /// Takes over SIGBUS for the rest of the process.
    pub fn install() -> nix::Result<()> {
        let flags = SaFlags::SA_SIGINFO | SaFlags::SA_ONSTACK;
        let action = SigAction::new(SigHandler::SigAction(lost), flags, SigSet::empty());
        // SAFETY: the handler does only what a signal handler may: it reads atomics and memory that
        // is never freed or written, and calls write, _exit and sigaction.
        let before = unsafe { sigaction(Signal::SIGBUS, &action) }?;
        let _ = BEFORE.set(before);
        IS_INSTALLED.store(true, Ordering::SeqCst);
        Ok(())
    }

    extern "C" fn lost(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
        // SAFETY: the kernel hands a handler with SA_SIGINFO a valid description, and for SIGBUS it
        // has an address.
        let at = unsafe { (*info).si_addr() } as usize;
        let entries = MAPS.iter().map(|place| place.load(Ordering::SeqCst));
        // SAFETY: an entry is whole before its pointer is published, and never freed or written.
        let mut entries = entries.filter_map(|entry| unsafe { entry.as_ref() });
        if let Some(Entry { name, .. }) = entries.find(|e| (e.start..e.end).contains(&at)) {
            for part in [BEGIN, name, END] {
                // SAFETY: the pointer and the length are those of a slice.
                unsafe { libc::write(2, part.as_ptr().cast(), part.len()) };
            }
            // SAFETY: ends the process, running nothing of it.
            unsafe { libc::_exit(1) };
        }
        // Not a map of ours: whoever was there before gets it at the next touch.
        if let Some(before) = BEFORE.get() {
            // SAFETY: this handler was installed by the program itself.
            let _ = unsafe { sigaction(Signal::SIGBUS, before) };
        }
    }
}
