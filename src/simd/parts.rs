//! Products with several tokens of formats that are written out as another, which has all their
//! values, for its loops: Q1_0 and Q2_0 as Q4_0, F8_E4M3 as BF16. Integers, scales and floats are
//! the same, and so are the bits.

use super::{MatRef, Matmul, Out, Product, Scratch};
use crate::gguf::TensorType;
use crate::quant::{Parts, blocks_of, blocks_of_mut, e4m3};

/// The fewest tokens that pay for writing rows out: of blocks, and of floats.
pub(super) const FEWEST: usize = 4;
pub(super) const FEWEST_OF_FLOATS: usize = 12;

/// Rows that are written out at a time: a multiple of those of a panel, 36 KiB of Q4_0 with 2048
/// columns.
const ROWS: usize = 32;

/// # Safety
/// The contract is [`Product`]'s; the matrix holds blocks of type B, and `matmul` may be called.
pub(super) unsafe fn by_q4_0<B: Parts>(product: Product, scratch: &mut Scratch, matmul: Matmul) {
    let write = |from: &[u8], to: &mut [u8]| {
        let parts = blocks_of_mut(to).chunks_exact_mut(B::PARTS);
        for (block, parts) in blocks_of::<B>(from).iter().zip(parts) {
            parts.iter_mut().enumerate().for_each(|(j, part)| *part = block.part(j));
        }
    };
    // SAFETY: the caller's promises.
    unsafe { written_out(product, scratch, TensorType::Q4_0, write, matmul) }
}

/// # Safety
/// The contract is [`Product`]'s; the matrix is F8_E4M3, and `matmul` may be called.
pub(super) unsafe fn by_bf16(product: Product, scratch: &mut Scratch, matmul: Matmul) {
    let write = |from: &[u8], to: &mut [u8]| {
        for (byte, half) in from.iter().zip(to.as_chunks_mut::<2>().0) {
            *half = e4m3::AS_BF16[usize::from(*byte)];
        }
    };
    // SAFETY: the caller's promises.
    unsafe { written_out(product, scratch, TensorType::BF16, write, matmul) }
}

/// The product of rows that `write` makes of the matrix's, some at a time.
///
/// # Safety
/// The contract is [`Product`]'s; `matmul` may be called.
unsafe fn written_out(
    product: Product,
    scratch: &mut Scratch,
    ty: TensorType,
    write: impl Fn(&[u8], &mut [u8]),
    matmul: Matmul,
) {
    let Product { mat, out, .. } = product;
    let mut room = std::mem::take(&mut scratch.rows);
    let row_bytes = mat.cols / ty.block_len() * ty.block_bytes();
    room.reserve(ROWS * row_bytes);
    for start in (0..product.rows).step_by(ROWS) {
        let rows = ROWS.min(product.rows - start);
        let first = product.first + start;
        let data = &mut room.bytes_mut()[..rows * row_bytes];
        for (r, row) in data.chunks_exact_mut(row_bytes.max(1)).enumerate() {
            write(mat.row(first + r), row);
        }
        let mat = MatRef::dense(ty, data, rows, mat.cols);
        let out = Out { at: out.at.wrapping_add(first), ..out };
        // SAFETY: the caller's promises, of some of the rows.
        unsafe { matmul(Product { mat, first: 0, rows, out, ..product }, scratch) };
    }
    scratch.rows = room;
}
