//! A test's hand in the link: slow disks, failing disks, results out of order.

use super::link::Read;
use std::io;
use std::time::Duration;

/// Asked by a link around its reads. A link without faults does not ask.
pub trait Faults: Send + Sync + std::fmt::Debug {
    /// How long to hold this read back before it starts; other reads go on meanwhile.
    fn before(&self, read: &Read) -> Duration {
        let _ = read;
        Duration::ZERO
    }

    /// What one read call is to have brought instead of `result`. It is asked again each time that
    /// the link tries again or continues a short read.
    fn after(&self, read: &Read, result: io::Result<usize>) -> io::Result<usize> {
        let _ = read;
        result
    }
}
