//! Requests in the order in which a table serves them, and replays of them.

use super::{DEVICE, Inputs};
use crate::tables::{Change, Source};
use moeba::Result;
use moeba::policy::{Eviction, Lru, Policy, PolicySpec, Predictor, Profile, Shape};
use moeba::trace::Ordered;
use moeba::trace::{Caching, Report, Roofline, SimOptions, Tiers, by_turns, simulate_policy};

/// Whether loads have something to pass beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Experts are moved in granules and computed as fast as the device can (`CostModel::derive`),
    /// which takes a small part of what loading them takes.
    Device,
    /// Experts are moved whole, and computed in the time of a load: as in the paper's systems,
    /// where fetching an expert mirrors its inference (7.2).
    Load,
}

pub const PACES: [Pace; 2] = [Pace::Device, Pace::Load];

impl Pace {
    /// A replay at this pace.
    pub fn options(self, source: &Source, policy: &str, share: f64) -> SimOptions {
        let mut options = source.options(DEVICE, policy, share);
        if self == Pace::Load {
            options.geometry = options.geometry.with_granules(1);
            let timer = options.costs.timer(&options.geometry, source.trace.header().k);
            let memory_ns = timer.load_ns * source.speeds.compute;
            options.costs.expert = Roofline { launch_ns: 0.0, memory_ns, token_ns: 0.0 };
        }
        options
    }

    /// A routing's row.
    pub fn name(self, source: &Source) -> String {
        let n_layers = source.trace.header().moe_layers().count();
        let slow = match self {
            Pace::Device => "",
            Pace::Load => ", slow",
        };
        format!("{n_layers} × {} experts{slow}", source.n_experts())
    }
}

/// Sources at each pace.
pub fn cases<'a>(inputs: &Inputs<'a>) -> impl Iterator<Item = (Source<'a>, Pace)> {
    inputs.sources().flat_map(|source| PACES.map(|pace| (source, pace)))
}

/// Routings, requests and paces, for the setting of a table.
pub fn setting(inputs: &Inputs, requests: &str) -> String {
    let routings: Vec<String> = inputs.sources().map(|source| source.describe(DEVICE)).collect();
    let routings = routings.join("; ").replacen("routing", "Routing", 1);
    format!(
        "{routings}. {requests}, one after the other. Where it says slow, experts are moved whole \
         and computed in the time in which they are loaded, as the paper says of its systems \
         (7.2); otherwise by granules, and in what this machine needs by its data sheet."
    )
}

/// Policies learn more.
pub const TWICE: Change = Change::Own("with all requests served once before");

/// Requests of a replay, and how many at the start only fill stores and caches.
#[derive(Clone, Debug)]
pub struct Workload {
    pub order: Vec<usize>,
    pub n_history: usize,
}

impl Workload {
    /// About `n` requests of a source or, of a short trace, all; kinds take turns.
    pub fn of(source: &Source, n: usize, changes: &[Change]) -> Workload {
        Workload::ordered(by_turns(source.trace, source.every(n)), changes)
    }

    /// These requests, of which the first half is history.
    pub fn ordered(order: Vec<usize>, changes: &[Change]) -> Workload {
        let workload = Workload { n_history: order.len() / 2, order };
        if changes.contains(&TWICE) { workload.twice() } else { workload }
    }

    fn twice(self) -> Workload {
        Workload { n_history: self.n_history + self.order.len(), order: self.order.repeat(2) }
    }

    /// `build` makes the policy.
    pub fn replay(
        &self,
        source: &Source,
        options: &SimOptions,
        build: impl FnOnce(&Shape) -> Policy,
    ) -> Result<Report> {
        let routing = source.routing();
        let routing = Ordered { routing: &routing, order: self.order.clone() };
        let options = SimOptions { n_warm_up: self.n_history, ..options.clone() };
        let tiers = Tiers::of(&routing, &options)?;
        simulate_policy(&routing, &options, tiers, build)
    }

    /// With the options' policy.
    pub fn replay_named(&self, source: &Source, options: &SimOptions) -> Result<Report> {
        self.replay(source, options, |shape| options.policy.build(shape, &options.profile))
    }

    /// Prefetching without caching: experts leave when they have been used (7.2).
    pub fn replay_released(
        &self,
        source: &Source,
        options: &SimOptions,
        predictor: impl FnOnce(&Shape) -> Option<Box<dyn Predictor>>,
    ) -> Result<Report> {
        let options = SimOptions { caching: Caching::Release, ..options.clone() };
        let routing = source.routing();
        let classes = Tiers::of(&routing, &options)?.plan.classes;
        let n_slots: Vec<usize> = classes.iter().map(|class| class.n_slots).collect();
        self.replay(source, &options, |shape| {
            // No slot is for keeping, but all are for what is predicted.
            let shape = Shape { n_slots, ..shape.clone() };
            policy(Box::new(Lru::new(&shape)), predictor(&shape))
        })
    }

    /// For the setting of a table.
    pub fn describe(&self) -> String {
        format!(
            "{} requests, kinds in turn, of which the first {} are history",
            self.order.len(),
            self.n_history
        )
    }
}

pub fn policy(eviction: Box<dyn Eviction>, predictor: Option<Box<dyn Predictor>>) -> Policy {
    Policy { eviction, predictor, splitter: None, notes: Vec::new() }
}

/// The predictor of a policy by name.
pub fn predictor(policy: &str, shape: &Shape) -> Option<Box<dyn Predictor>> {
    let spec: PolicySpec = policy.parse().expect("a policy that is known");
    spec.build(shape, &Profile::default()).predictor
}
