//! One GPU: the calls of the driver, each with an error message.

use super::library::{Kind, Live, failed};
use super::modules::Modules;
use super::waits;
use crate::backend::gpu::host_waits::HostWaits;
use crate::backend::gpu::{
    DeviceInfo, EventId, EventKind, Gpu, GraphId, KernelId, Launch, Layout, MemoryInfo, PinnedKind,
    StreamId, Version,
};
use crate::{Error, Result};
use cudarc::driver::{DriverError, result, sys};
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Visible to all contexts; written in order, not read.
const PORTABLE: u32 = 1;
const MAPPED: u32 = 2;
const WRITE_COMBINED: u32 = 4;

/// Flags of events: without times; with threads that sleep while they wait.
const UNTIMED: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
const BLOCKING: u32 = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;

/// The most parameters of a kernel.
const PARAMETERS: usize = 32;

pub struct Cuda {
    /// Unique in this process: a later device's context may have this one's address.
    id: u64,
    info: DeviceInfo,
    device: sys::CUdevice,
    /// Retained when the device is first used: an unused device gives none of its memory.
    context: Mutex<Option<sys::CUcontext>>,
    live: Arc<Live>,
    host_waits: Arc<HostWaits>,
    modules: Mutex<Modules>,
}

// SAFETY: handles of the driver may be used from any thread whose current context is theirs, which
// `enter` sees to.
unsafe impl Send for Cuda {}
// SAFETY: as above; the driver serialises its calls.
unsafe impl Sync for Cuda {}

thread_local! {
    /// The `id` whose context this thread has set.
    static CURRENT: Cell<u64> = const { Cell::new(NONE) };
}

const NONE: u64 = 0;
static NEXT_ID: AtomicU64 = AtomicU64::new(NONE + 1);

impl Cuda {
    /// The driver has been initialised.
    pub fn find(
        index: i32,
        driver: Version,
        live: Arc<Live>,
        host_waits: Arc<HostWaits>,
    ) -> Result<Cuda> {
        let what = |did: &str| format!("{did} GPU {index}");
        let device = result::device::get(index).map_err(|e| failed(what("finding"), e))?;
        let mut info = info(index, device, driver).map_err(|e| failed(what("asking"), e))?;
        info.no_waits = waits::refused();
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (context, modules) = (Mutex::default(), Mutex::default());
        Ok(Cuda { id, info, device, context, live, host_waits, modules })
    }

    fn failed(&self, what: &str, error: DriverError) -> Error {
        failed(format!("{what} on GPU {} ({})", self.info.index, self.info.name), error)
    }

    /// Makes this device the calling thread's.
    fn enter(&self) -> Result<()> {
        if CURRENT.get() == self.id {
            return Ok(());
        }
        let context = self.context()?;
        // SAFETY: the context is retained until this is dropped.
        let set = unsafe { result::ctx::set_current(context) };
        set.map_err(|e| self.failed("working", e))?;
        CURRENT.set(self.id);
        Ok(())
    }

    fn context(&self) -> Result<sys::CUcontext> {
        let mut context = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = *context {
            return Ok(context);
        }
        // SAFETY: `device` came from the driver.
        let made = unsafe { result::primary_ctx::retain(self.device) };
        let made = made.map_err(|e| self.failed("opening a context", e))?;
        Ok(*context.insert(made))
    }

    fn stream(&self, stream: StreamId) -> Result<sys::CUstream> {
        self.live.check(Kind::Stream, stream.0);
        self.enter()?;
        Ok(stream.0 as usize as sys::CUstream)
    }

    fn event(&self, event: EventId) -> Result<sys::CUevent> {
        self.live.check(Kind::Event, event.0);
        self.enter()?;
        Ok(event.0 as usize as sys::CUevent)
    }

    /// Allows a kernel all the shared memory that a block can have.
    ///
    /// # Safety
    /// `function` is one of this device.
    unsafe fn allow_shared(
        &self,
        function: sys::CUfunction,
    ) -> std::result::Result<(), DriverError> {
        use sys::CUfunction_attribute_enum as Attribute;
        let own = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the caller's promise.
        unsafe {
            let own = result::function::get_function_attribute(function, own)?;
            let most = self.info.shared_bytes_max as i32 - own;
            result::function::set_function_attribute(function, dynamic, most)
        }
    }

    /// Done, not yet, or a failure.
    fn done(&self, what: &str, answer: sys::CUresult) -> Result<bool> {
        match answer.result() {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(self.failed(what, error)),
        }
    }
}

