//! Engine (loaded, immutable) and Session (one timeline of one text).

mod describe;
pub mod device;
mod encoder;
pub mod plan;
mod profile;
mod recording;
mod understand;

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::cpu::Cpu;
pub use crate::backend::cpu::router::Route;
use crate::backend::gpu::Device;
use crate::experts::disk::link::{Faults, IoKind};
use crate::experts::{Counters, Layout, StreamOptions, TierPlan};
use crate::forward::encoder_decoder::EncoderParams;
use crate::forward::gpu::{GpuCache, GpuModel, GpuOptions};
pub use crate::forward::record::Recorder;
use crate::forward::{Buffers, Observer};
pub use crate::forward::{Logits, TopK, Want};
use crate::gguf::{Gguf, Override};
use crate::interrupt;
pub use crate::model::kv::CacheType;
use crate::model::kv::{self, KvCache};
use crate::model::{Bound, HyperParams, Model};
use crate::policy::{Event, PolicySpec};
use crate::tokenizer::Tokenizer;
use crate::units::{at_least, at_most, size};
use crate::{Error, Result};
pub use device::DeviceChoice;
use plan::ram::{Place, RamBudget, VramBudget};
pub use plan::tensor_override::TensorPlace;
pub use plan::vram::CpuMoe;
pub use plan::{DevicePart, MemoryPlan};
pub use profile::{ProfileChoice, ProfileFile};
use recording::ExpertRecorder;
pub use recording::Experts;
pub use understand::understand;

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

/// A context longer than this is refused: its positions would not fit the f32 of RoPE exactly.
const MAX_CTX: usize = 1 << 24;

/// A loaded model, its tokenizer and the threads that compute it.
pub struct Engine {
    model: Model,
    tokenizer: Tokenizer,
    /// Taken once a forward pass: passes of several sessions follow one another.
    compute: Mutex<Compute>,
    n_threads: usize,
    options: EngineOptions,
    n_ctx: usize,
    plan: MemoryPlan,
    store: Option<ProfileFile>,
    next_session: AtomicU32,
}

/// What passes are computed with.
struct Compute {
    cpu: Cpu,
    /// The model's part on devices.
    gpu: Option<GpuModel>,
}

/// A model that is understood and planned for, with no memory committed yet.
struct Prepared {
    bound: Bound,
    tokenizer: Tokenizer,
    n_ctx: usize,
    plan: MemoryPlan,
    /// Open, in the order of the plan; none where the CPU computes everything.
    devices: Vec<Device>,
}

impl Prepared {
    fn new(path: &Path, options: &EngineOptions) -> Result<Prepared> {
        let gguf = Gguf::open_with(path, &options.overrides)?;
        let (bound, tokenizer) = understand(gguf, options.without_text)?;
        let devices = device::open(&options.device)?;
        let n_ctx = context(bound.hyper(), options, &devices)?;
        kv::check(&bound.hyper().cache_shapes(), options.cache_type_k, options.cache_type_v)?;
        let (devices, device) = plan::on_devices(&bound, options, n_ctx, devices)?;
        let on_device = device.as_ref().map_or(0, |part| part.plan.kv_bytes);
        let kv_bytes = kv_bytes(bound.hyper(), options, n_ctx) - on_device;
        let available = plan::memory::available_bytes();
        if let Some(available) = available.filter(|a| *a < kv_bytes) {
            return Err(Error::invalid(format!(
                "the KV cache for {n_ctx} tokens takes {}, but {} of memory are available: \
                 lower -c",
                at_least(kv_bytes),
                at_most(available)
            )));
        }
        let plan = MemoryPlan::new(&bound, options, n_ctx, kv_bytes, available, device)?;
        Ok(Prepared { bound, tokenizer, n_ctx, plan, devices })
    }
}

