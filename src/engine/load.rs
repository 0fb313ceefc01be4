//! From a file to an engine: understand, plan, then take memory.

use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};

use super::compute::Compute;
use super::device::{self, DeviceChoice};
use super::plan::ram::{Place, RamBudget};
use super::plan::{self, MemoryPlan, TextBytes};
use super::profile::ProfileFile;
use super::profile_saver::ProfileSaver;
use super::threads::threads;
use super::{Engine, EngineOptions, LoadPhase, Loading, draft_model, peers, understand};
use crate::backend::cpu::Cpu;
use crate::backend::gpu::Device;
use crate::experts::numa::{self, SYSFS};
use crate::experts::peers::Peers;
use crate::experts::{Layout, StreamOptions, TierPlan};
use crate::forward::PART_WORK;
use crate::forward::gpu::{GpuModel, GpuOptions, InPlace};
use crate::gguf::Gguf;
use crate::interrupt;
use crate::model::adapters::Adapters;
use crate::model::kv;
use crate::model::{Bound, HyperParams, Model};
use crate::tokenizer::Tokenizer;
use crate::units::{at_least, at_most, size};
use crate::{Error, Result};

/// A context longer than this is refused: its positions would not fit the f32 of RoPE exactly.
const MAX_CTX: usize = 1 << 24;

/// A context that holds most texts: a hint tells what it leaves to experts.
const SHORT_CTX: usize = 8192;

/// Memory for pages at most, unless more is asked for.
const MAX_PAGE_BYTES: u64 = 8 << 30;

/// Memory for bodies of requests, unless another one is asked for.
const BODY_BYTES: RangeInclusive<u64> = 16 << 20..=512 << 20;

/// A model that is understood and planned for, with no memory committed yet.
struct Prepared {
    bound: Bound,
    tokenizer: Tokenizer,
    plan: MemoryPlan,
    /// Open, in the order of the plan; none where the CPU computes everything.
    devices: Vec<Device>,
    /// The model that drafts, with its options.
    draft: Option<Box<(Prepared, EngineOptions)>>,
}

impl Prepared {
    fn new(path: &Path, options: &EngineOptions) -> Result<Prepared> {
        Prepared::of(Gguf::open(path)?, options)
    }

    fn of(gguf: Gguf, options: &EngineOptions) -> Result<Prepared> {
        let gguf = gguf.with(&options.overrides)?;
        let (bound, tokenizer) = understand(gguf, options.without_text)?;
        Prepared::understood(bound, tokenizer, options)
    }

    fn understood(
        mut bound: Bound,
        tokenizer: Tokenizer,
        options: &EngineOptions,
    ) -> Result<Prepared> {
        if options.only_experts {
            bound.drop_dense();
        }
        let devices = device::open(&options.device)?;
        check_adapters(options, &devices)?;
        let context = Context::new(bound.hyper(), options, &devices)?;
        kv::check(&bound.hyper().cache_shapes(), options.cache_type_k, options.cache_type_v)?;
        let (devices, device) = plan::on_devices(&bound, options, context.of_session, devices)?;
        if !options.predicts_next {
            bound.drop_next();
        } else if bound.lacks_next() {
            log::debug!("the file has no layer that predicts the token after the next");
        }
        let context = match device {
            None => Context::new(bound.hyper(), options, &[])?,
            Some(_) => context,
        };
        let on_device = device.as_ref().map_or(0, |part| part.plan.kv_bytes);
        let kv_bytes = context.kv_bytes(bound.hyper(), options) - on_device;
        let draft = Prepared::draft(&tokenizer, options, context)?;
        let draft_bytes = draft.as_ref().map_or(0, |draft| draft.0.plan.resident_bytes().0);
        let available = available(options);
        context.check_fits(kv_bytes, available)?;
        let body_bytes = body_bytes(&bound, options, available, kv_bytes + draft_bytes);
        let lasting = kv_bytes + draft_bytes + body_bytes;
        let page_bytes = page_bytes(&bound, options, available, lasting);
        let kv_bytes = kv_bytes + page_bytes;
        let Context { of_session: n_ctx, of_all: n_ctx_all } = context;
        let texts = TextBytes { kv: kv_bytes, bodies: body_bytes, draft: draft_bytes };
        let plan = MemoryPlan::new(&bound, options, n_ctx, texts, available, device)?;
        let plan = MemoryPlan { page_bytes, n_ctx_all, ..plan };
        context.warn(bound.hyper(), options, &plan);
        Ok(Prepared { bound, tokenizer, plan, devices, draft })
    }

