//! A test's hand in the link: slow disks, failing disks, results out of order.

use super::link::Read;
use std::io;
use std::time::Duration;

/// Asked by a link around its reads. A link without faults does not ask.
pub trait Faults: Send + Sync + std::fmt::Debug {
    /// The delay before this read starts; other reads go on meanwhile.
    fn before(&self, read: &Read) -> Duration {
        let _ = read;
        Duration::ZERO
    }

    /// Replaces the `result` of one read call. It is called again each time that the link tries
    /// again or continues a short read.
    fn after(&self, read: &Read, result: io::Result<usize>) -> io::Result<usize> {
        let _ = read;
        result
    }
}
