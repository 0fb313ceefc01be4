//! The memory of the emulated devices, and the host's that is pinned.

use super::clock::{Clock, History, Stamp};
use super::registered::{HostRead, RegisteredMemory};
use super::shim::{READ_NOW, ShimAllocation, WRITTEN, WRITTEN_NOW};
use crate::backend::gpu::PinnedKind;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;

/// The bytes of fresh memory: NaN as floats, so that a read that is not caught shows.
const POISON: u8 = 0xff;

/// Sizes are counted in multiples of this.
const GRAIN: usize = 512;

/// The gap between two allocations: an access past one does not reach another.
const GAP: u64 = 4096;

pub struct Allocation {
    bytes: Box<[u8]>,
    /// See `shim`.
    shadow: Box<[u8]>,
    history: History,
}

pub struct PinnedBlock {
    layout: Layout,
    kind: PinnedKind,
    /// The shadow bytes, like an allocation's; empty unless the block is mapped.
    shadow: Box<[u8]>,
    history: History,
}

impl PinnedBlock {
    fn is_mapped(&self) -> bool {
        self.kind == PinnedKind::Mapped
    }
}

pub struct Memory {
    /// By address; those of device d begin at `base(d)`. Addresses are never used twice.
    allocations: BTreeMap<u64, Allocation>,
    next: Vec<u64>,
    used: Vec<usize>,
    pinned: BTreeMap<usize, PinnedBlock>,
    pub registered: RegisteredMemory,
}

/// A checksum of host memory.
///
/// # Safety
/// `bytes` bytes at `from` can be read.
pub unsafe fn sum(from: *const u8, bytes: usize) -> u32 {
    // SAFETY: the caller's promise.
    crc32fast::hash(unsafe { std::slice::from_raw_parts(from, bytes) })
}

fn base(device: usize) -> u64 {
    (device as u64 + 1) << 40
}

impl Memory {
    pub fn new(devices: usize) -> Memory {
        Memory {
            allocations: BTreeMap::new(),
            next: (0..devices).map(base).collect(),
            used: vec![0; devices],
            pinned: BTreeMap::new(),
            registered: RegisteredMemory::default(),
        }
    }

    pub fn used(&self, device: usize) -> usize {
        self.used[device]
    }

    /// None if the memory does not suffice.
    pub fn alloc(&mut self, device: usize, bytes: usize, total: usize) -> Option<u64> {
        let rounded = bytes.max(1).checked_next_multiple_of(GRAIN)?;
        if rounded > total - self.used[device] {
            return None;
        }
        let address = self.next[device];
        self.next[device] += (rounded as u64 + GAP).next_multiple_of(GAP);
        self.used[device] += rounded;
        let fresh = Allocation {
            bytes: vec![POISON; bytes].into(),
            shadow: vec![0; bytes].into(),
            history: History::default(),
        };
        self.allocations.insert(address, fresh);
        Some(address)
    }

    pub fn free(&mut self, device: usize, address: u64) {
        let freed = self.allocations.remove(&address).expect("freed memory was allocated");
        self.used[device] -= freed.bytes.len().max(1).next_multiple_of(GRAIN);
    }

    pub fn pin(&mut self, bytes: usize, kind: PinnedKind) -> Option<NonNull<u8>> {
        let layout = Layout::from_size_align(bytes.max(1), 4096).ok()?;
        // SAFETY: the layout has a size.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        // SAFETY: freshly allocated, of this size.
        unsafe { start.write_bytes(POISON, layout.size()) };
        let n_shadow = if kind == PinnedKind::Mapped { layout.size() } else { 0 };
        let shadow = vec![0; n_shadow].into();
        let block = PinnedBlock { layout, kind, shadow, history: History::default() };
        self.pinned.insert(start.as_ptr() as usize, block);
        Some(start)
    }

    pub fn unpin(&mut self, start: NonNull<u8>) {
        let block = self.pinned.remove(&(start.as_ptr() as usize)).expect("pinned before");
        // SAFETY: allocated in `pin` with this layout, and just taken from the list.
        unsafe { dealloc(start.as_ptr(), block.layout) };
    }

    /// The allocation of these bytes, and their offset in it.
    fn find(&mut self, address: u64, bytes: usize) -> Result<(&mut Allocation, usize), String> {
        let found = self.allocations.range_mut(..=address).next_back();
        let within = found.and_then(|(start, a)| {
            let offset = (address - start) as usize;
            (offset <= a.bytes.len() && bytes <= a.bytes.len() - offset).then_some((a, offset))
        });
        within.ok_or_else(|| format!("{bytes} bytes at {address:#x} are not memory of a device"))
    }