    /// The model that drafts for the one with this tokenizer, if there is one.
    fn draft(
        tokenizer: &Tokenizer,
        options: &EngineOptions,
        context: Context,
    ) -> Result<Option<Box<(Prepared, EngineOptions)>>> {
        let Some(path) = &options.draft_model else { return Ok(None) };
        let (bound, its) = understand(Gguf::open(path)?, true)?;
        draft_model::check(path, &bound, &its, tokenizer)?;
        let n_ctx = if options.kv_unified { context.of_all } else { context.of_session };
        // Texts longer than the draft model was trained for are not drafted.
        let trained = bound.hyper().n_ctx_train;
        let most = if options.kv_unified { trained * options.n_sessions.max(1) } else { trained };
        let options = draft_model::options(options, n_ctx.min(most));
        let prepared = Prepared::understood(bound, its, &options)?;
        Ok(Some(Box::new((prepared, options))))
    }
}

/// Whether adapters, and sums of inputs, can be computed where the model is.
fn check_adapters(options: &EngineOptions, devices: &[Device]) -> Result<()> {
    let has_peers = !options.peers.urls.is_empty();
    let why = match options.adapters.is_empty() {
        true if options.sums_inputs && has_peers => {
            "what peers compute cannot be summed here: leave out --peers"
        }
        true if options.sums_inputs && !devices.is_empty() => {
            "the CPU sums activations: add --device cpu"
        }
        false if !devices.is_empty() => {
            "--lora: the CPU computes adapters: add --device cpu, or merge the adapter with moeba \
             convert --lora"
        }
        false if has_peers => {
            "--lora: peers have no adapters: leave out --peers, or merge the adapter with moeba \
             convert --lora"
        }
        _ => return Ok(()),
    };
    Err(Error::Usage(why.into()))
}

/// Memory for pages and states; none for encoder–decoder models, whose texts pages do not keep.
/// Unless it is given, it leaves a model in memory that fits there with `kv_bytes`.
fn page_bytes(
    bound: &Bound,
    options: &EngineOptions,
    available: Option<u64>,
    kv_bytes: u64,
) -> u64 {
    let (hyper, available) = (bound.hyper(), available.unwrap_or(0));
    let share = options.n_models.max(1) as u64;
    if hyper.encoder.is_some() {
        return 0;
    }
    let usual = (available / 8 / share).min(MAX_PAGE_BYTES);
    let room = room_beside(bound, available, kv_bytes);
    let pages = options.page_ram.bytes(available).unwrap_or(usual.min(room.unwrap_or(usual)));
    pages + checkpoint_bytes(hyper, options, available)
}

/// Available memory beside a model in memory and `kv_bytes`; `None` if it does not fit there.
fn room_beside(bound: &Bound, available: u64, kv_bytes: u64) -> Option<u64> {
    // A sixteenth is for buffers.
    available.checked_sub(bound.gguf().n_bytes() + kv_bytes + available / 16)
}

/// Memory for bodies of requests. Unless it is given, it leaves a model in memory that fits there,
/// but for some MiB.
fn body_bytes(
    bound: &Bound,
    options: &EngineOptions,
    available: Option<u64>,
    kv_bytes: u64,
) -> u64 {
    let room = available.and_then(|available| room_beside(bound, available, kv_bytes));
    usual_body_bytes(options.body_ram, available, room)
}

/// Memory for bodies of requests. Unless it is given, it is within `room`, but for some MiB.
pub fn usual_body_bytes(asked: RamBudget, available: Option<u64>, room: Option<u64>) -> u64 {
    let usual = available.map_or(*BODY_BYTES.end(), |available| available / 8);
    let fitting = usual.min(room.unwrap_or(usual)).clamp(*BODY_BYTES.start(), *BODY_BYTES.end());
    asked.bytes(available.unwrap_or(0)).unwrap_or(fitting)
}

/// Memory that a model can have.
fn available(options: &EngineOptions) -> Option<u64> {
    options.memory.or_else(plan::memory::available_bytes)
}

