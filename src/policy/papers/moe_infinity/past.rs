//! The traces of past requests: a collection for each phase.

use super::eam::Eam;
use super::eamc::Eamc;
use super::trace::Trace;
use crate::policy::grid::Grid;

/// The two EAMs of a request have the same place. So what resembles a prompt says which requests
/// to look at, and their decode EAMs what to expect: we predict in decode only, and of a prompt's
/// own EAM we know more than of any other.
#[derive(Clone, Debug)]
pub struct Past {
    /// All zeros where a request was not seen to have a prompt.
    pub prefill: Eamc,
    pub decode: Eamc,
}

impl Past {
    pub fn new(grid: &Grid, capacity: usize) -> Past {
        Past { prefill: Eamc::new(grid, capacity), decode: Eamc::new(grid, capacity) }
    }

    /// A request that has ended, if it has made decode steps. Where there is no room it replaces
    /// the one whose decode EAM is most similar (4.2): the collection is recent and stays diverse.
    /// Answers the place.
    pub fn join(&mut self, trace: &Trace) -> Option<usize> {
        if trace.decode.is_empty() {
            return None;
        }
        let at = match self.decode.is_full() {
            false => self.decode.len(),
            // If it has no expert in common with anyone then all are equally far.
            true => trace.most_similar(self).unwrap_or(0),
        };
        self.put(at, &trace.prefill, &trace.decode);
        Some(at)
    }

    fn put(&mut self, at: usize, prefill: &Eam, decode: &Eam) {
        self.prefill.put(at, prefill);
        self.decode.put(at, decode);
    }
}
