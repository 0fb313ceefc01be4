//! The places of a layer's experts in the file and, by `SlotLayout`, in slots, each of which holds
//! one granule.

pub use crate::experts::layout::slots::SlotLayout;

use std::ops::Range;

use crate::experts::{Geometry, ReadyGranule};
use crate::gguf::Gguf;

/// Offsets and lengths of direct reads are multiples of this, and so are granules and experts in
/// granule-major files.
pub const DIRECT_ALIGN: usize = 4096;

/// A read is not longer than this (unless one row of down is): long enough for a disk to work at
/// its full rate with a few of them in flight, short enough for demand not to wait long behind it.
pub const READ_BYTES: usize = 512 << 10;

/// One of an expert's matrices as a file stores its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixRows {
    pub rows: usize,
    pub row_bytes: usize,
    /// Elements and bytes a block of the type.
    pub block_len: usize,
    pub block_bytes: usize,
}

impl MatrixRows {
    /// A matrix that experts do without: as many rows as another's, and no bytes.
    pub fn absent(rows: usize) -> MatrixRows {
        MatrixRows { rows, row_bytes: 0, block_len: 1, block_bytes: 0 }
    }

    pub fn n_bytes(&self) -> usize {
        self.rows * self.row_bytes
    }

    /// The byte at which a column starts in its row; `column` is on a block boundary.
    fn column(&self, column: usize) -> usize {
        column / self.block_len * self.block_bytes
    }

    /// The bytes of a run of columns in its row.
    pub fn columns(&self, columns: &Range<usize>) -> Range<usize> {
        self.column(columns.start)..self.column(columns.end)
    }
}

/// Which tensors hold a layer's experts; indices into `Gguf::tensors`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertTensors {
    /// Tensors [cols, rows, experts]; of experts without a gate two.
    Stacked { gate: Option<usize>, up: usize, down: usize },
    /// Tensors [cols, rows, experts] of which one has each expert's rows of gate and then its rows
    /// of up.
    Fused { gate_up: usize, down: usize },
    /// One tensor [cols, rows, experts] of experts of one matrix, up.
    Single { tensor: usize },
    /// One I8 tensor [expert stride, experts] that starts at a multiple of `DIRECT_ALIGN` of its
    /// file. Each granule (its rows of gate, its rows of up, its columns of every row of down,
    /// back to back) starts at the next multiple of `DIRECT_ALIGN` of its expert.
    GranuleMajor { tensor: usize },
}

/// The experts of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerExperts {
    pub n_experts: usize,
    pub geometry: Geometry,
    /// Without bytes where experts have no gate: down · act(up · x).
    pub gate: MatrixRows,
    pub up: MatrixRows,
    /// Without rows where experts are act(up · x).
    pub down: MatrixRows,
    pub tensors: ExpertTensors,
}

impl LayerExperts {
    /// The tensors that hold them.
    pub fn tensors(&self) -> impl Iterator<Item = usize> + use<> {
        let (one, gate, down) = match self.tensors {
            ExpertTensors::Stacked { gate, up, down } => (up, gate, Some(down)),
            ExpertTensors::Fused { gate_up, down } => (gate_up, None, Some(down)),
            ExpertTensors::Single { tensor } | ExpertTensors::GranuleMajor { tensor } => {
                (tensor, None, None)
            }
        };
        gate.into_iter().chain([one]).chain(down)
    }

    /// Experts of these matrices, cut as this version cuts them.
    pub fn cut(
        n_experts: usize,
        [gate, up, down]: [MatrixRows; 3],
        tensors: ExpertTensors,
    ) -> LayerExperts {
        let n_ff = up.rows;
        // Of down, an intermediate row is a column: its share of every row.
        let row_bytes = gate.row_bytes + up.row_bytes + down.n_bytes() / n_ff;
        let geometry = Geometry::new(n_ff, down.block_len, row_bytes as u64);
        LayerExperts { n_experts, geometry, gate, up, down, tensors }
    }

    /// The offsets of a granule-major granule's rows of gate, rows of up and columns of down.
    pub fn offsets(&self, index: usize) -> [usize; 3] {
        let n = self.geometry.rows(index).len();
        let up = n * self.gate.row_bytes;
        [0, up, up + n * self.up.row_bytes]
    }

    /// Bytes of a granule: its rows of gate and up and its columns of down.
    pub fn granule_bytes(&self, index: usize) -> usize {
        let rows = self.geometry.rows(index);
        let of_down = self.down.rows * self.down.columns(&rows).len();
        rows.len() * (self.gate.row_bytes + self.up.row_bytes) + of_down
    }

    /// Bytes of all granules of an expert, which is its share of its matrices' tensors.
    pub fn expert_bytes(&self) -> usize {
        self.gate.n_bytes() + self.up.n_bytes() + self.down.n_bytes()
    }

    /// Bytes from one granule to the next in a granule-major file. All granules but the last are
    /// of one size.
    pub fn granule_stride(&self) -> usize {
        self.granule_bytes(0).next_multiple_of(DIRECT_ALIGN)
    }

    /// The least that an expert takes in a granule-major file.
    pub fn expert_stride(&self) -> usize {
        let last = self.geometry.n_granules() - 1;
        let of_last = self.granule_bytes(last).next_multiple_of(DIRECT_ALIGN);
        last * self.granule_stride() + of_last
    }

