//! The hybrid machine on its clock: a GPU, a CPU and the link between them.
//!
//! A layer begins with its attention on the GPU; then its router has chosen and the placement
//! plans. The GPU computes what it has, and what is brought as it lands; the CPU computes its part
//! one expert after another; the link brings one expert at a time, and prefetch behind that. The
//! layer ends when GPU and CPU are through. What the link has begun it ends, and what it has not
//! begun when the next router has chosen is void (PreScope, Premises 3 and 4).

use std::collections::{BTreeMap, BTreeSet};

use super::batch::{BatchLayer, BatchStep, Batches, N_AHEAD};
use super::resident::{Id, Resident};
use moeba::policy::{Missing, Placement, PredictedLayer, Schedule, Timer, View};
use moeba::trace::CostModel;

/// Counts of a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HybridCounters {
    /// Experts that were needed: there, prefetched or on their way, uploaded, computed by the CPU.
    pub n_resident: u64,
    pub n_prefetched: u64,
    pub n_uploaded: u64,
    pub n_on_cpu: u64,
    /// Prefetches that were begun. Those that the layer did not need were in vain.
    pub n_prefetches: u64,
    /// Time that each was computing or transferring, ns.
    pub gpu_ns: f64,
    pub cpu_ns: f64,
    pub link_ns: f64,
}

pub struct Machine<'a> {
    costs: &'a CostModel,
    timer: Timer,
    async_io: bool,
    placement: Box<dyn Placement>,
    resident: Resident,
    /// Prefetched for a layer to come: when it lands, and how many layers ahead it was begun.
    brought: BTreeMap<Id, (f64, usize)>,
    /// By distance: prefetches whose layer has come, and those of them that it needed.
    judged: [Judged; N_AHEAD],
    now: f64,
    link_free: f64,
    /// GPU and CPU time of each layer, ns.
    pub layers: Vec<(f64, f64)>,
    pub counters: HybridCounters,
}

#[derive(Clone, Copy, Debug, Default)]
struct Judged {
    n: u64,
    n_hits: u64,
}

/// A layer's experts by place.
struct Split {
    current: Vec<Missing>,
    predicted: Vec<PredictedLayer>,
    /// Tokens of those that the GPU has, and of those on their way with when they land.
    there: Vec<usize>,
    landing: Vec<(f64, usize)>,
    /// All that the GPU will have computed.
    on_gpu: BTreeSet<Id>,
}

