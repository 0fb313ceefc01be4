//! A load: the granules that an expert lacks, on their way as reads.

use std::ops::Range;
use std::sync::Arc;

use super::queue::Cause;
use crate::experts::acquisition::Access;
use crate::experts::layout::piece::{Dest, Piece};

/// A read that failed for good: which file, where, why, in one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(pub Arc<str>);

/// The reason why a load is begun.
#[derive(Clone, Copy, Debug)]
pub struct Reason {
    pub cause: Cause,
    pub access: Access,
}

#[derive(Debug)]
pub struct Load {
    pub expert: u32,
    pub granules: Range<usize>,
    /// A prefetch becomes demand when somebody asks for the expert.
    pub cause: Cause,
    /// The use that it was begun for.
    pub access: Access,
    pieces: Vec<Piece>,
    next_piece: usize,
    /// Reads on their way.
    pub n_in_flight: usize,
    /// Pieces of each granule of `granules` that have not landed.
    missing: Vec<u16>,
    /// Pieces that hold a part of every granule and have not landed.
    rows_missing: usize,
    /// No further read is started, because the load is not wanted any more or a read has failed.
    pub stopped: bool,
    pub fault: Option<Fault>,
}

impl Load {
    pub fn new(
        expert: u32,
        granules: Range<usize>,
        Reason { cause, access }: Reason,
        pieces: Vec<Piece>,
    ) -> Load {
        assert!(!granules.is_empty() && !pieces.is_empty());
        let mut missing = vec![0; granules.len()];
        let mut rows_missing = 0;
        for piece in &pieces {
            match piece.to {
                Dest::Slot { granule, .. } => missing[granule - granules.start] += 1,
                Dest::Rows { .. } => rows_missing += 1,
            }
        }
        let (n_in_flight, next_piece, stopped, fault) = (0, 0, false, None);
        Load {
            expert,
            granules,
            cause,
            access,
            pieces,
            next_piece,
            n_in_flight,
            missing,
            rows_missing,
            stopped,
            fault,
        }
    }

    /// Whether it keeps an expert that was used elsewhere, and no demand waits for it.
    pub fn is_admission(&self) -> bool {
        self.cause == Cause::Prefetch && self.access.keeps()
    }

    /// Whether it is wanted whatever is predicted.
    pub fn outlives_predictions(&self) -> bool {
        self.is_admission() || self.access == Access::Fill
    }

    /// The read that would start next.
    pub fn peek(&self) -> Option<&Piece> {
        if self.stopped { None } else { self.pieces.get(self.next_piece) }
    }

    pub fn start_next(&mut self) -> Piece {
        let piece = *self.peek().expect("a piece to start");
        self.next_piece += 1;
        self.n_in_flight += 1;
        piece
    }

    pub fn landed(&mut self, piece: &Piece) {
        match piece.to {
            Dest::Slot { granule, .. } => self.missing[granule - self.granules.start] -= 1,
            Dest::Rows { .. } => self.rows_missing -= 1,
        }
    }

    /// Whether every byte of a granule is in place.
    pub fn is_complete(&self, granule: usize) -> bool {
        self.rows_missing == 0 && self.missing[granule - self.granules.start] == 0
    }

    /// Nothing is on its way and nothing more will be.
    pub fn is_over(&self) -> bool {
        self.n_in_flight == 0 && self.peek().is_none()
    }
}
