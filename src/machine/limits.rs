//! The system's limits for this process.

use rustix::process::{Resource, getrlimit};

/// `None` where there is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory that may be pinned, for a link's buffers (`ulimit -l`).
    pub memlock_bytes: Option<u64>,
    /// Open files (`ulimit -n`).
    pub open_files: Option<u64>,
}

impl Limits {
    /// The soft limits, which are the ones that count.
    pub fn read() -> Limits {
        Limits {
            memlock_bytes: getrlimit(Resource::Memlock).current,
            open_files: getrlimit(Resource::Nofile).current,
        }
    }
}
