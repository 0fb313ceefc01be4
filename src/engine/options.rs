//! How to load and run a model.

use std::sync::Arc;

use super::device::DeviceChoice;
use super::plan::ram::{RamBudget, VramBudget};
use super::plan::tensor_override::TensorPlace;
use super::plan::vram::CpuMoe;
use super::profile::ProfileChoice;
use crate::experts::disk::link::{Faults, IoKind};
use crate::gguf::Override;
use crate::model::kv::CacheType;
use crate::policy::PolicySpec;

/// How to load and run a model. Names and defaults are llama.cpp's.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Tokens of context; the model's own where absent.
    pub n_ctx: Option<usize>,
    /// Tokens a call may hand over at once, logically (`-b`).
    pub n_batch: usize,
    /// Tokens computed at once (`-ub`); see [`MemoryPlan::n_ubatch`] for how many where absent.
    pub n_ubatch: Option<usize>,
    /// One a physical core where absent.
    pub n_threads: Option<usize>,
    pub cache_type_k: CacheType,
    pub cache_type_v: CacheType,
    /// Whether weights that are not streamed are computed with where the mapped file has them, or
    /// else read to memory.
    pub mmap: bool,
    /// Memory for experts.
    pub ram: RamBudget,
    /// What computes besides the CPU, and its memory for experts.
    pub device: DeviceChoice,
    pub vram: VramBudget,
    /// Layers on the device, from the end, the output being the last (`-ngl`); as many as fit where
    /// absent.
    pub gpu_layers: Option<usize>,
    /// Layers of the device whose experts stay on the CPU (`-cmoe`, `-ncmoe`).
    pub cpu_moe: CpuMoe,
    /// Where tensors are by their names (`-ot`), before `cpu_moe` is asked.
    pub override_tensors: Vec<TensorPlace>,
    /// What to prefetch and to drop where experts are streamed, and how they are read.
    pub policy: PolicySpec,
    pub io: IoKind,
    /// Where policies keep what they learn of the model.
    pub profile: ProfileChoice,
    /// Metadata that takes the place of the file's own.
    pub overrides: Vec<Override>,
    /// Whether a file without a vocabulary will do: then only token ids go in and out.
    pub without_text: bool,
    /// Whether layers wait for what was predicted, for tests: see `StreamOptions`.
    pub lockstep: bool,
    /// The part of a layer's experts that the CPU computes beside a device, for tests; by what
    /// things take if not given.
    pub cpu_share: Option<f32>,
    /// Makes reads of experts fail and wait, for tests.
    pub faults: Option<Arc<dyn Faults>>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            n_ctx: None,
            n_batch: 2048,
            n_ubatch: None,
            n_threads: None,
            cache_type_k: CacheType::F16,
            cache_type_v: CacheType::F16,
            mmap: true,
            ram: RamBudget::Auto,
            // A library's user names the device; the command line says `auto`.
            device: DeviceChoice::Cpu,
            vram: VramBudget::Auto,
            gpu_layers: None,
            cpu_moe: CpuMoe::None,
            override_tensors: Vec::new(),
            policy: PolicySpec::default(),
            io: IoKind::Auto,
            profile: ProfileChoice::Nowhere,
            overrides: Vec::new(),
            without_text: false,
            lockstep: false,
            cpu_share: None,
            faults: None,
        }
    }
}
