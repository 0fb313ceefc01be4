//! Cached keys and values of any type: how rows are stored, and how a tile of them is read as f32.

use crate::backend::cpu::{Cpu, SharedOut};
use crate::quant::BlockQ8_0;
use crate::simd::Kernels;
use crate::simd::tile::Tile;
use std::ops::Range;

/// Keys or values of one layer: rows of `dim` elements at [heads, n_ctx], `stride` elements from
/// one to the next.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub data: Elements<'a>,
    pub dim: usize,
    pub stride: usize,
    pub n_ctx: usize,
}

#[derive(Clone, Copy)]
pub enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
    BF16(&'a [u16]),
    /// Blocks of 32, each row a whole number of them.
    Q8_0(&'a [u8]),
}

/// The same, to write; nothing between rows.
pub struct RowsMut<'a> {
    pub data: ElementsMut<'a>,
    pub dim: usize,
    pub n_ctx: usize,
}

pub enum ElementsMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [u16]),
    BF16(&'a mut [u16]),
    Q8_0(&'a mut [u8]),
}

/// Bytes that hold elements `at..at + n`, which begin with a block.
fn q8_0_bytes(at: usize, n: usize) -> Range<usize> {
    const SIZE: usize = size_of::<BlockQ8_0>();
    debug_assert!(at.is_multiple_of(32));
    at / 32 * SIZE..(at + n).div_ceil(32) * SIZE
}

impl<'a> Rows<'a> {
    /// The first `dim` elements of each row.
    pub fn narrow(self, dim: usize) -> Self {
        assert!(dim <= self.dim);
        Rows { dim, ..self }
    }

    /// Elements of a row in a tile: whole vectors, or whole blocks.
    fn padded(&self) -> usize {
        let unit = if matches!(self.data, Elements::Q8_0(_)) { 32 } else { 8 };
        self.dim.next_multiple_of(unit)
    }

    /// Floats that `tile` needs for `n` positions.
    pub(super) fn room(&self, n: usize) -> usize {
        n * self.padded()
    }

    /// Rows of a head as f32, padded with zeros to a multiple of eight; in place if they are that
    /// already, otherwise in `room`.
    pub(super) fn tile<'b>(
        &self,
        kernels: &Kernels,
        head: usize,
        positions: Range<usize>,
        room: &'b mut [f32],
    ) -> Tile<'b>
    where
        'a: 'b,
    {
        assert!(positions.end <= self.n_ctx);
        let (n, dim, padded) = (positions.len(), self.dim.next_multiple_of(8), self.padded());
        let first = (head * self.n_ctx + positions.start) * self.stride;
        if let (Elements::F32(data), true) = (self.data, dim == self.dim) {
            return Tile::new(&data[first..], n, dim, self.stride);
        }
        // Rows without a gap are one long row.
        let (rows, len) = match self.stride == padded && self.dim == padded {
            true => (1, n * padded),
            false => (n, self.dim),
        };
        for i in 0..rows {
            let (at, out) = (first + i * self.stride, &mut room[i * padded..]);
            match self.data {
                Elements::F32(data) => out[..len].copy_from_slice(&data[at..][..len]),
                Elements::F16(data) => kernels.f16_to_f32(&data[at..][..len], &mut out[..len]),
                Elements::BF16(data) => kernels.bf16_to_f32(&data[at..][..len], &mut out[..len]),
                Elements::Q8_0(data) => {
                    let blocks = &data[q8_0_bytes(at, len)];
                    kernels.q8_0_to_f32(blocks, &mut out[..len.next_multiple_of(32)]);
                }
            }
            out[len..len.next_multiple_of(padded)].fill(0.0);
        }
        Tile::new(room, n, dim, padded)
    }
}

impl RowsMut<'_> {
    /// Stores `x` [tokens, heads, dim] at positions from `first` on.
    pub fn store(self, cpu: &Cpu, x: &[f32], first: usize) {
        let RowsMut { data, dim, n_ctx } = self;
        let (k, new) = (cpu.kernels, New { x, dim, first, n_ctx });
        match data {
            ElementsMut::F32(data) => new.store(cpu, data, dim, |x, row| row.copy_from_slice(x)),
            ElementsMut::F16(data) => new.store(cpu, data, dim, |x, row| k.f32_to_f16(x, row)),
            ElementsMut::BF16(data) => new.store(cpu, data, dim, |x, row| k.f32_to_bf16(x, row)),
            ElementsMut::Q8_0(data) => {
                new.store(cpu, data, q8_0_bytes(0, dim).end, |x, row| k.f32_to_q8_0(x, row))
            }
        }
    }
}

/// What is to be stored, and where.
struct New<'a> {
    /// [tokens, heads, dim]
    x: &'a [f32],
    dim: usize,
    /// Position of the first token.
    first: usize,
    n_ctx: usize,
}

impl New<'_> {
    /// `data` is [heads, n_ctx, row_len]; `put` makes a row of `dim` values one of `row_len`.
    fn store<T: Send>(
        &self,
        cpu: &Cpu,
        data: &mut [T],
        row_len: usize,
        put: impl Fn(&[f32], &mut [T]) + Sync,
    ) {
        let New { x, dim, first, n_ctx } = *self;
        let heads = data.len() / (n_ctx * row_len);
        let tokens = x.len() / (heads * dim);
        assert!(x.len() == tokens * heads * dim && first + tokens <= n_ctx);
        let data = SharedOut::new(data);
        cpu.chunks(tokens, cpu.token_chunk(tokens, heads * dim), &|_, range| {
            for (t, head) in range.flat_map(|t| (0..heads).map(move |head| (t, head))) {
                let at = (head * n_ctx + first + t) * row_len;
                // SAFETY: each token is in one chunk, and has a row of its own of each head.
                let row = unsafe { data.slice(at, row_len) };
                put(&x[(t * heads + head) * dim..][..dim], row);
            }
        });
    }
}
