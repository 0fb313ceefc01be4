//! The rate of reading memory: loads one after another through more memory than caches hold. Decode
//! can be no faster than that, as each token reads its weights once.

use super::{Rounds, team, text};
use crate::experts::memory::Region;
use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The bytes that a thread takes at once. Reading them takes much longer than taking them.
const CHUNK: usize = 1 << 20;
const LEAST: usize = 256 << 20;
const MOST: usize = 1 << 30;

/// Memory to read. Threads take its chunks in turn, round after round, so no chunk is read again
/// before all others have been.
pub struct ReadTest<'a> {
    memory: Memory<'a>,
    next: AtomicUsize,
}

enum Memory<'a> {
    Own(Region),
    Given(&'a [u8]),
}

impl<'a> ReadTest<'a> {
    /// Twice as much as all last-level caches, but at most a quarter of `available`.
    pub fn new(available: Option<u64>) -> io::Result<Self> {
        let quarter = available.map_or(usize::MAX, |bytes| bytes as usize / 4);
        ReadTest::of(wanted().min(quarter) / CHUNK * CHUNK)
    }

    /// Reads existing memory, if caches do not hold half of it.
    pub fn over(memory: &'a [u8]) -> Option<Self> {
        let memory = &memory[memory.as_ptr().align_offset(64).min(memory.len())..];
        let is_much = memory.len() >= wanted();
        is_much.then(|| ReadTest { memory: Memory::Given(memory), next: AtomicUsize::new(0) })
    }

    fn of(n_bytes: usize) -> io::Result<Self> {
        if n_bytes == 0 {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let memory = Region::new(n_bytes)?;
        // Pages that were never written are one and the same page of zeros.
        // SAFETY: the region is as long as this, and not shared yet.
        unsafe { memory.ptr().write_bytes(1, n_bytes) };
        Ok(ReadTest { memory: Memory::Own(memory), next: AtomicUsize::new(0) })
    }

    pub fn n_bytes(&self) -> usize {
        match &self.memory {
            Memory::Own(region) => region.len(),
            Memory::Given(bytes) => bytes.len(),
        }
    }

    fn start(&self) -> *const u8 {
        match &self.memory {
            Memory::Own(region) => region.ptr(),
            Memory::Given(bytes) => bytes.as_ptr(),
        }
    }

    /// 10⁹ bytes a second, read by so many threads.
    pub fn gb_per_second(&self, n_threads: usize) -> Rounds {
        Rounds::of(|| self.round(n_threads, Rounds::TIME))
    }

    fn round(&self, n_threads: usize, time: Duration) -> f64 {
        let n_chunks = self.n_bytes() / CHUNK;
        let read_one = || {
            let chunk = self.next.fetch_add(1, Ordering::Relaxed) % n_chunks;
            // SAFETY: whole chunks of a region that is not written after `of`, or of a slice.
            unsafe { read(self.start().add(chunk * CHUNK)) };
            CHUNK as u64
        };
        team::rate(n_threads, time, &read_one) / 1e9
    }
}

/// So much that the next round does not find the last one's in caches.
pub(super) fn wanted() -> usize {
    (2 * last_level_caches()).clamp(LEAST, MOST)
}

/// Loads a chunk, which is on a cache line boundary.
///
/// # Safety
/// `from` is valid for reads of `CHUNK` bytes, which are not written meanwhile.
unsafe fn read(from: *const u8) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx") {
        // SAFETY: the processor has the loads; the rest is the caller's promise.
        return unsafe { read_avx(from) };
    }
    // SAFETY: the caller's promise; the region is aligned to far more than eight bytes.
    let words = unsafe { std::slice::from_raw_parts(from.cast::<u64>(), CHUNK / 8) };
    std::hint::black_box(words.iter().fold(0u64, |sum, word| sum ^ word));
}

/// Four cache lines a turn, with those of 2 KiB ahead asked for. In assembly, because a compiler
/// would leave out loads whose values are not used.
///
/// # Safety
/// As `read`, on a processor with AVX.
#[cfg(target_arch = "x86_64")]
unsafe fn read_avx(from: *const u8) {
    // SAFETY: reads within the chunk; prefetches may go anywhere. All vector registers that it
    // overwrites are clobbered by the convention that it names.
    unsafe {
        std::arch::asm!(
            "2:",
            ".irp i, 0, 64, 128, 192",
            "prefetcht0 [rsi + 2048 + \\i]",
            "vmovdqa ymm0, [rsi + \\i]",
            "vmovdqa ymm1, [rsi + 32 + \\i]",
            ".endr",
            "add rsi, 256",
            "cmp rsi, rdx",
            "jb 2b",
            "vzeroupper",
            inout("rsi") from => _,
            in("rdx") from.add(CHUNK),
            clobber_abi("sysv64"),
            options(nostack, readonly),
        );
    }
}

/// Bytes of the last-level caches of all processors together; 0 where the system does not say.
fn last_level_caches() -> usize {
    let mut seen = HashSet::new();
    let mut total = 0;
    for cpu in 0.. {
        let cache = |name| text(&format!("/sys/devices/system/cpu/cpu{cpu}/cache/index3/{name}"));
        let (size, shared) = (cache("size"), cache("shared_cpu_list"));
        if size.is_empty() {
            break;
        }
        if seen.insert(shared) {
            total += kib(&size).unwrap_or(0) << 10;
        }
    }
    total
}

/// `32768K`
fn kib(size: &str) -> Option<usize> {
    size.trim().strip_suffix('K')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_at_a_rate_that_memory_has() {
        let test = ReadTest::of(8 * CHUNK).unwrap();
        let rate = test.round(2, Duration::from_millis(5));
        assert!((0.01..10_000.0).contains(&rate), "{rate}");
        // Each thread reads at least one chunk.
        assert!(test.next.load(Ordering::Relaxed) >= 2);
    }

    #[test]
    fn memory_that_is_there_is_read_if_it_is_much() {
        assert!(ReadTest::over(&[1; 4096]).is_none() && ReadTest::over(&[]).is_none());
        let memory = vec![1; wanted() + 64];
        let test = ReadTest::over(&memory[1..]).unwrap();
        assert!(test.start().align_offset(64) == 0 && test.n_bytes() >= wanted());
        assert!(test.round(2, Duration::from_millis(5)) > 0.01);
    }

    #[test]
    fn a_small_machine_gives_a_quarter() {
        assert_eq!(ReadTest::new(Some(40 * CHUNK as u64)).unwrap().n_bytes(), 10 * CHUNK);
        assert!(ReadTest::new(Some(1 << 20)).is_err());
    }

    #[test]
    fn sizes_of_caches_are_understood() {
        assert_eq!(kib("107520K\n"), Some(107_520));
        assert_eq!(kib(""), None);
    }
}
