//! A trace, and the published model and machine that it stands in for. The routing is the trace's;
//! sizes and times are those of the published model on the simulated machine.

use super::format::Trace;
use super::simulate;
use super::{Budget, Caching, CostModel, Device, Geometry, Host, Mode, Report, SimOptions, Traced};
use crate::Result;
use crate::policy::{PolicySpec, Profile};

/// Tokens of a prompt that are computed at once: the engine's default.
pub const N_UBATCH: usize = 512;

/// A trace with the expert sizes of a published model.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    pub trace: &'a Trace,
    /// The published model whose sizes its experts get.
    pub stands_for: &'static str,
}

impl Source<'_> {
    pub fn geometry(&self) -> Geometry {
        Geometry::published(self.stands_for).expect("a published model")
    }

    /// Experts of a layer with experts.
    pub fn n_experts(&self) -> usize {
        self.trace.header().layers.iter().map(|layer| layer.n_experts).max().unwrap_or(0)
    }

    pub fn routing(&self) -> Traced<'_> {
        Traced::new(self.trace, N_UBATCH)
    }

    /// A replay on a machine of `Device::names`, with a part of all experts' memory.
    pub fn options(&self, device: &str, policy: &str, share: f64) -> SimOptions {
        let device = Device::by_name(device).expect("a machine that is known");
        let geometry = self.geometry();
        SimOptions {
            policy: policy.parse::<PolicySpec>().expect("a policy that is known"),
            profile: Profile::default(),
            geometry,
            costs: CostModel::derive(&device, &Host::XEON_6230R, &geometry),
            budget: Budget::Share(share),
            caching: Caching::Keep,
            mode: Mode::Timed,
            n_warm_up: 0,
        }
    }

    pub fn run(&self, options: &SimOptions) -> Result<Report> {
        simulate(&self.routing(), options)
    }

    /// For the setting of a table.
    pub fn describe(&self, device: &str) -> String {
        let header = self.trace.header();
        format!(
            "routing of {} ({} layers of {} experts, {} a token; {} requests, {} tokens), experts \
             sized as {}'s, on {device}",
            header.model,
            header.moe_layers().count(),
            self.n_experts(),
            header.k,
            self.trace.requests().len(),
            self.trace.n_tokens(),
            self.stands_for,
        )
    }
}
