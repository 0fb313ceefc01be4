//! Routing traces (`format`) and their simulation with the engine's own tier (`experts::State`) and
//! policies. Hits, misses and bytes are the engine's by construction; only time is modelled, by
//! `CostModel`. The simulator does no I/O and reads no clock.

mod costs;
pub mod format;
mod future;
mod geometry;
pub mod import;
mod layout;
mod link;
mod machine;
mod optimum;
mod options;
mod ordered;
mod part;
mod predictor;
mod replicas;
mod report;
mod requests;
mod reuse;
mod routing;
mod run;
mod source;
pub mod table;
mod traced;

pub use costs::{CostModel, CpuExpert, Device, Host, LinkCosts, MeasuredMachine, Roofline};
pub use future::{Belady, Bound, Future, Known, Oracle, future};
pub use geometry::Geometry;
pub use layout::Plain;
pub use machine::Mode;
pub use optimum::{Hits, Uses};
pub use options::{Budget, Caching, SimOptions, Tiers};
pub use ordered::Ordered;
pub use part::Part;
pub use replicas::{Dealt, Router, deal};
pub use report::{Distribution, Iteration, Report, Totals};
pub use requests::{by_turns, in_turn, kinds};
pub use reuse::Reuse;
pub use routing::{Pass, Recorded, Routing, Token, TokenLayer};
pub use run::{simulate, simulate_policy};
pub use source::{N_UBATCH, Source};
pub use traced::Traced;

#[cfg(test)]
mod tests;
