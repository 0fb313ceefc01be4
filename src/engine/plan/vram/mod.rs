//! The plan of VRAM: the layers on devices and the memory for their experts. Pure: the sizes of the
//! model and of the devices are parameters.
//!
//! Without flags: as many layers as there is room for, the last ones first and the output before
//! them (as llama.cpp counts them), each with its dense weights, its KV cache and enough slots for
//! one token's experts; what is left then is for experts. The embedding stays in memory: a token
//! takes one row of it. Several devices share the experts; everything else is on the first.

use crate::engine::plan::ram::VramBudget;
use crate::engine::plan::tensor_override::Placed;
use crate::experts::{LayerNeeds, Needs};
use crate::units::{self, Sum, at_least, at_most};
use crate::{Error, Result};
use std::ops::Range;

/// Which layers' experts stay in memory and are computed by the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuMoe {
    #[default]
    None,
    /// `-cmoe`
    All,
    /// `-ncmoe N`: those of the first N layers.
    First(usize),
}

impl CpuMoe {
    fn has(self, layer: usize) -> bool {
        match self {
            CpuMoe::None => false,
            CpuMoe::All => true,
            CpuMoe::First(n) => layer < n,
        }
    }
}

/// Bytes that one layer takes on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerBytes {
    /// Everything but its routed experts.
    pub dense_bytes: u64,
    /// The KV cache of one session, for the whole context.
    pub kv_bytes: u64,
    /// Slots as they are in VRAM; `None` where there are no routed experts.
    pub experts: Option<LayerNeeds>,
    /// Devices have no kernels for some part of it: it stays on the CPU, wherever it is.
    pub is_cpu_only: bool,
    /// The layer whose keys and values it sees, or whose indexer has chosen what it sees, if it is
    /// another: it stays on the CPU if that one does.
    pub leader: Option<usize>,
}

impl LayerBytes {
    /// Whether a device computes it, being one of these layers.
    fn is_on_device(&self, layers: &Range<usize>) -> bool {
        !self.is_cpu_only && self.leader.is_none_or(|other| layers.contains(&other))
    }
}

/// Bytes that a model takes on a device.
#[derive(Clone, Debug, Default)]
pub struct DeviceNeeds {
    pub layers: Vec<LayerBytes>,
    /// The last norm and the output matrix.
    pub head_bytes: u64,
    /// Activations of a micro-batch, and its tokens.
    pub activation_bytes: u64,
    pub n_tokens: usize,
    /// Tables of slots: on each device.
    pub work_bytes: u64,
    /// Activations and biases on a device that computes experts only.
    pub peer_bytes: u64,
    /// All experts of the model; percentages refer to it.
    pub expert_bytes: u64,
}

/// The requests of flags.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// For experts, on all devices together.
    pub vram: VramBudget,
    /// `-ngl`: so many layers from the end, the output being the last of all.
    pub gpu_layers: Option<usize>,
    pub cpu_moe: CpuMoe,
    /// `-ot`, which counts before `cpu_moe`.
    pub placed: Placed,
}

/// The placement of a model. All bytes but the experts' are on the first device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DevicePlan {
    pub n_layers: usize,
    /// The layers on the device, up to the last.
    pub gpu_layers: Range<usize>,
    /// Layers among them that stay on the CPU: devices have no kernels for them, or not the keys.
    pub n_cpu_only: usize,
    pub head_on_device: bool,
    /// A layer each: whether it has routed experts that only the CPU computes.
    pub experts_on_cpu: Vec<bool>,
    /// Dense weights of `gpu_layers`.
    pub dense_bytes: u64,
    pub kv_bytes: u64,
    /// If it is on the device.
    pub head_bytes: u64,
    pub activation_bytes: u64,
    pub work_bytes: u64,
    /// On each device but the first that has experts, beside them.
    pub peer_bytes: u64,
    /// Slots of all experts that are not on the CPU.
    pub expert_all_bytes: u64,
    /// Experts that one token needs at once: the least budget.
    pub expert_min_bytes: u64,
    pub devices: Vec<DeviceRoom>,
}

/// One device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceRoom {
    /// Before anything is allocated.
    pub free_bytes: u64,
    pub head_room_bytes: u64,
    /// For experts; 0 on a device that holds none.
    pub expert_budget_bytes: u64,
}

impl DevicePlan {
    /// Whether there is anything for the device to do.
    pub fn is_empty(&self) -> bool {
        self.gpu_layers.is_empty()
    }

    pub fn has_layer(&self, layer: usize) -> bool {
        self.gpu_layers.contains(&layer)
    }

