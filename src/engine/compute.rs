//! The CPU's threads and the GPUs behind one lock: passes of several sessions follow one another.
//! Nothing else takes the lock, and no caller holds it between two passes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::cancel::Cancel;
use crate::engine::device;
use crate::forward::encoder_decoder::Answering;
use crate::forward::gpu::{GpuCache, GpuModel};
use crate::forward::{Buffers, Observer, Want};
use crate::model::Model;
use crate::model::kv::{CacheType, KvCache};

pub(super) struct Compute(Mutex<Machines>);

struct Machines {
    cpu: Cpu,
    /// The model's part on the GPUs.
    gpu: Option<GpuModel>,
}

/// What a session has in memory and what a pass on its text changes.
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

impl Compute {
    pub fn new(cpu: Cpu, gpu: Option<GpuModel>) -> Compute {
        Compute(Mutex::new(Machines { cpu, gpu }))
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

    /// One pass of a model without an encoder.
    pub fn forward(
        &self,
        model: &Model,
        mut text: TextState<'_>,
        input: &PassInput<'_>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Machines { cpu, gpu } = &mut *self.start(&mut text);
        let TextState { kv, gpu_kv, buffers, .. } = text;
        let PassInput { tokens, request, past, is_prompt, want } = *input;
        match (gpu, gpu_kv) {
            (Some(gpu), Some(gpu_kv)) => {
                let (kv, at) = ((kv, gpu_kv), (request, past, is_prompt));
                gpu.forward(model, cpu, kv, buffers, tokens, at, want, observer)
            }
            _ => model.forward(cpu, kv, buffers, tokens, (request, past), want, observer),
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
        let Machines { cpu, gpu } = &mut *self.start(&mut text);
        let TextState { kv, gpu_kv, buffers, .. } = text;
        let PassInput { tokens, request, .. } = *input;
        match (gpu, gpu_kv) {
            (Some(gpu), Some(gpu_kv)) => {
                gpu.encode(model, cpu, (kv, gpu_kv), buffers, tokens, request, observer)
            }
            _ => model.encode(cpu, kv, buffers, tokens, request, observer),
        }
    }

    /// One pass of a decoder that sees a source text of `n_source` tokens.
    pub fn decode(
        &self,
        model: &Model,
        mut text: TextState<'_>,
        n_source: usize,
        input: &PassInput<'_>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Machines { cpu, gpu } = &mut *self.start(&mut text);
        let TextState { kv, gpu_kv, buffers, .. } = text;
        let PassInput { tokens, request, past, want, .. } = *input;
        let at = Answering { request, n_source, past };
        match (gpu, gpu_kv) {
            (Some(gpu), Some(gpu_kv)) => {
                gpu.decode(model, cpu, (kv, gpu_kv), buffers, tokens, at, want, observer)
            }
            _ => model.decode(cpu, kv, buffers, tokens, at, want, observer),
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
        let cache = gpu.new_cache(model, n_ctx, types.into())?;
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
