//! A driver without a GPU. It runs the same kernel source, compiled as C++ against `kernels/shim`,
//! in the host's memory. Operations wait in their streams until the host waits for one, and then
//! run in an order that the seed chooses. Broken rules end in a sentence: see `clock` for
//! operations without a wait between them, and `kernels/shim/device.h` for kernels.

mod capture;
mod clock;
mod machine;
mod memory;
mod queues;
mod registered;
mod shim;

pub use queues::Queues;

use super::host_waits::{self, HostWaits};
use super::{
    Device, DeviceInfo, DevicePtr, EventId, EventKind, Gpu, GraphId, KernelId, Launch, Layout,
    MemoryInfo, PinnedKind, StreamId, Version, kernel_params,
};
use crate::{Error, Result};
use capture::{Capture, Plan};
use machine::{HostPtr, KernelLaunch, Machine, Recorded, Work};
use memory::sum;
use registered::HostRead;
use shim::ShimKernel;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

kernel_params! {
    /// The parameters of the probes, `kernels/shim/probes.cu`.
    pub struct ProbeParams[48] {
        a: DevicePtr,
        b: DevicePtr,
        out: DevicePtr,
        back: DevicePtr,
        factor: f32,
        n: u32,
        what: u32,
        unused: u32,
    }
}

/// The machine to emulate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub devices: usize,
    /// The memory of each device.
    pub memory_bytes: usize,
    pub shared_bytes_max: u32,
    /// Chooses the order in which streams, blocks and threads run. Odd ones let the device run
    /// before the host waits, even ones never do.
    pub seed: u64,
    /// The hardware queues that streams share.
    pub queues: Queues,
    /// Whether streams may wait for the host; `None`: unless they share one queue.
    pub waits: Option<bool>,
    pub faults: Faults,
    /// Whether the user has not asked for it: then the CPU does what it cannot, as with
    /// `--device auto`.
    pub is_auto: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            devices: 1,
            memory_bytes: 1 << 30,
            // Turing's.
            shared_bytes_max: 64 * 1024,
            seed: 0,
            queues: Queues::of_environment(),
            waits: host_waits::asked(),
            faults: Faults::default(),
            is_auto: false,
        }
    }
}

/// Injected faults, each at its n-th occasion, counted from 0 over all devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    pub alloc_at: Option<u64>,
    pub pin_at: Option<u64>,
    /// Memory is pinned in place until this occasion, and never from it on.
    pub register_from: Option<u64>,
    /// Creating a stream, an event or a graph fails.
    pub make_at: Option<u64>,
    /// The device that runs the n-th operation is lost.
    pub lost_at_op: Option<u64>,
}

/// One emulated device; those made together share their streams' order and can copy between them.
pub struct Emulated {
    machine: Arc<Mutex<Machine>>,
    info: DeviceInfo,
    host_waits: Arc<HostWaits>,
}

impl Emulated {
    /// The devices of one emulated machine.
    pub fn devices(config: &Config) -> Vec<Device> {
        let machine = Arc::new(Mutex::new(Machine::new(config.clone())));
        let host_waits = Arc::new(HostWaits::default());
        let no_waits = match config.waits {
            Some(true) => None,
            Some(false) => Some("it was asked not to".to_owned()),
            None if config.queues == Queues::One => Some("its streams share one queue".to_owned()),
            None => None,
        };
        let device = |index| -> Device {
            let info = DeviceInfo {
                index,
                name: "emulated".into(),
                compute: Version::new(8, 0),
                multiprocessors: 1,
                clock_hz: 0,
                memory_bytes: config.memory_bytes,
                shared_bytes_max: config.shared_bytes_max,
                driver: Version::new(12, 0),
                memory_bytes_per_second: 0,
                no_waits: no_waits.clone(),
            };
            let host_waits = host_waits.clone();
            Arc::new(Emulated { machine: machine.clone(), info, host_waits })
        };
        (0..config.devices).map(device).collect()
    }

    /// The names of all kernels.
    pub fn kernel_names() -> Vec<String> {
        shim::names()
    }