    /// For experts, on all devices.
    pub fn expert_budget_bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.expert_budget_bytes).sum()
    }

    /// All that is planned for a device.
    pub fn planned_bytes(&self, device: usize) -> u64 {
        let budget = self.devices[device].expert_budget_bytes;
        match device {
            0 => self.fixed_bytes() + budget,
            _ if budget > 0 => self.peer_bytes + budget,
            _ => 0,
        }
    }

    /// On the first device, apart from experts.
    fn fixed_bytes(&self) -> u64 {
        self.weight_bytes() + self.kv_bytes + self.activation_bytes + self.work_bytes
    }

    /// Dense weights of all kinds.
    pub fn weight_bytes(&self) -> u64 {
        self.dense_bytes + self.head_bytes
    }

    /// Slots for all that is to be there.
    pub fn holds_all_experts(&self) -> bool {
        self.expert_budget_bytes() >= self.expert_all_bytes
    }
}

/// Kept free, if a twenty-fifth of what is free is not more: what the driver takes for itself,
/// other programs' windows, and a safe distance from where drivers begin to move memory.
const HEAD_ROOM: u64 = 512 << 20;

/// `HEAD_ROOM` or 4 %, whichever is more; but never more than an eighth of what is free.
pub fn head_room(free: u64) -> u64 {
    HEAD_ROOM.max(free / 25).min(free / 8)
}

/// Plans for devices with so many free bytes each.
///
/// # Panics
/// If there is no device.
pub fn plan(needs: &DeviceNeeds, free: &[u64], wanted: &Wanted) -> Result<DevicePlan> {
    let fit = Fit { needs, free, wanted };
    let plan = match wanted.gpu_layers {
        Some(n) => fit.asked(n)?,
        None => fit.most(fit.n_all()).ok_or_else(|| fit.nothing_fits())?.1,
    };
    let asked = fit.asked_for_experts();
    if plan.expert_all_bytes > 0 && asked.is_some_and(|bytes| bytes < plan.expert_min_bytes) {
        return Err(Error::invalid(format!(
            "--vram gives the experts {}, but a token needs {} at once: raise it to that or more, \
             or leave experts to the CPU with -cmoe",
            at_most(asked.unwrap_or(0)),
            at_least(plan.expert_min_bytes)
        )));
    }
    Ok(plan)
}

struct Fit<'a> {
    needs: &'a DeviceNeeds,
    free: &'a [u64],
    wanted: &'a Wanted,
}

