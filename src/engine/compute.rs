//! The CPU's threads and the GPUs behind one lock: passes of several sessions follow one another.
//! Nothing else takes the lock, and no caller holds it between two passes.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::cancel::Cancel;
use crate::engine::device;
use crate::engine::speculation::NextTokenCompute;
use crate::forward::gpu::{Caches, Devices, GpuCache, GpuModel, GraphCounts};
use crate::forward::{Batch, Buffers, Logits, Observer, Segment, Want};
use crate::model::Model;
use crate::model::kv::{CacheType, KvCache};
use crate::model::next_token::NextTokenHead;
use crate::policy::Phase;

pub(super) struct Compute(Mutex<Machines>);

struct Machines {
    cpu: Cpu,
    /// The model's part on the GPUs.
    gpu: Option<GpuModel>,
    memory: PassMemory,
    /// For passes in another one's rests.
    inner: PassMemory,
}

/// Memory of one pass at a time.
#[derive(Default)]
struct PassMemory {
    batch: Batch,
    buffers: Buffers,
}

/// One text's part of a pass: its tokens, and its memory that the pass changes.
pub(super) struct PassText<'a> {
    pub tokens: &'a [u32],
    /// The number by which policies know the text.
    pub request: u32,
    /// Tokens before these.
    pub past: usize,
    pub phase: Phase,
    pub want: Want,
    /// How much of each adapter it takes; empty if the model has none.
    pub adapters: &'a [f32],
    pub kv: &'a mut KvCache,
    pub gpu_kv: Option<&'a GpuCache>,
}

/// The stack of layers that a pass goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stack {
    /// The decoder, which is all of most models.
    Decoder,
    Encoder,
}

/// A pass of one text or several, all of them cancelled before it ends early.
pub(super) struct Pass<'a, 'b> {
    pub stack: Stack,
    pub texts: &'b mut [PassText<'a>],
    pub cancel: Cancel,
}

impl Pass<'_, '_> {
    /// Makes a batch of the pass, whose sessions are indices of `texts`; waits will heed its token.
    fn fill(&self, memory: &mut PassMemory) {
        memory.buffers.set_cancel(&self.cancel);
        let batch = &mut memory.batch;
        batch.clear();
        for (session, text) in self.texts.iter().enumerate() {
            let &PassText { request, past, phase, want, .. } = text;
            batch.push(Segment { session, request, past, phase, want }, text.tokens);
        }
        let n_adapters = self.texts.first().map_or(0, |text| text.adapters.len());
        if n_adapters > 0 {
            let factors = self.texts.iter().flat_map(|text| text.adapters).copied();
            batch.adapt(n_adapters, factors.collect());
        }
    }

    /// The pass on the CPU alone.
    fn run_on_cpu(
        &mut self,
        model: &Model,
        cpu: &Cpu,
        memory: &mut PassMemory,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.fill(memory);
        let PassMemory { batch, buffers } = memory;
        let mut run = |caches: &mut [&mut KvCache]| match self.stack {
            Stack::Decoder => model.forward(cpu, batch, caches, buffers, observer),
            Stack::Encoder => model.encode(cpu, batch, caches, buffers, observer),
        };
        // A token of one text allocates nothing.
        match &mut self.texts[..] {
            [one] => run(&mut [&mut *one.kv]),
            texts => run(&mut texts.iter_mut().map(|text| &mut *text.kv).collect::<Vec<_>>()),
        }
    }

    /// The pass where a GPU has some of the layers.
    fn run_on_gpu(
        &mut self,
        model: &Model,
        cpu: &Cpu,
        mut devices: Devices<'_>,
        memory: &mut PassMemory,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.fill(memory);
        let PassMemory { batch, buffers } = memory;
        devices.set_cancel(&self.cancel);
        let on_device = |gpu_kv: Option<_>| gpu_kv.expect("sessions of a GPU's model have a cache");
        let (mut one, one_device, mut host, device);
        let caches = match &mut self.texts[..] {
            [text] => {
                (one, one_device) = ([&mut *text.kv], [on_device(text.gpu_kv)]);
                Caches { host: &mut one, device: &one_device }
            }
            texts => {
                device = texts.iter().map(|text| on_device(text.gpu_kv)).collect::<Vec<_>>();
                host = texts.iter_mut().map(|text| &mut *text.kv).collect::<Vec<_>>();
                Caches { host: &mut host, device: &device }
            }
        };
        match self.stack {
            Stack::Decoder => devices.forward(model, cpu, batch, caches, buffers, observer),
            Stack::Encoder => devices.encode(model, cpu, batch, caches, buffers, observer),
        }
    }
}

