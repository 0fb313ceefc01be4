//! The layout of granules in slots, and the reads that bring them there. It depends on the file:
//!
//! - Stacked or fused (standard files): a granule's rows of gate and of up are one range of the
//!   file each. Direct I/O reads whole pages, so the pages around each range go into the slot as
//!   they are and the range starts wherever it starts in its first page. The granule's columns of
//!   down are a strip through every row of the matrix: whole rows are staged and the strips copied
//!   out.
//! - Granule-major (files of `--layout granule`): a granule's own bytes are one aligned range, and
//!   the slot holds them as the file does.

use std::ops::Range;

use crate::experts::layout::geometry::Geometry;
use crate::experts::layout::piece::{Dest, Piece};
use crate::experts::layout::place::{
    DIRECT_ALIGN, ExpertTensors, LayerExperts, MatrixRows, READ_BYTES,
};
use crate::experts::store::ReadyGranule;
use crate::gguf::Gguf;

/// The place of the first expert's matrix.
#[derive(Clone, Copy, Debug)]
struct Origin {
    shard: usize,
    offset: u64,
    /// Bytes from there to the next expert's.
    expert_stride: usize,
}

impl Origin {
    fn of(file: &Gguf, tensor: usize, expert_stride: usize) -> Origin {
        let tensor = &file.tensors()[tensor];
        Origin { shard: tensor.shard, offset: tensor.file_offset, expert_stride }
    }

    /// The byte at which an expert's matrix starts.
    fn expert(&self, expert: u32) -> u64 {
        self.offset + u64::from(expert) * self.expert_stride as u64
    }
}

#[derive(Clone, Copy, Debug)]
enum Source {
    /// Stacked or fused in the file.
    Stacked {
        gate: Option<Origin>,
        up: Origin,
        down: Option<Origin>,
        /// In a slot: where the pages of up start, and where the columns of down.
        up_at: usize,
        down_at: usize,
        /// Rows of down a read; the last of an expert may have fewer. 0 if there are none.
        rows_a_piece: usize,
    },
    GranuleMajor {
        origin: Origin,
    },
}

impl Source {
    /// Matrices that start there, and the bytes of a slot for their granules.
    fn stacked(
        layer: &LayerExperts,
        gate: Option<Origin>,
        up: Origin,
        down: Option<Origin>,
    ) -> (Source, usize) {
        let up_at = gate.map_or(0, |gate| widest_window(layer, &layer.gate, gate));
        let down_at = up_at + widest_window(layer, &layer.up, up);
        let columns = layer.down.columns(&layer.geometry.rows(0)).len();
        let rows_a_piece = down.map_or(0, |_| rows_a_piece(&layer.down));
        let source = Source::Stacked { gate, up, down, up_at, down_at, rows_a_piece };
        (source, (down_at + layer.down.rows * columns).next_multiple_of(DIRECT_ALIGN))
    }
}

/// The layout of a layer's granules in slots, and the reads that bring them there. Made once a
/// layer, at load.
#[derive(Clone, Copy, Debug)]
pub struct SlotLayout {
    layer: LayerExperts,
    source: Source,
    slot_bytes: usize,
}

impl SlotLayout {
    pub fn new(file: &Gguf, layer: &LayerExperts) -> SlotLayout {
        layer.assert_fits(file);
        let (source, slot_bytes) = match layer.tensors {
            ExpertTensors::Stacked { gate, up, down } => {
                let [of_gate, of_up, of_down] =
                    [&layer.gate, &layer.up, &layer.down].map(MatrixRows::n_bytes);
                let gate = gate.map(|tensor| Origin::of(file, tensor, of_gate));
                let up = Origin::of(file, up, of_up);
                Source::stacked(layer, gate, up, Some(Origin::of(file, down, of_down)))
            }
            ExpertTensors::Fused { gate_up, down } => {
                let of_gate = layer.gate.n_bytes();
                let gate = Origin::of(file, gate_up, of_gate + layer.up.n_bytes());
                let up = Origin { offset: gate.offset + of_gate as u64, ..gate };
                let down = Origin::of(file, down, layer.down.n_bytes());
                Source::stacked(layer, Some(gate), up, Some(down))
            }
            ExpertTensors::Single { tensor } => {
                let up = Origin::of(file, tensor, layer.up.n_bytes());
                Source::stacked(layer, None, up, None)
            }
            ExpertTensors::GranuleMajor { tensor } => {
                let expert_stride = file.tensors()[tensor].dims[0] as usize;
                let origin = Origin::of(file, tensor, expert_stride);
                (Source::GranuleMajor { origin }, layer.granule_stride())
            }
        };
        SlotLayout { layer: *layer, source, slot_bytes }
    }

