//! Streams, events and graphs that destroy themselves.

use super::host_waits::Waiting;
use super::{
    Device, DeviceSlice, EventId, EventKind, GraphId, Grid, Kernel, KernelParams, Launch, StreamId,
};
use crate::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The longest time that work of a device takes, but for streams that wait for the host.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A queue of operations. They run in order, concurrently with those of other streams.
pub struct Stream {
    gpu: Device,
    id: StreamId,
    /// Events of dropped marks.
    spare: Arc<Mutex<Vec<Event>>>,
}

impl Stream {
    pub fn new(gpu: &Device) -> Result<Stream> {
        Self::with(gpu, false)
    }

    /// A stream with priority over the others.
    pub fn urgent(gpu: &Device) -> Result<Stream> {
        Self::with(gpu, true)
    }

    fn with(gpu: &Device, urgent: bool) -> Result<Stream> {
        let id = gpu.create_stream(urgent)?;
        Ok(Stream { gpu: gpu.clone(), id, spare: Arc::default() })
    }

    pub fn gpu(&self) -> &Device {
        &self.gpu
    }

    pub fn id(&self) -> StreamId {
        self.id
    }

    /// # Safety
    /// `from` exists and does not change until the copy is done.
    pub unsafe fn upload(&self, to: DeviceSlice, from: &[u8]) -> Result<()> {
        assert_eq!(to.len(), from.len());
        // SAFETY: `to` is a slice of a buffer, whose end waits for the device; `from` is the
        // caller's promise.
        unsafe { self.gpu.copy_up(self.id, to.address(), from.as_ptr(), from.len()) }
    }

    /// Uploads `to.len()` bytes that may be written until the copy runs.
    ///
    /// # Safety
    /// The bytes at `from` exist until the copy is done, and are not written while it runs.
    pub unsafe fn upload_from(&self, to: DeviceSlice, from: *const u8) -> Result<()> {
        // SAFETY: `to` is a slice of a buffer, whose end waits for the device; `from` is the
        // caller's promise.
        unsafe { self.gpu.copy_up(self.id, to.address(), from, to.len()) }
    }

    /// # Safety
    /// The `from.len()` bytes at `to` exist, and nothing else uses them until the copy is done.
    pub unsafe fn download(&self, to: *mut u8, from: DeviceSlice) -> Result<()> {
        // SAFETY: `from` is a slice of a buffer, whose end waits for the device; `to` is the
        // caller's promise.
        unsafe { self.gpu.copy_down(self.id, to, from.address(), from.len()) }
    }

    /// Uploads after the operations that the stream has queued, and waits.
    pub fn upload_now(&self, to: DeviceSlice, from: &[u8]) -> Result<()> {
        // SAFETY: `from` is borrowed until the stream is done. Should waiting fail, then the
        // device is lost and runs nothing more.
        unsafe { self.upload(to, from)? };
        self.synchronize()
    }

    /// Downloads after the operations that the stream has queued, and waits.
    pub fn download_now(&self, to: &mut [u8], from: DeviceSlice) -> Result<()> {
        assert_eq!(to.len(), from.len());
        // SAFETY: as in `upload_now`.
        unsafe { self.download(to.as_mut_ptr(), from)? };
        self.synchronize()
    }

    /// Copies within a device, or between devices of one driver.
    pub fn copy(&self, to: DeviceSlice, from: DeviceSlice) -> Result<()> {
        assert_eq!(to.len(), from.len());
        // SAFETY: both are slices of buffers, whose end waits for the device.
        unsafe { self.gpu.copy_on(self.id, to.address(), from.address(), from.len()) }
    }

    pub fn fill(&self, to: DeviceSlice, value: u8) -> Result<()> {
        // SAFETY: a slice of a buffer, whose end waits for the device.
        unsafe { self.gpu.fill(self.id, to.address(), value, to.len()) }
    }

    /// # Safety
    /// The kernel is one of this stream's device. The memory that it touches with these parameters
    /// exists until it is done.
    pub unsafe fn launch<P: KernelParams>(
        &self,
        kernel: Kernel<P>,
        grid: Grid,
        params: &P,
    ) -> Result<()> {
        let (layout, params) = (P::LAYOUT, bytemuck::bytes_of(params));
        let launch = Launch { kernel: kernel.id, grid, layout, params };
        // SAFETY: a `Kernel<P>` was found with P's layout; the memory is the caller's promise.
        unsafe { self.gpu.launch(self.id, &launch) }
    }

