//! The tier below, pinned where it is: granules then go to a device out of their slots, without
//! being packed into a buffer first (AsyncIO of PreScope, 4.4: weights are registered once), and
//! kernels of the first device can read them there. A thread pins the memory part by part from the
//! start on. What is not pinned yet, or cannot be, goes through buffers.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::backend::gpu::{Device, DeviceSlice, Registered};
use crate::experts::{ExpertStore, HostMemory};
use crate::units::size;

/// Pinned at a time, about: no stream can begin to wait for the host meanwhile.
const PART_BYTES: usize = 32 << 20;

const PAGE: usize = 4096;

/// Whether memory is pinned in place; for tests of either way, and for machines where it does harm.
pub const SWITCH: &str = "MOEBA_GPU_PIN";

struct Memory {
    start: usize,
    /// A multiple of slots and pages; the last part may be shorter.
    part_bytes: usize,
    bytes: usize,
    /// Pinned, from the start on.
    n_pinned: AtomicUsize,
    /// By part: its address for kernels, 0 if they cannot read it. Set before `n_pinned`.
    addresses: Vec<AtomicU64>,
}

impl Memory {
    fn new(memory: &HostMemory) -> Memory {
        let HostMemory { start, bytes, slot_bytes } = *memory;
        // So many slots are whole pages.
        let unit =
            slot_bytes << (PAGE.trailing_zeros().saturating_sub(slot_bytes.trailing_zeros()));
        let part_bytes = PART_BYTES.div_ceil(unit) * unit;
        let (start, bytes) = (start.as_ptr() as usize, bytes - bytes % PAGE);
        let addresses = (0..bytes.div_ceil(part_bytes)).map(|_| AtomicU64::new(0)).collect();
        Memory { start, part_bytes, bytes, n_pinned: AtomicUsize::new(0), addresses }
    }

    /// Whether the bytes are in one pinned part: a copy may not go over the end of one.
    fn has(&self, at: usize, bytes: usize) -> bool {
        let Some(from) = at.checked_sub(self.start) else { return false };
        let end = from + bytes;
        end <= self.n_pinned.load(Ordering::Acquire)
            && from / self.part_bytes == end.saturating_sub(1).max(from) / self.part_bytes
    }

    /// The address for kernels of bytes in one pinned part.
    fn address(&self, at: usize, bytes: usize) -> Option<u64> {
        let from = at.checked_sub(self.start).filter(|_| self.has(at, bytes))?;
        let address = self.addresses.get(from / self.part_bytes)?.load(Ordering::Relaxed);
        (address > 0).then_some(address + (from % self.part_bytes) as u64)
    }

    /// Whether kernels can read all of it.
    fn is_readable(&self) -> bool {
        self.n_pinned.load(Ordering::Acquire) == self.bytes
            && self.addresses.iter().all(|address| address.load(Ordering::Relaxed) > 0)
    }
}

struct Shared {
    memory: Vec<Memory>,
    registered: Mutex<Vec<Registered>>,
    is_over: AtomicBool,
    /// Its memory stays until everything is let go of.
    _source: Arc<dyn ExpertStore>,
}

/// Links that copy from the memory keep this. Dropping it lets go of the memory.
pub struct PinnedTier {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl PinnedTier {
    /// Starts the thread; `None` if the tier below has no memory of its own.
    pub fn start(gpu: &Device, source: &Arc<dyn ExpertStore>) -> Option<PinnedTier> {
        let memory: Vec<Memory> = source.memory().iter().map(Memory::new).collect();
        let is_off = std::env::var(SWITCH).is_ok_and(|value| value == "0");
        if memory.is_empty() || is_off {
            return None;
        }
        let shared = Arc::new(Shared {
            memory,
            registered: Mutex::default(),
            is_over: AtomicBool::new(false),
            _source: source.clone(),
        });
        let (gpu, pinning) = (gpu.clone(), shared.clone());
        let thread = std::thread::Builder::new().name("pin".into());
        // Without the thread nothing is pinned.
        let thread = thread.spawn(move || pinning.pin_all(&gpu)).ok();
        Some(PinnedTier { shared, thread })
    }

    /// Whether a device can copy these bytes from where they are.
    pub fn has(&self, bytes: &[u8]) -> bool {
        self.shared.memory.iter().any(|memory| memory.has(bytes.as_ptr() as usize, bytes.len()))
    }

