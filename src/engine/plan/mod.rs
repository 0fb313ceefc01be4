//! The plan of a model's memory: sizes and devices. `--dry-run` prints it.

mod cgroup;
pub mod memory;
pub(super) mod needs;
pub mod ram;
pub mod tensor_override;
pub(super) mod ubatch;
pub mod vram;

use super::EngineOptions;
use super::device;
use crate::backend::gpu::Device;
use crate::experts::disk::IoKind;
use crate::gguf::{Gguf, TensorType};
use crate::model::Bound;
use crate::policy::PolicySpec;
use crate::quant;
use crate::{Error, Result};
use ram::{Place, Sizes, VramBudget};
use std::collections::BTreeMap;
use vram::{CpuMoe, DeviceNeeds, DevicePlan, Wanted};

#[derive(Clone, Debug)]
pub struct MemoryPlan {
    pub sizes: Sizes,
    pub place: Place,
    /// Whether what is in place is so on the mapped file; else it is read to memory.
    pub is_mapped: bool,
    pub io: IoKind,
    pub policy: PolicySpec,
    /// Tokens of context of a session, and sessions that the KV cache is for.
    pub n_ctx: usize,
    pub n_sessions: usize,
    /// Tokens of context of all sessions together: fewer than each may hold at once where they
    /// share the memory of their KV caches.
    pub n_ctx_all: usize,
    /// Memory for keys and values of texts that no session holds, and for states of texts, counted
    /// with the KV cache.
    pub page_bytes: u64,
    /// Memory for bodies of requests and for what is read of them; 0 where nothing is served.
    pub body_bytes: u64,
    /// Tokens of a prompt that are computed at once, where it has as many. If `-ub` does not say
    /// how many: 512 as in llama.cpp, but where the CPU computes routed experts up to 2,048, as
    /// memory allows, so that each expert is unpacked, or comes from disk, a quarter as often.
    pub n_ubatch: usize,
    /// Layers with routed experts, experts of each and how many of them a token uses.
    pub n_moe_layers: usize,
    pub n_experts: usize,
    pub k: usize,
    /// Bytes that the computation of one token reads.
    pub expert_bytes_per_token: u64,
    pub dense_bytes_per_token: u64,
    /// Types of the weights that a token reads, and the bytes of each, the most first.
    pub token_types: Vec<(TensorType, u64)>,
    /// Threads that compute.
    pub n_threads: usize,
    /// The devices' part; `None` if the CPU computes everything.
    pub device: Option<DevicePart>,
}

/// Memory for texts.
#[derive(Clone, Copy, Debug)]
pub(super) struct TextBytes {
    /// The KV caches and pages.
    pub kv: u64,
    /// Bodies of requests and what is read of them.
    pub bodies: u64,
    /// A model that drafts them.
    pub draft: u64,
}

/// The part of a model that is on devices.
#[derive(Clone, Debug)]
pub struct DevicePart {
    pub plan: DevicePlan,
    /// A name for each device, as "GPU 0 (NVIDIA L4)".
    pub names: Vec<String>,
    /// Tokens computed at once that the devices have room for.
    pub n_ubatch: usize,
}

/// The devices that are used and their part of the model. Both are empty if the CPU computes
/// everything, because the flags say so, or because auto-detected devices are too small.
pub(super) fn on_devices(
    model: &Bound,
    options: &EngineOptions,
    n_ctx: usize,
    mut devices: Vec<Device>,
) -> Result<(Vec<Device>, Option<DevicePart>)> {
    let flags = flags_for_devices(options);
    if devices.is_empty() {
        if !flags.is_empty() {
            let are = if flags.len() == 1 { "is" } else { "are" };
            log::warn!("running on the CPU: {} {are} ignored", flags.join(", "));
        }
        return Ok((devices, None));
    }
    if model.hyper().embeds {
        let why = Error::invalid("GPUs have no kernels for embedding models: add --device cpu");
        return on_cpu_instead(options, why).map(|()| (Vec::new(), None));
    }
    let planned = plan_on(model, options, n_ctx, &devices);
    match planned {
        Err(why) => on_cpu_instead(options, why).map(|()| (Vec::new(), None)),
        Ok(part) if part.plan.is_empty() => Ok((Vec::new(), None)),
        Ok(mut part) => {
            leave_out_idle(&mut devices, &mut part);
            Ok((devices, Some(part)))
        }
    }
}