/// Takes the devices' memory for their parts of the model, as planned.
fn onto_devices(
    model: &mut Model,
    options: &EngineOptions,
    plan: &MemoryPlan,
    devices: &[Device],
    store: Option<&ProfileFile>,
) -> Result<Option<GpuModel>> {
    let Some(part) = plan.device.as_ref().filter(|_| !devices.is_empty()) else { return Ok(None) };
    let of_devices = &part.plan;
    let budgets = of_devices.devices.iter().map(|room| room.expert_budget_bytes);
    let gpu_options = GpuOptions {
        layers: of_devices.gpu_layers.clone(),
        head: of_devices.head_on_device,
        experts: of_devices.experts_on_cpu.iter().map(|on_cpu| !on_cpu).collect(),
        expert_budgets: budgets.collect(),
        policy: options.policy,
        profile: store.map(ProfileFile::load).unwrap_or_default(),
        lockstep: options.lockstep,
        n_ubatch: plan::needs::tokens_at_once(model.hyper(), plan.n_ubatch, plan.n_ctx),
        n_ctx: plan.n_ctx,
        cpu_share: options.cpu_share,
    };
    let free = |device: &Device| Ok(device.memory()?.free_bytes as u64);
    let before: Vec<u64> = devices.iter().map(free).collect::<Result<_>>()?;
    let gpu = model.onto(devices, &gpu_options)?;
    for (i, (device, before)) in devices.iter().zip(before).enumerate() {
        // Sessions take the KV cache.
        let kv_bytes = if i == 0 { of_devices.kv_bytes } else { 0 };
        let planned = of_devices.planned_bytes(i) - kv_bytes;
        let taken = before.saturating_sub(free(device)?);
        log::debug!("{taken} bytes of VRAM taken, {planned} planned, beside the KV cache");
        device::warn_of_spill(device, before, planned)?;
    }
    Ok(Some(gpu))
}

/// Tokens of context: what is asked for, or what there is room for.
fn context(hyper: &HyperParams, options: &EngineOptions, devices: &[Device]) -> Result<usize> {
    let n_ctx = match options.n_ctx {
        Some(n_ctx) => n_ctx,
        None => {
            let of_device = devices.first().map(|device| device.memory()).transpose()?;
            default_ctx(hyper, options, of_device.map(|memory| memory.free_bytes as u64))
        }
    };
    let n_ubatch = plan::ubatch::usual(options);
    if !(1..=MAX_CTX).contains(&n_ctx) || n_ubatch == 0 {
        return Err(Error::Usage(format!(
            "context and batch sizes must be 1 to {MAX_CTX}, got -c {n_ctx} -b {} -ub {n_ubatch}",
            options.n_batch
        )));
    }
    if n_ctx > hyper.n_ctx_train {
        let trained = hyper.n_ctx_train;
        log::warn!("context of {n_ctx} tokens, but the model was trained on {trained}");
    }
    Ok(n_ctx)
}

/// Touches every page of the file, so that the first token does not wait for page faults one
/// at a time. A file that memory cannot hold is left alone: reading its end would only push
/// out its beginning.
fn read_ahead(gguf: &Gguf, cpu: &Cpu, progress: &mut dyn FnMut(f32)) -> Result<()> {
    let total = gguf.n_bytes().max(1);
    if let Some(available) = plan::memory::available_bytes().filter(|a| *a < total) {
        log::warn!(
            "the model has {}, but {} of memory are available: its pages are read again and again \
             as tokens need them",
            size(total),
            at_most(available)
        );
        return Ok(());
    }
    let mut done = 0;
    for shard in gguf.shards() {
        // A token's products read them a tenth faster (bench/PROFILE.md).
        shard.use_huge_pages();
        for part in shard.map().chunks(64 << 20) {
            interrupt::check()?;
            cpu.chunks(part.len().div_ceil(1 << 20), 1, &|_, range| {
                let part = &part[range.start << 20..part.len().min(range.end << 20)];
                let pages = part.iter().step_by(4096);
                std::hint::black_box(pages.fold(0u8, |sum, byte| sum ^ byte));
            });
            done += part.len();
            progress(done as f32 / total as f32);
        }
    }
    Ok(())
}