    /// Records an access to host memory, if it is pinned.
    fn touch_host(
        &mut self,
        at: *const u8,
        bytes: usize,
        writes: bool,
        stamp: &Stamp,
        what: &str,
    ) -> Result<(), String> {
        let Some((block, offset)) = self.pinned_at(at) else { return Ok(()) };
        if writes && block.kind == PinnedKind::WriteCombined {
            return Err(format!("{what} into write-combined memory, which the host reads slowly"));
        }
        let range = offset..offset + bytes;
        if writes && block.is_mapped() {
            block.shadow[range.clone()].fill(WRITTEN);
        }
        block.history.touch(stamp, vec![range], writes, what)
    }

    pub fn is_mapped(&mut self, at: *const u8) -> bool {
        self.pinned_at(at).is_some_and(|(block, _)| block.is_mapped())
    }

    /// Records an access of the host to mapped memory.
    pub fn touch_mapped(
        &mut self,
        at: *const u8,
        bytes: usize,
        writes: bool,
        stamp: &Stamp,
    ) -> Result<(), String> {
        let Some((block, offset)) = self.pinned_at(at) else { return Ok(()) };
        let never = block.shadow[offset..offset + bytes].iter().any(|s| s & WRITTEN == 0);
        if !writes && never {
            return Err("the host reads mapped bytes that were never written".into());
        }
        self.touch_host(at, bytes, writes, stamp, "the host")
    }

    /// The host writes a word of mapped memory, whatever else uses it.
    pub fn store_word(&mut self, word: NonNull<u32>, value: u32, stamp: &Stamp) {
        let at = word.as_ptr().cast::<u8>();
        let Some((block, offset)) = self.pinned_at(at) else { return };
        let range = offset..offset + 4;
        block.shadow[range.clone()].fill(WRITTEN);
        // Streams, kernels and the host write such words one at a time: they do not race.
        let _ = block.history.touch(stamp, vec![range], true, "the host");
        // SAFETY: a word of a live block; only this machine, which is locked, uses it meanwhile.
        unsafe { at.copy_from_nonoverlapping(value.to_le_bytes().as_ptr(), 4) };
    }

