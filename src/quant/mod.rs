//! One file a block format: struct, size assert, dequantise, quantise, exact integer dot product.
//!
//! # One arithmetic
//!
//! A dot product of a weight row with an activation row has one definition, to the bit, for
//! scalar and vector code, matrix–vector and matrix–matrix, CPU and GPU.
//!
//! - **Pairs.** Activations are quantised once a token. Blocks of 256 take Q8_K (256 wide, f32
//!   scale); blocks of 32 to 128 take Q8_0 (32 wide, scale rounded to f16): the ggml scheme, but
//!   for Q4_1 and Q5_1, where ggml takes Q8_1, whose rounded `d·Σa` is here the exact sum. F32,
//!   F16, BF16 and F8_E4M3 weights take f32 activations.
//! - **Quantised.** For each block b an exact int32 `isum = Σ_j sc_j·Σ_i q_i·a_i` and, where the
//!   format has mins, an exact int32 `imins = Σ_j m_j·Σ_i a_i`. Eight f32 lanes start at 0; in
//!   ascending b, `lane[b mod 8] = fma(d_w·d_a, isum as f32, lane[b mod 8])`, then, with mins,
//!   `lane[b mod 8] = fma(−(dmin·d_a), imins as f32, lane[b mod 8])`.
//!   What d, the sc_j, the q_i and the m_j are is each format's to say; q_i may come from a table.
//!   d is an f32: an f16 as stored, times a power of two in some formats, or the power of two of
//!   MXFP4. An offset is a min: `dmin = −m`, m_j = 1. A sub-block of 16 of NVFP4 is a block b, and
//!   so are 32 values of Q1_0 and Q2_0.
//! - **Float.** Element i goes to lane i mod 8: `lane = fma(w_i, x_i, lane)`, ascending, the row
//!   padded with zeros to a multiple of eight.
//! - **Tree.** Lane i + lane i+4, then i + i+2, then i + i+1.
//!
//! A column range (a granule) is a dot product of its own whose blocks count from 0; the caller
//! adds partial results in index order.
//!
//! # Why this order
//!
//! A lane may hold a block of one row (matrix–vector) or a row of one block (matrix–matrix): both
//! give eight exact integers in a vector, so each kernel takes the arrangement that suits it. The
//! other order measured makes a lane a position within the block, as llama.cpp's AVX2 kernels do:
//! no sum across lanes, but an int32 vector for each row and token. GOP/s (a product and a sum are
//! two) of one thread with AVX2, weights in cache, fastest of interleaved rounds on a busy two-core
//! machine whose `maddubs` and `add` peak is 254; `cargo bench --bench kernels -- tokens`:
//!
//! | weights | tokens | Q4_K: this order | positions | | Q8_0: this order | positions | |
//! |---|---|---|---|---|---|---|---|
//! | 2048 × 768  | 1  | 54  | 44 | 1.23 | 43 | 38 | 1.15 |
//! |             | 4  | 113 | 56 | 2.02 | 56 | 52 | 1.08 |
//! |             | 32 | 147 | 62 | 2.38 | 70 | 52 | 1.34 |
//! | 768 × 2048  | 1  | 52  | 48 | 1.07 | 53 | 42 | 1.25 |
//! |             | 4  | 119 | 69 | 1.73 | 47 | 56 | 0.84 |
//! |             | 32 | 162 | 64 | 2.52 | 68 | 48 | 1.44 |
//! | 2048 × 4096 | 1  | 51  | 46 | 1.11 | 53 | 36 | 1.46 |
//! |             | 4  | 58  | 42 | 1.39 | 43 | 55 | 0.78 |
//! |             | 32 | 145 | 44 | 3.31 | 44 | 37 | 1.20 |
//! | 64 × 256    | 1  | 52  | 32 | 1.61 | 32 | 31 | 1.03 |
//! |             | 32 | 133 | 43 | 3.11 | 71 | 48 | 1.47 |
//!
//! Q8_0 at four tokens is the one loss, and it is the kernel's (unpacking eight rows costs what
//! two tokens cost), not the order's: the matrix–vector loop reaches 43 to 53 there.
//!
//! # Non-finite values
//!
//! `quantize` takes NaN and infinities as 0 in block formats (F32, F16 and BF16 keep them, F8_E4M3
//! keeps NaN and cuts off at 448) and returns how many it met, so that a converter can say so.
//! A block whose scale exceeds f16 (magnitudes above about 5·10⁵) stores an infinite scale; NVFP4
//! cuts off at 2688. Activations: see [`q8_0::quantize_activations`].

