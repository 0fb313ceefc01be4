//! MoE-Infinity (Xue et al., 2024): which experts a request uses is skewed and repeats itself, and
//! other requests have used them in the same company before. Each request is traced in an *expert
//! activation matrix* (EAM), those of past requests are kept in a collection (EAMC), and what
//! comes next in this one is read from the ones that resemble it most. Sections and figures below
//! are the paper's.
//!
//! `eam`: the matrix. `eamc`: the collection. `iteration`: a token's matrix and how it compares
//! with the collection as it grows. `trace`: what is known of a request in progress. `past`: what
//! is kept of those that ended. `predictor` and `prefetcher`: what to prefetch (5.1). `eviction`:
//! what to drop (5.2). `persist`: the section of the profile.

mod eam;
mod eamc;
mod eviction;
mod iteration;
mod past;
mod persist;
mod predictor;
mod prefetch;
mod requests;
mod trace;

pub use eviction::RequestEam;
pub use predictor::EamcPredictor;

use crate::policy::PolicySpec;
use crate::policy::registry::{Builder, EvictionEntry, Names, PredictorEntry};

pub(in crate::policy) const NAMES: Names = Names {
    predictors: &[PredictorEntry { name: "eamc", build: |b| Some(Box::new(predictor(b))) }],
    evictions: &[EvictionEntry {
        name: "request-eam",
        build: |b| Box::new(RequestEam::new(b.shape)),
    }],
    policies: &[("moe-infinity", PolicySpec::whole("eamc", "request-eam"))],
};

fn predictor(builder: &mut Builder<'_>) -> EamcPredictor {
    let options = InfinityOptions::default();
    let restored = builder.restore(EamcPredictor::SECTION, |shape, bytes| {
        EamcPredictor::restore(shape, options, bytes)
    });
    restored.unwrap_or_else(|| EamcPredictor::new(builder.shape, options))
}

/// The switches turn the steps of Table 4 off one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InfinityOptions {
    /// EAMs that are kept.
    pub capacity: usize,
    /// How many of them, the nearest, are added up to a prediction.
    pub n_matches: usize,
    /// Predict from the requests that resemble this one; or from all tokens ever seen.
    pub request_level: bool,
    /// Predict all layers that come; or the next one.
    pub multi_layer: bool,
    /// Weigh layers by how soon they come; or all the same.
    pub layer_proximity: bool,
}

impl InfinityOptions {
    /// The curves of Figure 13 end here.
    pub const CAPACITY: usize = 120;
    /// The paper adds up "several" matches and leaves open how many: one has noise, and all are the
    /// model-level counts again. Chosen by every other request of the demo model's full traces and
    /// its sibling's, where a token waits 5.12 and 175.1 ms for experts with 12 matches, 5.86 and
    /// 175.7 with 3, 5.17 and 177.3 with 24. The requests between say so, too: 5.00 and 173.2 with
    /// 12, 5.82 and 176.7 with 3 (`moeba-lab`, table `moe-infinity-matches`).
    pub const N_MATCHES: usize = 12;
}

impl Default for InfinityOptions {
    fn default() -> Self {
        InfinityOptions {
            capacity: Self::CAPACITY,
            n_matches: Self::N_MATCHES,
            request_level: true,
            multi_layer: true,
            layer_proximity: true,
        }
    }
}

#[cfg(test)]
mod tests;