impl<'a> Machine<'a> {
    pub fn new(
        costs: &'a CostModel,
        load_ns: f64,
        sync_slowdown: Option<f64>,
        placement: Box<dyn Placement>,
        resident: Resident,
    ) -> Machine<'a> {
        let load_ns = load_ns * sync_slowdown.unwrap_or(1.0);
        let timer = Timer {
            cpu_token_ns: costs.cpu_expert.token_ns,
            cpu_start_ns: costs.cpu_expert.start_ns,
            load_ns,
            granule_ns: load_ns,
            attention_ns: 0.0,
        };
        Machine {
            costs,
            timer,
            async_io: sync_slowdown.is_none(),
            placement,
            resident,
            brought: BTreeMap::new(),
            judged: [Judged::default(); N_AHEAD],
            now: 0.0,
            link_free: 0.0,
            layers: Vec::new(),
            counters: HybridCounters::default(),
        }
    }

    pub fn now(&self) -> f64 {
        self.now
    }

    pub fn step(&mut self, batches: &Batches, step: &BatchStep) {
        for (l, layer) in step.layers.iter().enumerate() {
            self.layer(batches, step, l, layer);
        }
        // output head, for what is generated
        self.now += self.costs.head.of(step.n_generated);
    }

    fn layer(&mut self, batches: &Batches, step: &BatchStep, l: usize, layer: &BatchLayer) {
        // attention, router, shared experts
        self.timer.attention_ns = self.costs.attention.of(step.n_tokens);
        self.now += self.timer.attention_ns;
        let start = self.now;
        let mut split = self.split(batches, l, layer);
        // placement
        let mut schedule = Schedule::default();
        let view = View {
            timer: self.timer,
            current: &split.current,
            predicted: &split.predicted,
            delay_ns: (self.link_free - start).max(0.0),
        };
        self.placement.place(&view, &mut schedule);
        // uploads
        let mut link = self.link_free.max(start);
        for &expert in &schedule.upload {
            link += self.timer.load_ns;
            split.landing.push((link, layer.counts[expert as usize] as usize));
            split.on_gpu.insert((l, expert));
        }
        self.link_free = if schedule.upload.is_empty() { self.link_free } else { link };
        self.counters.n_uploaded += schedule.upload.len() as u64;
        self.counters.n_on_cpu += schedule.cpu.len() as u64;
        self.counters.link_ns += schedule.upload.len() as f64 * self.timer.load_ns;
        // computation
        let on_cpu = schedule.cpu.iter().map(|e| f64::from(layer.counts[*e as usize]));
        let cpu_ns: f64 = on_cpu.map(|n| self.timer.cpu_ns(n)).sum();
        let gpu_end = self.gpu(start, step.n_tokens, &mut split);
        self.counters.cpu_ns += cpu_ns;
        self.layers.push((gpu_end - start, cpu_ns));
        self.now = match self.async_io {
            true => gpu_end.max(start + cpu_ns),
            // Transfers first, then computation.
            false => gpu_end.max(self.link_free.max(start) + cpu_ns),
        };
        self.resident.used(&split.on_gpu);
        self.prefetch(batches, l, start, &schedule);
    }

    /// Sorts a layer's experts by place.
    fn split(&mut self, batches: &Batches, l: usize, layer: &BatchLayer) -> Split {
        let (mut current, mut there, mut landing) = (Vec::new(), Vec::new(), Vec::new());
        let mut on_gpu = BTreeSet::new();
        for (expert, &n) in layer.counts.iter().enumerate() {
            let id = (l, expert as u32);
            let landed = self.brought.remove(&id);
            if let Some((_, distance)) = landed {
                let judged = &mut self.judged[distance - 1];
                (judged.n, judged.n_hits) = (judged.n + 1, judged.n_hits + u64::from(n > 0));
            }
            if n == 0 {
                continue;
            }
            if self.resident.contains(&id) {
                self.counters.n_resident += 1;
                there.push(n as usize);
            } else if let Some((at, _)) = landed {
                self.counters.n_prefetched += 1;
                landing.push((at, n as usize));
            } else {
                current.push(Missing::whole(id.1, f64::from(n)));
                continue;
            }
            on_gpu.insert(id);
        }
        let predicted = layer.predicted.iter().zip(&self.judged).enumerate();
        let predicted = predicted.map(|(d, (tokens, judged))| PredictedLayer {
            missing: self.missing(batches, l + d + 1, tokens),
            p_hit: (judged.n_hits + 1) as f64 / (judged.n + 2) as f64,
        });
        Split { current, predicted: predicted.collect(), there, landing, on_gpu }
    }

    /// Predicted experts of a MoE layer that are neither there nor on their way.
    fn missing(&self, batches: &Batches, l: usize, tokens: &[f32]) -> Vec<Missing> {
        let l = l % batches.n_experts.len();
        let experts = tokens.iter().enumerate().filter(|(expert, n)| {
            let id = (l, *expert as u32);
            **n > 0.0 && !self.resident.contains(&id) && !self.brought.contains_key(&id)
        });
        let missing = |(e, n): (usize, &f32)| Missing::whole(e as u32, f64::from(*n));
        experts.map(missing).collect()
    }

    /// When the GPU is through: the shared experts, what it has, and the others as they land.
    fn gpu(&mut self, start: f64, n_tokens: usize, split: &mut Split) -> f64 {
        let begin = if self.async_io { start } else { self.link_free.max(start) };
        let dense_ns = self.costs.shared.of(n_tokens);
        let there: f64 = split.there.iter().map(|n| self.costs.expert.of(*n)).sum();
        let mut end = begin + dense_ns + there;
        split.landing.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (landed, n) in &split.landing {
            end = end.max(*landed) + self.costs.expert.of(*n);
        }
        let landing: f64 = split.landing.iter().map(|(_, n)| self.costs.expert.of(*n)).sum();
        self.counters.gpu_ns += dense_ns + there + landing;
        end
    }

    /// Prefetches that begin before the next layer's router has chosen, behind the uploads.
    fn prefetch(&mut self, batches: &Batches, l: usize, start: f64, schedule: &Schedule) {
        let void = self.now + self.timer.attention_ns;
        for &(distance, expert) in &schedule.prefetch {
            // Without AsyncIO computation waits for transfers, so they come behind it.
            let begin = self.link_free.max(if self.async_io { start } else { self.now });
            if begin >= void {
                return;
            }
            self.link_free = begin + self.timer.load_ns;
            if !self.async_io {
                self.now = self.link_free;
            }
            let id = ((l + distance) % batches.n_experts.len(), expert);
            self.brought.insert(id, (self.link_free, distance));
            self.counters.n_prefetches += 1;
            self.counters.link_ns += self.timer.load_ns;
        }
    }
}
