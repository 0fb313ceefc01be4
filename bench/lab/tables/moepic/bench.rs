//! Replays as MoEpic measured: on its machine, with its division of memory.

use super::super::{Inputs, Source};
use moeba::Result;
use moeba::policy::{MoepicOptions, Policy, Shape};
use moeba::trace::Ordered;
use moeba::trace::{Belady, future};
use moeba::trace::{
    Budget, CostModel, Geometry, Report, Routing, SimOptions, Tiers, Traced, by_turns,
    simulate_policy,
};

/// NVIDIA RTX A6000 behind PCIe 4.0 (section 4.1).
pub const DEVICE: &str = "a6000";

/// τ
pub const TAU: u64 = MoepicOptions::TAU;

/// Parts in which an expert is kept: θ in tenths.
pub const N_GRANULES: usize = 10;

/// Some requests of a source, and how they are served.
pub struct Bench<'a> {
    pub source: Source<'a>,
    traced: Traced<'a>,
    /// Every n-th request of each kind, the kinds by turns, so that the first few are of all.
    order: Vec<usize>,
    n_warm_up: usize,
    /// Times are the paper's, not derived: layers take as long, and the link takes as long for an
    /// expert, as the paper measured with Qwen1.5-MoE.
    pub as_measured: bool,
}

/// Times of Qwen1.5-MoE on the paper's machine, ns a token: its 24 layers with everything in memory
/// (section 4.3), and the loads of its 96 experts (section 1).
const TOKEN_NS: f64 = 57e6;
const LOADS_NS: f64 = 165e6;
pub const N_LAYERS: f64 = 24.0;
const N_LOADS: f64 = 96.0;

impl<'a> Bench<'a> {
    /// On every n-th request.
    pub fn new(inputs: &Inputs<'a>, source: Source<'a>, every: usize) -> Bench<'a> {
        Bench::of(inputs, source, by_turns(source.trace, every))
    }

    /// On these requests.
    pub fn of(inputs: &Inputs<'a>, source: Source<'a>, order: Vec<usize>) -> Bench<'a> {
        let n_warm_up = inputs.n_warm_up.min(order.len() / 2);
        Bench { source, traced: source.routing(), order, n_warm_up, as_measured: false }
    }

    /// Routing of the served requests.
    pub fn routing(&self) -> Ordered<'_> {
        Ordered { routing: &self.traced, order: self.order.clone() }
    }

    /// Tokens that the model generated.
    pub fn n_decode(&self) -> usize {
        let passes = self.order.iter().flat_map(|request| self.traced.passes(*request));
        passes.filter(|pass| !pass.is_prompt).map(|pass| pass.tokens.len()).sum()
    }

    /// All requests come twice, and the first time to warm up.
    pub fn serve_twice(&mut self) {
        self.n_warm_up += self.order.len();
        self.order = self.order.repeat(2);
    }

    pub fn options(&self, policy: &str, n_granules: usize) -> SimOptions {
        let options = self.source.options(DEVICE, policy, 1.0);
        let geometry = self.source.geometry().with_granules(n_granules);
        let costs = match self.as_measured {
            false => options.costs,
            true => self.measured(&geometry),
        };
        SimOptions { geometry, costs, n_warm_up: self.n_warm_up, ..options }
    }

    fn measured(&self, geometry: &Geometry) -> CostModel {
        let derived = Source::new(self.source.trace, self.source.stands_for);
        let derived = derived.options(DEVICE, "on-demand", 1.0).costs;
        let mut costs = measured(derived, geometry, self.traced.k());
        self.source.speeds.apply(&mut costs);
        costs
    }

    /// The model that the experts are taken for, and whose times.
    pub fn name(&self) -> String {
        let times = if self.as_measured { " at the paper's speeds" } else { "" };
        format!("{}{times}", self.source.stands_for)
    }

    /// Experts of all layers.
    pub fn n_experts(&self) -> usize {
        self.traced.n_experts().iter().sum()
    }

    pub fn n_moe_layers(&self) -> usize {
        self.traced.n_experts().iter().filter(|n| **n > 0).count()
    }

    /// Memory as the paper divides it (section 4.1): a cache, V_e, of a part of all experts, and
    /// beside it a buffer, U_e, of a token's experts of a layer.
    pub fn tiers(&self, geometry: &Geometry, share: f64) -> Result<Tiers> {
        let (n_all, k) = (self.n_experts(), self.traced.k());
        let n_cached = ((share * n_all as f64).round() as usize).min(n_all);
        let mut tiers = self.all(geometry)?;
        for class in &mut tiers.plan.classes {
            class.n_transit = k * geometry.n_granules;
            class.n_slots = n_cached * geometry.n_granules + class.n_transit;
        }
        Ok(tiers)
    }

    /// As much memory, and all of it buffer.
    pub fn buffer(&self, geometry: &Geometry, share: f64) -> Result<Tiers> {
        let mut tiers = self.tiers(geometry, share)?;
        tiers.plan.classes.iter_mut().for_each(|class| class.n_transit = class.n_slots);
        Ok(tiers)
    }

    fn all(&self, geometry: &Geometry) -> Result<Tiers> {
        let needs = geometry.needs(self.traced.n_experts(), self.traced.k());
        Tiers::plan(&needs, Budget::Share(1.0), Default::default())
    }

    pub fn run(&self, options: &SimOptions, tiers: Tiers) -> Result<Report> {
        let build = |shape: &Shape| options.policy.build(shape, &options.profile);
        simulate_policy(&self.routing(), options, tiers, build)
    }

    /// The same with the eviction that knows what comes.
    pub fn run_belady(&self, options: &SimOptions, tiers: Tiers) -> Result<Report> {
        let future = future(&self.routing());
        let build = |shape: &Shape| Policy {
            eviction: Box::new(Belady::new(future)),
            ..options.policy.build(shape, &options.profile)
        };
        simulate_policy(&self.routing(), options, tiers, build)
    }

    /// For a table's setting.
    pub fn describe(&self) -> String {
        let speeds = if self.as_measured {
            " as the paper measured it (57 ms of computation and 165 ms of loads in a token's 24 \
             layers; what its computation takes beyond the derived is in the attention)"
        } else {
            ""
        };
        format!(
            "{}{speeds}; {} requests, of all kinds by turns and with {} generated tokens, the \
             first {} to warm up",
            self.source.describe(DEVICE),
            self.order.len(),
            self.n_decode(),
            self.n_warm_up
        )
    }
}

/// Routing, shared and routed experts take what they are derived to take; what a layer took
/// beyond that is put before its router.
fn measured(derived: CostModel, geometry: &Geometry, k: usize) -> CostModel {
    let mut costs = derived;
    costs.link.bytes_per_second = geometry.expert_bytes as f64 / (LOADS_NS / N_LOADS) * 1e9;
    let expert = derived.expert;
    let experts_ns = expert.launch_ns + k as f64 * expert.work(1) + derived.shared.of(1);
    let known_ns = derived.attention.of(1) + experts_ns + derived.head.of(1) / N_LAYERS;
    costs.attention.launch_ns += (TOKEN_NS / N_LAYERS - known_ns).max(0.0);
    costs
}

/// ms
pub fn tpot(report: &Report) -> f64 {
    report.tpot.mean / 1e6
}

/// ms
pub fn ttft(report: &Report) -> f64 {
    report.ttft.mean / 1e6
}
