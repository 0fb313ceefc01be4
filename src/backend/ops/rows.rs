//! Operands in memory: rows of the KV cache, and a matrix per head.

use crate::gguf::TensorType;
use crate::simd::MatRef;
use bytemuck::{cast_slice, cast_slice_mut};
use memmap2::{MmapMut, MmapOptions};
use std::io;
use std::ops::{Deref, DerefMut, Range};

/// Bytes of a row; a partial block counts as a whole one.
pub fn row_bytes(ty: TensorType, dim: usize) -> usize {
    dim.div_ceil(ty.block_len()) * ty.block_bytes()
}

/// Zeroed memory for rows of any type, aligned for all of them. The system provides pages on first
/// write.
pub struct RowBytes {
    memory: Memory,
    len: usize,
}

enum Memory {
    Words(Vec<u64>),
    /// A map of its own, whose pages can be given back.
    Map(MmapMut),
}

impl RowBytes {
    pub fn zeroed(len: usize) -> RowBytes {
        RowBytes { memory: Memory::Words(vec![0; len.div_ceil(size_of::<u64>())]), len }
    }

    /// Memory that can be given back in part.
    pub fn mapped(len: usize) -> io::Result<RowBytes> {
        if len == 0 {
            return Ok(RowBytes::zeroed(0));
        }
        let map = MmapOptions::new().len(len).no_reserve_swap().map_anon()?;
        // A huge page would cost its memory for a few rows.
        #[cfg(target_os = "linux")]
        if let Err(e) = map.advise(memmap2::Advice::NoHugePage) {
            log::debug!("{len} bytes of rows may lie in huge pages: {e}");
        }
        Ok(RowBytes { memory: Memory::Map(map), len })
    }

    /// Gives the whole pages within a range back to the system, if the memory is
    /// [`RowBytes::mapped`]: their bytes are of no use any more.
    #[cfg(target_os = "linux")]
    pub fn give_back(&mut self, range: &Range<usize>) {
        assert!(range.end <= self.len);
        let Memory::Map(map) = &mut self.memory else { return };
        let page = rustix::param::page_size();
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        if start >= end {
            return;
        }
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the pages are anonymous, so they are zero when they are next read; they lie in
        // the map, and `&mut self` rules out that anything else reads or writes them meanwhile.
        if let Err(e) = unsafe { map.unchecked_advise_range(advice, start, end - start) } {
            log::debug!("{} bytes of rows keep their memory: {e}", end - start);
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub fn give_back(&mut self, _range: &Range<usize>) {}
}

impl Default for RowBytes {
    fn default() -> RowBytes {
        RowBytes::zeroed(0)
    }
}

impl Deref for RowBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            Memory::Words(words) => &cast_slice(words)[..self.len],
            Memory::Map(map) => map,
        }
    }
}

impl DerefMut for RowBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Words(words) => &mut cast_slice_mut(words)[..self.len],
            Memory::Map(map) => map,
        }
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
    /// The rows of one head.
    pub fn head(self, head: usize) -> Self {
        let bytes = self.n_ctx * row_bytes(self.ty, self.stride);
        Rows { data: &self.data[head * bytes..(head + 1) * bytes], ..self }
    }

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

impl<'a> RowsMut<'a> {
    fn head_bytes(&self) -> usize {
        self.n_ctx * row_bytes(self.ty, self.dim)
    }

    pub fn n_heads(&self) -> usize {
        self.data.len() / self.head_bytes()
    }

    /// The rows of some heads.
    pub fn heads(self, heads: Range<usize>) -> RowsMut<'a> {
        let bytes = self.head_bytes();
        RowsMut { data: &mut self.data[heads.start * bytes..heads.end * bytes], ..self }
    }
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