impl Engine {
    /// Opens and checks a model, decides where its experts are to be, and brings in its pages or
    /// its dense weights; `progress` hears fractions from 0 to 1 of that.
    pub fn load(
        path: &Path,
        options: &EngineOptions,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<Engine>> {
        progress(0.0);
        let prepared = Prepared::new(path, options)?;
        let has_device = prepared.plan.device.is_some();
        match Engine::prepared(prepared, path, options, progress) {
            // What other programs took since it was planned, for instance.
            Err(why @ Error::Device(_)) if has_device => {
                plan::on_cpu_instead(options, why)?;
                let options = EngineOptions { device: DeviceChoice::Cpu, ..options.clone() };
                progress(0.0);
                Engine::prepared(Prepared::new(path, &options)?, path, &options, progress)
            }
            done => done,
        }
    }

    fn prepared(
        prepared: Prepared,
        path: &Path,
        options: &EngineOptions,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<Engine>> {
        let Prepared { bound, tokenizer, n_ctx, mut plan, devices } = prepared;
        let cpu = Cpu::new(threads(options.n_threads));
        // Nothing is learned of experts that stay where they are.
        let store = match plan.moves_experts() {
            true => ProfileFile::open(&options.profile, path, bound.gguf().key())?,
            false => None,
        };
        let mut model = match plan.place {
            Place::InPlace if plan.is_mapped => {
                let model = bound.in_place();
                read_ahead(model.gguf(), &cpu, progress)?;
                model
            }
            Place::InPlace => {
                let total = bound.gguf().n_bytes().max(1) as f32;
                bound.in_memory(&mut |done| progress(done as f32 / total))?
            }
            Place::Streamed { budget } => {
                let stream = StreamOptions {
                    budget,
                    io: options.io,
                    policy: options.policy,
                    k: bound.k(),
                    profile: store.as_ref().map(ProfileFile::load).unwrap_or_default(),
                    lockstep: options.lockstep,
                    faults: options.faults.clone(),
                };
                let total = plan.sizes.dense_bytes.max(1) as f32;
                bound.streamed(&stream, &mut |done| progress(done as f32 / total))?
            }
        };
        let gpu = onto_devices(&mut model, options, &plan, &devices, store.as_ref())?;
        plan.io = model.io().unwrap_or(plan.io);
        Ok(Arc::new(Engine {
            model,
            tokenizer,
            n_threads: cpu.n_threads(),
            compute: Mutex::new(Compute { cpu, gpu }),
            options: options.clone(),
            n_ctx,
            plan,
            store,
            next_session: AtomicU32::new(0),
        }))
    }

    /// Where everything would be, without reading weights.
    pub fn plan_of(path: &Path, options: &EngineOptions) -> Result<MemoryPlan> {
        Prepared::new(path, options).map(|prepared| prepared.plan)
    }

    /// Slots and reads as these options stream experts; `None` where they are in place.
    pub fn tier_of(
        path: &Path,
        options: &EngineOptions,
    ) -> Result<Option<(TierPlan, Box<dyn Layout>)>> {
        let prepared = Prepared::new(path, options)?;
        Ok(match prepared.plan.place {
            Place::InPlace => None,
            Place::Streamed { budget } => Some(prepared.bound.tier(budget)),
        })
    }

    pub fn gguf(&self) -> &Gguf {
        self.model.gguf()
    }

    /// A file's weights where they are computed with, the most that lie together; `None` where
    /// experts are streamed.
    pub fn weights_in_place(&self) -> Option<&[u8]> {
        let maps = self.gguf().shards().iter().map(|shard| shard.map());
        maps.max_by_key(|map| map.len()).filter(|_| self.plan.place == Place::InPlace)
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    pub fn n_vocab(&self) -> usize {
        self.model.n_vocab()
    }

    pub fn n_layers(&self) -> usize {
        self.model.hyper().n_layers
    }

    /// What an encoder–decoder model has besides a decoder's numbers.
    pub fn encoder(&self) -> Option<&EncoderParams> {
        self.model.hyper().encoder.as_ref()
    }

    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    fn compute(&self) -> MutexGuard<'_, Compute> {
        // A panic in a region leaves nothing behind, so a poisoned lock is as good.
        self.compute.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of one session's KV cache when its context is full.
    pub fn kv_bytes(&self) -> u64 {
        kv_bytes(self.model.hyper(), &self.options, self.n_ctx)
    }

    /// Where everything is.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// What getting experts to where they are computed has cost so far: to devices, or to memory
    /// where there are none. `None` where nothing moves.
    pub fn expert_counters(&self) -> Option<Counters> {
        self.link_counters().or_else(|| self.disk_counters())
    }

    /// What moving experts from disk to memory has cost; `None` where they are in place.
    pub fn disk_counters(&self) -> Option<Counters> {
        self.model.disk_counters()
    }

    /// What moving them from memory to devices has; `None` where there are none on a device.
    pub fn link_counters(&self) -> Option<Counters> {
        self.model.link_counters()
    }
}

fn kv_bytes(hyper: &HyperParams, options: &EngineOptions, n_ctx: usize) -> u64 {
    kv::n_bytes(&hyper.cache_shapes(), n_ctx, options.cache_type_k, options.cache_type_v)
}

/// The context the model was trained for, or as much of it as a quarter of the available memory
/// holds, on the device if there is one: the weights want the rest.
fn default_ctx(hyper: &HyperParams, options: &EngineOptions, of_device: Option<u64>) -> usize {
    let trained = hyper.n_ctx_train;
    let one = kv_bytes(hyper, options, 1).max(1);
    let available = plan::memory::available_bytes().into_iter().chain(of_device).min();
    let room = available.map_or(u64::MAX, |bytes| bytes / 4 / one);
    let n_ctx = trained.min(usize::try_from(room).unwrap_or(usize::MAX)).max(1);
    if n_ctx < trained {
        log::warn!("context of {n_ctx} tokens, as memory allows; the model has {trained}: see -c");
    }
    n_ctx
}

/// As many threads as are asked for, with a warning where that is more than there are cores: they
/// wait for each other several times a layer.
fn threads(asked: Option<usize>) -> usize {
    let n = asked.unwrap_or_else(default_threads);
    let n_cores = std::thread::available_parallelism().map_or(n, |n| n.get());
    if n > n_cores {
        let cores = if n_cores == 1 { "core" } else { "cores" };
        log::warn!(
            "-t {n}: this machine has {n_cores} {cores}, and more threads than cores are slow, as \
             they wait for each other"
        );
    }
    n
}

/// One thread a physical core: a second one on the same core shares the units that the kernels
/// keep busy.
pub fn default_threads() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, |n| n.get());
    let siblings =
        std::fs::read_to_string("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list");
    match siblings {
        Ok(list) if list.trim().contains([',', '-']) => (logical / 2).max(1),
        _ => logical,
    }
}

impl Drop for Engine {
    /// What was learned in this run helps the next one.
    fn drop(&mut self) {
        if let Some(verdict) = self.model.verdict() {
            log::info!("{verdict}");
        }
        if let Some(store) = &self.store {
            store.save(&self.model.learned());
        }
    }
}

/// One timeline: a text and its KV cache.
pub struct Session {
    engine: Arc<Engine>,
    /// What policies know it by.
    id: u32,
    /// Whether policies know of its text.
    is_started: bool,
    kv: KvCache,
    /// Of the layers that are on a device.
    gpu_kv: Option<GpuCache>,
    buffers: Buffers,
    n_past: usize,
    /// Tokens of the text that the encoder has read; 0 if there is none.
    n_source: usize,
    /// There while chosen experts are recorded.
    recorded: Option<ExpertRecorder>,
    /// See `hear_progress`.
    on_progress: Option<OnProgress>,
}

/// Hears how many tokens of a call are computed.
type OnProgress = Box<dyn FnMut(usize) + Send>;

/// Hands the model's answers on to the session's caller.
struct Relay<'a> {
    /// Which of the call's tokens are computed now.
    part: Range<usize>,
    n_layers: usize,
    on_progress: Option<&'a mut OnProgress>,
    recorder: Option<&'a mut dyn Recorder>,
    on_logits: &'a mut dyn FnMut(usize, Logits<'_>),
}

