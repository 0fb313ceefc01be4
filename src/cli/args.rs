//! Arguments that several subcommands share, and how they become engine options.

use super::device_args::DeviceArgs;
use super::model::csv_row;
use super::values::{self, Parsed};
use crate::engine::plan::ram::RamBudget;
use crate::engine::{
    AdapterFile, CacheType, EngineOptions, PeerOptions, ProfileChoice, SpecMode, TestHooks,
};
use crate::experts::disk::IoKind;
use crate::policy::PolicySpec;
use crate::{Error, Result};
use std::path::PathBuf;

/// More threads or tokens than any machine or model has: a slip of the finger.
pub const MAX_THREADS: i64 = 4096;
pub const MAX_TOKENS: i64 = 1 << 24;

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Engine")]
pub struct ThreadsArg {
    /// Number of threads; -1 uses one per physical core
    #[arg(short, long, value_name = "N", default_value = "-1")]
    #[arg(value_parser = threads, env = "MOEBA_THREADS")]
    pub threads: i64,
}

impl ThreadsArg {
    pub fn count(&self) -> Option<usize> {
        usize::try_from(self.threads).ok()
    }
}

/// −1, or how many.
pub fn threads(text: &str) -> Parsed<i64> {
    let wrong = || format!("expected -1 or a whole number from 1 to {MAX_THREADS}");
    match values::integer::<i64>(text, -1, MAX_THREADS) {
        Ok(0) | Err(_) => Err(wrong()),
        Ok(n) => Ok(n),
    }
}

/// How many.
pub fn n_threads(text: &str) -> Parsed<usize> {
    values::integer(text, 1, MAX_THREADS)
}

/// A number of tokens, at least one.
pub fn tokens(text: &str) -> Parsed<usize> {
    values::integer(text, 1, MAX_TOKENS)
}

/// A number of tokens, where 0 has a meaning of its own.
pub fn tokens_or_zero(text: &str) -> Parsed<usize> {
    values::integer(text, 0, MAX_TOKENS)
}

#[derive(clap::Args, Debug)]
pub struct BatchArgs {
    #[command(flatten)]
    pub sizes: SizeArgs,
    #[command(flatten)]
    pub weights: WeightArgs,
}

/// Tokens that are computed at once, and the types of the caches.
#[derive(clap::Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Engine")]
pub struct SizeArgs {
    /// Tokens of a prompt handed to the engine at once
    #[arg(short, long, value_name = "N", default_value = "2048", value_parser = tokens)]
    #[arg(env = "MOEBA_BATCH_SIZE")]
    pub batch_size: usize,
    /// Tokens of a prompt computed at once (or -ub N) [default: 512, up to 2048 as memory allows
    /// where the CPU computes routed experts]
    #[arg(long, value_name = "N", value_parser = tokens, env = "MOEBA_UBATCH_SIZE")]
    pub ubatch_size: Option<usize>,
    /// Type of the key cache: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0 or q5_1 (or -ctk TYPE)
    #[arg(long, value_name = "TYPE", default_value = "f16", value_parser = cache_type)]
    #[arg(env = "MOEBA_CACHE_TYPE_K")]
    pub cache_type_k: CacheType,
    /// Type of the value cache, as for keys (or -ctv TYPE)
    #[arg(long, value_name = "TYPE", default_value = "f16", value_parser = cache_type)]
    #[arg(env = "MOEBA_CACHE_TYPE_V")]
    pub cache_type_v: CacheType,
}

/// The places of weights, and adapters beside them.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Engine")]
pub struct WeightArgs {
    /// Read the weights into memory instead of using the mapped file
    #[arg(long, env = "MOEBA_NO_MMAP", value_parser = values::boolean, overrides_with = "mmap")]
    pub no_mmap: bool,
    /// Compute on the mapped file; the default
    #[arg(long, overrides_with = "no_mmap")]
    pub mmap: bool,
    #[command(flatten)]
    pub adapters: AdapterArgs,
    #[command(flatten)]
    pub experts: ExpertArgs,
    #[command(flatten)]
    pub devices: DeviceArgs,
}

/// LoRA adapters beside the model.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Model")]
pub struct AdapterArgs {
    /// LoRA adapter (GGUF) that the model is computed with, on the CPU; several with commas
    /// between them, or the flag again
    #[arg(long, value_name = "FILE,…", value_parser = adapters, env = "MOEBA_LORA")]
    lora: Vec<AdapterList>,
    /// LoRA adapter and its scale; those of --lora, whose scale is 1, are numbered first
    #[arg(long, value_name = "FILE:SCALE,…", value_parser = scaled_adapters)]
    #[arg(env = "MOEBA_LORA_SCALED")]
    lora_scaled: Vec<AdapterList>,
}

/// A list is one value of the flag, so it needs a type of its own: clap reads `Vec` as "repeated".
#[derive(Clone, Debug, PartialEq)]
struct AdapterList(Vec<AdapterFile>);

impl AdapterArgs {
    fn files(&self) -> Vec<AdapterFile> {
        self.lora.iter().chain(&self.lora_scaled).flat_map(|list| list.0.clone()).collect()
    }
}

fn adapters(text: &str) -> Parsed<AdapterList> {
    let items = csv_row(text).into_iter();
    let file = |item: String| match item.is_empty() {
        true => Err("expected the name of a file".to_owned()),
        false => Ok(AdapterFile { path: item.into(), scale: 1.0 }),
    };
    items.map(file).collect::<Parsed<_>>().map(AdapterList)
}

