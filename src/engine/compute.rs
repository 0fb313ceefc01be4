//! The CPU's threads and the GPUs behind one lock: passes of several sessions follow one another.
//! Nothing else takes the lock, and no caller holds it between two passes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::cancel::Cancel;
use crate::engine::device;
use crate::forward::gpu::{Caches, GpuCache, GpuModel};
use crate::forward::{Batch, Buffers, Observer, Segment, Want};
use crate::model::Model;
use crate::model::kv::{CacheType, KvCache};
use crate::policy::Phase;

pub(super) struct Compute(Mutex<Machines>);

struct Machines {
    cpu: Cpu,
    /// The model's part on the GPUs.
    gpu: Option<GpuModel>,
    /// The rows of the pass that is computed.
    batch: Batch,
}

/// A session's memory that a pass on its text changes.
pub(super) struct TextState<'a> {
    pub kv: &'a mut KvCache,
    pub gpu_kv: Option<&'a GpuCache>,
    pub buffers: &'a mut Buffers,
    pub cancel: &'a Cancel,
}

/// The tokens of one pass.
pub(super) struct PassInput<'a> {
    pub tokens: &'a [u32],
    /// The number by which policies know the text.
    pub request: u32,
    /// Tokens before these.
    pub past: usize,
    /// Whether they are a prompt or a part of one.
    pub is_prompt: bool,
    pub want: Want,
}

impl PassInput<'_> {
    /// The same as a batch of one segment.
    fn fill(&self, batch: &mut Batch) {
        let PassInput { tokens, request, past, is_prompt, want } = *self;
        let phase = if is_prompt { Phase::Prompt } else { Phase::Decode };
        batch.clear();
        batch.push(Segment { session: 0, request, past, phase, want }, tokens);
    }
}

impl Compute {
    pub fn new(cpu: Cpu, gpu: Option<GpuModel>) -> Compute {
        Compute(Mutex::new(Machines { cpu, gpu, batch: Batch::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, Machines> {
        // A panic in a parallel region leaves nothing behind, so a poisoned lock is as good.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the lock and makes the pass's waits heed its token.
    fn start(&self, text: &mut TextState<'_>) -> MutexGuard<'_, Machines> {
        let mut machines = self.lock();
        text.buffers.set_cancel(text.cancel);
        if let Some(gpu) = &mut machines.gpu {
            gpu.set_cancel(text.cancel);
        }
        machines
    }

    /// One pass, of the decoder if the model has an encoder.
    pub fn forward(
        &self,
        model: &Model,
        mut text: TextState<'_>,
        input: &PassInput<'_>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Machines { cpu, gpu, batch } = &mut *self.start(&mut text);
        let TextState { kv, gpu_kv, buffers, .. } = text;
        input.fill(batch);
        match (gpu, gpu_kv) {
            (Some(gpu), Some(gpu_kv)) => {
                let caches = Caches { host: &mut [kv], device: &[gpu_kv] };
                gpu.forward(model, cpu, batch, caches, buffers, observer)
            }
            _ => model.forward(cpu, batch, &mut [kv], buffers, observer),
        }
    }

    /// Reads a source text.
    pub fn encode(
        &self,
        model: &Model,
        mut text: TextState<'_>,
        input: &PassInput<'_>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Machines { cpu, gpu, batch } = &mut *self.start(&mut text);
        let TextState { kv, gpu_kv, buffers, .. } = text;
        input.fill(batch);
        match (gpu, gpu_kv) {
            (Some(gpu), Some(gpu_kv)) => {
                let caches = Caches { host: &mut [kv], device: &[gpu_kv] };
                gpu.encode(model, cpu, batch, caches, buffers, observer)
            }
            _ => model.encode(cpu, batch, &mut [kv], buffers, observer),
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
        let cache = gpu.new_cache(model, n_ctx, types[0], types[1])?;
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
