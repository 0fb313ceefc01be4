//! Q8_0: 32 values as i8 with one f16 scale; 8.5 bits a weight. Also an activation format.

use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ8_0 {
    pub d: Half,
    pub qs: [i8; 32],
}

const _: () = assert!(size_of::<BlockQ8_0>() == 34);

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ8_0 {
    const TYPE: TensorType = TensorType::Q8_0;
    const LEN: usize = 32;

    fn quantize(x: &[f32], _importance: Option<&[f32]>) -> Self {
        let (d, qs) = round(x);
        BlockQ8_0 { d: Half::new(d), qs }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.get();
        for (o, q) in out.iter_mut().zip(self.qs) {
            *o = q as f32 * d;
        }
    }
}

impl IntBlock for BlockQ8_0 {
    const MINS: bool = false;
    const SUB: usize = 32;
    const LARGEST: usize = 128;
    const SIGNED: bool = true;
    type Stored = f16;

    #[inline]
    fn stored(&self) -> (f16, f16) {
        (self.d.to_f16(), f16::ZERO)
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (self.qs.iter().zip(a).map(|(q, a)| *q as i32 * *a as i32).sum(), 0)
    }
}

/// (scale, 32 values in units of it): the largest magnitude becomes 127. 254 steps leave a search
/// nothing to gain.
pub fn round(x: &[f32]) -> (f32, [i8; 32]) {
    let d = crate::quant::largest_magnitude(x) / 127.0;
    let inverse = crate::quant::finite_inverse(d);
    (d, std::array::from_fn(|i| (x[i] * inverse).round() as i8))
}

/// Quantises one block of activations; returns the scale. Unlike weights, ties round to even
/// (what the vector units do in one instruction) and the inverse scale is `127/max`. The scale is
/// rounded to f16 as in ggml, but kept as f32 since nothing stores it.
///
/// A block with a NaN or an infinity gets scale NaN and zeros: what is computed from it is NaN,
/// never a plausible number. A block whose largest magnitude is below 2⁻¹²⁰ gets zeros.
pub fn quantize_activations(x: &[f32], qs: &mut [i8], sum: &mut i16) -> f32 {
    let largest = crate::quant::largest_magnitude(x);
    let (scale, inverse) = activation_scale(largest);
    crate::quant::round_to_i8(x, inverse, qs);
    *sum = qs.iter().map(|q| *q as i16).sum();
    scale
}

/// (scale rounded to f16, inverse of the unrounded one) by the largest magnitude of a block.
#[inline]
pub fn activation_scale(largest: f32) -> (f32, f32) {
    if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < crate::quant::SMALLEST_ACTIVATION {
        (0.0, 0.0)
    } else {
        (half::f16::from_f32(largest / 127.0).to_f32(), 127.0 / largest)
    }
}
