//! Dividing a layer's routed experts among the devices and the CPU.

use crate::Result;
use crate::backend::gpu::Device;
use crate::backend::ops::Demand;
use crate::backend::ops::NO_EXPERT;
use crate::cancel::Cancel;
use crate::experts::vram::VramTiers;
use crate::experts::{Acquisition, PredictedLayers};
use crate::forward::gpu::hybrid_moe::in_place::InPlaceReads;
use crate::forward::gpu::placement::{InPlace, PlacementInput, Placer};
use crate::model::weights::FfnWeights;
use crate::policy::{Missing, Schedule};
use std::ops::Range;
use std::time::Instant;

/// The division of the layer that is being computed, and the memory that it reuses.
pub struct HybridMoe {
    /// All pairs of the call, and those that the CPU computes.
    pub all: Demand,
    pub on_cpu: Demand,
    /// Whether each pair has a row of input of its own.
    splits_input: bool,
    /// By device: the experts that it computes.
    pub batches: Vec<DeviceBatch>,
    /// The experts that the CPU computes.
    pub cpu: Vec<u32>,
    /// The experts that the first device reads where they are.
    pub in_place: InPlaceReads,
    /// [tokens, k]: the chosen experts; `NO_EXPERT` for those that are not of this call.
    chosen: Vec<u32>,
    /// Pair of `all` → token · k + rank
    pub place_of: Vec<usize>,
    pub placer: Placer,
    missing: Vec<Missing>,
    /// The missing experts that can be read in place.
    readable: Vec<u32>,
    predicted: PredictedLayers,
    schedule: Schedule,
}

/// The call of which the experts are divided.
pub struct DivisionInput<'a> {
    pub tiers: Option<&'a VramTiers>,
    pub l: usize,
    /// Whether some rows are decode's, for which alone experts are predicted.
    pub has_decode: bool,
    /// See `LayerCall`.
    pub with_cpu: bool,
    pub is_miss: bool,
}

/// The experts that one device computes.
#[derive(Default)]
pub struct DeviceBatch {
    pub experts: Vec<u32>,
    pub table: Vec<u64>,
    pub work: Acquisition,
    /// The number of granules of `work` that have not been handed out.
    pub left: usize,
}

impl HybridMoe {
    /// `gpu`: the first device. For `cpu_share` and `reads` see `GpuOptions`.
    pub fn new(
        gpu: &Device,
        cpu_share: Option<f32>,
        reads: InPlace,
        n_devices: usize,
    ) -> Result<HybridMoe> {
        let batches = (0..n_devices).map(|_| DeviceBatch::default()).collect();
        Ok(HybridMoe {
            all: Demand::default(),
            on_cpu: Demand::default(),
            splits_input: false,
            batches,
            cpu: Vec::new(),
            in_place: InPlaceReads::new(gpu)?,
            chosen: Vec::new(),
            place_of: Vec::new(),
            placer: Placer::new(cpu_share, reads),
            missing: Vec::new(),
            readable: Vec::new(),
            predicted: Vec::new(),
            schedule: Schedule::default(),
        })
    }

    /// Waits for experts end once `cancel` is set.
    pub fn set_cancel(&mut self, cancel: &Cancel) {
        self.batches.iter_mut().for_each(|batch| batch.work.cancel = cancel.clone());
    }

    pub fn cancel(&self) -> Cancel {
        self.batches.first().map_or_else(Cancel::default, |batch| batch.work.cancel.clone())
    }

    /// Releases what a failed pass had acquired. The caller has waited for the devices.
    pub fn release_all(&mut self, tiers: &VramTiers) {
        for (device, batch) in self.batches.iter_mut().enumerate() {
            if let Some(vram) = tiers.get(device) {
                vram.release(&mut batch.work, None);
            }
        }
    }

    /// Begins a call for these experts of a layer, [tokens, k], among `n_experts`.
    pub fn group(
        &mut self,
        w: &FfnWeights,
        chosen: impl Iterator<Item = u32>,
        k: usize,
        n_experts: usize,
    ) {
        self.chosen.clear();
        self.chosen.extend(chosen);
        self.splits_input = w.splits_input;
        group(&mut self.all, &self.chosen, k, n_experts, self.splits_input);
        self.place_of.resize(self.all.n_pairs(), 0);
        for (place, pair) in self.all.places().iter().enumerate() {
            if let Some(to) = self.place_of.get_mut(*pair as usize) {
                *to = place;
            }
        }
    }

