//! Buffers of the host that granules are packed into and that the device copies from.

use std::ops::Range;

use crate::backend::gpu::{Device, Pinned, PinnedKind};
use crate::experts::memory::Region;
use crate::{Error, Result};

enum Memory {
    Pinned(Pinned),
    /// The driver copies from it through pinned memory of its own, which takes longer.
    Pageable(Region),
}

/// The buffers of one worker.
pub struct Staging {
    memory: Memory,
    buffer_bytes: usize,
}

impl Staging {
    pub fn new(gpu: &Device, kind: PinnedKind, n: usize, buffer_bytes: usize) -> Result<Staging> {
        let memory = Memory::Pinned(Pinned::new(gpu, n * buffer_bytes, kind)?);
        Ok(Staging { memory, buffer_bytes })
    }

    pub fn pageable(n: usize, buffer_bytes: usize) -> Result<Staging> {
        let n_bytes = n * buffer_bytes;
        let region = Region::new(n_bytes).map_err(|e| {
            Error::Device(format!(
                "cannot allocate {n_bytes} bytes to stage experts for the GPU: {e}"
            ))
        })?;
        Ok(Staging { memory: Memory::Pageable(region), buffer_bytes })
    }

    /// One for each worker. What cannot be pinned is pageable, and that is said once.
    pub fn for_workers(
        gpu: &Device,
        kind: PinnedKind,
        n_workers: usize,
        n: usize,
        buffer_bytes: usize,
    ) -> Result<Vec<Staging>> {
        let pinned: Result<Vec<Staging>> =
            (0..n_workers).map(|_| Staging::new(gpu, kind, n, buffer_bytes)).collect();
        pinned.or_else(|error| {
            log::warn!("experts go to the GPU through pageable memory, which is slower: {error}");
            (0..n_workers).map(|_| Staging::pageable(n, buffer_bytes)).collect()
        })
    }

    /// Some bytes of a buffer.
    ///
    /// # Safety
    /// No copy that is queued uses them.
    pub unsafe fn bytes(&mut self, buffer: usize, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.buffer_bytes);
        let at = buffer * self.buffer_bytes;
        let range = at + range.start..at + range.end;
        match &self.memory {
            // SAFETY: no copy uses them by the caller's promise, and no thread but this one, which
            // borrows them exclusively.
            Memory::Pinned(pinned) => unsafe { pinned.bytes_mut(range) },
            Memory::Pageable(region) => {
                assert!(range.end <= region.len());
                // SAFETY: in the region by the assertion; no other user, as above.
                unsafe {
                    let start = region.ptr().add(range.start);
                    std::slice::from_raw_parts_mut(start, range.len())
                }
            }
        }
    }
}