mod bits;
mod block;
pub mod e4m3;
mod fp4;
mod iq;
mod k;
mod legacy;
mod packing;
mod search;
mod ternary;

pub use bits::q1_0::BlockQ1_0;
pub use bits::q2_0::BlockQ2_0;
pub use block::{Block, Half, IntBlock, Over, Parts, Stored, blocks_of, blocks_of_mut};
pub use fp4::mxfp4::BlockMXFP4;
pub use fp4::nvfp4::BlockNVFP4;
pub use fp4::{e2m1, mxfp4, nvfp4};
pub use iq::iq1_m::BlockIQ1M;
pub use iq::iq1_s::BlockIQ1S;
pub use iq::iq2_s::BlockIQ2S;
pub use iq::iq2_xs::BlockIQ2XS;
pub use iq::iq2_xxs::BlockIQ2XXS;
pub use iq::iq3_s::BlockIQ3S;
pub use iq::iq3_xxs::BlockIQ3XXS;
pub use iq::iq4_nl::BlockIQ4NL;
pub use iq::iq4_xs::BlockIQ4XS;
pub use iq::{grids, iq4_nl};
pub use k::q2_k::BlockQ2K;
pub use k::q3_k::BlockQ3K;
pub use k::q4_k::BlockQ4K;
pub use k::q5_k::BlockQ5K;
pub use k::q6_k::BlockQ6K;
pub use k::{q8_k, scales as k_scales};
pub use legacy::q4_0::BlockQ4_0;
pub use legacy::q4_1::BlockQ4_1;
pub use legacy::q5_0::BlockQ5_0;
pub use legacy::q5_1::BlockQ5_1;
pub use legacy::q8_0;
pub use legacy::q8_0::BlockQ8_0;
pub use legacy::q8_1::BlockQ8_1;
pub use ternary::tq1_0::BlockTQ1_0;
pub use ternary::tq2_0::BlockTQ2_0;

use crate::gguf::TensorType;
use half::{bf16, f16};

/// Below this, an activation block is all zeros: 127/x must be finite.
pub const SMALLEST_ACTIVATION: f32 = 1.0 / (1u128 << 120) as f32;

/// Below this, a weight block is all zeros: no f16 scale could say it.
const SMALLEST_BLOCK: f32 = 1e-15;

/// Whether this build computes with the type.
pub fn is_supported(ty: TensorType) -> bool {
    use TensorType::*;
    #[rustfmt::skip] // one family a line
    let found = matches!(
        ty,
        F32 | F16 | BF16 | F8_E4M3
            | Q1_0 | Q2_0
            | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q8_1
            | Q2_K | Q3_K | Q4_K | Q5_K | Q6_K
            | IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S
            | IQ4_NL | IQ4_XS
            | TQ1_0 | TQ2_0
            | MXFP4 | NVFP4
    );
    found
}

/// Calls a generic function with the block type of a tensor type.
#[macro_export]
macro_rules! with_block {
    ($ty:expr, $call:ident $args:tt) => {
        match $ty {
            $crate::gguf::TensorType::Q1_0 => $call::<$crate::quant::BlockQ1_0> $args,
            $crate::gguf::TensorType::Q2_0 => $call::<$crate::quant::BlockQ2_0> $args,
            $crate::gguf::TensorType::NVFP4 => $call::<$crate::quant::BlockNVFP4> $args,
            ty => $crate::with_int_block!(ty, $call $args),
        }
    };
}

