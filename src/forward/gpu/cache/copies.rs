//! Copies between host memory and the caches of texts, beside the passes.

use crate::Result;
use crate::backend::gpu::{Device, DeviceSlice, Pinned, PinnedKind, Stream};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes that are copied at once: enough that waiting for them is little of the time.
const BYTES: usize = 4 << 20;

/// Parts begin on multiples of this.
const LINE: usize = 64;

/// A stream and pinned memory for copies of caches that no pass uses meanwhile. A pass has no work
/// left when it ends, so that nothing else orders the two.
pub struct CacheCopies {
    stream: Stream,
    memory: Mutex<Pinned>,
    n_bytes: usize,
}

impl CacheCopies {
    pub fn new(gpu: &Device) -> Result<CacheCopies> {
        CacheCopies::of_size(gpu, BYTES)
    }

    /// With memory of `n_bytes`: at least a row of any cache.
    pub(super) fn of_size(gpu: &Device, n_bytes: usize) -> Result<CacheCopies> {
        let memory = Pinned::of(gpu, n_bytes, PinnedKind::Cached, "copies of the KV cache")?;
        Ok(CacheCopies { stream: Stream::new(gpu)?, memory: Mutex::new(memory), n_bytes })
    }

    pub fn gpu(&self) -> &Device {
        self.stream.gpu()
    }

    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Downloads parts of at most [`CacheCopies::most_bytes`] each. `take` gets them in their
    /// order.
    pub fn download<'a, P>(
        &self,
        parts: impl IntoIterator<Item = (DeviceSlice<'a>, P)>,
        mut take: impl FnMut(P, &[u8]),
    ) -> Result<()> {
        let (memory, mut end, mut queued) = (self.lock(), 0, Vec::new());
        let mut hand_out = |queued: &mut Vec<_>| {
            self.stream.synchronize()?;
            for (place, range) in queued.drain(..) {
                // SAFETY: the copies are done, and the lock rules out others.
                take(place, unsafe { memory.bytes(range) });
            }
            Result::Ok(())
        };
        for (from, place) in parts {
            if end + from.len() > self.n_bytes {
                hand_out(&mut queued)?;
                end = 0;
            }
            assert!(from.len() <= self.n_bytes, "a part of {} bytes", from.len());
            // SAFETY: within the memory, of which nothing uses this part until it is handed out:
            // the lock is held, and a copy that an error leaves behind is one of a lost device.
            unsafe { self.stream.download(memory.as_ptr().add(end), from)? };
            queued.push((place, end..end + from.len()));
            end = (end + from.len()).next_multiple_of(LINE);
        }
        hand_out(&mut queued)
    }

    /// Uploads parts of at most [`CacheCopies::most_bytes`] each, which `fill` writes in their
    /// order.
    pub fn upload<'a, P>(
        &self,
        parts: impl IntoIterator<Item = (DeviceSlice<'a>, P)>,
        mut fill: impl FnMut(P, &mut [u8]),
    ) -> Result<()> {
        let (memory, mut end) = (self.lock(), 0);
        for (to, place) in parts {
            if end + to.len() > self.n_bytes {
                self.stream.synchronize()?;
                end = 0;
            }
            // SAFETY: nothing uses these bytes since the last wait, and they do not change until
            // the next one; the lock rules out others.
            unsafe {
                let staged = memory.bytes_mut(end..end + to.len());
                fill(place, staged);
                self.stream.upload(to, staged)?;
            }
            end = (end + to.len()).next_multiple_of(LINE);
        }
        self.stream.synchronize()
    }

    /// The most bytes of a part.
    pub fn most_bytes(&self) -> usize {
        self.n_bytes
    }

    fn lock(&self) -> MutexGuard<'_, Pinned> {
        // Each user begins with memory whose contents do not matter.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