impl Observer for Relay<'_> {
    fn recorder(&mut self) -> Option<&mut dyn Recorder> {
        match &mut self.recorder {
            Some(recorder) => Some(&mut **recorder),
            None => None,
        }
    }

    /// A token of decode is done in no time, and then nothing of it is lost.
    fn layer(&mut self, l: usize) -> Result<()> {
        if let Some(on_progress) = &mut self.on_progress {
            on_progress(self.part.start + self.part.len() * l / self.n_layers);
        }
        if self.part.len() > 1 { interrupt::check() } else { Ok(()) }
    }

    fn logits(&mut self, token: usize, logits: Logits<'_>) {
        (self.on_logits)(self.part.start + token, logits);
    }
}

/// Who takes all logits of a token, among those who take any.
fn whole(on_logits: &mut dyn FnMut(usize, &mut [f32])) -> impl FnMut(usize, Logits<'_>) {
    |token, logits| match logits {
        Logits::All(logits) => on_logits(token, logits),
        Logits::Best { .. } => unreachable!("not wanted"),
    }
}

/// The same tokens, with all logits.
fn all_of(want: Want) -> Want {
    if let Want::LastBest(_) = want { Want::Last } else { want }
}

impl Session {
    pub fn new(engine: &Arc<Engine>) -> Result<Session> {
        let (k, v) = (engine.options.cache_type_k, engine.options.cache_type_v);
        let gpu_kv = |gpu: &GpuModel, bytes: u64| -> Result<GpuCache> {
            let before = gpu.device().memory()?.free_bytes as u64;
            let cache = gpu.new_cache(&engine.model, engine.n_ctx, (k, v))?;
            device::warn_of_spill(gpu.device(), before, bytes)?;
            Ok(cache)
        };
        Ok(Session {
            kv: KvCache::new(&engine.model.hyper().cache_shapes(), engine.n_ctx, k, v),
            gpu_kv: match &engine.plan.device {
                Some(part) => {
                    let compute = engine.compute();
                    compute.gpu.as_ref().map(|gpu| gpu_kv(gpu, part.plan.kv_bytes)).transpose()?
                }
                None => None,
            },
            engine: engine.clone(),
            id: engine.next_session.fetch_add(1, Ordering::Relaxed),
            is_started: false,
            buffers: Buffers::default(),
            n_past: 0,
            n_source: 0,
            recorded: None,
            on_progress: None,
        })
    }