/// `with_block` for the types that are [`IntBlock`]s.
#[macro_export]
macro_rules! with_int_block {
    ($ty:expr, $call:ident $args:tt) => {
        match $ty {
            $crate::gguf::TensorType::Q4_0 => $call::<$crate::quant::BlockQ4_0> $args,
            $crate::gguf::TensorType::Q4_1 => $call::<$crate::quant::BlockQ4_1> $args,
            $crate::gguf::TensorType::Q5_0 => $call::<$crate::quant::BlockQ5_0> $args,
            $crate::gguf::TensorType::Q5_1 => $call::<$crate::quant::BlockQ5_1> $args,
            $crate::gguf::TensorType::Q8_0 => $call::<$crate::quant::BlockQ8_0> $args,
            $crate::gguf::TensorType::Q8_1 => $call::<$crate::quant::BlockQ8_1> $args,
            $crate::gguf::TensorType::Q2_K => $call::<$crate::quant::BlockQ2K> $args,
            $crate::gguf::TensorType::Q3_K => $call::<$crate::quant::BlockQ3K> $args,
            $crate::gguf::TensorType::Q4_K => $call::<$crate::quant::BlockQ4K> $args,
            $crate::gguf::TensorType::Q5_K => $call::<$crate::quant::BlockQ5K> $args,
            $crate::gguf::TensorType::Q6_K => $call::<$crate::quant::BlockQ6K> $args,
            $crate::gguf::TensorType::IQ4_NL => $call::<$crate::quant::BlockIQ4NL> $args,
            $crate::gguf::TensorType::IQ4_XS => $call::<$crate::quant::BlockIQ4XS> $args,
            $crate::gguf::TensorType::TQ1_0 => $call::<$crate::quant::BlockTQ1_0> $args,
            $crate::gguf::TensorType::TQ2_0 => $call::<$crate::quant::BlockTQ2_0> $args,
            $crate::gguf::TensorType::MXFP4 => $call::<$crate::quant::BlockMXFP4> $args,
            $crate::gguf::TensorType::IQ1_S => $call::<$crate::quant::BlockIQ1S> $args,
            $crate::gguf::TensorType::IQ1_M => $call::<$crate::quant::BlockIQ1M> $args,
            $crate::gguf::TensorType::IQ2_XXS => $call::<$crate::quant::BlockIQ2XXS> $args,
            $crate::gguf::TensorType::IQ2_XS => $call::<$crate::quant::BlockIQ2XS> $args,
            $crate::gguf::TensorType::IQ2_S => $call::<$crate::quant::BlockIQ2S> $args,
            $crate::gguf::TensorType::IQ3_XXS => $call::<$crate::quant::BlockIQ3XXS> $args,
            $crate::gguf::TensorType::IQ3_S => $call::<$crate::quant::BlockIQ3S> $args,
            other => panic!("{other} is no block format that this build computes with"),
        }
    };
}