    /// The cut of the layer's experts.
    pub fn geometry(&self) -> Geometry {
        self.layer.geometry
    }

    /// Whether the rows of gate and up and the columns of down of every granule start at multiples
    /// of `align`, in slots that do.
    pub fn are_parts_at(&self, align: usize) -> bool {
        let layer = &self.layer;
        let granules = 0..layer.geometry.n_granules();
        let aligned = |at: usize| at.is_multiple_of(align);
        match self.source {
            Source::Stacked { gate, up, .. } => {
                let of = |origin: Origin, part: &MatrixRows| {
                    let rows = layer.geometry.rows(granules.end - 1).start;
                    let first_rows = layer.geometry.rows(0).len().min(rows);
                    let starts = [origin.expert_stride, first_rows * part.row_bytes];
                    origin.offset.is_multiple_of(align as u64) && starts.into_iter().all(aligned)
                };
                // Columns of down start at a page.
                gate.is_none_or(|gate| of(gate, &layer.gate)) && of(up, &layer.up)
            }
            Source::GranuleMajor { .. } => {
                granules.clone().all(|granule| layer.offsets(granule).into_iter().all(aligned))
            }
        }
    }

    /// Room for any granule of the layer; a multiple of `DIRECT_ALIGN`.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Room for any piece that is staged; 0 where none is.
    pub fn staging_bytes(&self) -> usize {
        match self.source {
            Source::Stacked { down: Some(_), rows_a_piece, .. } => (DIRECT_ALIGN - 1
                + rows_a_piece * self.layer.down.row_bytes)
                .next_multiple_of(DIRECT_ALIGN),
            Source::Stacked { down: None, .. } | Source::GranuleMajor { .. } => 0,
        }
    }

    /// Appends the reads that bring a run of an expert's granules: first the rows of down, if any,
    /// then granule by granule what goes straight into slots. A granule of a stacked layer is
    /// complete when its own reads and all rows are, one of a granule-major layer with its own
    /// reads; so in both the first can be computed while the others land.
    pub fn pieces(&self, expert: u32, granules: Range<usize>, out: &mut Vec<Piece>) {
        if granules.is_empty() {
            return;
        }
        match self.source {
            Source::Stacked { gate, up, down, up_at, rows_a_piece, .. } => {
                if let Some(down) = down {
                    self.row_pieces(down, rows_a_piece, expert, out);
                }
                for granule in granules {
                    let gate = gate.map(|gate| (gate, &self.layer.gate, 0));
                    for (origin, part, at) in gate.into_iter().chain([(up, &self.layer.up, up_at)])
                    {
                        let range = row_range(&self.layer, origin, part, expert, granule);
                        direct(origin.shard, range, granule, at, out);
                    }
                }
            }
            Source::GranuleMajor { origin } => {
                for granule in granules {
                    let before = granule * self.layer.granule_stride();
                    let start = origin.expert(expert) + before as u64;
                    let end = start + self.layer.granule_bytes(granule) as u64;
                    direct(origin.shard, start..end, granule, 0, out);
                }
            }
        }
    }

    /// Reads of all rows of down. They are whole also where only some granules' columns are
    /// wanted: rows are short, and a disk reads on faster than it seeks.
    fn row_pieces(&self, down: Origin, step: usize, expert: u32, out: &mut Vec<Piece>) {
        let part = &self.layer.down;
        let matrix = down.expert(expert);
        for first in (0..part.rows).step_by(step) {
            let n = step.min(part.rows - first);
            let start = matrix + (first * part.row_bytes) as u64;
            let skip = in_page(start);
            let need = skip + n * part.row_bytes;
            out.push(Piece {
                shard: down.shard,
                start: start - skip as u64,
                len: need.next_multiple_of(DIRECT_ALIGN),
                need,
                to: Dest::Rows { first, n, skip },
            });
        }
    }

