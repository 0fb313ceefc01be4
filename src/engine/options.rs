//! Options for loading and running a model.

use std::path::PathBuf;
use std::sync::Arc;

use super::device::DeviceChoice;
use super::plan::ram::{RamBudget, VramBudget};
use super::plan::tensor_override::TensorPlace;
use super::plan::vram::CpuMoe;
use super::profile::ProfileChoice;
use crate::experts::disk::{Faults, IoKind};
use crate::experts::peers::PeerOptions;
use crate::forward::gpu::InPlace;
use crate::gguf::Override;
use crate::model::HyperParams;
use crate::model::adapters::AdapterFile;
use crate::model::kv::{self, CacheType};
use crate::policy::PolicySpec;

/// Options for loading and running a model. The names and defaults are llama.cpp's; `None` means
/// that the engine chooses. The default computes on the CPU and gives the experts all memory that
/// is free.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Context of a session in tokens (`-c`). `None`: what the model was trained for, or less if
    /// its KV cache would take more than a quarter of the memory that is available.
    pub n_ctx: Option<usize>,
    /// Memory that is there for the model; `None`: what the system says is available.
    pub memory: Option<u64>,
    /// Models that share this memory: without a number of their own the context and the pages have
    /// so much less.
    pub n_models: usize,
    /// Sessions that there will be at a time (`--parallel`): the plan has memory for as many.
    pub n_sessions: usize,
    /// Sessions share the memory of their KV caches (`--kv-unified`). `n_ctx` is then that of all
    /// together: a session holds all of it, or as much as the model was trained for. On GPUs, and
    /// with an encoder, each has an even part.
    pub kv_unified: bool,
    /// Memory for keys and values of texts that no session holds any more (`--kv-ram`). `Auto`: an
    /// eighth of what is available, and at most 8 GiB.
    pub page_ram: RamBudget,
    /// Memory for bodies of requests and for what is read of them (`--body-ram`). `Auto`: an eighth
    /// of what is available, from 16 MiB to 512 MiB.
    pub body_ram: RamBudget,
    /// States of its text that a [`Generator`](super::Generator) keeps, if the model has any: a
    /// prompt that parts from the text is computed from one of them on. Fewer where memory is
    /// tight.
    pub n_checkpoints: usize,
    /// Upper limit of `n_ubatch` (`-b`), in tokens.
    pub n_batch: usize,
    /// Tokens of a prompt that one pass computes (`-ub`). `None`: 512, more where memory is ample,
    /// fewer where it is tight; [`MemoryPlan::n_ubatch`](super::MemoryPlan::n_ubatch) says which.
    pub n_ubatch: Option<usize>,
    /// Threads of the CPU (`-t`). `None`: one per physical core.
    pub n_threads: Option<usize>,
    /// Element type of keys in the KV cache (`-ctk`).
    pub cache_type_k: CacheType,
    /// Element type of values in the KV cache (`-ctv`).
    pub cache_type_v: CacheType,
    /// Compute prompts on a GPU as steps of decode, without tensor cores (`--exact`): slower, but
    /// results do not depend on which tokens were a prompt. On the CPU they never do.
    pub exact: bool,
    /// Compute on the mapped file. Otherwise weights are read into memory of their own
    /// (`--no-mmap`). Streamed experts are not affected.
    pub mmap: bool,
    /// Memory for experts (`--ram`).
    pub ram: RamBudget,
    /// GPUs that compute besides the CPU (`--device`).
    pub device: DeviceChoice,
    /// VRAM for experts, on all GPUs together (`--vram`).
    pub vram: VramBudget,
    /// Layers on the GPU, counted from the end; the output head counts as the last one (`-ngl`).
    /// `None`: as many as fit.
    pub gpu_layers: Option<usize>,
    /// Layers on the GPU whose experts stay on the CPU (`-cmoe`, `-ncmoe`).
    pub cpu_moe: CpuMoe,
    /// Placement of tensors by name (`-ot`). These rules come before `cpu_moe`.
    pub override_tensors: Vec<TensorPlace>,
    /// Prefetching and eviction of experts that are streamed (`--policy`).
    pub policy: PolicySpec,
    /// Load the layer that predicts the token after the next, if the file has one, for drafts
    /// (`--spec`) and as a look-ahead for prefetch. It is in memory beside the experts' budget, and
    /// computed by the CPU.
    pub predicts_next: bool,
    /// File of a smaller model with the same vocabulary, which drafts (`-md`). It is in memory as a
    /// whole, beside the experts' budget, and computed by the CPU.
    pub draft_model: Option<PathBuf>,
    /// The way in which experts are read from disk (`--io`).
    pub io: IoKind,
    /// File in which policies keep what they learn about the model (`--profile`).
    pub profile: ProfileChoice,
    /// Machines that compute experts for this one (`--peers`).
    pub peers: PeerOptions,
    /// Load routed experts alone, to compute them for other machines (`moeba experts`).
    pub only_experts: bool,
    /// Metadata that replaces the file's own (`--override-kv`).
    pub overrides: Vec<Override>,
    /// Adapters beside the model (`--lora`), which the CPU computes.
    pub adapters: Vec<AdapterFile>,
    /// Sum the squares of the matrices' inputs, for
    /// [`Engine::input_sums`](super::Engine::input_sums); the CPU computes them.
    pub sums_inputs: bool,
    /// Accept a file without a vocabulary: input and output are then token ids only.
    pub without_text: bool,
    #[doc(hidden)]
    pub test: TestHooks,
}