impl Fit<'_> {
    /// `-ngl` with everything, the output included.
    fn n_all(&self) -> usize {
        self.needs.layers.len() + 1
    }

    /// The value of `--vram` in bytes, or more than all experts take.
    fn asked_for_experts(&self) -> Option<u64> {
        match self.wanted.vram {
            // Slots are longer than experts are in the file.
            VramBudget::Percent(100.0..) => Some(u64::MAX),
            vram => vram.bytes(self.needs.expert_bytes),
        }
    }

    /// The largest number of layers that fits, up to `n_max` and at least one, with its plan.
    fn most(&self, n_max: usize) -> Option<(usize, DevicePlan)> {
        let counts = (2..=n_max).rev();
        let mut plans = counts.filter_map(|n| Some((n, self.with_room(self.outline(n).ok()?)?)));
        plans.find(|(_, plan)| !plan.is_empty())
    }

    /// The plan of `-ngl`, or the reason why there is none.
    fn asked(&self, n: usize) -> Result<DevicePlan> {
        let n = n.min(self.n_all());
        let outline = self.outline(n)?;
        self.with_room(outline.clone()).ok_or_else(|| {
            let fitting = match self.most(n.saturating_sub(1)) {
                Some((n, _)) => format!("-ngl {n} fits"),
                None => "no layer fits".into(),
            };
            let why = self.shortage(&outline);
            Error::invalid(format!("-ngl {n} is more than the GPU has room for: {why}; {fitting}"))
        })
    }

    /// Everything but the experts' share, for `-ngl n`.
    fn outline(&self, n: usize) -> Result<DevicePlan> {
        let (needs, placed) = (self.needs, &self.wanted.placed);
        if placed.embedding == Some(true) {
            let why = "-ot puts the embedding on the GPU, but it always stays in memory: a token \
                       reads one row of it";
            return Err(Error::invalid(why));
        }
        let n_layers = needs.layers.len();
        let gpu_layers = self.layers_from(n_layers - n.saturating_sub(1).min(n_layers))?;
        let experts_on_cpu = self.experts_on_cpu(&gpu_layers)?;
        let head_on_device = placed.head.unwrap_or(n > 0);
        let sum = |of: fn(&LayerBytes) -> u64| {
            let layers = needs.layers[gpu_layers.clone()].iter();
            layers.filter(|layer| layer.is_on_device(&gpu_layers)).map(of).sum()
        };
        let experts = Needs(
            gpu_layers
                .clone()
                .filter(|l| !experts_on_cpu[*l])
                .map(|l| needs.layers[l].experts)
                .collect(),
        );
        let if_on = |on: bool, bytes: u64| if on { bytes } else { 0 };
        let computes = !gpu_layers.is_empty() || head_on_device;
        let layers = needs.layers[gpu_layers.clone()].iter();
        Ok(DevicePlan {
            n_layers,
            n_cpu_only: layers.filter(|layer| !layer.is_on_device(&gpu_layers)).count(),
            dense_bytes: sum(|layer| layer.dense_bytes),
            kv_bytes: sum(|layer| layer.kv_bytes),
            head_on_device,
            head_bytes: if_on(head_on_device, needs.head_bytes),
            activation_bytes: if_on(computes, needs.activation_bytes),
            work_bytes: if_on(computes, needs.work_bytes),
            peer_bytes: needs.peer_bytes + needs.work_bytes,
            expert_all_bytes: experts.all_bytes(),
            expert_min_bytes: experts.minimum_bytes(),
            devices: self.free.iter().map(|free| DeviceRoom::of(*free)).collect(),
            experts_on_cpu,
            gpu_layers,
        })
    }

    /// Layers from `start` on, but where rules put them elsewhere.
    fn layers_from(&self, start: usize) -> Result<Range<usize>> {
        let n = self.needs.layers.len();
        let rule = |l: usize| self.wanted.placed.layers.get(l).copied().flatten();
        let is_on = |l: usize| rule(l).unwrap_or(l >= start);
        let first = (0..n).find(|l| is_on(*l)).unwrap_or(n);
        match (first..n).find(|l| !is_on(*l)) {
            None => Ok(first..n),
            Some(off) => Err(Error::invalid(format!(
                "layer {first} would be on the GPU and layer {off} on the CPU, but those on the \
                 GPU are the last ones: change -ot or -ngl"
            ))),
        }
    }

    fn experts_on_cpu(&self, gpu_layers: &Range<usize>) -> Result<Vec<bool>> {
        let Wanted { cpu_moe, placed, .. } = self.wanted;
        let of_layer = |(l, layer): (usize, &LayerBytes)| {
            let rule = placed.experts.get(l).copied().flatten();
            if rule == Some(true) && !gpu_layers.contains(&l) {
                return Err(Error::invalid(format!(
                    "-ot puts the experts of layer {l} on the GPU, but the layer is on the CPU: \
                     raise -ngl or change -ot"
                )));
            }
            let kept = rule.map_or(cpu_moe.has(l), |on_gpu| !on_gpu);
            let computes = layer.is_on_device(gpu_layers) && gpu_layers.contains(&l);
            Ok(layer.experts.is_some() && (kept || !computes))
        };
        self.needs.layers.iter().enumerate().map(of_layer).collect()
    }

    /// The plan with the experts' share, if there is room for all of it.
    fn with_room(&self, mut plan: DevicePlan) -> Option<DevicePlan> {
        let left = plan.devices[0].usable().checked_sub(plan.fixed_bytes())?;
        let (all, least) = (plan.expert_all_bytes, plan.expert_min_bytes);
        if all > 0 {
            let caps = self.rooms_for_experts(&plan, left);
            // A budget that is too small is an error of its own.
            let asked = self.asked_for_experts().map(|bytes| bytes.clamp(least, all));
            if caps.iter().sum::<u64>() < asked.unwrap_or(least) {
                return None;
            }
            // More is of no use. With several devices each has a whole number of experts, which
            // may be one more than its part.
            let most = all + least * (caps.len() as u64 - 1);
            let shares = shared_out(&caps, asked.unwrap_or(most), least);
            for (device, bytes) in plan.devices.iter_mut().zip(shares) {
                device.expert_budget_bytes = bytes;
            }
        }
        Some(plan)
    }

    /// The budget of each device for experts: at most all of them, and 0 if that is less than a
    /// token needs.
    fn rooms_for_experts(&self, plan: &DevicePlan, left: u64) -> Vec<u64> {
        let (all, least) = (plan.expert_all_bytes, plan.expert_min_bytes);
        let room = |(i, device): (usize, &DeviceRoom)| {
            let room = match i {
                0 => left,
                _ => device.usable().saturating_sub(plan.peer_bytes),
            };
            Some(room.min(all)).filter(|room| *room >= least).unwrap_or(0)
        };
        plan.devices.iter().enumerate().map(room).collect()
    }

    fn nothing_fits(&self) -> Error {
        let counts = 2..=self.n_all();
        let outlines = counts.map(|n| self.outline(n));
        let smallest = outlines.into_iter().find(|outline| match outline {
            Ok(outline) => !outline.is_empty(),
            Err(_) => true,
        });
        match smallest {
            Some(Ok(outline)) => {
                let why = self.shortage(&outline);
                Error::invalid(format!("the GPU has no room for a layer: {why}"))
            }
            Some(Err(error)) => error,
            None => Error::invalid("no layer may be on the GPU: change -ot, or use --device cpu"),
        }
    }

    /// The sentence about a shortage: free memory, needed memory and a remedy.
    fn shortage(&self, plan: &DevicePlan) -> String {
        let (all, least) = (plan.expert_all_bytes, plan.expert_min_bytes);
        let asked = self.asked_for_experts().map(|bytes| bytes.clamp(least, all));
        let (experts, remedy) = match asked {
            Some(bytes) if bytes > least => (bytes, "lower --vram or -c"),
            _ if all > 0 => (least, "lower -c, or leave experts to the CPU with -cmoe"),
            _ => (0, "lower -c"),
        };
        let room = &plan.devices[0];
        let n = self.needs.n_tokens;
        let tokens = if n == 1 { "token" } else { "tokens" };
        let sum = Sum::of(&[
            (format!("{} of {} layers", plan.gpu_layers.len(), plan.n_layers), plan.dense_bytes),
            ("output".into(), plan.head_bytes),
            ("KV cache".into(), plan.kv_bytes),
            (format!("buffers for {n} {tokens}"), plan.activation_bytes + plan.work_bytes),
            ("experts".into(), experts),
            ("kept free".into(), room.head_room_bytes),
        ]);
        format!(
            "{} are free, but {} are needed ({}): {remedy}",
            sum.there_is(room.free_bytes),
            sum.total(),
            sum.parts()
        )
    }
}