    /// Asserts that the shapes fit the file's tensors, which the code that binds a file has
    /// checked.
    pub(crate) fn assert_fits(&self, file: &Gguf) {
        let tensor = |index: usize| &file.tensors()[index];
        match self.tensors {
            ExpertTensors::Stacked { gate, up, down } => {
                assert_eq!(gate.is_some(), self.gate.row_bytes > 0, "a gate and its tensor");
                let parts = [(self.gate, gate), (self.up, Some(up)), (self.down, Some(down))];
                for (part, index) in parts.into_iter().filter_map(|(p, i)| Some((p, i?))) {
                    let expected = self.n_experts * part.n_bytes();
                    assert_eq!(tensor(index).n_bytes, expected as u64, "{}", tensor(index).name);
                }
            }
            ExpertTensors::Fused { gate_up, down } => {
                let both = self.gate.n_bytes() + self.up.n_bytes();
                for (index, n_bytes) in [(gate_up, both), (down, self.down.n_bytes())] {
                    let expected = (self.n_experts * n_bytes) as u64;
                    assert_eq!(tensor(index).n_bytes, expected, "{}", tensor(index).name);
                }
            }
            ExpertTensors::Single { tensor: index } => {
                let expected = self.n_experts * self.up.n_bytes();
                assert_eq!(tensor(index).n_bytes, expected as u64, "{}", tensor(index).name);
            }
            ExpertTensors::GranuleMajor { tensor: index } => {
                let t = tensor(index);
                assert_eq!(t.dims[1..].iter().product::<u64>(), self.n_experts as u64);
                assert!(t.dims[0] >= self.expert_stride() as u64, "{}: stride", t.name);
                let aligned = |n: u64| n.is_multiple_of(DIRECT_ALIGN as u64);
                assert!(aligned(t.dims[0]) && aligned(t.file_offset), "{}: alignment", t.name);
            }
        }
        assert_eq!(self.gate.rows, self.geometry.n_ff);
        assert_eq!(self.up.rows, self.geometry.n_ff);
        assert_eq!(self.down.column(self.geometry.n_ff), self.down.row_bytes);
        let last = self.geometry.n_granules() - 1;
        let cut = self.geometry.rows(last).start;
        assert_eq!(cut % self.down.block_len, 0, "a granule cuts a block");
    }

    /// A granule where it lies in the mapped file.
    pub fn in_place<'a>(&self, file: &'a Gguf, expert: u32, index: usize) -> ReadyGranule<'a> {
        let bytes = |tensor: usize| file.bytes(&file.tensors()[tensor]);
        let expert_of =
            |tensor: usize, n_bytes: usize| &bytes(tensor)[expert as usize * n_bytes..][..n_bytes];
        let [gate, up, down] = match self.tensors {
            ExpertTensors::Stacked { gate, up, down } => [
                gate.map_or(&[][..], |gate| expert_of(gate, self.gate.n_bytes())),
                expert_of(up, self.up.n_bytes()),
                expert_of(down, self.down.n_bytes()),
            ],
            ExpertTensors::Fused { gate_up, down } => {
                let both = expert_of(gate_up, self.gate.n_bytes() + self.up.n_bytes());
                let (gate, up) = both.split_at(self.gate.n_bytes());
                [gate, up, expert_of(down, self.down.n_bytes())]
            }
            ExpertTensors::Single { tensor } => {
                [&[][..], expert_of(tensor, self.up.n_bytes()), &[][..]]
            }
            ExpertTensors::GranuleMajor { tensor } => {
                let stride = file.tensors()[tensor].dims[0] as usize;
                let at = expert as usize * stride + index * self.granule_stride();
                return self.compact(&bytes(tensor)[at..], expert, index);
            }
        };
        let rows = self.geometry.rows(index);
        let columns = self.down.columns(&rows);
        ReadyGranule {
            expert,
            index: index as u32,
            gate: &gate[rows.start * self.gate.row_bytes..rows.end * self.gate.row_bytes],
            up: &up[rows.start * self.up.row_bytes..rows.end * self.up.row_bytes],
            // With all that follows, so that the columns of a whole expert can be joined.
            down: &down[columns.start..],
            gate_stride: self.gate.row_bytes,
            up_stride: self.up.row_bytes,
            down_stride: self.down.row_bytes,
            rows,
        }
    }

    /// A granule whose bytes start those of `bytes`.
    pub(crate) fn compact<'a>(
        &self,
        bytes: &'a [u8],
        expert: u32,
        index: usize,
    ) -> ReadyGranule<'a> {
        let parts = self.offsets(index).map(|offset| &bytes[offset..]);
        self.assembled(expert, index, parts)
    }

    /// A granule from its rows of gate, its rows of up and, without gaps, its columns of down.
    pub(crate) fn assembled<'a>(
        &self,
        expert: u32,
        index: usize,
        [gate, up, down]: [&'a [u8]; 3],
    ) -> ReadyGranule<'a> {
        let rows = self.geometry.rows(index);
        let down_stride = self.down.columns(&rows).len();
        ReadyGranule {
            expert,
            index: index as u32,
            gate: &gate[..rows.len() * self.gate.row_bytes],
            up: &up[..rows.len() * self.up.row_bytes],
            down: &down[..self.down.rows * down_stride],
            gate_stride: self.gate.row_bytes,
            up_stride: self.up.row_bytes,
            down_stride,
            rows,
        }
    }
}