    /// A stream writes a word.
    pub fn write_word(&mut self, address: u64, value: u32, stamp: &Stamp) -> Result<(), String> {
        let (bytes, what) = (value.to_le_bytes(), "write of a value");
        if let Some((block, offset)) = self.mapped_word(address) {
            let range = offset..offset + 4;
            block.shadow[range.clone()].fill(WRITTEN);
            block.history.touch(stamp, vec![range], true, what)?;
            // SAFETY: a word of a live block, in order with every other access as just checked.
            unsafe { (address as usize as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), 4) };
            return Ok(());
        }
        let (a, offset) = self.find(address, 4)?;
        let range = offset..offset + 4;
        a.history.touch(stamp, vec![range.clone()], true, what)?;
        a.bytes[range.clone()].copy_from_slice(&bytes);
        a.shadow[range].fill(WRITTEN);
        Ok(())
    }

    /// The mapped block of the word at `address`, and its offset there.
    fn mapped_word(&mut self, address: u64) -> Option<(&mut PinnedBlock, usize)> {
        let (block, offset) = self.pinned_at(address as usize as *const u8)?;
        (block.is_mapped() && offset + 4 <= block.layout.size()).then_some((block, offset))
    }

    fn pinned_at(&mut self, at: *const u8) -> Option<(&mut PinnedBlock, usize)> {
        let (start, block) = self.pinned.range_mut(..=at as usize).next_back()?;
        let offset = at as usize - start;
        (offset < block.layout.size()).then_some((block, offset))
    }

    pub fn check_host(
        &mut self,
        at: *const u8,
        bytes: usize,
        writes: bool,
        host: &Clock,
    ) -> Result<(), String> {
        let Some((block, offset)) = self.pinned_at(at) else { return Ok(()) };
        let range = offset..offset + bytes;
        block
            .history
            .check(host, std::slice::from_ref(&range), writes)
            .map_err(|other| format!("the host uses {other}"))
    }

    /// # Safety
    /// `bytes` bytes at `from` can be read.
    pub unsafe fn copy_up(
        &mut self,
        to: u64,
        from: *const u8,
        bytes: usize,
        stamp: &Stamp,
    ) -> Result<(), String> {
        self.touch_host(from, bytes, false, stamp, "copy up")?;
        let (a, offset) = self.find(to, bytes)?;
        let range = offset..offset + bytes;
        a.history.touch(stamp, vec![range.clone()], true, "copy up")?;
        // SAFETY: readable by the caller's promise; bytes of a device are nowhere in the host's
        // hands, so they do not overlap.
        unsafe { a.bytes[range.clone()].as_mut_ptr().copy_from_nonoverlapping(from, bytes) };
        a.shadow[range].fill(WRITTEN);
        Ok(())
    }

    /// # Safety
    /// `bytes` bytes at `to` can be written.
    pub unsafe fn copy_down(
        &mut self,
        to: *mut u8,
        from: u64,
        bytes: usize,
        stamp: &Stamp,
    ) -> Result<(), String> {
        self.touch_host(to, bytes, true, stamp, "copy down")?;
        let (a, offset) = self.find(from, bytes)?;
        let range = offset..offset + bytes;
        a.history.touch(stamp, vec![range.clone()], false, "copy down")?;
        if let Some(at) = a.shadow[range.clone()].iter().position(|s| s & WRITTEN == 0) {
            let at = from + at as u64;
            return Err(format!("copy down reads a byte at {at:#x} that was never written"));
        }
        // SAFETY: as in `copy_up`, the other way.
        unsafe { to.copy_from_nonoverlapping(a.bytes[range].as_ptr(), bytes) };
        Ok(())
    }

    pub fn copy_on(
        &mut self,
        to: u64,
        from: u64,
        bytes: usize,
        stamp: &Stamp,
    ) -> Result<(), String> {
        let (source, offset) = self.find(from, bytes)?;
        let range = offset..offset + bytes;
        source.history.touch(stamp, vec![range.clone()], false, "copy on the device")?;
        let (values, shadow) =
            (source.bytes[range.clone()].to_vec(), source.shadow[range].to_vec());
        let (target, offset) = self.find(to, bytes)?;
        let range = offset..offset + bytes;
        target.history.touch(stamp, vec![range.clone()], true, "copy on the device")?;
        target.bytes[range.clone()].copy_from_slice(&values);
        target.shadow[range].copy_from_slice(&shadow);
        Ok(())
    }

    pub fn fill(&mut self, to: u64, value: u8, bytes: usize, stamp: &Stamp) -> Result<(), String> {
        let (a, offset) = self.find(to, bytes)?;
        let range = offset..offset + bytes;
        a.history.touch(stamp, vec![range.clone()], true, "fill")?;
        a.bytes[range.clone()].fill(value);
        a.shadow[range].fill(WRITTEN);
        Ok(())
    }

    /// The word at `address`.
    pub fn word(&self, address: u64) -> Result<u32, String> {
        let mapped = self.pinned.range(..=address as usize).next_back();
        let mapped = mapped.map(|(start, block)| (block, address as usize - start));
        let is_in = |block: &PinnedBlock, at: usize| at + 4 <= block.shadow.len();
        if let Some((block, at)) = mapped.filter(|(block, at)| is_in(block, *at)) {
            if block.shadow[at..at + 4].iter().any(|s| s & WRITTEN == 0) {
                return Err(format!("the word at {address:#x} was never written"));
            }
            // SAFETY: a word of a live block, which the host writes by `store_word` alone.
            return Ok(unsafe { (address as usize as *const u32).read() });
        }
        let found = self.allocations.range(..=address).next_back();
        let found = found.and_then(|(start, a)| {
            let range = (address - start) as usize..(address - start) as usize + 4;
            Some((a.bytes.get(range.clone())?, a.shadow.get(range)?))
        });
        let Some((bytes, shadow)) = found else {
            return Err(format!("the word at {address:#x} is not memory of a device"));
        };
        if shadow.iter().any(|s| s & WRITTEN == 0) {
            return Err(format!("the word at {address:#x} was never written"));
        }
        Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    }

    /// The operations that are done when the latest write to the word at `address` is.
    pub fn last_write(&mut self, address: u64) -> Result<Clock, String> {
        if let Some((block, at)) = self.mapped_word(address) {
            return Ok(block.history.last_write(&(at..at + 4)));
        }
        let (a, offset) = self.find(address, 4)?;
        Ok(a.history.last_write(&(offset..offset + 4)))
    }

    /// The memory that a kernel on `device` can touch, in ascending order: the device's, what is
    /// mapped, and what is registered and shown.
    pub fn of_device(&mut self, device: usize) -> Vec<ShimAllocation> {
        let own = self.allocations.range_mut(base(device)..base(device + 1));
        let own = own.map(|(at, a)| (*at, a.bytes.as_mut_ptr(), &mut a.shadow, a.bytes.len()));
        let mapped = self.pinned.iter_mut().filter(|(_, block)| block.is_mapped());
        let mapped = mapped.map(|(start, block)| {
            let size = block.layout.size();
            (*start as u64, *start as *mut u8, &mut block.shadow, size)
        });
        let all = own.chain(mapped).chain(self.registered.shown()).map(
            |(address, bytes, shadow, size)| ShimAllocation {
                address,
                size: size as u64,
                bytes,
                shadow: shadow.as_mut_ptr(),
                touched_low: 0,
                touched_high: 0,
            },
        );
        let mut all: Vec<_> = all.collect();
        all.sort_by_key(|a| a.address);
        all
    }

    /// Records the accesses of a launch, and resets the shadows for the next. `reads`: of
    /// registered memory.
    pub fn touched(
        &mut self,
        touched: &[ShimAllocation],
        reads: &[HostRead],
        stamp: &Stamp,
        what: &str,
    ) -> Result<(), String> {
        let mut found = Ok(());
        for touched in touched.iter().filter(|t| !t.touched().is_empty()) {
            if let Some(checked) = self.registered.touched(touched, reads, what) {
                found = found.and(checked);
                continue;
            }
            let (shadow, history) = match self.allocations.get_mut(&touched.address) {
                Some(a) => (&mut a.shadow, &mut a.history),
                None => {
                    let block = self.pinned.get_mut(&(touched.address as usize));
                    let block = block.expect("not freed meanwhile");
                    (&mut block.shadow, &mut block.history)
                }
            };
            for (bit, writes) in [(WRITTEN_NOW, true), (READ_NOW, false)] {
                let ranges = marked(shadow, touched.touched(), bit);
                let fault = history.touch(stamp, ranges, writes, what);
                found = found.and(fault);
            }
            shadow[touched.touched()].iter_mut().for_each(|s| *s &= WRITTEN);
        }
        found
    }

    pub fn forget(&mut self, horizon: &Clock) {
        self.allocations.values_mut().for_each(|a| a.history.forget(horizon));
        self.pinned.values_mut().for_each(|p| p.history.forget(horizon));
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for start in self.pinned.keys().copied().collect::<Vec<_>>() {
            self.unpin(NonNull::new(start as *mut u8).expect("no block is at null"));
        }
    }
}

