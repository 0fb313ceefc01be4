//! Replays as MoEpic measured: on its machine, with its division of memory.

use super::super::{Inputs, Source};
use super::subset::Subset;
use crate::Result;
use crate::policy::{Moepic, MoepicOptions, Policy, Shape, SplitKind};
use crate::replay::{
    Budget, Geometry, Report, Routing, SimOptions, Tiers, future, simulate_policy,
};

/// NVIDIA RTX A6000 behind PCIe 4.0 (section 4.1).
pub const DEVICE: &str = "a6000";

/// τ, where the paper has 5,000: our traces are of thousands of tokens, not of hundreds of
/// thousands. The first plan comes before the requests that are reported are over, at the latest.
pub const TAU: u64 = 200;

/// Parts in which an expert is kept: θ in tenths.
pub const N_GRANULES: usize = 10;

/// Some requests of a source, and how they are served.
pub struct Bench<'a> {
    pub source: Source<'a>,
    pub subset: Subset<'a>,
    n_warm_up: usize,
}

impl<'a> Bench<'a> {
    /// On every n-th request.
    pub fn new(inputs: &Inputs<'a>, source: Source<'a>, every: usize) -> Bench<'a> {
        let subset = Subset::new(&source, every);
        let n_warm_up = inputs.n_warm_up.min(subset.n_requests() / 2);
        Bench { source, subset, n_warm_up }
    }

    pub fn options(&self, policy: &str, n_granules: usize) -> SimOptions {
        let options = self.source.options(DEVICE, policy, 1.0);
        let geometry = self.source.geometry().with_granules(n_granules);
        SimOptions { geometry, n_warm_up: self.n_warm_up, ..options }
    }

    /// Of all layers.
    pub fn n_experts(&self) -> usize {
        self.subset.n_experts().iter().sum()
    }

    /// Memory as the paper divides it (section 4.1): a cache, V_e, of a part of all experts, and
    /// beside it a buffer, U_e, of a token's experts of a layer.
    pub fn tiers(&self, geometry: &Geometry, share: f64) -> Result<Tiers> {
        let (n_all, k) = (self.n_experts(), self.subset.k());
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
        let needs = geometry.needs(self.subset.n_experts(), self.subset.k());
        Tiers::plan(&needs, Budget::Share(1.0), Default::default())
    }

    /// With Algorithm 1, where the policy has it, every `TAU` tokens.
    pub fn run(&self, options: &SimOptions, tiers: Tiers) -> Result<Report> {
        simulate_policy(&self.subset, options, tiers, |shape| often(options, shape))
    }

    /// The same with the eviction that knows what comes.
    pub fn run_belady(&self, options: &SimOptions, tiers: Tiers) -> Result<Report> {
        let future = future(&self.subset);
        let build = |shape: &Shape| Policy {
            eviction: Box::new(crate::policy::Belady::new(shape, future)),
            ..often(options, shape)
        };
        simulate_policy(&self.subset, options, tiers, build)
    }

    /// For a table's setting.
    pub fn describe(&self) -> String {
        format!(
            "{}; {} requests of all kinds by turns, with {} generated tokens, of which the first \
             {} only warm up",
            self.source.describe(DEVICE),
            self.subset.n_requests(),
            self.subset.n_decode(),
            self.n_warm_up
        )
    }
}

fn often(options: &SimOptions, shape: &Shape) -> Policy {
    let mut policy = options.policy.build(shape, &options.profile);
    if options.policy.split == SplitKind::Auto {
        let options = MoepicOptions { tau: TAU, ..MoepicOptions::default() };
        policy.splitter = Some(Box::new(Moepic::new(shape, options)));
    }
    policy
}

/// ms
pub fn tpot(report: &Report) -> f64 {
    report.tpot.mean / 1e6
}

/// ms
pub fn ttft(report: &Report) -> f64 {
    report.ttft.mean / 1e6
}
