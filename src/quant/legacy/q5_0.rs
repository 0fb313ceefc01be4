//! Q5_0: 32 values as 5-bit integers around 16 with one f16 scale; 5.5 bits a weight.

use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use crate::quant::packing::{five_bits, pack_five_bits};
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ5_0 {
    pub d: Half,
    pub qh: [u8; 4],
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ5_0>() == 22);

impl BlockQ5_0 {
    fn values(&self) -> impl Iterator<Item = i32> + '_ {
        five_bits(&self.qh, &self.qs).map(|q| q as i32 - 16)
    }
}

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ5_0 {
    const TYPE: TensorType = TensorType::Q5_0;
    const LEN: usize = 32;

    fn quantize(x: &[f32], importance: Option<&[f32]>) -> Self {
        let (d, codes) = super::plain::centred(x, importance, 16.0);
        let (qh, qs) = pack_five_bits(&codes);
        BlockQ5_0 { d, qh, qs }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.get();
        for (o, q) in out.iter_mut().zip(self.values()) {
            *o = d * q as f32;
        }
    }
}

impl IntBlock for BlockQ5_0 {
    const MINS: bool = false;
    const SUB: usize = 32;
    const LARGEST: usize = 16;
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