/// Runs of bytes of `range` whose shadow has `bit`.
pub fn marked(shadow: &[u8], range: Range<usize>, bit: u8) -> Vec<Range<usize>> {
    const WORD: usize = size_of::<u64>();
    const LINE: usize = 16 * WORD;
    let mask = u64::from_ne_bytes([bit; WORD]);
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut add = |start: usize, end: usize| match runs.last_mut() {
        Some(run) if run.end == start => run.end = end,
        _ => runs.push(start..end),
    };
    for (i, line) in shadow[range.clone()].chunks(LINE).enumerate() {
        // Most are not marked at all.
        if line.iter().fold(0, |all, byte| all | byte) & bit == 0 {
            continue;
        }
        // Most words are marked as a whole or not at all.
        for (j, word) in line.chunks(WORD).enumerate() {
            let start = range.start + LINE * i + WORD * j;
            match word.try_into().map(|word| u64::from_ne_bytes(word) & mask) {
                Ok(0) => {}
                Ok(all) if all == mask => add(start, start + WORD),
                _ => {
                    let bytes = word.iter().enumerate().filter(|(_, byte)| **byte & bit != 0);
                    bytes.for_each(|(byte, _)| add(start + byte, start + byte + 1));
                }
            }
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_marked_bytes_end_anywhere() {
        for (start, end) in [(0, 0), (3, 4), (5, 29), (8, 24), (0, 400), (13, 258)] {
            for range in [0..400, start..400, 0..end, start..end] {
                let mut shadow = vec![WRITTEN; 400];
                shadow[start..end].fill(WRITTEN | READ_NOW);
                let found = marked(&shadow, range.clone(), READ_NOW);
                let both = range.start.max(start)..range.end.min(end);
                let expected = if both.is_empty() { vec![] } else { vec![both] };
                assert_eq!(found, expected, "{start}..{end} within {range:?}");
            }
        }
        let mut shadow = vec![0; 24];
        [1, 2, 7, 8, 20].iter().for_each(|i| shadow[*i] = WRITTEN_NOW);
        assert_eq!(marked(&shadow, 0..24, WRITTEN_NOW), [1..3, 7..9, 20..21]);
    }
}
