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
pub mod attention_inputs;
pub mod block_keys;
mod buffer;
pub mod cache;
pub mod compress;
pub mod conv;
pub mod delta;
pub mod embed;
#[cfg(feature = "emulated")]
#[path = "../../../tests/emulator/mod.rs"]
pub mod emulated;
pub mod expert;
pub mod group;
pub mod halves;
pub mod heads;
pub mod host_waits;
pub mod index;
pub mod latent;
pub mod mat;
pub mod matmul;
pub mod matvec;
pub mod norm;
mod params;
pub mod rope;
pub mod router;
pub mod rows;
pub mod sample;
pub mod scan;
pub mod slots;
mod stream;
pub mod streams;

pub use buffer::{DeviceBuffer, DeviceSlice, Pinned, Registered, no_room};
#[cfg(feature = "emulated")]
pub use emulated::Emulated;
pub use params::{DevicePtr, Field, Kernel, KernelParams, Layout, u32_of};
pub(crate) use params::{kernel_params, kernels};
pub use stream::{Event, Graph, Mark, Stream};

use crate::Result;
use host_waits::HostWaits;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Whether a variable of the environment switches something on or off: 1 or 0. `None` leaves the
/// choice to the program.
pub fn switch(name: &str) -> Option<bool> {
    match std::env::var(name).ok()?.trim() {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// The layouts of all parameter structs.
pub const LAYOUTS: &[&Layout] = &[
    activate::GatedParams::LAYOUT,
    activate::InPlaceParams::LAYOUT,
    rows::MulRowsParams::LAYOUT,
    acts::QuantizeParams::LAYOUT,
    attention::AttentionParams::LAYOUT,
    attention_inputs::AttentionInputsParams::LAYOUT,
    attention::CombineParams::LAYOUT,
    block_keys::BlockKeysParams::LAYOUT,
    cache::CacheStoreParams::LAYOUT,
    compress::CompressParams::LAYOUT,
    compress::GatherParams::LAYOUT,
    conv::ShortConvParams::LAYOUT,
    delta::DeltaRuleParams::LAYOUT,
    delta::DeltaNormParams::LAYOUT,
    embed::EmbedParams::LAYOUT,
    expert::GateUpParams::LAYOUT,
    expert::DownParams::LAYOUT,
    expert::OrderedSumParams::LAYOUT,
    expert::ScalePairsParams::LAYOUT,
    group::GroupPairsParams::LAYOUT,
    halves::StoreHalvesParams::LAYOUT,
    halves::MatmulHalvesParams::LAYOUT,
    halves::GroupedHalvesParams::LAYOUT,
    heads::HeadProductsParams::LAYOUT,
    index::IndexScoresParams::LAYOUT,
    index::ChooseParams::LAYOUT,
    index::GatherRowsParams::LAYOUT,
    latent::ExpandParams::LAYOUT,
    matmul::MatmulParams::LAYOUT,
    matvec::MatvecParams::LAYOUT,
    norm::RmsNormParams::LAYOUT,
    norm::RmsNormActsParams::LAYOUT,
    norm::LayerNormParams::LAYOUT,
    norm::AddScaledParams::LAYOUT,
    norm::AddNormedParams::LAYOUT,
    rope::RopeParams::LAYOUT,
    router::RouteParams::LAYOUT,
    router::GroupParams::LAYOUT,
    rows::CopyColumnsParams::LAYOUT,
    rows::ValuesParams::LAYOUT,
    sample::TopKParams::LAYOUT,
    scan::ScanParams::LAYOUT,
    scan::SelectiveScanParams::LAYOUT,
    slots::ResolveParams::LAYOUT,
    slots::LimitParams::LAYOUT,
    slots::PlaceRowsParams::LAYOUT,
    streams::JoinStreamsParams::LAYOUT,
    streams::FeedStreamsParams::LAYOUT,
    streams::MeanSiluParams::LAYOUT,
    streams::JoinGatedParams::LAYOUT,
    streams::ScoreStreamsParams::LAYOUT,
    streams::RecallStreamsParams::LAYOUT,
    streams::GateNgramsParams::LAYOUT,
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
    /// Why its streams must not wait for the host, as a clause; none if they may.
    pub no_waits: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    pub free_bytes: usize,
    pub total_bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A thread that waits for it asks all the time: it goes on at once, and takes a core.
    Plain,
    /// A plain event with a time. It costs more; `elapsed_ms` refuses others.
    Timed,
    /// A thread that waits for it sleeps.
    Restful,
}

/// Host memory that the device copies from and to by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinnedKind {
    /// Ordinary memory to the CPU.
    Cached,
    /// Fast to upload from and to write in order; very slow for the CPU to read.
    WriteCombined,
    /// Cached memory that kernels also read and write in place, at its address in the host.
    Mapped,
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

/// Asks whether something is done until it is; or says why it is not, if it takes too long.
fn stuck(
    info: &DeviceInfo,
    most: Duration,
    is_done: impl Fn() -> Result<bool>,
) -> Result<Option<String>> {
    let start = Instant::now();
    while !is_done()? {
        if start.elapsed() > most {
            let DeviceInfo { index, name, .. } = info;
            let seconds = most.as_secs();
            let why = format!("GPU {index} ({name}) has not finished its work for {seconds} s");
            return Ok(Some(why));
        }
        std::thread::yield_now();
    }
    Ok(None)
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
    /// Pins host memory where it is, for copies of all devices of the driver. Begins and ends at
    /// pages. Returns the address at which this device's kernels read it, if they can.
    ///
    /// # Safety
    /// The bytes exist until `unregister`.
    unsafe fn register(&self, start: NonNull<u8>, bytes: usize) -> Result<Option<u64>>;
    /// Waits for all devices and lets go of memory of `register`.
    fn unregister(&self, start: NonNull<u8>);

    /// Streams with `urgent` have priority over the others.
    fn create_stream(&self, urgent: bool) -> Result<StreamId>;
    fn destroy_stream(&self, stream: StreamId);
    fn create_event(&self, kind: EventKind) -> Result<EventId>;
    fn destroy_event(&self, event: EventId);

    /// The event is done when everything that `stream` has queued so far is.
    fn record(&self, event: EventId, stream: StreamId) -> Result<()>;
    /// Operations queued on `stream` from here on run after the event's latest record, if any.
    fn wait(&self, stream: StreamId, event: EventId) -> Result<()>;
    fn event_is_done(&self, event: EventId) -> Result<bool>;
    fn synchronize_event(&self, event: EventId) -> Result<()>;
    /// Waits for this time at most; returns why the event is not done by then, as a clause. The
    /// emulated device sees at once that it never will be.
    fn synchronize_event_within(&self, event: EventId, most: Duration) -> Result<Option<String>> {
        stuck(self.info(), most, || self.event_is_done(event))
    }
    /// The milliseconds between two timed events that are done.
    fn elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32>;
    fn stream_is_done(&self, stream: StreamId) -> Result<bool>;
    fn synchronize_stream(&self, stream: StreamId) -> Result<()>;
    /// `synchronize_event_within`, for a stream.
    fn synchronize_stream_within(&self, s: StreamId, most: Duration) -> Result<Option<String>> {
        stuck(self.info(), most, || self.stream_is_done(s))
    }
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
    /// captured. The word may be in mapped memory of the host.
    ///
    /// # Safety
    /// The word exists until the wait is over.
    unsafe fn wait_value(&self, stream: StreamId, address: u64, at_least: u32) -> Result<()>;
    /// Writes the word at `address`, a multiple of 4, after everything that the stream has queued;
    /// no copy takes part. The word may be in mapped memory of the host.
    ///
    /// # Safety
    /// The word exists until this is done.
    unsafe fn write_value(&self, stream: StreamId, address: u64, value: u32) -> Result<()>;
    /// Writes a word of mapped memory from the host, for a stream that waits for it.
    ///
    /// # Safety
    /// The word is mapped memory, aligned to 4. Whatever else writes it, writes it atomically.
    unsafe fn store_word(&self, word: NonNull<u32>, value: u32) {
        // SAFETY: the caller's promise.
        let word = unsafe { std::sync::atomic::AtomicU32::from_ptr(word.as_ptr()) };
        word.store(value, std::sync::atomic::Ordering::Release);
    }
    /// The waits of the driver's devices for the host.
    fn host_waits(&self) -> &Arc<HostWaits>;

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
    /// The recorded graph and the number of its nodes; every stream that joined must have been
    /// waited for.
    fn end_capture(&self, stream: StreamId) -> Result<(GraphId, usize)>;
    /// # Safety
    /// The memory of its operations exists until they are done.
    unsafe fn launch_graph(&self, graph: GraphId, stream: StreamId) -> Result<()>;
    fn destroy_graph(&self, graph: GraphId);

    /// Kernels that `stream` gets from here to `end_reads` read these bytes of registered memory
    /// where they are. Only the emulated device checks it: that they read no others, and that the
    /// host changes none of them before these kernels are done.
    ///
    /// # Safety
    /// The bytes exist until then.
    unsafe fn begin_reads(&self, stream: StreamId, bytes: &[&[u8]]) -> Result<()> {
        let _ = (stream, bytes);
        Ok(())
    }
    fn end_reads(&self, stream: StreamId) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// Checks an access of the host to pinned bytes: an error if a queued operation uses them, or
    /// one that the host has not waited for. Only the emulated device checks it.
    fn check_host_access(&self, start: *const u8, bytes: usize, writes: bool) -> Result<()> {
        let _ = (start, bytes, writes);
        Ok(())
    }
}
