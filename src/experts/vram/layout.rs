//! The layout of a granule in device memory: its rows of gate, its rows of up and its columns of
//! down, each without gaps and from its own multiple of 16 bytes on, as kernels want them.

use std::ops::Range;

use crate::experts::{LayerExperts, LayerNeeds, ReadyGranule};

/// Parts of a granule start at multiples of this: what a thread loads at once.
pub const PART_ALIGN: usize = 16;

/// Slots start at multiples of this, as device memory does.
const SLOT_ALIGN: usize = 256;

/// The offsets of the parts of a layer's granules in their slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GranuleLayout {
    /// Intermediate rows of a granule; the last of an expert may have fewer.
    pub granule_rows: usize,
    pub n_granules: usize,
    pub gate_at: usize,
    pub up_at: usize,
    pub down_at: usize,
    pub slot_bytes: usize,
}

impl GranuleLayout {
    pub fn new(layer: &LayerExperts) -> GranuleLayout {
        // No granule is larger than the first.
        let rows = layer.geometry.rows(0);
        let up_at = (rows.len() * layer.gate.row_bytes).next_multiple_of(PART_ALIGN);
        let down_at = (up_at + rows.len() * layer.up.row_bytes).next_multiple_of(PART_ALIGN);
        let end = down_at + layer.down.rows * layer.down.columns(&rows).len();
        GranuleLayout {
            granule_rows: rows.len(),
            n_granules: layer.geometry.n_granules(),
            gate_at: 0,
            up_at,
            down_at,
            slot_bytes: end.next_multiple_of(SLOT_ALIGN),
        }
    }
}

/// The tier's sizes for a layer. Staging buffers are for bytes that go to several slots, which no
/// granule in memory has.
pub fn needs(layer: &LayerExperts, k: usize) -> LayerNeeds {
    let GranuleLayout { n_granules, slot_bytes, .. } = GranuleLayout::new(layer);
    let (n_experts, k) = (layer.n_experts, k.min(layer.n_experts));
    LayerNeeds { n_experts, n_granules, k, slot_bytes, staging_bytes: 0 }
}

/// A part of a granule in the host's memory, and where it goes in the slot.
pub struct GranulePart<'a> {
    at: usize,
    bytes: &'a [u8],
    /// Rows of `width` bytes at a distance of `stride`.
    width: usize,
    stride: usize,
    n_rows: usize,
}

impl<'a> GranulePart<'a> {
    /// Gate, up and down of a granule; gate is empty where experts have none.
    pub fn of(
        layer: &LayerExperts,
        layout: &GranuleLayout,
        granule: &ReadyGranule<'a>,
    ) -> [GranulePart<'a>; 3] {
        let n_rows = granule.rows.len();
        let part =
            |at, bytes, width, stride, n_rows| GranulePart { at, bytes, width, stride, n_rows };
        let ReadyGranule { gate, up, down, gate_stride, up_stride, down_stride, .. } = *granule;
        let width = layer.down.columns(&granule.rows).len();
        [
            part(layout.gate_at, gate, layer.gate.row_bytes, gate_stride, n_rows),
            part(layout.up_at, up, layer.up.row_bytes, up_stride, n_rows),
            part(layout.down_at, down, width, down_stride, layer.down.rows),
        ]
    }

    /// The bytes of the slot that it takes.
    pub fn range(&self) -> Range<usize> {
        self.at..self.at + self.n_rows * self.width
    }

    /// Its bytes where they are, if its rows lie back to back there.
    pub fn in_place(&self) -> Option<&'a [u8]> {
        (self.width == self.stride || self.n_rows <= 1)
            .then(|| &self.bytes[..self.n_rows * self.width])
    }

    /// Copies its rows back to back, in ascending order and without reading what was there: `to`
    /// may be write-combined memory.
    pub fn pack(&self, to: &mut [u8]) {
        assert_eq!(to.len(), self.n_rows * self.width);
        if self.width == self.stride {
            to.copy_from_slice(&self.bytes[..to.len()]);
            return;
        }
        for (row, to) in to.chunks_exact_mut(self.width).enumerate() {
            to.copy_from_slice(&self.bytes[row * self.stride..][..self.width]);
        }
    }
}
