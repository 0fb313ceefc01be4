//! A thread that touches a tier's memory while a run begins. The kernel clears a page when it is
//! touched first, which takes seconds for a large budget: here beside the reads of dense weights
//! and of the first prompt. A read into memory that is not yet touched touches it itself.

use crate::experts::memory::Region;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

/// Bytes that are touched at once: at 10 GB/s the kernel clears them in 7 ms.
const PIECE: usize = 64 << 20;

pub struct Toucher {
    is_over: Arc<AtomicBool>,
    /// None where the system has no thread to give.
    thread: Option<JoinHandle<()>>,
}

impl Toucher {
    /// Begins to touch the regions of an owner, in order.
    pub fn start<T>(owner: Arc<T>, regions: fn(&T) -> Vec<&Region>) -> Toucher
    where
        T: Send + Sync + 'static,
    {
        let is_over = Arc::new(AtomicBool::new(false));
        let over = is_over.clone();
        let touch = move || {
            regions(&owner).into_iter().all(|region| touch(region, &over));
        };
        Toucher { is_over, thread: Builder::new().name("moeba-touch".into()).spawn(touch).ok() }
    }
}

impl Drop for Toucher {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the thread does not panic");
        }
    }
}

/// Whether all of a region has been touched before it was over.
fn touch(region: &Region, is_over: &AtomicBool) -> bool {
    (0..region.len()).step_by(PIECE).all(|at| {
        let end = region.len().min(at + PIECE);
        !is_over.load(Ordering::Relaxed) && region.touch(at..end)
    })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    fn resident_bytes(region: &Region) -> usize {
        let mut pages = vec![0u8; region.len().div_ceil(4096)];
        // SAFETY: there is a byte for each page of a mapped region.
        let found = unsafe { libc::mincore(region.ptr().cast(), region.len(), pages.as_mut_ptr()) };
        assert_eq!(found, 0);
        4096 * pages.iter().filter(|page| **page & 1 != 0).count()
    }

    #[test]
    fn memory_is_touched_to_the_end_and_keeps_its_contents() {
        let region = Region::new(PIECE + 4096).unwrap();
        let last = region.ptr().wrapping_add(PIECE + 4095);
        // SAFETY: the region's last byte, which nothing else refers to.
        unsafe { last.write(7) };
        if touch(&region, &AtomicBool::new(false)) {
            assert_eq!(resident_bytes(&region), region.len());
        }
        // SAFETY: see above.
        assert_eq!(unsafe { last.read() }, 7);
    }

    #[test]
    fn nothing_is_touched_once_a_run_is_over() {
        let region = Region::new(1 << 20).unwrap();
        assert!(!touch(&region, &AtomicBool::new(true)));
        assert_eq!(resident_bytes(&region), 0);
    }
}
