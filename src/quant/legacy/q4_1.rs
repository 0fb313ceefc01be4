//! Q4_1: 32 values as 4-bit integers with an f16 scale and an f16 offset; 5 bits a weight.
//! `x = d·q + m`, so `dmin = −m`.

use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use crate::quant::packing::{nibbles, pack_nibbles};
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ4_1 {
    pub d: Half,
    pub m: Half,
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ4_1>() == 20);

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ4_1 {
    const TYPE: TensorType = TensorType::Q4_1;
    const LEN: usize = 32;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let (d, m, codes) = super::plain::offset(x, importance, 15.0);
        BlockQ4_1 { d, m, qs: pack_nibbles(&codes) }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let (d, m) = (self.d.get(), self.m.get());
        for (o, q) in out.iter_mut().zip(nibbles(&self.qs)) {
            *o = d * q as f32 + m;
        }
    }
}

impl IntBlock for BlockQ4_1 {
    const MINS: bool = true;
    const SUB: usize = 32;
    const LARGEST: usize = 15;
    const SIGNED: bool = false;
    type Stored = f16;

    #[inline]
    fn stored(&self) -> (f16, f16) {
        (self.d.to_f16(), -self.m.to_f16())
    }

    fn int_dot(&self, a: &[i8]) -> (i32, i32) {
        let isum = nibbles(&self.qs).zip(a).map(|(q, a)| q as i32 * *a as i32).sum();
        (isum, a.iter().map(|a| *a as i32).sum())
    }
}
