//! The interface to a GPU. Two drivers implement it: `backend::cuda`, and the emulated device,
//! which runs the same kernels on the CPU and reports faults that a real GPU shows only sometimes:
//! accesses out of bounds, reads of uninitialised memory, missing waits.
//!
//! [`Gpu`] is the driver's interface, with numbers for handles. Other code uses the types that own
//! the handles: [`DeviceBuffer`], [`Pinned`], [`Stream`], [`Event`], [`Graph`]. Each file wraps the
//! kernels of the `kernels/*.cu` that it names: it asserts sizes, fills the parameters and
//! launches.

pub mod activate;
pub mod acts;
pub mod attention;
mod buffer;
pub mod cache;
pub mod delta;
pub mod embed;
#[cfg(feature = "emulated")]
pub mod emulated;
pub mod expert;
pub mod heads;
pub mod mat;
pub mod matmul;
pub mod matvec;
pub mod norm;
mod params;
pub mod rope;
pub mod router;
pub mod rows;
pub mod sample;
pub mod slots;
mod stream;

pub use buffer::{DeviceBuffer, DeviceSlice, Pinned, no_room};
#[cfg(feature = "emulated")]
pub use emulated::Emulated;
pub use params::{DevicePtr, Field, Kernel, KernelParams, Layout, u32_of};
pub(crate) use params::{kernel_params, kernels};
pub use stream::{Event, Graph, Mark, Stream};

use crate::Result;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// The layouts of all parameter structs.
pub const LAYOUTS: &[&Layout] = &[
    activate::GatedParams::LAYOUT,
    activate::InPlaceParams::LAYOUT,
    rows::MulRowsParams::LAYOUT,
    acts::QuantizeParams::LAYOUT,
    attention::AttentionParams::LAYOUT,
    attention::CombineParams::LAYOUT,
    cache::CacheStoreParams::LAYOUT,
    delta::DeltaInputsParams::LAYOUT,
    delta::DeltaRuleParams::LAYOUT,
    delta::DeltaNormParams::LAYOUT,
    embed::EmbedParams::LAYOUT,
    expert::GateUpParams::LAYOUT,
    expert::DownParams::LAYOUT,
    expert::OrderedSumParams::LAYOUT,
    heads::HeadProductsParams::LAYOUT,
    matmul::MatmulParams::LAYOUT,
    matvec::MatvecParams::LAYOUT,
    norm::RmsNormParams::LAYOUT,
    norm::LayerNormParams::LAYOUT,
    norm::AddScaledParams::LAYOUT,
    rope::RopeParams::LAYOUT,
    router::RouteParams::LAYOUT,
    rows::CopyColumnsParams::LAYOUT,
    rows::ValuesParams::LAYOUT,
    sample::TopKParams::LAYOUT,
    slots::ResolveParams::LAYOUT,
    slots::LimitParams::LAYOUT,
    slots::PlaceRowsParams::LAYOUT,
    #[cfg(feature = "emulated")]
    emulated::ProbeParams::LAYOUT,
];

/// A device, shared by everything that is on it.
pub type Device = Arc<dyn Gpu>;

/// A compute capability, or a version of CUDA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

