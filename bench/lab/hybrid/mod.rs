//! Simulation of batches on a machine whose CPU computes the experts that its GPU lacks: PreScope's
//! experiments. A layer takes the longer of both; a `policy::Placement` decides which expert goes
//! where. Unlike the simulation of one request at a time it has no tier of granules: experts are
//! whole, and the GPU keeps a set of them.

mod batch;
mod machine;
mod resident;

pub use batch::{Batches, Source, counts, keep_best};
pub use machine::HybridCounters;
pub use resident::Keep;

use crate::placement::{AllOnCpu, Greedy, Prefetching};
use machine::Machine;
use moeba::policy::{Placement, PreSched};
use moeba::trace::{CostModel, Distribution, Geometry};
use resident::Resident;

/// The placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduler {
    /// Fiddler's: what the GPU has not, the CPU computes.
    Static,
    Greedy(Prefetching),
    PreSched,
}

impl Scheduler {
    fn build(self) -> Box<dyn Placement> {
        match self {
            Scheduler::Static => Box::new(AllOnCpu),
            Scheduler::Greedy(prefetching) => Box::new(Greedy { prefetching }),
            Scheduler::PreSched => Box::new(PreSched::default()),
        }
    }
}

#[derive(Clone, Debug)]
pub struct HybridOptions {
    pub scheduler: Scheduler,
    pub keep: Keep,
    /// Experts that the GPU has room for, beside the buffers of those that are brought.
    pub n_resident: usize,
    /// `None`: transfers beside computation (AsyncIO). Else one waits for the other, and transfers
    /// take so many times as long.
    pub sync_slowdown: Option<f64>,
    pub geometry: Geometry,
    pub costs: CostModel,
}

/// A part of PreScope.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Part {
    HotTable,
    PreSched,
    Predictor,
    /// With the time that transfers take without it, in parts of what they take with it.
    AsyncIo(f64),
}

/// Experts that "fixed prefetching" brings for each layer.
const N_FIXED: usize = 1;

impl HybridOptions {
    /// With what PreScope's ablation (6.3) puts in a part's place: random preloading, fixed
    /// prefetching, greedy loading layer by layer, and transfers that computation waits for.
    pub fn without(mut self, part: Part, seed: u64) -> HybridOptions {
        match part {
            Part::HotTable => self.keep = Keep::Random(seed),
            Part::PreSched => self.scheduler = Scheduler::Greedy(Prefetching::Fixed(N_FIXED)),
            Part::Predictor => self.scheduler = Scheduler::Greedy(Prefetching::Nothing),
            Part::AsyncIo(slowdown) => self.sync_slowdown = Some(slowdown),
        }
        self
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct HybridReport {
    pub n_generated: usize,
    /// All of the time, prompts included.
    pub wall_ns: f64,
    /// Steps in which every token is a generated one.
    pub tpot: Distribution,
    /// GPU (with the link it waits for) and CPU time of each layer of each step, ns.
    pub layers: Vec<(f64, f64)>,
    /// Those of the steps of `tpot`.
    pub decode_layers: Vec<(f64, f64)>,
    pub counters: HybridCounters,
}

impl HybridReport {
    pub fn tokens_per_second(&self) -> f64 {
        self.n_generated as f64 / self.wall_ns * 1e9
    }
}

/// Runs all batches.
pub fn simulate_batches(batches: &Batches, options: &HybridOptions) -> HybridReport {
    let costs = &options.costs;
    let resident = Resident::new(&options.keep, &batches.n_experts, options.n_resident);
    let link = &costs.link;
    let load_ns = (link.latency_ns + link.transfer_ns(options.geometry.expert_bytes)) as f64;
    let placement = options.scheduler.build();
    let mut machine = Machine::new(costs, load_ns, options.sync_slowdown, placement, resident);
    let (mut decode, mut decode_layers) = (Vec::new(), Vec::new());
    for step in &batches.steps {
        let (start, first_layer) = (machine.now(), machine.layers.len());
        machine.step(batches, step);
        if step.n_tokens == step.n_generated {
            decode.push((machine.now() - start) as u64);
            decode_layers.extend(&machine.layers[first_layer..]);
        }
    }
    HybridReport {
        n_generated: batches.steps.iter().map(|step| step.n_generated).sum(),
        wall_ns: machine.now(),
        tpot: Distribution::of(decode),
        counters: machine.counters,
        decode_layers,
        layers: machine.layers,
    }
}

#[cfg(test)]
mod tests;
