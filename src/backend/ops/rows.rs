//! Operands in memory: rows of the KV cache, and a matrix per head.

use crate::gguf::TensorType;
use crate::simd::MatRef;
use bytemuck::{cast_slice, cast_slice_mut};
use std::ops::{Deref, DerefMut};

/// Bytes of a row; a partial block counts as a whole one.
pub fn row_bytes(ty: TensorType, dim: usize) -> usize {
    dim.div_ceil(ty.block_len()) * ty.block_bytes()
}

/// Zeroed memory for rows of any type, aligned for all of them. The system provides pages on first
/// write.
pub struct RowBytes {
    words: Vec<u64>,
    len: usize,
}

impl RowBytes {
    pub fn zeroed(len: usize) -> RowBytes {
        RowBytes { words: vec![0; len.div_ceil(size_of::<u64>())], len }
    }
}

impl Deref for RowBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &cast_slice(&self.words)[..self.len]
    }
}

impl DerefMut for RowBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut cast_slice_mut(&mut self.words)[..self.len]
    }
}

/// Keys or values of one layer: rows of `dim` elements at [heads, n_ctx], `stride` elements from
/// one to the next. Rows of a block format are whole blocks.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// F32, F16, BF16 or a format with blocks of 32.
    pub ty: TensorType,
    /// Aligned as [`RowBytes`].
    pub data: &'a [u8],
    pub dim: usize,
    pub stride: usize,
    pub n_ctx: usize,
}

impl Rows<'_> {
    /// The first `dim` elements of each row.
    pub fn narrow(self, dim: usize) -> Self {
        assert!(dim <= self.dim);
        Rows { dim, ..self }
    }
}

/// Rows to write to, without gaps.
pub struct RowsMut<'a> {
    pub ty: TensorType,
    pub data: &'a mut [u8],
    pub dim: usize,
    pub n_ctx: usize,
}

/// One matrix per head, all in one: head h has `rows` rows from `first + h · step` on.
#[derive(Clone, Copy)]
pub struct HeadMats<'a> {
    pub all: MatRef<'a>,
    pub n_heads: usize,
    pub rows: usize,
    pub first: usize,
    pub step: usize,
}

impl<'a> HeadMats<'a> {
    /// The matrix of head `h`.
    pub fn head(&self, h: usize) -> MatRef<'a> {
        let start = self.first + h * self.step;
        self.all.row_range(start..start + self.rows)
    }
}
