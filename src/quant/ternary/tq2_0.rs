//! TQ2_0: 256 values −1, 0 and 1 as 2-bit integers with one f16 scale; 2.0625 bits a weight.
//! `x = d·(q − 1)`; no quantiser writes q = 3, which is 2.

use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use crate::quant::packing::{pack_two_bits, two_bits};
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockTQ2_0 {
    pub qs: [u8; 64],
    pub d: Half,
}

const _: () = assert!(size_of::<BlockTQ2_0>() == 66);

impl BlockTQ2_0 {
    fn values(&self) -> impl Iterator<Item = i32> + '_ {
        (0..256).map(|k| two_bits(&self.qs, k) as i32 - 1)
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockTQ2_0 {
    const TYPE: TensorType = TensorType::TQ2_0;
    const LEN: usize = 256;

    fn quantize(x: &[f32], _importance: Option<&[f32]>) -> Self {
        let (d, trits) = trits(x);
        BlockTQ2_0 { qs: pack_two_bits(&trits), d }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.get();
        for (o, q) in out.iter_mut().zip(self.values()) {
            *o = d * q as f32;
        }
    }
}

impl IntBlock for BlockTQ2_0 {
    const MINS: bool = false;
    const SUB: usize = 32;
    const LARGEST: usize = 2;
    const SIGNED: bool = true;
    type Stored = f16;

    #[inline]
    fn stored(&self) -> (f16, f16) {
        (self.d.to_f16(), f16::ZERO)
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (self.values().zip(a).map(|(q, a)| q * *a as i32).sum(), 0)
    }
}

/// The largest magnitude, and N values in units of it, rounded, plus 1. There is nothing to
/// search: the formats are for weights that are ternary already.
pub fn trits<const N: usize>(x: &[f32]) -> (Half, [u8; N]) {
    let largest = crate::quant::largest_magnitude(x);
    let inverse = crate::quant::finite_inverse(largest);
    (Half::new(largest), std::array::from_fn(|k| ((x[k] * inverse).round() + 1.0) as u8))
}