impl DeviceRoom {
    fn of(free_bytes: u64) -> DeviceRoom {
        let head_room_bytes = head_room(free_bytes);
        DeviceRoom { free_bytes, head_room_bytes, expert_budget_bytes: 0 }
    }

    /// The memory that a plan may use.
    pub fn usable(&self) -> u64 {
        self.free_bytes - self.head_room_bytes
    }
}

/// `total`, or all that there is, in shares that are as even as `caps` allow, none of them below
/// `least` (but 0); `total` and each of `caps` that is not 0 are at least that.
fn shared_out(caps: &[u64], total: u64, least: u64) -> Vec<u64> {
    let mut order: Vec<usize> = (0..caps.len()).filter(|i| caps[*i] > 0).collect();
    order.sort_by_key(|i| std::cmp::Reverse(caps[*i]));
    let most = total / least.max(1);
    order.truncate(usize::try_from(most).unwrap_or(usize::MAX).max(1));
    let mut shares = vec![0; caps.len()];
    let mut left = total;
    // From the smallest: what it cannot take, the others share.
    while let Some(i) = order.pop() {
        shares[i] = caps[i].min(left / (order.len() as u64 + 1));
        left -= shares[i];
    }
    shares
}

/// Bytes that are not in the device's memory although it was asked for: more than were free, or
/// the free bytes have not become fewer by as much. Drivers of Windows, and of Linux in it, go on
/// in the system's memory when their own is full, and everything is then slow.
pub fn spilled_bytes(free_before: u64, free_after: u64, allocated: u64) -> u64 {
    let taken = free_before.saturating_sub(free_after);
    let missing = allocated.saturating_sub(taken);
    // Others may have given memory back meanwhile.
    let tolerated = SPILL_TOLERATED.max(allocated / 16);
    if missing > tolerated || allocated > free_before { missing } else { 0 }
}

const SPILL_TOLERATED: u64 = 64 << 20;

/// The warning that goes with it.
pub fn spill_warning(bytes: u64) -> String {
    format!(
        "the driver has moved about {} of VRAM into system memory, which is much slower: another \
         program uses the GPU; close it, or lower --vram, -ngl or -c",
        units::size(bytes)
    )
}

#[cfg(test)]
mod tests;
