//! Cached keys and values of any type: how rows are stored, and how a tile of them is read as f32.

use crate::backend::cpu::{Cpu, SharedOut};
use crate::backend::ops::{Rows, RowsMut, row_bytes};
use crate::gguf::TensorType;
use crate::quant;
use crate::simd::Kernels;
use crate::simd::tile::Tile;
use bytemuck::{cast_slice, cast_slice_mut};
use std::ops::Range;

impl<'a> Rows<'a> {
    /// Elements of a row in a tile: whole vectors, or whole blocks.
    fn padded(&self) -> usize {
        self.dim.next_multiple_of(self.ty.block_len().max(8))
    }

    /// Floats that `tile` needs for `n` positions.
    pub(super) fn tile_floats(&self, n: usize) -> usize {
        n * self.padded()
    }

    /// Rows of a head as f32, padded with zeros to a multiple of eight; in place if they are that
    /// already, otherwise in `buffer`.
    pub(super) fn tile<'b>(
        &self,
        kernels: &Kernels,
        head: usize,
        positions: Range<usize>,
        buffer: &'b mut [f32],
    ) -> Tile<'b>
    where
        'a: 'b,
    {
        assert!(positions.end <= self.n_ctx);
        let (n, dim, padded) = (positions.len(), self.dim.next_multiple_of(8), self.padded());
        let first = (head * self.n_ctx + positions.start) * self.stride;
        if self.ty == TensorType::F32 && dim == self.dim {
            return Tile::new(&cast_slice(self.data)[first..], n, dim, self.stride);
        }
        // Rows without a gap are one long row.
        let (rows, len) = match self.stride == padded && self.dim == padded {
            true => (1, n * padded),
            false => (n, self.dim),
        };
        for i in 0..rows {
            let at = row_bytes(self.ty, first + i * self.stride);
            let (row, out) =
                (&self.data[at..][..row_bytes(self.ty, len)], &mut buffer[i * padded..]);
            match self.ty {
                TensorType::F32 => out[..len].copy_from_slice(cast_slice(row)),
                TensorType::F16 => kernels.f16_to_f32(cast_slice(row), &mut out[..len]),
                TensorType::BF16 => kernels.bf16_to_f32(cast_slice(row), &mut out[..len]),
                ty => kernels.dequantize(ty, row, &mut out[..len.next_multiple_of(32)]),
            }
            out[len..len.next_multiple_of(padded)].fill(0.0);
        }
        Tile::new(buffer, n, dim, padded)
    }
}

impl RowsMut<'_> {
    /// Stores `x` [tokens, heads, dim] at positions from `first` on.
    pub fn store(self, cpu: &Cpu, x: &[f32], first: usize) {
        let RowsMut { ty, data, dim, n_ctx } = self;
        let row_len = row_bytes(ty, dim);
        let heads = data.len() / (n_ctx * row_len);
        let tokens = x.len() / (heads * dim);
        assert!(x.len() == tokens * heads * dim && first + tokens <= n_ctx);
        let data = SharedOut::new(data);
        cpu.chunks(tokens, cpu.token_chunk(tokens, heads * dim), &|_, range| {
            for (t, head) in range.flat_map(|t| (0..heads).map(move |head| (t, head))) {
                let at = (head * n_ctx + first + t) * row_len;
                // SAFETY: each token is in one chunk, and has a row of its own of each head.
                let row = unsafe { data.slice(at, row_len) };
                store_row(cpu.kernels, ty, &x[(t * heads + head) * dim..][..dim], row);
            }
        });
    }
}

fn store_row(kernels: &Kernels, ty: TensorType, x: &[f32], row: &mut [u8]) {
    match ty {
        TensorType::F32 => cast_slice_mut(row).copy_from_slice(x),
        TensorType::F16 => kernels.f32_to_f16(x, cast_slice_mut(row)),
        TensorType::BF16 => kernels.f32_to_bf16(x, cast_slice_mut(row)),
        TensorType::Q8_0 => kernels.f32_to_q8_0(x, row),
        _ => {
            let (blocks, rest) = x.as_chunks::<32>();
            assert!(rest.is_empty(), "{} elements cut a block of {ty}", x.len());
            let places = row.chunks_exact_mut(ty.block_bytes());
            blocks.iter().zip(places).for_each(|(x, block)| store_block(ty, x, block));
        }
    }
}

/// More than any format's f16 scale reaches: 127 · 65504, rounded up to a power of two.
const LARGEST: f32 = (1 << 23) as f32;

/// Quantises like a weight; but a block with a NaN, an infinity or a number out of reach comes back
/// as NaN, and −0 as 0, because the smallest of 0 and −0 differs between processors.
fn store_block(ty: TensorType, x: &[f32; 32], block: &mut [u8]) {
    if x.iter().all(|x| x.abs() < LARGEST) {
        quant::quantize(ty, &x.map(|x| x + 0.0), block);
    } else {
        // The scale is first in every format.
        block.fill(0);
        block[..2].copy_from_slice(&half::f16::NAN.to_le_bytes());
    }
}