fn plan_on(
    model: &Bound,
    options: &EngineOptions,
    n_ctx: usize,
    devices: &[Device],
) -> Result<DevicePart> {
    let free = |device: &Device| Ok(device.memory()?.free_bytes as u64);
    let free: Vec<u64> = devices.iter().map(free).collect::<Result<_>>()?;
    let numbers: Vec<usize> = devices.iter().map(|device| device.info().index).collect();
    let rules = &options.override_tensors;
    let placed = tensor_override::resolve(rules, &needs::names(model), &numbers)?;
    placed.notes.iter().for_each(|note| log::warn!("{note}"));
    let wanted = Wanted {
        vram: options.vram,
        gpu_layers: options.gpu_layers,
        cpu_moe: options.cpu_moe,
        placed,
    };
    let plan = |n: usize| {
        vram::plan(&DeviceNeeds::of(model, options, n_ctx, (n, devices.len())), &free, &wanted)
    };
    let is_given = options.n_ubatch.is_some();
    let (n_ubatch, plan) = ubatch::with_room(ubatch::usual(options), is_given, &plan)?;
    let names = devices.iter().map(|d| device::name(d.info())).collect();
    Ok(DevicePart { plan, names, n_ubatch })
}

/// Leaves out those that have nothing to do, and says so.
fn leave_out_idle(devices: &mut Vec<Device>, part: &mut DevicePart) {
    let rooms = part.plan.devices.iter().enumerate();
    let is_used: Vec<bool> =
        rooms.map(|(i, room)| i == 0 || room.expert_budget_bytes > 0).collect();
    for (name, _) in part.names.iter().zip(&is_used).filter(|(_, is_used)| !**is_used) {
        log::info!(
            "{name} is not used: there are no experts for it, or it has no room for a token's"
        );
    }
    let mut of_device = is_used.iter();
    devices.retain(|_| *of_device.next().expect("one a device"));
    let mut of_name = is_used.iter();
    part.names.retain(|_| *of_name.next().expect("one a device"));
    let mut of_room = is_used.iter();
    part.plan.devices.retain(|_| *of_room.next().expect("one a device"));
}

/// Whether the CPU takes the place of devices that cannot serve, which is then said: the user did
/// not ask for them.
pub(super) fn on_cpu_instead(options: &EngineOptions, why: Error) -> Result<()> {
    if !options.device.is_auto() || !flags_for_devices(options).is_empty() {
        return Err(why);
    }
    log::warn!("running on the CPU: {why}");
    Ok(())
}

/// The flags that only devices heed, as far as they are given.
fn flags_for_devices(options: &EngineOptions) -> Vec<&'static str> {
    let given = [
        ("--vram", options.vram != VramBudget::Auto),
        ("-ngl", options.gpu_layers.is_some_and(|n| n > 0)),
        ("-cmoe", options.cpu_moe == CpuMoe::All),
        ("-ncmoe", matches!(options.cpu_moe, CpuMoe::First(_))),
        ("-ot", !options.override_tensors.is_empty()),
    ];
    given.iter().filter(|(_, given)| *given).map(|(flag, _)| *flag).collect()
}

impl MemoryPlan {
    pub(super) fn new(
        model: &Bound,
        options: &EngineOptions,
        n_ctx: usize,
        texts: TextBytes,
        available: Option<u64>,
        device: Option<DevicePart>,
    ) -> Result<MemoryPlan> {
        let hyper = model.hyper();
        let routed = || model.routed().iter().flatten();
        let (expert_bytes, dense_bytes) = model.expert_and_dense_bytes();
        let slots = model.needs();
        // An encoder's model cuts no text into micro-batches.
        let cuts = hyper.encoder.is_none();
        let tokens = |n_ubatch: usize| needs::tokens_at_once(hyper, n_ubatch, n_ctx);
        let sizes = |n_ubatch: usize| Sizes {
            expert_bytes,
            slot_bytes: slots.all_bytes(),
            // Where experts are streamed they stay in memory, also what a device has a copy of.
            dense_bytes,
            kv_bytes: texts.kv,
            body_bytes: texts.bodies,
            draft_bytes: texts.draft,
            buffer_bytes: match cuts {
                true => {
                    let n = tokens(n_ubatch);
                    (model.buffer_bytes(n, n_ctx, 0) + model.host_buffer_bytes(n)) as u64
                }
                false => 0,
            },
            n_ubatch: tokens(n_ubatch),
            minimum_bytes: slots.minimum_bytes(),
            available,
        };
        let may_grow = cuts && device.is_none() && routed().next().is_some();
        let first = device.as_ref().map_or(ubatch::usual(options), |part| part.n_ubatch);
        let (n_ubatch, sizes, place) = ubatch::choose(options, first, may_grow, &sizes)?;
        ubatch::log_reduction(options, n_ubatch);
        if place == Place::InPlace && !options.mmap {
            ram::check_copy(options.io, &sizes)?;
        }
        Ok(MemoryPlan {
            sizes,
            place,
            is_mapped: options.mmap,
            io: options.io,
            policy: options.policy,
            n_ctx,
            n_sessions: options.n_sessions.max(1),
            n_ctx_all: n_ctx * options.n_sessions.max(1),
            page_bytes: 0,
            body_bytes: texts.bodies,
            n_ubatch,
            n_moe_layers: routed().count(),
            n_experts: hyper.routing.n_experts,
            k: hyper.routing.k,
            expert_bytes_per_token: model
                .used()
                .map(|(layer, k)| k * layer.expert_bytes())
                .sum::<usize>() as u64,
            dense_bytes_per_token: dense_bytes - table_bytes(model).min(dense_bytes),
            token_types: token_types(model),
            n_threads: options.n_threads.unwrap_or_else(super::threads::default_threads),
            device,
        })
    }