impl EngineOptions {
    /// Bytes of one session's KV cache when its context of `n_ctx` tokens is full.
    pub(super) fn kv_bytes(&self, hyper: &HyperParams, n_ctx: usize) -> u64 {
        kv::n_bytes(&hyper.cache_shapes(), n_ctx, self.cache_type_k, self.cache_type_v)
    }
}

/// Switches that tests need and users do not.
#[doc(hidden)]
#[derive(Clone, Debug, Default)]
pub struct TestHooks {
    /// Layers wait for predicted experts to land, so that hits do not depend on time; see
    /// `StreamOptions`.
    pub lockstep: bool,
    /// Fraction of a layer's experts that the CPU computes beside a GPU. `None`: decided by
    /// measured times.
    pub cpu_share: Option<f32>,
    /// Whether a GPU reads missing experts in place. `None`: as the environment says.
    pub in_place: Option<InPlace>,
    /// A GPU's layers are queued one by one where a token could be one graph.
    pub by_layer: bool,
    /// Multiplications after which a layer of a long prompt rests. `None`: some 10 ms of them.
    pub part_work: Option<usize>,
    /// The folder that describes nodes of memory, instead of the system's.
    pub nodes: Option<PathBuf>,
    /// Makes reads of experts fail or wait.
    pub faults: Option<Arc<dyn Faults>>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            n_ctx: None,
            memory: None,
            n_models: 1,
            n_sessions: 1,
            kv_unified: false,
            page_ram: RamBudget::Bytes(0),
            body_ram: RamBudget::Bytes(0),
            n_checkpoints: 0,
            n_batch: 2048,
            n_ubatch: None,
            n_threads: None,
            cache_type_k: CacheType::F16,
            cache_type_v: CacheType::F16,
            exact: false,
            mmap: true,
            ram: RamBudget::Auto,
            // A library's user names the device; the command line defaults to `auto`.
            device: DeviceChoice::Cpu,
            vram: VramBudget::Auto,
            gpu_layers: None,
            cpu_moe: CpuMoe::None,
            override_tensors: Vec::new(),
            policy: PolicySpec::default(),
            predicts_next: false,
            draft_model: None,
            io: IoKind::Auto,
            profile: ProfileChoice::Nowhere,
            peers: PeerOptions::default(),
            only_experts: false,
            overrides: Vec::new(),
            adapters: Vec::new(),
            sums_inputs: false,
            without_text: false,
            test: TestHooks::default(),
        }
    }
}