    /// The address at which kernels of the first device read these bytes where they are, if they
    /// can.
    pub fn address(&self, bytes: &[u8]) -> Option<u64> {
        let at = bytes.as_ptr() as usize;
        self.shared.memory.iter().find_map(|memory| memory.address(at, bytes.len()))
    }

    /// Whether these kernels can read all of the memory.
    pub fn is_readable(&self) -> bool {
        self.shared.memory.iter().all(Memory::is_readable)
    }

    /// Waits until all is pinned that can be; for tests.
    pub fn wait(&mut self) {
        self.thread.take().into_iter().for_each(|thread| {
            let _ = thread.join();
        });
    }
}

impl Shared {
    fn pin_all(&self, gpu: &Device) {
        for memory in &self.memory {
            while let done = memory.n_pinned.load(Ordering::Relaxed)
                && done < memory.bytes
                && !self.is_over.load(Ordering::Relaxed)
            {
                let bytes = memory.part_bytes.min(memory.bytes - done);
                let start = std::ptr::with_exposed_provenance_mut::<u8>(memory.start + done);
                let start = std::ptr::NonNull::new(start).expect("an address in a region");
                // SAFETY: part of the source's memory, which exists until `_source` is dropped,
                // after `registered`.
                match unsafe { Registered::new(gpu, start, bytes) } {
                    Ok(part) => {
                        let address = part.all().map_or(0, DeviceSlice::address);
                        memory.addresses[done / memory.part_bytes]
                            .store(address, Ordering::Relaxed);
                        self.parts().push(part);
                    }
                    Err(error) => return self.give_up(&error),
                }
                memory.n_pinned.store(done + bytes, Ordering::Release);
            }
        }
    }

    fn parts(&self) -> std::sync::MutexGuard<'_, Vec<Registered>> {
        self.registered.lock().expect("no panic under this lock")
    }

    fn give_up(&self, error: &crate::Error) {
        let pinned: usize = self.memory.iter().map(|m| m.n_pinned.load(Ordering::Relaxed)).sum();
        log::info!(
            "{} of the experts' memory are pinned, and no more; the rest goes to the GPU through \
             buffers: {error}",
            size(pinned as u64)
        );
    }
}

impl Drop for PinnedTier {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.wait();
        // The links that copied have ended.
        self.shared.parts().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;

    #[test]
    fn a_copy_stays_in_one_pinned_part() {
        for slot_bytes in [4096, 6144, 1000, 3 << 20] {
            let start = NonNull::new(std::ptr::without_provenance_mut(1 << 30)).unwrap();
            let bytes = 40 * (3 << 20);
            let memory = Memory::new(&HostMemory { start, bytes, slot_bytes });
            assert!(
                memory.part_bytes.is_multiple_of(PAGE)
                    && memory.part_bytes.is_multiple_of(slot_bytes)
            );
            let at = |offset: usize| memory.start + offset;
            assert!(!memory.has(at(0), 1));
            memory.n_pinned.store(memory.part_bytes + 8192, Ordering::Relaxed);
            assert!(memory.has(at(0), memory.part_bytes));
            assert!(!memory.has(at(1), memory.part_bytes), "over the end of a part");
            assert!(memory.has(at(memory.part_bytes), 8192));
            assert!(!memory.has(at(memory.part_bytes), 8193), "not pinned yet");
            assert!(!memory.has(at(0) - 1, 1) && memory.has(at(5), 0));
        }
    }

    #[test]
    fn kernels_read_what_is_pinned_and_has_an_address() {
        let start = NonNull::new(std::ptr::without_provenance_mut(1 << 30)).unwrap();
        let memory = Memory::new(&HostMemory { start, bytes: PART_BYTES + 8192, slot_bytes: 4096 });
        let at = |offset: usize| memory.start + offset;
        memory.addresses[0].store(0x1000, Ordering::Relaxed);
        assert_eq!(memory.address(at(0), 1), None, "not pinned yet");
        memory.n_pinned.store(PART_BYTES, Ordering::Relaxed);
        assert_eq!(memory.address(at(64), 32), Some(0x1040));
        assert!(!memory.is_readable());
        memory.n_pinned.store(memory.bytes, Ordering::Relaxed);
        assert_eq!(memory.address(at(PART_BYTES), 8), None, "a device that cannot");
        assert!(!memory.is_readable());
        memory.addresses[1].store(0x9000, Ordering::Relaxed);
        assert_eq!(memory.address(at(PART_BYTES + 16), 8), Some(0x9010));
        assert!(memory.is_readable());
    }
}
