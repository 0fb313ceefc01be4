//! Q8_1: Q8_0 with `s = d·Σq` beside the scale; 9 bits a weight. ggml makes it of activations for
//! the formats with offsets. As weights it is Q8_0: nothing reads s.

use crate::gguf::TensorType;
use crate::quant::block::{Block, Half, IntBlock};
use half::f16;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockQ8_1 {
    pub d: Half,
    pub s: Half,
    pub qs: [i8; 32],
}

const _: () = assert!(size_of::<BlockQ8_1>() == 36);

// SAFETY: `repr(C)` of bytes only.
unsafe impl Block for BlockQ8_1 {
    const TYPE: TensorType = TensorType::Q8_1;
    const LEN: usize = 32;

    fn quantize(x: &[f32], _importance: Option<&[f32]>) -> Self {
        let (d, qs) = super::q8_0::round(x);
        let sum: i32 = qs.iter().map(|q| *q as i32).sum();
        BlockQ8_1 { d: Half::new(d), s: Half::new(d * sum as f32), qs }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.get();
        for (o, q) in out.iter_mut().zip(self.qs) {
            *o = q as f32 * d;
        }
    }
}

impl IntBlock for BlockQ8_1 {
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