    /// The name and the size of the struct of a kernel's parameters.
    pub fn kernel_params(name: &str) -> Option<(&'static str, usize)> {
        shim::find(name).map(|kernel| (kernel.params(), kernel.params_size()))
    }

    /// The kernels that the emulated devices of this process have run. Tests ask for it.
    pub fn launched_kernels() -> Vec<String> {
        shim::launched().keys().map(ToString::to_string).collect()
    }

    /// How often they have run this kernel.
    pub fn launches_of(name: &str) -> usize {
        shim::launched().get(name).copied().unwrap_or(0)
    }

    fn machine(&self) -> MutexGuard<'_, Machine> {
        // A panic leaves it valid: an operation is taken off its queue before it runs.
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn device(&self) -> usize {
        self.info.index
    }

    /// Counts a stream, an event or a graph before it is made; an error if the fault says so.
    fn make(&self, machine: &mut Machine, what: &str) -> Result<()> {
        let number = machine.n_made;
        machine.n_made += 1;
        if machine.config.faults.make_at != Some(number) {
            return Ok(());
        }
        Err(Error::Device(format!("emulated GPU {} could not make {what}", self.device())))
    }

    fn enqueue(&self, stream: StreamId, work: Work) -> Result<()> {
        self.machine().enqueue(stream.0 as usize, work).map_err(Error::Device)
    }
}

impl Gpu for Emulated {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryInfo> {
        let machine = self.machine();
        machine.check(self.device()).map_err(Error::Device)?;
        let total_bytes = self.info.memory_bytes;
        let free_bytes = total_bytes - machine.memory.used(self.device());
        Ok(MemoryInfo { free_bytes, total_bytes })
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        let mut machine = self.machine();
        machine.check(self.device()).map_err(Error::Device)?;
        let number = machine.n_allocs;
        machine.n_allocs += 1;
        let total = self.info.memory_bytes;
        let fails = machine.config.faults.alloc_at == Some(number);
        let got = (!fails).then(|| machine.memory.alloc(self.device(), bytes, total)).flatten();
        got.ok_or_else(|| {
            let free = total - machine.memory.used(self.device());
            let device = self.device();
            Error::Device(format!(
                "emulated GPU {device} has no room for {bytes} bytes; {free} of {total} are free"
            ))
        })
    }

    fn free(&self, address: u64) {
        let mut machine = self.machine();
        // A device that is lost has nothing to wait for.
        let _ = machine.synchronize_device(self.device());
        machine.memory.free(self.device(), address);
    }

    fn alloc_pinned(&self, bytes: usize, kind: PinnedKind) -> Result<NonNull<u8>> {
        let mut machine = self.machine();
        let number = machine.n_pins;
        machine.n_pins += 1;
        let fails = machine.config.faults.pin_at == Some(number);
        let got = (!fails).then(|| machine.memory.pin(bytes, kind)).flatten();
        got.ok_or_else(|| Error::Device(format!("{bytes} bytes of memory could not be pinned")))
    }

    fn free_pinned(&self, start: NonNull<u8>) {
        let mut machine = self.machine();
        for device in 0..machine.config.devices {
            // A device that is lost has nothing to wait for.
            let _ = machine.synchronize_device(device);
        }
        machine.memory.unpin(start);
    }

    unsafe fn register(&self, start: NonNull<u8>, bytes: usize) -> Result<Option<u64>> {
        let mut machine = self.machine();
        let number = machine.n_registered;
        machine.n_registered += 1;
        match machine.config.faults.register_from.is_some_and(|from| number >= from) {
            true => Err(Error::Device(format!("{bytes} bytes of memory could not be pinned"))),
            false => machine.memory.registered.add(start, bytes).map(Some).map_err(Error::Device),
        }
    }

    fn unregister(&self, start: NonNull<u8>) {
        let mut machine = self.machine();
        for device in 0..machine.config.devices {
            // A device that is lost has nothing to wait for.
            let _ = machine.synchronize_device(device);
        }
        machine.memory.registered.remove(start);
    }

