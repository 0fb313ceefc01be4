//! The traces of past requests: a collection for each phase.

use super::eam::Eam;
use super::eamc::Eamc;
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

    pub fn put(&mut self, at: usize, prefill: &Eam, decode: &Eam) {
        self.prefill.put(at, prefill);
        self.decode.put(at, decode);
    }
}
