//! Memory that experts live in: large, aligned for direct reads and for huge pages.

use memmap2::{MmapMut, MmapRaw};
use std::io;
use std::ops::Range;

/// Regions start at multiples of it: one huge page, which is also a multiple of every alignment
/// that direct reads ask for.
pub const REGION_ALIGN: usize = 2 << 20;

/// Anonymous memory, zero until something is read into it, given back when this is dropped.
///
/// It is handed out as a raw pointer because its bytes change owners all the time: a granule's
/// bytes belong to the link while a read into them is on its way, and to the holder of a pin while
/// it is resident. Only the tier's state machine knows which of the two holds, so the rule is: the
/// holder of a read or of a pinned granule may touch its bytes, and no one else. The tier must end
/// all reads into a region before it drops it.
#[derive(Debug)]
pub struct Region {
    map: MmapRaw,
    /// The offset of the aligned part in the map.
    start: usize,
    n_bytes: usize,
}

impl Region {
    /// `n_bytes` of memory, or what the system said instead. Pages cost memory once touched.
    pub fn new(n_bytes: usize) -> io::Result<Region> {
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let mapped = n_bytes.checked_add(2 * REGION_ALIGN).ok_or_else(too_large)?;
        // The map's own alignment is a page, so it has room to move the start, and up to a whole
        // huge page behind the end.
        let map = MmapRaw::from(MmapMut::map_anon(mapped)?);
        let start = map.as_ptr().align_offset(REGION_ALIGN);
        let region = Region { map, start, n_bytes };
        region.advise_huge_pages();
        Ok(region)
    }

    /// Huge pages make reads cheaper to set up and matrix rows cheaper to walk; a kernel without
    /// them serves as well.
    #[cfg(target_os = "linux")]
    fn advise_huge_pages(&self) {
        // Whole ones only: a huge page beyond the end would be memory that was not granted.
        let whole = self.n_bytes - self.n_bytes % REGION_ALIGN;
        if let Err(e) = self.map.advise_range(memmap2::Advice::HugePage, self.start, whole) {
            log::debug!("no huge pages for {} bytes of expert memory: {e}", self.n_bytes);
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn advise_huge_pages(&self) {}

    /// Has the kernel map pages for some bytes as a write to them would, which changes none. False
    /// where it does not: kernels before Linux 5.14 cannot.
    #[cfg(target_os = "linux")]
    pub fn touch(&self, bytes: Range<usize>) -> bool {
        assert!(bytes.start <= bytes.end && bytes.end <= self.n_bytes, "{bytes:?}");
        let start = self.start + bytes.start;
        self.map.advise_range(memmap2::Advice::PopulateWrite, start, bytes.len()).is_ok()
    }

    #[cfg(not(target_os = "linux"))]
    pub fn touch(&self, _bytes: Range<usize>) -> bool {
        false
    }

    /// The first byte, at a multiple of `REGION_ALIGN`. Who may use it is said above.
    pub fn ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(self.start)
    }

    /// Bytes from `ptr` on.
    pub fn len(&self) -> usize {
        self.n_bytes
    }

    pub fn is_empty(&self) -> bool {
        self.n_bytes == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_aligned_zero_and_writable_to_the_end() {
        for n_bytes in [1, 4096, REGION_ALIGN - 1, REGION_ALIGN, 5 * REGION_ALIGN + 4096] {
            let region = Region::new(n_bytes).unwrap();
            assert_eq!((region.ptr() as usize % REGION_ALIGN, region.len()), (0, n_bytes));
            // SAFETY: nothing else uses the region.
            let bytes = unsafe { std::slice::from_raw_parts_mut(region.ptr(), n_bytes) };
            assert!(bytes.iter().all(|&b| b == 0));
            bytes.fill(7);
            assert!(bytes.iter().all(|&b| b == 7));
        }
        assert!(Region::new(0).unwrap().is_empty());
    }

    #[test]
    fn what_the_system_refuses_is_an_error() {
        for n_bytes in [usize::MAX, usize::MAX / 2, 1 << 60] {
            assert!(Region::new(n_bytes).is_err(), "{n_bytes}");
        }
    }
}
