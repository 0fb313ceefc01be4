//! MXFP4 (OCP Microscaling Formats v1.0): 32 values as e2m1 floats with one power of two as scale;
//! 4.25 bits a weight. With doubled values (`e2m1`) the scale is `2^(e − 128)`. The standard's NaN,
//! e = 255, is 2¹²⁷ here as in ggml.

use super::e2m1::{self, values};
use crate::gguf::TensorType;
use crate::quant::block::{Block, IntBlock};
use crate::quant::packing::pack_nibbles;
use crate::quant::search;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockMXFP4 {
    pub e: u8,
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockMXFP4>() == 17);

/// `2^(e − 128)`; the first two are subnormal.
#[inline]
pub fn half_power(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e as u32 - 1) << 23 })
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockMXFP4 {
    const TYPE: TensorType = TensorType::MXFP4;
    const LEN: usize = 32;

    /// The scale that the standard names puts the largest value among the two largest codes, 4 and
    /// 6; where it lies above 6 or many values are small, a neighbour errs less.
    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let mut weights = [1f32; 32];
        search::importances(importance, &mut weights);
        // The exponent field of an f32 is floor(log2) + 127.
        let standard = (crate::quant::largest_magnitude(x).to_bits() >> 23) as i32 - 2;
        let (mut best, mut least) = (0, f32::INFINITY);
        for e in standard - 1..=standard + 1 {
            let e = e.clamp(0, 254) as u8;
            let error = e2m1::error(x, &weights, half_power(e));
            if error < least {
                (best, least) = (e, error);
            }
        }
        let inverse = crate::quant::finite_inverse(half_power(best));
        let codes: [u8; 32] = std::array::from_fn(|i| e2m1::nearest(x[i] * inverse));
        BlockMXFP4 { e: best, qs: pack_nibbles(&codes) }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = half_power(self.e);
        for (o, q) in out.iter_mut().zip(values(&self.qs)) {
            *o = d * q as f32;
        }
    }
}

impl IntBlock for BlockMXFP4 {
    const MINS: bool = false;
    const SUB: usize = 32;
    const LARGEST: usize = 12;
    const SIGNED: bool = true;
    type Stored = f32;

    #[inline]
    fn stored(&self) -> (f32, f32) {
        (half_power(self.e), 0.0)
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (values(&self.qs).zip(a).map(|(q, a)| q as i32 * *a as i32).sum(), 0)
    }
}
