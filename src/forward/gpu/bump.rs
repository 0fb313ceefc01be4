//! Byte ranges in one allocation.

use std::ops::Range;

pub type ByteRange = Range<usize>;

/// Allocates ranges one after the other.
#[derive(Default)]
pub struct BumpLayout(usize);

impl BumpLayout {
    pub fn bytes(&mut self, n: usize) -> ByteRange {
        let start = self.0.next_multiple_of(256);
        self.0 = start + n;
        start..self.0
    }

    /// f32 or u32
    pub fn words(&mut self, n: usize) -> ByteRange {
        self.bytes(4 * n)
    }

    pub fn n_bytes(&self) -> usize {
        self.0
    }
}