    /// Assigns each expert: resident ones to their devices, the others to a device, that loads or
    /// reads them in place, or the CPU, whichever is expected to have the result earlier.
    pub fn divide(&mut self, input: DivisionInput) {
        let DivisionInput { tiers, l, has_decode, with_cpu, is_miss } = input;
        for batch in &mut self.batches {
            batch.experts.clear();
            batch.left = 0;
        }
        self.cpu.clear();
        self.in_place.experts.clear();
        let Some(tiers) = tiers else {
            self.cpu.extend(&self.all.experts);
            return;
        };
        self.missing.clear();
        for (slot, &expert) in self.all.experts.iter().enumerate() {
            let part = tiers.missing_part(l, expert);
            if part == 0.0 || !with_cpu {
                self.batches[tiers.device(l, expert)].experts.push(expert);
                continue;
            }
            let n_tokens = self.all.pairs(slot).len() as f64;
            self.missing.push(Missing { expert, n_tokens, part });
        }
        if self.missing.is_empty() {
            return;
        }
        let (load_ns, delay_ns) = link_ns(tiers, l, &self.missing);
        self.predicted.clear();
        if has_decode {
            tiers.predicted(l, &mut self.predicted);
        }
        let (missing, predicted) = (&self.missing[..], &self.predicted[..]);
        let vram = tiers.vram(l, missing[0].expert);
        let (n_granules, expert_bytes) = (vram.layout(l).n_granules, vram.expert_bytes(l));
        self.readable.clear();
        if is_miss && self.placer.may_read() {
            let experts = missing.iter().map(|m| m.expert);
            self.readable.extend(experts.filter(|expert| tiers.is_readable_below(l, *expert)));
        }
        let readable = &self.readable[..];
        let placement = PlacementInput {
            missing,
            predicted,
            load_ns,
            n_granules,
            delay_ns,
            readable,
            expert_bytes,
        };
        if self.placer.place(&placement, &mut self.schedule) && has_decode {
            tiers.prefetch_planned(l, &self.schedule);
        }
        for expert in &self.schedule.upload {
            self.batches[tiers.device(l, *expert)].experts.push(*expert);
        }
        self.cpu.extend(&self.schedule.cpu);
        self.in_place.experts.extend(&self.schedule.in_place);
    }

    /// The next router's choice is known: the link has had this time between two layers.
    pub fn end_attention(&mut self, tiers: Option<&VramTiers>) {
        self.placer.attention.end(Instant::now());
        if let (Some(tiers), Some(ns)) = (tiers, self.placer.attention.ns()) {
            tiers.set_attention_ns(ns);
        }
    }

    /// A layer's experts are answered.
    pub fn begin_attention(&mut self) {
        self.placer.attention.begin(Instant::now());
    }

    /// Moves experts that some of the first `n` rows have chosen before the others.
    pub fn put_decode_first(&mut self, n: usize) {
        let n_decode = self.all.n_chosen_by(n);
        for batch in &mut self.batches {
            batch.experts.sort_by_key(|expert| self.all.slot(*expert) >= n_decode);
        }
    }

    /// Sorts each device's experts by their pairs, so that experts that are loaded together have
    /// pairs side by side.
    pub fn sort_by_pairs(&mut self) {
        for batch in &mut self.batches {
            batch.experts.sort_unstable_by_key(|expert| self.all.slot(*expert));
        }
    }

    /// Groups the pairs of the CPU's experts in `on_cpu`.
    pub fn group_on_cpu(&mut self, k: usize, n_experts: usize) {
        for expert in &mut self.chosen {
            if !self.cpu.contains(expert) {
                *expert = NO_EXPERT;
            }
        }
        group(&mut self.on_cpu, &self.chosen, k, n_experts, self.splits_input);
    }

    /// Runs of rows of `partial` that a device's pairs have, in ascending order.
    pub fn runs(&self, device: usize, is_grouped: bool) -> Vec<Range<usize>> {
        let mut rows = Vec::new();
        for expert in &self.batches[device].experts {
            let pairs = self.all.pairs(self.all.slot(*expert));
            rows.extend(pairs.map(|pair| if is_grouped { pair } else { self.place_of[pair] }));
        }
        rows.sort_unstable();
        let mut runs: Vec<Range<usize>> = Vec::new();
        for row in rows {
            match runs.last_mut() {
                Some(run) if run.end == row => run.end = row + 1,
                _ => runs.push(row..row + 1),
            }
        }
        runs
    }
}

fn group(demand: &mut Demand, chosen: &[u32], k: usize, n_experts: usize, splits_input: bool) {
    demand.group(chosen, k, n_experts);
    if splits_input {
        demand.split_inputs();
    }
}

/// Nanoseconds to load one of the missing experts, and until the transfers that are running are
/// done. The links of several devices work side by side, each on its own experts.
fn link_ns(tiers: &VramTiers, l: usize, missing: &[Missing]) -> (Option<f64>, f64) {
    let lacks = |device| missing.iter().any(|m| tiers.device(l, m.expert) == device);
    let (mut n_links, mut load_ns, mut delay_ns) = (0.0, Some(0f64), 0f64);
    for (_, vram) in tiers.of_layer(l).filter(|(device, _)| lacks(*device)) {
        n_links += 1.0;
        load_ns = load_ns.zip(vram.load_ns(l)).map(|(a, b)| a.max(b));
        delay_ns = delay_ns.max(vram.delay_ns());
    }
    (load_ns.map(|ns| ns / n_links), delay_ns)
}