fn info(
    index: i32,
    device: sys::CUdevice,
    driver: Version,
) -> std::result::Result<DeviceInfo, DriverError> {
    use sys::CUdevice_attribute_enum as Attribute;
    // SAFETY: `device` came from the driver.
    let ask = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    let compute = Version {
        major: ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
        minor: ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
    };
    let clock_khz = ask(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE).unwrap_or(0);
    let clock = ask(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0);
    let bits = ask(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0);
    Ok(DeviceInfo {
        index: index as usize,
        name: result::device::get_name(device)?,
        compute,
        multiprocessors: ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        clock_hz: clock_khz.max(0) as u64 * 1000,
        // SAFETY: as above.
        memory_bytes: unsafe { result::device::total_mem(device)? },
        shared_bytes_max: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
            as u32,
        driver,
        // Kilohertz, two transfers a clock, bits.
        memory_bytes_per_second: clock as u64 * 1000 * 2 * bits as u64 / 8,
        no_waits: None,
    })
}

impl Gpu for Cuda {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.enter()?;
        let info = result::mem_get_info().map_err(|e| self.failed("asking for memory", e))?;
        Ok(MemoryInfo { free_bytes: info.0, total_bytes: info.1 })
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        self.enter()?;
        // The driver refuses sizes of zero.
        // SAFETY: the memory's content is any, which `Gpu::alloc` says.
        let address = unsafe { result::malloc_sync(bytes.max(1)) };
        let what = format!("allocating {bytes} bytes");
        let address = address.map_err(|e| self.failed(&what, e))?;
        self.live.add(Kind::Memory, address);
        Ok(address)
    }

    fn free(&self, address: u64) {
        self.live.remove(Kind::Memory, address);
        if self.synchronize().is_ok() {
            // SAFETY: from `alloc`, live until now, and nothing that is queued uses it any more. A
            // failure leaks it.
            let _ = unsafe { result::free_sync(address) };
        }
    }

    fn alloc_pinned(&self, bytes: usize, kind: PinnedKind) -> Result<NonNull<u8>> {
        self.enter()?;
        let flags = match kind {
            PinnedKind::Cached => PORTABLE,
            PinnedKind::WriteCombined => PORTABLE | WRITE_COMBINED,
            // With unified addressing, which all 64-bit systems have, at the same address.
            PinnedKind::Mapped => PORTABLE | MAPPED,
        };
        // SAFETY: the memory's content is any, which `Gpu::alloc_pinned` says.
        let start = unsafe { result::malloc_host(bytes.max(1), flags) };
        let what = format!("pinning {bytes} bytes of the host's memory");
        let start = start.map_err(|e| self.failed(&what, e))?;
        self.live.add(Kind::Pinned, start as usize as u64);
        Ok(NonNull::new(start.cast()).expect("the driver gives memory or an error"))
    }

    fn free_pinned(&self, start: NonNull<u8>) {
        self.live.remove(Kind::Pinned, start.as_ptr() as usize as u64);
        if self.synchronize().is_ok() {
            // SAFETY: from `alloc_pinned`, live until now, and no copy uses it any more. A failure
            // leaks it.
            let _ = unsafe { result::free_host(start.as_ptr().cast()) };
        }
    }

    unsafe fn register(&self, start: NonNull<u8>, bytes: usize) -> Result<Option<u64>> {
        self.enter()?;
        let at = start.as_ptr();
        // As with `MAPPED`, whose number it has.
        let flags = PORTABLE | MAPPED;
        // SAFETY: the bytes exist by the caller's promise.
        let done = unsafe { sys::cuMemHostRegister_v2(at.cast(), bytes, flags) }.result();
        let what = format!("pinning {bytes} bytes of the host's memory in place");
        done.map_err(|e| self.failed(&what, e))?;
        self.live.add(Kind::Registered, at as usize as u64);
        let mut address = 0;
        // SAFETY: the memory was just registered; the address is written to a variable here.
        let done = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, at.cast(), 0) };
        // A device that cannot read it copies from it all the same.
        Ok(done.result().ok().map(|()| address))
    }

    fn unregister(&self, start: NonNull<u8>) {
        self.live.remove(Kind::Registered, start.as_ptr() as usize as u64);
        if self.synchronize().is_ok() {
            // SAFETY: from `register`, and not let go of until now. A failure leaves it pinned.
            let _ = unsafe { sys::cuMemHostUnregister(start.as_ptr().cast()) };
        }
    }

    fn create_stream(&self, urgent: bool) -> Result<StreamId> {
        self.enter()?;
        let kind = result::stream::StreamKind::NonBlocking;
        let made = result::stream::get_priority_range().and_then(|(lowest, highest)| {
            result::stream::create_with_priority(kind, if urgent { highest } else { lowest })
        });
        let stream = made.map_err(|e| self.failed("making a stream", e))? as usize as u64;
        self.live.add(Kind::Stream, stream);
        Ok(StreamId(stream))
    }

    fn destroy_stream(&self, stream: StreamId) {
        self.live.remove(Kind::Stream, stream.0);
        if self.enter().is_ok() {
            // SAFETY: from `create_stream`, live until now. It finishes what it has queued.
            let _ = unsafe { result::stream::destroy(stream.0 as usize as sys::CUstream) };
        }
    }

    fn create_event(&self, kind: EventKind) -> Result<EventId> {
        self.enter()?;
        let flags = match kind {
            EventKind::Plain => UNTIMED,
            EventKind::Timed => 0,
            EventKind::Restful => UNTIMED | BLOCKING,
        };
        let mut event = std::ptr::null_mut();
        // SAFETY: the driver writes a handle where this one is.
        let made = unsafe { sys::cuEventCreate(&raw mut event, flags) }.result().map(|()| event);
        let event = made.map_err(|e| self.failed("making an event", e))? as usize as u64;
        self.live.add(Kind::Event, event);
        Ok(EventId(event))
    }

    fn destroy_event(&self, event: EventId) {
        self.live.remove(Kind::Event, event.0);
        if self.enter().is_ok() {
            // SAFETY: from `create_event`, live until now.
            let _ = unsafe { result::event::destroy(event.0 as usize as sys::CUevent) };
        }
    }

    fn record(&self, event: EventId, stream: StreamId) -> Result<()> {
        let (event, stream) = (self.event(event)?, self.stream(stream)?);
        // SAFETY: both live.
        let done = unsafe { result::event::record(event, stream) };
        done.map_err(|e| self.failed("recording an event", e))
    }

    fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        let (event, stream) = (self.event(event)?, self.stream(stream)?);
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live.
        let done = unsafe { result::stream::wait_event(stream, event, flags) };
        done.map_err(|e| self.failed("waiting for an event", e))
    }

    fn event_is_done(&self, event: EventId) -> Result<bool> {
        let event = self.event(event)?;
        // SAFETY: live.
        self.done("working", unsafe { sys::cuEventQuery(event) })
    }

    fn synchronize_event(&self, event: EventId) -> Result<()> {
        let event = self.event(event)?;
        // SAFETY: live.
        let done = unsafe { result::event::synchronize(event) };
        done.map_err(|e| self.failed("working", e))
    }

    fn elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32> {
        let (start, end) = (self.event(start)?, self.event(end)?);
        // SAFETY: both live.
        let ms = unsafe { result::event::elapsed(start, end) };
        ms.map_err(|e| self.failed("measuring the time between events", e))
    }

    fn stream_is_done(&self, stream: StreamId) -> Result<bool> {
        let stream = self.stream(stream)?;
        // SAFETY: live.
        self.done("working", unsafe { sys::cuStreamQuery(stream) })
    }

    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        let stream = self.stream(stream)?;
        // SAFETY: live.
        let done = unsafe { result::stream::synchronize(stream) };
        done.map_err(|e| self.failed("working", e))
    }

    fn synchronize(&self) -> Result<()> {
        self.enter()?;
        result::ctx::synchronize().map_err(|e| self.failed("working", e))
    }

    unsafe fn copy_up(
        &self,
        stream: StreamId,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<()> {
        let stream = self.stream(stream)?;
        // SAFETY: the stream lives; the ranges are the caller's promise.
        let done = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream) }.result();
        done.map_err(|e| self.failed("copying up", e))
    }

    unsafe fn copy_down(
        &self,
        stream: StreamId,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        let stream = self.stream(stream)?;
        // SAFETY: the stream lives; the ranges are the caller's promise.
        let done = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream) }.result();
        done.map_err(|e| self.failed("copying down", e))
    }

    unsafe fn copy_on(&self, stream: StreamId, to: u64, from: u64, bytes: usize) -> Result<()> {
        let stream = self.stream(stream)?;
        // Addresses are unique over devices, so the driver knows whose they are.
        // SAFETY: the stream lives; the ranges are the caller's promise.
        let done = unsafe { sys::cuMemcpyAsync(to, from, bytes, stream) }.result();
        done.map_err(|e| self.failed("copying on the device", e))
    }

    unsafe fn fill(&self, stream: StreamId, to: u64, value: u8, bytes: usize) -> Result<()> {
        let stream = self.stream(stream)?;
        // SAFETY: the stream lives; the range is the caller's promise.
        let done = unsafe { result::memset_d8_async(to, value, bytes, stream) };
        done.map_err(|e| self.failed("filling memory", e))
    }

    unsafe fn wait_value(&self, stream: StreamId, address: u64, at_least: u32) -> Result<()> {
        let stream = self.stream(stream)?;
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the stream lives; the word is the caller's promise.
        let done = unsafe { sys::cuStreamWaitValue32_v2(stream, address, at_least, flags) };
        match done.result() {
            // There is no attribute to ask for before: all devices with this driver should have it.
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)) => {
                let DeviceInfo { index, name, .. } = &self.info;
                let why = "its streams cannot wait for a value in memory";
                Err(Error::Device(format!("GPU {index} ({name}) cannot be used: {why}")))
            }
            done => done.map_err(|e| self.failed("waiting for a value", e)),
        }
    }

    unsafe fn write_value(&self, stream: StreamId, address: u64, value: u32) -> Result<()> {
        let stream = self.stream(stream)?;
        // The default: everything before it on the stream can be seen first.
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: the stream lives; the word is the caller's promise.
        let done = unsafe { sys::cuStreamWriteValue32_v2(stream, address, value, flags) }.result();
        done.map_err(|e| self.failed("writing a value", e))
    }

    fn host_waits(&self) -> &Arc<HostWaits> {
        &self.host_waits
    }

    fn kernel(&self, name: &str, _params: &'static Layout) -> Result<KernelId> {
        self.enter()?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let function = modules.find(name, self.info.compute);
        let what = format!("loading kernel {name}");
        let Some(function) = function.map_err(|e| self.failed(&what, e))? else {
            return Err(Error::Device(format!("there is no kernel {name}")));
        };
        // SAFETY: it was just found in a module of this device, which stays loaded.
        unsafe { self.allow_shared(function) }.map_err(|e| self.failed(&what, e))?;
        Ok(KernelId(function as usize as u64))
    }

    unsafe fn launch(&self, stream: StreamId, launch: &Launch) -> Result<()> {
        let stream = self.stream(stream)?;
        let mut parameters = [std::ptr::null_mut::<c_void>(); PARAMETERS];
        let parameters = &mut parameters[..launch.layout.fields.len()];
        for (parameter, field) in parameters.iter_mut().zip(launch.layout.fields) {
            let bytes = &launch.params[field.offset..][..field.size];
            *parameter = bytes.as_ptr().cast_mut().cast();
        }
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid.blocks, launch.grid.threads);
        // SAFETY: the stream lives, and the kernel came from `kernel`, whose module is loaded. The
        // pointers are to as many parameters as it has: the emulated device compares the struct's
        // name with the kernel's, and tests/gpu/ptx.rs its fields with the PTX. They are copied
        // before the call returns. The memory is the caller's promise.
        let done = unsafe {
            result::launch_kernel(
                launch.kernel.0 as usize as sys::CUfunction,
                (gx, gy, gz),
                (bx, by, bz),
                launch.grid.shared_bytes,
                stream,
                parameters,
            )
        };
        done.map_err(|e| self.failed("launching a kernel", e))
    }

    fn begin_capture(&self, stream: StreamId) -> Result<()> {
        let stream = self.stream(stream)?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        let done = unsafe { result::stream::begin_capture(stream, mode) };
        done.map_err(|e| self.failed("capturing a graph", e))
    }

    fn end_capture(&self, stream: StreamId) -> Result<(GraphId, usize)> {
        let stream = self.stream(stream)?;
        // SAFETY: the stream lives; the graph is destroyed once, after the executable one is made
        // of it.
        let made = unsafe {
            result::stream::end_capture(stream).and_then(|graph| {
                let mut n_nodes = 0;
                let counted = sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut n_nodes);
                let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
                result::graph::destroy(graph)?;
                counted.result()?;
                Ok((made?, n_nodes))
            })
        };
        let (graph, n_nodes) = made.map_err(|e| self.failed("capturing a graph", e))?;
        self.live.add(Kind::Graph, graph as usize as u64);
        // Its first launch may stand behind a wait for the host, and must not need memory there.
        // SAFETY: both live.
        let done = unsafe { sys::cuGraphUpload(graph, stream) }.result();
        done.map_err(|e| self.failed("uploading a graph", e))?;
        Ok((GraphId(graph as usize as u64), n_nodes))
    }

    unsafe fn launch_graph(&self, graph: GraphId, stream: StreamId) -> Result<()> {
        self.live.check(Kind::Graph, graph.0);
        let stream = self.stream(stream)?;
        // SAFETY: both live; what the graph uses is the caller's promise.
        let done = unsafe { result::graph::launch(graph.0 as usize as sys::CUgraphExec, stream) };
        done.map_err(|e| self.failed("launching a graph", e))
    }

    fn destroy_graph(&self, graph: GraphId) {
        self.live.remove(Kind::Graph, graph.0);
        if self.enter().is_ok() {
            // SAFETY: from `end_capture`, live until now.
            let _ = unsafe { result::graph::exec_destroy(graph.0 as usize as sys::CUgraphExec) };
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let context = *self.context.get_mut().unwrap_or_else(PoisonError::into_inner);
        if context.is_none() || self.synchronize().is_err() {
            return;
        }
        let modules = self.modules.get_mut().unwrap_or_else(PoisonError::into_inner);
        modules.unload();
        CURRENT.set(NONE);
        // SAFETY: retained in `context`, once.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}
