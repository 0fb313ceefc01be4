//! Replays routing through the very state machine and policies of the engine: `experts::State` and
//! `policy`. Hits, misses and bytes are therefore the engine's by construction; only time is
//! modelled, by `CostModel`. Nothing here does I/O or reads a clock.

mod costs;
mod foresight;
pub mod format;
mod geometry;
mod layout;
mod link;
mod machine;
mod options;
mod report;
mod requests;
mod routing;
mod run;
mod source;
pub mod table;
mod traced;

pub use costs::{CostModel, CpuExpert, Device, Host, LinkCosts, MeasuredMachine, Roofline};
pub use geometry::Geometry;
pub use layout::Plain;
pub use machine::Mode;
pub use options::{Budget, Caching, SimOptions, Tiers};
pub use report::{Distribution, Iteration, Report, Totals};
pub use requests::{by_turns, in_turn, kinds};
pub use routing::{Pass, Recorded, Routing, Token, TokenLayer};
pub use run::{simulate, simulate_policy};
pub use source::{N_UBATCH, Source};
pub use traced::Traced;

#[cfg(test)]
mod tests;
