//! Inputs of the tables: traces, and the published model and machine that each stands in for. Our
//! models are small; only the routing is theirs. Sizes and times are those of the model and the
//! machine that the paper used, or of the nearest that we have.

use super::prescope::Trained;
use super::side_by_side::Live;
use moeba::trace::Source;
use moeba::trace::format::Trace;
use moeba::train::LlaporReport;

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
        let fine = Source { trace: fine, stands_for: "qwen1.5-moe" };
        let coarse = coarse.map(|trace| Source { trace, stands_for: "mixtral-8x7b" });
        Inputs {
            fine,
            coarse,
            full,
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