fn scaled_adapters(text: &str) -> Parsed<AdapterList> {
    let file = |item: String| {
        let (path, scale) = item.rsplit_once(':').filter(|(path, _)| !path.is_empty())?;
        let scale = scale.parse::<f32>().ok().filter(|scale| scale.is_finite())?;
        Some(AdapterFile { path: path.into(), scale })
    };
    let files: Option<Vec<AdapterFile>> = csv_row(text).into_iter().map(file).collect();
    files.map(AdapterList).ok_or_else(|| "expected FILE:SCALE with a number for SCALE".to_owned())
}

/// Flags for the memory and the movement of routed experts.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Experts")]
pub struct ExpertArgs {
    /// Memory for experts, the rest is read from disk: bytes with K, M, G or T, a percentage of all
    /// experts, or auto for all available memory that nothing else needs
    #[arg(long, value_name = "SIZE", default_value = "auto", env = "MOEBA_RAM")]
    pub ram: RamBudget,
    /// How to prefetch, evict and split experts: on-demand, deepspeed, brainstorm,
    /// mixtral-offloading, moe-infinity, finemoe, moepic, prescope, or a combination such as
    /// predictor=map,eviction=lcp,split=0.5; any other word lists all names
    #[arg(long, value_name = "NAME", default_value_t, env = "MOEBA_POLICY")]
    pub policy: PolicySpec,
    /// File where the policy keeps what it learns; none keeps nothing, auto appends .moeba to the
    /// model's name
    #[arg(long, value_name = "FILE", default_value = "auto", env = "MOEBA_PROFILE")]
    pub profile: ProfileChoice,
    /// How to read experts: uring, pread, auto for the faster one, or mmap to use the mapped file
    #[arg(long, value_name = "KIND", default_value_t, env = "MOEBA_IO")]
    pub io: IoKind,
    /// Machines that compute experts for this one (see moeba experts), as http://HOST:PORT; experts
    /// that are in memory here are computed here
    #[arg(long, value_name = "URL,…", value_delimiter = ',', env = "MOEBA_PEERS")]
    pub peers: Vec<String>,
    /// Key that these machines ask for
    #[arg(long, value_name = "KEY", env = "MOEBA_PEER_KEY", hide_env_values = true)]
    #[arg(value_parser = peer_key)]
    pub peer_key: Option<String>,
}

fn peer_key(text: &str) -> Parsed<String> {
    match !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Ok(text.to_owned()),
        false => Err("expected ASCII characters".into()),
    }
}

pub fn cache_type(text: &str) -> Parsed<CacheType> {
    text.to_ascii_lowercase().parse().map_err(|_| format!("expected {}", CacheType::NAMES))
}

impl BatchArgs {
    /// Options for a context of `n_ctx` tokens, 0 being the model's own.
    pub fn options(&self, n_ctx: usize, n_threads: Option<usize>) -> EngineOptions {
        self.weights.options(&self.sizes, n_ctx, n_threads)
    }
}

impl WeightArgs {
    /// Options with these sizes.
    pub fn options(
        &self,
        sizes: &SizeArgs,
        n_ctx: usize,
        n_threads: Option<usize>,
    ) -> EngineOptions {
        EngineOptions {
            n_ctx: (n_ctx > 0).then_some(n_ctx),
            memory: None,
            n_models: 1,
            n_sessions: 1,
            kv_unified: false,
            page_ram: RamBudget::Bytes(0),
            body_ram: RamBudget::Bytes(0),
            n_checkpoints: 0,
            n_batch: sizes.batch_size,
            n_ubatch: sizes.ubatch_size,
            n_threads,
            cache_type_k: sizes.cache_type_k,
            cache_type_v: sizes.cache_type_v,
            exact: false,
            mmap: self.mmap || !self.no_mmap,
            ram: self.experts.ram,
            device: self.devices.device.clone(),
            vram: self.devices.vram,
            gpu_layers: self.devices.gpu_layers.0,
            cpu_moe: self.devices.cpu_moe(),
            override_tensors: self.devices.override_tensors(),
            policy: self.experts.policy,
            predicts_next: false,
            draft_model: None,
            io: self.experts.io,
            profile: self.experts.profile.clone(),
            peers: PeerOptions {
                urls: self.experts.peers.clone(),
                token: self.experts.peer_key.clone(),
            },
            only_experts: false,
            overrides: Vec::new(),
            adapters: self.adapters.files(),
            sums_inputs: false,
            without_text: false,
            test: TestHooks::default(),
        }
    }
}
/// Drafts of tokens that may come next.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Engine")]
pub struct SpecArgs {
    /// Compute tokens that probably come next in one pass with the next one, which changes no byte
    /// of the answer: auto, where that saves time by what passes took so far, off, or always
    #[arg(long = "spec", value_name = "MODE", default_value = "auto", env = "MOEBA_SPEC")]
    pub mode: SpecMode,
    /// Let this smaller model with the same vocabulary draft; the CPU computes it, in memory
    #[arg(long, value_name = "FILE", env = "MOEBA_MODEL_DRAFT")]
    model_draft: Option<PathBuf>,
}

impl SpecArgs {
    /// Options of an engine whose texts are drafted by these arguments.
    pub fn with(&self, options: EngineOptions) -> EngineOptions {
        let drafts = self.mode != SpecMode::Off;
        let draft_model = self.model_draft.clone().filter(|_| drafts);
        EngineOptions { predicts_next: drafts && draft_model.is_none(), draft_model, ..options }
    }

    /// Fails if a draft model is named where several models are served.
    pub fn check_is_for_one(&self) -> Result<()> {
        match &self.model_draft {
            Some(path) => Err(Error::Usage(format!(
                "-md {}: name the model that it drafts for: a server of several models has no \
                 draft model",
                path.display()
            ))),
            None => Ok(()),
        }
    }
}