    /// Tokens in the cache.
    pub fn n_past(&self) -> usize {
        self.n_past
    }

    /// Forgets all tokens but the first `n`, or all where a model's state cannot go back; answers
    /// how many are left.
    pub fn truncate(&mut self, n: usize) -> usize {
        self.n_past = self.forget(self.n_past, n);
        self.n_past
    }

    /// Of `n_past` tokens all but the first `n`; answers how many are left.
    fn forget(&mut self, n_past: usize, n: usize) -> usize {
        let left = self.kv.truncate(n_past, n);
        if let (0, Some(on_device)) = (left, &self.gpu_kv)
            && let Err(why) = on_device.clear_states()
        {
            // Of a device that is lost: what is computed next says so again.
            log::warn!("{why}");
        }
        left
    }

    /// Appends `tokens`, computed in micro-batches. `on_logits(index in tokens, logits)` is called
    /// for the last token, for each, or not at all, with all logits. An interruption or an error
    /// leaves the session at the last whole micro-batch or, where a model's state cannot go back,
    /// empty: `n_past` says which.
    pub fn eval(
        &mut self,
        tokens: &[u32],
        want: Want,
        on_logits: &mut dyn FnMut(usize, &mut [f32]),
    ) -> Result<()> {
        self.eval_heard(tokens, all_of(want), &mut whole(on_logits))
    }

