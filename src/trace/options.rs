//! Options of a simulation: policy, sizes, costs, and the slots of the tier.

use super::costs::CostModel;
use super::geometry::Geometry;
use super::layout::Plain;
use super::machine::Mode;
use super::routing::Routing;
use crate::experts::{Layout, Needs, TierPlan};
use crate::policy::{PolicySpec, Profile};
use crate::{Error, Result};

/// Memory for experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    Bytes(u64),
    /// Share of all experts' slots, at most 1.
    Share(f64),
}

/// The treatment of an expert after its use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Caching {
    #[default]
    Keep,
    /// An expert leaves at once, and the memory serves prefetch alone: how MoE-Infinity measures
    /// prefetching apart from caching (Tables 2 and 3). All slots are transit, which holds what is
    /// on its way to be used once, and decode demands as a prompt does, which leaves nothing.
    Release,
}

/// Slots, and the reads that fill them. `Tiers::of` makes them up from a geometry; a file's own
/// plan and layout make a replay move the very bytes that the engine moves with that file.
pub struct Tiers {
    pub plan: TierPlan,
    pub layout: Box<dyn Layout>,
}

#[derive(Clone)]
pub struct SimOptions {
    pub policy: PolicySpec,
    /// The policy's state from earlier runs.
    pub profile: Profile,
    pub geometry: Geometry,
    pub costs: CostModel,
    pub budget: Budget,
    pub caching: Caching,
    pub mode: Mode,
    /// Requests at the start that are served and not reported.
    pub n_warm_up: usize,
}

impl Tiers {
    /// The tiers that the options' geometry makes.
    pub fn of(routing: &dyn Routing, options: &SimOptions) -> Result<Tiers> {
        let needs = options.geometry.needs(routing.n_experts(), routing.k());
        Tiers::plan(&needs, options.budget, options.caching)
    }

    /// Planned as the engine plans a budget.
    pub fn plan(needs: &Needs, budget: Budget, caching: Caching) -> Result<Tiers> {
        let (least, all) = (needs.minimum_bytes(), needs.all_bytes());
        let budget = match budget {
            Budget::Bytes(bytes) => bytes,
            Budget::Share(share) => (share.clamp(0.0, 1.0) * all as f64) as u64,
        };
        if budget < least {
            return Err(Error::invalid(format!(
                "a budget of {budget} bytes is too small: experts of this size need at least \
                 {least}, and {all} bytes hold all of them"
            )));
        }
        let mut plan = needs.plan(budget);
        if caching == Caching::Release {
            plan.classes.iter_mut().for_each(|class| class.n_transit = class.n_slots);
        }
        let slot_bytes = needs.0.iter().map(|layer| layer.map_or(0, |layer| layer.slot_bytes));
        Ok(Tiers { plan, layout: Box::new(Plain { slot_bytes: slot_bytes.collect() }) })
    }
}
