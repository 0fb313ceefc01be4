//! Memory that frees itself: of the device, and of the host where the device reaches it.

use super::{Device, PinnedKind};
use crate::units::size;
use crate::{Error, Result};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

/// The error where memory for `what` was refused. A device that is lost refuses everything.
pub fn no_room(gpu: &Device, what: &str, error: Error) -> Error {
    match gpu.memory() {
        Ok(_) => Error::Device(format!("no room for {what}: {error}")),
        Err(lost) => lost,
    }
}

/// Device memory. Dropping it waits for the device.
pub struct DeviceBuffer {
    gpu: Device,
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    pub fn new(gpu: &Device, bytes: usize) -> Result<DeviceBuffer> {
        let _changing = gpu.host_waits().change_memory();
        Ok(DeviceBuffer { gpu: gpu.clone(), address: gpu.alloc(bytes)?, bytes })
    }

    /// Allocates; the error names the purpose of the memory and the flags that reduce it.
    pub fn of(gpu: &Device, bytes: usize, what: &str, flags: &str) -> Result<DeviceBuffer> {
        DeviceBuffer::new(gpu, bytes).map_err(|error| {
            no_room(gpu, &format!("{} of {what} ({flags})", size(bytes as u64)), error)
        })
    }

    pub fn gpu(&self) -> &Device {
        &self.gpu
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub fn all(&self) -> DeviceSlice<'_> {
        DeviceSlice { address: self.address, bytes: self.bytes, owner: PhantomData }
    }

    pub fn slice(&self, range: Range<usize>) -> DeviceSlice<'_> {
        self.all().slice(range)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let _changing = self.gpu.host_waits().change_memory();
        self.gpu.free(self.address);
    }
}

/// Some bytes of a [`DeviceBuffer`], or of mapped or registered memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSlice<'a> {
    address: u64,
    bytes: usize,
    owner: PhantomData<&'a DeviceBuffer>,
}

impl<'a> DeviceSlice<'a> {
    pub fn address(self) -> u64 {
        self.address
    }

    pub fn len(self) -> usize {
        self.bytes
    }

    pub fn is_empty(self) -> bool {
        self.bytes == 0
    }

    /// Whether it holds n elements of T and is aligned for them.
    pub fn holds<T>(self, n: usize) -> bool {
        n * size_of::<T>() <= self.bytes && self.address.is_multiple_of(align_of::<T>() as u64)
    }

    /// The number of elements of T.
    ///
    /// # Panics
    /// If it is not a whole number of them, or not aligned for them.
    pub fn count<T>(self) -> usize {
        assert!(self.bytes.is_multiple_of(size_of::<T>()), "{} bytes", self.bytes);
        assert!(self.address.is_multiple_of(align_of::<T>() as u64), "{:#x}", self.address);
        self.bytes / size_of::<T>()
    }

    pub fn slice(self, range: Range<usize>) -> DeviceSlice<'a> {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {}", self.bytes);
        let address = self.address + range.start as u64;
        DeviceSlice { address, bytes: range.len(), ..self }
    }
}

/// Page-locked host memory, which the device can copy from and to asynchronously. Dropping it waits
/// for the device.
pub struct Pinned {
    gpu: Device,
    start: NonNull<u8>,
    bytes: usize,
    kind: PinnedKind,
}

// SAFETY: it owns plain bytes; the contract of the methods says when they may be touched.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub fn new(gpu: &Device, bytes: usize, kind: PinnedKind) -> Result<Pinned> {
        let _changing = gpu.host_waits().change_memory();
        let start = gpu.alloc_pinned(bytes, kind)?;
        Ok(Pinned { gpu: gpu.clone(), start, bytes, kind })
    }

    /// Allocates; the error names the purpose of the memory.
    pub fn of(gpu: &Device, bytes: usize, kind: PinnedKind, what: &str) -> Result<Pinned> {
        let what = format!("{what} in pinned memory (--device cpu needs none)");
        Pinned::new(gpu, bytes, kind).map_err(|error| no_room(gpu, &what, error))
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Mapped memory, as kernels and streams see it.
    ///
    /// # Panics
    /// If the memory is not mapped.
    pub fn slice(&self, range: Range<usize>) -> DeviceSlice<'_> {
        assert_eq!(self.kind, PinnedKind::Mapped);
        let address = self.start.as_ptr() as usize as u64;
        DeviceSlice { address, bytes: self.bytes, owner: PhantomData }.slice(range)
    }

    /// Writes the word at offset `at` of mapped memory, for a stream that waits for it.
    ///
    /// # Panics
    /// If the memory is not mapped, or the offset is not a multiple of 4.
    pub fn store_word(&self, at: usize, value: u32) {
        assert_eq!(self.slice(at..at + 4).count::<u32>(), 1);
        // SAFETY: in the buffer, mapped and aligned, by the assertions. Words that streams wait for
        // are written by streams and kernels only otherwise, one word at a time.
        unsafe {
            let word = NonNull::new_unchecked(self.start.as_ptr().add(at)).cast();
            self.gpu.store_word(word, value);
        }
    }

    /// For reading.
    ///
    /// # Panics
    /// On the emulated device, if a copy into them has not been waited for.
    ///
    /// # Safety
    /// Nothing writes these bytes meanwhile: no copy that is queued, no other thread.
    pub unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        let start = self.check(&range, false);
        // SAFETY: in range of this buffer; nothing writes, by the caller's promise.
        unsafe { std::slice::from_raw_parts(start, range.len()) }
    }

    /// For writing.
    ///
    /// # Panics
    /// On the emulated device, if a copy from or to them has not been waited for.
    ///
    /// # Safety
    /// Nothing else uses these bytes meanwhile: no copy that is queued, no other thread.
    #[allow(clippy::mut_from_ref)] // parts are filled while others are read; see the contract
    pub unsafe fn bytes_mut(&self, range: Range<usize>) -> &mut [u8] {
        let start = self.check(&range, true);
        // SAFETY: in range, of this buffer; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }

    fn check(&self, range: &Range<usize>, writes: bool) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {}", self.bytes);
        // SAFETY: within the buffer or one past its end.
        let start = unsafe { self.start.as_ptr().add(range.start) };
        if let Err(why) = self.gpu.check_host_access(start, range.len(), writes) {
            panic!("{why}");
        }
        start
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _changing = self.gpu.host_waits().change_memory();
        self.gpu.free_pinned(self.start);
    }
}

/// Host memory that someone else owns, pinned where it is: every device copies from it directly,
/// and kernels of one may read it. Dropping it waits for the devices.
pub struct Registered {
    gpu: Device,
    start: NonNull<u8>,
    bytes: usize,
    address: Option<u64>,
}

// SAFETY: it touches no byte of the memory.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// Begins and ends at pages.
    ///
    /// # Safety
    /// The bytes exist for as long as the result.
    pub unsafe fn new(gpu: &Device, start: NonNull<u8>, bytes: usize) -> Result<Registered> {
        let _changing = gpu.host_waits().change_memory();
        // SAFETY: the caller's promise; they are let go of when this is dropped.
        let address = unsafe { gpu.register(start, bytes)? };
        Ok(Registered { gpu: gpu.clone(), start, bytes, address })
    }

    /// The memory as kernels of `gpu` see it, which only read it, if they can; see
    /// `Stream::reading`.
    pub fn all(&self) -> Option<DeviceSlice<'_>> {
        self.address.map(|address| DeviceSlice { address, bytes: self.bytes, owner: PhantomData })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let _changing = self.gpu.host_waits().change_memory();
        self.gpu.unregister(self.start);
    }
}
