//! FineMoE (Yu et al., EuroSys 2026). It stores each iteration's semantic embedding and expert map
//! (the probabilities of all routers) and searches the store for the iteration that is most similar
//! to the present one. The embedding predicts the first d layers (§4.2.1); after each layer's
//! router, the trajectory so far predicts the layer d further on (§4.2.2). The lower the
//! similarity, the more experts are prefetched (§4.3).
//!
//! Decisions where the paper is silent:
//! - Prompts are iterations, too (§3.2), so they are stored: with the mean embedding and the mean
//!   probabilities of their tokens. A prompt that is fed in parts is one iteration a part. They
//!   are searched for as decode steps are, and besides what δ asks for, all experts are prefetched
//!   that one of their tokens uses rather than not. The eviction does not hear of it.
//! - What a map said of a layer that the token has passed decides no eviction: what the layer's
//!   router has said does, until the layer is predicted again.
//! - Several requests at once (B) are each searched for on their own; an expert that several want
//!   has the priority of the one that wants it most.
//! - An iteration of which an event is missing is searched for with what there is, and not stored.
//! - Shared experts are not routed, are always there and occur nowhere.

mod compared;
mod distance;
mod eviction;
mod layers;
mod persist;
mod predictor;
mod row;
mod search;
mod select;
mod similarity;
mod sketch;
mod store;
mod timeline;

pub use distance::{
    AtDistance, DISTANCE_SECTION, best_distance, profile_distances, restore_distance, save_distance,
};
pub use eviction::MapEviction;
pub use predictor::{FineMoe, FineMoeOptions};
pub use search::{Match, Trajectory};
pub use similarity::{
    Iteration, cosine, semantic_similarity, top_k, top_k_overlap, trajectory_similarity,
};
pub use store::MapStore;

use crate::policy::PolicySpec;
use crate::policy::registry::{Builder, EvictionEntry, Names, PredictorEntry};

pub(in crate::policy) const NAMES: Names = Names {
    predictors: &[PredictorEntry { name: "map", build: |b| Some(Box::new(predictor(b))) }],
    evictions: &[EvictionEntry { name: "map", build: |b| Box::new(MapEviction::new(b.shape)) }],
    policies: &[("finemoe", PolicySpec::whole("map", "map"))],
};

/// Searches as far ahead as was profiled; otherwise the paper's distance, within the model.
fn predictor(builder: &mut Builder<'_>) -> FineMoe {
    let n_layers = builder.shape.moe_layers().count().max(1);
    let profiled = builder.restore(DISTANCE_SECTION, restore_distance);
    let distance = profiled.unwrap_or(FineMoeOptions::default().distance.min(n_layers));
    let options = FineMoeOptions { distance, ..FineMoeOptions::default() };
    let restored =
        builder.restore(FineMoe::SECTION, |shape, bytes| FineMoe::restore(shape, options, bytes));
    restored.unwrap_or_else(|| FineMoe::new(builder.shape, options))
}

#[cfg(test)]
mod tests;
