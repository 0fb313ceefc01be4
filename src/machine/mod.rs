//! The abilities of the machine, measured or read from the system: the limits that `moeba bench`
//! compares its figures with, and the output of `moeba doctor`. Nothing here knows of models.

pub mod device;
pub mod disk;
pub mod disk_probe;
pub mod expert_transfers;
pub mod gpu;
pub mod memory;
pub mod peak;
pub mod processor;
pub mod product_rate;
pub mod read_rate;
mod rounds;
mod team;
mod wall;

pub use device::DeviceRates;
pub use expert_transfers::ExpertTransfers;
pub use peak::Peak;
pub use read_rate::ReadTest;
pub use rounds::Rounds;
pub use wall::Wall;

use std::fs;

/// A file of /proc or /sys; nothing where there is none.
fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}