    /// `eval` for the last token's logits, of which `enough` is needed: `take` is called once, with
    /// all of them or with these. Without `enough`, with all.
    pub fn eval_last(
        &mut self,
        tokens: &[u32],
        enough: Option<TopK>,
        take: &mut dyn FnMut(Logits<'_>),
    ) -> Result<()> {
        let want = enough.map_or(Want::Last, Want::LastBest);
        self.eval_heard(tokens, want, &mut |_, logits| take(logits))
    }

    /// `eval`, of which `recorder` hears everything. An interruption or an error may leave it in
    /// the middle of a pass.
    pub fn eval_recorded(
        &mut self,
        tokens: &[u32],
        want: Want,
        recorder: &mut dyn Recorder,
        on_logits: &mut dyn FnMut(usize, &mut [f32]),
    ) -> Result<()> {
        self.eval_parts(tokens, all_of(want), Some(recorder), &mut whole(on_logits))
    }

    fn eval_heard(
        &mut self,
        tokens: &[u32],
        want: Want,
        on_logits: &mut dyn FnMut(usize, Logits<'_>),
    ) -> Result<()> {
        let mut recorded = self.recorded.take();
        let recorder = recorded.as_mut().map(|recorder| recorder as &mut dyn Recorder);
        let result = self.eval_parts(tokens, want, recorder, on_logits);
        self.recorded = recorded;
        result
    }

    fn eval_parts(
        &mut self,
        tokens: &[u32],
        want: Want,
        mut recorder: Option<&mut dyn Recorder>,
        on_logits: &mut dyn FnMut(usize, Logits<'_>),
    ) -> Result<()> {
        let engine = self.engine.clone();
        self.check(tokens)?;
        self.start_request();
        if engine.encoder().is_some() {
            return self.answer(tokens, want, recorder, on_logits);
        }
        let n_ubatch = engine.plan.n_ubatch;
        for (i, part) in tokens.chunks(n_ubatch).enumerate() {
            interrupt::check()?;
            let at = i * n_ubatch..i * n_ubatch + part.len();
            let last = at.end == tokens.len();
            let want = if want == Want::All || last { want } else { Want::None };
            let recorder = recorder.as_mut().map(|recorder| &mut **recorder as &mut dyn Recorder);
            let mut relay = Relay {
                part: at,
                n_layers: engine.n_layers(),
                on_progress: self.on_progress.as_mut(),
                recorder,
                on_logits: &mut *on_logits,
            };
            let (kv, b, at) = (&mut self.kv, &mut self.buffers, (self.id, self.n_past));
            let (model, compute) = (&engine.model, &mut *engine.compute());
            let result = match (&mut compute.gpu, &self.gpu_kv) {
                (Some(gpu), Some(on_device)) => {
                    let kv = (kv, on_device);
                    let at = (at.0, at.1, tokens.len() > 1);
                    gpu.forward(model, &compute.cpu, kv, b, part, at, want, &mut relay)
                }
                _ => model.forward(&compute.cpu, kv, b, part, at, want, &mut relay),
            };
            let end = self.n_past + part.len();
            self.n_past = match result {
                Ok(()) => end,
                // Some layers may have seen these tokens.
                Err(_) => self.forget(end, self.n_past),
            };
            result?;
        }
        Ok(())
    }

    /// A session that was emptied begins another text.
    fn start_request(&mut self) {
        if self.n_past + self.n_source > 0 && self.is_started {
            return;
        }
        self.end_request();
        self.engine.model.publish(&Event::RequestStart { request: self.id });
        self.is_started = true;
    }

    fn end_request(&mut self) {
        if std::mem::take(&mut self.is_started) {
            self.engine.model.publish(&Event::RequestEnd { request: self.id });
        }
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        self.check_source()?;
        self.check_room(tokens)
    }

    fn check_room(&self, tokens: &[u32]) -> Result<()> {
        let (n_vocab, n_ctx) = (self.engine.n_vocab(), self.engine.n_ctx);
        if let Some(bad) = tokens.iter().find(|t| **t as usize >= n_vocab) {
            return Err(Error::invalid(format!(
                "token id {bad} is out of range: the model has {n_vocab} tokens"
            )));
        }
        if self.n_past + tokens.len() > n_ctx {
            return Err(Error::invalid(format!(
                "{} tokens do not fit the context of {n_ctx} ({} are used): raise it with -c",
                tokens.len(),
                self.n_past
            )));
        }
        Ok(())
    }

    /// From now on `hear` is told how many of the tokens of a call are computed; of a micro-batch a
    /// part for each layer.
    pub fn hear_progress(&mut self, hear: Option<OnProgress>) {
        self.on_progress = hear;
    }

    /// Starts or stops recording the chosen experts of what `eval` evaluates.
    pub fn record_experts(&mut self, on: bool) {
        let (n_layers, k) = (self.engine.n_layers(), self.engine.model.hyper().routing.k);
        self.recorded = on.then(|| ExpertRecorder::new(n_layers, k.max(1)));
    }

    /// What was recorded since the last call or `record_experts`.
    pub fn take_experts(&mut self) -> Experts {
        self.recorded.as_mut().map(ExpertRecorder::take).unwrap_or_default()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end_request();
        // Freeing waits for the device, and that may wait for the host in the midst of a pass.
        if self.gpu_kv.is_some() {
            let _between_passes = self.engine.compute();
            self.gpu_kv = None;
        }
    }
}