/// A point at which a pass rests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Before the layer of this index.
    Layer(usize),
    /// Between two parts of a layer.
    Part,
}

/// Called in each rest of a pass, with what computes other passes meanwhile, if anything does.
pub(super) type Between<'a> = &'a mut dyn FnMut(Rest, Option<&mut InnerPasses<'_>>) -> Result<()>;

/// Computes passes while another one rests.
pub(super) struct InnerPasses<'a> {
    model: &'a Model,
    cpu: &'a Cpu,
    /// Present where the model's part on GPUs is.
    devices: Option<Devices<'a>>,
    memory: &'a mut PassMemory,
}

impl InnerPasses<'_> {
    /// Computes steps of decode.
    pub fn run(&mut self, mut pass: Pass<'_, '_>, observer: &mut dyn Observer) -> Result<()> {
        let InnerPasses { model, cpu, devices, memory } = self;
        let Some(devices) = devices else {
            return pass.run_on_cpu(model, cpu, memory, observer);
        };
        let of_outer = devices.cancel();
        let result = pass.run_on_gpu(model, cpu, devices.again(), memory, observer);
        devices.resume(&of_outer);
        result
    }
}

/// Listens to a pass for `observer` and lets other passes run in its rests.
struct Interleaved<'a> {
    observer: &'a mut dyn Observer,
    between: Between<'a>,
    /// If there are others to compute.
    inner: Option<InnerPasses<'a>>,
    /// Whether GPUs have a part of the model: passes are computed where they are at hand.
    has_gpu: bool,
}

impl Interleaved<'_> {
    fn rest_on_cpu(&mut self, rest: Rest) -> Result<()> {
        (self.between)(rest, self.inner.as_mut().filter(|_| !self.has_gpu))
    }
}

impl Observer for Interleaved<'_> {
    fn recorder(&mut self, session: usize) -> Option<&mut dyn crate::engine::Recorder> {
        self.observer.recorder(session)
    }

    fn layer(&mut self, l: usize) -> Result<()> {
        self.observer.layer(l)?;
        self.rest_on_cpu(Rest::Layer(l))
    }

    fn layer_on(&mut self, l: usize, devices: Devices<'_>) -> Result<()> {
        self.observer.layer(l)?;
        let Some(InnerPasses { model, cpu, memory, .. }) = &mut self.inner else {
            return (self.between)(Rest::Layer(l), None);
        };
        let mut inner = InnerPasses { model, cpu, memory, devices: Some(devices) };
        (self.between)(Rest::Layer(l), Some(&mut inner))
    }

    fn lends_devices(&self) -> bool {
        self.inner.is_some()
    }

    fn rest(&mut self) -> Result<()> {
        self.observer.rest()?;
        self.rest_on_cpu(Rest::Part)
    }

    fn part_work(&self) -> usize {
        self.observer.part_work()
    }

    fn has_others(&self) -> bool {
        self.inner.is_some() && !self.has_gpu
    }

    fn experts(&mut self, n: usize) {
        self.observer.experts(n);
    }

    fn n_outputs(&self, session: usize) -> usize {
        self.observer.n_outputs(session)
    }

    fn outputs(&mut self, session: usize, position: usize, rows: &[f32]) {
        self.observer.outputs(session, position, rows);
    }

    fn logits(&mut self, session: usize, token: usize, logits: Logits<'_>) {
        self.observer.logits(session, token, logits);
    }
}

impl Compute {
    pub fn new(cpu: Cpu, gpu: Option<GpuModel>) -> Compute {
        let (memory, inner) = (PassMemory::default(), PassMemory::default());
        Compute(Mutex::new(Machines { cpu, gpu, memory, inner }))
    }

    fn lock(&self) -> MutexGuard<'_, Machines> {
        // A panic in a parallel region leaves nothing behind, so a poisoned lock is as good.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the lock.
    pub fn graph_counts(&self) -> Option<GraphCounts> {
        self.lock().gpu.as_ref().map(|gpu| gpu.graph_counts().clone())
    }