    /// Tells the device what the kernels that `queue` queues on this stream read of registered
    /// memory, where it is.
    ///
    /// # Safety
    /// The bytes exist and do not change until these kernels are done.
    pub unsafe fn reading(
        &self,
        bytes: &[&[u8]],
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.gpu.begin_reads(self.id, bytes)? };
        queue()?;
        self.gpu.end_reads(self.id)
    }

    pub fn record(&self, event: &Event) -> Result<()> {
        self.gpu.record(event.id, self.id)
    }

    pub fn wait(&self, event: &Event) -> Result<()> {
        self.gpu.wait(self.id, event.id)
    }

    /// Operations queued from here on run when `word`, a u32, is at least `at_least` (their
    /// difference is not negative as an i32) and the operation that wrote it is done. Memory can be
    /// allocated and freed again when the result has been dropped: once whatever writes the word is
    /// queued.
    pub fn wait_value(&self, word: DeviceSlice, at_least: u32) -> Result<Waiting> {
        assert_eq!(word.count::<u32>(), 1);
        let waiting = self.gpu.host_waits().begin();
        // SAFETY: a slice of a buffer, whose end waits for the device.
        unsafe { self.gpu.wait_value(self.id, word.address(), at_least)? };
        Ok(waiting)
    }

    /// Writes `word`, a u32, after the operations that the stream has queued.
    pub fn write_value(&self, word: DeviceSlice, value: u32) -> Result<()> {
        assert_eq!(word.count::<u32>(), 1);
        // SAFETY: a slice of a buffer, whose end waits for the device.
        unsafe { self.gpu.write_value(self.id, word.address(), value) }
    }

    /// A point after the operations that the stream has queued so far.
    pub fn mark(&self) -> Result<Mark> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let event = spare.map_or_else(|| Event::new(&self.gpu), Ok)?;
        self.record(&event)?;
        Ok(Mark { event: Some(event), stream: self.id, spare: self.spare.clone() })
    }

    /// Operations queued from here on run after the mark.
    pub fn wait_for(&self, mark: &Mark) -> Result<()> {
        self.wait(mark.event.as_ref().expect("it is there until the mark is dropped"))
    }

    /// `other` continues when the operations that this stream has queued so far are done.
    pub fn then(&self, other: &Stream) -> Result<()> {
        other.wait_for(&self.mark()?)
    }

    pub fn is_done(&self) -> Result<bool> {
        self.gpu.stream_is_done(self.id)
    }

    pub fn synchronize(&self) -> Result<()> {
        self.gpu.synchronize_stream(self.id)
    }

    /// Waits for a stream that does not wait for this thread: an error if the device is stuck.
    pub fn synchronize_watched(&self) -> Result<()> {
        watched(self.gpu.synchronize_stream_within(self.id, WATCHDOG)?)
    }

    /// A graph of the operations that `queue` queues on this stream and on those that wait for it.
    /// It is on the device when this returns.
    pub fn capture(&self, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let _changing = self.gpu.host_waits().change_memory();
        self.gpu.begin_capture(self.id)?;
        let queued = queue();
        // The capture ends in any case, so that the stream can be used again.
        let made = self.gpu.end_capture(self.id);
        queued?;
        let (id, n_nodes) = made?;
        Ok(Graph { gpu: self.gpu.clone(), id, n_nodes })
    }

    /// # Safety
    /// The memory that the graph's operations use is still there.
    pub unsafe fn run(&self, graph: &Graph) -> Result<()> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.gpu.launch_graph(graph.id, self.id) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.gpu.destroy_stream(self.id);
    }
}

/// The error if a device is stuck.
fn watched(why: Option<String>) -> Result<()> {
    why.map_or(Ok(()), |why| {
        let cure = "set MOEBA_GPU_WAITS=0, so that no stream of it waits for the CPU";
        Err(Error::Device(format!("{why}. If this happens again, {cure}")))
    })
}

/// A point of a stream that is recorded once: a wait for it is a wait for the operations queued
/// before it and no others. Its event is reused after this is dropped; a stream that was told to
/// wait for the mark keeps waiting for this record.
pub struct Mark {
    event: Option<Event>,
    stream: StreamId,
    spare: Arc<Mutex<Vec<Event>>>,
}

impl Mark {
    /// The stream of the mark.
    pub fn stream(&self) -> StreamId {
        self.stream
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).extend(self.event.take());
    }
}

/// A point of a stream that other streams can wait for.
pub struct Event {
    gpu: Device,
    id: EventId,
}

impl Event {
    pub fn new(gpu: &Device) -> Result<Event> {
        Ok(Event { gpu: gpu.clone(), id: gpu.create_event(EventKind::Plain)? })
    }

    /// An event for a thread that has other threads beside it: it sleeps in `synchronize`, where
    /// it would take a core for other events.
    pub fn restful(gpu: &Device) -> Result<Event> {
        Ok(Event { gpu: gpu.clone(), id: gpu.create_event(EventKind::Restful)? })
    }

    /// An event with a time.
    pub fn timed(gpu: &Device) -> Result<Event> {
        Ok(Event { gpu: gpu.clone(), id: gpu.create_event(EventKind::Timed)? })
    }

    /// Whether its latest record is done; true if there was none.
    pub fn is_done(&self) -> Result<bool> {
        self.gpu.event_is_done(self.id)
    }

    pub fn synchronize(&self) -> Result<()> {
        self.gpu.synchronize_event(self.id)
    }

    /// Waits for a point that does not wait for this thread: an error if the device is stuck.
    pub fn synchronize_watched(&self) -> Result<()> {
        watched(self.gpu.synchronize_event_within(self.id, WATCHDOG)?)
    }

    /// Milliseconds from `start`; both are timed, and done.
    pub fn since(&self, start: &Event) -> Result<f32> {
        self.gpu.elapsed_ms(start.id, self.id)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.gpu.destroy_event(self.id);
    }
}

/// Operations and their order, queued together.
pub struct Graph {
    gpu: Device,
    id: GraphId,
    n_nodes: usize,
}

impl Graph {
    /// The number of its operations.
    pub fn n_nodes(&self) -> usize {
        self.n_nodes
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _changing = self.gpu.host_waits().change_memory();
        self.gpu.destroy_graph(self.id);
    }
}
