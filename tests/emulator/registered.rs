//! Host memory that is pinned where it is. Copies may read it at any time, kernels only what was
//! announced to them.

use super::machine::HostPtr;
use super::memory::{marked, sum};
use super::shim::{READ_NOW, ShimAllocation, WRITTEN, WRITTEN_NOW};
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;

/// Host memory is pinned in whole pages.
const PAGE: usize = 4096;

/// The distance of a byte's address on the device from the one in the host: who takes one for the
/// other finds no memory there.
const DISTANCE: u64 = 1 << 62;

/// Bytes that kernels of a stream read where they are.
#[derive(Clone, Copy)]
pub struct HostRead {
    pub from: HostPtr,
    pub bytes: usize,
    /// A checksum of when it was announced.
    sum: u32,
}

impl HostRead {
    /// # Safety
    /// The bytes exist until `check`.
    pub unsafe fn new(bytes: &[u8]) -> HostRead {
        let (from, n) = (bytes.as_ptr(), bytes.len());
        // SAFETY: a slice can be read.
        HostRead { from: HostPtr(from.cast_mut()), bytes: n, sum: unsafe { sum(from, n) } }
    }

    /// An error if the bytes have changed.
    pub fn check(&self) -> Result<(), String> {
        // SAFETY: the bytes exist, by the promise of `new`.
        match unsafe { sum(self.from.0, self.bytes) } == self.sum {
            true => Ok(()),
            false => Err("the host changed bytes that a queued kernel reads".into()),
        }
    }

    fn has(&self, bytes: &Range<usize>) -> bool {
        let start = self.from.0 as usize;
        start <= bytes.start && bytes.end <= start + self.bytes
    }
}

#[derive(Default)]
struct Block {
    bytes: usize,
    /// The shadow bytes, like an allocation's; empty until kernels may read some of the block.
    shadow: Box<[u8]>,
}

/// The blocks, by their addresses in the host.
#[derive(Default)]
pub struct RegisteredMemory(BTreeMap<usize, Block>);

impl RegisteredMemory {
    /// Refuses what the driver does: parts of pages, and pages that are registered already. Returns
    /// the address on a device.
    pub fn add(&mut self, start: NonNull<u8>, bytes: usize) -> Result<u64, String> {
        let start = start.as_ptr() as usize;
        if bytes == 0 || !start.is_multiple_of(PAGE) || !bytes.is_multiple_of(PAGE) {
            return Err(format!("{bytes} bytes at {start:#x} are no whole pages"));
        }
        let before = self.0.range(..start + bytes).next_back();
        if before.is_some_and(|(at, block)| at + block.bytes > start) {
            return Err(format!("{bytes} bytes at {start:#x} are registered already"));
        }
        self.0.insert(start, Block { bytes, ..Block::default() });
        Ok(start as u64 + DISTANCE)
    }

    pub fn remove(&mut self, start: NonNull<u8>) {
        self.0.remove(&(start.as_ptr() as usize)).expect("registered before");
    }

    /// Whether the bytes are in one block.
    pub fn has(&self, at: *const u8, bytes: usize) -> bool {
        let found = self.0.range(..=at as usize).next_back();
        found.is_some_and(|(start, block)| at as usize + bytes <= start + block.bytes)
    }

    /// Lets kernels see the blocks of some bytes.
    pub fn show(&mut self, reads: &[HostRead]) -> Result<(), String> {
        for HostRead { from, bytes, .. } in reads {
            let found = self.0.range_mut(..=from.0 as usize).next_back();
            let found = found.filter(|(start, b)| from.0 as usize + bytes <= *start + b.bytes);
            let Some((_, block)) = found else {
                return Err(format!("a kernel is to read {bytes} bytes that are not registered"));
            };
            if block.shadow.is_empty() {
                block.shadow = vec![WRITTEN; block.bytes].into();
            }
        }
        Ok(())
    }

    /// The blocks that kernels see.
    pub fn shown(&mut self) -> impl Iterator<Item = (u64, *mut u8, &mut Box<[u8]>, usize)> {
        let shown = self.0.iter_mut().filter(|(_, block)| !block.shadow.is_empty());
        shown.map(|(start, block)| {
            (*start as u64 + DISTANCE, *start as *mut u8, &mut block.shadow, block.bytes)
        })
    }

    /// Checks the accesses of a launch to a block, and resets its shadow. `None` if `touched` is
    /// no block.
    pub fn touched(
        &mut self,
        touched: &ShimAllocation,
        reads: &[HostRead],
        what: &str,
    ) -> Option<Result<(), String>> {
        let start = touched.address.checked_sub(DISTANCE)? as usize;
        let shadow = &mut self.0.get_mut(&start)?.shadow;
        let written = marked(shadow, touched.touched(), WRITTEN_NOW);
        let read = marked(shadow, touched.touched(), READ_NOW);
        shadow[touched.touched()].fill(WRITTEN);
        if !written.is_empty() {
            return Some(Err(format!("{what} writes registered memory of the host")));
        }
        let is_announced = |run: &Range<usize>| {
            let run = start + run.start..start + run.end;
            reads.iter().any(|read| read.has(&run))
        };
        Some(match read.iter().find(|run| !is_announced(run)) {
            None => Ok(()),
            Some(run) => {
                let n = run.len();
                Err(format!("{what} reads {n} registered bytes that were not announced"))
            }
        })
    }
}