    /// Waits for the lock and lets `work` use the CPU.
    pub fn with_cpu<T>(&self, work: impl FnOnce(&Cpu) -> T) -> T {
        work(&self.lock().cpu)
    }

    /// Waits for the lock and computes one pass.
    pub fn run(
        &self,
        model: &Model,
        mut pass: Pass<'_, '_>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Machines { cpu, gpu, memory, .. } = &mut *self.lock();
        match gpu {
            Some(gpu) => pass.run_on_gpu(model, cpu, gpu.devices(), memory, observer),
            None => pass.run_on_cpu(model, cpu, memory, observer),
        }
    }

    /// [`Compute::run`] with other passes in its rests.
    pub fn run_with_rests(
        &self,
        model: &Model,
        mut pass: Pass<'_, '_>,
        observer: &mut dyn Observer,
        has_others: bool,
        between: Between<'_>,
    ) -> Result<()> {
        let Machines { cpu, gpu, memory, inner } = &mut *self.lock();
        let inner = InnerPasses { model, cpu, devices: None, memory: inner };
        let inner = has_others.then_some(inner);
        let mut observer = Interleaved { observer, between, inner, has_gpu: gpu.is_some() };
        match gpu {
            Some(gpu) => pass.run_on_gpu(model, cpu, gpu.devices(), memory, &mut observer),
            None => pass.run_on_cpu(model, cpu, memory, &mut observer),
        }
    }

    /// Lets `work` compute rows of the model's layer that drafts; `None` while a pass is computed.
    pub fn draft<T>(
        &self,
        head: &NextTokenHead,
        work: impl FnOnce(NextTokenCompute<'_>) -> Result<T>,
    ) -> Result<Option<T>> {
        let Some(mut machines) = self.lock_if_free() else { return Ok(None) };
        let Machines { cpu, memory: PassMemory { batch, buffers }, .. } = &mut *machines;
        let done = work(&mut |rows, cache| {
            head.forward(cpu, rows, cache, batch, buffers)?;
            let (logits, output) = buffers.next_token(head.n_embd());
            Ok((logits.to_vec(), output.to_vec()))
        });
        done.map(Some)
    }

    /// Lets `work` compute states of the model's layer that drafts, and shows predictors what the
    /// routers of `model` make of the last one, which is of the next token of text `request`.
    /// Nothing while a pass is computed.
    pub fn look_ahead<T>(
        &self,
        model: &Model,
        head: &NextTokenHead,
        request: u32,
        work: impl FnOnce(NextTokenCompute<'_>) -> Result<Option<T>>,
    ) -> Result<()> {
        let Some(mut machines) = self.lock_if_free() else { return Ok(()) };
        let Machines { cpu, memory: PassMemory { batch, buffers }, .. } = &mut *machines;
        let mut last = 0;
        let done = work(&mut |rows, cache| {
            last = rows.tokens.len() - 1;
            head.states(cpu, rows, cache, batch, buffers)?;
            Ok(Default::default())
        });
        if done?.is_some() {
            model.publish_next_token(cpu, request, last, buffers);
        }
        Ok(())
    }

    fn lock_if_free(&self) -> Option<MutexGuard<'_, Machines>> {
        match self.0.try_lock() {
            Ok(machines) => Some(machines),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// KV cache of one session on the first GPU, planned to take `planned` bytes; `None` without a
    /// GPU.
    pub fn new_cache(
        &self,
        model: &Model,
        n_ctx: usize,
        types: [CacheType; 2],
        planned: u64,
    ) -> Result<Option<GpuCache>> {
        let machines = self.lock();
        let Some(gpu) = &machines.gpu else { return Ok(None) };
        let free_before = gpu.device().memory()?.free_bytes as u64;
        let cache = gpu.new_cache(model, n_ctx, types)?;
        device::warn_of_spill(gpu.device(), free_before, planned)?;
        Ok(Some(cache))
    }

    /// Frees a cache between two passes: freeing waits for the device, which in the middle of a
    /// pass may wait for the host.
    pub fn free(&self, cache: GpuCache) {
        let _between_passes = self.lock();
        drop(cache);
    }
}
