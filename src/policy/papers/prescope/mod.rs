//! PreScope (Yu et al., 2025): the LLaPor predictor, the hot-expert table and PreSched, the
//! scheduler of uploads and CPU work.

mod hot;
pub mod llapor;
mod presched;

pub use hot::{Hot, HotTable};
pub use llapor::{LlaPor, LlaporModel};
pub use presched::PreSched;
