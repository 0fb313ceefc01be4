//! The presence of an expert in a tier and how often it was demanded, for those who look.

use super::residency::Entry;

/// The part of an expert that is in a tier's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    #[default]
    Absent,
    /// A load of it is queued or under way.
    InFlight,
    /// Its leading granules.
    Part,
    Whole,
}

/// The status of an expert in a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertStatus {
    pub presence: Presence,
    /// Demands that found it whole, and the others. They wrap around.
    pub n_hits: u32,
    pub n_misses: u32,
}

impl ExpertStatus {
    pub(super) fn of(entry: &Entry) -> ExpertStatus {
        let presence = match entry {
            entry if entry.is_whole() => Presence::Whole,
            entry if entry.load.is_some() => Presence::InFlight,
            entry if entry.resident > 0 => Presence::Part,
            _ => Presence::Absent,
        };
        ExpertStatus { presence, n_hits: entry.n_hits, n_misses: entry.n_misses }
    }
}
