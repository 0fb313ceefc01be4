//! Inputs of the tables: traces, and the published model and machine that each stands in for. Our
//! models are small; only the routing is theirs. Sizes and times are those of the model and the
//! machine that the paper used, or of the nearest that we have.

use super::change::Speeds;
use super::prescope::Trained;
use super::side_by_side_live::Live;
use moeba::trace::format::Trace;
use moeba::trace::{self, Geometry, SimOptions, Traced};
use moeba::train::LlaporReport;

/// A trace with the sizes of a published model, and the speed of the machines that it is replayed
/// on, in parts of those of the papers.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    pub trace: &'a Trace,
    pub stands_for: &'static str,
    pub speeds: Speeds,
}

impl<'a> Source<'a> {
    pub fn new(trace: &'a Trace, stands_for: &'static str) -> Source<'a> {
        Source { trace, stands_for, speeds: Speeds::default() }
    }

    fn plain(&self) -> trace::Source<'a> {
        trace::Source { trace: self.trace, stands_for: self.stands_for }
    }

    pub fn geometry(&self) -> Geometry {
        self.plain().geometry()
    }

    pub fn n_experts(&self) -> usize {
        self.plain().n_experts()
    }

    pub fn routing(&self) -> Traced<'a> {
        Traced::new(self.trace, trace::N_UBATCH)
    }

    /// A replay on a machine of `Device::names`, with a part of all experts' memory.
    pub fn options(&self, device: &str, policy: &str, share: f64) -> SimOptions {
        let mut options = self.plain().options(device, policy, share);
        self.speeds.apply(&mut options.costs);
        options
    }

    #[cfg(test)]
    pub fn run(&self, options: &SimOptions) -> moeba::Result<moeba::trace::Report> {
        self.plain().run(options)
    }

    /// For the setting of a table.
    pub fn describe(&self, device: &str) -> String {
        self.plain().describe(device)
    }

    /// Every how many of its requests are replayed where `n` will do: all of a short trace.
    pub fn every(&self, n: usize) -> usize {
        self.trace.requests().len().div_ceil(n).max(1)
    }
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
    /// How many times as long a transfer to the GPU takes without AsyncIO, if it was measured.
    pub sync_slowdown: Option<f64>,
    /// Runs of the engine itself.
    pub live: Vec<Live>,
    /// Requests at the start that only fill caches and stores.
    pub n_warm_up: usize,
}

impl<'a> Inputs<'a> {
    pub fn new(fine: &'a Trace, coarse: Option<&'a Trace>, full: Option<&'a Trace>) -> Inputs<'a> {
        let coarse = coarse.map(|trace| Source::new(trace, "mixtral-8x7b"));
        Inputs { coarse, full, ..Inputs::of(Source::new(fine, "qwen1.5-moe")) }
    }

    /// One source and nothing else.
    pub fn of(fine: Source<'a>) -> Inputs<'a> {
        Inputs {
            fine,
            coarse: None,
            full: None,
            llapor: None,
            networks: None,
            sync_slowdown: None,
            live: Vec::new(),
            n_warm_up: 8,
        }
    }

    pub fn sources(&self) -> impl Iterator<Item = Source<'a>> {
        [Some(self.fine), self.coarse].into_iter().flatten()
    }
}
