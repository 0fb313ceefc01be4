//! The emulated driver: queues of operations, and an executor that runs them as late as it can and
//! in any order that streams and events allow, chosen by a seed.

use super::Config;
use super::capture::{Capture, Plan};
use super::clock::{Clock, Stamp};
use super::memory::{Memory, sum};
use super::queues::{DeviceQueues, Turns};
use super::registered::HostRead;
use super::shim::{self, ShimKernel, ShimLaunch};
use crate::backend::gpu::Grid;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::Instant;

/// Memory of the host in a queued operation: alive until it is done, by the contract of `Gpu`.
#[derive(Clone, Copy)]
pub struct HostPtr(pub *mut u8);

// SAFETY: a number, until the operation runs; then the contract of `Gpu::copy_up` and `copy_down`.
unsafe impl Send for HostPtr {}
// SAFETY: as above.
unsafe impl Sync for HostPtr {}

/// The time when an event's record was done, or why its device was lost before.
pub type Signal = Arc<OnceLock<Result<Instant, String>>>;

pub struct KernelLaunch {
    pub kernel: ShimKernel,
    pub grid: Grid,
    /// The kernel's parameters, whose size is a multiple of 8.
    pub params: Vec<u64>,
}

#[derive(Clone)]
pub enum Work {
    /// `sum`: of bytes that were pinned where they are, when the copy was queued.
    Up {
        to: u64,
        from: HostPtr,
        bytes: usize,
        sum: Option<u32>,
    },
    Down {
        to: HostPtr,
        from: u64,
        bytes: usize,
    },
    On {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Fill {
        to: u64,
        value: u8,
        bytes: usize,
    },
    // The list of kernels is constant, so what is shared is too.
    Launch(Arc<KernelLaunch>),
    Record(Signal),
    Wait(Signal),
    // Waits until the word at an address is at least this number.
    WaitValue(u64, u32),
    // Writes a word.
    WriteValue(u64, u32),
    // Kernels of the stream read these bytes where they are, until `EndReads`.
    BeginReads(Arc<[HostRead]>),
    EndReads,
    Graph(Vec<GraphNode>),
}

/// An operation of a graph that was launched.
#[derive(Clone)]
pub struct GraphNode {
    pub stamp: Stamp,
    pub work: Work,
    /// Nodes that come before.
    pub deps: Vec<usize>,
    pub done: bool,
}

struct Op {
    stamp: Stamp,
    work: Work,
    /// Its places in the device's queues.
    turns: Turns,
}

pub struct StreamState {
    pub device: usize,
    chain: usize,
    queue: VecDeque<Op>,
    /// The operations that are done when all queued ones are.
    pub clock: Clock,
    /// The capture that it takes part in.
    pub capture: Option<u64>,
    /// Registered bytes that its kernels may read now.
    reads: Arc<[HostRead]>,
}

/// An event's latest record.
#[derive(Clone, Default)]
pub enum Recorded {
    #[default]
    Never,
    Queued {
        signal: Signal,
        clock: Clock,
    },
    /// Recorded during a capture: the capture, and its nodes that the event is after.
    Noted {
        capture: u64,
        nodes: Vec<usize>,
    },
}

/// The chain of the host's own accesses.
const HOST: usize = 0;

struct Chain {
    /// `None` for the host.
    device: Option<usize>,
    /// Operations so far.
    n_queued: u64,
}

pub struct Machine {
    pub config: Config,
    pub memory: Memory,
    /// By number; those that were destroyed finish what they have.
    pub streams: Vec<StreamState>,
    pub events: HashMap<u64, Recorded>,
    pub timed: HashSet<u64>,
    pub graphs: HashMap<u64, Plan>,
    pub captures: HashMap<u64, Capture>,
    next_id: u64,
    chains: Vec<Chain>,
    /// The operations that the host has waited for.
    host: Clock,
    random: u64,
    pub n_allocs: u64,
    pub n_pins: u64,
    pub n_registered: u64,
    pub n_made: u64,
    n_ops: u64,
    /// The reason why a device is lost.
    lost: Vec<Option<String>>,
    /// By device: the queues that its streams share.
    queues: Vec<DeviceQueues>,
}

impl Machine {
    pub fn new(config: Config) -> Machine {
        Machine {
            memory: Memory::new(config.devices),
            streams: Vec::new(),
            events: HashMap::new(),
            timed: HashSet::new(),
            graphs: HashMap::new(),
            captures: HashMap::new(),
            next_id: 0,
            chains: vec![Chain { device: None, n_queued: 0 }],
            host: Clock::default(),
            random: config.seed,
            n_allocs: 0,
            n_pins: 0,
            n_registered: 0,
            n_made: 0,
            n_ops: 0,
            lost: vec![None; config.devices],
            queues: vec![DeviceQueues::new(config.queues); config.devices],
            config,
        }
    }

