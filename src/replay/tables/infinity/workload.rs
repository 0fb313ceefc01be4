//! Requests in the order in which a table serves them, and replays of them.

use super::DEVICE;
use crate::Result;
use crate::policy::{Eviction, Lru, Policy, PolicySpec, Predictor, Profile, Shape};
use crate::replay::tables::Source;
use crate::replay::trace::Trace;
use crate::replay::{Caching, Ordered, Report, SimOptions, Tiers, simulate_policy};

/// Requests of a replay, and how many at the start only fill stores and caches.
#[derive(Clone, Debug)]
pub struct Workload {
    pub order: Vec<usize>,
    pub n_history: usize,
}

/// Requests of each kind, kinds in the order in which they first come.
pub fn kinds(trace: &Trace) -> Vec<(&str, Vec<usize>)> {
    let mut kinds: Vec<(&str, Vec<usize>)> = Vec::new();
    for (at, request) in trace.requests().iter().enumerate() {
        match kinds.iter_mut().find(|kind| kind.0 == request.kind) {
            Some(kind) => kind.1.push(at),
            None => kinds.push((&request.kind, vec![at])),
        }
    }
    kinds
}

impl Workload {
    /// Kinds take turns with every `step`-th of their requests; the first half is history.
    pub fn mixed(trace: &Trace, step: usize) -> Workload {
        let kinds = kinds(trace);
        let n = kinds.iter().map(|kind| kind.1.len()).max().unwrap_or(0);
        let turn = |at| kinds.iter().filter_map(move |kind| kind.1.get(at).copied());
        let order: Vec<usize> = (0..n).step_by(step).flat_map(turn).collect();
        Workload { n_history: order.len() / 2, order }
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

    /// With a policy by name.
    pub fn replay_named(&self, source: &Source, policy: &str, share: f64) -> Result<Report> {
        let options = source.options(DEVICE, policy, share);
        self.replay(source, &options, |shape| options.policy.build(shape, &options.profile))
    }

    /// Prefetching without caching: experts leave when they have been used (7.2).
    pub fn replay_released(
        &self,
        source: &Source,
        share: f64,
        predictor: impl FnOnce(&Shape) -> Option<Box<dyn Predictor>>,
    ) -> Result<Report> {
        let options =
            SimOptions { caching: Caching::Release, ..source.options(DEVICE, "on-demand", share) };
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
