//! Experts as ids and bytes: granules, where they are, who needs them. Nothing here computes; the
//! layer loop asks for experts with `acquire`, computes what `next_ready` hands out, and gives
//! them back with `release`.

mod geometry;
mod place;
mod resident;

pub use geometry::Geometry;
pub use place::{DIRECT_ALIGN, Dest, LayerExperts, Part, Piece, Place, READ_BYTES, SlotLayout};
pub use resident::Resident;

use std::ops::Range;

use crate::Result;

/// A run of intermediate rows of one expert that is in memory, and where.
#[derive(Clone, Debug)]
pub struct ReadyGranule<'a> {
    /// Expert within its layer.
    pub expert: u32,
    /// Granule within its expert.
    pub index: u32,
    /// The intermediate rows it holds.
    pub rows: Range<usize>,
    /// Rows of gate at `gate_stride` bytes.
    pub gate: &'a [u8],
    /// Rows of up at `up_stride` bytes.
    pub up: &'a [u8],
    /// The granule's columns of every row of down, at `down_stride` bytes.
    pub down: &'a [u8],
    pub gate_stride: usize,
    pub up_stride: usize,
    pub down_stride: usize,
}

/// One layer's demand, from `acquire` to `release`; reused from layer to layer.
#[derive(Debug, Default)]
pub struct Work {
    layer: usize,
    experts: Vec<u32>,
    /// Experts of `experts` handed out so far.
    handed_out: usize,
    open: bool,
}

impl Work {
    /// Asserts the protocol: acquire, next_ready until it is empty or fails, release.
    fn start(&mut self, layer: usize, experts: &[u32]) {
        assert!(!self.open, "work of layer {} was not released", self.layer);
        debug_assert!(
            experts.iter().enumerate().all(|(i, e)| !experts[..i].contains(e)),
            "an expert is demanded once, whatever the number of its tokens"
        );
        self.layer = layer;
        self.experts.clear();
        self.experts.extend_from_slice(experts);
        self.handed_out = 0;
        self.open = true;
    }

    fn finish(&mut self) {
        // Not all need have been handed out: a failed load ends the work early.
        self.open = false;
    }
}

/// Where experts come from. Whoever implements it, the layer loop is the same, and so is the
/// result: granules of one expert come in index order, and sums are taken in that order.
pub trait ExpertStore: Send + Sync {
    /// How the experts of a layer are cut; `None` where the layer has none.
    fn geometry(&self, layer: usize) -> Option<Geometry>;

    /// Pins `experts` (distinct, of one layer) and queues demand loads for what is missing.
    fn acquire(&self, layer: usize, experts: &[u32], work: &mut Work) -> Result<()>;

    /// Replaces the contents of `ready` by granules that are in memory and were not handed out
    /// yet, waiting if there are none; leaves it empty when all have been. A failed load is
    /// returned here.
    fn next_ready<'a>(&'a self, work: &mut Work, ready: &mut Vec<ReadyGranule<'a>>) -> Result<()>;

    /// Unpins.
    fn release(&self, work: &mut Work);
}
