//! A weight matrix where it lies: in the mapped file or in a slot of a tier.

use crate::gguf::TensorType;
use crate::quant;
use std::ops::Range;

/// `rows` rows of `cols` values of `ty`; row r starts at byte `r · row_stride` of `data`, and the
/// last row needs only its own bytes. The stride is what lets one kernel read a column range of a
/// file's matrix and a granule's own copy alike.
#[derive(Clone, Copy)]
pub struct MatRef<'a> {
    pub ty: TensorType,
    pub data: &'a [u8],
    pub rows: usize,
    pub cols: usize,
    pub row_stride: usize,
}

impl<'a> MatRef<'a> {
    /// # Panics
    /// If the type is not computed with, `cols` is no whole number of blocks, rows overlap or
    /// `data` is too short. Files are checked before they come here.
    pub fn new(
        ty: TensorType,
        data: &'a [u8],
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Self {
        assert!(quant::is_supported(ty), "{ty} is not computed with");
        let row = ty.row_bytes(cols as u64).expect("whole blocks") as usize;
        assert!(row <= row_stride, "rows of {row} bytes, stride of {row_stride}");
        if rows > 0 {
            let last = (rows - 1).checked_mul(row_stride).and_then(|x| x.checked_add(row));
            assert!(last.expect("a size") <= data.len(), "{rows} rows in {} bytes", data.len());
        }
        MatRef { ty, data, rows, cols, row_stride }
    }

    /// Rows without gaps.
    pub fn dense(ty: TensorType, data: &'a [u8], rows: usize, cols: usize) -> Self {
        let row = ty.row_bytes(cols as u64).expect("whole blocks") as usize;
        MatRef::new(ty, data, rows, cols, row)
    }

    /// Bytes of one row's values.
    pub fn row_bytes(&self) -> usize {
        self.cols / self.ty.block_len() * self.ty.block_bytes()
    }

    pub fn row(&self, r: usize) -> &'a [u8] {
        assert!(r < self.rows);
        &self.data[r * self.row_stride..][..self.row_bytes()]
    }

    /// The columns of a granule; both ends on block boundaries.
    pub fn column_range(self, cols: Range<usize>) -> Self {
        let (len, bytes) = (self.ty.block_len(), self.ty.block_bytes());
        assert!(cols.start <= cols.end && cols.end <= self.cols, "{cols:?} of {}", self.cols);
        assert!(
            cols.start.is_multiple_of(len) && cols.end.is_multiple_of(len),
            "{cols:?} cuts a block of {len}"
        );
        let data = &self.data[(cols.start / len * bytes).min(self.data.len())..];
        MatRef::new(self.ty, data, self.rows, cols.len(), self.row_stride)
    }

    /// The matrix whose columns these are, each range right behind the one before, and how many
    /// columns a range has, but for the last, which may have fewer. `None` where they are parts of
    /// no such matrix.
    pub fn joined(parts: impl Iterator<Item = MatRef<'a>> + Clone) -> Option<(Self, usize)> {
        let first = parts.clone().next().filter(|first| first.cols > 0)?;
        let (len, bytes) = (first.ty.block_len(), first.ty.block_bytes());
        let form = |part: &MatRef| (part.ty, part.rows, part.row_stride);
        let mut cols = 0;
        for part in parts {
            let is_behind =
                part.data.as_ptr() == first.data.as_ptr().wrapping_add(cols / len * bytes);
            let is_even = cols.is_multiple_of(first.cols) && part.cols <= first.cols;
            if !(is_behind && is_even && form(&part) == form(&first)) {
                return None;
            }
            cols += part.cols;
        }
        let row = first.ty.row_bytes(cols as u64)? as usize;
        let last = first.rows.checked_sub(1)?.checked_mul(first.row_stride)?;
        let is_seen = row <= first.row_stride && last.checked_add(row)? <= first.data.len();
        is_seen.then_some((MatRef { cols, ..first }, first.cols))
    }

    pub fn row_range(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "{rows:?} of {}", self.rows);
        let data = &self.data[(rows.start * self.row_stride).min(self.data.len())..];
        MatRef::new(self.ty, data, rows.len(), self.cols, self.row_stride)
    }
}