    fn create_stream(&self, _urgent: bool) -> Result<StreamId> {
        let mut machine = self.machine();
        machine.check(self.device()).map_err(Error::Device)?;
        self.make(&mut machine, "a stream")?;
        Ok(StreamId(machine.add_stream(self.device()) as u64))
    }

    fn destroy_stream(&self, _stream: StreamId) {
        // It finishes what it has queued, as a driver's does.
    }

    fn create_event(&self, kind: EventKind) -> Result<EventId> {
        let mut machine = self.machine();
        machine.check(self.device()).map_err(Error::Device)?;
        self.make(&mut machine, "an event")?;
        let id = machine.new_id();
        machine.events.insert(id, Recorded::Never);
        if kind == EventKind::Timed {
            machine.timed.insert(id);
        }
        Ok(EventId(id))
    }

    fn destroy_event(&self, event: EventId) {
        let mut machine = self.machine();
        machine.events.remove(&event.0);
        machine.timed.remove(&event.0);
    }

    fn record(&self, event: EventId, stream: StreamId) -> Result<()> {
        self.machine().record(event.0, stream.0 as usize).map_err(Error::Device)
    }

    fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        self.machine().wait(stream.0 as usize, event.0).map_err(Error::Device)
    }

    fn event_is_done(&self, event: EventId) -> Result<bool> {
        self.machine().event_is_done(self.device(), event.0).map_err(Error::Device)
    }

    fn synchronize_event(&self, event: EventId) -> Result<()> {
        self.machine().synchronize_event(self.device(), event.0).map_err(Error::Device)
    }

    fn synchronize_event_within(&self, event: EventId, _: Duration) -> Result<Option<String>> {
        let mut machine = self.machine();
        let done = machine.synchronize_event(self.device(), event.0);
        machine.stuck(self.device(), done).map_err(Error::Device)
    }

    fn elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32> {
        let machine = self.machine();
        if [start, end].iter().any(|event| !machine.timed.contains(&event.0)) {
            return Err(Error::Device("the time between events that are not timed".into()));
        }
        let at = |event: EventId| match &machine.events[&event.0] {
            Recorded::Queued { signal, .. } => signal.get()?.clone().ok(),
            _ => None,
        };
        match (at(start), at(end)) {
            (Some(start), Some(end)) => Ok((end - start).as_secs_f32() * 1e3),
            _ => Err(Error::Device("the time between events that are not done".into())),
        }
    }

    fn stream_is_done(&self, stream: StreamId) -> Result<bool> {
        self.machine().stream_is_done(stream.0 as usize).map_err(Error::Device)
    }

    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        self.machine().synchronize_stream(stream.0 as usize).map_err(Error::Device)
    }

    fn synchronize_stream_within(&self, s: StreamId, _: Duration) -> Result<Option<String>> {
        let mut machine = self.machine();
        let done = machine.synchronize_stream(s.0 as usize);
        machine.stuck(self.device(), done).map_err(Error::Device)
    }

    fn synchronize(&self) -> Result<()> {
        self.machine().synchronize_device(self.device()).map_err(Error::Device)
    }

    unsafe fn copy_up(
        &self,
        stream: StreamId,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<()> {
        let is_registered = self.machine().memory.registered.has(from, bytes);
        // SAFETY: the bytes exist by the caller's promise.
        let sum = is_registered.then(|| unsafe { sum(from, bytes) });
        self.enqueue(stream, Work::Up { to, from: HostPtr(from.cast_mut()), bytes, sum })
    }

    unsafe fn copy_down(
        &self,
        stream: StreamId,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        self.enqueue(stream, Work::Down { to: HostPtr(to), from, bytes })
    }

    unsafe fn copy_on(&self, stream: StreamId, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.enqueue(stream, Work::On { to, from, bytes })
    }

    unsafe fn fill(&self, stream: StreamId, to: u64, value: u8, bytes: usize) -> Result<()> {
        self.enqueue(stream, Work::Fill { to, value, bytes })
    }

    unsafe fn wait_value(&self, stream: StreamId, address: u64, at_least: u32) -> Result<()> {
        self.machine().wait_value(stream.0 as usize, address, at_least).map_err(Error::Device)
    }

    unsafe fn write_value(&self, stream: StreamId, address: u64, value: u32) -> Result<()> {
        self.machine().write_value(stream.0 as usize, address, value).map_err(Error::Device)
    }

    unsafe fn store_word(&self, word: NonNull<u32>, value: u32) {
        self.machine().store_word(word, value);
    }

    fn host_waits(&self) -> &Arc<HostWaits> {
        &self.host_waits
    }

    fn kernel(&self, name: &str, params: &'static Layout) -> Result<KernelId> {
        let none = || Error::Device(format!("there is no kernel {name}"));
        let kernel = shim::find(name).ok_or_else(none)?;
        if (kernel.params(), kernel.params_size()) != (params.name, params.size) {
            let takes = format!("{} of {} bytes", kernel.params(), kernel.params_size());
            let why = format!("kernel {name} takes {takes}, not {}", params.name);
            return Err(Error::Device(why));
        }
        Ok(KernelId(kernel.to_bits()))
    }

    unsafe fn launch(&self, stream: StreamId, launch: &Launch) -> Result<()> {
        let launch = KernelLaunch {
            // SAFETY: `kernel` is the only source of this type here, and gives such bits.
            kernel: unsafe { ShimKernel::from_bits(launch.kernel.0) },
            grid: launch.grid,
            params: bytemuck::cast_slice(launch.params).to_vec(),
        };
        self.enqueue(stream, Work::Launch(Arc::new(launch)))
    }

    fn begin_capture(&self, stream: StreamId) -> Result<()> {
        let mut machine = self.machine();
        let origin = stream.0 as usize;
        if machine.streams[origin].capture.is_some() {
            return Err(Error::Device("the stream is being captured already".into()));
        }
        let id = machine.new_id();
        machine.captures.insert(id, Capture::new(origin));
        machine.streams[origin].capture = Some(id);
        Ok(())
    }

    fn end_capture(&self, stream: StreamId) -> Result<(GraphId, usize)> {
        let mut machine = self.machine();
        let id = machine.streams[stream.0 as usize].capture;
        let capture = id.and_then(|id| machine.captures.remove(&id));
        let Some(capture) = capture.filter(|c| c.origin == stream.0 as usize) else {
            return Err(Error::Device("the stream is not being captured".into()));
        };
        for stream in capture.streams() {
            machine.streams[stream].capture = None;
        }
        if !capture.is_joined() {
            let why = "a captured stream was not waited for before the capture ended";
            return Err(Error::Device(why.into()));
        }
        self.make(&mut machine, "a graph")?;
        let streams = capture.streams();
        let chains = streams.into_iter().map(|s| (s, machine.new_chain(self.device()))).collect();
        let (graph, n_nodes) = (machine.new_id(), capture.nodes.len());
        machine.graphs.insert(graph, Plan { nodes: capture.nodes, chains, last: None });
        Ok((GraphId(graph), n_nodes))
    }

    unsafe fn launch_graph(&self, graph: GraphId, stream: StreamId) -> Result<()> {
        self.machine().launch_graph(graph.0, stream.0 as usize).map_err(Error::Device)
    }

    fn destroy_graph(&self, graph: GraphId) {
        self.machine().graphs.remove(&graph.0);
    }

    unsafe fn begin_reads(&self, stream: StreamId, bytes: &[&[u8]]) -> Result<()> {
        // SAFETY: the bytes exist until `end_reads`, by the caller's promise.
        let reads = bytes.iter().map(|bytes| unsafe { HostRead::new(bytes) });
        self.enqueue(stream, Work::BeginReads(reads.collect()))
    }

    fn end_reads(&self, stream: StreamId) -> Result<()> {
        self.enqueue(stream, Work::EndReads)
    }

    fn check_host_access(&self, start: *const u8, bytes: usize, writes: bool) -> Result<()> {
        self.machine().check_host(start, bytes, writes).map_err(Error::Device)
    }
}
