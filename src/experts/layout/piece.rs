//! One read of a load, as the tier schedules it and a link executes it.

/// A run of bytes of a model file and where it goes. `start` and `len` are multiples of the
/// alignment of direct reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which of the model's files.
    pub shard: usize,
    /// File offset in bytes.
    pub start: u64,
    /// Bytes to read.
    pub len: usize,
    /// Bytes from `start` that must be there; the rest is padding and may lie past the file's end.
    pub need: usize,
    pub to: Dest,
}

impl Piece {
    /// Whether it needs a buffer, out of which it is copied.
    pub fn is_staged(&self) -> bool {
        matches!(self.to, Dest::Rows { .. })
    }
}

/// The destination of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dest {
    /// Into a granule's slot, at this offset, which is a multiple of the alignment.
    Slot { granule: usize, at: usize },
    /// Rows `first..first + n` of down, the first of them `skip` bytes into the read: they hold
    /// columns of all the load's granules, so they are staged and then scattered into the slots.
    Rows { first: usize, n: usize, skip: usize },
}
