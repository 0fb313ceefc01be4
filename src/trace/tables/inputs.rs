//! What the tables are made from: traces, and the published model and machine that each stands in
//! for. Our models are small; what is theirs in the tables is the routing. Sizes and times are
//! those of the model and the machine that the paper used, or of the nearest we have.

use super::super::format::Trace;
use super::super::{
    Budget, Caching, CostModel, Device, Geometry, Host, Mode, Report, SimOptions, Traced, simulate,
};
use super::prescope::{LlaporReport, Trained};
use super::side_by_side::Live;
use crate::Result;
use crate::policy::{PolicySpec, Profile};

/// Tokens of a prompt that are computed at once: the engine's default.
pub const N_UBATCH: usize = 512;

/// A trace, and what its experts are taken for.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    pub trace: &'a Trace,
    /// The published model whose sizes its experts get.
    pub stands_for: &'static str,
}

/// Everything that tables are made from.
pub struct Inputs<'a> {
    /// Many small experts of which a token uses several.
    pub fine: Source<'a>,
    /// Few large ones.
    pub coarse: Option<Source<'a>>,
    /// The routing of `fine` with what routers make of activations up to six layers before, and
    /// hidden states.
    pub full: Option<&'a Trace>,
    /// How well LLaPor predicts, of `moeba trace train` on `full`.
    pub llapor: Option<LlaporReport>,
    /// LLaPor's networks, trained on a part of `full`, which has hidden states then.
    pub networks: Option<Trained>,
    /// Runs of the engine itself.
    pub live: Vec<Live>,
    /// Requests at the start that only fill caches and stores.
    pub n_warm_up: usize,
}

impl<'a> Inputs<'a> {
    pub fn new(fine: &'a Trace, coarse: Option<&'a Trace>, full: Option<&'a Trace>) -> Inputs<'a> {
        let fine = Source { trace: fine, stands_for: "qwen1.5-moe" };
        let coarse = coarse.map(|trace| Source { trace, stands_for: "mixtral-8x7b" });
        Inputs { fine, coarse, full, llapor: None, networks: None, live: Vec::new(), n_warm_up: 8 }
    }

    pub fn sources(&self) -> impl Iterator<Item = Source<'a>> {
        [Some(self.fine), self.coarse].into_iter().flatten()
    }
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
