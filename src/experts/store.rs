//! The layer loop's source of experts: `acquire` the experts of a layer, compute the granules that
//! `next_ready` hands out, `release` them.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Access, Acquisition, ExpertStatus, Geometry, LayerPart, UpperResidency};
use crate::Result;
use crate::policy::Expert;

/// A granule that is in memory, and where.
#[derive(Clone, Debug)]
pub struct ReadyGranule<'a> {
    /// Expert within its layer.
    pub expert: u32,
    /// Granule within its expert.
    pub index: u32,
    /// The intermediate rows it holds.
    pub rows: Range<usize>,
    /// Rows of gate at `gate_stride` bytes; empty where experts have none.
    pub gate: &'a [u8],
    /// Rows of up at `up_stride` bytes.
    pub up: &'a [u8],
    /// The granule's columns of every row of down, at `down_stride` bytes.
    pub down: &'a [u8],
    pub gate_stride: usize,
    pub up_stride: usize,
    pub down_stride: usize,
}

/// Slots one behind the other, in memory that granules move to and from.
#[derive(Clone, Copy, Debug)]
pub struct HostMemory {
    pub start: NonNull<u8>,
    pub bytes: usize,
    pub slot_bytes: usize,
}

/// Experts in host memory: in place in the mapped file (`Resident`) or streamed from disk
/// (`RamTier`). The layer loop and its result are the same with either: granules of one expert come
/// in index order, and sums are taken in that order.
pub trait ExpertStore: Send + Sync {
    /// The cut of a layer's experts; `None` if the layer has none.
    fn geometry(&self, layer: usize) -> Option<Geometry>;

    /// Pins `experts` (distinct, of one layer) and queues demand loads for what is missing.
    fn acquire(
        &self,
        layer: usize,
        experts: &[u32],
        access: Access,
        acquisition: &mut Acquisition,
    ) {
        self.acquire_part(layer, LayerPart::whole(experts), access, acquisition);
    }

    /// [`ExpertStore::acquire`] of a part of the experts that a prompt uses in the layer: the first
    /// ones. The others are acquired after these are released, and other passes may acquire
    /// experts in between.
    fn acquire_part(
        &self,
        layer: usize,
        part: LayerPart<'_>,
        access: Access,
        acquisition: &mut Acquisition,
    );

    /// Takes back the granules that were handed out, as computed, and hands out more that are in
    /// memory, waiting if there are none; false when all have been. Returns the error of a failed
    /// load, and `Error::Interrupted` if the user interrupts the wait.
    fn next_ready(&self, acquisition: &mut Acquisition) -> Result<bool>;

    /// Granule `i` of the `Acquisition::n_handed` that are handed out. Granules of one expert are
    /// next to each other. They stay where they are for as long as they are borrowed.
    fn ready<'a>(&'a self, acquisition: &'a Acquisition, i: usize) -> ReadyGranule<'a>;

    /// Unpins, at any time.
    fn release(&self, acquisition: &mut Acquisition);

    /// Appends the status of each of a layer's experts; nothing if the layer has none.
    fn report(&self, layer: usize, out: &mut Vec<ExpertStatus>);

    /// Whether what is acquired may have to be loaded.
    fn is_streamed(&self) -> bool {
        false
    }

    /// Whether all granules of an expert are in memory.
    fn is_whole(&self, _expert: Expert) -> bool {
        true
    }

    /// The memory that granules of some layers lie in, for as long as the store exists; empty where
    /// it is not the store's own.
    fn memory(&self) -> Vec<HostMemory> {
        Vec::new()
    }

    /// Whether the parts of the layer's granules start at multiples of `align` in that memory.
    fn are_parts_at(&self, _layer: usize, _align: usize) -> bool {
        false
    }

    /// The record in which a tier above reports which experts it holds whole; `None` if nothing
    /// moves.
    fn upper_residency(&self) -> Option<Arc<UpperResidency>> {
        None
    }
}
