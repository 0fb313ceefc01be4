//! How a simulated expert lies on its disk: granule after granule, one read each.

use std::ops::Range;

use crate::experts::{Dest, Layout, Piece};
use crate::policy::Expert;

/// `slot_bytes` of each layer.
#[derive(Clone, Debug)]
pub struct Plain {
    pub slot_bytes: Vec<usize>,
}

impl Layout for Plain {
    fn pieces(&self, expert: Expert, granules: Range<usize>, out: &mut Vec<Piece>) {
        let len = self.slot_bytes[expert.layer as usize];
        // The position does not matter: a simulated link does not seek.
        let piece = |granule| Piece {
            shard: 0,
            start: 0,
            len,
            need: len,
            to: Dest::Slot { granule, at: 0 },
        };
        out.extend(granules.map(piece));
    }
}