impl Version {
    pub const fn new(major: u32, minor: u32) -> Version {
        Version { major, minor }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The constant properties of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number among the driver's devices.
    pub index: usize,
    pub name: String,
    /// The compute capability, 7.5 for Turing.
    pub compute: Version,
    pub multiprocessors: u32,
    /// The highest clock of the multiprocessors; 0 if it is not known.
    pub clock_hz: u64,
    pub memory_bytes: usize,
    /// The most shared memory of a block, static and dynamic.
    pub shared_bytes_max: u32,
    /// The newest CUDA version that the driver supports.
    pub driver: Version,
    /// From clock and width of the memory bus; 0 if they are not known.
    pub memory_bytes_per_second: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    pub free_bytes: usize,
    pub total_bytes: usize,
}

/// Host memory that the device copies from and to by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinnedKind {
    /// Ordinary memory to the CPU.
    Cached,
    /// Fast to upload from and to write in order; very slow for the CPU to read.
    WriteCombined,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(pub(in crate::backend) u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventId(pub(in crate::backend) u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GraphId(pub(in crate::backend) u64);

/// A kernel of the device that it was found on, see [`Kernel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelId(pub(in crate::backend) u64);

/// The most blocks of a grid along y or z.
const GRID_MAX: usize = 65_535;

/// The blocks of a launch, and the threads of a block.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Blocks along x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block along x, y and z; a whole number of warps.
    pub threads: [u32; 3],
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

impl Grid {
    /// Blocks of `threads` threads along x.
    pub fn new(blocks: [u32; 3], threads: u32) -> Grid {
        Grid { blocks, threads: [threads, 1, 1], shared_bytes: 0 }
    }

    /// A thread for each of `n` elements, in blocks of `threads`.
    pub fn each(n: usize, threads: u32) -> Grid {
        Grid::new([u32_of(n.div_ceil(threads as usize)), 1, 1], threads)
    }

    pub fn with_shared(self, bytes: usize) -> Grid {
        Grid { shared_bytes: u32_of(bytes), ..self }
    }
}

/// A launch as drivers take it, see [`Stream::launch`].
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    pub kernel: KernelId,
    pub grid: Grid,
    pub layout: &'static Layout,
    /// The parameters: a struct of this layout, aligned to 8 bytes.
    pub params: &'a [u8],
}

/// A device of a driver. Device addresses are numbers. Operations are queued on streams and run
/// later, those of one stream in order. After an operation has failed, every call fails with the
/// same sentence.
pub trait Gpu: Send + Sync {
    fn info(&self) -> &DeviceInfo;
    fn memory(&self) -> Result<MemoryInfo>;

    /// Uninitialised device memory, aligned to at least 256 bytes.
    fn alloc(&self, bytes: usize) -> Result<u64>;
    /// Waits for the device and frees memory of `alloc`.
    fn free(&self, address: u64);
    /// Uninitialised host memory, aligned to a page.
    fn alloc_pinned(&self, bytes: usize, kind: PinnedKind) -> Result<NonNull<u8>>;
    /// Waits for the device and frees memory of `alloc_pinned`.
    fn free_pinned(&self, start: NonNull<u8>);

    /// Streams with `urgent` have priority over the others.
    fn create_stream(&self, urgent: bool) -> Result<StreamId>;
    fn destroy_stream(&self, stream: StreamId);
    /// Without `timed` it costs less, and `elapsed_ms` refuses it.
    fn create_event(&self, timed: bool) -> Result<EventId>;
    fn destroy_event(&self, event: EventId);

    /// The event is done when everything that `stream` has queued so far is.
    fn record(&self, event: EventId, stream: StreamId) -> Result<()>;
    /// Operations queued on `stream` from here on run after the event's latest record, if any.
    fn wait(&self, stream: StreamId, event: EventId) -> Result<()>;
    fn event_is_done(&self, event: EventId) -> Result<bool>;
    fn synchronize_event(&self, event: EventId) -> Result<()>;
    /// The milliseconds between two timed events that are done.
    fn elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32>;
    fn stream_is_done(&self, stream: StreamId) -> Result<bool>;
    fn synchronize_stream(&self, stream: StreamId) -> Result<()>;
    /// Waits for every stream of the device.
    fn synchronize(&self) -> Result<()>;

    /// # Safety
    /// Host bytes `from..from + bytes` exist and do not change until the copy is done; the device
    /// has `to..to + bytes`.
    unsafe fn copy_up(
        &self,
        stream: StreamId,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<()>;
    /// # Safety
    /// Host bytes `to..to + bytes` exist, and nothing else uses them until the copy is done; the
    /// device has `from..from + bytes`.
    unsafe fn copy_down(
        &self,
        stream: StreamId,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<()>;
    /// Copies within this device, or between two devices of the same driver.
    ///
    /// # Safety
    /// Both ranges exist on their devices, and until the copy is done.
    unsafe fn copy_on(&self, stream: StreamId, to: u64, from: u64, bytes: usize) -> Result<()>;
    /// # Safety
    /// The device has `to..to + bytes` until this is done.
    unsafe fn fill(&self, stream: StreamId, to: u64, value: u8, bytes: usize) -> Result<()>;

    /// Operations queued on `stream` from here on run when the word at `address`, a multiple of 4,
    /// is at least `at_least`: when their difference is not negative as an i32, so that counters
    /// may wrap. The operation that wrote it is done then, too. Not allowed while the stream is
    /// captured.
    ///
    /// # Safety
    /// The device has the word until the wait is over.
    unsafe fn wait_value(&self, stream: StreamId, address: u64, at_least: u32) -> Result<()>;

    /// The kernel of this name, which takes these parameters. The emulated device answers with an
    /// error if it takes others.
    fn kernel(&self, name: &str, params: &'static Layout) -> Result<KernelId>;
    /// # Safety
    /// The kernel was found with the launch's layout. The memory that it touches with these
    /// parameters exists until it is done.
    unsafe fn launch(&self, stream: StreamId, launch: &Launch) -> Result<()>;

    /// From here on `stream` records operations in a graph instead of queueing them, and so does a
    /// stream that waits for an event recorded on it.
    fn begin_capture(&self, stream: StreamId) -> Result<()>;
    /// The recorded graph; every stream that joined must have been waited for.
    fn end_capture(&self, stream: StreamId) -> Result<GraphId>;
    /// # Safety
    /// The memory of its operations exists until they are done.
    unsafe fn launch_graph(&self, graph: GraphId, stream: StreamId) -> Result<()>;
    fn destroy_graph(&self, graph: GraphId);

    /// Checks an access of the host to pinned bytes: an error if a queued operation uses them, or
    /// one that the host has not waited for. Only the emulated device checks it.
    fn check_host_access(&self, start: *const u8, bytes: usize, writes: bool) -> Result<()> {
        let _ = (start, bytes, writes);
        Ok(())
    }
}
