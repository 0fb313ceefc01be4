//! The CPU's threads and the GPUs behind one lock: passes of several sessions follow one another.
//! Nothing else takes the lock, and no caller holds it between two passes.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::cancel::Cancel;
use crate::engine::device;
use crate::engine::speculation::NextTokenCompute;
use crate::forward::gpu::{
    Caches, DeviceRests, Devices, GpuCache, GpuModel, GraphCounts, Observers,
};
use crate::forward::{Batch, Buffers, Outputs, Rests, Segment, Want};
use crate::model::Model;
use crate::model::kv::{CacheType, KvCache};
use crate::model::next_token::NextTokenHead;
use crate::policy::Phase;

pub(super) struct Compute {
    machines: Mutex<Machines>,
    /// Multiplications of a part of a pass.
    part_work: usize,
}

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
    pub outputs: &'b mut dyn Outputs,
    /// Hears of each layer.
    pub progress: Option<Progress<'b>>,
}

/// The tokens of a call that a pass computes, and who is told how many of the call's are computed.
pub(super) type Progress<'a> = (Range<usize>, &'a mut (dyn FnMut(usize) + 'a));

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
        mut rests: PassRests<'_, '_>,
    ) -> Result<()> {
        self.fill(memory);
        let PassMemory { batch, buffers } = memory;
        let (outputs, rests) = (&mut *self.outputs, &mut rests);
        let mut run = |caches: &mut [&mut KvCache]| match self.stack {
            Stack::Decoder => model.forward(cpu, batch, caches, buffers, outputs, rests),
            Stack::Encoder => model.encode(cpu, batch, caches, buffers, outputs, rests),
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
        mut rests: PassRests<'_, '_>,
    ) -> Result<()> {
        self.fill(memory);
        let PassMemory { batch, buffers } = memory;
        let observers = Observers { outputs: self.outputs, rests: &mut rests };
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
            Stack::Decoder => devices.forward(model, cpu, batch, caches, buffers, observers),
            Stack::Encoder => devices.encode(model, cpu, batch, caches, buffers, observers),
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
    part_work: usize,
}

impl InnerPasses<'_> {
    /// Computes steps of decode.
    pub fn run(&mut self, mut pass: Pass<'_, '_>) -> Result<()> {
        let InnerPasses { model, cpu, devices, memory, part_work } = self;
        let rests = PassRests::of(&mut pass, model, *part_work);
        let Some(devices) = devices else {
            return pass.run_on_cpu(model, cpu, memory, rests);
        };
        let of_outer = devices.cancel();
        let result = pass.run_on_gpu(model, cpu, devices.again(), memory, rests);
        devices.resume(&of_outer);
        result
    }
}

/// The rests of a pass, in which it may end early and others may be computed.
struct PassRests<'a, 'p> {
    cancel: Cancel,
    /// Whether the pass looks at `cancel` when it rests. One of few tokens is short, so it is
    /// only cancelled while it waits for experts.
    is_long: bool,
    part_work: usize,
    progress: Option<Progress<'p>>,
    n_layers: usize,
    between: Option<Between<'a>>,
    /// If there are others to compute.
    inner: Option<InnerPasses<'a>>,
    /// Whether GPUs have a part of the model: passes are computed where they are at hand.
    has_gpu: bool,
}

impl<'p> PassRests<'_, 'p> {
    /// Without other passes.
    fn of(pass: &mut Pass<'_, 'p>, model: &Model, part_work: usize) -> Self {
        PassRests {
            cancel: pass.cancel.clone(),
            is_long: pass.texts.iter().any(|text| text.tokens.len() > 1),
            part_work,
            progress: pass.progress.take(),
            n_layers: model.hyper().n_layers,
            between: None,
            inner: None,
            has_gpu: false,
        }
    }

    fn begin_layer(&mut self, l: usize) -> Result<()> {
        if let Some((tokens, progress)) = &mut self.progress {
            progress(tokens.start + tokens.len() * l / self.n_layers);
        }
        self.check()
    }

    fn check(&self) -> Result<()> {
        if self.is_long { self.cancel.check() } else { Ok(()) }
    }

    fn rest_on_cpu(&mut self, rest: Rest) -> Result<()> {
        let Some(between) = &mut self.between else { return Ok(()) };
        between(rest, self.inner.as_mut().filter(|_| !self.has_gpu))
    }
}

impl Rests for PassRests<'_, '_> {
    fn layer(&mut self, l: usize) -> Result<()> {
        self.begin_layer(l)?;
        self.rest_on_cpu(Rest::Layer(l))
    }

    fn rest(&mut self) -> Result<()> {
        self.check()?;
        self.rest_on_cpu(Rest::Part)
    }

    fn part_work(&self) -> usize {
        self.part_work
    }

    fn has_others(&self) -> bool {
        self.inner.is_some() && !self.has_gpu
    }
}

impl DeviceRests for PassRests<'_, '_> {
    fn layer_on(&mut self, l: usize, devices: Devices<'_>) -> Result<()> {
        self.begin_layer(l)?;
        let Some(between) = &mut self.between else { return Ok(()) };
        let Some(InnerPasses { model, cpu, memory, part_work, .. }) = &mut self.inner else {
            return between(Rest::Layer(l), None);
        };
        let (devices, part_work) = (Some(devices), *part_work);
        let mut inner = InnerPasses { model, cpu, memory, devices, part_work };
        between(Rest::Layer(l), Some(&mut inner))
    }

    fn lends_devices(&self) -> bool {
        self.inner.is_some()
    }
}

impl Compute {
    /// `part_work`: multiplications of a part of a pass.
    pub fn new(cpu: Cpu, gpu: Option<GpuModel>, part_work: usize) -> Compute {
        let (memory, inner) = (PassMemory::default(), PassMemory::default());
        Compute { machines: Mutex::new(Machines { cpu, gpu, memory, inner }), part_work }
    }

    fn lock(&self) -> MutexGuard<'_, Machines> {
        // A panic in a parallel region leaves nothing behind, so a poisoned lock is as good.
        self.machines.lock().unwrap_or_else(PoisonError::into_inner)
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
    pub fn run(&self, model: &Model, mut pass: Pass<'_, '_>) -> Result<()> {
        let rests = PassRests::of(&mut pass, model, self.part_work);
        let Machines { cpu, gpu, memory, .. } = &mut *self.lock();
        match gpu {
            Some(gpu) => pass.run_on_gpu(model, cpu, gpu.devices(), memory, rests),
            None => pass.run_on_cpu(model, cpu, memory, rests),
        }
    }

    /// [`Compute::run`] with other passes in its rests.
    pub fn run_with_rests(
        &self,
        model: &Model,
        mut pass: Pass<'_, '_>,
        has_others: bool,
        between: Between<'_>,
    ) -> Result<()> {
        let part_work = self.part_work;
        let rests = PassRests::of(&mut pass, model, part_work);
        let Machines { cpu, gpu, memory, inner } = &mut *self.lock();
        let inner = InnerPasses { model, cpu, devices: None, memory: inner, part_work };
        let (between, inner): (Between<'_>, _) = (between, has_others.then_some(inner));
        let rests = PassRests { between: Some(between), inner, has_gpu: gpu.is_some(), ..rests };
        match gpu {
            Some(gpu) => pass.run_on_gpu(model, cpu, gpu.devices(), memory, rests),
            None => pass.run_on_cpu(model, cpu, memory, rests),
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
        match self.machines.try_lock() {
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
