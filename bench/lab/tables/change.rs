//! Changes that runs make which look for the cause of a difference: to the machine, the routing, or
//! a switch of a table's own.

use super::altered::{self, Alteration};
use super::{Inputs, Source};
use moeba::Result;
use moeba::trace::format::Trace;
use moeba::trace::{CostModel, Roofline};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// The link is so many times as fast.
    Link(f64),
    /// Everything that is computed takes so many times as long.
    Compute(f64),
    Routing(Alteration),
    /// A switch that a table looks for itself, by what it says of its run.
    Own(&'static str),
}

impl Change {
    fn run(&self) -> String {
        match self {
            Change::Link(factor) => format!("with a link {factor} times as fast"),
            Change::Compute(factor) => format!("with computation {factor} times as slow"),
            Change::Routing(alteration) => alteration.run().into(),
            Change::Own(run) => (*run).into(),
        }
    }
}

/// A description of a run with all of these changes.
pub fn run_of(changes: &[Change]) -> String {
    changes.iter().map(Change::run).collect::<Vec<_>>().join(" and ")
}

/// A machine in parts of the one that the paper used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speeds {
    pub link: f64,
    /// How many times as long it computes.
    pub compute: f64,
}

impl Default for Speeds {
    fn default() -> Self {
        Speeds { link: 1.0, compute: 1.0 }
    }
}

impl Speeds {
    fn of(changes: &[Change]) -> Speeds {
        changes.iter().fold(Speeds::default(), |speeds, change| match *change {
            Change::Link(factor) => Speeds { link: speeds.link * factor, ..speeds },
            Change::Compute(factor) => Speeds { compute: speeds.compute * factor, ..speeds },
            Change::Routing(_) | Change::Own(_) => speeds,
        })
    }

    pub fn apply(&self, costs: &mut CostModel) {
        costs.link.bytes_per_second *= self.link;
        costs.link.latency_ns = (costs.link.latency_ns as f64 / self.link) as u64;
        let slow = |kernel: &mut Roofline| {
            kernel.launch_ns *= self.compute;
            kernel.memory_ns *= self.compute;
            kernel.token_ns *= self.compute;
        };
        let CostModel { expert, attention, shared, head, .. } = costs;
        [expert, attention, shared, head].into_iter().for_each(slow);
        costs.cpu_expert.token_ns *= self.compute;
        costs.cpu_expert.start_ns *= self.compute;
    }
}

impl Inputs<'_> {
    /// Calls `of` with changed inputs; what was made from a part of them, networks and live runs,
    /// is left out where something has changed.
    pub fn with<T>(&self, changes: &[Change], of: impl FnOnce(&Inputs) -> Result<T>) -> Result<T> {
        let is_own = |change: &Change| matches!(change, Change::Own(_));
        if changes.iter().all(is_own) {
            return of(self);
        }
        let alterations = changes.iter().filter_map(|change| match change {
            Change::Routing(alteration) => Some(*alteration),
            _ => None,
        });
        let alterations: Vec<Alteration> = alterations.collect();
        let alter = |trace: &Trace| -> Result<Option<Trace>> {
            if alterations.is_empty() { Ok(None) } else { altered::alter(trace, &alterations) }
        };
        let fine = alter(self.fine.trace)?;
        let coarse = self.coarse.map(|source| alter(source.trace)).transpose()?.flatten();
        let speeds = Speeds::of(changes);
        let fine = Source { trace: fine.as_ref().unwrap_or(self.fine.trace), speeds, ..self.fine };
        let coarse = self.coarse.map(|source| Source {
            trace: coarse.as_ref().unwrap_or(source.trace),
            speeds,
            ..source
        });
        of(&Inputs { coarse, n_warm_up: self.n_warm_up, ..Inputs::of(fine) })
    }
}