    /// A landed granule in its slot.
    pub fn view<'a>(&self, slot: &'a [u8], expert: u32, index: usize) -> ReadyGranule<'a> {
        let layer = &self.layer;
        match self.source {
            Source::Stacked { gate, up, up_at, down_at, .. } => {
                let of_rows = |origin: Origin, part: &MatrixRows, at: usize| {
                    let range = row_range(layer, origin, part, expert, index);
                    &slot[at + in_page(range.start)..]
                };
                let gate = gate.map_or(&[][..], |gate| of_rows(gate, &layer.gate, 0));
                let up = of_rows(up, &layer.up, up_at);
                layer.assembled(expert, index, [gate, up, &slot[down_at..]])
            }
            Source::GranuleMajor { .. } => layer.compact(slot, expert, index),
        }
    }

    /// Copies columns of down out of a `Dest::Rows` piece whose bytes are `staged` (at least its
    /// `need`) into the slots of `granules`: `slots[i]` is the base of granule
    /// `granules.start + i`.
    ///
    /// # Safety
    /// Each of `slots` is the start of `slot_bytes()` writable bytes, no two of them overlap each
    /// other or `staged`, and until this returns nothing else touches the columns written here:
    /// those of the piece's rows.
    pub unsafe fn scatter(
        &self,
        piece: &Piece,
        staged: &[u8],
        granules: Range<usize>,
        slots: &[*mut u8],
    ) {
        let Source::Stacked { down_at, .. } = self.source else {
            panic!("a granule-major layer has nothing to scatter");
        };
        let Dest::Rows { first, n, skip } = piece.to else {
            panic!("a piece that goes straight into its slot is not scattered");
        };
        let down = &self.layer.down;
        assert_eq!(slots.len(), granules.len());
        assert!(first + n <= down.rows);
        let rows = &staged[skip..][..n * down.row_bytes];
        for (granule, &slot) in granules.zip(slots) {
            let columns = down.columns(&self.layer.geometry.rows(granule));
            let width = columns.len();
            for (row, bytes) in (first..).zip(rows.chunks_exact(down.row_bytes)) {
                let bytes = &bytes[columns.clone()];
                // SAFETY: row < down.rows, and `slot_bytes` is at least `down_at` and `width`
                // bytes for each row of down: no granule is wider than the first. The caller
                // answers for the slot itself.
                unsafe {
                    let to = slot.add(down_at + row * width);
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, width);
                }
            }
        }
    }
}

/// Bytes from the start of its page to `position`.
fn in_page(position: u64) -> usize {
    (position % DIRECT_ALIGN as u64) as usize
}

/// The bytes of a file that hold a granule's rows of gate or up.
fn row_range(
    layer: &LayerExperts,
    origin: Origin,
    part: &MatrixRows,
    expert: u32,
    granule: usize,
) -> Range<u64> {
    let rows = layer.geometry.rows(granule);
    let matrix = origin.expert(expert);
    matrix + (rows.start * part.row_bytes) as u64..matrix + (rows.end * part.row_bytes) as u64
}

/// The most pages, in bytes, that any granule's rows of a matrix touch.
fn widest_window(layer: &LayerExperts, part: &MatrixRows, origin: Origin) -> usize {
    let granules = 0..layer.geometry.n_granules();
    let window = |expert: usize, granule: usize| {
        let range = row_range(layer, origin, part, expert as u32, granule);
        in_page(range.start) + (range.end - range.start) as usize
    };
    let experts = 0..layer.n_experts;
    let of_expert = |e: usize| granules.clone().map(|g| window(e, g)).max().unwrap_or(0);
    experts.map(of_expert).max().unwrap_or(0).next_multiple_of(DIRECT_ALIGN)
}

/// Rows of down a read: as even as can be, so that no read is left with a few of them, and so few
/// that their pages fit `READ_BYTES` wherever in a page they start.
fn rows_a_piece(down: &MatrixRows) -> usize {
    let most = ((READ_BYTES - (DIRECT_ALIGN - 1)) / down.row_bytes).max(1);
    down.rows.div_ceil(down.rows.div_ceil(most))
}

/// Appends reads of the pages around `range`, about equal in length, into a granule's slot from
/// `at` on.
fn direct(shard: usize, range: Range<u64>, granule: usize, at: usize, out: &mut Vec<Piece>) {
    let skip = in_page(range.start);
    let start = range.start - skip as u64;
    let need = skip + (range.end - range.start) as usize;
    let step = need.div_ceil(need.div_ceil(READ_BYTES)).next_multiple_of(DIRECT_ALIGN);
    for from in (0..need).step_by(step) {
        let need = step.min(need - from);
        out.push(Piece {
            shard,
            start: start + from as u64,
            len: need.next_multiple_of(DIRECT_ALIGN),
            need,
            to: Dest::Slot { granule, at: at + from },
        });
    }
}

#[cfg(test)]
mod tests;