/// Memory for the states that are asked for; a model without any needs none.
fn checkpoint_bytes(hyper: &HyperParams, options: &EngineOptions, available: u64) -> u64 {
    let of_one = options.kv_bytes(hyper, 0);
    let most = (available / 16).checked_div(of_one).unwrap_or(0);
    most.min(options.n_checkpoints as u64) * of_one
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
        lockstep: options.test.lockstep,
        n_ubatch: plan::needs::tokens_at_once(model.hyper(), plan.n_ubatch, plan.n_ctx),
        n_ctx: plan.n_ctx,
        is_exact: options.exact,
        cpu_share: options.test.cpu_share,
        in_place: options.test.in_place.unwrap_or_else(InPlace::of_environment),
        by_layer: options.test.by_layer,
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
#[derive(Clone, Copy)]
struct Context {
    of_session: usize,
    /// All sessions together: less than each may have at once if they share their memory.
    of_all: usize,
}

impl Context {
    fn new(hyper: &HyperParams, options: &EngineOptions, devices: &[Device]) -> Result<Context> {
        let n_sessions = options.n_sessions.max(1);
        // A device is asked only if the answer matters: one that fails is left out later.
        let room = || {
            let of_device = devices.first().map(|device| device.memory()).transpose()?;
            Ok::<_, Error>(default_room(hyper, options, of_device.map(|m| m.free_bytes as u64)))
        };
        let is_shared = options.kv_unified && hyper.encoder.is_none() && devices.is_empty();
        let trained = hyper.n_ctx_train;
        let context = match (options.n_ctx, is_shared) {
            (Some(n_ctx), true) => {
                let of_session = n_ctx.min(trained.max(n_ctx / n_sessions));
                Context { of_session, of_all: n_ctx }
            }
            (Some(n_ctx), false) => {
                let n = if options.kv_unified { n_sessions } else { 1 };
                Context::of_each((n_ctx / n).max(n_ctx.min(1)), n_sessions)
            }
            (None, true) => {
                let room = room()?;
                let of_session = trained.min(room).max(1);
                Context { of_session, of_all: room.clamp(of_session, of_session * n_sessions) }
            }
            (None, false) => Context::of_each(trained.min(room()? / n_sessions).max(1), n_sessions),
        };
        let (n_ctx, n_ubatch) = (context.of_session, plan::ubatch::usual(options));
        if !(1..=MAX_CTX).contains(&n_ctx) || n_ubatch == 0 {
            return Err(Error::Usage(format!(
                "context and batch sizes must be 1 to {MAX_CTX}, got -c {n_ctx} -b {} -ub \
                 {n_ubatch}",
                options.n_batch
            )));
        }
        Ok(context)
    }

    fn of_each(n_ctx: usize, n_sessions: usize) -> Context {
        Context { of_session: n_ctx, of_all: n_ctx * n_sessions }
    }

    fn warn(self, hyper: &HyperParams, options: &EngineOptions, plan: &MemoryPlan) {
        let (n_ctx, trained) = (self.of_session, hyper.n_ctx_train);
        if n_ctx > trained {
            log::warn!("context of {n_ctx} tokens, but the model was trained on {trained}");
        }
        if options.n_ctx.is_some() {
            return;
        }
        if n_ctx < trained {
            log::warn!(
                "memory allows a context of {n_ctx} of the model's {trained} tokens (see -c)"
            );
        }
        if let Some((n, bytes)) = self.for_experts(hyper, options, plan) {
            log::warn!("-c {n} gives the experts {} more memory", at_most(bytes));
        }
    }

    /// A shorter context that is long enough for most texts, and the bytes that it leaves experts
    /// that are streamed: nothing if that is less than a fiftieth of what they have.
    fn for_experts(
        self,
        hyper: &HyperParams,
        options: &EngineOptions,
        plan: &MemoryPlan,
    ) -> Option<(usize, u64)> {
        let Place::Streamed { budget } = plan.place else { return None };
        let missing = plan.sizes.slot_bytes.saturating_sub(budget);
        let n = SHORT_CTX.min(self.of_session);
        let short = Context::of_each(n, options.n_sessions.max(1));
        let saved = self.kv_bytes(hyper, options).saturating_sub(short.kv_bytes(hyper, options));
        let bytes = saved.min(missing);
        (options.ram == RamBudget::Auto && bytes > budget / 50).then_some((short.of_all, bytes))
    }

    /// Fails if the KV caches take more than there is.
    fn check_fits(self, kv_bytes: u64, available: Option<u64>) -> Result<()> {
        let Some(available) = available.filter(|a| *a < kv_bytes) else { return Ok(()) };
        Err(Error::invalid(format!(
            "the KV cache for {} tokens takes {}, but {} of memory are available: lower -c",
            self.of_all,
            at_least(kv_bytes),
            at_most(available)
        )))
    }

    /// Bytes of all sessions' KV caches.
    fn kv_bytes(self, hyper: &HyperParams, options: &EngineOptions) -> u64 {
        let n_sessions = options.n_sessions.max(1);
        if self.of_all == self.of_session * n_sessions {
            return options.kv_bytes(hyper, self.of_session) * n_sessions as u64;
        }
        let (k, v) = (options.cache_type_k, options.cache_type_v);
        kv::n_shared_bytes(&hyper.cache_shapes(), self.of_all, n_sessions, k, v)
    }
}

/// Touches every page of the file, so that the first token does not wait for page faults one
/// at a time, but for those of a table whose rows are read as tokens ask for them. A file that
/// memory cannot hold is left alone: reading its end would only push out its beginning.
fn read_ahead(model: &Model, cpu: &Cpu, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
    let (gguf, table) = (model.gguf(), model.row_table());
    let total = (gguf.n_bytes() - table.map_or(0, |table| table.n_bytes)).max(1);
    if let Some(available) = plan::memory::available_bytes().filter(|a| *a < total) {
        log::warn!(
            "the model takes {}, but only {} of memory are available: its pages will be read from \
             disk again and again",
            size(total),
            at_most(available)
        );
        return Ok(());
    }
    let mut done = 0;
    for (i, shard) in gguf.shards().iter().enumerate() {
        let end = shard.map().len();
        let table = table.filter(|table| table.shard == i).map_or(end..end, |table| {
            let start = table.file_offset as usize;
            start..start + table.n_bytes as usize
        });
        for run in [0..table.start, table.end..end] {
            // A token's products read them a tenth faster (bench/PROFILE.md).
            shard.use_huge_pages(&run);
            for part in shard.map()[run].chunks(64 << 20) {
                interrupt::check()?;
                touch(cpu, part);
                done += part.len() as u64;
                progress(done, total);
            }
        }
    }
    Ok(())
}

fn touch(cpu: &Cpu, part: &[u8]) {
    cpu.chunks(part.len().div_ceil(1 << 20), 1, &|_, range| {
        let part = &part[range.start << 20..part.len().min(range.end << 20)];
        let pages = part.iter().step_by(4096);
        std::hint::black_box(pages.fold(0u8, |sum, byte| sum ^ byte));
    });
}

/// Tells the bytes of a read as the part of a load.
fn counted(phase: LoadPhase, progress: &mut dyn FnMut(Loading)) -> impl FnMut(u64, u64) {
    move |done, total| progress(phase.at(done as f32 / total as f32))
}

/// Options of a tier whose slots have `budget` bytes.
fn stream_options(
    options: &EngineOptions,
    budget: u64,
    k: usize,
    store: Option<&ProfileFile>,
    peers: Option<Arc<Peers>>,
) -> StreamOptions {
    StreamOptions {
        budget,
        io: options.io,
        policy: options.policy,
        k,
        profile: store.map(ProfileFile::load).unwrap_or_default(),
        lockstep: options.test.lockstep,
        nodes: numa::to_spread_over(options.test.nodes.as_deref().unwrap_or(SYSFS.as_ref())),
        peers,
        faults: options.test.faults.clone(),
    }
}

impl Engine {
    /// Opens and checks a model, decides where its experts are to be, and brings in its pages or
    /// its dense weights. `progress` is told what the load waits for, and the part that is done,
    /// which never shrinks.
    pub fn load(
        path: &Path,
        options: &EngineOptions,
        progress: &mut dyn FnMut(Loading),
    ) -> Result<Arc<Engine>> {
        let mut so_far = 0.0;
        // A second attempt begins where the first one was.
        let progress = &mut |now: Loading| {
            so_far = now.part.clamp(so_far, 1.0);
            progress(now.phase.at(so_far));
        };
        progress(LoadPhase::Plan.at(0.0));
        let prepared = Prepared::new(path, options)?;
        let has_device = prepared.plan.device.is_some();
        let loaded = match Engine::prepared(prepared, path, options, progress) {
            // What other programs took since it was planned, for instance.
            Err(why @ Error::Device(_)) if has_device => {
                plan::on_cpu_instead(options, why)?;
                let options = EngineOptions { device: DeviceChoice::Cpu, ..options.clone() };
                Engine::prepared(Prepared::new(path, &options)?, path, &options, progress)
            }
            done => done,
        };
        loaded.inspect(|_| progress(LoadPhase::Texts.at(1.0)))
    }

    fn prepared(
        prepared: Prepared,
        path: &Path,
        options: &EngineOptions,
        progress: &mut dyn FnMut(Loading),
    ) -> Result<Arc<Engine>> {
        let Prepared { bound, tokenizer, mut plan, devices, draft } = prepared;
        let draft = draft.map(|draft| Engine::drafting(draft.0, &draft.1)).transpose()?;
        let mut cpu = Cpu::new(threads(options.n_threads));
        if !options.peers.urls.is_empty() {
            progress(LoadPhase::Peers.at(0.0));
        }
        let peers = peers::connect(&bound, &plan, options)?;
        // Nothing is learned of experts that stay where they are.
        let store = match plan.moves_experts() {
            true => ProfileFile::open(&options.profile, path, bound.gguf().key())?,
            false => None,
        };
        let mut model = match plan.place {
            Place::InPlace if plan.is_mapped => {
                let model = bound.in_place();
                read_ahead(&model, &cpu, &mut counted(LoadPhase::Pages, progress))?;
                model
            }
            Place::InPlace => bound.in_memory(&mut counted(LoadPhase::Weights, progress))?,
            Place::Streamed { budget } => {
                let stream =
                    stream_options(options, budget, bound.k(), store.as_ref(), peers.clone());
                let mut read = |done: u64, total: u64| {
                    let phase = if done < total {
                        LoadPhase::DenseWeights
                    } else {
                        LoadPhase::ExpertMemory
                    };
                    progress(phase.at(done as f32 / total as f32));
                };
                bound.streamed(&stream, &mut read)?.with_peers(peers)
            }
        };
        if !options.adapters.is_empty() {
            progress(LoadPhase::Adapters.at(1.0));
        }
        model.adapters = Adapters::read(&options.adapters, &model)?;
        model.input_sums = options.sums_inputs.then(Default::default);
        cpu.keeps_inputs = model.adapters.is_some() || model.input_sums.is_some();
        if plan.device.is_some() {
            progress(LoadPhase::Device.at(1.0));
        }
        let gpu = onto_devices(&mut model, options, &plan, &devices, store.as_ref())?;
        plan.io = model.hierarchy().io().unwrap_or(plan.io);
        let hierarchy = model.hierarchy().clone();
        let learned = move || hierarchy.learned();
        let part_work = options.test.part_work.unwrap_or(PART_WORK);
        Ok(Arc::new(Engine {
            model,
            tokenizer,
            n_threads: cpu.n_threads(),
            compute: Compute::new(cpu, gpu, part_work),
            options: options.clone(),
            n_ctx: plan.n_ctx,
            plan,
            draft,
            changed: OnceLock::new(),
            profile: store.map(|file| ProfileSaver::start(file, learned)),
            next_session: AtomicU32::new(0),
            grammars: OnceLock::new(),
        }))
    }

    /// The model that drafts, which was prepared with these options.
    fn drafting(prepared: Prepared, options: &EngineOptions) -> Result<Arc<Engine>> {
        let path = prepared.bound.gguf().path().to_owned();
        Engine::prepared(prepared, &path, options, &mut |_| ())
    }

    /// Plans where everything would be, without reading weights.
    pub fn plan_of(path: &Path, options: &EngineOptions) -> Result<MemoryPlan> {
        Prepared::new(path, options).map(|prepared| prepared.plan)
    }

    /// Plans where everything of a model would be that need not have weights.
    pub fn plan_of_header(gguf: Gguf, options: &EngineOptions) -> Result<MemoryPlan> {
        Prepared::of(gguf, options).map(|prepared| prepared.plan)
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
}

/// Positions that a quarter of the available memory holds in the sessions' caches, on the device if
/// there is one: the weights want the rest.
fn default_room(hyper: &HyperParams, options: &EngineOptions, of_device: Option<u64>) -> usize {
    let states = options.kv_bytes(hyper, 0);
    let one = (options.kv_bytes(hyper, 1) - states).max(1);
    let available = available(options).into_iter().chain(of_device).min();
    let states = states * options.n_sessions.max(1) as u64;
    let share = 4 * options.n_models.max(1) as u64;
    let room = available.map_or(u64::MAX, |bytes| (bytes / share).saturating_sub(states) / one);
    usize::try_from(room).unwrap_or(usize::MAX)
}