    pub fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub fn new_chain(&mut self, device: usize) -> usize {
        self.chains.push(Chain { device: Some(device), n_queued: 0 });
        self.chains.len() - 1
    }

    /// A number below `n` (SplitMix64).
    fn random(&mut self, n: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    pub fn check(&self, device: usize) -> Result<(), String> {
        self.lost[device].clone().map_or(Ok(()), Err)
    }

    fn lose(&mut self, device: usize, why: String) {
        let why = self.lost[device].get_or_insert(why).clone();
        self.queues[device].clear();
        // Its calls fail; so does what waits for it, as the data that it waits for is not there.
        for stream in self.streams.iter_mut().filter(|s| s.device == device) {
            for op in stream.queue.drain(..) {
                release(&op.work, &Err(why.clone()));
            }
        }
        // It touches no memory from now on, so nothing has to wait until it is done.
        for (number, chain) in self.chains.iter().enumerate() {
            if chain.device == Some(device) {
                self.host.set(number, chain.n_queued);
            }
        }
    }

    pub fn add_stream(&mut self, device: usize) -> usize {
        let (chain, clock) = (self.new_chain(device), self.host.clone());
        let (queue, reads) = (VecDeque::new(), Arc::default());
        self.streams.push(StreamState { device, chain, queue, clock, capture: None, reads });
        self.streams.len() - 1
    }

    /// The clock of the operation that a stream queues next.
    fn now(&self, stream: usize) -> Clock {
        let mut clock = self.streams[stream].clock.clone();
        clock.join(&self.host);
        clock
    }

    fn stamp(&mut self, chain: usize, mut after: Clock) -> Stamp {
        self.chains[chain].n_queued += 1;
        let tick = self.chains[chain].n_queued;
        after.set(chain, tick);
        Stamp { chain, tick, after }
    }

    pub fn enqueue(&mut self, stream: usize, work: Work) -> Result<(), String> {
        self.check(self.streams[stream].device)?;
        if let Some(capture) = self.streams[stream].capture {
            let capture = self.captures.get_mut(&capture).expect("captures end with their streams");
            capture.note(stream, work);
            return Ok(());
        }
        let after = self.now(stream);
        self.queue(stream, after, work);
        // Odd seeds let the device run ahead of the host's next call.
        if self.config.seed % 2 == 1 {
            for _ in 0..self.random(3) {
                self.step(None);
            }
        }
        Ok(())
    }

    fn queue(&mut self, stream: usize, after: Clock, work: Work) {
        let stamp = self.stamp(self.streams[stream].chain, after);
        let state = &mut self.streams[stream];
        state.clock = stamp.after.clone();
        let turns = self.queues[state.device].enter(&work);
        state.queue.push_back(Op { stamp, work, turns });
    }

    pub fn record(&mut self, event: u64, stream: usize) -> Result<(), String> {
        self.check(self.streams[stream].device)?;
        let recorded = match self.streams[stream].capture {
            Some(capture) => {
                let nodes = self.captures[&capture].head(stream);
                Recorded::Noted { capture, nodes }
            }
            None => {
                let signal = Signal::default();
                self.enqueue(stream, Work::Record(signal.clone()))?;
                let clock = self.streams[stream].clock.clone();
                Recorded::Queued { signal, clock }
            }
        };
        self.events.insert(event, recorded);
        Ok(())
    }

    pub fn wait(&mut self, stream: usize, event: u64) -> Result<(), String> {
        self.check(self.streams[stream].device)?;
        match self.events[&event].clone() {
            Recorded::Never => Ok(()),
            Recorded::Noted { capture, nodes } => {
                let joined = *self.streams[stream].capture.get_or_insert(capture);
                if joined != capture || !self.captures.contains_key(&capture) {
                    return Err("a stream waits for an event of another capture".into());
                }
                self.captures.get_mut(&capture).expect("just found").join(stream, &nodes);
                Ok(())
            }
            Recorded::Queued { .. } if self.streams[stream].capture.is_some() => {
                Err("a captured stream waits for an event from outside of the capture".into())
            }
            Recorded::Queued { signal, clock } => {
                let mut after = self.now(stream);
                after.join(&clock);
                self.queue(stream, after, Work::Wait(signal));
                Ok(())
            }
        }
    }

    pub fn wait_value(&mut self, stream: usize, address: u64, at_least: u32) -> Result<(), String> {
        if self.streams[stream].capture.is_some() {
            return Err("a captured stream waits for a value in memory".into());
        }
        if !address.is_multiple_of(4) {
            return Err(format!("a stream waits for a word at {address:#x}, no multiple of 4"));
        }
        self.enqueue(stream, Work::WaitValue(address, at_least))
    }

    pub fn write_value(&mut self, stream: usize, address: u64, value: u32) -> Result<(), String> {
        if self.streams[stream].capture.is_some() || !address.is_multiple_of(4) {
            return Err(format!("a stream cannot write a word at {address:#x}"));
        }
        self.enqueue(stream, Work::WriteValue(address, value))
    }

    /// The host writes a word of mapped memory, whatever else may use it.
    pub fn store_word(&mut self, word: NonNull<u32>, value: u32) {
        let stamp = self.host_stamp();
        self.memory.store_word(word, value, &stamp);
    }

    /// The order of what the host does now. What is queued from here on comes after it.
    fn host_stamp(&mut self) -> Stamp {
        let stamp = self.stamp(HOST, self.host.clone());
        self.host = stamp.after.clone();
        stamp
    }

    pub fn launch_graph(&mut self, graph: u64, stream: usize) -> Result<(), String> {
        self.check(self.streams[stream].device)?;
        if self.streams[stream].capture.is_some() {
            return Err("a graph is launched on a stream that is being captured".into());
        }
        // Launches of one graph run one after the other.
        let plan = self.graphs[&graph].clone();
        if let Some((signal, clock)) = &plan.last {
            let mut after = self.now(stream);
            after.join(clock);
            self.queue(stream, after, Work::Wait(signal.clone()));
        }
        let before = self.now(stream);
        let mut end = before.clone();
        let mut nodes: Vec<GraphNode> = Vec::new();
        for node in &plan.nodes {
            let mut after = before.clone();
            node.deps.iter().for_each(|d| after.join(&nodes[*d].stamp.after));
            let stamp = self.stamp(plan.chains[&node.stream], after);
            end.join(&stamp.after);
            let (work, deps) = (node.work.clone(), node.deps.clone());
            nodes.push(GraphNode { stamp, work, deps, done: false });
        }
        self.queue(stream, before, Work::Graph(nodes));
        self.streams[stream].clock.join(&end);
        let signal = Signal::default();
        self.enqueue(stream, Work::Record(signal.clone()))?;
        let last = Some((signal, self.streams[stream].clock.clone()));
        self.graphs.get_mut(&graph).expect("just found").last = last;
        Ok(())
    }

    // ---- running

    fn can_step(&self, stream: usize) -> bool {
        let StreamState { device, queue, .. } = &self.streams[stream];
        let Some(Op { work, turns, .. }) = queue.front() else { return false };
        match work {
            Work::Wait(signal) => signal.get().is_some(),
            // `perform` reports an address that is no word.
            Work::WaitValue(address, at_least) => {
                self.memory.word(*address).map_or(true, |word| reaches(word, *at_least))
            }
            _ => self.queues[*device].are_first(turns),
        }
    }

    /// Runs one operation, of the stream `wanted` if that can run. False if no stream can.
    fn step(&mut self, wanted: Option<usize>) -> bool {
        if let Some(stream) = wanted.filter(|s| self.can_step(*s)) {
            self.run_head(stream);
            return true;
        }
        let able: Vec<usize> = (0..self.streams.len()).filter(|s| self.can_step(*s)).collect();
        if able.is_empty() {
            return false;
        }
        let stream = able[self.random(able.len())];
        self.run_head(stream);
        true
    }

    fn run_head(&mut self, stream: usize) {
        let device = self.streams[stream].device;
        let Some(op) = self.streams[stream].queue.front_mut() else { return };
        let (stamp, work) = match &mut op.work {
            Work::Graph(nodes) => {
                let ready: Vec<usize> = (0..nodes.len())
                    .filter(|i| !nodes[*i].done && nodes[*i].deps.iter().all(|d| nodes[*d].done))
                    .collect();
                if ready.is_empty() {
                    let op = self.streams[stream].queue.pop_front().expect("as above");
                    self.queues[device].leave(&op.turns);
                    return;
                }
                let at = self.random(ready.len());
                let op = self.streams[stream].queue.front_mut().expect("as above");
                let Work::Graph(nodes) = &mut op.work else { return };
                let node = &mut nodes[ready[at]];
                node.done = true;
                (node.stamp.clone(), node.work.clone())
            }
            _ => {
                let op = self.streams[stream].queue.pop_front().expect("as above");
                self.queues[device].leave(&op.turns);
                (op.stamp, op.work)
            }
        };
        let number = self.n_ops;
        self.n_ops += 1;
        let done = if self.config.faults.lost_at_op == Some(number) {
            let why = format!("emulated GPU {device} was lost");
            release(&work, &Err(why.clone()));
            Err(why)
        } else {
            self.perform(stream, &stamp, &work)
        };
        if let Err(why) = done {
            self.lose(device, why);
        }
    }

    fn perform(&mut self, stream: usize, stamp: &Stamp, work: &Work) -> Result<(), String> {
        match work {
            // SAFETY: the contract of `Gpu::copy_up`: the bytes live until the operation is done.
            Work::Up { to, from, bytes, sum: before } => unsafe {
                if before.is_some_and(|before| before != sum(from.0, *bytes)) {
                    return Err("the host changed bytes that a queued copy reads".into());
                }
                self.memory.copy_up(*to, from.0, *bytes, stamp)
            },
            // SAFETY: likewise of `Gpu::copy_down`.
            Work::Down { to, from, bytes } => unsafe {
                self.memory.copy_down(to.0, *from, *bytes, stamp)
            },
            Work::On { to, from, bytes } => self.memory.copy_on(*to, *from, *bytes, stamp),
            Work::Fill { to, value, bytes } => self.memory.fill(*to, *value, *bytes, stamp),
            Work::Launch(launch) => self.run_kernel(stream, stamp, launch),
            Work::Record(_) => {
                release(work, &Ok(Instant::now()));
                Ok(())
            }
            Work::Wait(signal) => signal.get().map_or(Ok(()), |done| done.clone().map(drop)),
            Work::WaitValue(address, _) => self.acquire(stamp, *address),
            Work::WriteValue(address, value) => self.memory.write_word(*address, *value, stamp),
            Work::BeginReads(reads) => {
                self.streams[stream].reads = reads.clone();
                self.memory.registered.show(reads)
            }
            Work::EndReads => {
                let reads = std::mem::take(&mut self.streams[stream].reads);
                reads.iter().try_for_each(HostRead::check)
            }
            Work::Graph(_) => Ok(()),
        }
    }

    /// A wait for the word at `address` is over, so the operations after the wait come after the
    /// one that wrote the word. Which one that is, is known only now: queued operations are
    /// updated.
    fn acquire(&mut self, wait: &Stamp, address: u64) -> Result<(), String> {
        let word = self.memory.word(address);
        word.map_err(|why| format!("a stream waits for a value, but {why}"))?;
        let written = self.memory.last_write(address)?;
        let learn = |clock: &mut Clock| {
            if clock.get(wait.chain) >= wait.tick {
                clock.join(&written);
            }
        };
        for stream in &mut self.streams {
            learn(&mut stream.clock);
            for op in &mut stream.queue {
                learn(&mut op.stamp.after);
                if let Work::Graph(nodes) = &mut op.work {
                    nodes.iter_mut().for_each(|node| learn(&mut node.stamp.after));
                }
            }
        }
        for event in self.events.values_mut() {
            if let Recorded::Queued { clock, .. } = event {
                learn(clock);
            }
        }
        let ends = self.graphs.values_mut().filter_map(|plan| plan.last.as_mut());
        ends.for_each(|(_, clock)| learn(clock));
        Ok(())
    }

    fn run_kernel(
        &mut self,
        stream: usize,
        stamp: &Stamp,
        launch: &KernelLaunch,
    ) -> Result<(), String> {
        let StreamState { device, ref reads, .. } = self.streams[stream];
        let reads = reads.clone();
        let seed = self.random(u32::MAX as usize) as u32;
        let mut allocations = self.memory.of_device(device);
        let launch = ShimLaunch {
            kernel: launch.kernel,
            grid: launch.grid,
            shared_limit: self.config.shared_bytes_max,
            // Half of the launches run in order, as a GPU mostly does.
            seed: if seed.is_multiple_of(2) { 0 } else { seed },
            params: &launch.params,
        };
        // SAFETY: the allocations are the machine's, in order of their addresses, and it is
        // borrowed exclusively.
        let done = unsafe { shim::launch(&launch, &mut allocations) };
        let what = format!("kernel {}", launch.kernel.name());
        done.and(self.memory.touched(&allocations, &reads, stamp, &what))
    }

    // ---- waiting

    /// Runs until `done`, with the wanted stream first, last, or without preference.
    fn run_until(
        &mut self,
        wanted: Option<usize>,
        done: impl Fn(&Machine) -> bool,
    ) -> Result<(), String> {
        let preferred = match self.random(3) {
            0 => wanted,
            1 => {
                let others = self.random(8);
                for _ in 0..others {
                    self.step(None);
                }
                None
            }
            _ => None,
        };
        while !done(self) {
            if !self.step(preferred) {
                return Err(self.deadlock());
            }
        }
        Ok(())
    }

    /// The error if no queued operation can run.
    fn deadlock(&self) -> String {
        let heads = self.streams.iter().filter_map(|s| s.queue.front());
        let word = heads.filter_map(|op| match op.work {
            Work::WaitValue(address, at_least) => Some((address, at_least)),
            _ => None,
        });
        match word.map(|(at, least)| (at, least, self.memory.word(at))).next() {
            Some((address, at_least, Ok(word))) => {
                let why = match self.is_held_up() {
                    true => "what would change it stands behind the wait in a queue of the device",
                    false => "nothing that is queued can change it",
                };
                format!(
                    "an emulated stream waits for the word at {address:#x} to be {at_least}; it \
                     is {word}, and {why}"
                )
            }
            _ => "an emulated stream waits for an event that will never be".into(),
        }
    }

    /// Whether a stream's next operation waits for its turn in a queue alone.
    fn is_held_up(&self) -> bool {
        self.streams.iter().any(|stream| {
            let queues = &self.queues[stream.device];
            stream.queue.front().is_some_and(|op| !queues.are_first(&op.turns))
        })
    }

    pub fn synchronize_stream(&mut self, stream: usize) -> Result<(), String> {
        let device = self.streams[stream].device;
        if self.streams[stream].capture.is_some() {
            return Err("the host waits for a stream that is being captured".into());
        }
        self.run_until(Some(stream), |m| m.streams[stream].queue.is_empty())?;
        self.check(device)?;
        let clock = self.streams[stream].clock.clone();
        self.host_has(&clock);
        Ok(())
    }

    pub fn synchronize_device(&mut self, device: usize) -> Result<(), String> {
        let own = |m: &Machine| m.streams.iter().all(|s| s.device != device || s.queue.is_empty());
        self.run_until(None, own)?;
        self.check(device)?;
        for stream in 0..self.streams.len() {
            if self.streams[stream].device == device {
                let clock = self.streams[stream].clock.clone();
                self.host.join(&clock);
            }
        }
        self.host_has(&Clock::default());
        Ok(())
    }

    pub fn synchronize_event(&mut self, device: usize, event: u64) -> Result<(), String> {
        match self.events[&event].clone() {
            Recorded::Never => self.check(device),
            Recorded::Noted { .. } => Err("the host waits for an event of a capture".into()),
            Recorded::Queued { signal, clock } => {
                self.run_until(None, |_| signal.get().is_some())?;
                self.check(device)?;
                self.host_has(&clock);
                Ok(())
            }
        }
    }

    /// Whether a stream is done; some of what is queued may run before the answer.
    pub fn stream_is_done(&mut self, stream: usize) -> Result<bool, String> {
        self.step(None);
        self.check(self.streams[stream].device)?;
        let done = self.streams[stream].queue.is_empty();
        if done {
            let clock = self.streams[stream].clock.clone();
            self.host_has(&clock);
        }
        Ok(done)
    }

    pub fn event_is_done(&mut self, device: usize, event: u64) -> Result<bool, String> {
        self.step(None);
        self.check(device)?;
        let Recorded::Queued { signal, clock } = self.events[&event].clone() else {
            return Ok(true);
        };
        if signal.get().is_some() {
            self.host_has(&clock);
        }
        Ok(signal.get().is_some())
    }

    /// The host knows that these operations are done. Those that everything is after are forgotten.
    fn host_has(&mut self, clock: &Clock) {
        self.host.join(clock);
        let mut horizon = self.host.clone();
        for stream in &self.streams {
            if let Some(op) = stream.queue.front() {
                horizon.intersect(&op.stamp.after);
            }
        }
        self.memory.forget(&horizon);
    }

    /// Checks an access of the host to pinned bytes.
    pub fn check_host(&mut self, at: *const u8, bytes: usize, writes: bool) -> Result<(), String> {
        let (start, end) = (at as usize, at as usize + bytes);
        let meets = |p: HostPtr, n: usize| (p.0 as usize) < end && start < p.0 as usize + n;
        fn flat(work: &Work) -> Vec<&Work> {
            match work {
                Work::Graph(nodes) => nodes.iter().filter(|n| !n.done).map(|n| &n.work).collect(),
                other => vec![other],
            }
        }
        for op in self.streams.iter().flat_map(|s| &s.queue) {
            for work in flat(&op.work) {
                let (beside, verb) = match work {
                    Work::Up { from, bytes, .. } => (writes && meets(*from, *bytes), "read"),
                    Work::Down { to, bytes, .. } => (meets(*to, *bytes), "write"),
                    _ => (false, ""),
                };
                if beside {
                    let what = "the host uses pinned bytes that a queued copy will";
                    return Err(format!("{what} {verb}; nothing has waited for it"));
                }
            }
        }
        let host = self.host.clone();
        self.memory.check_host(at, bytes, writes, &host)?;
        if !self.memory.is_mapped(at) {
            return Ok(());
        }
        let stamp = self.host_stamp();
        self.memory.touch_mapped(at, bytes, writes, &stamp)
    }

    /// Whether a wait of the host would never end: the reason, or the wait's other error.
    pub fn stuck(&self, device: usize, done: Result<(), String>) -> Result<Option<String>, String> {
        match done {
            Err(why) if self.check(device).is_ok() => Ok(Some(why)),
            done => done.map(|()| None),
        }
    }
}

/// The driver's comparison: counters may wrap.
fn reaches(word: u32, at_least: u32) -> bool {
    word.wrapping_sub(at_least) as i32 >= 0
}

/// Releases the operations that wait for this one, which is done or never will be.
fn release(work: &Work, done: &Result<Instant, String>) {
    match work {
        // Set once: a signal belongs to one record.
        Work::Record(signal) => drop(signal.set(done.clone())),
        Work::Graph(nodes) => nodes.iter().for_each(|n| release(&n.work, done)),
        _ => {}
    }
}
