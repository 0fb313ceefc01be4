//! PreScope's tables: accuracy of its predictor, throughput of batches by who schedules, and what
//! each part is worth.

mod report;

pub use report::{LlaporReport, Value};
