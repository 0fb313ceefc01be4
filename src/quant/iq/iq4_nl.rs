//! IQ4_NL: 32 values as 4-bit indices into a table of sixteen integers, denser around zero, with
//! one f16 scale; 4.5 bits a weight.

use super::table;
use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use crate::quant::packing::{nibbles, pack_nibbles};
use crate::quant::search;
use half::f16;

/// The sixteen values that a code stands for, of IQ4_NL and IQ4_XS.
pub const VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockIQ4NL {
    pub d: Half,
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockIQ4NL>() == 18);

/// The codes of 32 values in units of `scale`.
pub fn codes(x: &[f32; 32], scale: f32) -> [u8; 16] {
    let inverse = crate::quant::finite_inverse(scale);
    pack_nibbles(&table::nearest(&VALUES, x, inverse))
}

/// The 32 values of 16 bytes of codes.
pub fn values(qs: &[u8]) -> impl Iterator<Item = i8> + '_ {
    nibbles(qs).map(|q| VALUES[q as usize])
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockIQ4NL {
    const TYPE: TensorType = TensorType::IQ4_NL;
    const LEN: usize = 32;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let x: &[f32; 32] = x.try_into().expect("32 values");
        let mut weights = [0f32; 32];
        search::weights(x, importance, &mut weights);
        let d = Half::new(table::scale(&VALUES, x, &weights));
        BlockIQ4NL { d, qs: codes(x, d.get()) }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.get();
        for (o, q) in out.iter_mut().zip(values(&self.qs)) {
            *o = d * q as f32;
        }
    }
}

impl IntBlock for BlockIQ4NL {
    const MINS: bool = false;
    const SUB: usize = 32;
    const LARGEST: usize = 127;
    const SIGNED: bool = true;
    type Stored = f16;

    #[inline]
    fn stored(&self) -> (f16, f16) {
        (self.d.to_f16(), f16::ZERO)
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        (values(&self.qs).zip(a).map(|(q, a)| q as i32 * *a as i32).sum(), 0)
    }
}
