//! Q4_0: 32 values as 4-bit integers around 8 with one f16 scale; 4.5 bits a weight.

use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use crate::quant::packing::{nibbles, pack_nibbles};
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ4_0 {
    pub d: Half,
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ4_0>() == 18);

impl BlockQ4_0 {
    /// The block whose `qs` are these halves, as little-endian numbers.
    #[inline]
    pub fn of_halves(d: Half, halves: [u64; 2]) -> Self {
        let mut qs = [0; 16];
        qs[..8].copy_from_slice(&halves[0].to_le_bytes());
        qs[8..].copy_from_slice(&halves[1].to_le_bytes());
        BlockQ4_0 { d, qs }
    }

    fn values(&self) -> impl Iterator<Item = i32> + '_ {
        nibbles(&self.qs).map(|q| q as i32 - 8)
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ4_0 {
    const TYPE: TensorType = TensorType::Q4_0;
    const LEN: usize = 32;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let (d, codes) = super::plain::centred(x, importance, 8.0);
        BlockQ4_0 { d, qs: pack_nibbles(&codes) }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.get();
        for (o, q) in out.iter_mut().zip(self.values()) {
            *o = d * q as f32;
        }
    }
}

impl IntBlock for BlockQ4_0 {
    const MINS: bool = false;
    const SUB: usize = 32;
    const LARGEST: usize = 8;
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
