//! PreScope (Yu et al., 2025): the LLaPor predictor, the hot-expert table and PreSched, the
//! scheduler of uploads and CPU work.

mod hot;
pub mod llapor;
mod presched;

pub use hot::Hot;
pub use llapor::{LlaPor, LlaporModel};
pub use presched::PreSched;

use crate::policy::registry::{EvictionEntry, Names, PredictorEntry};
use crate::policy::{HotTable, PlacementKind, PolicySpec};

pub(in crate::policy) const NAMES: Names = Names {
    predictors: &[PredictorEntry {
        name: "llapor",
        build: |b| {
            let llapor = LlaPor::from_profile(b.shape, b.profile, true);
            Some(Box::new(llapor.map_err(|why| b.notes.push(why)).ok()?))
        },
    }],
    evictions: &[EvictionEntry {
        name: "hot",
        build: |b| {
            let table = b.restore(HotTable::SECTION, HotTable::restore);
            Box::new(table.map_or_else(|| Hot::new(b.shape), Hot::with))
        },
    }],
    policies: &[("prescope", PolicySpec::whole("llapor", "hot").placed(PlacementKind::PreSched))],
};
