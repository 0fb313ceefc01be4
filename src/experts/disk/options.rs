//! Options for streaming experts from disk.

use super::faults::Faults;
use super::link::IoKind;
use crate::experts::numa::Node;
use crate::experts::peers::Peers;
use crate::policy::{PolicySpec, Profile};
use std::sync::Arc;

/// Options for streaming.
#[derive(Clone)]
pub struct StreamOptions {
    /// Bytes of memory for experts.
    pub budget: u64,
    pub io: IoKind,
    pub policy: PolicySpec,
    /// Experts that a token uses in a layer.
    pub k: usize,
    /// The profile that policies have learned for the model.
    pub profile: Profile,
    /// Whether a layer waits for every prefetch before it to land: hits then do not depend on time,
    /// for tests.
    pub lockstep: bool,
    /// The nodes to spread slots over; none if there is one.
    pub nodes: Vec<Node>,
    /// Machines that compute experts; theirs are read on demand alone.
    pub peers: Option<Arc<Peers>>,
    /// Makes reads fail and wait, for tests.
    pub faults: Option<Arc<dyn Faults>>,
}