/// Writes the values that `src` stores to `dst`.
///
/// # Panics
/// If the sizes do not fit each other or the type is not supported.
pub fn dequantize(ty: TensorType, src: &[u8], dst: &mut [f32]) {
    let bytes = ty.row_bytes(dst.len() as u64).expect("whole blocks");
    assert_eq!(src.len() as u64, bytes, "{} values of {ty}", dst.len());
    match ty {
        TensorType::F32 => {
            for (o, b) in dst.iter_mut().zip(src.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        TensorType::F16 => {
            for (o, b) in dst.iter_mut().zip(src.as_chunks::<2>().0) {
                *o = f16::from_le_bytes(*b).to_f32();
            }
        }
        TensorType::BF16 => {
            for (o, b) in dst.iter_mut().zip(src.as_chunks::<2>().0) {
                *o = bf16::from_le_bytes(*b).to_f32();
            }
        }
        TensorType::F8_E4M3 => {
            dst.iter_mut().zip(src).for_each(|(o, b)| *o = e4m3::to_f32(*b));
        }
        _ => with_block!(ty, dequantize_blocks(src, dst)),
    }
}

fn dequantize_blocks<B: Block>(src: &[u8], dst: &mut [f32]) {
    for (block, out) in blocks_of::<B>(src).iter().zip(dst.chunks_exact_mut(B::LEN)) {
        block.dequantize(out);
    }
}

/// Stores `src` (whole rows) in `dst`; returns how many values were NaN or infinite.
///
/// # Panics
/// If the sizes do not fit each other or the type is not supported.
pub fn quantize(ty: TensorType, src: &[f32], dst: &mut [u8]) -> usize {
    quantize_weighted(ty, src, None, src.len(), dst)
}

/// [`quantize`] with rows of `row_len`, where an error in column i counts `importance[i]` times
/// (not negative; the mean square of the activations that the column meets). Formats without a
/// search for their scales have no use for it.
///
/// # Panics
/// As `quantize`, and if `importance` is not as long as a row or rows are cut.
pub fn quantize_weighted(
    ty: TensorType,
    src: &[f32],
    importance: Option<&[f32]>,
    row_len: usize,
    dst: &mut [u8],
) -> usize {
    let bytes = ty.row_bytes(src.len() as u64).expect("whole blocks");
    assert_eq!(dst.len() as u64, bytes, "{} values of {ty}", src.len());
    if let Some(importance) = importance {
        assert_eq!(importance.len(), row_len, "an importance a column");
        assert!(src.len().is_multiple_of(row_len), "{} values in rows of {row_len}", src.len());
        assert!(row_len.is_multiple_of(ty.block_len()), "rows of {row_len} cut a block of {ty}");
    }
    match ty {
        TensorType::F32 => {
            for (v, b) in src.iter().zip(dst.as_chunks_mut::<4>().0) {
                *b = v.to_le_bytes();
            }
        }
        TensorType::F16 => {
            for (v, b) in src.iter().zip(dst.as_chunks_mut::<2>().0) {
                *b = f16::from_f32(*v).to_le_bytes();
            }
        }
        TensorType::BF16 => {
            for (v, b) in src.iter().zip(dst.as_chunks_mut::<2>().0) {
                *b = bf16::from_f32(*v).to_le_bytes();
            }
        }
        TensorType::F8_E4M3 => {
            src.iter().zip(dst).for_each(|(v, b)| *b = e4m3::nearest(*v));
        }
        _ => with_block!(ty, quantize_blocks(src, importance, dst)),
    }
    src.iter().filter(|v| !v.is_finite()).count()
}

fn quantize_blocks<B: Block>(src: &[f32], importance: Option<&[f32]>, dst: &mut [u8]) {
    let mut finite = [0f32; 256];
    // A row is a whole number of blocks, so a block's columns are consecutive.
    let mut columns = importance.map(|row| row.chunks_exact(B::LEN).cycle());
    for (block, x) in blocks_of_mut::<B>(dst).iter_mut().zip(src.chunks_exact(B::LEN)) {
        let finite = &mut finite[..B::LEN];
        for (f, v) in finite.iter_mut().zip(x) {
            *f = if v.is_finite() { *v } else { 0.0 };
        }
        *block = B::quantize(finite, columns.as_mut().and_then(|c| c.next()));
    }
}

/// `1/x`, or 0 where that is infinite.
#[inline]
fn finite_inverse(x: f32) -> f32 {
    let inverse = 1.0 / x;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// The largest magnitude; infinite or NaN if any value is. Compared as integers, which order
/// non-negative floats and put NaN above everything.
#[inline]
fn largest_magnitude(x: &[f32]) -> f32 {
    f32::from_bits(x.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0))
}

#[inline]
fn round_to_i8(x: &[f32], inverse: f32, qs: &mut [i8]) {
    for (q, v) in qs.iter_mut().zip(x) {
        *q = if inverse == 0.0 { 0 } else { (v * inverse).round_ties_even() as i8 };
    }
}

/// The fixed end of every dot product: halves added onto halves.
#[inline]
pub fn tree8(lanes: [f32; 8]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    let (a, b, c, d) = (a + e, b + f, c + g, d + h);
    let (a, b) = (a + c, b + d);
    a + b
}
