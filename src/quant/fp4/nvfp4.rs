//! NVFP4: 64 values in four sub-blocks of 16 as e2m1 floats, each with an e4m3 scale; 4.5 bits a
//! weight. The values are kept doubled (`e2m1`) and the scales halved.
//! Byte j of `d` is the scale of sub-block j, whose codes are bytes 8j to 8j + 7 of `qs`: byte i
//! holds value i in its low half and value i + 8 in its high half.
//!
//! The scales have no common unit in which an int32 could hold the sum over four sub-blocks, so
//! the format is no `IntBlock`: in "One arithmetic" each sub-block is a block b of its own, with
//! `d_a` of the 32 activations that it lies in.

use super::e2m1::{self, values};
use crate::gguf::TensorType;
use crate::quant::block::Block;
use crate::quant::packing::pack_nibbles;
use crate::quant::search;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockNVFP4 {
    pub d: [u8; 4],
    pub qs: [u8; 32],
}

const _: () = assert!(size_of::<BlockNVFP4>() == 36);

/// Half the e4m3 number (four bits of exponent with bias 7, three of mantissa; the sign bit is
/// ignored). The NaN 0x7f is 0, as in ggml.
#[inline]
pub fn half_e4m3(x: u8) -> f32 {
    let (exponent, mantissa) = (x >> 3 & 15, x & 7);
    if x == 0x7f {
        0.0
    } else if exponent == 0 {
        mantissa as f32 / 1024.0
    } else {
        // 2^(exponent − 8)·(1 + mantissa / 8).
        f32::from_bits((exponent as u32 + 119) << 23 | (mantissa as u32) << 20)
    }
}

/// 448.
const LARGEST_E4M3: u8 = 0x7e;

/// The e4m3 number nearest to `x`, which is not negative.
fn nearest_e4m3(x: f32) -> u8 {
    if x < 1.0 / 64.0 {
        // Subnormal numbers are multiples of 2⁻⁹; 8 of them are the first normal one.
        return (x * 512.0).round() as u8;
    }
    let rounded = (x.to_bits() + (1 << 19)) >> 20;
    rounded.saturating_sub(120 << 3).min(LARGEST_E4M3 as u32) as u8
}

impl BlockNVFP4 {
    /// The doubled values of sub-block j.
    pub fn values(&self, j: usize) -> impl Iterator<Item = i8> + '_ {
        values(&self.qs[8 * j..][..8])
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockNVFP4 {
    const TYPE: TensorType = TensorType::NVFP4;
    const LEN: usize = 64;

    /// The scale that makes the largest value 6, the largest code, and its neighbours, up to where
    /// the largest value is below 4.
    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let mut weights = [1f32; 64];
        search::importances(importance, &mut weights);
        let mut block = BlockNVFP4 { d: [0; 4], qs: [0; 32] };
        for (j, x) in x.chunks_exact(16).enumerate() {
            let weights = &weights[16 * j..][..16];
            let usual = nearest_e4m3(crate::quant::largest_magnitude(x) / 6.0) as i32;
            let (mut best, mut least) = (0, f32::INFINITY);
            for d in usual - 4..=usual + 6 {
                let d = d.clamp(0, LARGEST_E4M3 as i32) as u8;
                let error = e2m1::error(x, weights, half_e4m3(d));
                if error < least {
                    (best, least) = (d, error);
                }
            }
            block.d[j] = best;
            let inverse = crate::quant::finite_inverse(half_e4m3(best));
            let codes: [u8; 16] = std::array::from_fn(|i| e2m1::nearest(x[i] * inverse));
            block.qs[8 * j..][..8].copy_from_slice(&pack_nibbles::<8>(&codes));
        }
        block
    }

    fn dequantize(&self, out: &mut [f32]) {
        for (j, out) in out.chunks_exact_mut(16).enumerate() {
            let d = half_e4m3(self.d[j]);
            for (o, q) in out.iter_mut().zip(self.values(j)) {
                *o = d * q as f32;
            }
        }
    }
}