    /// Whether sessions cannot all be full at once.
    pub fn shares_kv(&self) -> bool {
        self.n_ctx_all < self.n_ctx * self.n_sessions
    }

    /// Whether experts are brought from one tier to another, so that policies have a say.
    pub fn moves_experts(&self) -> bool {
        let to_device = |part: &DevicePart| part.plan.expert_budget_bytes() > 0;
        matches!(self.place, Place::Streamed { .. }) || self.device.as_ref().is_some_and(to_device)
    }

    /// Main memory that the model takes, mapped weights included, and the part of it that is for
    /// experts.
    pub fn resident_bytes(&self) -> (u64, u64) {
        let sizes = &self.sizes;
        let experts = self.expert_budget().map_or(sizes.expert_bytes, |b| b.min(sizes.slot_bytes));
        (experts + sizes.lasting_bytes() + sizes.buffer_bytes, experts)
    }

    /// Bytes of memory for experts that are streamed from disk; `None` where they are in place.
    pub fn expert_budget(&self) -> Option<u64> {
        match self.place {
            Place::InPlace => None,
            Place::Streamed { budget } => Some(budget),
        }
    }

    /// The part of all experts that the slots hold; 1 in place.
    pub fn resident_share(&self) -> f64 {
        match self.place {
            Place::InPlace => 1.0,
            Place::Streamed { budget } => {
                (budget as f64 / self.sizes.slot_bytes.max(1) as f64).min(1.0)
            }
        }
    }
}

/// Bytes that a token reads of the weights of each type that are multiplied, the most first.
fn token_types(model: &Bound) -> Vec<(TensorType, u64)> {
    let file = model.gguf();
    let mut of_routed = BTreeMap::new();
    for (layer, k) in model.used() {
        let (k, n) = (k as u64, layer.n_experts as u64);
        of_routed.extend(layer.tensors().map(|tensor| (tensor, (k, n))));
    }
    let mut types = BTreeMap::<TensorType, u64>::new();
    for (i, tensor) in file.tensors().iter().enumerate() {
        if !is_table(file, &tensor.name) && quant::is_supported(tensor.ty) {
            let (k, n) = of_routed.get(&i).copied().unwrap_or((1, 1));
            *types.entry(tensor.ty).or_default() += tensor.n_bytes / n * k;
        }
    }
    let mut types: Vec<_> = types.into_iter().collect();
    types.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    types
}

/// The bytes of tables in memory, of which a token reads some rows.
fn table_bytes(model: &Bound) -> u64 {
    let file = model.gguf();
    let tables = file
        .tensors()
        .iter()
        .enumerate()
        .filter(|(i, tensor)| is_table(file, &tensor.name) && !model.stays_in_file(*i));
    tables.map(|(_, tensor)| tensor.n_bytes).sum()
}

/// Whether a token reads some rows of this tensor: the embedding, unless the output is the same
/// tensor, and embeddings that layers read.
fn is_table(file: &Gguf, name: &str) -> bool {
    match name {
        "token_embd.weight" => file.tensor("output.weight").is_some(),
        other => other == "per_layer_token_embd.weight",
    }
}
